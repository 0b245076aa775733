"""The collectives of tensor parallelism, with the gradient that each one needs.

Compute runs on local tensors; these three functions are all that crosses ranks in a forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
