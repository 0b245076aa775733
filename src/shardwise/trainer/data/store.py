"""Encoded rows on disk: written once before ranks start, memory-mapped by every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.errors import UserError
from shardwise.trainer.data.chat import Example, cut

IDS_FILE = "ids.npy"
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of tokens, one after the other, with where each one starts."""

    ids: Ints
    trained: Bools
    starts: npt.NDArray[np.int64]
    """[rows + 1]"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [int(length) for length in np.diff(self.starts)]

    def __getitem__(self, row: int) -> tuple[Ints, Bools]:
        """Token ids and trained marks of one row."""
        span = slice(self.starts[row], self.starts[row + 1])
        return self.ids[span], self.trained[span]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What became of a data file, for the user."""

    num_rows: int
    num_tokens: int
    num_trained: int
    num_cut: int
    num_dropped: int

    def __str__(self) -> str:
        share = self.num_trained / self.num_tokens
        text = f"{self.num_rows} rows, {self.num_tokens} tokens, {share:.0%} of them trained"
        if self.num_cut:
            text += f"; {self.num_cut} rows cut at train.seq_len"
        if self.num_dropped:
            text += f"; {self.num_dropped} rows dropped: nothing to train within train.seq_len"
        return text


def write_rows(
    folder: Path, examples: Iterable[Example], *, seq_len: int, vocab_size: int
) -> Summary:
    """Cut, drop what has no target left, and write the rows to `folder`.

    Raises:
        UserError: no row has a token to train, or the tokenizer is not the model's.
    """
    ids: list[Ints] = []
    trained: list[Bools] = []
    num_cut = num_dropped = 0
    for example in examples:
        short = cut(example, seq_len)
        if short.num_trained == 0:
            num_dropped += 1
            continue
        num_cut += len(short.ids) < len(example.ids)
        ids.append(np.asarray(short.ids, dtype=np.int32))
        trained.append(np.asarray([False, *short.trained[1:]], dtype=np.bool_))
    if not ids:
        raise UserError(
            f"none of the {num_dropped} rows has a token to train within "
            f"train.seq_len={seq_len}; raise it, or look at the data."
        )
    largest = max(int(row.max()) for row in ids)
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer gives the id {largest}, the model's vocab_size is {vocab_size}; the "
            "tokenizer is not this model's."
        )
    folder.mkdir(parents=True, exist_ok=True)
    starts = np.concatenate(([0], np.cumsum([len(row) for row in ids])))
    np.save(folder / IDS_FILE, np.concatenate(ids))
    np.save(folder / "trained.npy", np.concatenate(trained))
    np.save(folder / "starts.npy", starts.astype(np.int64))
    return Summary(
        num_rows=len(ids),
        num_tokens=int(starts[-1]),
        num_trained=int(sum(row.sum() for row in trained)),
        num_cut=num_cut,
        num_dropped=num_dropped,
    )


def open_rows(folder: Path) -> Rows:
    """Map the rows that `write_rows` wrote."""
    return Rows(
        ids=np.load(folder / IDS_FILE, mmap_mode="r"),
        trained=np.load(folder / "trained.npy", mmap_mode="r"),
        starts=np.load(folder / "starts.npy"),
    )
