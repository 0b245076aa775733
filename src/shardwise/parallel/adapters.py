"""Low-rank adapters beside the matrices of a model, whose own parameters are frozen.

An adapter is two more parameters of the module that has the matrix. So whatever splits that module
over ranks, gathers it or loads it finds them there, and no other code knows of adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shardwise.models.adapters import LORA_A, LORA_B
from shardwise.models.build import Absent, decoder_layers
from shardwise.models.facts import ModelFacts
from shardwise.models.nf4 import linear, packed_shape


def apply_adapters(model: PreTrainedModel, facts: ModelFacts, dtype: torch.dtype) -> None:
    """Freeze a model on the meta device and put its adapters in, in place. Matrices that rest in
    four bits become matrices of bytes.

    Args:
        facts: `adapters` and the layers' parameters are used.
        dtype: of the adapters at rest.
    """
    if facts.adapters is None:
        raise ValueError("the facts have no adapters")
    model.requires_grad_(False)
    for layer, kind in zip(decoder_layers(model), facts.layers, strict=True):
        if isinstance(layer, Absent):
            continue
        for name, param in facts.params_of(kind).items():
            path, _, leaf = name.rpartition(".")
            if param.packed:
                _pack(layer.get_submodule(path))
            if leaf in (LORA_A, LORA_B):
                tensor = torch.empty(param.shape, dtype=dtype, device="meta")
                layer.get_submodule(path).register_parameter(leaf, nn.Parameter(tensor))
            if leaf == LORA_B:
                module = layer.get_submodule(path)
                module.forward = _beside(module, module.forward, facts.adapters.scale)


def _pack(module: nn.Module) -> None:
    """Let a linear module have bytes in place of numbers."""
    packed = torch.empty(
        packed_shape(*module.get_parameter("weight").shape), dtype=torch.uint8, device="meta"
    )
    module.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
    module.forward = lambda x: linear(x, module.weight, module.bias)


def _beside(
    module: nn.Module, inner: Callable[[torch.Tensor], torch.Tensor], scale: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """W x + scale B A x, of what the module's parameters are when it is called."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, module.lora_A) * scale
        return inner(x) + F.linear(low, module.lora_B)

    return forward


def initial(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """A fresh matrix of an adapter, the same on every rank of every layout (fp32).

    A is uniform within 1 / sqrt(inputs), as PEFT's; B is zero, so that the model begins as it was.

    Args:
        name: of the parameter in the whole model.
        shape: of the whole matrix.
    """
    if not name.endswith(LORA_A):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
