"""Seconds of one training step: compute, memory traffic, collectives and what of them shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.config import Plan
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind
from shardwise.planner.activations import FP32
from shardwise.planner.memory import (
    RankSizes,
    layer_counts,
    local_tokens,
    recomputed_layers,
    stages_of_rank,
)
from shardwise.planner.network import Group, place
from shardwise.planner.speeds import Speeds
from shardwise.planner.stages import StageSpec, bubble, head_cost, layer_costs, worst_ranks
from shardwise.planner.traffic import Collective, fsdp_groups, traffic
from shardwise.planner.work import Product, head_product, layer_work

_COPIES_PER_FSDP_BYTE = {False: 4, True: 2}
"""Bytes read and written for each byte gathered or reduced. What is gathered is copied out of one
flat buffer, what is reduced into one (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py);
where nothing overlaps, ranks exchange pieces, which are copied once more (parallel/shards.py)."""
_UPDATE_TENSORS = 7
"""AdamW reads four tensors and writes three"""
_LOGIT_PASSES = 6
"""maximum, power, sum and softmax are made in place"""
SHARD_AXES = ("fsdp", "efsdp", "dp")
"""whose traffic can be hidden behind compute"""
_BACKWARD_ATTENTION = {False: 2.0, True: 2.5}
"""for each forward second: fused attention, which devices that overlap run, makes five products
where two are made forward (FlashAttention-2, arXiv 2307.08691, section 4.1)"""


@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """A line of the ledger with its link."""

    line: Collective
    group: Group
    link: str
    time_s: float
    exposed_s: float
    """of it, what nothing else hides"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by where they go."""

    compute_s: float
    memory_s: float
    host_s: float
    """waiting for the host to start operations"""
    idle_s: float
    """of a pipeline"""
    lines: tuple[TimedCollective, ...]

    @property
    def collectives_s(self) -> float:
        """What shows of them."""
        return sum(line.exposed_s for line in self.lines)

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.memory_s + self.host_s + self.idle_s + self.collectives_s

    def exposed_by_axis(self) -> dict[str, float]:
        """Seconds that each axis of the mesh adds to a step."""
        found: dict[str, float] = {}
        for line in self.lines:
            axis = line.line.axis
            found[axis] = found.get(axis, 0.0) + line.exposed_s
        return found


def model_flops_per_token(plan: Plan, facts: ModelFacts) -> float:
    """What a token takes in a step by the convention of MFU: nothing twice, causal attention.

    6 for each multiply-add of the forward pass; 4 where a matrix is frozen and has no gradient.
    """
    one = plan.model_copy(
        update={"layout": plan.layout.model_copy(update={"cp": 1})}
    )  # what ranks of cp do twice does not count
    operations = 6 * (sum(layer_costs(one, facts)) + head_cost(facts))
    if facts.adapters is None:
        return operations
    layers = (facts.num_active_parameters(k) - facts.num_trained_of(k) for k in facts.layers)
    return operations - 2 * (sum(layers) + head_cost(facts))


class _Seconds(NamedTuple):
    compute: float
    memory: float
    host: float

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.host

    def times(self, count: float) -> _Seconds:
        return _Seconds(self.compute * count, self.memory * count, self.host * count)


class _Passes(NamedTuple):
    """Of one micro-batch through a layer."""

    forward: _Seconds
    backward: _Seconds


def step_time(plan: Plan, facts: ModelFacts, speeds: Speeds) -> StepTime:
    """Predict the seconds of one optimizer step: of its slowest stage, idling included."""
    return StepTimer(facts, speeds).step(plan)


