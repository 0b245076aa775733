"""Sampling and detokenising, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.server.messages import Sampling
from shardwise.server.sampling import Sampler, choose
from shardwise.server.text import Detokenizer, StopText
from tests.tokenizer import byte_tokenizer


def draw(logits: torch.Tensor, seed: int = 0, **rules: Any) -> int:
    return Sampler(Sampling(seed=seed, **rules), []).choose(logits).id


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


def test_top_k_and_min_p() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert {draw(logits, seed=s, top_k=1) for s in range(50)} == {1}
    assert {draw(logits, seed=s, top_k=2) for s in range(50)} == {1, 2}
    assert {draw(logits, seed=s, top_k=9) for s in range(200)} == {0, 1, 2, 3}
    assert {draw(logits, seed=s, min_p=0.4) for s in range(50)} == {1, 2}
    assert {draw(logits, seed=s, min_p=1.0) for s in range(50)} == {1}


@pytest.mark.parametrize("temperature", [1e-40, 1e-6])
def test_a_temperature_near_zero_takes_the_likeliest(temperature: float) -> None:
    assert draw(torch.tensor([50.0, 80.0, -3.0]), temperature=temperature) == 1


def chosen(logits: list[float], number: int, prompt: list[int], **rules: Any) -> list[int]:
    sampler = Sampler(Sampling(temperature=0, **rules), prompt)
    return [sampler.choose(torch.tensor(logits)).id for _ in range(number)]


def test_penalties_and_biases() -> None:
    """By their definitions: presence once, frequency for each time, of the answer alone; repetition
    divides what is positive and multiplies what is not, of prompt and answer."""
    logits = [3.0, 2.5, -1.0]
    assert chosen(logits, 3, [1], presence_penalty=0.6) == [0, 1, 0]
    assert chosen(logits, 4, [0], frequency_penalty=0.3) == [0, 0, 1, 0]
    assert chosen(logits, 2, [], frequency_penalty=-2.0) == [0, 0]
    assert chosen(logits, 3, [0], repetition_penalty=1.5) == [1, 0, 0]
    assert chosen([-1.0, -1.2, -9.0], 2, [0], repetition_penalty=1.5) == [1, 0]
    assert chosen(logits, 2, [], logit_bias={2: 5.0}) == [2, 2]
    assert chosen(logits, 2, [], logit_bias={0: -100.0}) == [1, 1]


def test_told_probabilities_are_the_models_own() -> None:
    """Whatever the rules made of them."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    rules = Sampling(temperature=0, logit_bias={2: 50.0}, logprobs=2)
    token = Sampler(rules, []).choose(logits)
    assert token.id == 2
    assert token.logprob == pytest.approx(float(logits[2]))
    assert [i for i, _ in token.top] == [0, 1]
    assert [value for _, value in token.top] == pytest.approx(logits[:2].tolist())


def test_neighbours_do_not_change_what_a_seed_gives() -> None:
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    rules = [Sampling(seed=7, temperature=1.5), Sampling(temperature=0), Sampling(seed=9)]
    alone = [[t.id for t in choose(rows[i : i + 1], [Sampler(r, [])])] for i, r in enumerate(rules)]
    together = choose(rows[:3], [Sampler(r, []) for r in rules])
    assert [[token.id] for token in together] == alone


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
