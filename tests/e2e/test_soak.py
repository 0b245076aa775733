"""A server over two processes under thousands of requests of every kind: each answer is right,
nothing is lost and nothing grows."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.shell import running, workers
from tests.e2e.test_api import metric
from tests.e2e.test_serve import Server, malformed, start_server, wait_until_healthy

NUM_REQUESTS = int(os.environ.get("NUM_REQUESTS", "400"))
"""`make soak` asks for ten thousand"""
NUM_CLIENTS = 12
LENGTHS = (1, 3, 16, 17, 33, 60, 75)
SETTINGS = (
    "serve.context=160",
    "serve.kv_tokens=320",  # of two whole requests, so that many are preempted
    "serve.max_running=8",
    "serve.max_batch_tokens=64",
    "serve.max_queue=24",
)


@dataclass(frozen=True)
class Job:
    """One request, and what becomes of it."""

    number: int
    kind: str
    length: int
    seed: int | None


def jobs(count: int) -> list[Job]:
    """Random ones, the same in each run."""
    chance = random.Random(0)
    kinds = ["whole"] * 4 + ["stream"] * 3 + ["leave", "leave stream", "malformed"]
    return [
        Job(
            number,
            chance.choice(kinds),
            chance.choice(LENGTHS),
            chance.choice([None, None, 1, 2]),
        )
        for number in range(count)
    ]


def body_of(server: Server, job: Job) -> dict[str, Any]:
    rules = {"temperature": 0} if job.seed is None else {"temperature": 1.2, "seed": job.seed}
    prompt = ("abcdefghijklmnopqrstuvwxyz" * 4)[: job.length]
    # as many tokens for each prompt of a length, so that there are not too many answers to know
    return server.body(prompt, max_tokens=30 + job.length % 30, ignore_eos=True, **rules)


def run(server: Server, job: Job, expected: dict[tuple[int, int | None], str]) -> str | None:
    """What is wrong with the answer; None if nothing is."""
    if job.kind == "malformed":
        kinds = malformed(server)
        name = sorted(set(kinds) - {"20 MB", "deep"})[job.number % (len(kinds) - 2)]
        status = server.post(kinds[name]).status_code
        return None if 400 <= status < 500 else f"{name}: HTTP {status}"
    body = body_of(server, job)
    if job.kind.startswith("leave"):
        leave(server, {**body, "stream": job.kind == "leave stream"}, job.number % 7 / 50)
        return None
    wanted = expected[job.length, job.seed]
    response = server.post({**body, "stream": job.kind == "stream"})
    while response.status_code == 429:
        time.sleep(0.05)
        response = server.post({**body, "stream": job.kind == "stream"})
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {response.text}"
    got = text_of(response.text) if job.kind == "stream" else content_of(response.json())
    return None if got == wanted else f"{job}: {got!r} is not {wanted!r}"


def leave(server: Server, body: dict[str, Any], after_s: float) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as line:
        headers = {"content-type": "application/json"}
        line.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        time.sleep(after_s)


def content_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def text_of(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1]
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    return "".join(choice["delta"].get("content", "") for (choice,) in choices)


def resident_bytes(server: Server) -> list[int]:
    """Of each rank."""
    status = [Path(f"/proc/{pid}/status").read_text() for pid in workers(server.folder).values()]
    return [
        int(line.split()[1]) * 1024
        for text in status
        for line in text.splitlines()
        if line.startswith("VmRSS")
    ]


@pytest.mark.long
@pytest.mark.timeout(60 + NUM_REQUESTS)
def test_a_soak(tmp_path: Path, ll: Path) -> None:
    """Whole and streamed answers, clients that leave, bad input; long prompts and short ones."""
    server = start_server(tmp_path, ll, ["tp=2"], *SETTINGS)
    with running(server.process, tmp_path), ThreadPoolExecutor(NUM_CLIENTS) as pool:
        wait_until_healthy(server)
        alone = [Job(0, "whole", length, seed) for length in LENGTHS for seed in (None, 1, 2)]
        expected = {
            (job.length, job.seed): content_of(server.post(body_of(server, job)).json())
            for job in alone
        }
        assert len(set(expected.values())) > len(LENGTHS)
        todo = jobs(NUM_REQUESTS)
        warm, rest = todo[: NUM_REQUESTS // 4], todo[NUM_REQUESTS // 4 :]
        wrong = [text for text in pool.map(lambda job: run(server, job, expected), warm) if text]
        before = resident_bytes(server)
        wrong += [text for text in pool.map(lambda job: run(server, job, expected), rest) if text]
        assert wrong == []
        deadline = time.monotonic() + 5
        while metric(server, "num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(server, "num_requests_running") == 0
        assert metric(server, "num_requests_waiting") == 0
        assert metric(server, "kv_cache_usage_perc") == 0
        assert metric(server, "num_preemptions_total") > 0
        assert metric(server, "prefix_cache_hits_total") > 0
        growth = [after / b - 1 for after, b in zip(resident_bytes(server), before, strict=True)]
        print(f"{NUM_REQUESTS} requests; memory grew by {[f'{100 * g:.1f}%' for g in growth]}")
        assert max(growth) < 0.05, growth
