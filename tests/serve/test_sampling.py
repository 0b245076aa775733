"""Sampling and detokenising, token by token."""

from __future__ import annotations

import pytest
import torch

from shardwise.server.sampling import sample
from shardwise.server.text import Detokenizer, StopText
from tests.tokenizer import byte_tokenizer


def draw(logits: torch.Tensor, seed: int = 0, temperature: float = 1.0, top_p: float = 1.0) -> int:
    generator = torch.Generator().manual_seed(seed)
    return sample(logits, temperature=temperature, top_p=top_p, generator=generator)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draw(torch.tensor([0.1, 2.0, 1.0]), temperature=0) == 1


def test_a_seed_decides_the_token() -> None:
    logits = torch.zeros(1000)
    assert draw(logits, seed=1) == draw(logits, seed=1)
    assert len({draw(logits, seed=seed) for seed in range(20)}) > 10


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = [draw(logits, seed=seed) for seed in range(2000)]
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert drawn.count(token) / 2000 == pytest.approx(share, abs=0.05)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    assert {draw(logits, seed=s, top_p=0.5) for s in range(50)} == {1}
    assert {draw(logits, seed=s, top_p=0.79) for s in range(50)} == {1, 2}
    assert {draw(logits, seed=s, top_p=1e-6) for s in range(50)} == {1}


def test_characters_of_several_tokens_come_out_whole() -> None:
    """An emoji is four tokens here; nothing is lost or sent twice."""
    tokenizer = byte_tokenizer()
    text = "a😀é!"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "😀" in pieces
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("stops", "out", "stopped"),
    [
        ((), "ABCDEFGHIJ", False),
        (("DEFGHIJ",), "ABC", True),
        (("J", "CD"), "AB", True),
        (("E",), "ABCD", True),
        (("ABCDEFGHIJ",), "", True),
        (("DEFX",), "ABCDEFGHIJ", False),
        (("GHIJK",), "ABCDEFGHIJ", False),
        (("x", "y", "HI", "BCDE"), "A", True),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10])
def test_nothing_of_a_stop_text_is_given_out_and_nothing_before_it_is_lost(
    stops: tuple[str, ...], out: str, stopped: bool, size: int
) -> None:
    """However the text is cut into pieces; a near-miss comes out in the end (bug bank 61)."""
    stop_text, text, hit = StopText(stops), "", False
    for i in range(0, 10, size):
        piece, hit = stop_text.feed("ABCDEFGHIJ"[i : i + size])
        text += piece
        if hit:
            break
    text += "" if hit else stop_text.flush()
    assert (text, hit) == (out, stopped)
