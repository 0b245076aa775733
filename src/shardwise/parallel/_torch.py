"""Every private or unstable import from torch and transformers, in one place."""

from __future__ import annotations

from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["HuggingFaceStorageWriter", "is_strided_shard", "unflatten"]


def is_strided_shard(placement: Placement) -> bool:
    """Whether an axis cuts a dimension after an axis that comes later in the mesh."""
    return isinstance(placement, _StridedShard)


def unflatten(axis: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh axis seen as several; makes their process groups."""
    return axis._unflatten(0, sizes, names)
