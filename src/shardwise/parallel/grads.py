"""What is done to gradients after the last backward pass: sum what is partial, measure, clip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.mesh import AXES, KV_HEADS, Mesh


def shard_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which a parameter or gradient is sharded (not replicated)."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    pairs = zip(names, tensor.placements, strict=True)
    return tuple(axis for axis, placement in pairs if not placement.is_replicate())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_partial(model: nn.Module, partial: Mapping[str, str], mesh: Mesh) -> None:
    """Sum the gradients of parameters of which each rank of an axis has seen a part of the use.

    One message an axis and step, however many parameters and micro-batches there are.

    Args:
        partial: parameter name -> axis.
    """
    params = dict(model.named_parameters())
    for axis in sorted(set(partial.values())):
        grads = [
            local_part(params[name].grad)
            for name, over in partial.items()
            if over == axis and params[name].grad is not None
        ]
        flat = mesh.sum_over(torch.cat([grad.flatten() for grad in grads]), [axis])
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def global_norm(params: Iterable[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """The 2-norm of all gradients, each value counted once whatever its sharding or replicas.

    Sums the squares of what each rank holds, by the axes it is sharded over, so that a replica
    is never added to itself. Returns an fp32 scalar, equal on every rank.
    """
    squares: dict[tuple[str, ...], torch.Tensor] = {}
    for param in params:
        if param.grad is None:
            continue
        axes = shard_axes(param.grad)
        square = local_part(param.grad).float().pow(2).sum()
        squares[axes] = squares[axes] + square if axes in squares else square
    total = torch.zeros((), device=mesh.device)
    for axes in _all_axis_sets():  # the same order on every rank
        if axes in squares:
            total += mesh.sum_over(squares[axes], axes)
    return total.sqrt()


def clip(params: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            local_part(param.grad).mul_(scale)


def _all_axis_sets() -> list[tuple[str, ...]]:
    sets: list[tuple[str, ...]] = [()]
    for axis in (*AXES, KV_HEADS):
        sets += [(*earlier, axis) for earlier in sets]
    return sets
