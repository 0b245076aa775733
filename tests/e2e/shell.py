"""Run the real command line as a user does, and look at the processes it leaves, through /proc."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

WORKER = "shardwise.launch.worker"


@dataclass
class Done:
    """What a command that has ended left behind."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything, for the message of a failed assertion."""
        return (
            f"exit {self.code} after {self.seconds:.1f} s\n--- out\n{self.out}--- err\n{self.err}"
        )


def environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command whose temporary files all lie under `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    given = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    return {
        **given,
        "TMPDIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        **(extra or {}),
    }


def start(
    folder: Path, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `shardwise ARGUMENTS` with its output in files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise.cli", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=environment(folder, env),
            text=True,
        )


def finish(process: subprocess.Popen[str], folder: Path, limit: float, began: float) -> Done:
    """Wait for a command; past the limit its processes are killed and the test fails."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        kill_all(folder)
        output = (folder / "stdout").read_text() + (folder / "stderr").read_text()
        raise AssertionError(f"still running after {limit} s:\n{output}") from None
    return Done(
        code=code,
        out=(folder / "stdout").read_text(encoding="utf-8"),
        err=(folder / "stderr").read_text(encoding="utf-8"),
        seconds=time.monotonic() - began,
    )


def shardwise(
    folder: Path,
    *arguments: str | Path,
    limit: float = 60,
    env: Mapping[str, str] | None = None,
) -> Done:
    """Run `shardwise ARGUMENTS` in `folder` to its end."""
    began = time.monotonic()
    return finish(start(folder, *arguments, env=env), folder, limit, began)


def processes(folder: Path, having: str = "shardwise") -> dict[int, str]:
    """Processes whose command line names both `having` and `folder`, by id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if having in line and f"{folder}/" in line:
                found[int(entry.name)] = line
    return found


def workers(folder: Path) -> dict[int, int]:
    """The processes of a job under `folder`, by rank."""
    found: dict[int, int] = {}
    for pid in processes(folder, WORKER):
        with suppress(OSError):
            for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if item.startswith(b"RANK="):
                    found[int(item[5:])] = pid
    return found


def wait_for(condition: Callable[[], object], limit: float, what: str) -> None:
    """Wait until a condition holds; fail past the limit."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.05)


def assert_none_left(folder: Path, limit: float = 0.0) -> None:
    """Fail if a process of a job under `folder` still runs after `limit` seconds."""
    deadline = time.monotonic() + limit
    while (left := processes(folder, WORKER)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"still running: {left}"


def kill_all(folder: Path) -> dict[int, str]:
    """Kill what still runs under `folder`; returns what that was."""
    left = processes(folder)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


@contextmanager
def running(process: subprocess.Popen[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that may run during the block; nothing of it runs after."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        if process.poll() is None:
            process.kill()
            process.wait()
        kill_all(folder)


def write_plan(path: Path, model: Path, layout: Mapping[str, int], **sections: Any) -> Path:
    """A plan file for full fine-tuning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = {"model": str(model), "task": "full", "layout": dict(layout), **sections}
    path.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return path


def write_rows(path: Path, num_rows: int = 16, first: int = 0) -> Path:
    """A data file of small sums."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} + {3 * n} ="},
                {"role": "assistant", "content": f"{4 * n}, of course{'!' * (n % 5)}"},
            ]
        }
        for n in range(first, first + num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def listed_checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints that say they are complete; fails if one of them is not."""
    steps: list[int] = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        if "partial" in folder.name or not (folder / "state.json").exists():
            continue
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        assert folder.name == f"step-{state['step']:06d}"
        for name, size in state["files"].items():
            assert (folder / name).stat().st_size == size, f"{folder / name} is not whole"
        names = {name.split("/")[0] for name in state["files"]}
        assert {"model", "optimizer", "plan.yaml"} <= names
        steps.append(state["step"])
    return steps
