"""Data parallelism with sharded states: ZeRO-3 by torch's FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise.config import Precision
from shardwise.parallel.mesh import Mesh

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model of transformers."""
    return model.base_model.layers


def apply_fsdp(model: nn.Module, mesh: Mesh, precision: Precision) -> None:
    """Shard every parameter over the `fsdp` axis: one group a layer, one for the rest.

    Gradients are summed, never averaged: the loss is already divided by the number of trained
    tokens of the whole step. They are reduced in fp32 whatever the compute dtype is. A mesh of
    one rank takes the same path, which gives bf16 compute its fp32 master weights.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPES[precision.compute], reduce_dtype=torch.float32
    )
    fsdp_mesh = mesh.device_mesh["fsdp"]
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=fsdp_mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
