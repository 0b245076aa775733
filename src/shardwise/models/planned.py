"""Families that Shardwise does not run and that can be planned all the same: parameters exact, and
the bytes that a layer keeps within what tests/unit/test_memory.py allows.
"""

from __future__ import annotations

from shardwise.models.families import FAMILIES, LORA, QLORA, Experts, Family, StoredExperts

_DENSE, _MIXTURE = (
    tuple(kind for kind in FAMILIES[name].proved if kind not in (LORA, QLORA))
    for name in ("llama", "mixtral")
)
"""kinds that are counted; what adapters keep is not"""
_UNSPLIT = tuple(kind for kind in _DENSE if not {"tp", "cp", "parallel"} & set(kind.split()))
"""of layers with a state that runs along the sequence, which nobody here cuts"""
_NORMS, _SANDWICH_NORMS = FAMILIES["llama"].norms, FAMILIES["gemma3_text"].norms
_WITH_SHARED = Experts(
    stored=StoredExperts(
        gate="experts.{}.gate_proj.weight",
        up="experts.{}.up_proj.weight",
        down="experts.{}.down_proj.weight",
    ),
    shared_width="shared_expert_intermediate_size",
    shared_name="shared_expert",
    shared_gate=True,
)

PLANNED: tuple[Family, ...] = (
    Family(
        model_type="smollm3",
        norms=_NORMS,
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        default_kv_heads=4,
        tied_by_default=True,
        sliding="upper",
        planned=_DENSE,
    ),
    Family(
        model_type="gemma2",
        norms=_SANDWICH_NORMS,
        qkv_bias=None,
        o_bias=None,
        default_head_dim=256,
        default_kv_heads=4,
        tied_by_default=True,
        sliding="pattern",
        default_pattern=2,
        fp32_norm_output=True,
        planned=_DENSE,
    ),
    Family(
        model_type="glm4",
        partial_rotary=True,
        norms=(*_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        qkv_bias=None,
        mlp="fused",
        default_attention_bias=True,
        default_head_dim=128,
        default_kv_heads=2,
        planned=_DENSE,
    ),
    Family(
        model_type="glm4_moe",
        partial_rotary=True,
        norms=_NORMS,
        qk_norm=None,
        qkv_bias=None,
        default_kv_heads=8,
        experts=FAMILIES["deepseek_v3"].experts,
        dense_layers="first",
        keys={"num_experts": "n_routed_experts"},
        planned=_MIXTURE,
    ),
    Family(
        model_type="minimax_m2",
        partial_rotary=True,
        norms=_NORMS,
        qk_norm=True,
        qk_norm_of_all=True,
        qkv_bias=None,
        o_bias=None,
        default_head_dim=128,
        default_kv_heads=8,
        keys={"num_experts": "num_local_experts"},
        experts=Experts(stored=None, width="intermediate_size"),
        planned=_MIXTURE,
    ),
    Family(
        model_type="llama4_text",
        norms=_NORMS,
        qkv_bias=None,
        o_bias=None,
        default_head_dim=128,
        default_kv_heads=8,
        unit_heads=True,
        mlp_name="feed_forward",
        sliding="pattern",
        default_window=8192,
        default_pattern=4,
        windowed="chunked_attention",
        keys={
            "intermediate_size": "intermediate_size_mlp",
            "expert_width": "intermediate_size",
            "num_experts": "num_local_experts",
            "decoder_sparse_step": "interleave_moe_layer_step",
            "sliding_window": "attention_chunk_size",
        },
        experts=Experts(
            stored=None,
            width="expert_width",
            router="router",
            transposed=True,
            shared_width="expert_width",
            shared_name="shared_expert",
        ),
        dense_layers="listed",
        planned=_MIXTURE,
    ),
    Family(
        model_type="qwen3_next",
        norms=_NORMS,
        attention="output gate",
        partial_rotary=True,
        qk_norm=True,
        qkv_bias=None,
        o_bias=None,
        linear="one matrix",
        fp32_norm_output=True,
        default_head_dim=256,
        default_kv_heads=2,
        experts=_WITH_SHARED,
        dense_layers="listed",
        planned=(*_UNSPLIT, "ep"),
    ),
    Family(
        model_type="qwen3_5_text",
        norms=_NORMS,
        attention="output gate",
        partial_rotary=True,
        qk_norm=True,
        qkv_bias=None,
        o_bias=None,
        linear="a matrix each",
        fp32_norm_output=True,
        default_head_dim=256,
        default_kv_heads=4,
        planned=_UNSPLIT,
    ),
    Family(
        model_type="qwen3_5_moe_text",
        norms=_NORMS,
        attention="output gate",
        partial_rotary=True,
        qk_norm=True,
        qkv_bias=None,
        o_bias=None,
        linear="a matrix each",
        fp32_norm_output=True,
        default_head_dim=256,
        default_kv_heads=2,
        experts=_WITH_SHARED,
        planned=(*_UNSPLIT, "ep"),
    ),
)

ALL_FAMILIES: dict[str, Family] = FAMILIES | {row.model_type: row for row in PLANNED}
"""those that run, and those that can only be planned"""
