"""The router's balance loss of a mixture of experts, with one meaning in every layout.

transformers adds it where the config says `output_router_logits`: of all tokens of a forward pass
at once, which would depend on how a step is cut. Here it is that of each row, weighted like the
row's cross-entropy by its trained tokens: what transformers has for one row at a time, also where
a sequence has several.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.parallel.routing import Routing, sums_of_rows
from shardwise.trainer.loss import IGNORE


def balance_loss_sum(
    tally: torch.Tensor,
    targets: torch.Tensor,
    real: torch.Tensor,
    positions: torch.Tensor | None,
    routing: Routing,
) -> torch.Tensor:
    """Sum over rows of trained tokens x experts x sum over experts of (share of the choices) x
    (mean probability), over all layers together (Switch Transformer, arXiv 2101.03961, eq. 4-6).

    Args:
        tally: [rows, 2 x experts], what all layers chose for this rank's tokens
            (`Routing.tally`).
        targets: [sequences, tokens], IGNORE where nothing is trained; so `real` and `positions`.

    Returns:
        fp32 scalar. The ranks of `cp` get a part each, of their own tokens, and the parts add up
        to the loss. Those of `tp` get the gradient of a part each, and the value of all: what is
        counted is counted over all ranks that have a part of the rows.
    """
    mesh, numbers_of = routing.mesh, routing.rows_of
    numbers, num_rows = numbers_of(real, positions)
    chosen, sums = tally.chunk(2, dim=1)
    num_real = sums_of_rows(real, numbers, num_rows)[:, None]
    num_targets = sums_of_rows(targets != IGNORE, numbers, num_rows)
    chosen = chosen.detach().contiguous()
    if mesh.layout.sequence_parallel:
        dist.all_reduce(chosen, group=mesh.group("tp"))
    if mesh.layout.cp > 1:
        for counts in (chosen, num_real, num_targets):
            dist.all_reduce(counts, group=mesh.group("cp"))
    num_tokens = (num_real * routing.num_layers).clamp(min=1.0)
    shares, means = chosen / num_tokens, sums / num_tokens
    part = (num_targets * routing.num_experts * (shares * means).sum(1)).sum()
    if not mesh.layout.sequence_parallel:
        return part
    whole = mesh.sum_over(part.detach().clone(), ["tp"])
    return part + (whole - part.detach())
