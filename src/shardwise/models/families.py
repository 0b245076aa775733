"""What differs between model families, one table row each.

A row says which parameters a decoder layer of the family has and which kinds of parallelism are
proved for it (by `tests/ranks/test_parity.py`, which runs every pair listed here). Sharding rules
are not here: they are read from transformers' own tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

AXES = ("pp", "dp", "fsdp", "cp", "tp")
LORA, QLORA = "lora", "qlora"
KINDS = (
    *("dp", "fsdp", "ZeRO-1", "ZeRO-2", "tp", "sequence parallel", "pp", "cp", "ep"),
    *("serve tp", LORA, QLORA),
)
"""kinds of parallelism, each alone; and adapters, on matrices as they are and in four bits, in
every layout that is proved without them"""
PAIRS = tuple(" x ".join(pair) for pair in combinations(AXES, 2))
"""kinds two at a time, in the order of the mesh"""
ALL_KINDS = (*KINDS, *PAIRS)
"""what a family can be proved for"""


@dataclass(frozen=True, kw_only=True)
class StoredExperts:
    """How the files name a layer's experts, which transformers stacks into two parameters."""

    gate: str
    up: str
    down: str
    """names of an expert's three matrices, with {} for its number"""
    block: str = "mlp"
    """what the files call `mlp`"""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts of a family."""

    stored: StoredExperts | None
    """None: the files have them stacked too"""
    width: str = "moe_intermediate_size"
    """config key of the width of one expert"""
    router: str = "gate"
    bias: bool = False
    """of the router and of every expert"""
    transposed: bool = False
    """whether an expert's matrices are stored with the inputs first"""
    kept_widths: int = 4
    """tensors as wide as an expert that its activation function keeps for the backward pass"""
    corrected: bool = False
    """whether the router has a correction of its scores that is stored and not trained"""
    shared: str | None = None
    """config key of how many experts every token goes through"""
    shared_width: str | None = None
    """config key of the width of those that every token goes through, together"""
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    """whether a token weighs by itself what comes of them"""
    balance_loss: bool = True
    """whether transformers adds the router's balance loss if asked to"""


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls its parts outside the layers."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm"
    positions: str | None = None
    """a table of learned positions"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: how a model type names and shapes its parameters."""

    model_type: str
    norms: tuple[str, ...]
    """names of the norms of one layer, each of `hidden_size` values"""
    qk_norm: bool | None = False
    """q_norm and k_norm over `head_dim`; None: as `use_qk_norm` of the config says"""
    qk_norm_of_all: bool = False
    """whether they are over all heads together"""
    qkv_bias: bool | None = False
    """None: as `attention_bias` of the config says"""
    o_bias: bool | None = False
    """None: as `attention_bias` of the config says"""
    mlp_bias: bool | None = False
    """None: as `mlp_bias` of the config says"""
    unit_heads: bool = False
    """whether queries and keys of layers with a window may be made as long as each other in fp32,
    without a weight; `use_qk_norm` of the config says so, true where it has none"""
    attention: Literal["heads", "fused", "latent", "conv1d", "output gate"] = "heads"
    mlp: Literal["gated", "fused", "conv1d"] = "gated"
    linear: Literal["one matrix", "a matrix each"] | None = None
    """how the linear attention of some layers projects its inputs; None: all attend to all tokens.
    These are kinds of `models/layers.py`"""
    mlp_name: str = "mlp"
    norm_bias: bool = False
    partial_rotary: bool = False
    """whether only some numbers of a head are rotated and then joined with the others anew"""
    sinks: bool = False
    """whether each head has a logit of its own that takes from all others"""
    names: Names = Names()
    keys: Mapping[str, str] = field(default_factory=dict)
    """usual config key -> what this family calls it"""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """sizes that published configs leave to transformers' config class"""
    default_attention_bias: bool = False
    default_head_dim: int | None = None
    """head_dim where the config has none; None: hidden_size / num_attention_heads"""
    default_kv_heads: int | None = None
    """num_key_value_heads where the config has none; None: as many as attention heads"""
    tied_by_default: bool = False
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """kinds of rotary embedding that are proved: none that depends on the length of a row"""
    sliding: Literal["none", "all", "given", "upper", "pattern"] = "none"
    """which layers have a sliding window where the config has no `layer_types`: all if
    `sliding_window` is set or absent (given: only if set); those from `max_window_layers` up if
    `use_sliding_window` is; or all
    but each `sliding_window_pattern`-th"""
    default_window: int = 4096
    default_pattern: int = 6
    """of `sliding_window_pattern`"""
    windowed: str = "sliding_attention"
    """what `layer_types` calls a layer with a window. Llama 4's are chunks: a token sees those
    before it in its own chunk, at most as many"""
    tp_rules: Mapping[str, str] = field(default_factory=dict)
    """what transformers' tensor-parallel table lacks, or has otherwise"""
    dropouts: Mapping[str, float] = field(default_factory=lambda: {"attention_dropout": 0.0})
    """config key of every dropout -> its value where the config has none"""
    fp32_norm_output: bool = False
    """whether a norm's scaled output is kept in fp32 until the weight is applied"""
    experts: Experts | None = None
    """of a mixture of experts"""
    dense_layers: Literal["none", "first", "listed"] = "none"
    """which layers of a mixture have a plain MLP: the first `first_k_dense_replace`, or those that
    `mlp_only_layers` and `decoder_sparse_step` say"""
    proved: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    """of a family that nothing is proved for, so that Shardwise does not run it: the kinds that the
    planner counts all the same"""

    @property
    def norms_after_mlp(self) -> bool:
        """Whether a layer norms what its MLP gives."""
        return bool({"post_feedforward_layernorm", "post_mlp_layernorm"} & set(self.norms))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of parallelism that a plan for this family may have."""
        return self.proved or self.planned


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

_HEADS = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_LATENT_HEADS = {
    "layers.*.self_attn.q_a_proj": "replicated_with_grad_allreduce",
    "layers.*.self_attn.q_a_layernorm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.kv_a_proj_with_mqa": "replicated_with_grad_allreduce",
    "layers.*.self_attn.kv_a_layernorm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_FUSED = {
    "layers.*.self_attn.qkv_proj": "fused_colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "fused_colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_QWEN_EXPERTS = StoredExperts(
    gate="experts.{}.gate_proj.weight",
    up="experts.{}.up_proj.weight",
    down="experts.{}.down_proj.weight",
)

_DENSE_KINDS = tuple(kind for kind in ALL_KINDS if kind != "ep")
_UNRULED_KINDS = ("dp", "fsdp", "ZeRO-1", "ZeRO-2", "dp x fsdp")
"""of a model whose matrices nobody has rules for"""
_EXPERT_KINDS = tuple(kind for kind in ALL_KINDS if kind not in ("serve tp", QLORA))

FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family(
            model_type="llama",
            norms=_LLAMA_NORMS,
            qkv_bias=None,
            o_bias=None,
            mlp_bias=None,
            proved=_DENSE_KINDS,
        ),
        Family(
            model_type="mistral",
            norms=_LLAMA_NORMS,
            default_kv_heads=8,
            sliding="all",
            proved=_DENSE_KINDS,
        ),
        Family(
            model_type="qwen2",
            norms=_LLAMA_NORMS,
            qkv_bias=True,
            default_kv_heads=32,
            sliding="upper",
            proved=_DENSE_KINDS,
        ),
        Family(
            model_type="qwen3",
            norms=_LLAMA_NORMS,
            qk_norm=True,
            qkv_bias=None,
            o_bias=None,
            default_head_dim=128,
            default_kv_heads=32,
            sliding="upper",
            proved=_DENSE_KINDS,
        ),
        Family(
            model_type="gemma3_text",
            norms=_SANDWICH_NORMS,
            qk_norm=True,
            qkv_bias=None,
            o_bias=None,
            default_head_dim=256,
            default_kv_heads=4,
            defaults={
                "num_attention_heads": 8,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
            },
            tied_by_default=True,
            sliding="pattern",
            fp32_norm_output=True,
            proved=_DENSE_KINDS,
        ),
        Family(
            model_type="mixtral",
            norms=_LLAMA_NORMS,
            default_kv_heads=8,
            sliding="given",
            keys={"num_experts": "num_local_experts"},
            experts=Experts(
                stored=StoredExperts(
                    block="block_sparse_moe",
                    gate="experts.{}.w1.weight",
                    up="experts.{}.w3.weight",
                    down="experts.{}.w2.weight",
                ),
                width="intermediate_size",
            ),
            proved=_EXPERT_KINDS,
        ),
        Family(
            model_type="qwen3_moe",
            norms=_LLAMA_NORMS,
            qk_norm=True,
            qkv_bias=None,
            o_bias=None,
            default_kv_heads=4,
            experts=Experts(stored=_QWEN_EXPERTS),
            dense_layers="listed",
            proved=_EXPERT_KINDS,
        ),
        Family(
            model_type="gpt_oss",
            norms=_LLAMA_NORMS,
            qkv_bias=None,
            o_bias=None,
            sinks=True,
            default_attention_bias=True,
            default_head_dim=64,
            default_kv_heads=8,
            sliding="pattern",
            default_window=128,
            keys={"num_experts": "num_local_experts"},
            default_pattern=2,
            fp32_norm_output=True,
            experts=Experts(
                stored=None,
                width="intermediate_size",
                router="router",
                bias=True,
                transposed=True,
                kept_widths=7,
            ),
            tp_rules={**_HEADS, "layers.*.self_attn": "sinks"},
            proved=_EXPERT_KINDS,
        ),
        Family(
            model_type="deepseek_v3",
            norms=_LLAMA_NORMS,
            attention="latent",
            qkv_bias=None,
            experts=Experts(
                stored=_QWEN_EXPERTS, corrected=True, shared="n_shared_experts", balance_loss=False
            ),
            dense_layers="first",
            keys={"num_experts": "n_routed_experts"},
            tp_rules=_LATENT_HEADS,
            proved=_EXPERT_KINDS,
        ),
        Family(
            model_type="phi3",
            norms=_LLAMA_NORMS,
            attention="fused",
            mlp="fused",
            sliding="given",
            rope_types=("default",),  # transformers makes longrope of yarn
            dropouts={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            tp_rules=_FUSED,
            proved=_DENSE_KINDS,
        ),
        Family(
            model_type="gpt2",
            norms=("ln_1", "ln_2"),
            norm_bias=True,
            attention="conv1d",
            mlp="conv1d",
            tied_by_default=True,
            names=Names(
                layers="transformer.h",
                embedding="transformer.wte.weight",
                norm="transformer.ln_f",
                positions="transformer.wpe.weight",
            ),
            keys={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "num_key_value_heads": "n_head",
                "max_position_embeddings": "n_positions",
                "intermediate_size": "n_inner",
            },
            dropouts={"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
            proved=_UNRULED_KINDS,
        ),
    )
}
