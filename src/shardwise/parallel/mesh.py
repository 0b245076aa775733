"""Layout -> mesh of ranks. The only place that makes process groups.

Axis order, outermost first: pp, dp, fsdp, cp, tp, so that the axes that talk most sit on
neighbouring ranks. The mesh's `fsdp` axis is fsdp x cp of the layout: the ranks that split a
sequence share the states between them, as those do that read different rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config import Layout
from shardwise.parallel._torch import set_timeout_of_world, unflatten

AXES = ("pp", "dp", "fsdp", "tp")
EXPERT_AXES = ("pp", "dp", "efsdp", "ep")
KV_HEADS, KV_REPLICAS = "tp_kv", "tp_kv_replicas"
"""the two axes that `tp` becomes where a KV head is held by several ranks"""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one job by axis. Passed to whoever communicates; nothing is global."""

    layout: Layout
    device_mesh: DeviceMesh
    _views: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)
    _groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        kind = self.device_mesh.device_type
        index = None if kind == "cpu" else torch.get_device_module(kind).current_device()
        return torch.device(kind, index)

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self._view(axis)[axis].size()

    def rank(self, axis: str) -> int:
        """This rank's position along an axis."""
        return self._view(axis).get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis."""
        return self._view(axis).get_group(axis)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks as the experts see them; only with expert parallelism."""
        return self._views["ep"]

    def kv_view(self, num_kv_heads: int) -> DeviceMesh:
        """The `tp` axis as KV heads x ranks that hold the same head; neighbours hold the same.

        Makes process groups at its first call, so every rank must call it.
        """
        view = self._views.get(KV_HEADS)
        if view is None or view.shape[0] != num_kv_heads:
            sizes = (num_kv_heads, self.size("tp") // num_kv_heads)
            view = unflatten(self.device_mesh["tp"], sizes, (KV_HEADS, KV_REPLICAS))
            self._views.update({KV_HEADS: view, KV_REPLICAS: view})
            self._wait_as_the_job_does(view)
        return view

    def _wait_as_the_job_does(self, view: DeviceMesh) -> None:
        for group in view.get_all_groups():
            set_timeout_of_world(group, self.device)

    def _view(self, axis: str) -> DeviceMesh:
        return self._views.get(axis, self.device_mesh)

    def sum_over(self, value: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
        """Sum a tensor over the given axes, in place; every rank of them gets the sum."""
        for axis in axes:
            if self.size(axis) > 1:
                dist.all_reduce(value, group=self.group(axis))
        return value

    def ends(self) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's `pp` axis; None for those between.

        Makes process groups at its first call, so every rank must call it.
        """
        if "ends" not in self._groups:
            lines = self.device_mesh.mesh.flatten(1).T.tolist()  # ranks that differ in pp only
            pairs = [sorted({line[0], line[-1]}) for line in lines]
            group, _ = dist.new_subgroups_by_enumeration(pairs)
            self._groups["ends"] = group
            if group is not None:
                set_timeout_of_world(group, self.device)
        return self._groups["ends"]

    def host_group(self, purpose: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """All ranks, for messages in host memory that cross while others compute.

        Makes the process group at the first call for a purpose, so every rank must call it.

        Args:
            timeout: how long a rank waits for another one; None: as long as the whole job's does.
        """
        group = self._groups.get(purpose)
        if group is None:
            group = self._groups[purpose] = dist.new_group(backend="gloo", timeout=timeout)
            if timeout is None:
                set_timeout_of_world(group, self.device)
        return group

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks read different rows, or different parts of them."""
        return ("dp", "fsdp")

    @property
    def data_rank(self) -> int:
        """This rank's number among those that read different rows."""
        return self.rank("dp") * self.layout.fsdp + self.rank("fsdp") // self.layout.cp


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Build the mesh of an initialised process group of `layout.world_size` ranks."""
    sizes = (layout.pp, layout.dp, layout.fsdp * layout.cp, layout.tp)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    mesh = Mesh(layout=layout, device_mesh=device_mesh)
    if layout.ep > 1:  # the same ranks, as the experts see them
        inner = layout.fsdp * layout.cp * layout.tp
        sizes = (layout.pp, layout.dp, inner // layout.ep, layout.ep)
        experts = init_device_mesh(device_type, sizes, mesh_dim_names=EXPERT_AXES)
        mesh._views.update({"efsdp": experts, "ep": experts})
    if layout.cp > 1:
        view = unflatten(device_mesh["fsdp"], (layout.fsdp, layout.cp), ("rows", "cp"))
        mesh._views["cp"] = view
    for view in (device_mesh, *mesh._views.values()):
        mesh._wait_as_the_job_does(view)
    return mesh
