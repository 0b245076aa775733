"""ModelFacts: the numbers that planning and checking need, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.config import Lora
from shardwise.models.adapters import with_adapters
from shardwise.models.families import Family
from shardwise.models.layers import Latent, LayerKind, Linear, Param, layer_params
from shardwise.models.stored import StoredFormat

HEAD = "lm_head.weight"
"""name of what a model may tie to its embedding"""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a decoder-only language model."""

    family: Family
    hidden_size: int
    intermediate_size: int
    """of a plain MLP"""
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """of queries and keys"""
    vocab_size: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    unit_heads: bool
    max_positions: int
    dropout: tuple[str, float] | None
    """config key and value of a dropout that is not zero"""
    dtype: str
    latent: Latent | None = None
    linear: Linear | None = None
    """of the layers that have no keys and values"""
    num_experts: int = 0
    """of each layer that has experts; 0: none has"""
    experts_per_token: int = 0
    expert_width: int = 0
    """`intermediate_size` of one expert"""
    shared_width: int = 0
    """of the experts that every token goes through, together"""
    balance_weight: float | None = None
    """of the router's balance loss; None: training adds none (`output_router_logits` says)"""
    stored_as: StoredFormat | None = None
    """how the files hold its matrices; None: as plain numbers"""
    adapters: Lora | None = None
    """trained in place of the model's own parameters, their targets named; None: there are none"""

    @property
    def model_type(self) -> str:
        """transformers' name of the family."""
        return self.family.model_type

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def k_size(self) -> int:
        """Width of the keys of all KV heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Width of the values of all KV heads."""
        return self.num_kv_heads * (self.latent.v_dim if self.latent else self.head_dim)

    @property
    def attention_size(self) -> int:
        """Width of what attention gives to its last projection."""
        return self.num_heads * (self.latent.v_dim if self.latent else self.head_dim)

    @property
    def cache_size(self) -> int:
        """Values that a layer caches of a token, if it is not linear."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return self.k_size + self.v_size

    @property
    def num_layers_with_cache(self) -> int:
        """Layers that cache keys and values of each token."""
        return sum(not kind.is_linear for kind in self.layers)

    @property
    def state_size(self) -> int:
        """Values that the linear layers keep of a sequence, in fp32."""
        linear = self.linear.state if self.linear is not None else 0
        return (self.num_layers - self.num_layers_with_cache) * linear

    @cached_property
    def _params(self) -> dict[LayerKind, dict[str, Param]]:
        return {
            kind: with_adapters(
                layer_params(self, kind), self.adapters, has_experts=self.num_experts > 0
            )
            for kind in set(self.layers)
        }

    def params_of(self, kind: LayerKind) -> Mapping[str, Param]:
        """Parameter name inside a decoder layer -> parameter."""
        return self._params[kind]

    def params_on_rank(self, kind: LayerKind, *, tp: int, ep: int) -> Mapping[str, Param]:
        """What one rank holds of a layer, before FSDP: `tp` takes fused matrices apart."""
        key = (kind, tp, ep)
        if key not in self._on_rank:
            params: dict[str, Param] = {}
            for name, param in self.params_of(kind).items():
                if param.parts is None or tp == 1:
                    params[name] = param
                else:
                    module, _, leaf = name.rpartition(".")
                    params |= {
                        f"{module}.{part}.{leaf}": replace(
                            p, trained=param.trained, packed=param.packed
                        )
                        for part, p in param.parts.items()
                    }
            self._on_rank[key] = {
                name: param.on_rank(tp=tp, ep=ep, num_kv_heads=self.num_kv_heads)
                for name, param in params.items()
            }
        return self._on_rank[key]

    @cached_property
    def _on_rank(self) -> dict[tuple[LayerKind, int, int], Mapping[str, Param]]:
        return {}  # found once for each size: a search asks for thousands of layouts

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter name -> shape; a tied head is not listed twice."""
        names, h = self.family.names, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {names.embedding: (self.vocab_size, h)}
        if names.positions is not None:
            shapes[names.positions] = (self.max_positions, h)
        for number, kind in enumerate(self.layers):
            for name, param in self.params_of(kind).items():
                shapes[f"{names.layers}.{number}.{name}"] = param.shape
        shapes[f"{names.norm}.weight"] = (h,)
        if self.family.norm_bias:
            shapes[f"{names.norm}.bias"] = (h,)
        if not self.tied:
            shapes[HEAD] = (self.vocab_size, h)
        return shapes

    @cached_property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the files hold besides parameters: it is not trained, and every rank has it."""
        experts = self.family.experts
        if experts is None or not experts.corrected:
            return {}
        return {
            f"{self.family.names.layers}.{number}.mlp.{experts.router}.e_score_correction_bias": (
                self.num_experts,
            )
            for number, kind in enumerate(self.layers)
            if kind.has_experts
        }

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Everything that the model's files must hold -> shape."""
        return {**self.parameter_shapes, **self.buffer_shapes}

    def packed_parameters(self, *, tp: int = 1) -> set[str]:
        """Names of those that rest in four bits, on a rank of `tp`."""
        return {
            f"{self.family.names.layers}.{number}.{name}"
            for number, kind in enumerate(self.layers)
            for name, param in self.params_on_rank(kind, tp=tp, ep=1).items()
            if param.packed
        }

    def num_layer_parameters(self, kind: LayerKind) -> int:
        """Parameters of one decoder layer."""
        return self._counts[kind][0]

    def num_expert_parameters(self, kind: LayerKind) -> int:
        """Parameters of one layer's experts, those that every token goes through left out."""
        return self._counts[kind][1]

    def num_active_parameters(self, kind: LayerKind) -> int:
        """Parameters of one layer that a token meets."""
        everything, experts, _ = self._counts[kind]
        return everything - experts + experts * self.experts_per_token // max(1, self.num_experts)

    @cached_property
    def _counts(self) -> dict[LayerKind, tuple[int, int, int]]:
        return {
            kind: (
                sum(math.prod(param.shape) for param in params.values()),
                sum(math.prod(p.shape) for p in params.values() if p.cut == "experts"),
                sum(math.prod(p.shape) for p in params.values() if p.trained),
            )
            for kind, params in self._params.items()
        }

    @cached_property
    def outer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters outside the layers: embeddings, last norm and, if untied, the head."""
        layers = f"{self.family.names.layers}."
        shapes = self.parameter_shapes.items()
        return {name: shape for name, shape in shapes if not name.startswith(layers)}

    @cached_property
    def num_outer_parameters(self) -> int:
        """All parameters outside the layers."""
        return sum(map(math.prod, self.outer_shapes.values()))

    @cached_property
    def num_parameters(self) -> int:
        """All parameters, adapters among them; tied ones counted once."""
        return sum(map(math.prod, self.parameter_shapes.values()))

    @cached_property
    def num_trained_parameters(self) -> int:
        """Those of the adapters, where there are some; else all."""
        if self.adapters is None:
            return self.num_parameters
        return sum(self.num_trained_of(kind) for kind in self.layers)

    @cached_property
    def num_packed_parameters(self) -> int:
        """Those that rest in four bits."""
        return sum(
            param.num_packed for kind in self.layers for param in self.params_of(kind).values()
        )

    def num_trained_of(self, kind: LayerKind) -> int:
        """Parameters of one decoder layer that are trained."""
        return self._counts[kind][2]

    @property
    def num_parameters_met(self) -> int:
        """Parameters that work on a token, as makers of mixtures count: its layers and the head."""
        layers = sum(self.num_active_parameters(kind) for kind in self.layers)
        return layers + self.vocab_size * self.hidden_size
