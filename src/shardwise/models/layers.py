"""What a decoder layer is made of: its parameters, and how ranks divide each. No torch.

A family names one kind of attention and one of MLP; each is a function from sizes to parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shardwise.models.facts import ModelFacts

Cut = Literal["whole", "shared", "columns", "rows", "kv_heads", "experts", "parts"]
Shape = tuple[int, ...]
NF4_BLOCK, NF4_BLOCK_BYTES = 64, 36
"""numbers of a row that share a scale in four bits, and the bytes that they take (models/nf4.py)"""


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter of a layer, and what a rank has of it.

    `whole`: every rank all of it, used alike. `shared`: all of it, used for the rank's own heads,
    so that its gradient is a part. `columns`: some of the outputs (dim 0), over `tp`. `rows`: some
    of the inputs (dim 1). `kv_heads`: as columns, but a head is never cut. `experts`: some of the
    experts (dim 0), over `ep`. `parts`: several matrices in one, which `tp` takes apart.
    """

    shape: Shape
    cut: Cut = "whole"
    parts: Mapping[str, Param] | None = None
    trained: bool = True
    """not beside adapters, which are trained instead"""
    packed: bool = False
    """whether its numbers rest in four bits (`Lora.quantize`)"""

    @property
    def num_packed(self) -> int:
        """Numbers in four bits."""
        return math.prod(self.shape) if self.packed else 0

    def on_rank(self, *, tp: int, ep: int, num_kv_heads: int) -> Param:
        """What one rank has of it, before FSDP."""
        dim, ranks = {
            "columns": (0, tp),
            "rows": (1, tp),
            "kv_heads": (0, min(tp, num_kv_heads)),
            "experts": (0, ep),
        }.get(self.cut, (0, 1))
        shape = tuple(n // ranks if d == dim else n for d, n in enumerate(self.shape))
        return replace(self, shape=shape)


def packed_bytes(numbers: int) -> int:
    """Bytes of so many numbers in four bits, their scales included."""
    return numbers // NF4_BLOCK * NF4_BLOCK_BYTES


class LayerKind(NamedTuple):  # not a dataclass: a search counts millions of them
    """In what the layers of a model can differ."""

    has_experts: bool = False
    window: int | None = None
    """tokens that its attention sees; None: all before"""
    is_linear: bool = False
    """whether it keeps a state of fixed size in place of keys and values"""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None
    """width of the queries' latent; None: queries are projected at once"""
    kv_rank: int
    rope_dim: int
    """of each head's query and of the one key that all heads share, with positions"""
    nope_dim: int
    """of each head's query and key, without positions"""
    v_dim: int


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Sizes of linear attention (Gated DeltaNet, arXiv 2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """of one head, like `value_dim`"""
    value_dim: int
    kernel: int
    """tokens that its convolution sees"""

    @property
    def keys(self) -> int:
        """Width of the keys of all heads; that of the queries too."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the values of all heads; that of the output and its gate too."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of what the convolution works on: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Values that a layer keeps of a sequence, however long it is: a matrix a head, and what
        the convolution still needs."""
        return self.values * self.key_dim + self.mixed * (self.kernel - 1)


def layer_params(facts: ModelFacts, kind: LayerKind) -> dict[str, Param]:
    """Name inside the layer -> parameter, as transformers builds it."""
    family = facts.family
    params = _linear_attention(facts) if kind.is_linear else ATTENTIONS[family.attention](facts)
    params |= _experts(facts) if kind.has_experts else MLPS[family.mlp](facts)
    for norm in family.norms:
        params[f"{norm}.weight"] = Param(shape=(facts.hidden_size,))
        if family.norm_bias:
            params[f"{norm}.bias"] = Param(shape=(facts.hidden_size,))
    return params


def _linear(name: str, num_out: int, num_in: int, cut: Cut, *, bias: bool) -> dict[str, Param]:
    params = {f"{name}.weight": Param(shape=(num_out, num_in), cut=cut)}
    if bias:  # of rows it is added once, after their sum
        params[f"{name}.bias"] = Param(shape=(num_out,), cut="whole" if cut == "rows" else cut)
    return params


def _heads(facts: ModelFacts) -> dict[str, Param]:
    """Queries, keys and values of heads, each a matrix of its own; the queries' may also make a
    gate for each number of the output."""
    h, q, kv = facts.hidden_size, facts.q_size, facts.k_size
    width = 2 * q if facts.family.attention == "output gate" else q
    params = {
        **_linear("self_attn.q_proj", width, h, "columns", bias=facts.qkv_bias),
        **_linear("self_attn.k_proj", kv, h, "kv_heads", bias=facts.qkv_bias),
        **_linear("self_attn.v_proj", kv, h, "kv_heads", bias=facts.qkv_bias),
        **_linear("self_attn.o_proj", h, q, "rows", bias=facts.o_bias),
    }
    if facts.qk_norm:
        whole = facts.family.qk_norm_of_all
        sizes = {"q": q, "k": kv} if whole else dict.fromkeys("qk", facts.head_dim)
        cuts: dict[str, Cut] = {"q": "columns", "k": "kv_heads"}
        for name, size in sizes.items():
            cut: Cut = cuts[name] if whole else "shared"
            params[f"self_attn.{name}_norm.weight"] = Param(shape=(size,), cut=cut)
    if facts.family.sinks:
        params["self_attn.sinks"] = Param(shape=(facts.num_heads,), cut="columns")
    return params


def _fused_heads(facts: ModelFacts) -> dict[str, Param]:
    """Queries, keys and values in one matrix, one after the other."""
    h, q, kv = facts.hidden_size, facts.q_size, facts.k_size
    parts = {
        "q_proj": Param(shape=(q, h), cut="columns"),
        "k_proj": Param(shape=(kv, h), cut="kv_heads"),
        "v_proj": Param(shape=(kv, h), cut="kv_heads"),
    }
    fused = Param(shape=(q + 2 * kv, h), cut="parts", parts=parts)
    return {
        "self_attn.qkv_proj.weight": fused,
        **_linear("self_attn.o_proj", h, q, "rows", bias=False),
    }


def _latent(facts: ModelFacts) -> dict[str, Param]:
    """Keys and values (and queries) through a narrow latent that all heads share."""
    h, latent = facts.hidden_size, facts.latent
    if latent is None:
        raise ValueError("the facts of a latent attention have no sizes")
    bias, kv = facts.qkv_bias, latent.kv_rank
    per_head = latent.nope_dim + latent.v_dim
    if latent.q_rank is None:
        params = _linear("self_attn.q_proj", facts.q_size, h, "columns", bias=False)
    else:
        params = {
            **_linear("self_attn.q_a_proj", latent.q_rank, h, "shared", bias=bias),
            "self_attn.q_a_layernorm.weight": Param(shape=(latent.q_rank,), cut="shared"),
            **_linear("self_attn.q_b_proj", facts.q_size, latent.q_rank, "columns", bias=False),
        }
    return {
        **params,
        **_linear("self_attn.kv_a_proj_with_mqa", kv + latent.rope_dim, h, "shared", bias=bias),
        "self_attn.kv_a_layernorm.weight": Param(shape=(kv,), cut="shared"),
        **_linear("self_attn.kv_b_proj", facts.num_heads * per_head, kv, "columns", bias=False),
        **_linear("self_attn.o_proj", h, facts.v_size, "rows", bias=bias),
    }


def _linear_attention(facts: ModelFacts) -> dict[str, Param]:
    """A gated delta rule over queries, keys and values that a short convolution has mixed."""
    h, linear = facts.hidden_size, facts.linear
    if linear is None:
        raise ValueError("the facts of a linear attention have no sizes")
    heads = linear.num_value_heads
    widths = {"qkvz": linear.mixed + linear.values, "ba": 2 * heads}
    if facts.family.linear == "a matrix each":
        widths = {"qkv": linear.mixed, "z": linear.values, "b": heads, "a": heads}
    params = {
        "linear_attn.dt_bias": Param(shape=(heads,)),
        "linear_attn.A_log": Param(shape=(heads,)),
        "linear_attn.conv1d.weight": Param(shape=(linear.mixed, 1, linear.kernel)),
        "linear_attn.norm.weight": Param(shape=(linear.value_dim,)),
        "linear_attn.out_proj.weight": Param(shape=(h, linear.values)),
    }
    for name, width in widths.items():
        params[f"linear_attn.in_proj_{name}.weight"] = Param(shape=(width, h))
    return params


def _conv1d_attention(facts: ModelFacts) -> dict[str, Param]:
    """GPT-2's, whose matrices are stored the other way round."""
    h = facts.hidden_size
    return {**_conv1d("attn.c_attn", h, 3 * h), **_conv1d("attn.c_proj", h, h)}


def _conv1d_mlp(facts: ModelFacts) -> dict[str, Param]:
    h, f = facts.hidden_size, facts.intermediate_size
    return {**_conv1d("mlp.c_fc", h, f), **_conv1d("mlp.c_proj", f, h)}


def _conv1d(name: str, num_in: int, num_out: int) -> dict[str, Param]:
    return {
        f"{name}.weight": Param(shape=(num_in, num_out)),
        f"{name}.bias": Param(shape=(num_out,)),
    }


def _gated(facts: ModelFacts) -> dict[str, Param]:
    name = facts.family.mlp_name
    return _gated_mlp(name, facts.hidden_size, facts.intermediate_size, bias=facts.mlp_bias)


def _gated_mlp(name: str, h: int, f: int, *, bias: bool) -> dict[str, Param]:
    return {
        **_linear(f"{name}.gate_proj", f, h, "columns", bias=bias),
        **_linear(f"{name}.up_proj", f, h, "columns", bias=bias),
        **_linear(f"{name}.down_proj", h, f, "rows", bias=bias),
    }


def _fused_gated(facts: ModelFacts) -> dict[str, Param]:
    """Gate and up in one matrix, one after the other."""
    h, f = facts.hidden_size, facts.intermediate_size
    half = Param(shape=(f, h), cut="columns")
    fused = Param(shape=(2 * f, h), cut="parts", parts={"gate_proj": half, "up_proj": half})
    return {"mlp.gate_up_proj.weight": fused, **_linear("mlp.down_proj", h, f, "rows", bias=False)}


def _experts(facts: ModelFacts) -> dict[str, Param]:
    """A router, the experts stacked, and what every token goes through besides."""
    h, f, count, row = (
        facts.hidden_size,
        facts.expert_width,
        facts.num_experts,
        facts.family.experts,
    )
    if row is None:
        raise ValueError(f"{facts.model_type} has no experts")
    gate_up, down = (count, 2 * f, h), (count, h, f)
    if row.transposed:
        gate_up, down = (count, h, 2 * f), (count, f, h)
    block = facts.family.mlp_name
    params = {
        f"{block}.{row.router}.weight": Param(shape=(count, h)),
        f"{block}.{GATE_UP}": Param(shape=gate_up, cut="experts"),
        f"{block}.{DOWN}": Param(shape=down, cut="experts"),
    }
    if row.bias:
        params[f"{block}.{row.router}.bias"] = Param(shape=(count,))
        params[f"{block}.{GATE_UP}_bias"] = Param(shape=(count, 2 * f), cut="experts")
        params[f"{block}.{DOWN}_bias"] = Param(shape=(count, h), cut="experts")
    if facts.shared_width:
        shared = f"{block}.{row.shared_name}"
        params |= _gated_mlp(shared, h, facts.shared_width, bias=False)
        if row.shared_gate:
            params[f"{shared}_gate.weight"] = Param(shape=(1, h))
    return params


SINK_PADDING = 8
"""numbers by which a head with a sink grows in attention; kernels want multiples of eight"""
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
"""names of a layer's stacked experts, inside its MLP"""

ATTENTIONS: dict[str, Callable[[ModelFacts], dict[str, Param]]] = {
    "heads": _heads,
    "fused": _fused_heads,
    "latent": _latent,
    "conv1d": _conv1d_attention,
    "output gate": _heads,
}
MLPS: dict[str, Callable[[ModelFacts], dict[str, Param]]] = {
    "gated": _gated,
    "fused": _fused_gated,
    "conv1d": _conv1d_mlp,
}
