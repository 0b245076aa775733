"""The OpenAI-compatible HTTP server of the first rank.

What is here works; a field that is not is refused with HTTP 400 by its name, never ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send
from transformers import AutoTokenizer

from shardwise.config import Plan, Serve
from shardwise.errors import RunFailed
from shardwise.models.hub import TOKENIZER_FILE, name_of
from shardwise.models.read import directory_with, read_facts
from shardwise.server.engine import Engine
from shardwise.server.guard import Guard
from shardwise.server.messages import Request
from shardwise.server.metrics import Metrics
from shardwise.server.reply import ChatFormat, Failed, Format, Gone, Late, Reply, TextFormat
from shardwise.server.reply import error_body as body_of_error
from shardwise.server.schema import ChatMessage, ChatRequest, CompletionRequest, TokenizeRequest
from shardwise.signals import handling

API_KEYS = "SHARDWISE_API_KEY"
"""environment variable: keys of which calls need one, with commas between them"""
_DRAIN_S = 25
_PAGE = Path(__file__).with_name("chat.html")
_MIB = 2**20


@contextmanager
def api_of(engine: Engine, plan: Plan, context: int) -> Iterator[None]:
    """Serve HTTP in a thread of its own while the block runs the engine.

    SIGTERM and SIGINT end it: open answers are finished first, then the engine is closed. A second
    one does not wait for them.
    """
    files = directory_with(TOKENIZER_FILE, plan.model)
    tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True)
    limits = Limits(context=context, vocab_size=read_facts(plan.model).vocab_size)
    keys = [key for key in os.environ.get(API_KEYS, "").split(",") if key]
    config = uvicorn.Config(
        build_app(engine, tokenizer, name_of(plan.model), limits, plan.serve, keys),
        host=plan.serve.host,
        port=plan.serve.port,
        log_level="error",
        timeout_graceful_shutdown=_DRAIN_S,
    )
    server = uvicorn.Server(config)

    def end(*_: object) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    def run() -> None:
        try:
            server.run()
        finally:
            engine.close()

    engine.on_failure = end
    thread = threading.Thread(target=run, name="api")
    with handling({signal.SIGTERM: end, signal.SIGINT: end}):
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()
    if not server.started:
        raise RunFailed(f"the server could not listen on {plan.serve.host}:{plan.serve.port}.")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the served model can take."""

    context: int
    """prompt and answer in tokens; a larger max_tokens is cut at it"""
    vocab_size: int


def build_app(
    engine: Engine,
    tokenizer: Any,
    model_name: str,
    limits: Limits,
    serve: Serve,
    keys: Sequence[str] = (),
) -> FastAPI:
    """The application around an engine, which has a tokenizer of its own."""
    app = FastAPI(title="Shardwise", openapi_url="/openapi.json")
    app.add_middleware(Guard, keys=keys, max_bytes=int(serve.max_body_mib * _MIB))
    metrics = Metrics(engine)
    desk = _Desk(engine, tokenizer, limits, serve, metrics)
    _add_errors(app)
    _add_state(app, engine, metrics)

    def check_name(name: str | None) -> None:
        if name not in (None, model_name):
            raise HTTPException(404, f"model {name!r} is not served here, {model_name!r} is")

    entry = {
        "id": model_name,
        "object": "model",
        "created": 0,
        "owned_by": "shardwise",
        "max_model_len": limits.context,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_name(name)
        return entry

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        check_name(body.model)
        prompts = [desk.of_messages(body.messages)]
        return await desk.answer(body, prompts, ChatFormat, http)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        check_name(body.model)
        prompts = [desk.of_prompt(prompt) for prompt in body.prompts]
        return await desk.answer(body, prompts, TextFormat, http)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "give either prompt or messages")
        if body.messages is not None:
            ids = desk.of_messages(body.messages)
        else:
            ids = desk.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": limits.context}

    return app


