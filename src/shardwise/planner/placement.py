"""Which rank sits where: nodes take the ranks in the order of the mesh. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Plan
from shardwise.models.families import AXES

_MOST_RANKS = 128
"""that are listed"""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank on its device."""

    rank: int
    at: dict[str, int]
    """axis with more than one rank -> position on it"""

    @property
    def stage(self) -> int:
        """Position on the `pp` axis."""
        return self.at.get("pp", 0)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Devices that share a fast link."""

    number: int
    seats: tuple[Seat, ...]
    num_idle: int
    """devices of it that the plan leaves idle"""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The first nodes of a plan, and how many more there are."""

    nodes: tuple[Node, ...]
    num_hidden: int


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """Position of a rank on each axis that has more than one, outermost first."""
    found: dict[str, int] = {}
    for axis in reversed(AXES):
        size = getattr(plan.layout, axis)
        rank, position = divmod(rank, size)
        if size > 1:
            found[axis] = position
    return {axis: found[axis] for axis in AXES if axis in found}


def nodes_of(plan: Plan, node: int | None) -> Nodes:
    """The nodes of a plan with their ranks.

    Args:
        node: devices of one; None: all of them.
    """
    ranks = plan.layout.world_size
    devices = max(ranks, plan.devices.count or ranks)
    size = min(node or devices, devices)
    shown = max(1, _MOST_RANKS // size)
    total = -(-devices // size)
    nodes = []
    for number in range(min(total, shown)):
        begin, end = number * size, min((number + 1) * size, devices)
        seats = tuple(
            Seat(rank=rank, at=coordinates(plan, rank)) for rank in range(begin, min(end, ranks))
        )
        nodes.append(Node(number=number, seats=seats, num_idle=end - begin - len(seats)))
    return Nodes(nodes=tuple(nodes), num_hidden=total - len(nodes))
