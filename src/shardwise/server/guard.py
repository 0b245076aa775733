"""What a call must have before anybody reads it: a key, and not too many bytes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.server.reply import error_body

_OPEN = ("/", "/health", "/ready", "/metrics")
"""paths that need no key: what a cluster asks by itself, and the page that asks for the key"""


_DROPPED = 16
"""times as much is still read and dropped: who is cut off while sending sees no answer"""


class _TooLarge(Exception):
    """More bytes came than are read."""


class Guard:
    """Around the application: answers 401 and 413 itself."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], max_bytes: int) -> None:
        """Args:
        keys: of which a call needs one (`Authorization: Bearer KEY`); none: no call needs any.
        max_bytes: of the body of a call.
        """
        self._app, self._keys, self._max_bytes = app, [key.encode() for key in keys], max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and scope["path"] not in _OPEN and not self._has_key(headers):
            answer = JSONResponse(
                error_body("no valid API key", "invalid_request_error"),
                401,
                {"WWW-Authenticate": "Bearer"},
            )
            await answer(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        too_large = JSONResponse(
            error_body(f"the body is larger than {self._max_bytes} bytes", "invalid_request_error"),
            413,
            {"Connection": "close"},
        )
        if length.isdigit() and int(length) > self._max_bytes:
            await _drop(receive, _DROPPED * self._max_bytes)
            await too_large(scope, receive, send)
            return
        read, begun = 0, False

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:  # sent in pieces, with no length told
                raise _TooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLarge:
            if not begun:
                await _drop(receive, _DROPPED * self._max_bytes)
                await too_large(scope, receive, send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = [secrets.compare_digest(given.strip(), key) for key in self._keys]
        return kind.lower() == b"bearer" and any(found)


async def _drop(receive: Receive, num_bytes: int) -> None:
    while num_bytes > 0:
        message = await receive()
        num_bytes -= len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return
