"""Token ids -> text as it grows."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Gives out text only once its characters are whole (one may take several tokens)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = 0

    def add(self, token: int) -> str:
        """The new text that a token completes; may be empty."""
        self._ids.append(token)
        text = self._text()
        return "" if text.endswith(_INCOMPLETE) else self._new(text)

    def flush(self) -> str:
        """What is left, whole or not."""
        return self._new(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _new(self, text: str) -> str:
        new = text[self._sent :]
        self._sent = len(text)
        return new
