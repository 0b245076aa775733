"""Token ids -> text as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Gives out text only once its characters are whole (one may take several tokens).

    Each token is decoded together with the few before it, because a tokenizer may write a token
    differently at the beginning of a text; never with all of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        """first token that is decoded again"""
        self._sent = 0
        """tokens whose text has been given out"""

    def add(self, token: int) -> str:
        """The new text that a token completes; may be empty."""
        self._ids.append(token)
        text = self._pending()
        return "" if text.endswith(_INCOMPLETE) else self._give(text)

    def flush(self) -> str:
        """What is left, whole or not."""
        return self._give(self._pending())

    def _pending(self) -> str:
        known = self._decode(self._ids[self._context : self._sent])
        return self._decode(self._ids[self._context :])[len(known) :]

    def _give(self, text: str) -> str:
        if self._sent < len(self._ids):
            self._context, self._sent = self._sent, len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class StopText:
    """Ends a text before the first of some stop strings, which may come in several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        """what may turn out to be the beginning of a stop string"""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that can be given out now, and whether a stop string was met."""
        self._held += text
        found = [i for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out, False

    def flush(self) -> str:
        """What was held back, when the text ends otherwise."""
        return self._held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((n for n in sizes if self._held.endswith(stop[:n])), 0)
