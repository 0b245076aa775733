"""Which link a group of ranks talks over, and how long a collective takes on it. No torch.

Ranks are placed in the order of the mesh, pp x dp x fsdp x cp x tp from outermost to innermost, and
nodes take them in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwise.config import Layout

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "all_to_all"]
NET_SHARE = 0.8
"""of a link's nominal rate that large messages get (stas00/ml-engineering, network: about 80%)"""
_LAUNCH_S = 6.6e-6
_PROTOCOLS: tuple[tuple[float, float, float], ...] = (
    (0.6e-6, 2.7e-6, 0.5),
    (1.9e-6, 4.0e-6, 120 / 128),
    (3.4e-6, 14.0e-6, 1.0),
)
"""NCCL's LL, LL128 and Simple: seconds of a ring's step over NVLink and over the network, share of
the bandwidth (NVIDIA/nccl, src/graph/tuning.cc: hwLat, baseLat)"""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that talk to each other."""

    size: int
    per_node: int
    """ranks of it in one node"""

    @property
    def crosses(self) -> bool:
        """Whether it reaches over more than one node."""
        return self.per_node < self.size


def stride(layout: Layout, axis: str) -> int:
    """Distance between neighbours of a group in the order of ranks."""
    inner = {"tp": (), "ep": (), "cp": ("tp",), "fsdp": ("tp",), "dp": ("fsdp", "cp", "tp")}
    if axis == "efsdp":
        return layout.ep
    axes = inner.get(axis, ("dp", "fsdp", "cp", "tp"))
    return math.prod(getattr(layout, name) for name in axes)


def size(layout: Layout, axis: str) -> int:
    """Ranks of a group; `fsdp` and `efsdp` as the ledger of collectives means them."""
    if axis == "fsdp":
        return layout.num_shards
    if axis == "efsdp":
        return layout.num_expert_shards
    return int(getattr(layout, axis))


@lru_cache(maxsize=4096)
def place(layout: Layout, axis: str, node: int) -> Group:
    """The group of an axis on nodes of so many devices; of several, the one that spreads most.

    A message of a pipeline goes from one rank to the next: a group of two.
    """
    step = stride(layout, axis)
    if axis == "pp":  # the slowest boundary is the one between two nodes, if there is one
        inside = step * layout.pp <= node
        return Group(size=2, per_node=2 if inside else 1)
    ranks = size(layout, axis)
    span = step * ranks
    if node % span == 0 or layout.world_size <= node:
        return Group(size=ranks, per_node=ranks)
    return Group(size=ranks, per_node=min(ranks, max(1, math.gcd(node, span) // step)))


def ring_seconds(
    op: Op, num_bytes: float, group: Group, *, link_bytes_per_s: float, network_bytes_per_s: float
) -> float:
    """Seconds of a collective by the formulas of rings, where nothing is measured.

    A ring takes n - 1 steps for a gather or a reduce-scatter, in which (n - 1)/n of the tensor
    passes each link; an all-reduce is both. Every node's boundary is one step of the network. An
    all-reduce may also go up and down a tree of nodes: 2 log2 of their number steps. All to all is
    bounded by what leaves the node. NCCL takes the fastest protocol.

    Args:
        num_bytes: of the whole tensor.
        link_bytes_per_s: of one rank inside a node, one direction.
        network_bytes_per_s: of one rank over the network, one direction.
    """
    n, nodes = group.size, math.ceil(group.size / group.per_node)
    if n == 1:
        return 0.0
    if op == "send":
        rate = network_bytes_per_s if group.crosses else link_bytes_per_s
        return min(
            _LAUNCH_S + (net if group.crosses else local) + num_bytes / (rate * share)
            for local, net, share in _PROTOCOLS
        )
    if op == "all_to_all":
        outside = num_bytes * (n - group.per_node) / n / network_bytes_per_s if nodes > 1 else 0.0
        inside = num_bytes * (group.per_node - 1) / n / link_bytes_per_s
        local, net, _ = _PROTOCOLS[-1]
        return _LAUNCH_S + (net if group.crosses else local) + outside + inside
    rate = link_bytes_per_s
    if group.crosses:  # a ring enters and leaves a node once, over the cards of all its ranks there
        rate = min(rate, network_bytes_per_s * group.per_node)
    passes = 2 if op == "all_reduce" else 1
    moved = passes * num_bytes * (n - 1) / n / rate
    steps = [(n - nodes if nodes > 1 else n - 1, nodes if nodes > 1 else 0)]
    if op == "all_reduce" and nodes > 1:
        steps.append((group.per_node - 1, math.ceil(math.log2(nodes))))
    return _LAUNCH_S + min(
        passes * (inner * local + outer * net) + moved / share
        for inner, outer in steps
        for local, net, share in _PROTOCOLS
    )
