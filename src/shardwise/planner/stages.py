"""How a pipeline cuts a model: schedules as data, and stages balanced by cost. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from shardwise.config import Plan
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind
from shardwise.planner.remember import per_model


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a pipeline schedule asks for."""

    stages_per_rank: int = 1
    style: Literal["loop", "v"] = "loop"
    """which stages a rank has: every `pp`-th, or one of the way there and one of the way back"""
    splits_backward: bool = False
    """whether the gradients of weights are made apart from, and later than, those of inputs"""
    min_micro_batches: Literal["1", "pp", "stages"] = "1"


DEFAULT_SCHEDULE = "1f1b"
SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(),
    "1f1b": Schedule(min_micro_batches="pp"),
    "interleaved": Schedule(stages_per_rank=2),
    "zbv": Schedule(stages_per_rank=2, style="v", splits_backward=True),
    "dualpipev": Schedule(
        stages_per_rank=2, style="v", splits_backward=True, min_micro_batches="stages"
    ),
}
"""`train.pipeline_schedule` -> what it asks for, as torch.distributed.pipelining runs it"""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage: which layers, and what else."""

    index: int
    num_stages: int
    layers: range
    rank: int
    """position on the `pp` axis"""

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.index == self.num_stages - 1


def num_stages(plan: Plan) -> int:
    """Stages of a plan's pipeline, over all ranks; 1 without one."""
    if plan.layout.pp == 1:
        return 1
    return plan.layout.pp * SCHEDULES[plan.train.pipeline_schedule].stages_per_rank


def stages_of(plan: Plan, facts: ModelFacts) -> tuple[StageSpec, ...]:
    """Every stage, in the order of the layers, cut so that the slowest takes the least time."""
    style = SCHEDULES[plan.train.pipeline_schedule].style
    layout = plan.layout
    return _stages(facts, plan.train.seq_len, layout.cp, num_stages(plan), layout.pp, style)


@per_model
def _stages(
    facts: ModelFacts, seq_len: int, cp: int, count: int, pp: int, style: str
) -> tuple[StageSpec, ...]:
    cuts = balance(_layer_costs(facts, seq_len, cp), count, last=head_cost(facts))
    return tuple(
        StageSpec(index=index, num_stages=count, layers=layers, rank=_rank(index, pp, style))
        for index, layers in enumerate(cuts)
    )


def worst_ranks(plan: Plan, facts: ModelFacts) -> list[int]:
    """Positions on the `pp` axis among which the one with the most memory and the one with the
    most work are: both ends, and the first with the most layers under way, of all and of those
    between them."""
    pp = plan.layout.pp
    layers = [0] * pp
    for stage in stages_of(plan, facts):
        layers[stage.rank] += len(stage.layers)
    held = [layers[rank] * passes_under_way(plan, rank) for rank in range(pp)]
    under_way, busiest = held.index(max(held)), layers.index(max(layers))
    # with neighbours on both sides, from which it receives
    inner = held.index(max(held[1:-1]), 1) if pp > 2 else 0
    return sorted({0, under_way, busiest, inner, pp - 1})


def slowdown(plan: Plan, facts: ModelFacts) -> float:
    """How much longer a pipeline takes than its ranks' share of the work: uneven stages, idling."""
    costs = layer_costs(plan, facts)
    work = [0.0] * plan.layout.pp
    for stage in stages_of(plan, facts):
        work[stage.rank] += sum(costs[layer] for layer in stage.layers)
        work[stage.rank] += head_cost(facts) if stage.is_last else 0.0
    return max(work) * len(work) / sum(work) * (1 + bubble(plan))


def _rank(index: int, pp: int, style: str) -> int:
    turn, position = divmod(index, pp)
    return pp - 1 - position if style == "v" and turn % 2 else position


def layer_costs(plan: Plan, facts: ModelFacts) -> Sequence[float]:
    """Multiply-adds per token of each layer: its matrices, and attention over what it sees."""
    return _layer_costs(facts, plan.train.seq_len, plan.layout.cp)


@per_model
def _layer_costs(facts: ModelFacts, seq_len: int, cp: int) -> tuple[float, ...]:
    costs = {kind: _layer_cost(facts, kind, seq_len, cp) for kind in set(facts.layers)}
    return tuple(costs[kind] for kind in facts.layers)


def _layer_cost(facts: ModelFacts, kind: LayerKind, length: int, cp: int) -> float:
    window = min(kind.window or length, length)
    seen = window - window * window / (2 * length)  # on average; half of a sequence without window
    products = facts.num_active_parameters(kind)
    if kind.is_linear and facts.linear is not None:  # a head's state read, changed and read again
        return products + 3 * facts.linear.values * facts.linear.key_dim
    if facts.latent is not None:  # every rank of `cp` expands the latent of the whole sequence
        expanded = facts.num_heads * (facts.latent.nope_dim + facts.latent.v_dim)
        products += (cp - 1) * facts.latent.kv_rank * expanded
    return products + (facts.q_size + facts.attention_size) * seen


def head_cost(facts: ModelFacts) -> float:
    """Multiply-adds per token of the head; the embedding only copies one row."""
    return facts.vocab_size * facts.hidden_size


