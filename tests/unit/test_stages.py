"""Cutting a model into stages, against every possible cut and torch's own schedules."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch

from shardwise.config import Layout, Plan, Train
from shardwise.models.read import facts_of_config
from shardwise.planner.stages import (
    SCHEDULES,
    balance,
    num_stages,
    passes_under_way,
    stages_of,
    why_not_scheduled,
)
from tests.unit.test_facts import SMOLLM2


def plan(pp: int, schedule: str, num_micro: int = 8, **train: Any) -> Plan:
    settings = Train(pipeline_schedule=schedule, global_batch=num_micro, **train)  # type: ignore[arg-type]
    return Plan(model="x", task="full", layout=Layout(pp=pp), train=settings)


@pytest.mark.parametrize("last", [0.0, 3.5, 20.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_cut_has_a_cheaper_dearest_run(count: int, last: float) -> None:
    """Against all cuts, for layers that cost differently."""
    costs = [1.0, 1.0, 4.0, 1.0, 2.0, 2.0, 1.0]
    runs = balance(costs, count, last=last)
    assert [layer for run in runs for layer in run] == list(range(len(costs)))
    assert all(len(run) for run in runs)

    def dearest(ends: tuple[int, ...]) -> float:
        sums = [sum(costs[a:b]) for a, b in pairwise((0, *ends, len(costs)))]
        return max(*sums[:-1], sums[-1] + last) if len(sums) > 1 else sums[0] + last

    every = combinations(range(1, len(costs)), count - 1)
    assert dearest(tuple(run.stop for run in runs[:-1])) == min(map(dearest, every))


def test_equal_layers_are_cut_evenly() -> None:
    assert sorted(len(run) for run in balance([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_the_head_weighs_as_many_layers_as_it_costs() -> None:
    """SmolLM2-135M: a head of 28 M parameters, layers of 3.5 M: the last stage has fewer."""
    facts = facts_of_config(SMOLLM2, source="smol")
    first, last = stages_of(plan(2, "1f1b"), facts)
    assert first.is_first and last.is_last
    assert len(first.layers) + len(last.layers) == 30
    assert 5 <= len(first.layers) - len(last.layers) <= 9


def test_who_has_which_stage() -> None:
    facts = facts_of_config(SMOLLM2, source="smol")
    ranks = {name: [s.rank for s in stages_of(plan(2, name), facts)] for name in SCHEDULES}
    assert ranks["1f1b"] == ranks["gpipe"] == [0, 1]
    assert ranks["interleaved"] == [0, 1, 0, 1]
    assert ranks["zbv"] == ranks["dualpipev"] == [0, 1, 1, 0]


def schedule_of(name: str, pp: int, rank: int, num_micro: int) -> Any:
    """torch's schedule object of one rank, with stages that do nothing."""
    from torch.distributed.pipelining import stage as stages

    from shardwise.parallel.pipeline import _CLASSES

    class Nothing(stages.PipelineStage):
        def __init__(self, index: int, count: int) -> None:
            self.stage_index, self.num_stages, self.group_size = index, count, pp
            self.group_rank, self.submod = rank, torch.nn.Identity()
            self.device, self.has_backward = torch.device("cpu"), True
            self.is_compiled = False

    everything = stages_of(plan(pp, name, num_micro), facts_of_config(SMOLLM2, source="smol"))
    mine = [Nothing(s.index, s.num_stages) for s in everything if s.rank == rank]
    several = SCHEDULES[name].stages_per_rank > 1
    return _CLASSES[name](
        mine if several else mine[0], n_microbatches=num_micro, loss_fn=torch.sum, scale_grads=False
    )


def most_under_way(actions: list[Any]) -> int:
    """Passes whose forward has begun and whose last backward part has not ended."""
    under_way = most = 0
    for action in actions:
        if action is None:
            continue
        parts = action.sub_actions or (action,)
        for part in parts:
            kind = part.computation_type.name
            under_way += kind == "FORWARD"
            most = max(most, under_way)
            under_way -= kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    return most


SCHEDULED = [
    (name, pp, num_micro)
    for name, pp, num_micro in product(SCHEDULES, (2, 4), (2, 4, 6, 8, 10, 16))
    if why_not_scheduled(plan(pp, name, num_micro), facts_of_config(SMOLLM2, source="x")) is None
]


@pytest.mark.parametrize(("name", "pp", "num_micro"), SCHEDULED)
def test_passes_under_way_are_those_of_torchs_order(name: str, pp: int, num_micro: int) -> None:
    """On no rank fewer than torch has, and on the worst one as many."""
    asked = plan(pp, name, num_micro)
    planned, real = [], []
    for rank in range(pp):
        schedule = schedule_of(name, pp, rank, num_micro)
        order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
        real.append(most_under_way(order[rank]))
        planned.append(passes_under_way(asked, rank))
    assert all(few <= many for few, many in zip(real, planned, strict=True))
    assert max(real) == max(planned)


def test_every_plan_that_is_let_through_can_be_scheduled() -> None:
    """And what is refused names a number of rows that works."""
    facts = facts_of_config(SMOLLM2, source="smol")
    for name in SCHEDULES:
        for num_micro in range(1, 10):
            asked = plan(2, name, num_micro)
            reason = why_not_scheduled(asked, facts)
            if reason is None:
                schedule_of(name, 2, 0, num_micro)
            else:
                rows = int(reason.split("train.global_batch to ")[1].split(",")[0])
                assert why_not_scheduled(plan(2, name, rows), facts) is None, reason


def test_more_stages_than_layers_are_refused() -> None:
    facts = facts_of_config({**SMOLLM2, "num_hidden_layers": 3}, source="small")
    assert num_stages(plan(2, "zbv")) == 4
    reason = why_not_scheduled(plan(2, "zbv"), facts)
    assert "4 stages, the model has 3 layers; pp can be at most 1" in str(reason)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_split_backward_passes_do_not_recompute(mode: str) -> None:
    facts = facts_of_config(SMOLLM2, source="smol")
    reason = why_not_scheduled(plan(2, "zbv", checkpointing=mode), facts)
    assert "set train.checkpointing=none" in str(reason)
