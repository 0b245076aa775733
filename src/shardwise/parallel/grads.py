"""What is done to gradients after the last backward pass: sum, measure, clip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.mesh import AXES, EXPERT_AXES, KV_HEADS, Mesh

_PIECE = 2**16
"""values whose squares are added up at a time"""


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


def sum_in_one(grads: Sequence[torch.Tensor], add: Callable[[torch.Tensor], object]) -> None:
    """Sum gradients over ranks in one message, in place.

    Args:
        grads: what this rank holds of each; the same shapes on every rank.
        add: sums a tensor over the ranks, in place.
    """
    flat = torch.cat([grad.flatten() for grad in grads])
    add(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def global_norm(params: Iterable[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """The 2-norm of all gradients, each value counted once whatever its sharding or replicas.

    Sums the squares of what each rank holds, by the axes it is sharded over, so that a replica
    is never added to itself; then over the pipeline stages, of which each has its own parameters.
    Returns an fp32 scalar, equal on every rank.

    Args:
        params: without the copies of parameters that another stage has.
    """
    squares: dict[tuple[str, ...], torch.Tensor] = {}
    for param in params:
        if param.grad is None:
            continue
        axes = shard_axes(param.grad)
        square = _sum_of_squares(local_part(param.grad))
        squares[axes] = squares[axes] + square if axes in squares else square
    total = torch.zeros((), device=mesh.device)
    for axes in _all_axis_sets():  # the same order on every rank
        if axes in squares:
            total += mesh.sum_over(squares[axes], axes)
    return mesh.sum_over(total, ["pp"]).sqrt()


def _sum_of_squares(grad: torch.Tensor) -> torch.Tensor:
    """In fp32, of pieces, so that no copy of the gradient is made and few digits are lost: torch's
    norm of a long tensor adds up one value after the other on CPU (error 6e-4 at 28 M values)."""
    flat = grad.flatten()
    whole = len(flat) // _PIECE * _PIECE
    norms = [flat[whole:].norm(dtype=torch.float32)[None]]
    if whole:
        pieces = flat[:whole].view(-1, _PIECE)
        norms.append(torch.linalg.vector_norm(pieces, dim=1, dtype=torch.float32))
    return torch.cat(norms).pow(2).sum()


def clip(params: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            local_part(param.grad).mul_(scale)


def _all_axis_sets() -> list[tuple[str, ...]]:
    sets: list[tuple[str, ...]] = [()]
    for axis in (*AXES, KV_HEADS, *EXPERT_AXES[2:]):
        sets += [(*earlier, axis) for earlier in sets]
    return sets
