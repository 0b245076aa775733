#!/usr/bin/env bash
# The main job on a real model, step by step; each step is a command that you can type yourself.
# Run by `make quickstart`, or directly where shardwise[quickstart] is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=quickstart-output
STEPS=24
DATA=examples/data
SERVER=
started=$(date +%s)

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '\033[36m$ %s\033[0m\n' "$*"; "$@"; }
stop_server() {
  if [ -n "$SERVER" ]; then
    kill "$SERVER" 2>/dev/null || true
    wait "$SERVER" 2>/dev/null || true
    SERVER=
  fi
}
trap stop_server EXIT
trap 'exit 130' INT TERM

if [ -e "$OUT" ] && [ ! -e "$OUT/.made-by-quickstart" ]; then
  echo "$OUT is there and was not made by the quick start; move it away first" >&2
  exit 2
fi
rm -rf "$OUT"
mkdir "$OUT"
touch "$OUT/.made-by-quickstart"

say "1. A real model: SmolLM2-135M-Instruct (134.5 M parameters, 9 heads, 3 KV heads)"
run python examples/get_smollm2.py
MODEL=$(python examples/get_smollm2.py | tail -n 1)

say "2. How fast are two processes on this machine?"
run shardwise probe --processes 2 --out "$OUT/cluster.yaml"

say "3. Does it fit? Two CPU devices with 2 GiB each."
run shardwise plan "$MODEL" --gpus cpu:2 --memory 2 --seq-len 160 \
  --global-batch 4 --micro-batch 2 --cluster "$OUT/cluster.yaml" \
  --set train.learning_rate=2e-4 --set "train.max_steps=$STEPS" --out "$OUT/plan.yaml"

say "4. Fine-tune it on two processes, sharded (ZeRO-3)"
run shardwise train "$OUT/plan.yaml" --data $DATA/quickstart_train.jsonl \
  --eval-data $DATA/quickstart_eval.jsonl --out "$OUT/run"

say "5. A plain Hugging Face directory, checked with plain transformers"
run shardwise export "$OUT/run" --out "$OUT/kapal-helpdesk" --dtype fp32 --check

say "6. Serve it on three processes (tensor parallel) and ask it a question"
PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
printf '\033[36m$ shardwise serve %s --layout tp=3 --port %s &\033[0m\n' "$OUT/kapal-helpdesk" "$PORT"
shardwise serve "$OUT/kapal-helpdesk" --layout tp=3 --port "$PORT" --set serve.context=1024 &
SERVER=$!
for _ in $(seq 240); do
  python - "$PORT" <<'PY' 2>/dev/null && break
import sys, urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
PY
  kill -0 "$SERVER" 2>/dev/null || { echo "the server ended"; exit 1; }
  sleep 0.5
done
run python examples/ask.py "My parcel is lost. What do you pay?" --url "http://127.0.0.1:$PORT/v1"
stop_server

say "7. Planned against measured"
run shardwise report "$OUT/run"
printf '\ndone in %d s; everything is in %s\n' "$(($(date +%s) - started))" "$OUT"
