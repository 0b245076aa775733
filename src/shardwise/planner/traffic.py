"""The ledger of collectives: what one rank takes part in during one optimizer step. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import Layout, Plan
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind, Param
from shardwise.planner.activations import FP32
from shardwise.planner.memory import (
    LOSS_CHUNK_TOKENS,
    RankSizes,
    cut,
    layer_counts,
    local_tokens,
    recomputed_layers,
    stages_of_rank,
    tally_bytes,
    tally_rows,
)
from shardwise.planner.network import Op
from shardwise.planner.stages import StageSpec, stages_of

_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One line of the traffic ledger: what one rank takes part in during one optimizer step."""

    axis: str
    op: Op
    count: int
    num_bytes: int
    """of the whole tensor, each time"""

    @property
    def bytes_per_step(self) -> int:
        """Bytes that leave or reach the rank: an all-reduce is a reduce-scatter and a gather."""
        return self.count * self.num_bytes * (2 if self.op == "all_reduce" else 1)


def traffic(plan: Plan, facts: ModelFacts, rank: int = 0) -> list[Collective]:
    """Every collective of one optimizer step of a training plan.

    Parameters are gathered in the compute dtype: by ZeRO-3 each layer twice a micro-batch (forward
    and backward) and the outer group once, by ZeRO-2 everything once a micro-batch, by ZeRO-1 once
    a step. Gradients are reduced in the dtype that the plan says, then summed over the replicas; on
    CPU both cross in messages between pairs of ranks, and only replicas sum each gradient at once.
    Tensor parallelism sums the outputs of attention and MLP forward (attention again when
    activations are recomputed, which stops at the last thing that is needed) and the gradients of
    their inputs backward, or gathers and scatters them under sequence parallelism; and two numbers
    a token for the loss.
    A pipeline sends each micro-batch's hidden states on and their gradients back, what routers
    chose with them where there is a balance loss, and sums the gradients of a tied embedding over
    its two ends. Scalars (loss, norm) are left out.

    tests/ranks/test_traffic.py compares it with the collectives that a real step runs.

    Args:
        rank: position on the `pp` axis.
    """
    layout = plan.layout
    stages = stages_of_rank(plan, facts, rank)
    lines = []
    for group in fsdp_groups(plan, facts, stages):
        lines += _shard_traffic(plan, group)
        if layout.dp > 1 and not layout.sums_by_itself and group.trained:
            lines.append(_all_reduce(plan, group.reductions, group.trained_shard))
    if layout.dp > 1 and layout.sums_by_itself:
        lines += [_all_reduce(plan, count, size) for size, count in _parameters(facts, layout)]
    if layout.ep > 1:
        lines += _expert_traffic(plan, facts, stages)
    if layout.cp > 1:
        lines += _context_traffic(plan, facts, stages)
    if layout.tp > 1:
        lines += _tensor_traffic(plan, facts, stages)
    if layout.pp > 1:
        lines += _pipeline_traffic(plan, facts, stages)
    if facts.balance_weight is not None and any(stage.is_last for stage in stages):
        lines += _balance_traffic(plan, facts)
    return lines


