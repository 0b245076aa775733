"""Which tokens of which sequences the next pass computes. No torch.

One budget of tokens a pass. Sequences that answer come first, with a token each; what is left of
the budget goes to prompts, of which long ones take several passes. Where room for keys and values
runs out, the sequence that came last gives its room up and is computed again later, from the
same tokens: nothing that it has sent is sent twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardwise.server.blocks import BLOCK_TOKENS, Blocks, Table
from shardwise.server.messages import Span


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A prompt and its answer so far."""

    tokens: list[int]
    most_tokens: int
    """of prompt and answer"""
    num_computed: int = 0
    """of whose keys and values the cache has"""
    num_cached: int = 0
    """of those, how many it had already when the sequence came"""
    table: Table = field(default_factory=Table)
    was_preempted: bool = False

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one is known."""
        return len(self.tokens) - self.num_computed


class Scheduler:
    """The sequences of a server, and the room they have."""

    def __init__(self, blocks: Blocks, *, max_tokens: int, max_running: int) -> None:
        """Args:
        max_tokens: of a pass, all sequences together.
        max_running: sequences that have room in the cache at a time.
        """
        self.blocks = blocks
        self.num_preempted = 0
        """times that a sequence had to give its room up"""
        self.num_cached = 0
        """tokens of new sequences that the cache had already"""
        self._max_tokens, self._max_running = max_tokens, max_running
        self._running: list[Sequence] = []
        """in the order in which they came"""
        self._waiting: deque[Sequence] = deque()

    @property
    def running(self) -> list[Sequence]:
        """Those that have room."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without room."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another sequence may come."""
        return len(self._running) + len(self._waiting) < self._max_running

    def add(self, sequence: Sequence) -> None:
        """A new sequence; it must fit into an empty cache at its longest."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """One that has ended, wherever it is."""
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self.blocks.free(sequence.table)

    def next_pass(self) -> list[tuple[Sequence, Span]]:
        """What the next pass computes; nothing if nobody is there."""
        budget, before = self._max_tokens, self.num_preempted
        chosen: dict[Sequence, int] = {}
        decoding = [s for s in self._running if s.num_left == 1]
        prompts = [s for s in self._running if s.num_left > 1]
        for sequence in decoding + prompts:
            number = min(sequence.num_left, budget)
            if number and sequence in self._running and self._make_room(sequence, number):
                chosen[sequence] = number
                budget -= number
        while budget and self._waiting and self.num_preempted == before:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            chosen[sequence] = min(sequence.num_left, budget)
            budget -= chosen[sequence]
        return [(sequence, self._span(sequence, number)) for sequence, number in chosen.items()]

    def computed(self, sequence: Sequence, span: Span) -> None:
        """A pass has computed these tokens."""
        sequence.num_computed = span.end
        self.blocks.learn(sequence.table, sequence.tokens, sequence.num_computed)

    def _make_room(self, sequence: Sequence, number: int) -> bool:
        """Room for so many tokens more; False if the sequence itself had to give its room up.

        Only those that answer need any, prompts have had theirs from the beginning. They are asked
        in the order in which they came, so that nobody gives up what a pass has been promised.
        """
        total = sequence.num_computed + number
        while not self.blocks.extend(sequence.table, total, sequence.most_tokens):
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self.blocks.free(sequence.table)
        sequence.num_computed = 0
        sequence.was_preempted = True
        self.num_preempted += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Let a sequence in if all that it has so far has room, and, unless nobody else is there,
        those that answer can go on for a block each."""
        table = self.blocks.begin(sequence.tokens)
        needed = -(-len(sequence.tokens) // BLOCK_TOKENS) - len(table.blocks)
        spare = len(self._running)
        if needed + spare > self.blocks.num_free:
            self.blocks.free(table)
            return False
        self.blocks.extend(table, len(sequence.tokens), sequence.most_tokens)
        sequence.table, sequence.num_computed = table, table.num_known * BLOCK_TOKENS
        if not sequence.was_preempted:
            sequence.num_cached = sequence.num_computed
            self.num_cached += sequence.num_cached
        self._waiting.popleft()
        self._running.append(sequence)
        return True

    def _span(self, sequence: Sequence, number: int) -> Span:
        start = sequence.num_computed
        return Span(
            tokens=sequence.tokens[start : start + number],
            start=start,
            runs=tuple(sequence.table.runs),
            wants_logits=start + number == len(sequence.tokens),
        )
