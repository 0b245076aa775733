"""Expert parallelism: each rank has some of a layer's experts, and tokens travel to theirs.

The ranks that read different tokens (fsdp x cp x tp) are seen a second time as efsdp x ep: experts
are split over `ep`, and their states sharded over `efsdp`. The router and the experts' own forward
stay transformers'; in between, tokens are exchanged all to all, and back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.parallel.collectives import exchange
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor import local_parameter, using


def experts_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The stacked experts of those decoder layers that have some."""
    mlps = [layer.mlp for layer in layers]
    return [mlp.experts for mlp in mlps if hasattr(mlp, "experts")]


def apply_expert_parallel(experts: nn.Module, mesh: Mesh) -> None:
    """Split stacked experts on the meta device over the `ep` axis, in place."""
    for name, param in list(experts.named_parameters(recurse=False)):
        local = distribute_tensor(
            param.data, mesh.expert_mesh["ep"], [Shard(0)], src_data_rank=None
        )
        experts.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
    dispatch = _Dispatch(experts, mesh)
    experts.forward = dispatch.forward


class _Dispatch:
    """Sends each token to the ranks of its experts, and adds up what comes back."""

    def __init__(self, experts: nn.Module, mesh: Mesh) -> None:
        self._experts = experts
        self._inner = experts.forward
        self._group = mesh.group("ep")
        self._num_ranks = mesh.layout.ep
        self._num_experts = experts.num_experts
        experts.num_experts //= self._num_ranks  # transformers' forward counts those it has

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts' own.

        Args:
            hidden: [tokens, hidden].
            top_k_index: [tokens, k], numbers of each token's experts in the whole layer.
            top_k_weights: [tokens, k].
        """
        num_tokens, k = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)  # by expert, so by rank
        counts = torch.bincount(top_k_index.flatten(), minlength=self._num_experts)
        theirs = torch.empty_like(counts)  # for my experts, from each rank in turn
        dist.all_to_all_single(theirs, counts, group=self._group)
        sent, received = self._by_rank(counts), self._by_rank(theirs)
        tokens = exchange(hidden[order // k], sent, received, self._group)
        experts = torch.arange(self._experts.num_experts, device=hidden.device)
        outputs = self._run(tokens, experts.repeat(self._num_ranks).repeat_interleave(theirs))
        returned = exchange(outputs, received, sent, self._group)
        choices = torch.zeros_like(returned).index_copy(0, order, returned)
        weighted = choices.view(num_tokens, k, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden.dtype)

    def _by_rank(self, counts: torch.Tensor) -> list[int]:
        return counts.view(self._num_ranks, -1).sum(1).tolist()

    def _run(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Each token through one of this rank's experts."""
        num_tokens = len(tokens)
        if not num_tokens:  # the sum of no rows: zero, and gradients go back to the exchange
            tokens, experts = tokens.sum(0, keepdim=True), experts.new_zeros(1)
        weights: dict[str, Any] = {
            name: local_parameter(self._experts, name) for name in self._experts._parameters
        }
        with using(self._experts, **weights):
            ones = tokens.new_ones(len(tokens), 1)
            outputs = self._inner(tokens, experts[:, None], ones)
        return outputs[:num_tokens]
