"""How the shards of FSDP cross ranks where gloo carries them: by messages between pairs.

gloo's all-gather passes shards on from rank to rank, and its reduce-scatter is an all-reduce of
which most is thrown away. Sending each rank what it needs takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.parallel._torch import AllGather, ReduceScatter

_PIECE = 2**16
"""values that are added up at a time, so that they stay in the processor's cache"""


def gather_shards(whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` [ranks x values] with every rank's `shard` [values], in rank order.

    Args:
        shard: may be this rank's part of `whole`, which is then in its place already.
    """
    rank, parts = dist.get_rank(group), whole.chunk(dist.get_world_size(group))
    others = [other for other in range(len(parts)) if other != rank]
    works = [dist.isend(shard, group=group, group_dst=other) for other in others]
    works += [dist.irecv(parts[other], group=group, group_src=other) for other in others]
    parts[rank].copy_(shard)
    for work in works:
        if work is not None:
            work.wait()


def sum_shards(shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `shard` [values] with this rank's part of the sum of every rank's `whole`.

    The parts are added in the order of the ranks, in the dtype of `shard`: what the sum is does not
    depend on who adds.

    Args:
        whole: [ranks x values]; if its dtype is shorter than that of `shard`, fewer bytes cross.
    """
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    parts = received.chunk(dist.get_world_size(group))
    term = shard.new_empty(min(len(shard), _PIECE))
    for begin in range(0, len(shard), _PIECE):
        piece = slice(begin, begin + _PIECE)
        total = shard[piece].copy_(parts[0][piece])
        for part in parts[1:]:
            total += term[: len(total)].copy_(part[piece])


class GatherShards(AllGather):
    """`gather_shards`, as FSDP calls it."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer for the whole."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather, and be done when it returns."""
        gather_shards(output_tensor, input_tensor, group)


class SumShards(ReduceScatter):
    """`sum_shards`, as FSDP calls it.

    The gradients of one backward pass are in the compute dtype: sent as they are, and added in the
    dtype of the sum, they give the same sum for fewer bytes. What has been added up over several
    passes has more digits, and is sent in the dtype of the sum.
    """

    def __init__(self, gradient_dtype: torch.dtype) -> None:
        """Sum gradients that a backward pass makes in this dtype."""
        self.of_one_pass = False
        """whether what is summed next comes from a single backward pass"""
        self._gradient_dtype = gradient_dtype
        self._sum_is_next = False

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer for what is sent and then, at the next call, one for its sum: FSDP asks in this
        order, for both in the dtype of the sum."""
        is_sum, self._sum_is_next = self._sum_is_next, not self._sum_is_next
        if not is_sum and self.of_one_pass and self._gradient_dtype.itemsize < dtype.itemsize:
            dtype = self._gradient_dtype
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum, and be done when it returns."""
        sum_shards(output_tensor, input_tensor, group)
