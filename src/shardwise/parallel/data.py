"""Data parallelism: ZeRO 1, 2 and 3, and replicas, all by torch's FSDP2 with other switches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.config import Layout, Plan
from shardwise.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def apply_fsdp(
    root: nn.Module,
    layers: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    mesh: Mesh,
    plan: Plan,
) -> None:
    """Shard every parameter over the `fsdp` axis: one group a layer, one for the rest.

    Args:
        experts: modules split over `ep`, each a group of its own over the `efsdp` axis.

    With `dp` above 1 every shard has replicas. Gradients are summed, never averaged: the loss is
    already divided by the number of trained tokens of the whole step. They are reduced in fp32
    whatever the compute dtype is, unless the plan says otherwise. A mesh of one rank takes the
    same path, which gives bf16 compute its fp32 master weights.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision.compute],
        reduce_dtype=DTYPES[plan.precision.reduce],
    )
    layout = mesh.layout
    replicas = ("dp",) if layout.dp > 1 else ()
    dense = mesh.device_mesh[(*replicas, "fsdp")]
    groups = [(module, mesh.expert_mesh[(*replicas, "efsdp")]) for module in experts]
    groups += [(module, dense) for module in (*layers, root)]
    for module, axes in groups:
        # the outer group is needed again at once, when the backward pass begins
        let_go = not layout.keeps_gathered and module is not root
        fully_shard(module, mesh=axes, mp_policy=policy, reshard_after_forward=let_go)
        if axes.size() > 1:  # torch divides into a copy even by one
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def let_go(root: nn.Module) -> None:
    """Drop what a forward pass without a backward pass has left gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def begin_micro_batch(root: nn.Module, layout: Layout, *, is_last: bool) -> None:
    """Set what the next backward pass leaves behind.

    Where gradients cross ranks once a step, they add up in fp32, whole, until the last
    micro-batch. ZeRO-1 keeps the parameters gathered as long.
    """
    if layout.reduces_once:
        root.set_requires_gradient_sync(is_last)
    if layout.keeps_gathered and layout.zero == 1:
        root.set_reshard_after_backward(is_last)
