"""The global norm counts every value of every gradient once, and clipping goes by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.models import save_model
from tests.run_ranks import run_ranks


def norm_on_rank(rank: int, model_dir: str, layout: dict[str, int], limits: list[float]) -> Any:
    """The number of values, the norm of gradients of ones, and a gradient's values when clipped."""
    import torch

    from shardwise.config import Layout, Plan
    from shardwise.models.read import read_facts
    from shardwise.parallel.grads import clip, global_norm, local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.weights.load import load_model

    plan = Plan(model=model_dir, task="full", layout=Layout(**layout))
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    params = [param for _, param in sharded.named_parameters()]
    counted = [param for _, param in sharded.named_parameters(copies=False)]
    norms, clipped = [], set()
    for limit in limits:
        for param in params:
            param.grad = torch.ones_like(param)
        norms.append(global_norm(counted, mesh).item())
        clip(params, torch.tensor(norms[-1]), norms[-1] * limit)
        values = torch.cat([local_part(p.grad).flatten() for p in params])
        clipped.add((limit, values.min().item(), values.max().item()))
    return read_facts(model_dir).num_parameters, norms, clipped


@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 2},
        {"tp": 2},
        {"dp": 2},
        {"fsdp": 2, "tp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "fsdp": 2},
        {"cp": 2},
        {"pp": 2},
        {"tp": 4},
    ],
    ids=lambda layout: "x".join(f"{axis}{size}" for axis, size in layout.items()),
)
def test_norm_of_ones_is_the_root_of_their_number(tmp_path: Path, layout: dict[str, int]) -> None:
    """Norms, biases, a tie, shared KV heads: nothing is counted twice, nothing is left out.

    A limit above the norm changes nothing; one below it scales every value alike.
    """
    folder = save_model("Q2", tmp_path / "Q2")
    ranks = run_ranks(math.prod(layout.values()), norm_on_rank, str(folder), layout, [2.0, 0.25])
    for count, norms, clipped in ranks:
        assert norms == pytest.approx([math.sqrt(count)] * 2, rel=1e-6)
        assert sorted(clipped) == [pytest.approx((0.25,) * 3), pytest.approx((2.0, 1.0, 1.0))]
