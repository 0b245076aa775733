"""Conversation -> token ids, and which of them are trained: the assistant's words and their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError
from shardwise.trainer.data.read import Message


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row. `trained[i]` says whether token i is a target of the loss."""

    ids: list[int]
    trained: list[bool]

    @property
    def num_trained(self) -> int:
        """Targets; the first token has no predecessor and is never one."""
        return sum(self.trained[1:])


def encode(messages: Sequence[Message], tokenizer: Any) -> Example:
    """Render a conversation by the tokenizer's chat template and mark the assistant's spans.

    The spans are found by rendering every prefix of the conversation, so that a template without
    generation marks trains on the right tokens too. What the template writes before the answer is
    not trained; the end-of-turn token is.

    Raises:
        UserError: there is no chat template, or it rewrites earlier turns when later ones come.
    """
    text = _render(tokenizer, messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(tokenizer, messages[:i], add_generation_prompt=True)
            through = _render(tokenizer, messages[: i + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise UserError(
                    "the tokenizer's chat template renders a conversation's beginning differently "
                    f"once turn {i + 1} follows, so the assistant's tokens cannot be told apart; "
                    "use a template that only appends."
                )
            spans.append((len(before), len(through.rstrip())))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = [
        any(start < end and start >= a and end <= b for a, b in spans)
        for start, end in tokens["offset_mapping"]
    ]
    return Example(ids=list(tokens["input_ids"]), trained=trained)


def cut(example: Example, seq_len: int) -> Example:
    """The first `seq_len` tokens of an example."""
    return Example(ids=example.ids[:seq_len], trained=example.trained[:seq_len])


def _render(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:
        raise UserError(f"the tokenizer's chat template failed: {error}") from None
    return str(text)
