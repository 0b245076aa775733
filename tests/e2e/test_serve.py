"""The server through its HTTP interface, as the openai client and a careless user see it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import long_last
from tests.e2e.shell import (
    assert_none_left,
    finish,
    running,
    shardwise,
    start,
    wait_for,
    workers,
)

pytestmark = pytest.mark.timeout(240)

CONTEXT = 200
READY_S = 60.0
LAYOUTS = {"LL-1": ("LL", []), "LL-tp2": ("LL", ["tp=2"]), "ODD-tp3": ("ODD", ["tp=3"])}
slow = pytest.mark.slow
EVERY = ["LL-1", pytest.param("LL-tp2", marks=slow), pytest.param("ODD-tp3", marks=slow)]
PROMPTS = ["Hello", "2 + 2 =", "Grüße, 你好 🙂", "x" * 90]


@dataclass
class Response:
    """What the server answered."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Server:
    """A running `shardwise serve`."""

    folder: Path
    model: Path
    port: int
    process: subprocess.Popen[str]

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, content: bytes | None = None, timeout: float = 60
    ) -> Response:
        """One request, on a connection of its own."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as line:
            line.request(method, path, content, {"content-type": "application/json"})
            response = line.getresponse()
            return Response(response.status, response.read().decode("utf-8"))

    def post(self, body: bytes | dict[str, Any]) -> Response:
        """POST a chat completion as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", "/v1/chat/completions", content)

    @contextmanager
    def long_stream(self) -> Iterator[None]:
        """A streamed answer of many tokens, of which the first has come; then it is hung up."""
        body = json.dumps(self.body(max_tokens=150, stream=True, temperature=1.0)).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as line:
            headers = {"content-type": "application/json"}
            line.request("POST", "/v1/chat/completions", body, headers)
            response = line.getresponse()
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            yield
            response.close()

    def body(self, prompt: str = "Hello", **changes: Any) -> dict[str, Any]:
        """A request that works, with changes."""
        messages = [{"role": "user", "content": prompt}]
        base = {"model": self.name, "messages": messages, "max_tokens": 12, "temperature": 0}
        return {**base, **changes}

    def answer(self, prompt: str = "Hello", **changes: Any) -> str:
        """The text of a request that must work."""
        response = self.post(self.body(prompt, **changes))
        assert response.status_code == 200, response.text
        content = response.json()["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content

    def client(self) -> Any:
        """The openai client for this server."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def start_server(
    folder: Path, model: Path, layout: list[str], *settings: str, **env: str
) -> Server:
    """Start a server on a free port."""
    port = _free_port()
    options = ["--layout", *layout] if layout else []
    for setting in settings or [f"serve.context={CONTEXT}"]:
        options += ["--set", setting]
    process = start(folder, "serve", model, *options, "--port", str(port), env=env)
    return Server(folder, model, port, process)


def wait_until_healthy(server: Server) -> None:
    """Until it can be asked; an error if it has ended."""

    def healthy() -> bool:
        if server.process.poll() is not None:
            raise AssertionError((server.folder / "stderr").read_text())
        with suppress(OSError, http.client.HTTPException):
            return server.request("GET", "/health", timeout=5).status_code == 200
        return False

    wait_for(healthy, READY_S, "a healthy server")


ServeOnce = Callable[[str], Server]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, ll: Path, odd: Path) -> Iterator[ServeOnce]:
    """The server of a layout, started when a test first asks for it."""
    models = {"LL": ll, "ODD": odd}
    with ExitStack() as stack:

        @cache
        def serve_once(name: str) -> Server:
            model, layout = LAYOUTS[name]
            server = start_server(tmp_path_factory.mktemp(name), models[model], layout)
            stack.enter_context(running(server.process, server.folder))
            wait_until_healthy(server)
            return server

        yield serve_once


@pytest.fixture
def own(tmp_path: Path, ll: Path) -> Iterator[Server]:
    """A server over two ranks that a test may end."""
    server = start_server(tmp_path, ll, ["tp=2"])
    with running(server.process, tmp_path):
        wait_until_healthy(server)
        yield server


@cache
def _reference(model: Path, prompt: str, max_tokens: int) -> tuple[str, int, int]:
    """What plain transformers answers greedily, with the tokens of prompt and answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        ids = plain.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)[0]
    num_prompt = inputs["input_ids"].shape[1]
    answer = ids[num_prompt:]
    return tokenizer.decode(answer, skip_special_tokens=True), num_prompt, len(answer)


