"""JSON lines -> conversations, refusing bad lines by file, line number and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.errors import UserError

Message = dict[str, str]
_NOT_RENDERED = ("tools", "functions", "documents")
"""keys of a row that other trainers give to the chat template, and this one does not"""
ROLES = ("system", "user", "assistant")


def read_conversations(path: str | Path) -> list[list[Message]]:
    """Read a JSON-lines file of `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Blank lines and a byte-order mark are skipped.

    Raises:
        UserError: the file cannot be read, holds nothing, or a line is not such a conversation.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no data file at {str(path)!r}: expected a file of JSON lines.")
    rows = []
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    rows.append(_conversation(json.loads(line)))
            except UnicodeDecodeError:
                raise UserError(f"{file}, line {number}: not UTF-8 text.") from None
            except ValueError as error:
                raise UserError(f"{file}, line {number}: {error}.") from None
    if not rows:
        raise UserError(f"{file} holds no conversation.")
    return rows


def _conversation(value: Any) -> list[Message]:
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise ValueError('expected {"messages": [...]}')
    for key in _NOT_RENDERED:
        if value.get(key):
            raise ValueError(f"{key!r} would be left out of the rendered conversation; remove it")
    messages = [_message(message) for message in value["messages"]]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant message to train on")
    if next(m["role"] for m in messages if m["role"] != "system") == "assistant":
        raise ValueError("the first message after the system's must be the user's")
    return messages


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise ValueError('a message must have exactly "role" and "content"')
    role, content = value["role"], value["content"]
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"the content of a {role} message is {content!r}; expected some text")
    if any("\ud800" <= char <= "\udfff" for char in content):
        raise ValueError(f"the content of a {role} message holds half a surrogate pair")
    return {"role": role, "content": content}
