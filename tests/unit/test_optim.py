"""Learning rates: a function of the optimizer step and nothing else. Weight decay of matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.config import Train
from shardwise.parallel.sharded import Part, ShardedModel
from shardwise.planner.stages import StageSpec
from shardwise.trainer.optim import learning_rate_at, make_optimizer


def test_warm_up_then_cosine_to_zero_after_the_last_step() -> None:
    """The list of a 20-step run with 5 steps of warm-up (bug bank 17)."""
    train = Train(learning_rate=1.0, warmup_steps=5, schedule="cosine")
    rates = [learning_rate_at(step, 20, train) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert all(rate > 0 for rate in rates[:20])
    assert rates[20] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "middle"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)]
)
def test_schedules(schedule: str, middle: float) -> None:
    train = Train(learning_rate=1.0, schedule=schedule)  # type: ignore[arg-type]
    assert learning_rate_at(0, 10, train) == 1.0
    assert learning_rate_at(5, 10, train) == pytest.approx(middle)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    spec = StageSpec(index=0, num_stages=1, layers=range(1), rank=0)
    part = Part(model=model, root=model, spec=spec, partial={})  # type: ignore[arg-type]
    mesh: Any = None  # of one process
    sharded = ShardedModel(parts=(part,), mesh=mesh, tied=False, embedding="", pipeline=None)
    optimizer = make_optimizer(sharded, Train(learning_rate=0.1, weight_decay=0.5))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(model.bias.detach(), before["bias"])
