"""The test harness itself: failures are labelled, hangs end, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.run_ranks import RankFailed, run_ranks


def add_on_rank(rank: int, base: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor(base + rank)
    dist.all_reduce(total)
    return int(total)


def fail_on_rank(rank: int, how: str) -> Any:
    import torch.distributed as dist

    print(f"pid {os.getpid()}", flush=True)
    if rank == 1:
        if how == "raise":
            raise ValueError("broken on purpose")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.barrier()


def test_results_come_back_by_rank() -> None:
    assert run_ranks(3, add_on_rank, 10) == [33, 33, 33]


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("raise", r"\[rank 1\] ValueError: broken on purpose"),
        ("exit", "3"),
        ("kill", "-9"),
        ("hang", "hang"),
    ],
)
def test_the_first_failure_ends_all(how: str, word: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=word) as caught:
        run_ranks(2, fail_on_rank, how, timeout_s=6)
    assert time.monotonic() - began < 15
    for line in str(caught.value).splitlines():
        if "pid " in line:
            with pytest.raises(ProcessLookupError):
                os.kill(int(line.rsplit(" ", 1)[1]), 0)
