"""Kernels of inference engines on a device of the catalogue, as single ones were measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.catalog import Catalog, Curve, KernelRow
from shardwise.planner.accelerator import Accelerator
from shardwise.planner.formats import Format
from shardwise.planner.interpolate import at
from shardwise.planner.network import Group, Op

SMALL_S = 3e-6
"""of a kernel that does next to nothing, in a graph that the host has recorded: AIConfigurator's
`mem_empirical_constant_latency`, systems/*.yaml; norms, rotary embedding, copies into the cache"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a pass of an inference engine asks of its devices, in seconds."""

    speeds: Accelerator
    rows: Mapping[tuple[str, str], KernelRow]
    """(kind, format) -> how long such a kernel takes"""
    reductions: Mapping[int, Curve]
    """ranks -> measured all-reduces of engines, inside a node"""
    sources: str

    def seconds(self, kind: str, fmt: Format, num_bytes: float, flops: float) -> float:
        """Of one kernel: what it takes to start and end, and reading and computing, which overlap.

        A format that was not measured on the device computes in bf16.
        """
        device = self.speeds.device
        row = self.rows.get((kind, fmt.name))
        if row is None and fmt.rate == "fp8":  # int8 is as fast as fp8 where both are built in
            row = self.rows.get((kind, "fp8"))
        rate = fmt.rate if row is not None else "bf16"
        row = row or self.rows[kind, "bf16"]
        tflops = {"fp8": device.fp8_tflops, "fp4": device.fp4_tflops}.get(rate)
        peak = (tflops or device.bf16_tflops or 0.0) * 1e12
        bandwidth = (device.hbm_gb_per_s or 0.0) * 1e9
        reading = num_bytes / (row.memory_share * bandwidth)
        return row.fixed_us * 1e-6 + math.hypot(reading, flops / (row.compute_share * peak))

    def moving(self, num_bytes: float) -> float:
        """Of element-wise operations over so many bytes."""
        return self.speeds.memory_s(num_bytes)

    def collective_s(self, op: Op, num_bytes: float, group: Group) -> float:
        """Of a collective over a tensor of so many bytes: the faster of the engine's kernel and
        NCCL's, as both engines choose."""
        usual = self.speeds.collective_s(op, num_bytes, group)
        if op != "all_reduce" or group.size == 1 or group.crosses:
            return usual
        sizes = [n for n in self.reductions if n >= group.size]
        return min(usual, at(self.reductions[min(sizes)], num_bytes)) if sizes else usual

    @cached_property
    def error(self) -> float:
        """Mean error that the rows leave on the kernels they are of."""
        return sum(row.error for row in self.rows.values()) / len(self.rows)


def engine(speeds: Accelerator, catalog: Catalog) -> Engine | str:
    """The kernels of a device, or the reason why they are not known."""
    device = speeds.device
    names = [name for name in (device.name, device.like) if name in catalog.kernels]
    if not names:
        return f"no measured kernels of inference engines for {device.name} in the catalogue"
    reductions = next((catalog.reductions[n] for n in names if n in catalog.reductions), {})
    rows = catalog.kernels[names[0]]
    engines = sorted({row.engine for row in rows.values()})
    return Engine(
        speeds=speeds,
        rows=rows,
        reductions=reductions,
        sources=f"kernels of {', '.join(engines)} on {names[0]}",
    )
