"""The scheduler and its blocks under random loads: who holds what, and that everybody ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.server.blocks import BLOCK_TOKENS, Blocks, Table
from shardwise.server.messages import Span, decode, encode
from shardwise.server.scheduler import Scheduler, Sequence

PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which beginning
        st.integers(0, 50),  # tokens of it
        st.integers(1, 20),  # tokens of its own
        st.integers(1, 40),  # of the answer
        st.integers(0, 30),  # pass in which it comes
        st.one_of(st.none(), st.integers(0, 60)),  # pass after which its client leaves
    ),
    min_size=1,
    max_size=14,
)


class Cache:
    """What each slot of a cache holds: the tokens up to and with its own."""

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[tuple[int, ...] | None] = [None] * (num_blocks * BLOCK_TOKENS)

    def run(self, sequence: Sequence, span: Span) -> None:
        """Compute a span: all that it reads must be what the sequence's own tokens give."""
        slots = [
            block * BLOCK_TOKENS + i
            for first, count in span.runs
            for block in range(first, first + count)
            for i in range(BLOCK_TOKENS)
        ]
        assert len(set(slots)) == len(slots) >= span.end
        tokens = tuple(sequence.tokens[: span.end])
        assert tuple(span.tokens) == tokens[span.start :]
        for place in range(span.start):
            assert self.slots[slots[place]] == tokens[: place + 1], "a slot holds something else"
        for place in range(span.start, span.end):
            self.slots[slots[place]] = tokens[: place + 1]


@settings(max_examples=300, deadline=None)
@given(
    prompts=PROMPTS,
    num_blocks=st.integers(8, 20),
    max_tokens=st.integers(1, 80),
    max_running=st.integers(1, 6),
    remembers=st.booleans(),
)
def test_everybody_ends_and_nothing_is_lost(
    prompts: list[tuple[int, int, int, int, int, int | None]],
    num_blocks: int,
    max_tokens: int,
    max_running: int,
    remembers: bool,
) -> None:
    """Whatever comes and goes: the cache that a pass reads was written of the same tokens, no slot
    of a sequence that goes on is written by another, and in the end all blocks are free."""
    blocks, cache = Blocks(num_blocks, remembers=remembers), Cache(num_blocks)
    scheduler = Scheduler(blocks, max_tokens=max_tokens, max_running=max_running)
    todo, leaving, ends = [], {}, {}
    for number, (beginning, common, own, answer, comes, leaves) in enumerate(prompts):
        tokens = [beginning] * common + [100 + number] * own
        answer = min(answer, num_blocks * BLOCK_TOKENS - len(tokens))
        sequence = Sequence(tokens=tokens, most_tokens=len(tokens) + answer)
        todo.append((comes, sequence))
        ends[sequence] = len(tokens) + answer
        leaving[sequence] = leaves
    todo.sort(key=lambda one: -one[0])
    there: set[Sequence] = set()
    for number in range(20_000):
        while todo and todo[-1][0] <= number and scheduler.has_room:
            sequence = todo.pop()[1]
            scheduler.add(sequence)
            there.add(sequence)
        for sequence in list(there):
            leaves = leaving[sequence]
            if leaves is not None and leaves < number:
                scheduler.remove(sequence)
                there.remove(sequence)
        chosen = scheduler.next_pass()
        assert bool(chosen) == bool(there), "nobody goes on"
        assert sum(len(span.tokens) for _, span in chosen) <= max_tokens
        assert decode(encode([span for _, span in chosen])) == [
            Span(
                tokens=list(span.tokens),
                start=span.start,
                runs=list(span.runs),
                wants_logits=span.wants_logits,
            )
            for _, span in chosen
        ]
        for sequence, span in chosen:
            cache.run(sequence, span)
        for sequence, span in chosen:
            scheduler.computed(sequence, span)
            if span.wants_logits:
                sequence.tokens.append(7 + len(sequence.tokens) % 3)
                if len(sequence.tokens) == ends[sequence]:
                    scheduler.remove(sequence)
                    there.remove(sequence)
        if not there and not todo:
            break
    assert not there
    assert not todo
    assert blocks.num_free == num_blocks
    assert (blocks._claims == 0).all()


def test_blocks_lie_next_to_each_other() -> None:
    """Sequences that grow in turn do not get into each other's way while there is room, also where
    the room is full of what earlier ones have left."""
    blocks = Blocks(64)
    for _ in range(3):
        tables = [Table() for _ in range(4)]
        for length in range(1, 16 * BLOCK_TOKENS, 5):
            for number, table in enumerate(tables):
                assert blocks.extend(table, length, 16 * BLOCK_TOKENS)
                blocks.learn(table, [number] * length, length)
        assert [len(table.runs) for table in tables] == [1, 1, 1, 1]
        for table in tables:
            blocks.free(table)
    assert blocks.num_free == 64


def test_the_oldest_is_forgotten_first() -> None:
    blocks = Blocks(4)
    prompts = [[row] * 2 * BLOCK_TOKENS + [9] for row in range(3)]

    def serve(tokens: list[int]) -> int:
        table = blocks.begin(tokens)
        known = len(table.blocks)
        assert blocks.extend(table, len(tokens) - 1, len(tokens) - 1)
        blocks.learn(table, tokens, len(tokens) - 1)
        blocks.free(table)
        return known

    assert [serve(prompts[i]) for i in (0, 1, 0, 1)] == [0, 0, 2, 2]
    assert serve(prompts[0]) == 2
    assert serve(prompts[2]) == 0  # takes the room of 1, which was used before 0
    assert serve(prompts[0]) == 2
    assert serve(prompts[1]) == 0


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 33])
def test_the_last_token_is_never_taken_from_the_cache(size: int) -> None:
    """What comes after it has to be computed (bug bank 65)."""
    blocks = Blocks(8)
    tokens = list(range(size))
    table = Table()
    blocks.extend(table, size, size)
    blocks.learn(table, tokens, size)
    blocks.free(table)
    again = blocks.begin(tokens)
    assert len(again.blocks) == (size - 1) // BLOCK_TOKENS
    longer = blocks.begin([*tokens, 1])
    assert len(longer.blocks) == size // BLOCK_TOKENS


def test_a_hash_of_other_tokens_is_no_match() -> None:
    """The tokens after the same beginning count, and the beginning itself."""
    blocks = Blocks(8)
    table = Table()
    tokens = [1] * BLOCK_TOKENS + [2] * BLOCK_TOKENS
    blocks.extend(table, len(tokens), len(tokens))
    blocks.learn(table, tokens, len(tokens))
    blocks.free(table)
    assert len(blocks.begin([1] * BLOCK_TOKENS + [3] * BLOCK_TOKENS + [0]).blocks) == 1
    assert len(blocks.begin([3] * BLOCK_TOKENS + [2] * BLOCK_TOKENS + [0]).blocks) == 0
    assert len(blocks.begin([*tokens, 0]).blocks) == 2
