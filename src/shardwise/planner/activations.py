"""Bytes that a decoder layer keeps for its backward pass, by operation. No torch.

tests/unit/test_memory.py compares them with the tensors that autograd really keeps.
"""

from __future__ import annotations

from shardwise.config import Layout
from shardwise.models.adapters import LORA_A, LORA_B
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import SINK_PADDING, LayerKind

FP32 = 4
_INDEX = 8
_DELTA_CHUNK = 64
"""tokens that kernels of the gated delta rule take at a time (fla-org/flash-linear-attention)"""


def activation_bytes_per_token(
    facts: ModelFacts, kind: LayerKind, layout: Layout, *, compute_bytes: int
) -> int:
    """Bytes that one decoder layer keeps of a token.

    Each norm keeps its fp32 input and its scaled output; with sequence parallelism a rank has the
    norms of its own tokens only. What only the gradient of a frozen weight would need is not kept;
    an adapter keeps its inner values.
    """
    c = compute_bytes
    norms = len(facts.family.norms) * _norm(facts, facts.hidden_size, c)
    if facts.family.norm_bias:  # torch's own, which keeps its input and two numbers
        norms = len(facts.family.norms) * (facts.hidden_size + 2) * c
    norms //= layout.sequence_parts
    mlp = _experts(facts, layout, c) if kind.has_experts else _mlp(facts, layout, c)
    attention = _linear_attention(facts, c) if kind.is_linear else _attention(facts, layout, c)
    if facts.unit_heads and kind.window is not None:  # in fp32, and one number a head
        heads = facts.num_heads // layout.tp + facts.num_kv_heads // min(
            layout.tp, facts.num_kv_heads
        )
        attention += heads * (facts.head_dim + 1) * FP32
    return norms + attention + mlp + _inner(facts, kind) * c


def _feeds(facts: ModelFacts, *names: str) -> bool:
    """Whether the input of some matrices is needed for a gradient: theirs, or of adapters."""
    return facts.adapters is None or bool({*names} & {*(facts.adapters.targets or ())})


def _inner(facts: ModelFacts, kind: LayerKind) -> int:
    """What the adapters of a layer make of a token between their two matrices."""
    if facts.adapters is None:
        return 0
    params = facts.params_of(kind)
    return sum(param.shape[0] for name, param in params.items() if name.endswith(LORA_A))


def _norm(facts: ModelFacts, size: int, c: int) -> int:
    if facts.adapters is not None:
        return size * FP32 + FP32
    return size * (FP32 + (FP32 if facts.family.fp32_norm_output else c)) + FP32


def _attention(facts: ModelFacts, layout: Layout, c: int) -> int:
    """The projections' inputs; queries, keys, values, the output and one fp32 number a head."""
    tp, parts = layout.tp, min(layout.tp, facts.num_kv_heads)
    heads, kv_heads = facts.num_heads // tp, facts.num_kv_heads // parts
    width = _head_width(facts)
    kept = 2 * (heads + kv_heads) * width * c + heads * FP32
    if _feeds(facts, "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa"):
        kept += facts.hidden_size * c
    if facts.family.attention == "fused":  # values are a part of the joint output, which stays
        kept += (heads + kv_heads) * facts.head_dim * c
    if _copies_output(facts) and _feeds(facts, "o_proj"):
        kept += facts.attention_size // tp * c
    if facts.qk_norm:
        norm = _norm(facts, 1, c) - FP32
        kept += (heads + kv_heads) * facts.head_dim * norm + 2 * heads * FP32
    if facts.family.attention == "output gate":  # which stays, and what it makes of the output
        kept += 2 * heads * facts.head_dim * c
        kept += heads * facts.head_dim * c if c == FP32 else 0  # beside the queries in one tensor
    if facts.latent is not None:
        latent = facts.latent
        kept += _norm(facts, latent.kv_rank, c)
        kept += latent.kv_rank * c if _feeds(facts, "kv_b_proj") else 0
        kept += latent.rope_dim * (c if c == FP32 else 0)  # beside the latent in one tensor
        if latent.q_rank is not None:
            kept += _norm(facts, latent.q_rank, c)
            kept += latent.q_rank * c if _feeds(facts, "q_b_proj") else 0
    return kept


def _linear_attention(facts: ModelFacts, c: int) -> int:
    """Gated DeltaNet as transformers writes it, on the kernels that it takes for it: of the
    convolution the input (Dao-AILab/causal-conv1d); of the delta rule the normed queries and keys,
    the values, each head's decay and weight, and its inverted chunk (gated_delta_rule/chunk.py of
    fla-org/flash-linear-attention); and the gated norm of the output.
    """
    linear = facts.linear
    if linear is None:
        raise ValueError(f"{facts.model_type} has no linear attention")
    heads, values = linear.num_value_heads, linear.values
    mixed = (facts.hidden_size + linear.mixed) * c
    rule = (2 * linear.keys + values + heads * (_DELTA_CHUNK + 1)) * c
    rule += (2 * linear.num_key_heads + 3 * heads) * FP32
    # its fp32 input, the gate and its activation; the output normed, weighted and gated
    norm = values * (3 * FP32 + 3 * c) + heads * FP32
    return mixed + rule + norm


def _head_width(facts: ModelFacts) -> int:
    """Numbers of a head in attention (models/attention.py)."""
    return facts.head_dim + (SINK_PADDING if facts.family.sinks else 0)


def _copies_output(facts: ModelFacts) -> bool:
    """Whether the last projection needs attention's output in another order, or narrower."""
    family = facts.family
    return family.attention in ("fused", "latent") or family.sinks or family.partial_rotary


