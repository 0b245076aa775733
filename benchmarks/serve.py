"""Serve a model to many clients, beside other servers, side by side in one run.

    python benchmarks/serve.py ./model --peers hf --concurrency 1,8,32 --rounds 3 --json result.json
    python benchmarks/serve.py ./model --peers hf,vllm --vllm-python ~/vllm/bin/python
    python benchmarks/serve.py ./model --peers llamacpp --llama-server llama-server --gguf m.gguf

Every round starts each server once, in an order that rotates, asks it for completions as the
OpenAI API streams them (greedy, `--output-len` tokens whatever the model would end at), and stops
it. Figures are medians over rounds: output tokens a second of the whole load, seconds to the first
token (TTFT), milliseconds of a later one (TPOT), and the largest proportional memory of the
server's processes. The ratio is Shardwise's tokens a second to the server's; above 1, Shardwise
does better. `hf` ends answers where the model does: its tokens are counted as they are.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMANDS = {
    "shardwise": "{python} -m shardwise.cli serve {model} --port {port} {layout} "
    "--set serve.context={context} --set precision.compute={dtype}",
    "hf": "{python_bin}/transformers serve {model} --continuous-batching "
    "--cb-max-batch-tokens 512 --cb-num-blocks {hf_blocks} --device cpu --dtype {torch_dtype} "
    "--attn-implementation sdpa --port {port}",
    "vllm": "{vllm_python} -m vllm.entrypoints.openai.api_server --model {model} --port {port} "
    "--dtype {torch_dtype} --max-model-len {context} --max-num-seqs 32 --enforce-eager "
    "--no-enable-prefix-caching {vllm_layout}",
    "llamacpp": "{llama_server} -m {gguf} --port {port} --host 127.0.0.1 -np 32 -c {all_context} "
    "-kvu --no-cache-prompt --no-webui -t {threads} -tb {threads}",
}
"""how a server is started; what is in braces is known or an option"""
READY_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one server did under one load in one round."""

    server: str
    concurrency: int
    tokens_per_s: float
    ttft_s: float
    tpot_s: float
    peak_mib: float
    num_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print medians and ratios, write the JSON; returns the exit code."""
    options = _parse(arguments)
    servers = ["shardwise", *[name for name in options.peers.split(",") if name]]
    unknown = sorted(set(servers) - set(COMMANDS))
    if unknown:
        print(f"--peers {','.join(unknown)}: known are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    loads = [int(text) for text in options.concurrency.split(",")]
    readings: list[Reading] = []
    try:
        for number in range(options.rounds):
            turn = number % len(servers)
            for name in servers[turn:] + servers[:turn]:
                with _server(name, options) as (port, process):
                    for load in loads:
                        reading = _measure(name, port, process, load, options)
                        readings.append(reading)
                        print(f"round {number + 1}: {reading}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; what has been measured:")
    rows = _rows(readings, servers, loads)
    _print(rows)
    if options.json:
        result = {"options": vars(options), "rows": rows, "readings": [asdict(r) for r in readings]}
        Path(options.json).write_text(json.dumps(result, indent=1, default=str), encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory with config.json and safetensors files")
    parser.add_argument("--peers", default="hf", help="hf, vllm, llamacpp")
    parser.add_argument("--concurrency", default="1,8,32", help="requests at a time")
    parser.add_argument("--requests", type=int, default=32, help="of each load (one: a quarter)")
    parser.add_argument("--prompt-len", type=int, default=128, help="mean tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--tp", type=int, default=1, help="processes of Shardwise and of vLLM")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vllm-python", default="python", help="of an environment with vLLM")
    parser.add_argument("--llama-server", default="llama-server")
    parser.add_argument("--gguf", default="", help="the model as llama.cpp reads it")
    parser.add_argument("--json", help="file for all readings")
    return parser.parse_args(arguments)


@contextmanager
def _server(
    name: str, options: argparse.Namespace
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A running server; nothing is left of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = COMMANDS[name].format(
        **{**vars(options), "model": Path(options.model).resolve()},
        python=sys.executable,
        python_bin=Path(sys.executable).parent,
        port=port,
        torch_dtype={"bf16": "bfloat16", "fp32": "float32"}[options.dtype],
        layout=f"--layout tp={options.tp}" if options.tp > 1 else "",
        vllm_layout=f"-tp {options.tp}" if options.tp > 1 else "",
        hf_blocks=32 * options.context // 256,
        all_context=32 * options.context,
    )
    log = Path(f"serve-{name}.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            shlex.split(command), stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start; see {log}")
            time.sleep(0.5)
        yield port, process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)


def _is_ready(port: int) -> bool:
    with (
        suppress(OSError, http.client.HTTPException),
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as line,
    ):
        line.request("GET", "/health")
        return line.getresponse().status == 200
    return False


def _measure(
    name: str,
    port: int,
    process: subprocess.Popen[bytes],
    load: int,
    options: argparse.Namespace,
) -> Reading:
    number = options.requests if load > 1 else max(1, options.requests // 4)
    model = str(Path(options.model).resolve()) if name in ("hf", "vllm") else _name(port)
    chance = random.Random(load)
    words = ["the", "a", "river", "house", "seven", "runs", "under", "light", "old", "paper"]
    sizes = [
        chance.randint(options.prompt_len // 2, options.prompt_len * 3 // 2) for _ in range(number)
    ]
    prompts = [" ".join(chance.choice(words) for _ in range(size)) for size in sizes]
    _ask(name, port, model, "a river", options)  # what is made at the first call
    done, peak = threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.25):
            peak[0] = max(peak[0], _proportional_mib(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        answers = list(pool.map(lambda p: _ask(name, port, model, p, options), prompts))
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    written = sum(tokens for _, _, tokens in answers)
    later = [(end - first) / (tokens - 1) for first, end, tokens in answers if tokens > 1]
    return Reading(
        server=name,
        concurrency=load,
        tokens_per_s=written / seconds,
        ttft_s=statistics.median(first for first, _, _ in answers),
        tpot_s=statistics.median(later) if later else float("nan"),
        peak_mib=peak[0],
        num_tokens=written,
    )


def _name(port: int) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
        line.request("GET", "/v1/models")
        return str(json.loads(line.getresponse().read())["data"][0]["id"])


def _ask(
    name: str, port: int, model: str, prompt: str, options: argparse.Namespace
) -> tuple[float, float, int]:
    """Seconds to the first token and to the last one, and how many there were."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if name != "hf":
        body["ignore_eos"] = True
    first, chunks, told = None, 0, None
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=900)) as line:
        began = time.perf_counter()
        line.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = line.getresponse()
        if response.status != 200:
            raise SystemExit(f"{name}: HTTP {response.status}: {response.read()[:300]!r}")
        for row in response:
            data = row.removeprefix(b"data: ").strip()
            if not row.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            told = (event.get("usage") or {}).get("completion_tokens", told)
            if event.get("choices") and event["choices"][0].get("text"):
                first = first or time.perf_counter() - began
                chunks += 1
        end = time.perf_counter() - began
    return first or end, end, told or chunks


