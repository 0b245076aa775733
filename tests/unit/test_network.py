"""Which ranks share a node, and what a collective takes where nothing is measured."""

from __future__ import annotations

import math

import pytest

from shardwise.config import Devices, Layout
from shardwise.planner.network import Group, Op, place, ring_seconds

LAUNCH = 6.6e-6
FAST, SLOW = 400e9, 50e9


@pytest.mark.parametrize(
    ("layout", "axis", "size", "per_node"),
    [
        (Layout(tp=8, fsdp=4), "tp", 8, 8),  # neighbours
        (Layout(tp=8, fsdp=4), "fsdp", 4, 1),  # one of each node
        (Layout(tp=4, fsdp=8), "tp", 4, 4),
        (Layout(tp=4, fsdp=8), "fsdp", 8, 2),  # two of each node
        (Layout(tp=16, fsdp=2), "tp", 16, 8),  # two whole nodes
        (Layout(fsdp=32), "fsdp", 32, 8),
        (Layout(fsdp=4, cp=2, tp=4), "cp", 2, 2),  # four apart
        (Layout(fsdp=4, cp=2, tp=4), "fsdp", 8, 2),  # fsdp x cp
        (Layout(dp=4, fsdp=8), "dp", 4, 1),
        (Layout(dp=4, fsdp=8), "fsdp", 8, 8),
        (Layout(pp=4, fsdp=8), "pp", 2, 1),  # each stage is a node
        (Layout(pp=16, fsdp=2), "pp", 2, 1),  # stages of two: one neighbour is in another node
        (Layout(fsdp=16, ep=8, zero=3), "ep", 8, 8),
        (Layout(fsdp=16, ep=8, zero=3), "efsdp", 2, 1),
        (Layout(tp=3, fsdp=8), "tp", 3, 1),  # three of eight: some group is in two nodes
    ],
)
def test_groups_are_placed_in_the_order_of_the_mesh(
    layout: Layout, axis: str, size: int, per_node: int
) -> None:
    group = place(layout, axis, 8)
    assert (group.size, group.per_node) == (size, per_node)
    assert group.crosses == (per_node < size)


def test_what_is_on_one_node_crosses_nothing() -> None:
    layout = Layout(tp=3, fsdp=2)
    assert not any(place(layout, axis, 8).crosses for axis in ("tp", "fsdp", "dp", "pp"))


def in_node(n: int) -> Group:
    return Group(size=n, per_node=n)


def ring(op: Op, size: float, group: Group) -> float:
    return ring_seconds(op, size, group, link_bytes_per_s=FAST, network_bytes_per_s=SLOW)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_passes_its_share_over_each_link(n: int) -> None:
    """Gathers take (n - 1)/n of the tensor and n - 1 steps, an all-reduce both twice."""
    size = 2**30
    gather = LAUNCH + (n - 1) * 3.4e-6 + size * (n - 1) / n / FAST
    assert ring("all_gather", size, in_node(n)) == pytest.approx(gather)
    assert ring("reduce_scatter", size, in_node(n)) == pytest.approx(gather)
    assert ring("all_reduce", size, in_node(n)) == pytest.approx(2 * gather - LAUNCH)
    assert ring("send", size, in_node(2)) == pytest.approx(LAUNCH + 3.4e-6 + size / FAST)


def test_between_nodes_all_cards_of_a_node_serve_the_ring() -> None:
    """Eight ranks of a node have eight times one rank's network; one rank has its own alone."""
    size = 2**34
    wide = ring("all_gather", size, Group(size=32, per_node=8))
    narrow = ring("all_gather", size, Group(size=32, per_node=1))
    assert wide == pytest.approx(size * 31 / 32 / (8 * SLOW), rel=5e-3)
    assert narrow == pytest.approx(size * 31 / 32 / SLOW, rel=5e-3)


def test_small_messages_take_steps_and_not_bytes() -> None:
    """Of many nodes, up and down a tree is faster than around."""
    small = ring("all_reduce", 1024, Group(size=1024, per_node=8))
    around = 2 * (1024 - 128) * 0.6e-6 + 2 * 128 * 2.7e-6
    tree = 2 * 7 * 0.6e-6 + 2 * math.log2(128) * 2.7e-6
    assert small == pytest.approx(LAUNCH + tree, rel=1e-2)
    assert small < around


def test_all_to_all_is_bound_by_what_leaves_the_node() -> None:
    size = 2**30
    both = ring("all_to_all", size, Group(size=16, per_node=8))
    assert both == pytest.approx(size * 8 / 16 / SLOW + size * 7 / 16 / FAST, rel=1e-2)
    assert ring("all_to_all", size, in_node(8)) == pytest.approx(size * 7 / 8 / FAST, rel=1e-2)


def test_times_grow_with_bytes_and_ranks() -> None:
    for op in ("all_reduce", "all_gather", "all_to_all"):
        by_size = [ring(op, 2.0**k, in_node(8)) for k in range(8, 34)]
        assert by_size == sorted(by_size)
        by_ranks = [ring(op, 2**28, Group(size=8 * n, per_node=8)) for n in (2, 4, 8, 64)]
        assert by_ranks == sorted(by_ranks)


@pytest.mark.parametrize(
    ("count", "usual", "node"), [(16, 8, 8), (4, 8, 4), (256, 72, 64), (12, 8, 6), (7, 8, 7)]
)
def test_equally_many_devices_of_each_node(count: int, usual: int, node: int) -> None:
    assert Devices(kind="any", count=count).node(usual) == node
