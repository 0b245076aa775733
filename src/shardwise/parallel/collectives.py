"""The collectives of tensor parallelism, with the gradient that each one needs.

Compute runs on local tensors; these functions are all that crosses ranks in a forward pass. Into
a split region go `copy_to_group` or, under sequence parallelism, `gather_sequence`; out of it come
`sum_over_group` or `scatter_sequence`. The backward pass of one is the forward pass of the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.counts = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.counts
        return _all_to_all(grad, received, sent, group), None, None, None


def _all_to_all(
    x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def exchange(
    x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first `sent[0]` rows to rank 0, the next to rank 1, and so on; the gradients come
    back the same way.

    Returns:
        [sum(received), ...], the rows of each rank in turn.
    """
    return _Exchange.apply(x, sent, received, group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()  # autograd may hand the same tensor to someone else
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        length = x.shape[1] // dist.get_world_size(group)
        return x.narrow(1, dist.get_rank(group) * length, length).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's part of dimension 1, in rank order."""
    first = x.transpose(0, 1).contiguous()  # collectives join and cut dimension 0
    whole = first.new_empty(first.shape[0] * dist.get_world_size(group), *first.shape[1:])
    dist.all_gather_into_tensor(whole, first, group=group)
    return whole.transpose(0, 1).contiguous()


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of dimension 1 of the sum over the ranks."""
    first = x.transpose(0, 1).contiguous()
    part = first.new_empty(first.shape[0] // dist.get_world_size(group), *first.shape[1:])
    dist.reduce_scatter_tensor(part, first, group=group)
    return part.transpose(0, 1).contiguous()


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole sequence [rows, tokens, ...] from each rank's part of it, used differently on
    each rank: the gradients are summed, and each rank gets its part of the sum."""
    return _GatherSequence.apply(x, group)


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sequence of the sum of every rank's partial result."""
    return _ScatterSequence.apply(x, group)


def split_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a sequence that every rank has whole and equal."""
    return _SplitSequence.apply(x, group)


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A replicated tensor that each rank uses differently: the gradients are summed."""
    return _CopyToGroup.apply(x, group)


def sum_over_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's partial result: each rank gets the whole gradient."""
    return _SumOverGroup.apply(x, group)


def gather_last_dim(x: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Put the ranks' chunks of the last dimension together (no gradient).

    Args:
        x: this rank's chunk, [..., at most ceil(size / ranks)].
        size: length of the whole last dimension.

    Returns:
        [..., size], the same on every rank.
    """
    num_ranks = dist.get_world_size(group)
    widest = -(-size // num_ranks)
    padded = torch.nn.functional.pad(x.detach(), (0, widest - x.shape[-1])).contiguous()
    chunks = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(chunks, padded, group=group)
    return torch.cat(chunks, dim=-1)[..., :size]  # only the last chunks can be short