@pytest.mark.parametrize("name", EVERY)
def test_the_model_is_listed(serve: ServeOnce, name: str) -> None:
    """models.list names the model's directory, and nothing else."""
    server = serve(name)
    assert [model.id for model in server.client().models.list()] == [server.name]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_answers_equal_plain_transformers(serve: ServeOnce, name: str, prompt: str) -> None:
    """Whole and streamed, the greedy text and its usage are those of generate()."""
    server = serve(name)
    client = server.client()
    request = server.body(prompt, max_tokens=24)
    text, num_prompt, num_answer = _reference(server.model, prompt, 24)
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, num_answer)
    assert whole.usage.total_tokens == num_prompt + num_answer
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_answer)
    assert usage.prompt_tokens_details.cached_tokens == (num_prompt - 1) // 16 * 16


def test_the_references_differ(ll: Path) -> None:
    """The tiny model does not answer everything alike, or these tests would prove little."""
    texts = {_reference(ll, prompt, 24)[0] for prompt in PROMPTS}
    assert len(texts) == len(PROMPTS)
    assert all(len(set(text)) > 3 for text in texts)


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("number", [1, 5])
def test_max_tokens(serve: ServeOnce, key: str, number: int) -> None:
    """The answer has as many tokens as were asked for, and its end is of length."""
    server = serve("LL-1")
    body = server.body()
    del body["max_tokens"]
    answer = server.post({**body, key: number}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == number


@pytest.mark.parametrize("max_tokens", [None, pytest.param(10 * CONTEXT, marks=pytest.mark.slow)])
def test_an_answer_ends_at_the_context(serve: ServeOnce, max_tokens: int | None) -> None:
    """Prompt and answer together do not exceed serve.context, and the end is then of length."""
    server = serve("LL-1")
    reasons = set()
    for seed in range(6):
        body = server.body("z" * 100, temperature=2, seed=seed, max_tokens=max_tokens)
        if max_tokens is None:
            del body["max_tokens"]
        answer = server.post(body).json()
        reason = answer["choices"][0]["finish_reason"]
        reasons.add(reason)
        total = answer["usage"]["total_tokens"]
        assert total == CONTEXT if reason == "length" else total <= CONTEXT
    assert "length" in reasons, "no answer came to the end of the context"


def test_seed(serve: ServeOnce) -> None:
    """The same seed samples the same text, another seed another one."""
    server = serve("LL-1")
    sampled = {server.answer(temperature=1.5, seed=seed, max_tokens=24) for seed in (1, 1, 1)}
    assert len(sampled) == 1
    others = {server.answer(temperature=1.5, seed=seed, max_tokens=24) for seed in (2, 3, 4)}
    assert len(others | sampled) > 1


def malformed(server: Server) -> dict[str, bytes | dict[str, Any]]:
    """Requests of which each must be refused."""
    body = server.body
    user = {"role": "user", "content": "a"}
    return {
        "negative temperature": body(temperature=-1),
        "temperature NaN": json.dumps(body(temperature=float("nan"))).encode(),
        "temperature Infinity": json.dumps(body(temperature=float("inf"))).encode(),
        "temperature text": body(temperature="hot"),
        "temperature 1e400": json.dumps(body()).replace('ture": 0', 'ture": 1e400').encode(),
        "top_p 0": body(top_p=0),
        "top_p 2": body(top_p=2),
        "top_p NaN": json.dumps(body(top_p=float("nan"))).encode(),
        "max_tokens 0": body(max_tokens=0),
        "max_tokens -1": body(max_tokens=-1),
        "max_tokens 1.5": body(max_tokens=1.5),
        "n 0": body(n=0),
        "n a million": body(n=10**6),
        "n true": body(n=True),
        "seed huge": body(temperature=1, seed=2**80),
        "no messages": body(messages=[]),
        "messages null": body(messages=None),
        "messages text": body(messages="hi"),
        "missing role": body(messages=[{"content": "a"}]),
        "wrong role": body(messages=[{"role": "robot", "content": "a"}]),
        "missing content": body(messages=[{"role": "user"}]),
        "content null": body(messages=[{"role": "user", "content": None}]),
        "content number": body(messages=[{"role": "user", "content": 7}]),
        "content image": body(
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        ),
        "message text": body(messages=["hi"]),
        "lone surrogate": json.dumps(body("\ud800")).encode(),
        "truncated": json.dumps(body()).encode()[:-5],
        "empty": b"",
        "list": b"[]",
        "number": b"7",
        "latin-1": json.dumps(body("é"), ensure_ascii=False).encode("latin-1"),
        "deep": b'{"messages": ' + b"[" * 100_000,
        "unknown field": body(temprature=0),
        "unknown field in a message": body(messages=[{**user, "colour": "red"}]),
        "wrong model": body(model="gpt-4"),
        "no model": {k: v for k, v in body().items() if k != "model"},
        "prompt too long": body("y" * CONTEXT),
        "stop number": body(stop=5),
        "stream text": body(stream="sometimes"),
        "streamed prompt too long": body("y" * CONTEXT, stream=True),
        "tools": body(tools=[{"type": "function", "function": {"name": "f"}}]),
        "logprobs number": body(logprobs=3),
        "top_logprobs alone": body(top_logprobs=3),
        "top_logprobs 21": body(logprobs=True, top_logprobs=21),
        "logit_bias of a word": body(logit_bias={"AI": -100}),
        "logit_bias outside": body(logit_bias={"100000": 1}),
        "logit_bias too large": body(logit_bias={"5": 101}),
        "logit_bias NaN": json.dumps(body(logit_bias={"5": float("nan")})).encode(),
        "presence_penalty 3": body(presence_penalty=3),
        "top_k -2": body(top_k=-2),
        "min_p 2": body(min_p=2),
        "repetition_penalty 0": body(repetition_penalty=0),
        "five stops": body(stop=list("abcde")),
        "empty stop": body(stop=""),
        "stop token outside": body(stop_token_ids=[-1]),
        "response_format": body(response_format={"type": "json_object"}),
        "20 MB": body("x" * 20_000_000),
    }


MALFORMED = list(malformed(Server(Path(), Path("LL"), 0, None)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_request(serve: ServeOnce, kind: str) -> None:
    """It is refused with a JSON error, and the next good one gets the same tokens as before."""
    server = serve("LL-1")
    good = server.answer()
    response = server.post(malformed(server)[kind])
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert server.answer() == good == _reference(server.model, "Hello", 12)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LL-tp2", "ODD-tp3"])
def test_malformed_requests_of_every_kind_over_ranks(serve: ServeOnce, name: str) -> None:
    """None of them puts the ranks of a sharded server out of step."""
    server = serve(name)
    good = _reference(server.model, "Hello", 12)[0]
    for kind, body in malformed(server).items():
        response = server.post(body)
        assert 400 <= response.status_code < 500, f"{kind}: {response.text}"
        assert isinstance(response.json(), dict), kind
        assert server.answer() == good, kind


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/none", 404),
    ],
)
def test_a_path_that_is_not_served(serve: ServeOnce, method: str, path: str, code: int) -> None:
    """It is refused with a JSON error in the interface's form."""
    response = serve("LL-1").request(method, path)
    assert response.status_code == code
    assert response.json()["error"]["message"]


def test_requests_at_once(serve: ServeOnce) -> None:
    """Eight at a time, each gets its own answer."""
    from concurrent.futures import ThreadPoolExecutor

    server = serve("LL-1")
    alone = {prompt: server.answer(prompt) for prompt in PROMPTS}
    prompts = PROMPTS * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.answer, prompts))
    assert answers == [alone[prompt] for prompt in prompts]


