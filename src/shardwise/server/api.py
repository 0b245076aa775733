"""The OpenAI-compatible HTTP server of the first rank.

What is here works; a field that is not is refused with HTTP 400 by its name, never ignored.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send
from transformers import AutoTokenizer

from shardwise.config import Plan
from shardwise.models.hub import TOKENIZER_FILE, name_of
from shardwise.models.read import directory_with, read_facts
from shardwise.server.engine import Engine
from shardwise.server.messages import Event, Request

_DRAIN_S = 25
_MAX_STOPS = 4


class TextPart(BaseModel):
    """A piece of a turn's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """As a chat template reads it; templates know the developer as the system."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """Extras of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The part of OpenAI's chat request that this server answers."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # what changes nothing is taken, anything else is refused
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logprobs: Literal[False] | None = None
    user: str | None = Field(default=None, description="a label of the client's; not used")

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > _MAX_STOPS or not all(stops):
            raise ValueError(f"expected at most {_MAX_STOPS} texts, none of them empty")
        return stop

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _accept_zero(cls, value: Any) -> Any:
        return 0 if value == 0 and not isinstance(value, bool) else value

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, however they were written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def run_api(engine: Engine, plan: Plan, context: int) -> None:
    """Serve HTTP until SIGTERM or SIGINT; open answers are finished first."""
    files = directory_with(TOKENIZER_FILE, plan.model)
    tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True)
    limits = Limits(context=context, vocab_size=read_facts(plan.model).vocab_size)
    app = build_app(engine, tokenizer, name_of(plan.model), limits)
    config = uvicorn.Config(
        app,
        host=plan.serve.host,
        port=plan.serve.port,
        log_level="error",
        timeout_graceful_shutdown=_DRAIN_S,
    )
    server = uvicorn.Server(config)
    engine.on_failure = lambda: setattr(server, "should_exit", True)
    # uvicorn repeats a signal once it has shut down; the other ranks are still to be told
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the served model can take."""

    context: int
    """prompt and answer in tokens; a larger max_tokens is cut at it"""
    vocab_size: int


def build_app(engine: Engine, tokenizer: Any, model_name: str, limits: Limits) -> FastAPI:
    """The application around an engine, whose thread has a tokenizer of its own."""
    app = FastAPI(title="Shardwise", openapi_url="/openapi.json")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"] if part != "body"]
        where = "" if first["type"] == "json_invalid" else ".".join(names)
        return _error(400, f"{where}: {first['msg']}".removeprefix(": "))

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: HttpRequest, error: StarletteHTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.failure is not None:
            return _error(503, f"the engine has failed: {engine.failure}")
        return JSONResponse({"status": "ok"})

    entry = {"id": model_name, "object": "model", "created": 0, "owned_by": "shardwise"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        if name != model_name:
            raise HTTPException(404, f"model {name!r} is not served here, {model_name!r} is")
        return entry

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: HttpRequest) -> StreamingResponse | JSONResponse:
        if body.model != model_name:
            raise HTTPException(404, f"model {body.model!r} is not served here, {model_name!r} is")
        answer = _Answer(body, _prompt(tokenizer, body, limits), limits.context)
        if not engine.submit(answer.request):
            if engine.failure is not None:
                raise HTTPException(503, f"the engine has failed: {engine.failure}")
            raise HTTPException(429, "the queue is full", headers={"Retry-After": "5"})
        if body.stream:
            return _AnswerStream(answer)
        return await answer.whole(http)

    return app


def _prompt(tokenizer: Any, body: ChatRequest, limits: Limits) -> list[int]:
    messages = [message.plain() for message in body.messages]
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:
        raise HTTPException(400, f"the chat template refused the messages: {error}") from None
    ids = list(encoded["input_ids"])
    if max(ids, default=0) >= limits.vocab_size:
        raise HTTPException(
            400, f"a token of the prompt is outside of the model's {limits.vocab_size}"
        )
    return ids


class _Answer:
    """One request on its way: what the client asked, and what the engine sends."""

    def __init__(self, body: ChatRequest, prompt: list[int], context: int) -> None:
        room = context - len(prompt)
        if room < 1:
            raise HTTPException(
                400, f"the prompt has {len(prompt)} tokens, the context {context}; shorten it"
            )
        wanted = body.max_completion_tokens or body.max_tokens or room
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._body, self._num_prompt = body, len(prompt)
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.request = Request(
            prompt=prompt,
            max_tokens=min(wanted, room),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            stop=body.stops,
            send=lambda event: loop.call_soon_threadsafe(self._events.put_nowait, event),
        )

    async def whole(self, http: HttpRequest) -> JSONResponse:
        """The answer in one piece."""
        text, event = "", Event()
        try:
            while event.finish is None:
                try:
                    event = await asyncio.wait_for(self._events.get(), timeout=0.5)
                    text += event.text
                except TimeoutError:
                    if await http.is_disconnected():
                        return _error(499, "the client is gone")
        finally:
            self.request.cancelled.set()
        if event.finish == "error":
            return _error(500, f"the engine has failed: {event.error}")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": event.finish,
            "logprobs": None,
        }
        body = {**self._frame("chat.completion"), "choices": [choice], "usage": self._usage(event)}
        return JSONResponse(body)

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        yield self._chunk({"role": "assistant", "content": ""}, None)
        event = Event()
        while event.finish is None:
            event = await self._events.get()
            if event.finish == "error":
                yield _sse({"error": {"message": event.error, "type": "server_error"}})
                return
            if event.text:
                yield self._chunk({"content": event.text}, None)
        yield self._chunk({}, event.finish)
        if self._body.stream_options and self._body.stream_options.include_usage:
            frame = self._frame("chat.completion.chunk")
            yield _sse({**frame, "choices": [], "usage": self._usage(event)})
        yield "data: [DONE]\n\n"

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
        }

    def _chunk(self, delta: dict[str, str], finish: str | None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return _sse({**self._frame("chat.completion.chunk"), "choices": [choice]})

    def _usage(self, event: Event) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": event.num_tokens,
            "total_tokens": self._num_prompt + event.num_tokens,
        }


class _AnswerStream(StreamingResponse):
    """Tells the engine when the client is gone, even before the first event."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer.stream(), media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.request.cancelled.set()


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers=headers)
