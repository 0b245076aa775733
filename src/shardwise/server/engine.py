"""Continuous batching on a sharded model: every pass takes tokens of all requests that are there.

The first rank takes requests from a queue, decides what each pass computes, and samples; the other
ranks run the same passes on their shards.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.config import Serve
from shardwise.server.answer import Answer
from shardwise.server.blocks import Blocks
from shardwise.server.messages import Event, Request
from shardwise.server.runner import Runner
from shardwise.server.sampling import choose
from shardwise.server.scheduler import Scheduler, Sequence


@dataclass(frozen=True, kw_only=True)
class Load:
    """What an engine is doing."""

    running: int
    """requests with room in the cache"""
    waiting: int
    """requests without"""
    preempted: int
    """times that one had to give its room up, so far"""
    cache_used: float
    """share of the cache's blocks that somebody uses"""
    prompt_tokens: int
    """of requests so far"""
    cached_tokens: int
    """of those, how many the cache had already"""
    generated_tokens: int
    """so far"""


class Engine:
    """The first rank's side: a bounded queue of requests, and the loop that answers them.

    The loop runs in the process's first thread, which loaded the model, and not in one of its own:
    with two teams of threads, libgomp lets those of each sleep after every product, and a token
    takes a third longer.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        serve: Serve,
        *,
        end_ids: frozenset[int],
        num_blocks: int,
    ) -> None:
        """Args:
        tokenizer: of the engine alone.
        end_ids: tokens that end an answer.
        num_blocks: of the cache.
        """
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        """called once"""
        self._runner, self._tokenizer, self._end_ids = runner, tokenizer, end_ids
        self._blocks = Blocks(num_blocks, remembers=serve.prefix_cache)
        self._scheduler = Scheduler(
            self._blocks, max_tokens=serve.max_batch_tokens, max_running=serve.max_running
        )
        self._answers: dict[Sequence, Answer] = {}
        self._requests: queue.Queue[Request | None] = queue.Queue(maxsize=serve.max_queue)
        self._keep_alive_s = min(20.0, serve.timeout_s / 3)
        self._stopping = False
        self._prompt_tokens = self._generated_tokens = 0
        self._lock = threading.Lock()  # between a new request and the end of the engine

    def submit(self, request: Request) -> bool:
        """Queue a request; False if the queue is full or the engine has failed."""
        with self._lock:
            if self.failure is not None:
                return False
            try:
                self._requests.put_nowait(request)
            except queue.Full:
                return False
            return True

    def close(self) -> None:
        """Nothing more will come: answer what is queued, and end. From any thread but the first."""
        with self._lock:
            if self.failure is not None:
                return
        self._requests.put(None)

    def run(self) -> None:
        """Answer until `close`; then end all ranks.

        Raises:
            Exception: what ended it, once all who wait have been told.
        """
        try:
            with torch.inference_mode():
                while self._take():
                    self._step()
            self._runner.stop()
        except BaseException as error:
            with self._lock:
                self.failure = error
            self._fail_all(error)
            self.on_failure()
            raise

    @property
    def load(self) -> Load:
        """What the engine is doing now."""
        scheduler, blocks = self._scheduler, self._blocks
        return Load(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + self._requests.qsize(),
            preempted=scheduler.num_preempted,
            cache_used=1 - blocks.num_free / blocks.num_blocks,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=scheduler.num_cached,
            generated_tokens=self._generated_tokens,
        )

    def _take(self) -> bool:
        """Take new requests, as many as have a chance of room; wait if there is nothing to do.
        False: there is nothing left to do, and nothing more will come."""
        while not self._stopping and self._scheduler.has_room:
            try:
                request = self._requests.get(block=not self._answers, timeout=self._keep_alive_s)
            except queue.Empty:
                if self._answers:
                    break
                self._runner.wait()
                continue
            if request is None:
                self._stopping = True
            elif not request.cancelled.is_set():
                answer = Answer(request, self._tokenizer, self._end_ids)
                self._answers[answer.sequence] = answer
                self._scheduler.add(answer.sequence)
                self._prompt_tokens += len(request.prompt)
        return bool(self._answers)

    def _step(self) -> None:
        for sequence, answer in list(self._answers.items()):
            if answer.request.cancelled.is_set():
                self._end(sequence)
        chosen = self._scheduler.next_pass()
        if not chosen:
            return
        logits = self._runner.run([span for _, span in chosen])
        for sequence, span in chosen:
            self._scheduler.computed(sequence, span)
        asking = [self._answers[sequence] for sequence, span in chosen if span.wants_logits]
        tokens = choose(logits, [answer.sampler for answer in asking])
        self._generated_tokens += len(tokens)
        for answer, token in zip(asking, tokens, strict=True):
            if answer.add(token):
                self._end(answer.sequence)

    def _end(self, sequence: Sequence) -> None:
        del self._answers[sequence]
        self._scheduler.remove(sequence)

    def _fail_all(self, error: BaseException) -> None:
        for answer in self._answers.values():
            answer.fail(error)
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                request.send(Event(finish="error", error=str(error)))
