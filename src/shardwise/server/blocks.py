"""Which blocks of the cache of keys and values belong to whom. No torch.

A block has room for BLOCK_TOKENS tokens in every layer. A full block whose tokens are known stays
after its sequence has ended, so that a later one with the same beginning need not compute it
again, until its room is needed. Blocks are given out next to each other where that can be: what
lies in one piece is read in place by attention, what does not is copied first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.planner.kv_room import KV_BLOCK_TOKENS

BLOCK_TOKENS = KV_BLOCK_TOKENS
_ROOT = 0
_GROWTH_TOKENS = 256
"""that a place is looked for, beyond what a sequence has: answers are seldom as long as they may
be, and what is remembered is forgotten for it"""


@dataclass(frozen=True)
class _Known:
    """What a full block holds: some tokens after those of another block."""

    key: tuple[int, tuple[int, ...]]
    """number of the content before, the tokens themselves"""
    number: int
    """of this content; never given twice"""


@dataclass(eq=False)
class Table:
    """The blocks of one sequence, in the order of its tokens."""

    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """the same as (first block, number of blocks next to each other)"""
    num_known: int = 0
    """of them, how many are full and told to `Blocks.learn`"""
    content: int = _ROOT
    """number of the content of the last of those"""
    claim: slice = field(default_factory=lambda: slice(0, 0))
    """where it will probably grow"""

    def append(self, block: int) -> None:
        """One more block at the end."""
        self.blocks.append(block)
        if self.runs and sum(self.runs[-1]) == block:
            self.runs[-1] = (self.runs[-1][0], self.runs[-1][1] + 1)
        else:
            self.runs.append((block, 1))


class Blocks:
    """All blocks of a cache."""

    def __init__(self, num_blocks: int, *, remembers: bool = True) -> None:
        """Args:
        remembers: whether blocks keep what they hold, for sequences that begin alike.
        """
        self.num_blocks = num_blocks
        self._remembers = remembers
        self._num_users = np.zeros(num_blocks, np.int32)
        self._empty = np.ones(num_blocks, bool)
        """neither used nor remembered"""
        self._claims = np.zeros(num_blocks, np.int32)
        self._known: dict[int, _Known] = {}
        self._by_key: dict[tuple[int, tuple[int, ...]], int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """remembered and not used, oldest first"""
        self._num_empty = num_blocks
        self._last_number = _ROOT

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self._num_empty + len(self._idle)

    def begin(self, tokens: Sequence[int]) -> Table:
        """A table with the blocks that are remembered of the beginning of some tokens; never with
        the last token, which has to be computed for what comes after it."""
        table = Table()
        while self._remembers:
            start = len(table.blocks) * BLOCK_TOKENS
            if start + BLOCK_TOKENS >= len(tokens):
                break
            key = (table.content, tuple(tokens[start : start + BLOCK_TOKENS]))
            block = self._by_key.get(key)
            if block is None:
                break
            self._num_users[block] += 1
            self._idle.pop(block, None)
            table.append(block)
            table.num_known += 1
            table.content = self._known[block].number
        return table

    def extend(self, table: Table, num_tokens: int, expected: int) -> bool:
        """Give a sequence room for so many tokens in all; False, and nothing, if there is none.

        Args:
            expected: tokens that the sequence may grow to.
        """
        more = -(-num_tokens // BLOCK_TOKENS) - len(table.blocks)
        if more > self.num_free:
            return False
        for _ in range(more):
            following = table.blocks[-1] + 1 if table.blocks else self.num_blocks
            if following == self.num_blocks or not self._empty[following]:
                likely = min(expected, num_tokens + _GROWTH_TOKENS)
                rest = max(1, -(-likely // BLOCK_TOKENS) - len(table.blocks))
                following = self._new_run(table, rest)
            self._empty[following] = False
            self._num_empty -= 1
            self._num_users[following] = 1
            table.append(following)
        return True

    def learn(self, table: Table, tokens: Sequence[int], num_computed: int) -> None:
        """Remember what the blocks hold that the first `num_computed` tokens have filled."""
        while self._remembers and (table.num_known + 1) * BLOCK_TOKENS <= num_computed:
            start = table.num_known * BLOCK_TOKENS
            key = (table.content, tuple(tokens[start : start + BLOCK_TOKENS]))
            block = table.blocks[table.num_known]
            if key not in self._by_key:
                self._last_number += 1
                self._by_key[key] = block
                self._known[block] = _Known(key, self._last_number)
            table.content = self._known[self._by_key[key]].number
            table.num_known += 1

    def free(self, table: Table) -> None:
        """Give all blocks of a sequence back; the later ones are forgotten first."""
        for block in reversed(table.blocks):
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if block in self._known:
                self._idle[block] = None
            else:
                self._empty[block] = True
                self._num_empty += 1
        self._claims[table.claim] -= 1
        table.blocks, table.runs = [], []
        table.num_known, table.content = 0, _ROOT
        table.claim = slice(0, 0)

    def _new_run(self, table: Table, num_blocks: int) -> int:
        """The first block of a place where a sequence can grow by so many, if there is one."""
        left = 2 * num_blocks  # what is forgotten for it at most
        while True:
            starts, sizes = _runs(self._empty & (self._claims == 0))
            if max(sizes, default=0) >= num_blocks or not left or not self._idle:
                break
            for _ in range(min(left, len(self._idle), -(-num_blocks // 4))):
                self._forget()
                left -= 1
        if not len(starts):
            starts, sizes = _runs(self._empty)
        fits = np.flatnonzero(sizes >= num_blocks)
        best = fits[sizes[fits].argmin()] if len(fits) else sizes.argmax()
        start = int(starts[best])
        self._claims[table.claim] -= 1
        table.claim = slice(start, start + min(num_blocks, int(sizes[best])))
        self._claims[table.claim] += 1
        return start

    def _forget(self) -> None:
        """What has not been used for longest."""
        block, _ = self._idle.popitem(last=False)
        del self._by_key[self._known.pop(block).key]
        self._empty[block] = True
        self._num_empty += 1


def _runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return edges[::2], edges[1::2] - edges[::2]