class _Desk:
    """Takes calls: prompts to tokens, one request to the engine for each choice, and the reply."""

    def __init__(
        self, engine: Engine, tokenizer: Any, limits: Limits, serve: Serve, metrics: Metrics
    ) -> None:
        self._engine, self._tokenizer, self._limits = engine, tokenizer, limits
        self._serve, self._metrics = serve, metrics

    def of_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens of a conversation, up to where the next turn begins."""
        try:
            encoded = self._tokenizer.apply_chat_template(
                [message.plain() for message in messages],
                add_generation_prompt=True,
                return_dict=True,
            )
        except Exception as error:
            raise HTTPException(400, f"the chat template refused the messages: {error}") from None
        return self._checked(list(encoded["input_ids"]))

    def of_prompt(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a text, or the tokens themselves."""
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise HTTPException(400, "prompt: it has no tokens")
        return self._checked(ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _checked(self, ids: list[int]) -> list[int]:
        vocab = self._limits.vocab_size
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocab:
            raise HTTPException(400, f"a token of the prompt is outside of the model's {vocab}")
        context = self._limits.context
        if len(ids) >= context:
            raise HTTPException(
                400, f"the prompt has {len(ids)} tokens, the context {context}; shorten it"
            )
        return ids

    async def answer(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        kind: type[Format],
        http: HttpRequest,
    ) -> Response:
        """Ask the engine, and tell the client."""
        reply = self._submit(body, prompts)
        num_prompt = sum(map(len, prompts))
        form = kind(body.model, num_prompt, lambda token: str(self._tokenizer.decode([token])))
        self._metrics.watch(reply)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return _AnswerStream(reply, form, with_usage=with_usage)
        try:
            async for _ in reply.events(http.is_disconnected):
                pass
        except Gone:
            return _error(499, "the client is gone")
        except Late:
            return _error(504, f"no whole answer within {self._serve.request_timeout_s:g} s")
        except Failed as error:
            return _error(500, f"the engine has failed: {error}")
        return JSONResponse(form.whole(reply))

    def _submit(self, body: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> Reply:
        number = body.n or 1
        if not prompts or number * len(prompts) > self._serve.max_queue:
            raise HTTPException(
                400,
                f"{number * len(prompts)} answers in one call; the queue takes 1 to "
                f"{self._serve.max_queue}",
            )
        vocab = self._limits.vocab_size
        outside = [i for i in (*body.biases, *(body.stop_token_ids or ())) if not 0 <= i < vocab]
        if outside:
            raise HTTPException(400, f"token {outside[0]} is outside of the model's {vocab}")
        requests: list[Request] = []
        reply = Reply(
            num_choices=number * len(prompts),
            timeout_s=self._serve.request_timeout_s,
            cancel=lambda: _cancel(requests),
        )
        for prompt in prompts:
            room = self._limits.context - len(prompt)
            for choice in range(number):
                requests.append(
                    Request(
                        prompt=prompt,
                        max_tokens=min(body.most_tokens or room, room),
                        sampling=body.sampling(choice),
                        stop=body.stops,
                        stop_ids=frozenset(body.stop_token_ids or ()),
                        ignore_eos=body.ignore_eos,
                        send=reply.sender(len(requests)),
                    )
                )
        for request in requests:
            if not self._engine.submit(request):
                reply.cancel()
                if self._engine.failure is not None:
                    raise HTTPException(503, f"the engine has failed: {self._engine.failure}")
                raise HTTPException(429, "the queue is full", headers={"Retry-After": "5"})
        return reply


def _cancel(requests: Sequence[Request]) -> None:
    for request in requests:
        request.cancelled.set()


class _AnswerStream(StreamingResponse):
    """Tells the engine when the client is gone, even before the first event."""

    def __init__(self, reply: Reply, form: Format, *, with_usage: bool) -> None:
        super().__init__(form.stream(reply, with_usage=with_usage), media_type="text/event-stream")
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()


def _add_state(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    """What a cluster, a dashboard and a person with a browser ask."""

    @app.get("/health")
    @app.get("/ready")
    async def health() -> JSONResponse:
        if engine.failure is not None:
            return _error(503, f"the engine has failed: {engine.failure}")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE, media_type="text/html")


def _add_errors(app: FastAPI) -> None:
    """Every error as OpenAI's clients read it."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"] if part != "body"]
        where = "" if first["type"] == "json_invalid" else ".".join(names)
        return _error(400, f"{where}: {first['msg']}".removeprefix(": "))

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: HttpRequest, error: StarletteHTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(body_of_error(message, kind), status_code=status, headers=headers)
