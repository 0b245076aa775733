"""Peak bytes of the worst rank, by part, without torch.

Checked against counting: parameters against the model that transformers builds, activations
against the tensors that autograd really saves, totals against measured peaks
(tests/unit/test_memory.py and tests/e2e/test_planned.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import GIB, Layout, Memory, Plan
from shardwise.models.facts import DOWN, GATE_UP, ModelFacts
from shardwise.planner.stages import StageSpec, passes_under_way, stages_of, worst_ranks

FP32 = 4
_INDEX = 8
LOSS_CHUNK_TOKENS = 256
"""tokens whose logits exist at a time, which the loss obeys"""
_RUNTIME_BYTES = {"cpu": int(0.36 * GIB), "accelerator": int(1.0 * GIB)}
"""What a process holds before any tensor. CPU: interpreter, torch and transformers, measured with
torch 2.13. Accelerator: context 0.5 to 2 GiB and communicator buffers 0.35 to 0.4 GiB."""
_SLACK = {"cpu": 0.03, "accelerator": 0.15}
"""Allocator overhead as a share of the tensors. CPU: measured with the settings of
launch/local.py. Accelerator: published reserved/allocated ratios are 1.07 to 1.24."""
_KEPT_BYTES = int(0.08 * GIB)
"""What a training process on CPU holds besides, in freed blocks that it keeps for their next use:
0.01 to 0.14 GiB by measurement, whatever the layout and however large the states. In a pipeline it
would be 0.3 GiB, with so many passes under way: there nothing is kept."""


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Parameters of one rank, after pipeline and tensor parallelism and before FSDP."""

    layer: int
    """of one decoder layer, its experts included"""
    experts: int
    """of one layer, those that have a sharding of their own (ep > 1)"""
    num_layers: int
    embedding: int
    head: int
    """last norm and, unless it is the embedding of the same rank, the head"""

    @property
    def outer(self) -> int:
        """Outside the layers."""
        return self.embedding + self.head

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_layers * self.layer + self.outer

    def own(self, layout: Layout) -> int:
        """What one rank keeps of them."""
        experts = self.num_layers * self.experts
        dense = -(-(self.total - experts) // layout.num_shards)
        return dense + -(-experts // layout.num_expert_shards)

    @classmethod
    def of(
        cls, facts: ModelFacts, layout: Layout, stages: Sequence[StageSpec] | None = None
    ) -> RankSizes:
        """Sizes of the largest rank: uneven cuts round up.

        Args:
            stages: those of the rank; None: the whole model.
        """
        layer = sum(math.prod(shape) for shape in local_shapes(facts, layout).values())
        table = -(-facts.vocab_size // layout.tp) * facts.hidden_size
        if stages is None:
            num_layers, has_embedding, has_head, shared = facts.num_layers, True, True, facts.tied
        else:
            num_layers = sum(len(stage.layers) for stage in stages)
            has_embedding = any(stage.is_first for stage in stages)
            has_head = any(stage.is_last for stage in stages)
            shared = facts.tied and len(stages) == 1 and has_embedding
        head = facts.hidden_size + (0 if shared else table)
        return cls(
            layer=layer,
            experts=facts.num_layer_expert_parameters // layout.ep if layout.ep > 1 else 0,
            num_layers=num_layers,
            embedding=table if has_embedding else 0,
            head=head if has_head else 0,
        )


def stages_of_rank(plan: Plan, facts: ModelFacts, rank: int) -> list[StageSpec]:
    """The stages of one position on the `pp` axis."""
    return [stage for stage in stages_of(plan, facts) if stage.rank == rank]


def local_shapes(facts: ModelFacts, layout: Layout) -> dict[str, tuple[int, ...]]:
    """What one rank of `tp` and `ep` holds of each parameter of a layer: norms and row biases are
    whole everywhere, and a KV head is never cut."""
    shapes = facts.layer_shapes.items()
    return {name: _local_shape(name, shape, facts, layout) for name, shape in shapes}


def _local_shape(
    name: str, shape: tuple[int, ...], facts: ModelFacts, layout: Layout
) -> tuple[int, ...]:
    tp = layout.tp
    if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
        return shape
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return (shape[0], shape[1] // tp)
    if is_expert(name):
        return (shape[0] // layout.ep, *shape[1:])
    if name == "mlp.gate.weight":
        return shape  # the router works on whole tokens
    parts = min(tp, facts.num_kv_heads) if is_kv(name) else tp
    return (shape[0] // parts, *shape[1:])


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to stacked experts."""
    return name in (GATE_UP, DOWN)


def is_kv(name: str) -> bool:
    """Whether a parameter belongs to the keys or values."""
    return "k_proj." in name or "v_proj." in name


def activation_bytes_per_token(
    facts: ModelFacts,
    *,
    tp: int,
    compute_bytes: int,
    sequence_parallel: bool = False,
    ep: int = 1,
) -> int:
    """Bytes that one decoder layer keeps for its backward pass, per token.

    By operation: each norm keeps its fp32 input and its scaled output; the projections keep their
    inputs; attention keeps q, k, v, its output and one fp32 number a head; the gated MLP keeps
    both halves, the activation and the product. With sequence parallelism a rank has the norms of
    its own tokens only; the projections keep their gathered inputs. Experts (grouped products) keep
    for each choice of a token their input, both halves, the activation, the product and the output,
    and five numbers of indices; tokens that travel are kept once more. The experts are taken to be
    used evenly.
    """
    c = compute_bytes
    norm = FP32 + (FP32 if facts.family.fp32_norm_output else c)
    q, kv = facts.q_size // tp, facts.kv_size // min(tp, facts.num_kv_heads)
    num_heads = facts.num_heads // tp
    norms = len(facts.family.norms) * (facts.hidden_size * norm + FP32)
    if sequence_parallel:
        norms //= tp
    linears = 2 * facts.hidden_size * c
    attention = 2 * (q + kv) * c + num_heads * FP32
    qk_norms = (q + kv) * norm + 2 * num_heads * FP32 if facts.family.qk_norm else 0
    mlp = 4 * (facts.intermediate_size // tp) * c
    if not facts.num_experts:
        return norms + linears + attention + qk_norms + mlp
    # a rank's experts have as many tokens to work on as its part of the sequence has
    linears = facts.hidden_size * c + facts.hidden_size * c // tp
    sizes = (2 if ep == 1 else 3) * facts.hidden_size + 4 * facts.intermediate_size
    choice = sizes * c + (5 if ep == 1 else 11) * _INDEX
    mlp = (facts.experts_per_token * choice + facts.num_experts * FP32) // tp
    return norms + linears + attention + qk_norms + mlp


def masked_bytes_per_token(facts: ModelFacts, *, tp: int, compute_bytes: int, seq_len: int) -> int:
    """What a sliding layer keeps on top of that, once rows are longer than its window.

    Attention gets an explicit mask then: a row of it for each token, in the compute dtype, and a
    second copy of its output in the order that the next projection needs.
    """
    if facts.sliding_window is None or seq_len <= facts.sliding_window:
        return 0
    return (seq_len + facts.q_size // tp) * compute_bytes


def context_bytes_per_token(facts: ModelFacts, layout: Layout, c: int) -> int:
    """What a layer keeps on top of that, per token of a rank, where others have the rest of the
    sequence: the keys and values of all of it (repeated for each query head, as transformers does
    where there is a mask), and the output's chunks."""
    if layout.cp == 1:
        return 0
    q, kv = facts.q_size // layout.tp, facts.kv_size // min(layout.tp, facts.num_kv_heads)
    return (2 * (q * layout.cp - kv) + q) * c


def _context_masks(plan: Plan, facts: ModelFacts) -> int:
    """Masks of a rank's two chunks, for all layers alike; again for those with a window."""
    layout = plan.layout
    if layout.cp == 1:
        return 0
    chunk = plan.train.seq_len / (2 * layout.cp)
    one = chunk * chunk * (2 * layout.cp + 1) * plan.precision.compute_bytes
    return int(one * (2 if 0 < facts.num_sliding_layers < facts.num_layers else 1))


def local_tokens(plan: Plan) -> int:
    """Tokens of a micro-batch of full rows on one rank, with the padding that its axes need."""
    layout, train = plan.layout, plan.train
    padded = -(-train.seq_len // layout.sequence_multiple) * layout.sequence_multiple
    return train.micro_batch * padded // layout.cp


def predict_memory(plan: Plan, facts: ModelFacts) -> Memory:
    """The memory of a plan's worst rank at its peak."""
    if plan.task == "serve":
        parts = _serving(plan, facts)
    else:
        ranks = (_training(plan, facts, rank) for rank in worst_ranks(plan, facts))
        parts = max(ranks, key=lambda parts: sum(parts.values()))
    tensors = sum(parts.values())
    least = _least_reserve(plan, tensors)
    trains_here = plan.task == "full" and plan.devices.kind == "cpu"
    kept = _KEPT_BYTES if trains_here and plan.layout.pp == 1 else 0
    capacity = plan.devices.memory_gib
    if capacity is not None and tensors + least + kept > capacity * GIB:
        kept = 0  # memory comes before speed
    return Memory(**parts, reserve=least + kept)


def keeps_freed_blocks(plan: Plan, memory: Memory) -> bool:
    """Whether a rank on CPU has room to keep freed blocks for their next use.

    Args:
        memory: what `predict_memory` says of the plan.
    """
    return memory.reserve > _least_reserve(plan, memory.total - memory.reserve)


def _least_reserve(plan: Plan, tensors: int) -> int:
    where = "cpu" if plan.devices.kind == "cpu" else "accelerator"
    return _RUNTIME_BYTES[where] + math.ceil(_SLACK[where] * tensors)


def state_bytes(facts: ModelFacts) -> int:
    """Weights, gradients and the two moments of AdamW, all fp32: 16 bytes a parameter."""
    return 16 * facts.num_parameters


def _training(plan: Plan, facts: ModelFacts, rank: int) -> dict[str, int]:
    """The larger of the two peaks of a step, on one position of the `pp` axis.

    The first is where the loss meets the last layer: every activation is there, and the gradient
    of the head. The second is the end of the backward pass: the activations are gone, but the
    outer group's gradients are whole and on their way into the reduce-scatter. A pipeline reduces
    all groups there, one after the other, and has its receive buffers besides.
    """
    layout, train = plan.layout, plan.train
    stages = stages_of_rank(plan, facts, rank)
    sizes = RankSizes.of(facts, layout, stages)
    c = plan.precision.compute_bytes
    own = sizes.own(layout)
    tokens = local_tokens(plan)
    received = _received_bytes(plan, facts, stages)
    gathered = (sizes.total if layout.keeps_gathered else sizes.outer) * c
    r = plan.precision.reduce_bytes
    # of the micro-batches before this one
    summed = sizes.total * r if layout.reduces_once else own * FP32
    passes = passes_under_way(plan, rank)
    moments = [(passes, summed)]
    if passes == train.num_micro_batches(layout) * len(stages):
        # all at once: gradients begin when the first pass has let go of its activations
        moments = [(passes, 0), (passes - 1, summed)]
    at_loss = [
        {
            "gradients": gradients,
            "activations": _activations(plan, facts, passes, stages),
            "logits": _logits(plan, facts, tokens) if sizes.head else 0,
            "buffers": gathered + 2 * sizes.layer * c + received + _context_masks(plan, facts),
        }
        for passes, gradients in moments
        if passes
    ]
    at_end = {
        "gradients": own * FP32,
        "activations": _kept(plan, facts),
        "logits": 0,
        "buffers": sizes.outer * (2 * c + r) + 2 * sizes.layer * (c + r),
    }
    if layout.pp > 1:
        at_end["activations"] = 0
        at_end["gradients"] += sizes.total * r
        largest = max(sizes.layer, sizes.outer)
        at_end["buffers"] = sizes.total * c + largest * r + received
    peak = max(*at_loss, at_end, key=lambda parts: sum(parts.values()))
    states = {"weights": own * FP32, "optimizer": 2 * own * FP32}
    return {**states, **peak, "kv_cache": 0}


def _kept(plan: Plan, facts: ModelFacts) -> int:
    """Bytes that one layer keeps of one micro-batch."""
    layout = plan.layout
    per_token = activation_bytes_per_token(
        facts,
        tp=layout.tp,
        compute_bytes=plan.precision.compute_bytes,
        sequence_parallel=layout.sequence_parallel,
        ep=layout.ep,
    )
    per_token += context_bytes_per_token(facts, layout, plan.precision.compute_bytes)
    return per_token * local_tokens(plan)


def _activations(plan: Plan, facts: ModelFacts, passes: int, stages: Sequence[StageSpec]) -> int:
    """What so many forward passes of a stage have kept."""
    layout, train, c = plan.layout, plan.train, plan.precision.compute_bytes
    tokens = local_tokens(plan)
    kept = _kept(plan, facts)
    masked = tokens * masked_bytes_per_token(
        facts, tp=layout.tp, compute_bytes=c, seq_len=train.seq_len
    )
    outside = tokens // layout.sequence_parts  # of the sequence, between the split regions
    inputs = facts.hidden_size * c * outside
    # the last norm's input and output; the head's input, its trained part and their gradient
    last = facts.hidden_size * ((FP32 + c) * outside + 3 * c * tokens)
    whole = kept + masked * facts.num_sliding_layers / facts.num_layers
    layers = sum(len(stage.layers) for stage in stages) / len(stages)
    again = 0.0  # layers that are computed again, of which one is at a time
    little, one = 0, 0
    if train.checkpointing != "none":
        again, one = math.ceil(layers / train.checkpoint_every), kept + masked
        little = inputs
    if train.checkpointing == "selective":
        little += tokens * _selective_bytes_per_token(facts, layout, c)
    activations = passes * ((layers - again) * whole + again * little) + one
    return int(activations) + (last if any(stage.is_last for stage in stages) else 0)


def _selective_bytes_per_token(facts: ModelFacts, layout: Layout, c: int) -> int:
    """The results of a layer's matrix products and of its attention."""
    tp = layout.tp
    q, kv = facts.q_size // tp, facts.kv_size // min(tp, facts.num_kv_heads)
    mlp = facts.hidden_size + 2 * (facts.intermediate_size // tp)
    products = q + 2 * kv + facts.hidden_size + (facts.num_experts or mlp)
    return (products + q) * c + facts.num_heads // tp * FP32


def _received_bytes(plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]) -> int:
    """Buffers for what neighbours send: of every micro-batch, for the whole step."""
    layout, train = plan.layout, plan.train
    tokens = local_tokens(plan) // layout.sequence_parts
    ways = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    one = tokens * facts.hidden_size * plan.precision.compute_bytes
    return ways * train.num_micro_batches(layout) * one if layout.pp > 1 else 0


def _logits(plan: Plan, facts: ModelFacts, tokens: int) -> int:
    """One chunk of logits, which become their own gradient (in bf16 also a copy of the chunk), and
    the gradient of the head's weight: of several chunks, it is summed in fp32 and cast after."""
    vocab, c = -(-facts.vocab_size // plan.layout.tp), plan.precision.compute_bytes
    chunk = vocab * min(tokens, LOSS_CHUNK_TOKENS) * (FP32 if c == FP32 else FP32 + c)
    weight = vocab * facts.hidden_size
    if c == FP32 or tokens <= LOSS_CHUNK_TOKENS:
        return chunk + weight * c
    return weight * FP32 + max(chunk, weight * c)


def _serving(plan: Plan, facts: ModelFacts) -> dict[str, int]:
    """Weights, the cache of one whole context, and one pass over the longest prompt."""
    tp, c = plan.layout.tp, plan.precision.compute_bytes
    sizes = RankSizes.of(facts, plan.layout)
    context = plan.serve.context or facts.max_positions
    layer = (2 * facts.hidden_size + 4 * facts.intermediate_size // tp + 2 * facts.q_size // tp) * c
    return {
        "weights": sizes.total * c,
        "gradients": 0,
        "optimizer": 0,
        "activations": layer * context,
        "logits": 2 * facts.vocab_size * FP32,
        "buffers": 0,
        "kv_cache": 2
        * facts.num_layers
        * facts.kv_size
        // min(tp, facts.num_kv_heads)
        * c
        * context,
    }
