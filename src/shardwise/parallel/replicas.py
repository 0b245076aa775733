"""The debug switch: whatever several ranks hold is bitwise equal on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardwiseError
from shardwise.parallel.grads import local_part
from shardwise.parallel.mesh import KV_HEADS, KV_REPLICAS
from shardwise.parallel.sharded import ShardedModel

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Named = Sequence[tuple[str, nn.Parameter]]


def check_replicas(sharded: ShardedModel) -> None:
    """Compare the parameters that ranks hold in common, and tied copies.

    Costs one pass over the parameters and two small messages an axis; every rank calls it.

    Raises:
        ShardwiseError: naming the first parameter that differs and the axis.
    """
    mesh = sharded.mesh
    named = list(sharded.stored_names())
    for axis in ("dp", "tp", KV_REPLICAS):
        held = [(name, param) for name, param in named if _is_replicated(param, axis)]
        if held and mesh.size(axis) > 1:
            _compare(held, mesh.group(axis), f"the {axis} axis")
    if sharded.pipeline is not None and sharded.tied:
        name = sharded.embedding
        both = [param for stored, param in named if stored == name]
        _compare_tied(name, both, mesh.ends())


def check_no_gradients(sharded: ShardedModel) -> None:
    """No gradient is left from the step before (ShardwiseError naming one that is)."""
    for name, param in sharded.named_parameters():
        if param.grad is not None and bool(local_part(param.grad).any()):
            raise ShardwiseError(f"a step begins with a gradient of {name} that is not zero.")


def _is_replicated(param: nn.Parameter, axis: str) -> bool:
    """Whether the ranks of an axis hold the same part of a parameter."""
    names: tuple[str, ...] = ()
    if isinstance(param, DTensor):
        names = param.device_mesh.mesh_dim_names or ()
    if axis == KV_REPLICAS:
        return KV_REPLICAS in names
    return axis == "dp" or not {"tp", KV_HEADS, "ep"} & set(names)


def _compare(named: Named, group: dist.ProcessGroup | None, where: str) -> None:
    digests = torch.stack([_digest(param) for _, param in named])
    least, most = digests.clone(), digests.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for (name, _), differs in zip(named, (least != most).any(-1).tolist(), strict=True):
        if differs:
            raise ShardwiseError(f"{name} differs between the ranks of {where}.")


def _compare_tied(name: str, both: Sequence[nn.Parameter], ends: dist.ProcessGroup | None) -> None:
    if len(both) == 2 and not torch.equal(local_part(both[0]), local_part(both[1])):
        raise ShardwiseError(f"{name} differs from its copy, the head.")
    if len(both) == 1:
        _compare([(name, both[0])], ends, "the two ends of the pipeline")


def _digest(param: nn.Parameter) -> torch.Tensor:
    """Two sums [2] over the bits of what this rank holds, one of them weighted by position."""
    values = local_part(param.detach()).contiguous().flatten()
    bits = values.view(_BITS[values.element_size()]).long()
    weights = torch.arange(1, len(bits) + 1, device=bits.device) % 65521
    return torch.stack((bits.sum(), (bits * weights).sum()))
