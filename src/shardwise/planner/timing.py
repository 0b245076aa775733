"""Seconds of one training step from measured speeds: compute, memory traffic and collectives."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Plan
from shardwise.models.facts import ModelFacts
from shardwise.planner.machine import Machine, Op
from shardwise.planner.memory import FP32, RankSizes, activation_bytes_per_token

_TRAFFIC_PER_KEPT_BYTE = 10
"""Bytes that a layer's element-wise operations read and write, forward and backward, for each byte
it keeps. Counted by dispatch over the families: 8.4 to 11.5 in fp32, 10.8 to 15 in bf16."""
_COPIES_PER_FSDP_BYTE = 4
"""FSDP copies what it sends into one flat buffer, and what it gets out of one: two reads and two
writes of every byte gathered or reduced."""


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
        """Bytes of all of them."""
        return self.count * self.num_bytes


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by where they go. On gloo nothing overlaps."""

    compute_s: float
    memory_s: float
    collectives_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.memory_s + self.collectives_s


def traffic(plan: Plan, facts: ModelFacts) -> list[Collective]:
    """Every collective of one optimizer step of a training plan.

    Parameters are gathered in the compute dtype: by ZeRO-3 each layer twice a micro-batch (forward
    and backward) and the outer group once, by ZeRO-2 everything once a micro-batch, by ZeRO-1 once
    a step. Gradients are reduced in fp32, then summed over the replicas. Tensor parallelism sums
    the outputs of attention and MLP forward (attention again when activations are recomputed,
    which stops at the last thing that is needed), the gradients of their two inputs and of q and
    k norms backward, and three numbers a token for the loss. Scalars (loss, norm) are left out.

    tests/ranks/test_traffic.py compares it with the collectives that a real step runs.
    """
    layout, c = plan.layout, plan.precision.compute_bytes
    sizes = RankSizes.of(facts, layout.tp)
    num_micro = plan.train.num_micro_batches(layout)
    recompute = plan.train.checkpointing == "full"
    lines = []
    for group, count in ((sizes.layer, facts.num_layers), (sizes.outer, 1)):
        gathers = 1 if layout.zero == 1 else num_micro
        if layout.zero == 3 and group == sizes.layer:
            gathers *= 2
        reductions = 1 if layout.reduces_once else num_micro
        moved: list[tuple[str, Op, int, int]] = [
            ("fsdp", "all_gather", count * gathers, group * c),
            ("fsdp", "reduce_scatter", count * reductions, group * FP32),
            ("dp", "all_reduce", count * reductions, -(-group // layout.fsdp) * FP32),
        ]
        lines += [
            Collective(axis=axis, op=op, count=times, num_bytes=num_bytes)
            for axis, op, times, num_bytes in moved
            if getattr(layout, axis) > 1
        ]
    if layout.tp > 1:
        tokens = plan.train.micro_batch * plan.train.seq_len
        layers = facts.num_layers * num_micro
        hidden = layers * (5 if recompute else 4) + 2 * num_micro
        sums = [
            (hidden, tokens * facts.hidden_size * c),
            (2 * layers if facts.family.qk_norm else 0, facts.head_dim * FP32),
            (num_micro, tokens * FP32),
            (num_micro, 2 * tokens * FP32),
        ]
        lines += [
            Collective(axis="tp", op="all_reduce", count=count, num_bytes=num_bytes)
            for count, num_bytes in sums
            if count
        ]
    return lines


def step_flops(plan: Plan, facts: ModelFacts) -> float:
    """Floating-point operations of one rank in one optimizer step.

    6 per matrix parameter and token (8 with full recomputation), and attention over half of the
    sequence on average (causal): 12 * layers * q_size * seq_len / 2 per token.
    """
    layout, train = plan.layout, plan.train
    tokens = train.num_micro_batches(layout) * train.micro_batch * train.seq_len
    matrices = facts.num_layers * facts.num_layer_parameters + facts.vocab_size * facts.hidden_size
    attention = facts.num_layers * facts.q_size * train.seq_len
    factor = 8 if train.checkpointing == "full" else 6
    return factor * tokens * (matrices + attention) / layout.tp


def step_time(plan: Plan, facts: ModelFacts, machine: Machine) -> StepTime:
    """Predict the seconds of one optimizer step on a probed machine."""
    layout, train = plan.layout, plan.train
    tokens = train.num_micro_batches(layout) * train.micro_batch * train.seq_len
    c = plan.precision.compute_bytes
    kept = activation_bytes_per_token(facts, tp=layout.tp, compute_bytes=c) * facts.num_layers
    logits = 4 * facts.vocab_size // layout.tp * FP32  # softmax twice, in fp32
    own = facts.num_parameters / (layout.tp * layout.fsdp)
    updates = own * FP32 * 7  # AdamW reads four tensors and writes three
    ledger = traffic(plan, facts)
    copies = _COPIES_PER_FSDP_BYTE * sum(x.bytes_per_step for x in ledger if x.axis != "tp")
    moved = (_TRAFFIC_PER_KEPT_BYTE * kept + logits) * tokens + updates + copies
    return StepTime(
        compute_s=step_flops(plan, facts) / machine.matmul_flops[plan.precision.compute],
        memory_s=moved / machine.memory_bytes_per_s,
        collectives_s=sum(
            line.count * machine.collective_s(line.op, line.num_bytes) for line in ledger
        ),
    )