@dataclass(frozen=True, kw_only=True)
class FsdpGroups:
    """FSDP groups of a rank that are alike: each is gathered and reduced in one piece."""

    axis: str
    num_ranks: int
    """that share one"""
    num_bytes: int
    """of one group, gathered"""
    trained: int
    """values of these"""
    gathers: int
    """of all of them in a step"""
    reductions: int

    @property
    def shard_bytes(self) -> int:
        """Of one group, what a rank keeps and sends."""
        return -(-self.num_bytes // self.num_ranks)

    @property
    def trained_shard(self) -> int:
        """Those of them that are trained."""
        return -(-self.trained // self.num_ranks)


def fsdp_groups(plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]) -> list[FsdpGroups]:
    """The groups of a rank's layers, and what is outside of them."""
    layout, sizes = plan.layout, RankSizes.of(facts, plan.layout, stages)
    c = plan.precision.compute_bytes
    found = []
    for layers in sizes.layers:
        experts = 0 if sizes.trains_adapters else layers.experts
        num_bytes = layers.num_bytes(c) - layers.experts * c
        trained = layers.trained - experts
        if sizes.trains_adapters:  # of which a shard may be mostly padding
            padded = layers.own_adapters * layout.num_shards
            num_bytes, trained = num_bytes + (padded - trained) * c, padded
        found.append(("fsdp", num_bytes, trained, layers.count, True))
        if layers.experts:
            found.append(("efsdp", layers.experts * c, experts, layers.count, True))
    outer = [RankSizes.of(facts, plan.layout, [stage]) for stage in stages]
    found += [("fsdp", one.outer * c, one.trained_outer, 1, False) for one in outer if one.outer]
    num_micro = plan.train.num_micro_batches(layout)
    gathers = 1 if layout.zero == 1 else num_micro
    return [
        FsdpGroups(
            axis=axis,
            num_ranks=layout.num_shards if axis == "fsdp" else layout.num_expert_shards,
            num_bytes=num_bytes,
            trained=trained,
            gathers=count * gathers * (2 if layout.zero == 3 and is_layer else 1),
            reductions=count * (1 if layout.reduces_once else num_micro),
        )
        for axis, num_bytes, trained, count, is_layer in found
    ]


def _shard_traffic(plan: Plan, group: FsdpGroups) -> list[Collective]:
    """Of the axis that shares the states. On CPU ranks send each other what they need."""
    c, r = plan.precision.compute_bytes, plan.precision.reduce_bytes
    n, layout = group.num_ranks, plan.layout
    if n == 1:
        return []
    moved: list[tuple[Op, int, int]] = [
        ("all_gather", group.gathers, group.num_bytes),
        ("reduce_scatter", group.reductions, group.trained * r),
    ]
    if plan.devices.kind == "cpu":
        # what one backward pass has made crosses in the dtype in which it was made
        of_one_pass = not layout.reduces_once or plan.train.num_micro_batches(layout) == 1
        sent = min(c, r) if of_one_pass and layout.pp == 1 else r
        moved = [
            ("send", group.gathers * (n - 1), group.shard_bytes),
            ("all_to_all", group.reductions, group.trained * sent),
        ]
    return [
        Collective(axis=group.axis, op=op, count=count, num_bytes=num_bytes)
        for op, count, num_bytes in moved
        if num_bytes
    ]


def _all_reduce(plan: Plan, count: int, values: int) -> Collective:
    """Gradients summed over the replicas."""
    num_bytes = values * plan.precision.reduce_bytes
    return Collective(axis="dp", op="all_reduce", count=count, num_bytes=num_bytes)


def _parameters(facts: ModelFacts, layout: Layout) -> list[tuple[int, int]]:
    """Values of each parameter that a rank holds, without a pipeline, and how many are like it."""
    layers = [
        (math.prod(param.shape), count)
        for kind, count in layer_counts(facts).items()
        for param in facts.params_on_rank(kind, tp=layout.tp, ep=layout.ep).values()
        if param.trained
    ]
    if facts.adapters is not None:
        return layers
    table = -(-facts.vocab_size // layout.tp) * facts.hidden_size
    others = [math.prod(shape) for shape in facts.outer_shapes.values()]
    whole = facts.vocab_size * facts.hidden_size
    return [*layers, *((table if size == whole else size, 1) for size in others)]


def _expert_traffic(plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]) -> list[Collective]:
    """Tokens to their experts and back, and their gradients; before them, how many there are.

    A rank sends each token as often as it chooses experts, its own among them.
    """
    num_micro = plan.train.num_micro_batches(plan.layout)
    passes = num_micro * _num_mixtures(layer_counts(facts, stages))
    again = num_micro * _num_mixtures(recomputed_layers(plan, facts, stages))
    tokens = local_tokens(plan) // plan.layout.sequence_parts * facts.experts_per_token
    num_bytes = tokens * facts.hidden_size * plan.precision.compute_bytes
    counts = facts.num_experts * _COUNT_BYTES
    return [
        Collective(axis="ep", op="all_to_all", count=4 * passes + 2 * again, num_bytes=num_bytes),
        Collective(axis="ep", op="all_to_all", count=passes + again, num_bytes=counts),
    ]


def _balance_traffic(plan: Plan, facts: ModelFacts) -> list[Collective]:
    """How often each expert was chosen for a row, and how many tokens it has, over the ranks that
    have a part of it."""
    layout, count = plan.layout, plan.train.num_micro_batches(plan.layout)
    rows = tally_rows(plan)
    chosen, counts = (rows * n * FP32 for n in (facts.num_experts, facts.num_experts + 2))
    lines = []
    if layout.sequence_parallel:
        lines.append(Collective(axis="tp", op="all_reduce", count=count, num_bytes=chosen))
    if layout.cp > 1:
        lines.append(Collective(axis="cp", op="all_reduce", count=count, num_bytes=counts))
    return lines


def _num_mixtures(layers: Counter[LayerKind]) -> int:
    return sum(count for kind, count in layers.items() if kind.has_experts)


def _context_traffic(
    plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]
) -> list[Collective]:
    """Keys and values of the whole sequence, or the latent of which they are made, to each rank;
    their gradients back."""
    layout, c = plan.layout, plan.precision.compute_bytes
    layers = sum(len(stage.layers) for stage in stages)
    count = layers * plan.train.num_micro_batches(layout)
    kv = facts.cache_size // (1 if facts.latent else min(layout.tp, facts.num_kv_heads))
    whole = kv * c * local_tokens(plan) * layout.cp
    again = recomputed_layers(plan, facts, stages).total()
    gathers = count + again * plan.train.num_micro_batches(layout)
    return [
        Collective(axis="cp", op="all_gather", count=gathers, num_bytes=whole),
        Collective(axis="cp", op="reduce_scatter", count=count, num_bytes=whole),
    ]


