"""Fused projections (queries, keys and values in one matrix; gate and up in one), taken apart.

A rank of tensor parallelism needs rows of each of the matrices in one. Each becomes a module of
its own, whose name the files do not know; `weights/names.py` says which rows of which tensor it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.models.adapters import LORA_A, LORA_B
from shardwise.models.build import Absent, decoder_layers
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import Param
from shardwise.models.nf4 import linear


class Fused(nn.Module):
    """Several projections of one input, side by side, where the model has one. An adapter's A is
    of all of them, its B is taken apart as they are."""

    def __init__(self, whole: nn.Linear, parts: Mapping[str, Param], scale: float | None) -> None:
        """
        Args:
            scale: of the adapter; None: there is none.
        """
        super().__init__()
        self._scale = scale
        if scale is not None:
            self.register_parameter(LORA_A, whole.get_parameter(LORA_A))
        for name, param in parts.items():
            self.add_module(name, _Matrix(whole, param.shape, has_adapter=scale is not None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., outs]"""
        low = None if self._scale is None else F.linear(x, self.lora_A) * self._scale
        return torch.cat([part(x, low) for part in self.children()], dim=-1)


class _Matrix(nn.Linear):
    """One of the projections."""

    def __init__(self, whole: nn.Linear, shape: tuple[int, ...], *, has_adapter: bool) -> None:
        num_out, num_in = shape
        super().__init__(num_in, num_out, bias=False, device="meta")
        rows = whole.weight.new_empty(num_out, whole.weight.shape[1])  # of numbers, or of bytes
        self.weight = nn.Parameter(rows, requires_grad=whole.weight.requires_grad)
        if has_adapter:
            b = whole.get_parameter(LORA_B)
            self.register_parameter(LORA_B, nn.Parameter(b.new_empty(num_out, b.shape[1])))

    def forward(self, x: torch.Tensor, low: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in] -> [..., out]; `low` [..., rank] is what the adapter's A has made of x."""
        y = linear(x, self.weight, None)
        return y if low is None else y + F.linear(low, self.lora_B)


class _OfRank:
    """A model's config as the attention of one rank should read it."""

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config = config
        self.num_attention_heads = num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def take_apart(model: nn.Module, facts: ModelFacts, num_ranks: int) -> None:
    """Replace the fused projections of a model on the meta device, in place.

    An attention that finds its queries in the joint output by counting heads is told how many its
    rank has.
    """
    for layer, kind in zip(decoder_layers(model), facts.layers, strict=True):
        if isinstance(layer, Absent):
            continue
        params = facts.params_of(kind)
        for name, param in params.items():
            if param.parts is None or not name.endswith(".weight"):
                continue
            module = name.removesuffix(".weight")
            path, _, child = module.rpartition(".")
            parent = layer.get_submodule(path)
            lora = facts.adapters if f"{module}.{LORA_A}" in params else None
            scale = lora.scale if lora else None
            setattr(parent, child, Fused(getattr(parent, child), param.parts, scale))
            if "q_proj" in param.parts:
                parent.config = _OfRank(parent.config, facts.num_heads // num_ranks)
                parent.num_key_value_heads = max(1, facts.num_kv_heads // num_ranks)