def balance(costs: Sequence[float], count: int, *, last: float = 0.0) -> list[range]:
    """Cut a row of layers into `count` runs of at least one, so that the dearest run is cheapest.

    Args:
        last: cost of what the last run has besides its layers.

    Among equally good cuts the most even one (least sum of squares) is taken.
    """
    return list(_balance(tuple(costs), count, last))


@lru_cache(maxsize=256)
def _balance(costs: tuple[float, ...], count: int, last: float) -> tuple[range, ...]:
    sums = [0.0, *accumulate(costs)]
    num = len(costs)
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, 0.0, 0)}
    for run in range(1, count + 1):
        extra = last if run == count else 0.0
        for end in range(run, num - (count - run) + 1):
            found: tuple[float, float, int] | None = None
            for begin in range(end - 1, run - 2, -1):
                cost = sums[end] - sums[begin] + extra
                if found is not None and cost > found[0]:
                    break  # longer runs only cost more
                if (run - 1, begin) in best:
                    dearest, squares, _ = best[run - 1, begin]
                    option = (max(dearest, cost), squares + cost * cost, begin)
                    found = option if found is None else min(found, option)
            if found is not None:
                best[run, end] = found
    ends = [num]
    for run in range(count, 0, -1):
        ends.append(best[run, ends[-1]][2])
    ends.reverse()
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def passes_under_way(plan: Plan, rank: int) -> int:
    """Forward passes of one stage whose activations a rank holds at once, at most.

    Of the schedules of torch.distributed.pipelining: tests/unit/test_stages.py counts them in the
    order of actions that torch makes.
    """
    pp, num_micro = plan.layout.pp, plan.train.num_micro_batches(plan.layout)
    if pp == 1:
        return 1
    name = plan.train.pipeline_schedule
    most = num_micro * SCHEDULES[name].stages_per_rank
    per_round = num_micro // max(1, num_micro // pp)
    under_way = {
        "gpipe": most,
        "1f1b": pp - rank,
        "interleaved": per_round + 2 * (pp - 1 - rank) + 1,
        "zbv": 2 * pp,
        "dualpipev": 2 * pp + 1,
    }
    return min(most, under_way[name])


def bubble(plan: Plan) -> float:
    """Idle time of a step, as a share of the time that the micro-batches take.

    (pp - 1) passes of 1F1B (GPipe has the same), divided by the stages of a rank where they are
    interleaved (arXiv 2104.04473, section 2.2); none in the ideal case of ZBV (arXiv 2401.10241,
    section 5); DualPipeV has half of ZB1P's, a third of 1F1B's (DeepSeek-V3, arXiv 2412.19437,
    table 2), where all parts of a pass take equally long.
    """
    pp, num_micro = plan.layout.pp, plan.train.num_micro_batches(plan.layout)
    share = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1 / 2, "zbv": 0.0, "dualpipev": 1 / 6}
    return share[plan.train.pipeline_schedule] * (pp - 1) / num_micro


def why_not_scheduled(plan: Plan, facts: ModelFacts) -> str | None:
    """The reason why a plan's pipeline cannot run, with a value that can; None if it can."""
    pp, name = plan.layout.pp, plan.train.pipeline_schedule
    if pp == 1:
        if name == DEFAULT_SCHEDULE:
            return None
        return (
            f"train.pipeline_schedule={name} is for a pipeline, and layout.pp=1 is none; set "
            f"layout.pp to 2 or more, or train.pipeline_schedule={DEFAULT_SCHEDULE}"
        )
    if plan.train.compile and SCHEDULES[name].splits_backward:
        return (
            f"train.pipeline_schedule={name} makes the gradients of inputs and weights apart, "
            "which torch cannot do in compiled layers; set train.compile=false, or "
            "train.pipeline_schedule=1f1b"
        )
    if plan.train.checkpointing != "none" and SCHEDULES[name].splits_backward:
        return (
            f"train.pipeline_schedule={name} makes the gradients of inputs and weights apart, for "
            "which torch would compute a layer again and again; set train.checkpointing=none, or "
            "train.pipeline_schedule=1f1b"
        )
    stages, num_micro = num_stages(plan), plan.train.num_micro_batches(plan.layout)
    if stages > facts.num_layers:
        return (
            f"pp={pp} with train.pipeline_schedule={name} makes {stages} stages, the model has "
            f"{facts.num_layers} layers; pp can be at most "
            f"{facts.num_layers // SCHEDULES[name].stages_per_rank}"
        )
    least = {"1": 1, "pp": pp, "stages": stages}[SCHEDULES[name].min_micro_batches]
    if num_micro < least:
        rows = least * plan.train.micro_batch * plan.layout.num_data_ranks
        return (
            f"train.pipeline_schedule={name} needs at least {least} micro-batches for pp={pp}, the "
            f"plan has {num_micro}; set train.global_batch to {rows}, or "
            "train.pipeline_schedule=gpipe"
        )
    rounds = max(1, num_micro // pp)
    if name == "interleaved" and num_micro % rounds:
        rows = rounds * pp * plan.train.micro_batch * plan.layout.num_data_ranks
        return (
            f"train.pipeline_schedule=interleaved runs {rounds} rounds for pp={pp}, which does not "
            f"divide the plan's {num_micro} micro-batches; set train.global_batch to {rows}"
        )
    return None