def _pipeline_traffic(
    plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]
) -> list[Collective]:
    """What a rank sends to the ranks of the stages before and after its own."""
    layout, train = plan.layout, plan.train
    tokens = local_tokens(plan) // layout.sequence_parts
    hidden = tokens * facts.hidden_size * plan.precision.compute_bytes
    ranks = [stage.rank for stage in stages_of(plan, facts)]
    others = [
        neighbour
        for stage in stages
        for neighbour in (stage.index - 1, stage.index + 1)
        if 0 <= neighbour < len(ranks) and ranks[neighbour] != stage.rank
    ]
    lines = []
    if others:
        count = len(others) * train.num_micro_batches(layout)
        lines.append(Collective(axis="pp", op="send", count=count, num_bytes=hidden))
        if facts.balance_weight is not None:
            tally = tally_bytes(plan, facts)
            lines.append(Collective(axis="pp", op="send", count=count, num_bytes=tally))
    at_one_end = sum(stage.is_first or stage.is_last for stage in stages) == 1
    if facts.tied and at_one_end and facts.adapters is None:
        table = cut((-(-facts.vocab_size // layout.tp), facts.hidden_size), layout.num_shards)
        lines.append(Collective(axis="pp", op="all_reduce", count=1, num_bytes=table * FP32))
    return lines


def _tensor_traffic(plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]) -> list[Collective]:
    """Collectives of the `tp` axis. Attention and a plain MLP are a split region each, so are the
    experts that every token goes through, and the head."""
    layout, train = plan.layout, plan.train
    num_micro = train.num_micro_batches(layout)
    layers = num_micro * sum(len(stage.layers) for stage in stages)
    first = num_micro if any(stage.is_first for stage in stages) else 0
    last = num_micro if any(stage.is_last for stage in stages) else 0
    counts, recomputed = layer_counts(facts, stages), recomputed_layers(plan, facts, stages)
    recompute = num_micro * recomputed.total()
    # recomputation ends where nothing more is needed: before the MLP's sum, unless a norm follows
    sums_again = recompute * (2 if facts.family.norms_after_mlp else 1)
    whole = local_tokens(plan) * facts.hidden_size * plan.precision.compute_bytes
    targets = local_tokens(plan) - (train.micro_batch if layout.cp == 1 else 0)
    # beside adapters the embedding is frozen, and what enters the first layer has no gradient
    no_gradient = 0 if facts.adapters is None else first
    lines: list[tuple[Op, int, int]] = []
    whole_chunks, rest = divmod(targets, LOSS_CHUNK_TOKENS)
    for number, chunk in ((whole_chunks, LOSS_CHUNK_TOKENS), (1, rest)):
        if chunk:
            lines.append(("all_gather", last * number, layout.tp * 2 * chunk * FP32))
    if layout.sequence_parallel:
        # in and out of a region, and the other way back; the embedding is cut once
        both_ways = 2 * num_micro * _num_regions(facts, counts)
        entered_again = num_micro * _num_regions(facts, recomputed)
        gathers = both_ways + entered_again + first - no_gradient + last
        lines.append(("all_gather", gathers, whole))
        lines.append(("reduce_scatter", both_ways - no_gradient + sums_again + last, whole))
        lines.append(("all_reduce", first, whole))
    else:
        sums = 4 * layers - no_gradient + sums_again + first + last
        lines.append(("all_reduce", sums, whole))
    lines += [("all_reduce", 1, num_bytes) for num_bytes in _partial_bytes(plan, facts, stages)]
    return [
        Collective(axis="tp", op=op, count=count, num_bytes=num_bytes)
        for op, count, num_bytes in lines
        if count
    ]


def _partial_bytes(plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]) -> list[int]:
    """Gradients that are summed over ranks after the last backward pass: of what is not split
    but used on other heads or, with sequence parallelism, tokens; and of repeated KV heads."""
    layout = plan.layout
    whole, repeated = 0, 0
    for kind, count in layer_counts(facts, stages).items():
        for param in facts.params_on_rank(kind, tp=layout.tp, ep=layout.ep).values():
            if not param.trained:
                continue
            share = count * cut(param.shape, layout.num_shards)
            if param.cut == "kv_heads" and layout.tp > facts.num_kv_heads:
                repeated += share
            elif _is_partial(param, layout):
                whole += share
    last = facts.adapters is None and any(stage.is_last for stage in stages)
    if layout.sequence_parallel and last:
        whole += cut((facts.hidden_size,), layout.num_shards)  # the last norm
    return [values * FP32 for values in (whole, repeated) if values]


def _is_partial(param: Param, layout: Layout) -> bool:
    """Whether each rank of `tp` has only a part of a parameter's gradient."""
    if param.cut == "experts":
        return layout.sequence_parallel and layout.ep == 1
    return param.cut == "shared" or (param.cut == "whole" and layout.sequence_parallel)


def _num_regions(facts: ModelFacts, layers: Counter[LayerKind]) -> int:
    """Split regions of some layers."""
    of_experts = 2 if facts.shared_width else 1
    return sum(n * (of_experts if kind.has_experts else 2) for kind, n in layers.items())
