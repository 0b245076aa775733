"""Fused projections (queries, keys and values in one matrix; gate and up in one), taken apart.

A rank of tensor parallelism needs rows of each of the matrices in one. Each becomes a module of
its own, whose name the files do not know; `weights/names.py` says which rows of which tensor it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.models.build import Absent, decoder_layers
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import Param


class Fused(nn.Module):
    """Several projections of one input, side by side, where the model has one."""

    def __init__(self, whole: nn.Linear, parts: Mapping[str, Param]) -> None:
        super().__init__()
        for name, param in parts.items():
            num_out, num_in = param.shape
            dtype = whole.weight.dtype
            self.add_module(
                name, nn.Linear(num_in, num_out, bias=False, device="meta", dtype=dtype)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., outs]"""
        return torch.cat([part(x) for part in self.children()], dim=-1)


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
        for name, param in facts.params_of(kind).items():
            if param.parts is None:
                continue
            path, _, child = name.removesuffix(".weight").rpartition(".")
            parent = layer.get_submodule(path)
            setattr(parent, child, Fused(getattr(parent, child), param.parts))
            if "q_proj" in param.parts:
                parent.config = _OfRank(parent.config, facts.num_heads // num_ranks)
                parent.num_key_value_heads = max(1, facts.num_kv_heads // num_ranks)
