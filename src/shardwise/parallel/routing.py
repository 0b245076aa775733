"""What the routers of a mixture of experts chose, row by row: of that the balance loss is made.

A pipeline's stage adds what its own layers chose to what it received, and sends it on with the
hidden states; the gradient comes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.parallel.context import own_columns
from shardwise.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How to count the choices of a model's routers."""

    mesh: Mesh
    weight: float
    """of the balance loss, beside the cross-entropy"""
    num_experts: int
    num_chosen: int
    """experts that a token is sent to"""
    num_layers: int
    """of the whole model that have experts"""

    @property
    def width(self) -> int:
        """Numbers of a row: for each expert, how often it was chosen, and its probabilities."""
        return 2 * self.num_experts

    def tally(
        self,
        router_logits: Sequence[torch.Tensor],
        real: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """What some layers chose for the tokens of this rank.

        Args:
            router_logits: of each layer, [sequences x tokens, experts].
            real: [sequences, tokens], whether it is a token of a row; under sequence parallelism
                of all ranks of `tp`, as `positions`.
            positions: of the same shape, where rows are packed.

        Returns:
            fp32 [rows, width]: the choices, which have no gradient, and the probabilities.
        """
        numbers, num_rows = self.rows_of(real, positions)
        real, numbers = self.own(real), self.own(numbers)
        total = torch.zeros(num_rows, self.width, device=real.device)
        for logits in router_logits:
            probabilities = logits.view(*real.shape, -1).softmax(-1)
            picks = probabilities.detach().topk(self.num_chosen, dim=-1).indices
            marks = torch.zeros_like(probabilities).scatter_(-1, picks, 1.0)
            both = torch.cat((marks, probabilities), dim=-1).float() * real[..., None]
            total = total + sums_of_rows(both, numbers, num_rows)
        return total

    def rows_of(
        self, real: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """For each token [sequences, tokens] a number of its row, and a bound of the numbers.

        Where a sequence has several rows they are told apart by the columns in which they begin,
        which are the same on all ranks that have a part of the sequence.
        """
        numbers = torch.arange(len(real), device=real.device)[:, None]
        if positions is None:
            return numbers.expand_as(real), len(real)
        length = real.shape[1] * self.mesh.layout.cp
        columns = own_columns(self.mesh)(torch.arange(length, device=real.device)[None])
        return numbers * length + columns - positions, self.num_rows(real, packed=True)

    def num_rows(self, tokens: torch.Tensor, *, packed: bool) -> int:
        """The bound that `rows_of` gives, for [sequences, tokens]."""
        return len(tokens) * (tokens.shape[1] * self.mesh.layout.cp if packed else 1)

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of [sequences, tokens] those on which this rank's routers work."""
        if not self.mesh.layout.sequence_parallel:
            return tokens
        return tokens.chunk(self.mesh.size("tp"), dim=1)[self.mesh.rank("tp")]


def sums_of_rows(x: torch.Tensor, numbers: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sums [rows, ...] of `x` [sequences, tokens, ...] over the tokens of each row."""
    sums = torch.zeros(num_rows, *x.shape[2:], device=x.device)
    return sums.index_add(0, numbers.flatten(), x.flatten(0, 1).float())
