"""Every private or unstable import from torch and transformers, in one place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["HuggingFaceStorageWriter", "is_strided_shard", "set_timeout_of_world", "unflatten"]


def is_strided_shard(placement: Placement) -> bool:
    """Whether an axis cuts a dimension after an axis that comes later in the mesh."""
    return isinstance(placement, _StridedShard)


def unflatten(axis: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh axis seen as several; makes their process groups."""
    return axis._unflatten(0, sizes, names)


def set_timeout_of_world(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let a group wait as long as the whole job's group does; torch gives it half an hour."""
    world = dist.group.WORLD
    if world is not None and group is not world:
        _set_pg_timeout(world._get_backend(device).options._timeout, group)
