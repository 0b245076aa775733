"""Seconds of one training step from measured speeds: compute, memory traffic and collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.config import Plan
from shardwise.models.facts import ModelFacts
from shardwise.planner.machine import Machine, Op
from shardwise.planner.memory import (
    FP32,
    LOSS_CHUNK_TOKENS,
    RankSizes,
    activation_bytes_per_token,
    is_kv,
    local_shapes,
)

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
    which stops at the last thing that is needed) and the gradients of their inputs backward, or
    gathers and scatters them under sequence parallelism; and two numbers a token for the loss.
    Scalars (loss, norm) are left out.

    tests/ranks/test_traffic.py compares it with the collectives that a real step runs.
    """
    layout, c = plan.layout, plan.precision.compute_bytes
    sizes = RankSizes.of(facts, layout.tp)
    num_micro = plan.train.num_micro_batches(layout)
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
        lines += _tensor_traffic(plan, facts)
    return lines


def _tensor_traffic(plan: Plan, facts: ModelFacts) -> list[Collective]:
    """Collectives of the `tp` axis. Each layer has two split regions, and the head is one."""
    layout, train = plan.layout, plan.train
    num_micro = train.num_micro_batches(layout)
    layers = facts.num_layers * num_micro
    recompute = layers if train.checkpointing == "full" else 0
    tokens = train.micro_batch * train.seq_len
    tokens = -(-tokens // layout.sequence_multiple) * layout.sequence_multiple
    whole = tokens * facts.hidden_size * plan.precision.compute_bytes
    targets = train.micro_batch * (train.seq_len - 1)
    lines: list[tuple[Op, int, int]] = []
    for begin in range(0, targets, LOSS_CHUNK_TOKENS):
        chunk = min(LOSS_CHUNK_TOKENS, targets - begin)
        lines.append(("all_gather", num_micro, layout.tp * 2 * chunk * FP32))
    if layout.sequence_parallel:
        # in and out of a region, and the other way back; the embedding is cut once
        lines.append(("all_gather", 4 * layers + 2 * recompute + 2 * num_micro, whole))
        lines.append(("reduce_scatter", 4 * layers + recompute + num_micro, whole))
        lines.append(("all_reduce", num_micro, whole))
    else:
        lines.append(("all_reduce", 4 * layers + recompute + 2 * num_micro, whole))
    lines += [("all_reduce", 1, num_bytes) for num_bytes in _partial_bytes(plan, facts)]
    return [
        Collective(axis="tp", op=op, count=count, num_bytes=num_bytes)
        for op, count, num_bytes in lines
    ]


def _partial_bytes(plan: Plan, facts: ModelFacts) -> list[int]:
    """Gradients that are summed over ranks after the last backward pass: of what is not split
    but used on other heads or, with sequence parallelism, tokens; and of repeated KV heads."""
    layout = plan.layout
    held = local_shapes(facts, layout.tp)
    split = layout.sequence_parallel
    whole = [
        name
        for name, shape in held.items()
        if shape == facts.layer_shapes[name] and (split or "q_norm" in name or "k_norm" in name)
    ]
    repeated = [name for name in held if is_kv(name)] if layout.tp > facts.num_kv_heads else []
    sums = []
    for names in (set(whole) - set(repeated), repeated):
        values = sum(_fsdp_share(held[name], layout.fsdp) for name in names) * facts.num_layers
        if names is not repeated and split:
            values += _fsdp_share((facts.hidden_size,), layout.fsdp)  # the last norm
        sums.append(values * FP32)
    return [num_bytes for num_bytes in sums if num_bytes]


def _fsdp_share(shape: tuple[int, ...], fsdp: int) -> int:
    return -(-shape[0] // fsdp) * math.prod(shape[1:])


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
    kept = facts.num_layers * activation_bytes_per_token(
        facts, tp=layout.tp, compute_bytes=c, sequence_parallel=layout.sequence_parallel
    )
    logits = 6 * facts.vocab_size // layout.tp * FP32  # maximum, power, sum, softmax: in place
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