def _proportional_mib(pid: int) -> float:
    """Memory of a process and all below it; what they share is counted once."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        with suppress(OSError):
            for child in Path(f"/proc/{one}/task/{one}/children").read_text().split():
                todo.append(int(child))
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def _rows(
    readings: Sequence[Reading], servers: Sequence[str], loads: Sequence[int]
) -> list[dict[str, Any]]:
    rows = []
    for load in loads:
        for server in servers:
            own = [r for r in readings if (r.server, r.concurrency) == (server, load)]
            if not own:
                continue
            names = ("tokens_per_s", "ttft_s", "tpot_s", "peak_mib")
            median = {name: statistics.median(getattr(r, name) for r in own) for name in names}
            rows.append({"concurrency": load, "server": server, "rounds": len(own), **median})
    for row in rows:
        key = ("shardwise", row["concurrency"])
        ours = [other for other in rows if (other["server"], other["concurrency"]) == key]
        row["ratio"] = ours[0]["tokens_per_s"] / row["tokens_per_s"] if ours else None
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'at a time':>9} {'server':10} {'tokens/s':>9} {'ratio':>6} {'TTFT s':>7} "
        f"{'TPOT ms':>8} {'MiB':>7}"
    )
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['concurrency']:>9} {row['server']:10} {row['tokens_per_s']:>9.1f} {ratio:>6} "
            f"{row['ttft_s']:>7.2f} {1000 * row['tpot_s']:>8.1f} {row['peak_mib']:>7.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
