"""What differs between model families, one table row each.

A row says which parameters a decoder layer of the family has and which kinds of parallelism are
proved for it (by `tests/ranks/test_parity.py`, which runs every pair listed here). Sharding rules
are not here: they are read from transformers' own tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

AXES = ("pp", "dp", "fsdp", "cp", "tp")
KINDS = ("dp", "fsdp", "ZeRO-1", "ZeRO-2", "tp", "sequence parallel", "pp", "cp", "ep", "serve tp")
"""kinds of parallelism, each alone"""
PAIRS = tuple(" x ".join(pair) for pair in combinations(AXES, 2))
"""kinds two at a time, in the order of the mesh"""
ALL_KINDS = (*KINDS, *PAIRS)
"""what a family can be proved for"""


@dataclass(frozen=True, kw_only=True)
class StoredExperts:
    """How the files name a layer's experts, which transformers stacks into two parameters."""

    block: str
    """what the files call `mlp`"""
    gate: str
    up: str
    down: str
    """names of an expert's three matrices, with {} for its number"""
    width: str
    """config key of the width of one expert"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: how a model type names and shapes its parameters."""

    model_type: str
    norms: tuple[str, ...]
    """names of the norms of one layer, each of `hidden_size` values"""
    qk_norm: bool = False
    """q_norm and k_norm over `head_dim`"""
    qkv_bias: bool | None = False
    """None: as `attention_bias` of the config says"""
    o_bias: bool | None = False
    """None: as `attention_bias` of the config says"""
    mlp_bias: bool | None = False
    """None: as `mlp_bias` of the config says"""
    default_head_dim: int | None = None
    """head_dim where the config has none; None: hidden_size / num_attention_heads"""
    default_kv_heads: int | None = None
    """num_key_value_heads where the config has none; None: as many as attention heads"""
    tied_by_default: bool = False
    sliding: Literal["none", "all", "given", "upper", "pattern"] = "none"
    """which layers have a sliding window where the config has no `layer_types`: all if
    `sliding_window` is set or absent (given: only if set); those from `max_window_layers` up if
    `use_sliding_window` is; or all
    but each `sliding_window_pattern`-th"""
    fp32_norm_output: bool = False
    """whether a norm's scaled output is kept in fp32 until the weight is applied"""
    experts: StoredExperts | None = None
    """of a mixture of experts: every layer has one, without shared experts"""
    proved: tuple[str, ...] = ()


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

_DENSE_KINDS = tuple(kind for kind in ALL_KINDS if kind != "ep")
_EXPERT_KINDS = tuple(kind for kind in ALL_KINDS if kind != "serve tp")

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
            experts=StoredExperts(
                block="block_sparse_moe",
                gate="experts.{}.w1.weight",
                up="experts.{}.w3.weight",
                down="experts.{}.w2.weight",
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
            experts=StoredExperts(
                block="mlp",
                gate="experts.{}.gate_proj.weight",
                up="experts.{}.up_proj.weight",
                down="experts.{}.down_proj.weight",
                width="moe_intermediate_size",
            ),
            proved=_EXPERT_KINDS,
        ),
    )
}
