"""One answer on its way: from sampled tokens to text, until something ends it."""

from __future__ import annotations

from typing import Any

from shardwise.server.messages import Event, FinishReason, Request, Token
from shardwise.server.sampling import Sampler
from shardwise.server.scheduler import Sequence
from shardwise.server.text import Detokenizer, StopText


class Answer:
    """What the engine knows of a request that it has taken."""

    def __init__(self, request: Request, tokenizer: Any, end_ids: frozenset[int]) -> None:
        """Args:
        end_ids: the model's own tokens that end an answer.
        """
        self.request = request
        self.sampler = Sampler(request.sampling, request.prompt)
        self.sequence = Sequence(
            tokens=list(request.prompt), most_tokens=len(request.prompt) + request.max_tokens
        )
        self._detokenizer, self._stop_text = Detokenizer(tokenizer), StopText(request.stop)
        self._stop_ids = request.stop_ids | (frozenset() if request.ignore_eos else end_ids)
        self._count = 0

    def add(self, token: Token) -> bool:
        """Send what a token adds to the answer; whether the answer has ended."""
        self._count += 1
        self.sequence.tokens.append(token.id)
        is_stop = token.id in self._stop_ids
        is_last = is_stop or self._count == self.request.max_tokens
        text = "" if is_stop else self._detokenizer.add(token.id)
        text, stopped = self._stop_text.feed(text + (self._detokenizer.flush() if is_last else ""))
        finish: FinishReason | None = None
        if stopped or is_stop:
            finish = "stop"
        elif is_last:
            finish = "length"
        if is_last and not stopped:
            text += self._stop_text.flush()
        told = None if self.request.sampling.logprobs is None else token
        self.request.send(
            Event(
                text=text,
                num_tokens=self._count,
                num_cached=self.sequence.num_cached,
                token=told,
                finish=finish,
            )
        )
        return finish is not None

    def fail(self, error: BaseException) -> None:
        """The engine cannot go on."""
        self.request.send(Event(num_tokens=self._count, finish="error", error=str(error)))
