"""Peak bytes of the worst rank, by part, without torch.

Checked against counting: parameters against the model that transformers builds, activations
against the tensors that autograd really saves, totals against measured peaks
(tests/unit/test_memory.py and tests/e2e/test_planned.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.config import GIB, Memory, Plan
from shardwise.models.facts import ModelFacts

FP32 = 4
LOSS_CHUNK_TOKENS = 256
"""tokens whose logits exist at a time, which the loss obeys"""
_RUNTIME_BYTES = {"cpu": int(0.36 * GIB), "accelerator": int(1.0 * GIB)}
"""What a process holds before any tensor. CPU: interpreter, torch and transformers, measured with
torch 2.13. Accelerator: context 0.5 to 2 GiB and communicator buffers 0.35 to 0.4 GiB."""
_SLACK = {"cpu": 0.03, "accelerator": 0.15}
"""Allocator overhead as a share of the tensors. CPU: measured with the settings of
launch/local.py. Accelerator: published reserved/allocated ratios are 1.07 to 1.24."""


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Parameters of one rank, after tensor parallelism and before FSDP."""

    layer: int
    outer: int
    """embedding, last norm and head"""

    @classmethod
    def of(cls, facts: ModelFacts, tp: int) -> RankSizes:
        """Sizes of the largest rank: uneven cuts round up."""
        layer = sum(math.prod(shape) for shape in local_shapes(facts, tp).values())
        table = -(-facts.vocab_size // tp) * facts.hidden_size
        return cls(layer=layer, outer=(1 if facts.tied else 2) * table + facts.hidden_size)


def local_shapes(facts: ModelFacts, tp: int) -> dict[str, tuple[int, ...]]:
    """What one rank of `tp` holds of each parameter of a layer: norms and row biases are whole
    everywhere, and a KV head is never cut."""
    shapes = facts.layer_shapes.items()
    return {name: _local_shape(name, shape, facts, tp) for name, shape in shapes}


def _local_shape(name: str, shape: tuple[int, ...], facts: ModelFacts, tp: int) -> tuple[int, ...]:
    if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
        return shape
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return (shape[0], shape[1] // tp)
    parts = min(tp, facts.num_kv_heads) if is_kv(name) else tp
    return (shape[0] // parts, *shape[1:])


def is_kv(name: str) -> bool:
    """Whether a parameter belongs to the keys or values."""
    return "k_proj." in name or "v_proj." in name


def activation_bytes_per_token(
    facts: ModelFacts, *, tp: int, compute_bytes: int, sequence_parallel: bool = False
) -> int:
    """Bytes that one decoder layer keeps for its backward pass, per token.

    By operation: each norm keeps its fp32 input and its scaled output; the projections keep their
    inputs; attention keeps q, k, v, its output and one fp32 number a head; the gated MLP keeps
    both halves, the activation and the product. With sequence parallelism a rank has the norms of
    its own tokens only; the projections keep their gathered inputs.
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
    return norms + linears + attention + qk_norms + mlp


def masked_bytes_per_token(facts: ModelFacts, *, tp: int, compute_bytes: int, seq_len: int) -> int:
    """What a sliding layer keeps on top of that, once rows are longer than its window.

    Attention gets an explicit mask then: a row of it for each token, in the compute dtype, and a
    second copy of its output in the order that the next projection needs.
    """
    if facts.sliding_window is None or seq_len <= facts.sliding_window:
        return 0
    return (seq_len + facts.q_size // tp) * compute_bytes


def predict_memory(plan: Plan, facts: ModelFacts) -> Memory:
    """The memory of a plan's worst rank at its peak."""
    parts = _serving(plan, facts) if plan.task == "serve" else _training(plan, facts)
    where = "cpu" if plan.devices.kind == "cpu" else "accelerator"
    tensors = sum(parts.values())
    reserve = _RUNTIME_BYTES[where] + math.ceil(_SLACK[where] * tensors)
    return Memory(**parts, reserve=reserve)


def state_bytes(facts: ModelFacts) -> int:
    """Weights, gradients and the two moments of AdamW, all fp32: 16 bytes a parameter."""
    return 16 * facts.num_parameters


def _training(plan: Plan, facts: ModelFacts) -> dict[str, int]:
    """The larger of the two peaks of a step.

    The first is where the loss meets the last layer: every activation is there, and the logits
    with their gradient. The second is the end of the backward pass: the activations are gone, but
    the outer group's gradients are whole and on their way into the reduce-scatter.
    """
    layout, train = plan.layout, plan.train
    sizes = RankSizes.of(facts, layout.tp)
    c = plan.precision.compute_bytes
    whole = facts.num_layers * sizes.layer + sizes.outer
    own = -(-whole // layout.fsdp)
    tokens = train.micro_batch * train.seq_len
    tp, split = layout.tp, layout.sequence_parallel
    kept = tokens * activation_bytes_per_token(
        facts, tp=tp, compute_bytes=c, sequence_parallel=split
    )
    masked = masked_bytes_per_token(facts, tp=tp, compute_bytes=c, seq_len=train.seq_len) * tokens
    outside = tokens // tp if split else tokens  # of the sequence, between the split regions
    inputs = facts.hidden_size * c * outside
    # the last norm's input and output; the head's input, its trained part and their gradient
    last = facts.hidden_size * ((FP32 + c) * outside + 3 * c * tokens)
    if train.checkpointing == "full":
        activations = facts.num_layers * inputs + kept + masked + last
    else:
        activations = facts.num_layers * kept + facts.num_sliding_layers * masked + last
    gathered = (whole if layout.keeps_gathered else sizes.outer) * c
    one_pass = train.num_micro_batches(layout) == 1
    summed = whole if layout.reduces_once else own  # of the micro-batches before this one
    at_loss = {
        "gradients": 0 if one_pass else summed * FP32,
        "activations": activations,
        "logits": _logits(plan, facts, tokens),
        "buffers": gathered + 2 * sizes.layer * c,
    }
    at_end = {
        "gradients": own * FP32,
        "activations": kept,
        "logits": 0,
        "buffers": sizes.outer * (2 * c + FP32) + 2 * sizes.layer * (c + FP32),
    }
    peak = max(at_loss, at_end, key=lambda parts: sum(parts.values()))
    states = {"weights": own * FP32, "optimizer": 2 * own * FP32}
    return {**states, **peak, "kv_cache": 0}


def _logits(plan: Plan, facts: ModelFacts, tokens: int) -> int:
    """One chunk of logits, which become their own gradient, and the gradient of the head's
    weight, summed in fp32; in bf16 also a copy of the chunk and the sum's last product."""
    vocab, c = -(-facts.vocab_size // plan.layout.tp), plan.precision.compute_bytes
    copy = 0 if c == FP32 else c
    chunk = vocab * min(tokens, LOSS_CHUNK_TOKENS) * (FP32 + copy)
    return chunk + vocab * facts.hidden_size * (FP32 + copy)


def _serving(plan: Plan, facts: ModelFacts) -> dict[str, int]:
    """Weights, the cache of one whole context, and one pass over the longest prompt."""
    tp, c = plan.layout.tp, plan.precision.compute_bytes
    sizes = RankSizes.of(facts, tp)
    context = plan.serve.context or facts.max_positions
    layer = (2 * facts.hidden_size + 4 * facts.intermediate_size // tp + 2 * facts.q_size // tp) * c
    return {
        "weights": (facts.num_layers * sizes.layer + sizes.outer) * c,
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
