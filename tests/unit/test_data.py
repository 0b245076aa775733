"""Rows: read strictly, encoded for the assistant's words only, dealt the same to any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.config import Layout, Train
from shardwise.errors import UserError
from shardwise.parallel.context import own_columns
from shardwise.trainer.data.batches import micro_batches, num_targets
from shardwise.trainer.data.chat import Example, encode
from shardwise.trainer.data.order import Order, pack
from shardwise.trainer.data.read import read_conversations
from shardwise.trainer.data.store import open_rows, write_rows
from shardwise.trainer.loss import IGNORE
from tests.tokenizer import CHATML, byte_tokenizer

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
LINE = json.dumps(GOOD)
DATA = Path(__file__).parents[2] / "examples" / "data"


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


@pytest.mark.parametrize(
    "raw",
    [
        f"{LINE}\n{LINE}\n".encode(),
        f"{LINE}\n{LINE}".encode(),
        f"{LINE}\r\n{LINE}\r\n".encode(),
        f"\ufeff{LINE}\n\n  \n{LINE}\n".encode(),
    ],
)
def test_good_files(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(raw)
    assert read_conversations(tmp_path / "rows.jsonl") == [GOOD["messages"]] * 2


def bad(**changes: Any) -> str:
    return json.dumps({"messages": [{**GOOD["messages"][0], **changes}, GOOD["messages"][1]]})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (LINE[:-4], "Expecting|Unterminated|delimiter"),
        ("[1]", "expected"),
        ("null", "expected"),
        ('{"text": "x"}', "expected"),
        ('{"messages": []}', "no assistant"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "first message"),
        (bad(content=None), "content of a user message is None"),
        (bad(content=""), "content of a user message is ''"),
        (bad(content=["x"]), "expected some text"),
        (bad(role="robot"), "'robot' is not one of"),
        (bad(extra=1), "exactly"),
        (json.dumps({**GOOD, "tools": [{"name": "f"}]}), "'tools' would be left out"),
        (bad(content="\ud83d"), "surrogate"),
    ],
)
def test_bad_lines_are_named_by_file_and_number(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{LINE}\n\n{line}\n")
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 3: .*({reason})"):
        read_conversations(file)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="no conversation"):
        read_conversations(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="no data file"):
        read_conversations(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(LINE.replace("yo", "\xe9").encode("latin-1"))
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        read_conversations(tmp_path / "latin.jsonl")


def trained_text(example: Example, tokenizer: Any) -> str:
    ids = [i for i, marked in zip(example.ids, example.trained, strict=True) if marked]
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHATML.replace(
            "{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}"
        ),
    ],
    ids=["no marks", "marks"],
)
def test_only_the_assistants_words_and_their_end_are_trained(template: str) -> None:
    """With or without generation marks in the template (bug bank 46)."""
    tokenizer = byte_tokenizer(template)
    messages = [{"role": "system", "content": "be kind"}, *chat("hi 😀", "yo 😀!", "and?", "bye")]
    example = encode(messages, tokenizer)
    assert trained_text(example, tokenizer) == "yo 😀!<|im_end|>bye<|im_end|>"


def test_templates_that_cannot_be_trained_on() -> None:
    rewrites = "{{ messages | length }}" + CHATML
    with pytest.raises(UserError, match="renders a conversation's beginning differently"):
        encode(chat("a", "b", "c", "d"), byte_tokenizer(rewrites))
    with pytest.raises(UserError, match="template failed"):
        encode(chat("a", "b"), byte_tokenizer("{{ raise_exception('no') }}"))


def example(num_tokens: int, trained_from: int) -> Example:
    ids = list(range(num_tokens))
    return Example(ids=ids, trained=[i >= trained_from for i in ids])


def test_rows_are_cut_dropped_and_counted(tmp_path: Path) -> None:
    """No row is trained only on its prompt (bug bank 50)."""
    rows = [example(63, 5), example(64, 5), example(65, 5), example(100, 64), example(1, 0)]
    summary = write_rows(tmp_path, rows, seq_len=64, vocab_size=320)
    assert (summary.num_rows, summary.num_cut, summary.num_dropped) == (3, 1, 2)
    assert "1 rows cut" in str(summary)
    assert "2 rows dropped" in str(summary)
    stored = open_rows(tmp_path)
    assert [len(stored[i][0]) for i in range(len(stored))] == [63, 64, 64]
    with pytest.raises(UserError, match="none of the 1 rows"):
        write_rows(tmp_path, [example(100, 64)], seq_len=64, vocab_size=320)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 10])
def test_every_row_comes_once_an_epoch_in_an_order_that_the_seed_decides(num_rows: int) -> None:
    steps = -(-num_rows // 4)

    def rows_of_epoch(epoch: int, seed: int) -> list[int]:
        train = Train(global_batch=4, epochs=3, seed=seed)
        order = Order(lengths=[9] * num_rows, train=train)
        assert order.num_steps == 3 * steps
        numbers = range(epoch * steps, (epoch + 1) * steps)
        return [row for step in numbers for (row,) in order.of_step(step)]

    epochs = [rows_of_epoch(epoch, 5) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if num_rows > 6:
        assert epochs[0] != epochs[1]
        assert epochs[0] != rows_of_epoch(0, 6)


def some_lengths(num_rows: int, seed: int = 0) -> list[int]:
    """Of conversations, a few of them as long as a sequence of 64."""
    lengths = np.random.default_rng(seed).lognormal(2.5, 0.9, num_rows)
    return [int(length) for length in lengths.clip(2, 64)]


def packed(**changes: Any) -> Train:
    return Train(**{"packing": True, "seq_len": 64, "global_batch": 4, "epochs": 5, **changes})


@pytest.mark.parametrize("num_rows", [1, 2, 50, 3000])
def test_packing_puts_each_row_whole_into_one_sequence(num_rows: int) -> None:
    """None is split, lost or twice there (bug bank 50), and most sequences are nearly full."""
    lengths = some_lengths(num_rows)
    sequences = pack(lengths, range(num_rows), 64)
    assert sorted(row for rows in sequences for row in rows) == list(range(num_rows))
    sums = [sum(lengths[row] for row in rows) for rows in sequences]
    assert 2 <= min(sums) <= max(sums) <= 64
    if num_rows == 3000:
        assert sum(sums) / len(sums) > 0.95 * 64


def test_packed_epochs_come_one_after_the_other_whatever_their_lengths() -> None:
    """Epochs of different numbers of steps; any step is found anew, as after a resume (43)."""
    lengths = [int(length) for length in np.random.default_rng(0).integers(15, 45, 50)]
    whole = Order(lengths=lengths, train=packed())
    per_epoch = [-(-len(whole.of_epoch(epoch)) // 4) for epoch in range(5)]
    assert len(set(per_epoch)) > 1, "choose lengths of which epochs differ"
    assert whole.num_steps == sum(per_epoch)
    steps = [whole.of_step(step) for step in range(whole.num_steps)]
    begin = 0
    for number in per_epoch:
        rows = [row for step in steps[begin : begin + number] for rows in step for row in rows]
        assert sorted(rows) == list(range(50))
        begin += number
    for step, sequences in enumerate(steps):
        assert Order(lengths=lengths, train=packed()).of_step(step) == sequences
        assert Order(lengths=lengths, train=packed(epochs=9)).of_step(step) == sequences
    assert Order(lengths=lengths, train=packed(max_steps=3)).num_steps == 3
    assert Order(lengths=lengths, train=packed(max_steps=999)).num_steps == whole.num_steps


def test_a_packed_micro_batch_tells_where_each_row_begins(tmp_path: Path) -> None:
    """Positions from 0 in each row and in the padding, no target at a row's first token, and the
    last one's target is not the next row's first (bug bank 28)."""
    lengths = [5, 3, 4]
    write_rows(tmp_path, [example(n, 0) for n in lengths], seq_len=64, vocab_size=320)
    first, second = micro_batches(
        open_rows(tmp_path),
        [[0, 1], [2]],
        micro_batch=1,
        packing=True,
        data_rank=0,
        num_data_ranks=1,
        multiple=10,
        same_shape=True,
        device=torch.device("cpu"),
    )
    assert first.positions is not None
    assert second.positions is not None
    assert first.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    assert first.ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0]]
    no = IGNORE
    assert first.targets.tolist() == [[1, 2, 3, 4, no, 1, 2, no, no, no]]
    assert first.real.tolist() == [[True] * 8 + [False] * 2]
    assert second.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_micro_batches_deal_every_row_once_and_evenly(
    tmp_path: Path, num_ranks: int, micro_batch: int
) -> None:
    lengths = [5, 9, 3, 12, 7, 4, 8]
    write_rows(tmp_path, [example(n, 1) for n in lengths], seq_len=64, vocab_size=320)
    rows = open_rows(tmp_path)
    dealt: list[Sequence[Any]] = [
        micro_batches(
            rows,
            [[row] for row in range(7)],
            micro_batch=micro_batch,
            data_rank=rank,
            num_data_ranks=num_ranks,
            device=torch.device("cpu"),
        )
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in dealt}) == 1
    assert sum(num_targets(batches) for batches in dealt) == sum(n - 1 for n in lengths)
    found = sorted(
        int((row != IGNORE).sum()) + 1
        for batches in dealt
        for batch in batches
        for row in batch.targets
        if (row != IGNORE).any()
    )
    assert found == sorted(lengths)


class FakeMesh:
    """One rank of a `cp` axis."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.layout = Layout(cp=num_ranks)
        self._rank = rank

    def rank(self, axis: str) -> int:
        return self._rank


