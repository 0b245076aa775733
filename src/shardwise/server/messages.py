"""The small typed messages of the server: API to engine and back, first rank to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One piece of an answer. The last one has a finish reason."""

    text: str = ""
    num_tokens: int = 0
    """tokens generated so far"""
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to answer."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...] = ()
    """texts before which the answer ends"""
    send: Callable[[Event], object]
    """called by the engine's thread"""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """set by the API when the client is gone"""


class Command(IntEnum):
    """What the first rank tells the others to do next."""

    STOP = 0
    WAIT = 1
    """nothing yet; keeps the connection alive"""
    GENERATE = 2


END_OF_ANSWER = -1
"""sent in place of a token"""
