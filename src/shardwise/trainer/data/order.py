"""Which rows make a sequence, and which sequences an optimizer step: the same for every layout."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwise.config import Train

NUM_OPEN = 32
"""sequences that a row may still be put into, where rows are packed"""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a run's rows. Every epoch is a new permutation, packed anew; its last step may
    have fewer sequences. Depends on nothing but these fields, so a step has the same rows on any
    layout, and after a resume too."""

    lengths: Sequence[int]
    """of each row, in tokens"""
    train: Train
    _made: dict[int, list[list[int]]] = field(default_factory=dict, repr=False)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return min(self._ends[-1], self.train.max_steps or self._ends[-1])

    def of_step(self, step: int) -> list[list[int]]:
        """Row numbers of each sequence of one optimizer step (counted from 0 over all epochs)."""
        epoch = bisect_right(self._ends, step)
        begin = (step - ([0, *self._ends][epoch])) * self.train.global_batch
        return self.of_epoch(epoch)[begin : begin + self.train.global_batch]

    def of_epoch(self, epoch: int) -> list[list[int]]:
        """Row numbers of each sequence of one epoch."""
        if epoch not in self._made:
            self._made.clear()
            order = np.random.default_rng([self.train.seed, epoch]).permutation(len(self.lengths))
            self._made[epoch] = sequences_of(self.lengths, order.tolist(), self.train)
        return self._made[epoch]

    def fill(self) -> str:
        """How full the sequences of the first epoch are, in words."""
        count, num_tokens = len(self.of_epoch(0)), sum(self.lengths)
        share = num_tokens / (count * self.train.seq_len)
        return f"{len(self.lengths)} rows in {count} sequences, {share:.0%} full"

    @cached_property
    def _ends(self) -> list[int]:
        """Steps done at the end of each epoch, as far as the run goes."""
        ends = [0]
        for epoch in range(self.train.epochs):
            if ends[-1] < (self.train.max_steps or math.inf):
                count = len(self.of_epoch(epoch) if self.train.packing else self.lengths)
                ends.append(ends[-1] + -(-count // self.train.global_batch))
        return ends[1:]


def sequences_of(lengths: Sequence[int], rows: Iterable[int], train: Train) -> list[list[int]]:
    """Put rows into sequences in the given order: one each, or as many as fit."""
    return pack(lengths, rows, train.seq_len) if train.packing else [[row] for row in rows]


def pack(lengths: Sequence[int], rows: Iterable[int], seq_len: int) -> list[list[int]]:
    """Put each row, whole, into the fullest open sequence that has room for it.

    Where none has, a new sequence takes the place of the fullest one, which is closed.

    Args:
        lengths: tokens of each row, at most `seq_len`.

    Returns:
        Row numbers of each sequence, in the order in which sequences were begun.
    """
    packed: list[list[int]] = []
    current: list[list[int]] = [[] for _ in range(NUM_OPEN)]
    room = np.zeros(NUM_OPEN, dtype=np.int64)
    for row in rows:
        left = room - lengths[row]
        place = int(np.where(left >= 0, left, seq_len).argmin())
        if left[place] < 0:
            place = int(room.argmin())
            packed.append([])
            current[place], room[place] = packed[-1], seq_len
        current[place].append(row)
        room[place] -= lengths[row]
    return packed
