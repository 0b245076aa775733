"""Every private or unstable import from torch and transformers, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.checkpoint import SAC_IGNORED_OPS

# FSDP labels its work in a profile, and not as often when a layer is computed again
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)

__all__ = [
    "AllGather",
    "HuggingFaceStorageWriter",
    "ReduceScatter",
    "hand_over_gradients",
    "host_copy",
    "is_strided_shard",
    "set_timeout_of_world",
    "unflatten",
]


def is_strided_shard(placement: Placement) -> bool:
    """Whether an axis cuts a dimension after an axis that comes later in the mesh."""
    return isinstance(placement, _StridedShard)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, and the same place in the whole, in host memory of their own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu").copy_(local)
    if isinstance(tensor, DTensor):  # `from_local` would take it to the mesh's device again
        return DTensor(copy, tensor._spec, requires_grad=False)
    return copy


def unflatten(axis: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh axis seen as several; makes their process groups."""
    return axis._unflatten(0, sizes, names)


def set_timeout_of_world(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let a group wait as long as the whole job's group does; torch gives it half an hour."""
    world = dist.group.WORLD
    if world is not None and group is not world:
        _set_pg_timeout(world._get_backend(device).options._timeout, group)


def hand_over_gradients(
    modules: Sequence[FSDPModule], add: Callable[[Sequence[torch.Tensor]], object]
) -> None:
    """Give the parameters of modules that are not sharded the gradients that FSDP has kept back.

    FSDP would copy each three times on its way from the module to the same parameter.

    Args:
        add: sums what this rank holds of them over the ranks, in place.
    """
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    held = []
    for param in (param for group in groups for param in group.fsdp_params):
        if param.unsharded_accumulated_grad is not None:
            held.append((param, param.unsharded_accumulated_grad_data))
        elif hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None:
            held.append((param, param._get_grad_inner_tensor(param._unsharded_param.grad)))
        else:
            continue
        param.unsharded_accumulated_grad = param._unsharded_param.grad = None
    add([grad for _, grad in held])
    for param, grad in held:
        param.sharded_param.grad = param.to_sharded_dtensor(grad.to(param.orig_dtype))
