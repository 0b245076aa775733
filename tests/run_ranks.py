"""`run_ranks`: start n gloo processes from inside pytest and collect what they return."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROCESS_GROUP_TIMEOUT_S = 20.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "transformers", "tests.preload"])


class RankFailed(AssertionError):
    """Some rank raised, died or took too long; the text holds its labelled output."""


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run `fn(rank, *args)` on n gloo processes; return what each rank returned.

    `fn` and its arguments must be picklable (a function of a test module). On the first failure,
    or after `timeout_s`, every process is killed and the failing rank's output is raised.
    """
    with TemporaryDirectory(prefix="run_ranks_") as folder:
        port = free_port()
        processes = [
            _context.Process(target=_entry, args=(rank, n, port, folder, fn, args))
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(folder), time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(n)]


def _wait(processes: list[Any], folder: Path, deadline: float) -> None:
    while any(process.is_alive() for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            time.sleep(0.2)  # let the rank that failed first finish writing
            break
        if time.monotonic() > deadline:
            raise RankFailed(f"ranks hang: time over\n{_output(folder, len(processes))}")
        time.sleep(0.01)
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RankFailed(f"exit codes {codes}\n{_output(folder, len(processes))}")


def _output(folder: Path, n: int) -> str:
    lines = []
    for rank in range(n):
        log = folder / f"{rank}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        lines += [f"[rank {rank}] {line}" for line in text.splitlines()]
    return "\n".join(lines)


def _entry(
    rank: int, n: int, port: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=PROCESS_GROUP_TIMEOUT_S),
        )
        result = fn(rank, *args)
        Path(f"{folder}/{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
