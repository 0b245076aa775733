"""Data parallelism: ZeRO 1, 2 and 3, and replicas, all by torch's FSDP2 with other switches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.config import Layout, Plan
from shardwise.parallel._torch import hand_over_gradients
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.sharded import Part
from shardwise.parallel.shards import GatherShards, SumShards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def apply_fsdp(
    root: nn.Module,
    layers: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    mesh: Mesh,
    plan: Plan,
) -> SumShards | None:
    """Shard every parameter over the `fsdp` axis: one group a layer, one for the rest.

    Args:
        experts: modules split over `ep`, each a group of its own over the `efsdp` axis.

    Returns:
        What sums the shards of gradients, where that is not left to the device's own library.

    With `dp` above 1 every shard has replicas. Gradients are summed, never averaged: the loss is
    already divided by the number of trained tokens of the whole step. They are reduced in fp32
    whatever the compute dtype is, unless the plan says otherwise. A mesh of one rank takes the
    same path, which gives bf16 compute its fp32 master weights.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision.compute],
        reduce_dtype=DTYPES[plan.precision.reduce],
        # what a module is given in fp32 (weights of experts, counts of choices) has its reasons
        cast_forward_inputs=False,
    )
    layout = mesh.layout
    sums = SumShards(policy.param_dtype) if mesh.device.type == "cpu" else None
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
        if sums is not None and axes.size(-1) > 1:
            module.set_custom_all_gather(GatherShards())
            module.set_custom_reduce_scatter(sums)
    return sums


def let_go(root: nn.Module) -> None:
    """Drop what a forward pass without a backward pass has left gathered."""
    for module in _fsdp_modules(root):
        module.reshard()


def sum_over_replicas(root: nn.Module, mesh: Mesh) -> None:
    """Sum the gradients of parameters that are not sharded over the `dp` axis, where they are."""

    def add(grads: Sequence[torch.Tensor]) -> None:
        if mesh.size("dp") > 1:
            group = mesh.group("dp")
            for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]:
                work.wait()

    hand_over_gradients(_fsdp_modules(root), add)


def _fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def begin_micro_batch(part: Part, layout: Layout, *, is_first: bool, is_last: bool) -> None:
    """Set what the next backward pass leaves behind.

    Where gradients cross ranks once a step, they add up in fp32, whole, until the last
    micro-batch. ZeRO-1 keeps the parameters gathered as long.
    """
    if layout.reduces_once:
        part.root.set_requires_gradient_sync(is_last and not layout.sums_by_itself)
    if layout.keeps_gathered and layout.zero == 1:
        part.root.set_reshard_after_backward(is_last)
    if part.sums is not None:
        part.sums.of_one_pass = is_first or not layout.reduces_once
