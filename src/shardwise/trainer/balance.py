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
    mesh = routing.mesh
    numbers, num_rows = routing.rows_of(real, positions)
    chosen, sums = tally.chunk(2, dim=1)
    chosen = chosen.detach().contiguous()
    if mesh.layout.sequence_parallel:
        dist.all_reduce(chosen, group=mesh.group("tp"))
    ours = torch.stack((real, targets != IGNORE), dim=-1)
    counts = torch.cat((chosen, sums_of_rows(ours, numbers, num_rows)), dim=1)
    if mesh.layout.cp > 1:
        dist.all_reduce(counts, group=mesh.group("cp"))
    chosen, num_real, num_targets = counts.split((routing.num_experts, 1, 1), dim=1)
    num_tokens = (num_real * routing.num_layers).clamp(min=1.0)
    products = (chosen / num_tokens) * (sums / num_tokens)
    part = (num_targets * routing.num_experts * products.sum(1, keepdim=True)).sum()
    if not mesh.layout.sequence_parallel:
        return part
    whole = mesh.sum_over(part.detach().clone(), ["tp"])
    return part + (whole - part.detach())
