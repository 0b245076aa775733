"""The router's balance loss of a mixture of experts, with one meaning in every layout.

transformers adds it where the config says `output_router_logits`: of all tokens of a forward pass
at once, which would depend on how a step is cut. Here it is that of each row, weighted like the
row's cross-entropy by its trained tokens: what transformers has for one row at a time, also where
a sequence has several.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.parallel.context import own_columns
from shardwise.parallel.mesh import Mesh
from shardwise.trainer.data.batches import Batch
from shardwise.trainer.loss import IGNORE


def balance_loss_sum(
    router_logits: Sequence[torch.Tensor], batch: Batch, mesh: Mesh, *, num_chosen: int
) -> torch.Tensor:
    """Sum over rows of trained tokens x experts x sum over experts of (share of the choices) x
    (mean probability), over all layers together (Switch Transformer, arXiv 2101.03961, eq. 4-6).

    Args:
        router_logits: of each layer, [rows x tokens of this rank, experts].
        num_chosen: experts that a token is sent to.

    Returns:
        fp32 scalar: this rank's part, of the probabilities of its own tokens. The parts add up to
        the loss; what is counted is counted over all ranks that have a part of the rows.
    """
    numbers, num_rows = _numbers_of_rows(batch, mesh)
    targets = _sums_of_rows(batch.targets != IGNORE, numbers, num_rows)
    real = batch.real
    if mesh.layout.sequence_parallel:
        tp, own = mesh.size("tp"), mesh.rank("tp")
        real, numbers = real.chunk(tp, dim=1)[own], numbers.chunk(tp, dim=1)[own]
    shape = (*real.shape, router_logits[0].shape[-1])
    num_experts = shape[-1]
    chosen = torch.zeros(num_rows, num_experts, device=real.device)
    sums = torch.zeros_like(chosen)
    for logits in router_logits:
        probabilities = logits.view(shape).softmax(-1).float() * real[..., None]
        picks = logits.detach().view(shape).softmax(-1).topk(num_chosen, dim=-1).indices
        marks = torch.zeros(shape, device=real.device).scatter_(-1, picks, 1.0)
        chosen += _sums_of_rows(marks * real[..., None], numbers, num_rows)
        sums = sums + _sums_of_rows(probabilities, numbers, num_rows)
    counts = torch.cat((chosen, _sums_of_rows(real, numbers, num_rows)[:, None]), dim=1)
    if mesh.layout.cp > 1:
        dist.all_reduce(counts, group=mesh.group("cp"))
        dist.all_reduce(targets, group=mesh.group("cp"))
    if mesh.layout.sequence_parallel:
        dist.all_reduce(counts, group=mesh.group("tp"))
    num_tokens = (counts[:, -1:] * len(router_logits)).clamp(min=1.0)
    shares, means = counts[:, :-1] / num_tokens, sums / num_tokens
    return (targets * num_experts * (shares * means).sum(1)).sum()


def _numbers_of_rows(batch: Batch, mesh: Mesh) -> tuple[torch.Tensor, int]:
    """For each token [sequences, tokens] a number of its row, and a bound of the numbers.

    Where a sequence has several rows they are told apart by the columns in which they begin, which
    are the same on all ranks that have a part of the sequence.
    """
    num_sequences, num_tokens = batch.ids.shape
    numbers = torch.arange(num_sequences, device=batch.ids.device)[:, None]
    if batch.positions is None:
        return numbers.expand_as(batch.ids), num_sequences
    length = num_tokens * mesh.layout.cp
    columns = own_columns(mesh)(torch.arange(length, device=batch.ids.device)[None])
    return numbers * length + columns - batch.positions, num_sequences * length


def _sums_of_rows(x: torch.Tensor, numbers: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sums [rows, ...] of `x` [sequences, tokens, ...] over the tokens of each row."""
    sums = torch.zeros(num_rows, *x.shape[2:], device=x.device)
    return sums.index_add(0, numbers.flatten(), x.flatten(0, 1).float())
