"""Kernels of inference engines on a device of the catalogue, each as measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.catalog import Catalog, Curve, KernelRow
from shardwise.planner.accelerator import Accelerator
from shardwise.planner.formats import Format
from shardwise.planner.interpolate import at
from shardwise.planner.network import Group, Op

ENGINES = ("vllm", "trtllm", "sglang")
KINDS = ("product", "experts", "cached attention", "latent attention", "prompt attention")
_MOST_ERROR = 0.25
"""that a row may leave on its kernels, unless no other engine's leaves a quarter less"""
_BETTER = 0.75
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

        A format that was not measured on the device computes in bf16. Products of few bits start
        as those of bf16 do: they were measured with a kernel before them that converts their input,
        which engines make part of the norm or the activation before.
        """
        row, device = self._row(kind, fmt), self.speeds.device
        first = self.rows[kind, "bf16"] if kind == "product" else row
        tflops = {"fp8": device.fp8_tflops, "fp4": device.fp4_tflops}.get(row.peak)
        peak = (tflops or device.bf16_tflops or math.nan) * 1e12
        reading = num_bytes / (row.memory_share * (device.hbm_gb_per_s or math.nan) * 1e9)
        return first.fixed_us * 1e-6 + math.hypot(reading, flops / (row.compute_share * peak))

    def _row(self, kind: str, fmt: Format) -> KernelRow:
        # int8 is as fast as fp8 where both are built in
        names = [fmt.name, *(["fp8"] if fmt.name == "int8" else []), "bf16"]
        return next(self.rows[kind, name] for name in names if (kind, name) in self.rows)

    def collective_s(self, op: Op, num_bytes: float, group: Group) -> float:
        """Of a collective over a tensor of so many bytes: the faster of the engine's kernel and
        NCCL's, as engines choose."""
        usual = self.speeds.collective_s(op, num_bytes, group)
        if op != "all_reduce" or group.size == 1 or group.crosses:
            return usual
        sizes = [n for n in self.reductions if n >= group.size]
        return min(usual, at(self.reductions[min(sizes)], num_bytes)) if sizes else usual


def engine(speeds: Accelerator, catalog: Catalog, software: str = ENGINES[0]) -> Engine | str:
    """The kernels of a device, or the reason why they are not known.

    Args:
        software: whose kernels; what was not measured of it, or is not described well by three
            numbers, is taken from another engine.
    """
    device = speeds.device
    names = [name for name in (device.name, device.like) if name and name in catalog.kernels]
    if not names:
        return f"no measured kernels of inference engines for {device.name} in the catalogue"
    rows: dict[tuple[str, str], KernelRow] = {}
    order = [software, *(name for name in ENGINES if name != software)]
    for row in sorted(catalog.kernels[names[0]].values(), key=lambda row: order.index(row.engine)):
        kept = rows.setdefault((row.kind, row.format), row)
        if kept.error > _MOST_ERROR and row.error < _BETTER * kept.error:
            rows[row.kind, row.format] = row
    missing = [kind for kind in KINDS if (kind, "bf16") not in rows]
    if missing:
        return f"no measured kernels of {missing[0]} for {device.name} in the catalogue"
    used = sorted({f"{row.engine} {row.version}" for row in rows.values()})
    return Engine(
        speeds=speeds,
        rows=rows,
        reductions=next((catalog.reductions[n] for n in names if n in catalog.reductions), {}),
        sources=f"kernels of {', '.join(used)} on {names[0]}",
    )
