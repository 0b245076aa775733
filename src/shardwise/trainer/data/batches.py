"""Which row goes where: the sequences of a step, dealt to ranks in equal micro-batches."""

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
    positions: torch.Tensor | None = None
    """where rows are packed: of each token in its own row, of which the padding is one more; None:
    each token's column"""


Columns = Callable[[torch.Tensor], torch.Tensor]


def whole_rows(rows: torch.Tensor) -> torch.Tensor:
    """All columns."""
    return rows


def micro_batches(
    rows: Rows,
    sequences: Sequence[Sequence[int]],
    *,
    micro_batch: int,
    packing: bool = False,
    data_rank: int,
    num_data_ranks: int,
    multiple: int = 1,
    same_shape: bool = False,
    least: int = 1,
    columns: Columns = whole_rows,
    device: torch.device,
) -> list[Batch]:
    """This rank's micro-batches of some sequences.

    Every rank gets the same number of them, so that all take part in the same collectives; a
    rank that has run out of sequences gets an empty one, which trains nothing. Padding is on the
    right: under a causal mask no real token sees it, so no attention mask is needed.

    Args:
        sequences: row numbers of each; more than one in some only with `packing`.
        packing: give the tokens' positions, from which attention knows the rows of a sequence.
        multiple: what the length of each micro-batch must be a multiple of, in tokens.
        same_shape: whether all micro-batches get the shape of the largest, as a pipeline needs.
        least: make at least so many micro-batches; more than there are sequences are empty.
        columns: which part of each sequence is this rank's; taken after the targets are known, so
            that none is lost or invented where a sequence is cut.
    """
    num_batches = max(least, -(-len(sequences) // (num_data_ranks * micro_batch)))
    mine = list(sequences[data_rank::num_data_ranks])
    chunks = [mine[i * micro_batch : (i + 1) * micro_batch] for i in range(num_batches)]
    shapes = [_shape(rows, chunk, multiple) for chunk in chunks]
    if same_shape:
        shapes = [tuple(map(max, zip(*shapes, strict=True)))] * len(shapes)
    batches = []
    for chunk, shape in zip(chunks, shapes, strict=True):
        ids, labels, real, positions = _pad(rows, chunk, shape)
        parts = (ids, shift_labels(labels), real, *([positions] if packing else []))
        batches.append(Batch(*(columns(part).to(device) for part in parts)))
    return batches


def _shape(rows: Rows, sequences: Sequence[Sequence[int]], multiple: int) -> tuple[int, ...]:
    """Sequences and tokens of a micro-batch, at least one of two tokens."""
    longest = max((sum(len(rows[n][0]) for n in numbers) for numbers in sequences), default=2)
    return max(len(sequences), 1), -(-longest // multiple) * multiple


def _pad(
    rows: Rows, sequences: Sequence[Sequence[int]], shape: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """Ids, labels, what is real, and positions of a micro-batch, with what trains nothing."""
    ids = torch.zeros(shape, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    real = torch.zeros_like(ids, dtype=torch.bool)
    positions = torch.zeros_like(ids)
    for i, numbers in enumerate(sequences):
        begin = 0
        for row_ids, trained in (rows[number] for number in numbers):
            tokens = torch.from_numpy(row_ids.astype(np.int64))
            span = slice(begin, begin + len(tokens))
            ids[i, span] = tokens
            labels[i, span] = tokens.masked_fill(~torch.from_numpy(trained.copy()), IGNORE)
            labels[i, begin] = IGNORE  # nothing of its own row comes before it
            real[i, span] = True
            positions[i, span] = torch.arange(len(tokens))
            begin = span.stop
        positions[i, begin:] = torch.arange(shape[1] - begin)
    positions[len(sequences) :] = torch.arange(shape[1])
    return ids, labels, real, positions


def num_targets(batches: Sequence[Batch]) -> int:
    """Tokens that the loss counts."""
    return sum(int((batch.targets != IGNORE).sum()) for batch in batches)
