"""The rows that a run sees are the same wherever it was stopped and resumed (bug bank 43)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import long_last
from tests.models import save_model
from tests.ranks.test_loop import prepare
from tests.run_ranks import run_ranks

NUM_STEPS = {False: 9, True: 6}
"""of three epochs of seven rows, three a step (one in the last of an epoch), or packed"""


def rows_on_rank(rank: int, model: str, folder: str, packing: bool) -> dict[int, Any]:
    """Stop after each step and resume: what the steps of this rank were given, by where it was
    stopped (0: it was not)."""
    import torch

    from shardwise.config import Layout, Plan, Train
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer import loop

    seen: list[Any] = []
    train_step = loop.train_step

    def recorded(sharded: Any, optimizer: Any, batches: Any, *others: Any) -> Any:
        seen.append([batch.ids.tolist() for batch in batches])
        return train_step(sharded, optimizer, batches, *others)

    loop.train_step = recorded
    found = {}
    mesh = build_mesh(Layout(fsdp=2), "cpu")
    for stop in range(NUM_STEPS[packing]):
        seen.clear()
        run = Path(folder) / f"stop-{stop}"
        for last in (stop, 1000) if stop else (1000,):
            size = 2 if packing else 3
            train = Train(epochs=3, global_batch=size, seq_len=64, packing=packing, max_steps=last)
            plan = Plan(model=model, task="full", layout=Layout(fsdp=2), train=train)
            loop.run_train(plan, run, Path(folder) / "work", mesh)
        found[stop] = list(seen)
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("packing", long_last([True, False], 1))
def test_the_rows_go_on_where_they_were(tmp_path: Path, packing: bool) -> None:
    """At the end of an epoch, within one, with accumulation and with packing."""
    model = save_model("LL", tmp_path / "LL")
    prepare(model, tmp_path)
    for stop in range(NUM_STEPS[packing]):
        (tmp_path / f"stop-{stop}").mkdir()
    ranks = run_ranks(2, rows_on_rank, str(model), str(tmp_path), packing, timeout_s=120)
    for found in ranks:
        assert len(found[0]) == NUM_STEPS[packing]
        for stop in range(1, NUM_STEPS[packing]):
            assert found[stop] == found[0], stop
