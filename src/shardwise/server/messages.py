"""The small typed messages of the server: API to engine and back, first rank to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Token:
    """A sampled token with what the model gave it."""

    id: int
    logprob: float
    """natural logarithm of its probability, before temperature and all else"""
    top: tuple[tuple[int, float], ...] = ()
    """the likeliest tokens and their logarithms"""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One piece of an answer. The last one has a finish reason."""

    text: str = ""
    num_tokens: int = 0
    """tokens generated so far"""
    num_cached: int = 0
    """tokens of the prompt that were not computed, because the cache had them"""
    token: Token | None = None
    """with its probability, where the request asks for it"""
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The defaults choose by the model's own probabilities."""

    temperature: float = 1.0
    """0 takes the likeliest token"""
    top_p: float = 1.0
    """the smallest set of tokens whose probability reaches this"""
    top_k: int = 0
    """so many of the likeliest; 0: all"""
    min_p: float = 0.0
    """those with at least this share of the likeliest one's probability"""
    presence_penalty: float = 0.0
    """taken from the logits of tokens that the answer has"""
    frequency_penalty: float = 0.0
    """taken from them once for each time"""
    repetition_penalty: float = 1.0
    """what logits of tokens that prompt or answer have are divided by (if negative, multiplied)"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    """how many of the likeliest tokens are told; None: no probabilities at all"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to answer."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    """texts before which the answer ends"""
    stop_ids: frozenset[int] = frozenset()
    """tokens that end the answer, besides the model's own"""
    ignore_eos: bool = False
    """whether the model's own end tokens end nothing"""
    send: Callable[[Event], object]
    """called by the engine, in its thread"""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """set by the API when the client is gone"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of one sequence that a pass computes."""

    tokens: Sequence[int]
    start: int
    """tokens of the sequence before them, whose keys and values the cache has"""
    runs: Sequence[tuple[int, int]]
    """blocks of the sequence: (first, how many next to each other)"""
    wants_logits: bool
    """whether the last of them decides a next token"""

    @property
    def end(self) -> int:
        """Tokens of the sequence after the pass."""
        return self.start + len(self.tokens)


class Command(IntEnum):
    """What the first rank tells the others to do next."""

    STOP = 0
    WAIT = 1
    """nothing yet; keeps the connection alive"""
    RUN = 2


def encode(spans: Sequence[Span]) -> list[int]:
    """Spans as numbers; `decode` gives them back."""
    numbers = [len(spans)]
    for span in spans:
        numbers += [span.start, int(span.wants_logits), len(span.runs), len(span.tokens)]
        numbers += [number for run in span.runs for number in run]
        numbers += span.tokens
    return numbers


def decode(numbers: Sequence[int]) -> list[Span]:
    """Spans of numbers that `encode` has made."""
    spans, at = [], 1
    for _ in range(numbers[0]):
        start, wants, num_runs, num_tokens = numbers[at : at + 4]
        at += 4
        flat = numbers[at : at + 2 * num_runs]
        at += 2 * num_runs
        runs = list(zip(flat[::2], flat[1::2], strict=True))
        tokens = numbers[at : at + num_tokens]
        at += num_tokens
        spans.append(Span(tokens=tokens, start=start, runs=runs, wants_logits=bool(wants)))
    return spans
