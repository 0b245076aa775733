"""The OpenAI-compatible HTTP server of the first rank.

What is here works; a field that is not is refused with HTTP 400 by its name, never ignored.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from shardwise.config import Plan
from shardwise.server.engine import Engine
from shardwise.server.messages import Event, Request

_DRAIN_S = 25


class ChatMessage(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "user", "assistant"]
    content: str


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
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str | None = None


def run_api(engine: Engine, plan: Plan, context: int) -> None:
    """Serve HTTP until SIGTERM or SIGINT; open answers are finished first."""
    app = build_app(engine, model_name=plan.model.rstrip("/").rsplit("/", 1)[-1], context=context)
    config = uvicorn.Config(
        app,
        host=plan.serve.host,
        port=plan.serve.port,
        log_level="error",
        timeout_graceful_shutdown=_DRAIN_S,
    )
    server = uvicorn.Server(config)
    app.state.stop = lambda: setattr(server, "should_exit", True)
    server.run()


def build_app(engine: Engine, *, model_name: str, context: int) -> FastAPI:
    """The application around an engine; `context` is prompt + answer in tokens."""
    app = FastAPI(title="Shardwise", openapi_url="/openapi.json")
    app.state.stop = lambda: None

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(400, f"{where}: {first['msg']}".removeprefix(": "))

    @app.exception_handler(HTTPException)
    async def refused(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.failure is not None:
            return _error(503, f"the engine has failed: {engine.failure}")
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model_name, "object": "model", "created": 0, "owned_by": "shardwise"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: HttpRequest) -> StreamingResponse | JSONResponse:
        if body.model != model_name:
            raise HTTPException(404, f"model {body.model!r} is not served here, {model_name!r} is")
        answer = _Answer(body, _prompt(engine, body), context)
        if not engine.submit(answer.request):
            if engine.failure is not None:
                raise HTTPException(503, f"the engine has failed: {engine.failure}")
            raise HTTPException(429, "the queue is full", headers={"Retry-After": "5"})
        if body.stream:
            return StreamingResponse(answer.stream(app), media_type="text/event-stream")
        return await answer.whole(app, http)

    return app


def _prompt(engine: Engine, body: ChatRequest) -> list[int]:
    messages = [message.model_dump() for message in body.messages]
    try:
        encoded = engine.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:
        raise HTTPException(400, f"the chat template refused the messages: {error}") from None
    return list(encoded["input_ids"])


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
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            send=lambda event: loop.call_soon_threadsafe(self._events.put_nowait, event),
        )

    async def whole(self, app: FastAPI, http: HttpRequest) -> JSONResponse:
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
            app.state.stop()
            return _error(500, f"the engine has failed: {event.error}")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": event.finish,
            "logprobs": None,
        }
        body = {**self._frame("chat.completion"), "choices": [choice], "usage": self._usage(event)}
        return JSONResponse(body)

    async def stream(self, app: FastAPI) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            yield self._chunk({"role": "assistant", "content": ""}, None)
            event = Event()
            while event.finish is None:
                event = await self._events.get()
                if event.finish == "error":
                    app.state.stop()
                    yield _sse({"error": {"message": event.error, "type": "server_error"}})
                    return
                if event.text or event.finish:
                    yield self._chunk({"content": event.text} if event.text else {}, event.finish)
            if self._body.stream_options and self._body.stream_options.include_usage:
                frame = self._frame("chat.completion.chunk")
                yield _sse({**frame, "choices": [], "usage": self._usage(event)})
            yield "data: [DONE]\n\n"
        finally:
            self.request.cancelled.set()

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


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers=headers)
