"""A pipeline's schedule as blocks on a time line, one row a rank. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.config import Plan
from shardwise.models.facts import ModelFacts
from shardwise.planner.stages import SCHEDULES, head_cost, layer_costs, num_stages, stages_of

_MOST_RANKS, _MOST_MICRO_BATCHES = 16, 24
_BACKWARD = 2.0
"""time of a backward pass, in forward passes"""


class Action(NamedTuple):
    """One pass of a micro-batch through a stage."""

    forward: bool
    stage: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """An action with its time, in units of the mean forward pass of a stage."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What every rank does when."""

    rows: tuple[tuple[Block, ...], ...]
    """blocks of each rank of the `pp` axis, in order"""
    end: float
    note: str


def draw_pipeline(plan: Plan, facts: ModelFacts) -> Drawing | None:
    """The schedule of a plan's pipeline, its stages as long as their layers cost.

    Returns:
        None without a pipeline, and of schedules that split the backward pass, whose order torch
        makes up itself.
    """
    pp, name = plan.layout.pp, plan.train.pipeline_schedule
    if not plan.trains or pp == 1 or SCHEDULES[name].splits_backward or pp > _MOST_RANKS:
        return None
    all_micro = plan.train.num_micro_batches(plan.layout)
    most = _MOST_MICRO_BATCHES // pp * pp or pp
    num_micro = min(all_micro, max(most, pp))
    rows = [actions_of_rank(name, pp, rank, num_micro) for rank in range(pp)]
    note = f"{name}, {all_micro} micro-batches"
    if num_micro < all_micro:
        note += f", of which {num_micro} are drawn"
    return _timed(rows, _stage_times(plan, facts), note)


def actions_of_rank(schedule: str, pp: int, rank: int, num_micro: int) -> list[Action]:
    """The order of a rank's passes, as torch.distributed.pipelining runs them."""
    stages = SCHEDULES[schedule].stages_per_rank
    per_round = num_micro // max(1, num_micro // pp)
    total = num_micro * stages

    def action(number: int, *, forward: bool) -> Action:
        own = number // per_round % stages
        own = own if forward else stages - 1 - own
        micro = number // (per_round * stages) * per_round + number % per_round
        return Action(forward, rank + own * pp, micro)

    if schedule == "gpipe":
        first = total
    elif schedule == "interleaved":
        first = min(total, (stages - 1) * per_round + 2 * (pp - 1 - rank))
    else:
        first = min(total, pp - 1 - rank)
    order = [action(number, forward=True) for number in range(first)]
    for number in range(first, total):
        order += [action(number, forward=True), action(number - first, forward=False)]
    return order + [action(number, forward=False) for number in range(total - first, total)]


def _stage_times(plan: Plan, facts: ModelFacts) -> list[float]:
    """Forward time of each stage, in units of their mean."""
    costs = layer_costs(plan, facts)
    times = [
        sum(costs[layer] for layer in stage.layers) + (head_cost(facts) if stage.is_last else 0.0)
        for stage in stages_of(plan, facts)
    ]
    mean = sum(times) / num_stages(plan)
    return [time / mean for time in times]


def _timed(rows: list[list[Action]], times: list[float], note: str) -> Drawing:
    """Start each action when its rank is free and what it needs is there."""
    done: dict[Action, float] = {}
    free, next_of = [0.0] * len(rows), [0] * len(rows)
    blocks: list[list[Block]] = [[] for _ in rows]
    while any(number < len(row) for number, row in zip(next_of, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while next_of[rank] < len(row):
                action = row[next_of[rank]]
                needed = _needs(action, len(times))
                if any(one not in done for one in needed):
                    break
                begin = max([free[rank], *(done[one] for one in needed)])
                end = begin + times[action.stage] * (1 if action.forward else _BACKWARD)
                blocks[rank].append(Block(action=action, begin=begin, end=end))
                done[action] = free[rank] = end
                next_of[rank] += 1
                moved = True
        if not moved:
            raise ValueError("a schedule whose passes wait for each other")
    return Drawing(rows=tuple(map(tuple, blocks)), end=max(free), note=note)


def _needs(action: Action, count: int) -> list[Action]:
    """What has to be done before: the pass of the neighbouring stage, or the own forward pass."""
    forward, stage, micro = action
    if forward:
        return [Action(True, stage - 1, micro)] if stage else []
    before = [Action(True, stage, micro)]
    return [*before, Action(False, stage + 1, micro)] if stage + 1 < count else before
