"""Which row goes where: the same global order for every layout, cut into equal micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.trainer.data.store import Rows
from shardwise.trainer.loss import IGNORE, shift_labels


class Batch(NamedTuple):
    """A micro-batch, as one rank sees it; all are [rows, tokens]."""

    ids: torch.Tensor
    targets: torch.Tensor
    """for each token the one that should come next (IGNORE: not trained)"""
    real: torch.Tensor
    """whether it is a token of a row, and not padding"""


Columns = Callable[[torch.Tensor], torch.Tensor]


def whole_rows(rows: torch.Tensor) -> torch.Tensor:
    """All columns."""
    return rows


def rows_of_step(num_rows: int, global_batch: int, step: int, seed: int) -> list[int]:
    """Row numbers of one optimizer step (counted from 0 over all epochs).

    Every epoch is a new permutation; its last step may have fewer rows. Depends on nothing but
    these arguments, so any layout sees the same rows in the same step.
    """
    epoch, position = divmod(step, steps_per_epoch(num_rows, global_batch))
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    begin = position * global_batch
    return [int(row) for row in order[begin : begin + global_batch]]


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    """Optimizer steps that see every row once."""
    return -(-num_rows // global_batch)


def micro_batches(
    rows: Rows,
    numbers: Sequence[int],
    *,
    micro_batch: int,
    data_rank: int,
    num_data_ranks: int,
    multiple: int = 1,
    same_shape: bool = False,
    columns: Columns = whole_rows,
    device: torch.device,
) -> list[Batch]:
    """This rank's micro-batches of some rows.

    Every rank gets the same number of them, so that all take part in the same collectives; a
    rank that has run out of rows gets an empty row, which trains nothing. Rows are padded on the
    right: under a causal mask no real token sees the padding, so no attention mask is needed.

    Args:
        multiple: what the length of each micro-batch must be a multiple of, in tokens.
        same_shape: whether all micro-batches get the shape of the largest, as a pipeline needs.
        columns: which part of each row is this rank's; taken after the targets are known, so that
            none is lost or invented where a row is cut.
    """
    num_batches = -(-len(numbers) // (num_data_ranks * micro_batch))
    mine = list(numbers[data_rank::num_data_ranks])
    chunks = [mine[i * micro_batch : (i + 1) * micro_batch] for i in range(num_batches)]
    padded = [_pad([rows[row] for row in chunk], multiple) for chunk in chunks]
    if same_shape:
        padded = _same_shape(padded)
    return [
        Batch(*(columns(part).to(device) for part in (ids, shift_labels(labels), real)))
        for ids, labels, real in padded
    ]


def _same_shape(batches: Sequence[Batch]) -> list[Batch]:
    """Pad micro-batches to the most rows and the longest one, with what trains nothing."""
    rows = max(len(batch.ids) for batch in batches)
    length = max(batch.ids.shape[1] for batch in batches)

    def pad(tensor: torch.Tensor, value: int) -> torch.Tensor:
        missing = (0, length - tensor.shape[1], 0, rows - len(tensor))
        return torch.nn.functional.pad(tensor, missing, value=value)

    return [Batch(pad(b.ids, 0), pad(b.targets, IGNORE), pad(b.real, False)) for b in batches]


def _pad(rows: Sequence[tuple[np.ndarray, np.ndarray]], multiple: int) -> Batch:
    longest = max((len(ids) for ids, _ in rows), default=2)
    length = -(-longest // multiple) * multiple
    ids = torch.zeros(max(len(rows), 1), length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for i, (row_ids, trained) in enumerate(rows):
        tokens = torch.from_numpy(row_ids.astype(np.int64))
        ids[i, : len(tokens)] = tokens
        labels[i, : len(tokens)] = tokens.masked_fill(~torch.from_numpy(trained.copy()), IGNORE)
        real[i, : len(tokens)] = True
    return Batch(ids, labels, real)


def num_targets(batches: Sequence[Batch]) -> int:
    """Tokens that the loss counts."""
    return sum(int((batch.targets != IGNORE).sum()) for batch in batches)