@pytest.mark.parametrize("length", [2, 3, 8, 17, 63, 66])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_target_is_lost_or_invented_where_a_row_is_cut(
    tmp_path: Path, num_ranks: int, length: int
) -> None:
    """Each token with the one after it, once, over all ranks (bug bank 7 and 28)."""
    ids = list(range(100, 100 + length))
    write_rows(tmp_path, [Example(ids=ids, trained=[True] * length)], seq_len=128, vocab_size=320)
    pairs: list[tuple[int, int]] = []
    lengths = set()
    for rank in range(num_ranks):
        (batch,) = micro_batches(
            open_rows(tmp_path),
            [[0]],
            micro_batch=1,
            data_rank=0,
            num_data_ranks=1,
            multiple=Layout(cp=num_ranks).sequence_multiple,
            columns=own_columns(FakeMesh(rank, num_ranks)),  # type: ignore[arg-type]
            device=torch.device("cpu"),
        )
        lengths.add(batch.ids.shape)
        flat = zip(batch.ids.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
        pairs += [(token, target) for token, target in flat if target != IGNORE]
    assert sorted(pairs) == list(pairwise(ids))
    assert len(lengths) == 1


@pytest.mark.parametrize("name", ["quickstart_train", "quickstart_eval"])
def test_the_data_that_ships_is_good(name: str) -> None:
    conversations = read_conversations(DATA / f"{name}.jsonl")
    assert len(conversations) >= 40
    tokenizer = byte_tokenizer()
    counts = np.array([encode(c, tokenizer).num_trained for c in conversations])
    assert counts.min() > 20


def test_train_and_eval_rows_that_ship_do_not_overlap() -> None:
    train, held_out = (
        {
            m["content"]
            for c in read_conversations(DATA / f"{n}.jsonl")
            for m in c
            if m["role"] == "user"
        }
        for n in ("quickstart_train", "quickstart_eval")
    )
    assert not train & held_out