def _mlp(facts: ModelFacts, layout: Layout, c: int) -> int:
    """The input, both halves, the activation and their product; GPT-2's activation function is
    made of operations that keep five."""
    widths = 5 if facts.family.mlp == "conv1d" else 4
    widths -= 0 if _feeds(facts, "down_proj") else 1
    entered = facts.hidden_size if _feeds(facts, "gate_proj", "up_proj", "gate_up_proj") else 0
    return (entered + widths * facts.intermediate_size // layout.tp) * c


def _experts(facts: ModelFacts, layout: Layout, c: int) -> int:
    """Of each choice of a token (grouped products) the input, both halves, the activation, the
    product and the output, and five numbers of indices; tokens that travel are kept once more.

    The experts are taken to be used evenly: a rank's have as many tokens to work on as its part of
    the sequence has.
    """
    row = facts.family.experts
    if row is None:
        raise ValueError(f"{facts.model_type} has no experts")
    h, travels, trained = facts.hidden_size, layout.ep > 1, facts.adapters is None
    sizes = (3 if travels else 2) * h + row.kept_widths * facts.expert_width
    sizes -= 0 if trained else h + facts.expert_width
    choice = sizes * c + (11 if travels else 5) * _INDEX
    routed = facts.experts_per_token * choice + facts.num_experts * FP32
    routed += h * c if trained else 0
    if row.corrected:  # a router in fp32
        routed += (h * (FP32 if c < FP32 else 0) if trained else 0) + facts.num_experts
    shared = (4 if trained else 3) * facts.shared_width // layout.tp * c
    if shared and layout.sequence_parallel and trained:
        shared += h * c  # gathered; else it is the router's input
    if row.shared_gate:
        shared += (h + 1) * c  # what comes of them, and the gate
    return routed // layout.tp + shared


def masked_bytes_per_token(
    facts: ModelFacts,
    kind: LayerKind,
    layout: Layout,
    c: int,
    *,
    seq_len: int,
    packed: bool = False,
) -> int:
    """What a sliding layer keeps on top of that, once rows are longer than its window.

    Attention gets an explicit mask then: a row of it for each token, in the compute dtype (packed
    rows have one for all layers, see `memory.py`); and transformers repeats keys and values for
    each query head.
    """
    if kind.window is None or seq_len <= kind.window:
        return 0
    return ((0 if packed else seq_len) + _repeated(facts, layout) - _joint(facts, layout)) * c


def _joint(facts: ModelFacts, layout: Layout) -> int:
    """Numbers of a fused projection's output that go when its values are copied."""
    if facts.family.attention != "fused" or not _repeated(facts, layout):
        return 0
    parts = min(layout.tp, facts.num_kv_heads)
    return (facts.num_heads // layout.tp + facts.num_kv_heads // parts) * facts.head_dim


def _repeated(facts: ModelFacts, layout: Layout) -> int:
    """Numbers that are added to keys and values when each query head gets its own."""
    tp, parts = layout.tp, min(layout.tp, facts.num_kv_heads)
    if facts.num_kv_heads == parts:
        return 0  # one head is repeated without a copy
    return 2 * _head_width(facts) * (facts.num_heads // tp - facts.num_kv_heads // parts)


def context_bytes_per_token(facts: ModelFacts, layout: Layout, c: int, *, packed: bool) -> int:
    """What a layer keeps on top of that, per token of a rank, where others have the rest of the
    sequence: the keys and values of all of it (repeated for each query head, as transformers does
    where there is a mask), and the output's chunks. Packed rows have such chunks on one rank too.
    """
    chunks = facts.attention_size // layout.tp * c
    if layout.cp == 1:
        return chunks if packed else 0
    tp, parts = layout.tp, min(layout.tp, facts.num_kv_heads)
    heads, kv_heads = facts.num_heads // tp, facts.num_kv_heads // parts
    kept = 2 * _head_width(facts) * (heads * layout.cp - kv_heads) * c + chunks
    # what is padded is copied for each of the two chunks, which see half a sequence twice
    half = heads * _head_width(facts) * c // 2
    if facts.family.sinks:
        kept += 2 * half
    if facts.latent is not None:
        kept += half + (layout.cp - 1) * facts.latent.kv_rank * c
    return kept - _joint(facts, layout) * c


def selective_bytes_per_token(facts: ModelFacts, kind: LayerKind, layout: Layout, c: int) -> int:
    """The results of a layer's matrix products, those of adapters too, and of its attention."""
    tp, h = layout.tp, facts.hidden_size
    out = facts.attention_size // tp
    products = h + (2 if facts.family.attention == "output gate" else 1) * facts.q_size // tp
    products += (facts.k_size + facts.v_size) // min(tp, facts.num_kv_heads)
    per_head = FP32
    if kind.is_linear and facts.linear is not None:  # its kernels run again
        products = h + facts.linear.mixed + facts.linear.values + 2 * facts.linear.num_value_heads
        out = per_head = 0
    if kind.has_experts:
        products += facts.num_experts
        products += h + 2 * facts.shared_width // tp if facts.shared_width else 0
    else:
        halves = 1 if facts.family.mlp == "conv1d" else 2
        products += h + halves * (facts.intermediate_size // tp)
    if facts.adapters is not None:
        both = facts.params_on_rank(kind, tp=tp, ep=layout.ep).items()
        products += sum(p.shape[0] for name, p in both if name.endswith((LORA_A, LORA_B)))
    return (products + out) * c + facts.num_heads // tp * per_head
