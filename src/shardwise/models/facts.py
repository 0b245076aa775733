"""config.json -> ModelFacts: the numbers that planning and checking need, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.models.families import FAMILIES, Family

CONFIG_FILE = "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""names of the two parameters that a model may tie"""
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""names of a layer's stacked experts"""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""that do not depend on the length of a row"""
_DEFAULT_WINDOW = 4096  # of transformers' config classes
_EVERY_LAYER_ALIKE: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], ()),
    "router_jitter_noise": (0.0, 0),
    "use_sliding_window": (False,),
}
"""settings of a mixture of experts, and the values that are proved"""
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a decoder-only language model."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    max_positions: int
    sliding_window: int | None
    """tokens that a sliding layer sees"""
    num_sliding_layers: int
    dropout: float
    dtype: str
    num_experts: int = 0
    """of each layer; 0: a plain MLP"""
    experts_per_token: int = 0
    has_balance_loss: bool = False
    """whether training adds the router's balance loss, as `output_router_logits` says"""

    @property
    def model_type(self) -> str:
        """transformers' name of the family."""
        return self.family.model_type

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of all KV heads."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name inside one decoder layer -> shape, as transformers builds it."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.q_size, self.kv_size
        linears = {
            "self_attn.q_proj": (q, h, self.qkv_bias),
            "self_attn.k_proj": (kv, h, self.qkv_bias),
            "self_attn.v_proj": (kv, h, self.qkv_bias),
            "self_attn.o_proj": (h, q, self.o_bias),
        }
        if not self.num_experts:
            linears["mlp.gate_proj"] = linears["mlp.up_proj"] = (f, h, self.mlp_bias)
            linears["mlp.down_proj"] = (h, f, self.mlp_bias)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (num_out, num_in, bias) in linears.items():
            shapes[f"{name}.weight"] = (num_out, num_in)
            if bias:
                shapes[f"{name}.bias"] = (num_out,)
        if self.num_experts:
            shapes["mlp.gate.weight"] = (self.num_experts, h)
            shapes[GATE_UP] = (self.num_experts, 2 * f, h)
            shapes[DOWN] = (self.num_experts, h, f)
        if self.family.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        shapes.update({f"{norm}.weight": (h,) for norm in self.family.norms})
        return shapes

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter name -> shape; a tied head is not listed twice."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            for name, shape in self.layer_shapes.items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        return shapes

    @cached_property
    def num_layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        return sum(math.prod(shape) for shape in self.layer_shapes.values())

    @property
    def num_layer_expert_parameters(self) -> int:
        """Parameters of one layer's experts."""
        experts = (GATE_UP, DOWN) if self.num_experts else ()
        return sum(math.prod(self.layer_shapes[name]) for name in experts)

    @property
    def num_active_layer_parameters(self) -> int:
        """Parameters of one layer that a token meets."""
        experts = self.num_layer_expert_parameters
        met = experts * self.experts_per_token // max(1, self.num_experts)
        return self.num_layer_parameters - experts + met

    @property
    def num_outer_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm and, if untied, the head."""
        tables = 1 if self.tied else 2
        return tables * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; tied ones counted once."""
        return self.num_layers * self.num_layer_parameters + self.num_outer_parameters


def read_facts(model: str | Path) -> ModelFacts:
    """Read the facts of a model directory (or of a config.json).

    Raises:
        UserError: no readable config.json, a key is missing, or the family is not supported.
    """
    path = Path(model)
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.exists():
        raise UserError(
            f"no model at {str(model)!r}: expected a directory with {CONFIG_FILE}, or that file "
            "(models are not downloaded; fetch one first and give its directory)."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file} as JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no JSON object.")
    return facts_of_config(config, source=str(file))