class StepTimer:
    """Step times of one model on one machine; what layouts have in common is computed once."""

    def __init__(self, facts: ModelFacts, speeds: Speeds) -> None:
        self.facts, self.speeds = facts, speeds
        self._layers: dict[tuple[object, ...], _Passes] = {}

    def step(self, plan: Plan) -> StepTime:
        """The time of one optimizer step."""
        ranks = [self._rank(plan, rank) for rank in worst_ranks(plan, self.facts)]
        return max(ranks, key=lambda time: time.total_s)

    def _rank(self, plan: Plan, rank: int) -> StepTime:
        facts, speeds = self.facts, self.speeds
        num_micro = plan.train.num_micro_batches(plan.layout)
        stages = stages_of_rank(plan, facts, rank)
        sizes = RankSizes.of(facts, plan.layout, stages)
        passes = self._passes(plan, stages, has_head=bool(sizes.head))
        busy = _added((passes.forward, passes.backward)).times(num_micro)
        states = speeds.memory_s(self._state_bytes(plan, sizes, stages))
        lines = self._lines(plan, rank, passes)
        within = sum(t.exposed_s for t in lines if t.line.axis not in SHARD_AXES)
        return StepTime(
            compute_s=busy.compute,
            memory_s=busy.memory + states,
            host_s=busy.host,
            idle_s=bubble(plan) * (busy.total + within),
            lines=tuple(lines),
        )

    def _passes(self, plan: Plan, stages: Sequence[StageSpec], *, has_head: bool) -> _Passes:
        """One micro-batch through the stages of a rank."""
        again = recomputed_layers(plan, self.facts, stages)
        forward, backward = [], []
        for kind, count in layer_counts(self.facts, stages).items():
            layer = self._layer(plan, kind)
            forward.append(layer.forward.times(count))
            backward.append(layer.backward.times(count))
            if again[kind]:
                one = layer.forward
                if plan.train.checkpointing == "selective":
                    one = one._replace(compute=0.0)  # products and attention are kept
                backward.append(one.times(again[kind]))
        if has_head:
            head = self._head(plan)
            forward.append(head.forward)
            backward.append(head.backward)
        return _Passes(_added(forward), _added(backward))

    def _layer(self, plan: Plan, kind: LayerKind) -> _Passes:
        layout, train = plan.layout, plan.train
        key = (
            *(kind, layout.tp, layout.ep, layout.cp, layout.sequence_parallel),
            *(train.micro_batch, train.seq_len, train.compile, plan.precision.compute),
        )
        if key not in self._layers:
            work, dtype = layer_work(plan, self.facts, kind), plan.precision.compute
            products = self._products_s(work.products, plan)
            attention = self.speeds.attention_s(work.attention_flops, dtype)
            backward = products + self._products_s([p for p in work.products if p.trained], plan)
            backward += _BACKWARD_ATTENTION[self.speeds.overlaps] * attention
            self._layers[key] = _Passes(
                self._seconds(products + attention, work.forward_bytes, work.host_ops[0]),
                self._seconds(backward, work.backward_bytes, work.host_ops[1]),
            )
        return self._layers[key]

    def _head(self, plan: Plan) -> _Passes:
        """Head and loss: logits are made, and their gradient, a chunk at a time."""
        product = head_product(plan, self.facts)
        products = self._products_s([product], plan)
        backward = products * (2 if product.trained else 1)
        vocab = self.facts.vocab_size // plan.layout.tp
        moved = _LOGIT_PASSES * vocab * FP32 * local_tokens(plan)
        return _Passes(self._seconds(products, moved, 0), self._seconds(backward, 0, 0))

    def _products_s(self, products: Iterable[Product], plan: Plan) -> float:
        dtype = plan.precision.compute
        return sum(p.num * self.speeds.matmul_s(p.m, p.n, p.k, dtype) for p in products if p.m > 0)

    def _seconds(self, compute_s: float, num_bytes: float, host_ops: int) -> _Seconds:
        memory_s = self.speeds.memory_s(num_bytes)
        waiting = host_ops * self.speeds.host_s - compute_s - memory_s
        return _Seconds(compute_s, memory_s, max(0.0, waiting))

    def _state_bytes(self, plan: Plan, sizes: RankSizes, stages: Sequence[StageSpec]) -> float:
        """Read and written once a step: by the update, and by FSDP's copies."""
        updates = sizes.own_trained(plan.layout) * FP32 * _UPDATE_TENSORS
        r = plan.precision.reduce_bytes
        copied = sum(
            group.num_bytes * group.gathers + group.trained * group.reductions * r
            for group in fsdp_groups(plan, self.facts, stages)
            if group.num_ranks > 1 or plan.layout.dp > 1
        )
        return updates + _COPIES_PER_FSDP_BYTE[self.speeds.overlaps] * copied

    def _lines(self, plan: Plan, rank: int, passes: _Passes) -> list[TimedCollective]:
        """The ledger, timed on the links that its groups use."""
        timed = []
        for line in traffic(plan, self.facts, rank):
            group = place(plan.layout, line.axis, self.speeds.node or plan.layout.world_size)
            seconds = line.count * self.speeds.collective_s(line.op, line.num_bytes, group)
            timed.append((line, group, seconds))
        shown = self._shown(plan, timed, passes)
        return [
            TimedCollective(
                line=line,
                group=group,
                link=self.speeds.link(group),
                time_s=seconds,
                exposed_s=seconds * shown if line.axis in SHARD_AXES else seconds,
            )
            for line, group, seconds in timed
        ]

    def _shown(
        self, plan: Plan, timed: Sequence[tuple[Collective, Group, float]], passes: _Passes
    ) -> float:
        """The share of the traffic of shards and replicas that shows.

        FSDP gathers a layer while the one before it computes, and reduces a layer's gradients
        while the next ones are made; only the first gather of a pass and the last reduction of a
        step have nothing to hide behind. A pipeline of torch reduces after its last pass, and so do
        replicas without shards. Tensor and context parallelism take time, too, that hides.
        """
        layout, num_micro = plan.layout, plan.train.num_micro_batches(plan.layout)
        shards = [(line, s) for line, _, s in timed if line.axis in SHARD_AXES]
        total = sum(s for _, s in shards)
        if not self.speeds.overlaps or total == 0 or layout.sums_by_itself:
            return 1.0
        within = sum(s for line, _, s in timed if line.axis not in SHARD_AXES) / num_micro
        forward = passes.forward.total + within / 3
        backward = passes.backward.total + within * 2 / 3
        gathers = sum(s for line, s in shards if line.op == "all_gather")
        reductions = total - gathers
        first = max((s / line.count for line, s in shards if line.op == "all_gather"), default=0.0)
        last = max((s / line.count for line, s in shards if line.op != "all_gather"), default=0.0)
        if layout.pp > 1:
            return (max(first, gathers - forward) + reductions) / total
        if layout.zero == 1:
            shown = max(first, gathers - forward) + max(last, reductions - backward)
            return min(1.0, shown / total)
        again = 1 / 2 if layout.zero == 3 else 0.0
        in_forward = (1 - again) * gathers / num_micro
        in_backward = (again * gathers + reductions) / num_micro
        shown = num_micro * max(first, in_forward - forward)
        shown += max(last, num_micro * (in_backward - backward))
        return min(1.0, shown / total)


def _added(parts: Iterable[_Seconds]) -> _Seconds:
    compute = memory = host = 0.0
    for part in parts:
        compute, memory, host = compute + part.compute, memory + part.memory, host + part.host
    return _Seconds(compute, memory, host)
