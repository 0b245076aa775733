"""Devices of the catalogue as the planner asks them: measured tables, formulas between nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.catalog import Catalog, Device
from shardwise.config import Devices
from shardwise.planner.interpolate import at, level
from shardwise.planner.network import NET_SHARE, Group, Op, ring_seconds
from shardwise.planner.speeds import Dtype

_MEMORY_SHARE = 0.87
"""of the nominal memory bandwidth: published decode times fit 0.81 to 0.92"""
_ATTENTION_SHARE = 0.32
"""where the device has none of its own: FlashAttention-2 on an H100, arXiv 2307.08691, figure 7"""
_LONG = 8192
"""rows, and size of the weight, of a product that takes a millisecond and more"""
_HOST_S = 1e-5
"""to start an operation of a model's code: torch's dispatch and autograd take 5 us and more, Python
around them as much again"""
SET_NETWORK = "set devices.network_gbit (Gb/s of a node)"
STEP_ERROR = (
    "half of the published runs of other software are within 9% and nine of ten within 29%; with "
    "experts 17% and 61%"
)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of device in nodes of equal size (`planner.speeds.Speeds`)."""

    device: Device
    node: int
    """devices of a node that the plan uses"""
    network_gbit: float | None
    """of a node; None: there is one node"""
    matmuls: tuple[tuple[int, int, float], ...]
    collectives: Mapping[tuple[str, int], tuple[tuple[int, float], ...]]
    sources: str

    overlaps = True
    host_s = _HOST_S

    @property
    def peak_flops(self) -> float:
        """Of dense bf16 products."""
        return (self.device.bf16_tflops or math.nan) * 1e12

    @property
    def evidence(self) -> str:
        """Where the numbers are from, and how far published runs are from them."""
        inside = "collectives in a node as measured" if self.collectives else "links by data sheet"
        like = f" on {self.device.like}" if self.device.like else ""
        between = ""
        if self.network_gbit is not None:
            between = f", between nodes by formula on {self.network_gbit:.0f} Gb/s a node"
        return (
            f"analytic; products as measured{like}, {inside}{between} ({self.sources}); "
            f"{STEP_ERROR}"
        )

    @cached_property
    def _curves(self) -> tuple[tuple[int, tuple[tuple[int, float], ...]], ...]:
        """Size of the weight -> share of the peak by rows, at most that of a hot device."""
        sizes = sorted({n for _, n, _ in self.matmuls})
        return tuple(
            (size, tuple((m, min(share, self._hot)) for m, n, share in self.matmuls if n == size))
            for size in sizes
        )

    @cached_property
    def _hot(self) -> float:
        """What products reach that run long enough to make a device hot: training always does."""
        long = [share for m, n, share in self.matmuls if min(m, n) >= _LONG]
        return min(long, default=1.0)

    @cached_property
    def _sustained(self) -> float:
        """What is left of the measured shares under load and with random values.

        The tables are of bursts of values that switch few transistors: their best A100 product runs
        at 294 TFLOP/s, where random values get 257 (thonking.ai, "Matrix Multiplications on GPUs
        Run Faster When Given Predictable Data"). The best product under load says how much less.
        """
        if self.device.sustained_tflops is None or self.device.bf16_tflops is None:
            return 1.0
        best = min(self._hot, max(share for _, _, share in self.matmuls))
        return min(1.0, self.device.sustained_tflops / self.device.bf16_tflops / best)

    @cached_property
    def _shares(self) -> dict[tuple[int, int], float]:
        return {}

    def share(self, m: float, n: int, k: int) -> float:
        """Share of the peak that a product reaches.

        Measured ones have square weights. The smallest of the three sizes limits how busy the
        device is, so it is taken for the rows, and the geometric mean of the others for the weight.
        """
        least, *others = sorted((float(m), float(n), float(k)))
        key = (round(least), round(math.sqrt(others[0] * others[1])))
        if key not in self._shares:
            rows, size = key
            points = [(width, level(curve, rows)) for width, curve in self._curves]
            self._shares[key] = level(points, size) * self._sustained
        return self._shares[key]

    def matmul_s(self, m: float, n: int, k: int, dtype: Dtype) -> float:
        """Seconds of a product of (m, k) and (k, n); fp32 (in TF32) at half the rate of bf16.

        A kernel writes a tile when it has summed it up, and computes nothing meanwhile: with a
        shorter sum than in the product that was measured, it writes more for each operation.
        """
        slower = 2 if dtype == "fp32" else 1
        _, *others = sorted((m, float(n), float(k)))
        written = 2 * m * n * max(0.0, 1 - k / math.sqrt(others[0] * others[1]))
        seconds = 2 * m * n * k / (self.share(m, n, k) * self.peak_flops)
        return slower * (seconds + self.memory_s(written))

    def attention_s(self, flops: float, dtype: Dtype) -> float:
        """Seconds of fused attention."""
        slower = 2 if dtype == "fp32" else 1
        return slower * flops / ((self.device.attention or _ATTENTION_SHARE) * self.peak_flops)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to read or write so many bytes."""
        return num_bytes / ((self.device.hbm_gb_per_s or math.nan) * 1e9 * _MEMORY_SHARE)

    def collective_s(self, op: Op, num_bytes: float, group: Group | None = None) -> float:
        """Seconds of a collective: as measured inside a node, by formulas of rings elsewhere."""
        group = group or Group(size=self.node, per_node=self.node)
        key = (op, num_bytes, group.size, group.per_node)
        if key not in self._collectives_s:
            self._collectives_s[key] = self._collective_s(op, num_bytes, group)
        return self._collectives_s[key]

    @cached_property
    def _collectives_s(self) -> dict[tuple[str, float, int, int], float]:
        return {}  # layouts ask for the same ones

    def _collective_s(self, op: Op, num_bytes: float, group: Group) -> float:
        if group.size == 1:
            return 0.0
        curve = None if group.crosses else self._measured(op, group.size)
        if curve is not None:
            return at(curve, num_bytes)
        return ring_seconds(
            op,
            num_bytes,
            group,
            link_bytes_per_s=self._link_bytes_per_s(op),
            network_bytes_per_s=(self.network_gbit or math.nan) * 1e9 / 8 / self.node * NET_SHARE,
        )

    def _measured(self, op: Op, ranks: int) -> Sequence[tuple[int, float]] | None:
        """The curve of the smallest group measured that has room for so many ranks."""
        sizes = [n for name, n in self.collectives if name == op and n >= ranks]
        return self.collectives[op, min(sizes)] if sizes else None

    def _link_bytes_per_s(self, op: Op) -> float:
        """What a rank gets of the link: from the largest message of the largest group measured."""
        sizes = [n for name, n in self.collectives if name == op]
        if not sizes:
            return (self.device.link_gb_per_s or math.nan) * 1e9 * NET_SHARE
        n = max(sizes)
        num_bytes, seconds = self.collectives[op, n][-1]
        return (2 if op == "all_reduce" else 1) * num_bytes * (n - 1) / n / seconds

    def link(self, group: Group) -> str:
        """The link that a group talks over."""
        if group.crosses:
            return f"{self.network_gbit:.0f} Gb/s network"
        return self.device.link or "link of a node"


def _network_gbit(device: Device, devices: Devices, node: int) -> float | None:
    """Of a node that is used in part: every device has its share of the cards. A node of another
    size than the catalogue's is another machine, whose network is not known."""
    if device.network_gbit is None or (devices.per_node or device.per_node) != device.per_node:
        return None
    return device.network_gbit * node / device.per_node


