"""Training is killed at random moments, again and again; nothing is lost but what was not saved."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.shell import (
    assert_none_left,
    finish,
    kill_all,
    listed_checkpoints,
    metrics,
    running,
    shardwise,
    start,
    wait_for,
    workers,
    write_plan,
)

NUM_KILLS = int(os.environ.get("NUM_KILLS", "3"))
"""`make kill-test` asks for twenty"""
SLOW_SAVES = """
import os, time

def slowly(descriptor, fsync=os.fsync):
    time.sleep(0.03)
    fsync(descriptor)

os.fsync = slowly
"""
"""half of the time of this training is spent in saves, so that many of the kills meet one"""
TRAIN = {
    "seq_len": 64,
    "global_batch": 4,
    "micro_batch": 2,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "epochs": 200,
    "save_every": 1,
    "keep": 3,
}
LOADED = "each rank has loaded its shards"


def saved(checkpoint: Path) -> dict[str, bytes]:
    """What every rank has written of a checkpoint's tensors, weights and moments."""
    return {
        f"{file.relative_to(checkpoint)}: {name}": tensor.numpy().tobytes()
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * NUM_KILLS)
def test_training_survives_being_killed(tmp_path: Path, ll: Path, rows: Path) -> None:
    """The command or one of its ranks, while it trains or saves. Every resume continues from the
    newest complete checkpoint, and the end is bitwise that of a run that nobody has touched."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    choose = random.Random(seed)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW_SAVES)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    plan = write_plan(tmp_path / "plan.yaml", ll, {"fsdp": 2}, train={**TRAIN, "max_steps": 500})
    run, data = tmp_path / "run", ["--data", rows]
    newest = 0
    for _ in range(NUM_KILLS):
        more = ["--resume"] if newest else []
        process = start(
            tmp_path, "train", plan, *data, "--out", run, *more, env={"PYTHONPATH": path}
        )
        began = time.monotonic()
        with running(process, tmp_path):
            wait_for(lambda: LOADED in (tmp_path / "stdout").read_text(), 40, LOADED)
            text = (tmp_path / "stdout").read_text()
            assert not newest or f"continuing after step {newest} of 500" in text
            time.sleep(choose.uniform(0.2, 4.0))
            ranks = workers(tmp_path)
            victim = choose.choice([process.pid, ranks[0], ranks[1]])
            os.kill(victim, signal.SIGKILL)
            assert finish(process, tmp_path, 40, began).code != 0
        assert_none_left(tmp_path, 10)
        kill_all(tmp_path)
        complete = listed_checkpoints(run)
        assert len(complete) <= 4  # of three that stay and the one that is new
        assert not newest or complete[-1] >= newest, "a complete checkpoint was lost"
        newest = complete[-1] if complete else 0
    assert newest, "nothing was ever saved"
    last = newest + 1
    ends = ["--set", f"train.max_steps={last}"]
    done = shardwise(tmp_path, "train", plan, *data, "--out", run, "--resume", *ends)
    assert (done.code, done.err) == (0, ""), done.text
    assert [record["step"] for record in metrics(run)] == list(range(1, last + 1))
    whole = tmp_path / "untouched" / "run"
    ends += ["--set", "train.keep=1"]
    done = shardwise(tmp_path, "train", plan, *data, "--out", whole, *ends, limit=120)
    assert (done.code, done.err) == (0, ""), done.text
    name = f"checkpoints/step-{last:06d}"
    ours, theirs = saved(run / name), saved(whole / name)
    assert [key for key, content in theirs.items() if ours.get(key) != content] == []
    assert ours.keys() == theirs.keys()
