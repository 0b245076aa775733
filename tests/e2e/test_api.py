"""The rest of the HTTP interface, as the openai client and a cluster see it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from tests.e2e.shell import running, shardwise
from tests.e2e.test_serve import (
    ServeOnce,
    Server,
    serve,  # noqa: F401
    start_server,
    wait_until_healthy,
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def server(serve: ServeOnce) -> Server:  # noqa: F811
    return serve("LL-1")


def metric(server: Server, name: str) -> float:
    """A value of /metrics."""
    text = server.request("GET", "/metrics").text
    (value,) = re.findall(rf"^shardwise:{name} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_choices_of_one_call(server: Server) -> None:
    """Each has a seed of its own after the one that is given, and is what that seed gives alone."""
    call = {"temperature": 1.5, "max_tokens": 10}
    messages = [{"role": "user", "content": "Hello"}]
    client = server.client()
    several = client.chat.completions.create(
        model=server.name, messages=messages, n=3, seed=5, **call
    )
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts == [server.answer(seed=seed, **call) for seed in (5, 6, 7)]
    assert len(set(texts)) == 3
    stream = client.chat.completions.create(
        model=server.name, messages=messages, n=3, seed=5, stream=True, **call
    )
    pieces = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts
    assert several.usage.completion_tokens <= 30


def test_a_seed_gives_the_same_among_others(server: Server) -> None:
    """Whoever else is answered at the time."""
    call = {"temperature": 1.5, "seed": 11, "max_tokens": 24}
    alone = server.answer(**call)
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(server.answer, "x" * n, temperature=2.0) for n in range(1, 70, 10)]
        assert server.answer(**call) == alone
        for future in noise:
            future.result()


def test_probabilities_of_a_chat(server: Server) -> None:
    """Those of plain transformers, whole and streamed; greedy takes the likeliest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    call: dict[str, Any] = server.body(logprobs=True, top_logprobs=3, max_tokens=8)
    client = server.client()
    whole = client.chat.completions.create(**call).choices[0].logprobs.content
    assert len(whole) == 8
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    plain = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        call["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = plain.generate(**inputs, do_sample=False, max_new_tokens=8)
        logits = plain(ids).logits[0].log_softmax(-1)
    start = inputs["input_ids"].shape[1]
    for place, told in enumerate(whole, start):
        values, _ = logits[place - 1].topk(3)
        assert told.logprob == pytest.approx(float(logits[place - 1, ids[0, place]]), abs=1e-4)
        assert [t.logprob for t in told.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert told.top_logprobs[0].logprob == told.logprob
        assert bytes(told.bytes).decode() == told.token
    streamed = [
        token.logprob
        for chunk in client.chat.completions.create(**call, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert streamed == pytest.approx([token.logprob for token in whole], abs=1e-4)


def test_completions_of_texts_and_of_tokens(server: Server) -> None:
    """A text, its tokens, and several at once: the same answers in the order of the prompts."""
    client = server.client()

    def complete(prompt: Any, **more: Any) -> Any:
        return client.completions.create(
            model=server.name, prompt=prompt, max_tokens=9, temperature=0, **more
        )

    one = complete("Once upon").choices[0].text
    other = complete("2 + 2").choices[0].text
    assert one != other
    ids = json.loads(
        server.request("POST", "/tokenize", json.dumps({"prompt": "Once upon"}).encode()).text
    )
    assert ids["count"] == len(ids["tokens"]) > 0
    assert complete(ids["tokens"]).choices[0].text == one
    several = complete(["Once upon", "2 + 2"], n=2)
    assert [choice.text for choice in several.choices] == [one, one, other, other]
    assert complete([ids["tokens"]]).choices[0].text == one
    told = complete("Once upon", logprobs=2).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 9
    assert "".join(chunk.choices[0].text for chunk in complete("Once upon", stream=True)) == one


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": [10**6]},
        {"prompt": [1, "a"]},
        {"prompt": [1.5]},
        {"prompt": None},
        {"prompt": "a" * 300},
        {"prompt": ["a"] * 40},
        {"echo": True},
        {"suffix": "b"},
        {"best_of": 2},
        {"logprobs": 21},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_a_malformed_completion(server: Server, changes: dict[str, Any]) -> None:
    """It is refused with a JSON error that says why."""
    body = {"model": server.name, "prompt": "a", "max_tokens": 3, **changes}
    response = server.request("POST", "/v1/completions", json.dumps(body).encode())
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_stop_tokens(server: Server) -> None:
    """The token ends the answer and is not a part of it; end tokens can be ignored."""
    ids = server.post(server.body(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    body = json.dumps({"prompt": ids[3]["token"], "add_special_tokens": False}).encode()
    (stop,) = server.request("POST", "/tokenize", body).json()["tokens"]
    ended = server.post(server.body(stop_token_ids=[stop])).json()["choices"][0]
    assert ended["finish_reason"] == "stop"
    first = next(i for i, one in enumerate(ids) if one["token"] == ids[3]["token"])
    assert ended["message"]["content"] == "".join(one["token"] for one in ids[:first])
    long = server.post(server.body(temperature=2.0, seed=1, ignore_eos=True, max_tokens=90)).json()
    assert long["usage"]["completion_tokens"] == 90


def test_a_client_that_leaves_frees_its_room(server: Server) -> None:
    """Streamed or not, within two seconds (bug bank 59)."""
    for stream in (True, False):
        body = server.body(max_tokens=190, stream=stream, temperature=1.0, ignore_eos=True, n=8)
        line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        line.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        time.sleep(0.2)
        line.close()
        deadline = time.monotonic() + 2
        while metric(server, "num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(server, "num_requests_running") == 0
        assert metric(server, "num_requests_waiting") == 0
        assert metric(server, "kv_cache_usage_perc") == 0


def test_metrics(server: Server) -> None:
    """They count what was done."""
    before = {
        name: metric(server, name)
        for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total")
    }
    usage = server.post(server.body("Metrics, a prompt of its own")).json()["usage"]
    again = server.post(server.body("Metrics, a prompt of its own")).json()["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    after = {name: metric(server, name) for name in before}
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == (
        usage["prompt_tokens"] + again["prompt_tokens"]
    )
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == (
        usage["completion_tokens"] + again["completion_tokens"]
    )
    hits = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    assert hits == cached + usage["prompt_tokens_details"]["cached_tokens"]
    assert metric(server, "time_to_first_token_seconds_count") >= 2
    assert metric(server, "num_requests_running") == 0


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    response = server.request("GET", "/")
    assert response.status_code == 200
    assert "<title>Shardwise chat</title>" in response.text
    assert "http" not in response.text.replace("http-equiv", "")


def test_ready(server: Server) -> None:
    assert server.request("GET", "/ready").json() == {"status": "ok"}


def test_room_is_told_at_start(server: Server) -> None:
    text = (server.folder / "stdout").read_text()
    assert "keys and values: room for 6,656 tokens" in text  # 13 blocks each
    assert "32 requests of 200 tokens at a time" in text


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, ll: Path) -> Iterator[Server]:
    """A server with little room and little patience, that wants a key."""
    folder = tmp_path_factory.mktemp("small")
    settings = [
        "serve.kv_tokens=128",
        "serve.max_running=2",
        "serve.max_queue=2",
        "serve.max_body_mib=0.01",
    ]
    server = start_server(folder, ll, [], *settings, SHARDWISE_API_KEY="first,second")
    with running(server.process, folder):
        wait_until_healthy(server)
        yield server


def keyed(server: Server, body: dict[str, Any], key: str = "Bearer second") -> Any:
    """The status, headers and JSON of a chat call with a key."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as line:
        headers = {"content-type": "application/json", "authorization": key}
        line.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        response = line.getresponse()
        return response.status, response.headers, json.loads(response.read())


def test_a_key(small: Server) -> None:
    """Calls need one of the keys; what a cluster asks by itself does not."""
    assert keyed(small, small.body())[0] == 200
    assert keyed(small, small.body(), "bearer first")[0] == 200
    for wrong in (
        "Bearer third",
        "Bearer ",
        "Bearer firs",
        "Basic first",
        "",
        "Bearer first,second",
    ):
        status, _, body = keyed(small, small.body(), wrong)
        assert status == 401, wrong
        assert body["error"]["message"] == "no valid API key"
    assert small.request("GET", "/v1/models").status_code == 401
    assert small.request("GET", "/openapi.json").status_code == 401
    for path in ("/health", "/ready", "/metrics", "/"):
        assert small.request("GET", path).status_code == 200, path


def test_the_context_is_what_has_room(small: Server) -> None:
    """Eight blocks of 16 tokens (bug bank 62): answers end there, longer prompts are refused with
    both numbers."""
    body = small.body("z" * 60, max_tokens=500, ignore_eos=True)
    status, _, answer = keyed(small, body)
    assert status == 200
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"
    status, _, answer = keyed(small, small.body("z" * 150))
    assert status == 400
    assert "the context 128" in answer["error"]["message"]
    assert "room for 128 tokens" in (small.folder / "stdout").read_text()


def test_a_body_that_is_too_large(small: Server) -> None:
    status, _, answer = keyed(small, small.body("z" * 20_000))
    assert status == 413
    assert "10485 bytes" in answer["error"]["message"]
    assert keyed(small, small.body())[0] == 200


def test_a_full_queue(small: Server) -> None:
    """More than can run and wait: HTTP 429 with Retry-After, and the others are answered."""
    body = small.body("z" * 40, max_tokens=60, ignore_eos=True, temperature=1.0)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: keyed(small, body), range(16)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}, statuses
    assert statuses.count(200) >= 2
    assert all(headers["retry-after"] for status, headers, _ in answers if status == 429)
    assert keyed(small, small.body())[0] == 200
    status, _, answer = keyed(small, small.body(n=3))
    assert status == 400
    assert "3 answers in one call" in answer["error"]["message"]


@pytest.mark.slow
def test_an_answer_that_takes_too_long(tmp_path: Path, ll: Path) -> None:
    """HTTP 504, or an error event; the server goes on."""
    settings = ["serve.context=200", "serve.request_timeout_s=0.05"]
    server = start_server(tmp_path, ll, [], *settings)
    with running(server.process, tmp_path):
        wait_until_healthy(server)
        body = server.body(max_tokens=190, ignore_eos=True, n=4)
        late = server.post(body)
        assert late.status_code == 504
        assert "0.05 s" in late.json()["error"]["message"]
        events = server.post({**body, "stream": True}).text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout"
        deadline = time.monotonic() + 2
        while metric(server, "num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(server, "kv_cache_usage_perc") == 0


def test_room_that_cannot_be(tmp_path: Path, ll: Path) -> None:
    """A server that has no room for one request of its context is refused before it loads."""
    done = shardwise(
        tmp_path, "serve", ll, "--set", "serve.context=256", "--set", "devices.memory_gib=0.2"
    )
    assert done.code == 2, done.text
    assert len(done.err.splitlines()) == 1


class Between(BaseHTTPRequestHandler):
    """Passes calls on to a server, and makes its page take a while to load: what a browser prints
    of a page is how it is by then."""

    target: ClassVar[Server]

    def do_GET(self) -> None:
        if self.path == "/slow.png":
            time.sleep(6)
            self._send(404, "")
            return
        response = self.target.request("GET", self.path)
        slow = '<img src="/slow.png">' if self.path.startswith("/?") else ""
        self._send(response.status_code, response.text + slow)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        response = self.target.request("POST", self.path, content)
        self._send(response.status_code, response.text)

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("content-type", "text/html" if text.startswith("<!") else "text/plain")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing to say."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_the_page_in_a_browser(server: Server, tmp_path: Path) -> None:
    """It asks, and shows the streamed answer."""
    Between.target = server
    with ThreadingHTTPServer(("127.0.0.1", 0), Between) as between:
        Thread(target=between.serve_forever, daemon=True).start()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [
            f"--user-data-dir={tmp_path}",
            f"--proxy-server=127.0.0.1:{between.server_port}",
        ]
        url = f"http://127.0.0.1:{between.server_port}/?q=Hello"
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120)
        between.shutdown()
    assert f'<strong id="model">{server.name}</strong>' in done.stdout
    assert '<div class="turn user">Hello</div>' in done.stdout
    assert re.search(r"[0-9]+ tokens, [0-9.]+ a second", done.stdout)
    assert 'class="turn error"' not in done.stdout
