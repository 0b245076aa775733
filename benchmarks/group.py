"""Run one engine on a fresh group of processes, with a time limit, and leave none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.workload import NUM_RANKS
from shardwise.launch.local import ALLOCATOR

ROOT = Path(__file__).parents[1]
ALLOCATORS: dict[str, dict[str, str]] = {
    "ours": ALLOCATOR,
    "default": {},
}
_POLL_S = 0.05


class GroupFailed(Exception):
    """A rank failed or the group took too long; the text holds the end of its output."""


def environment(
    rank: int, allocator: str, device: str, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of one rank.

    Args:
        base: what it starts from; None: this process's.
    """
    given = dict(os.environ if base is None else base)
    for name in ALLOCATORS["ours"]:  # the row says which allocator it is, not the user's shell
        given.pop(name, None)
    threads = max(1, (os.cpu_count() or 1) // NUM_RANKS)
    if device == "cpu":
        given["DS_ACCELERATOR"] = "cpu"
    return {
        **given,
        **ALLOCATORS[allocator],
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])]),
    }


def run_group(
    run: Mapping[str, Any], *, allocator: str, device: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Run one engine; returns what each rank measured.

    Args:
        run: the fields of `benchmarks.run.Run`, but for the folder and the device.

    Raises:
        GroupFailed: a rank failed, or time was over; every process has been killed.
    """
    with TemporaryDirectory(prefix="train-step-") as name:
        folder = Path(name)
        file = folder / "run.json"
        file.write_text(json.dumps({**run, "device": device, "folder": name}))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(NUM_RANKS):
                env = environment(rank, allocator, device)
                processes.append(_start(file, folder / f"{rank}.log", env))
            _wait(processes, folder, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                _kill(process)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def _start(file: Path, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rank", str(file)],
            stdin=subprocess.PIPE,  # held open: its end tells the rank that this process is gone
            stdout=output,
            stderr=output,
            env=env,
            cwd=log.parent,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(0.5)  # let the rank that failed first finish writing
            break
        if time.monotonic() > deadline:
            raise GroupFailed(f"time is over\n{_output(folder)}")
        time.sleep(_POLL_S)
    codes = [process.poll() for process in processes]
    if any(codes):
        raise GroupFailed(f"exit codes {codes}\n{_output(folder)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank with all that it has started (a compiler, say)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _output(folder: Path) -> str:
    lines = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace").splitlines()[-25:]
        lines += [f"[rank {log.stem}] {line}" for line in text]
    return "\n".join(lines)