def accelerator(devices: Devices, catalog: Catalog) -> Accelerator | str:
    """The speeds of a plan's devices, or the reason why they are not known."""
    device = catalog.devices.get(devices.kind)
    if device is None:
        return f"no facts of {devices.kind} in the catalogue"
    names = [name for name in (device.name, device.like) if name is not None]
    measured = next((catalog.collectives[n] for n in names if n in catalog.collectives), {})
    table = catalog.matmuls.get(device.name) or catalog.matmuls.get(device.like or "", ())
    missing = {
        "measured matrix products": not table,
        "known bf16 rate": device.bf16_tflops is None,
        "known memory bandwidth": device.hbm_gb_per_s is None,
    }
    lacking = [what for what, is_missing in missing.items() if is_missing]
    if lacking:
        return f"{device.name} has no {' and no '.join(lacking)} in the catalogue"
    count, node = devices.count or 1, devices.node(device.per_node)
    network = devices.network_gbit or _network_gbit(device, devices, node)
    if count > node and network is None:
        return f"the network between nodes of {node}x{device.name} is not known: {SET_NETWORK}"
    if count > 1 and not measured and device.link_gb_per_s is None:
        return f"{device.name} has no measured collectives and no known link in the catalogue"
    return Accelerator(
        device=device,
        node=node,
        network_gbit=network if count > node else None,
        matmuls=table,
        collectives=measured,
        sources="; ".join(catalog.sources[name] for name in names if name in catalog.sources),
    )
