"""The choices of one call on their way from the engine to the client, in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardwise.server.messages import Event, Token

_LOOK_S = 0.5
"""between two looks at whether the client is still there"""


class Gone(Exception):
    """The client has left."""


class Late(Exception):
    """The time of a request is over."""


class Failed(Exception):
    """The engine cannot go on."""


@dataclass
class _Choice:
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    last: Event = field(default_factory=Event)
    ended: bool = False


class Reply:
    """The events of all choices of a call, in the order in which they come."""

    def __init__(self, *, num_choices: int, timeout_s: float | None, cancel: Callable[[], object]):
        """Args:
        timeout_s: for the whole answer, from now on; None: as long as it takes.
        cancel: tells the engine that nobody waits any more.
        """
        self.choices = [_Choice() for _ in range(num_choices)]
        self.on_end: Callable[[Event], object] = lambda _: None
        """told of the last event of each choice"""
        self.on_token: Callable[[float, bool], object] = lambda *_: None
        """told of the seconds that a choice waited for a token, and whether it is its first"""
        self.cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._heard = [self._began] * num_choices

    def sender(self, choice: int) -> Callable[[Event], object]:
        """What the engine's thread calls with the events of a choice."""
        loop, put = self._loop, self._events.put_nowait

        def send(event: Event) -> None:
            with suppress(RuntimeError):  # at the end the loop may be gone before the engine is
                loop.call_soon_threadsafe(put, (choice, event))

        return send

    @property
    def seconds(self) -> float:
        """Since the call came."""
        return time.monotonic() - self._began

    async def events(
        self, is_gone: Callable[[], Any] | None = None
    ) -> AsyncIterator[tuple[int, Event]]:
        """All events until every choice has ended.

        Args:
            is_gone: an awaitable's maker that says whether the client has left.

        Raises:
            Gone, Late, Failed: and the engine is told to stop.
        """
        try:
            while not all(choice.ended for choice in self.choices):
                index, event = await self._next(is_gone)
                self._keep(self.choices[index], index, event)
                yield index, event
        finally:
            self.cancel()

    async def _next(self, is_gone: Callable[[], Any] | None) -> tuple[int, Event]:
        while True:
            left = _LOOK_S if self._timeout_s is None else self._timeout_s - self.seconds
            if left <= 0:
                raise Late
            try:
                found = await asyncio.wait_for(self._events.get(), min(left, _LOOK_S))
            except TimeoutError:
                if is_gone is not None and await is_gone():
                    raise Gone from None
                continue
            if found[1].finish == "error":
                raise Failed(found[1].error)
            return found

    def _keep(self, choice: _Choice, index: int, event: Event) -> None:
        now = time.monotonic()
        self.on_token(now - self._heard[index], event.num_tokens == 1)
        self._heard[index] = now
        choice.text += event.text
        choice.last = event
        if event.token is not None:
            choice.tokens.append(event.token)
        if event.finish is not None:
            choice.ended = True
            self.on_end(event)


class Format(ABC):
    """How one kind of call is answered."""

    whole_kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str, num_prompt: int, decode: Callable[[int], str]) -> None:
        """Args:
        num_prompt: tokens of all prompts.
        decode: a token's own text.
        """
        self._frame = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._num_prompt, self._decode = num_prompt, decode

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, if it has one of its own."""

    @abstractmethod
    def delta(self, index: int, event: Event) -> dict[str, Any]:
        """What an event adds to a choice."""

    @abstractmethod
    def choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        """A choice in one piece."""

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self.choice(i, choice) for i, choice in enumerate(reply.choices)]
        frame = {**self._frame, "object": self.whole_kind}
        return {**frame, "choices": choices, "usage": self.usage(reply)}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """A server-sent event."""
        return sse({**self._frame, "object": self.chunk_kind, "choices": choices, **more})

    def usage(self, reply: Reply) -> dict[str, Any]:
        """Tokens that were read and written."""
        written = sum(choice.last.num_tokens for choice in reply.choices)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": written,
            "total_tokens": self._num_prompt + written,
            "prompt_tokens_details": {
                "cached_tokens": max(choice.last.num_cached for choice in reply.choices)
            },
        }

    async def stream(self, reply: Reply, *, with_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events; an error is one, and the last."""
        for index in range(len(reply.choices)):
            first = self.opening(index)
            if first is not None:
                yield self.chunk([first])
        try:
            async for index, event in reply.events():
                if event.text or event.token is not None or event.finish is not None:
                    yield self.chunk([self.delta(index, event)])
        except Late:
            yield sse(error_body("the time of this request is over", "timeout"))
            return
        except Failed as error:
            yield sse(error_body(str(error), "server_error"))
            return
        if with_usage:
            yield self.chunk([], usage=self.usage(reply))
        yield "data: [DONE]\n\n"


class ChatFormat(Format):
    """`chat.completion`."""

    whole_kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, index: int) -> dict[str, Any]:
        return self._choice(index, delta={"role": "assistant", "content": ""})

    def delta(self, index: int, event: Event) -> dict[str, Any]:
        delta = {"content": event.text} if event.text or event.finish is None else {}
        tokens = [] if event.token is None else [event.token]
        return self._choice(index, delta=delta, tokens=tokens, finish=event.finish)

    def choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        return self._choice(index, message=message, tokens=choice.tokens, finish=choice.last.finish)

    def _choice(
        self, index: int, tokens: list[Token] | None = None, finish: str | None = None, **what: Any
    ) -> dict[str, Any]:
        logprobs = {"content": [self._told(token) for token in tokens]} if tokens else None
        return {"index": index, **what, "finish_reason": finish, "logprobs": logprobs}

    def _told(self, token: Token) -> dict[str, Any]:
        top = [self._one(*pair) for pair in token.top]
        return {**self._one(token.id, token.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextFormat(Format):
    """`text_completion`."""

    whole_kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, event: Event) -> dict[str, Any]:
        tokens = [] if event.token is None else [event.token]
        return self._choice(index, event.text, tokens, event.finish)

    def choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        return self._choice(index, choice.text, choice.tokens, choice.last.finish)

    def _choice(
        self, index: int, text: str, tokens: list[Token], finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if tokens:
            logprobs = {
                "tokens": [self._decode(token.id) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [
                    {self._decode(other): value for other, value in token.top} for token in tokens
                ],
                "text_offset": None,
            }
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}


def sse(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def error_body(message: str, kind: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