@pytest.mark.parametrize("name", EVERY)
def test_a_client_that_hangs_up(serve: ServeOnce, name: str) -> None:
    """The next request is answered as if nothing had been, and soon."""
    server = serve(name)
    good = server.answer()
    for _ in range(3):
        with server.long_stream():
            pass
        began = time.monotonic()
        assert server.answer() == good
        assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_port_that_is_taken_by_a_server(serve: ServeOnce, tmp_path: Path, ll: Path) -> None:
    """A second server on the port ends in seconds and names it; the first one goes on."""
    server = serve("LL-1")
    done = shardwise(tmp_path, "serve", ll, "--port", str(server.port), limit=15)
    assert done.code == 2, done.text
    (line,) = done.err.splitlines()
    assert str(server.port) in line
    assert server.answer() == _reference(server.model, "Hello", 12)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("state", long_last(["busy", "idle"], 1))
def test_a_server_that_is_asked_to_end(own: Server, name: str, state: str) -> None:
    """It ends with exit code 0, without a word of error, frees the port and leaves nothing."""
    with ExitStack() as stack:
        if state == "busy":
            stack.enter_context(own.long_stream())
        own.process.send_signal(getattr(signal, name))
        done = finish(own.process, own.folder, 40, time.monotonic())
    assert done.code == 0, done.text
    assert "Traceback" not in done.err, done.text
    assert done.seconds < 20
    assert_none_left(own.folder)
    assert _is_free(own.port)
    assert list((own.folder / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_of_an_idle_server_is_killed(own: Server, rank: int) -> None:
    """The server does not sit there half dead: it ends within 15 s and names the rank."""
    own.answer()
    os.kill(workers(own.folder)[rank], signal.SIGKILL)
    done = finish(own.process, own.folder, 15, time.monotonic())
    assert done.code != 0, done.text
    assert f"rank {rank}" in done.err.splitlines()[-1], done.text
    assert "SIGKILL" in done.err.splitlines()[-1], done.text
    assert_none_left(own.folder)
    assert _is_free(own.port)


@pytest.mark.slow
def test_a_server_that_is_killed(own: Server) -> None:
    """Its ranks end within ten seconds and the port is free."""
    own.answer()
    assert sorted(workers(own.folder)) == [0, 1]
    own.process.kill()
    own.process.wait()
    assert_none_left(own.folder, 10)
    wait_for(lambda: _is_free(own.port), 2, "a free port")
