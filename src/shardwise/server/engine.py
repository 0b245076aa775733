"""Generation on a sharded model: one request at a time, every rank in step.

The first rank takes requests from a queue, samples, and tells each token to the others, which
run the same forward passes on their shards. (Continuous batching is a later engine's work.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, PreTrainedModel

from shardwise.config import Plan
from shardwise.models.hub import TOKENIZER_FILE
from shardwise.models.read import directory_with
from shardwise.parallel.mesh import Mesh
from shardwise.server.messages import END_OF_ANSWER, Command, Event, FinishReason, Request
from shardwise.server.sampling import sample
from shardwise.server.text import Detokenizer, StopText

GENERATION_FILE = "generation_config.json"


class Engine:
    """The first rank's side: a bounded queue of requests and the thread that answers them."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, plan: Plan) -> None:
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        """called once, by the engine's thread"""
        self._model, self._mesh = model, mesh
        files = directory_with(TOKENIZER_FILE, plan.model)
        self._tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True)
        self._stop_ids = stop_ids(plan.model, self._tokenizer)
        self._requests: queue.Queue[Request | None] = queue.Queue(maxsize=plan.serve.max_queue)
        self._keep_alive_s = min(20.0, plan.serve.timeout_s / 3)
        self._lock = threading.Lock()  # between a new request and the end of the engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

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

    def stop(self) -> None:
        """Answer what is queued, then end all ranks."""
        if self._thread.is_alive():
            self._requests.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (request := self._next()) is not None:
                    self._answer(request)
                _tell(Command.STOP, 0, self._mesh)
        except BaseException as error:
            with self._lock:
                self.failure = error
            self._fail_waiting(error)
            self.on_failure()

    def _next(self) -> Request | None:
        while True:
            try:
                return self._requests.get(timeout=self._keep_alive_s)
            except queue.Empty:
                _tell(Command.WAIT, 0, self._mesh)

    def _answer(self, request: Request) -> None:
        """Generate until a stop token, the limit, or the client's leaving."""
        if request.cancelled.is_set():
            return
        detokenizer, stop_text = Detokenizer(self._tokenizer), StopText(request.stop)
        count = 0
        finish: FinishReason | None = None
        try:
            with closing(self._tokens(request)) as tokens:
                while finish is None and not request.cancelled.is_set():
                    token, count = next(tokens), count + 1
                    is_last = token in self._stop_ids or count == request.max_tokens
                    text = "" if token in self._stop_ids else detokenizer.add(token)
                    text, stopped = stop_text.feed(text + (detokenizer.flush() if is_last else ""))
                    if stopped or token in self._stop_ids:
                        finish = "stop"
                    elif is_last:
                        finish = "length"
                    if is_last and not stopped:
                        text += stop_text.flush()
                    request.send(Event(text=text, num_tokens=count, finish=finish))
        except BaseException as error:
            request.send(Event(finish="error", error=str(error)))
            raise

    def _tokens(self, request: Request) -> Generator[int, None, None]:
        """Sampled tokens, one after the other; closing it ends the answer on every rank."""
        generator = torch.Generator()
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        _tell(Command.GENERATE, len(request.prompt), self._mesh)
        prompt = torch.tensor(request.prompt, device=self._mesh.device)
        _broadcast(prompt, self._mesh)
        steps = logits_by_step(self._model, self._mesh, prompt)
        logits = next(steps)
        try:
            while True:
                token = sample(
                    logits,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    generator=generator,
                )
                yield token
                logits = steps.send(token)
        except GeneratorExit:
            with suppress(StopIteration):
                steps.send(END_OF_ANSWER)

    def _fail_waiting(self, error: BaseException) -> None:
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                request.send(Event(finish="error", error=str(error)))


def follow(model: PreTrainedModel, mesh: Mesh) -> None:
    """The other ranks' side: the same forward passes, until told to stop."""
    header = torch.zeros(2, dtype=torch.long, device=mesh.device)
    with torch.inference_mode():
        while True:
            _broadcast(header, mesh)
            command, length = Command(int(header[0])), int(header[1])
            if command is Command.STOP:
                return
            if command is Command.GENERATE:
                prompt = torch.zeros(length, dtype=torch.long, device=mesh.device)
                _broadcast(prompt, mesh)
                for _ in logits_by_step(model, mesh, prompt):
                    pass


def logits_by_step(
    model: PreTrainedModel, mesh: Mesh, prompt: torch.Tensor
) -> Generator[torch.Tensor, int | None, None]:
    """Run the prompt, then token by token; a generator of the last position's logits [vocab].

    The first rank sends in each token (END_OF_ANSWER ends it on every rank); the other ranks just
    iterate, and get the token from the first.
    """
    cache = DynamicCache(config=model.config)
    ids = prompt[None]
    token = torch.zeros(1, dtype=torch.long, device=mesh.device)
    while True:
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        choice = yield logits[0, -1]
        token.fill_(END_OF_ANSWER if choice is None else choice)
        _broadcast(token, mesh)
        if int(token) == END_OF_ANSWER:
            return
        ids = token[None]


def stop_ids(model_dir: str, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the generation config's and the tokenizer's."""
    given = None
    files = directory_with(GENERATION_FILE, model_dir)
    if (files / GENERATION_FILE).exists():
        given = GenerationConfig.from_pretrained(files, local_files_only=True).eos_token_id
    ids = given if isinstance(given, list) else [given]
    return {int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None}


def _tell(command: Command, length: int, mesh: Mesh) -> None:
    _broadcast(torch.tensor([command, length], device=mesh.device), mesh)


def _broadcast(tensor: torch.Tensor, mesh: Mesh) -> None:
    """Send a tensor from the first rank to all."""
    if mesh.size("tp") > 1:
        dist.broadcast(tensor, src=0, group=mesh.group("tp"))
