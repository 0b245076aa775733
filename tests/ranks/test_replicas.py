"""The debug switch finds what it is for: replicas or tied copies that have drifted apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.models import save_model
from tests.ranks.steps import RAGGED, _micro_batches, random_rows
from tests.run_ranks import run_ranks


def drift_on_rank(rank: int, model_dir: str, layout: dict[str, int], name: str | None) -> str:
    """Train a step, change one value of a parameter on the last rank, and train another."""
    import torch

    from shardwise.config import Layout, Plan, Train
    from shardwise.errors import ShardwiseError
    from shardwise.parallel.grads import local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.optim import make_optimizer
    from shardwise.trainer.step import train_step
    from shardwise.weights.load import load_model

    train = Train(micro_batch=2, check_replicas=True)
    plan = Plan(model=model_dir, task="full", layout=Layout(**layout), train=train)
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, train)
    batches = _micro_batches(random_rows(RAGGED), plan, mesh)
    train_step(sharded, optimizer, batches, mesh, train, 1e-3)
    for stored, param in sharded.stored_names():
        if stored == name and rank == plan.layout.world_size - 1:
            local_part(param.detach()).view(-1)[0] += 1e-6
    try:
        train_step(sharded, optimizer, batches, mesh, train, 1e-3)
    except ShardwiseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "name", "where"),
    [
        ({"dp": 2}, "model.layers.1.mlp.up_proj.weight", "the dp axis"),
        ({"tp": 2}, "model.layers.0.input_layernorm.weight", "the tp axis"),
        ({"tp": 4}, "model.layers.3.self_attn.k_proj.weight", "the tp_kv_replicas axis"),
        ({"pp": 2}, "model.embed_tokens.weight", "the two ends of the pipeline"),
    ],
    ids=["dp2", "tp2", "tp4", "pp2"],
)
def test_a_replica_that_has_drifted_stops_the_run(
    tmp_path: Path, layout: dict[str, int], name: str, where: str
) -> None:
    model = str(save_model("Q3", tmp_path / "Q3"))
    num_ranks = math.prod(layout.values())
    found = run_ranks(num_ranks, drift_on_rank, model, layout, name)
    assert found[-1] == f"{name} differs between the ranks of {where}."
    assert set(found) <= {"", found[-1]}  # ranks of other groups have nothing to find


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2, "tp": 2}, {"tp": 4}, {"pp": 2, "dp": 2}, {"cp": 2}],
    ids=["dp2xtp2", "tp4", "pp2xdp2", "cp2"],
)
def test_nothing_is_found_where_nothing_has_drifted(tmp_path: Path, layout: dict[str, int]) -> None:
    model = str(save_model("Q3", tmp_path / "Q3"))
    assert not any(run_ranks(math.prod(layout.values()), drift_on_rank, model, layout, None))


def leftover_on_rank(rank: int, model_dir: str) -> str:
    import torch

    from shardwise.config import Layout, Plan, Train
    from shardwise.errors import ShardwiseError
    from shardwise.parallel.mesh import build_mesh
    from shardwise.parallel.replicas import check_no_gradients
    from shardwise.weights.load import load_model

    plan = Plan(model=model_dir, task="full", layout=Layout(), train=Train())
    sharded = load_model(plan, build_mesh(plan.layout, "cpu"), torch.float32)
    check_no_gradients(sharded)
    sharded.model.lm_head.weight.grad = torch.ones_like(sharded.model.lm_head.weight)
    try:
        check_no_gradients(sharded)
    except ShardwiseError as error:
        return str(error)
    return ""


def test_a_gradient_that_is_left_over_stops_the_run(tmp_path: Path) -> None:
    (found,) = run_ranks(1, leftover_on_rank, str(save_model("LL", tmp_path / "LL")))
    assert found == "a step begins with a gradient of lm_head.weight that is not zero."
