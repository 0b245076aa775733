"""Shards that cross ranks in messages between pairs: the sums are exact, and the same for all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.run_ranks import run_ranks

NUM_VALUES = (1, 2**16 + 7, 2**17)
"""of a shard: less than a piece, not a whole number of pieces, and just that"""


def move_on_rank(rank: int, num_values: int) -> Any:
    """What a rank has sent, the sums of it in both dtypes, and what it has gathered of the sums."""
    import torch
    import torch.distributed as dist

    from shardwise.parallel.shards import gather_shards, sum_shards

    group = dist.group.WORLD
    assert group is not None
    num_ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    # of very different sizes, so that another order of the additions gives other sums
    scale = 10.0 ** torch.randint(-4, 5, (num_ranks * num_values,), generator=generator)
    whole = (torch.randn(num_ranks * num_values, generator=generator) * scale).bfloat16()
    shard, short = torch.full((2, num_values), torch.nan)
    sum_shards(shard, whole.float(), group)
    sum_shards(short, whole, group)
    beside = torch.full((num_ranks * num_values,), torch.nan)
    gather_shards(beside, shard, group)
    in_place = torch.full_like(beside, torch.nan)
    own = in_place[rank * num_values : (rank + 1) * num_values].copy_(shard)
    gather_shards(in_place, own, group)
    return whole, short, beside, in_place


@pytest.mark.parametrize("num_values", NUM_VALUES)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_sums_are_added_in_fp32_in_the_order_of_the_ranks(num_ranks: int, num_values: int) -> None:
    """Bitwise, whatever the dtype in which equal values were sent, and equal on every rank."""
    import torch

    found = run_ranks(num_ranks, move_on_rank, num_values)
    expected = torch.zeros(num_ranks * num_values)
    for whole, *_ in found:
        expected += whole.float()
    for rank, (_, short, beside, in_place) in enumerate(found):
        assert torch.equal(beside, expected)
        assert torch.equal(in_place, expected)
        assert torch.equal(short, expected.chunk(num_ranks)[rank])