def facts_of_config(config: Mapping[str, Any], *, source: str) -> ModelFacts:
    """The facts in the content of a config.json; `source` names it in errors."""
    family = _family(config, source)
    _refuse_what_is_not_proved(config, source)
    size = _Sizes(config, source)
    num_heads = size.required("num_attention_heads")
    hidden_size = size.required("hidden_size")
    default_head_dim = family.default_head_dim or hidden_size // num_heads
    attention_bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise UserError(f"{source}: dtype {dtype!r} is not one of {', '.join(_DTYPES)}.")
    num_layers = size.required("num_hidden_layers")
    width = family.experts.width if family.experts else "intermediate_size"
    num_sliding = _num_sliding_layers(config, family, num_layers, size)
    return ModelFacts(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=size.required(width),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size.optional("num_key_value_heads", family.default_kv_heads or num_heads),
        head_dim=size.optional("head_dim", default_head_dim),
        vocab_size=size.required("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied_by_default)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        max_positions=size.required("max_position_embeddings"),
        sliding_window=size.optional("sliding_window", _DEFAULT_WINDOW) if num_sliding else None,
        num_sliding_layers=num_sliding,
        dropout=_dropout(config, source),
        dtype=dtype,
        **_experts(config, family, size),
    )


def _experts(config: Mapping[str, Any], family: Family, size: _Sizes) -> dict[str, Any]:
    """What a config says of experts, refusing what is not proved."""
    if family.experts is None:
        return {}
    for key, value in _EVERY_LAYER_ALIKE.items():
        if config.get(key) not in (None, *value):
            raise UserError(
                f"{size.source}: {key}={config[key]!r} is not proved; {key}={value[0]!r} is."
            )
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    return {
        "num_experts": size.required(key),
        "experts_per_token": size.required("num_experts_per_tok"),
        "has_balance_loss": bool(config.get("output_router_logits", False)),
    }


def _family(config: Mapping[str, Any], source: str) -> Family:
    model_type = config.get("model_type")
    if config.get("quantization_config"):
        raise UserError(
            f"{source}: the model is quantised, which this version cannot shard; "
            "give the unquantised model."
        )
    if model_type not in FAMILIES:
        raise UserError(
            f"{source}: model_type {model_type!r} is not proved equal to one process yet; "
            f"the families that are: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[str(model_type)]


def _refuse_what_is_not_proved(config: Mapping[str, Any], source: str) -> None:
    """Settings under which a supported family computes something else.

    Rows are padded on the right without a mask, which only a causal model may not see; and some
    kinds of rotary embedding change with the padded length.
    """
    if config.get("use_bidirectional_attention"):
        raise UserError(
            f"{source}: use_bidirectional_attention lets tokens attend to later ones; only causal "
            "models are supported."
        )
    for kind in _rope_types(config):
        if kind not in _ROPE_TYPES:
            raise UserError(
                f"{source}: rope type {kind!r} is not proved equal to one process; those that "
                f"are: {', '.join(_ROPE_TYPES)}."
            )


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Every kind of rotary embedding that a config names, at whatever depth."""
    found = set()
    for section in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(section, Mapping):
            for part in (section, *section.values()):  # some families have a section a layer type
                if isinstance(part, Mapping):
                    found |= {str(part[key]) for key in ("rope_type", "type") if part.get(key)}
    return found


def _dropout(config: Mapping[str, Any], source: str) -> float:
    value = config.get("attention_dropout") or 0.0
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{source}: attention_dropout is {value!r}; expected a number.")
    return float(value)


def _num_sliding_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, size: _Sizes
) -> int:
    """Layers with a sliding window, as transformers' config classes decide it."""
    types = config.get("layer_types")
    if types:
        if not isinstance(types, list) or len(types) != num_layers:
            raise UserError(
                f"{size.source}: layer_types is {types!r}; expected one entry for each of the "
                f"{num_layers} layers."
            )
        return sum(kind == "sliding_attention" for kind in types)
    if family.sliding == "all":
        return num_layers if config.get("sliding_window", _DEFAULT_WINDOW) else 0
    if family.sliding == "given":
        return num_layers if config.get("sliding_window") else 0
    if family.sliding == "upper":
        windowed = config.get("use_sliding_window")
        return (
            max(0, num_layers - size.optional("max_window_layers", 28, least=0)) if windowed else 0
        )
    if family.sliding == "pattern":
        return num_layers - num_layers // size.optional("sliding_window_pattern", 6)
    return 0


@dataclass(frozen=True)
class _Sizes:
    config: Mapping[str, Any]
    source: str

    def required(self, key: str, *, least: int = 1) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(
                f"{self.source}: {key} is {value!r}; expected a whole number of at least {least}."
            )
        return value

    def optional(self, key: str, default: int, *, least: int = 1) -> int:
        return default if self.config.get(key) is None else self.required(key, least=least)
