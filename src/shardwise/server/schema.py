"""What clients may ask: the part of OpenAI's requests that is answered, and vLLM's additions.

A field that is not here is refused by its name with HTTP 400, never ignored. So is a value that
would have to be ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from shardwise.server.messages import Sampling

MAX_STOPS = 4
MAX_CHOICES = 16
MAX_TOP = 20


class Asked(BaseModel):
    """Base of all that clients send: no unknown fields, no type changes, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 0.0 where an integer is meant."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return int(value) if is_whole else value


Whole = Annotated[int, BeforeValidator(_whole)]


class TextPart(Asked):
    """A piece of a turn's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Asked):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None

    def plain(self) -> dict[str, str]:
        """As a chat template reads it; templates know the developer as the system."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Asked):
    """Extras of a streamed answer."""

    include_usage: bool = False


class SamplingFields(Asked):
    """What chat and completion requests have in common."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Whole | None = Field(default=None, ge=-1, description="of vLLM; -1 or 0: all")
    min_p: float | None = Field(default=None, ge=0, le=1, description="of vLLM")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, description="of vLLM")
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = Field(default=None, max_length=64, description="of vLLM")
    ignore_eos: bool = Field(default=False, description="of vLLM")
    n: Whole | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="a label of the client's; not used")

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise ValueError(f"expected at most {MAX_STOPS} texts, none of them empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, value in (bias or {}).items():
            if not (token.isascii() and token.isdigit()):
                raise ValueError(f"{token!r} is not a token id; keys are numbers like '15339'")
            if abs(value) > 100:
                raise ValueError(f"{value} of token {token} is not between -100 and 100")
        return bias

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, however they were written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(token): value for token, value in (self.logit_bias or {}).items()}

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens that are told of each position; None: no probabilities."""
        raise NotImplementedError

    def sampling(self, choice: int) -> Sampling:
        """The rules of one of the `n` choices: with a seed, each has one of its own."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            # after the largest seed comes the smallest
            "seed": None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63,
        }
        set_ones: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        return Sampling(**set_ones, logit_bias=self.biases, logprobs=self.num_top)


class ChatRequest(SamplingFields):
    """A request for the next turn of a conversation."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Whole | None = Field(default=None, ge=1)
    max_completion_tokens: Whole | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_TOP)

    @field_validator("top_logprobs")
    @classmethod
    def _check_top(cls, number: int | None, info: Any) -> int | None:
        if number is not None and not info.data.get("logprobs"):
            raise ValueError("set logprobs to true with it")
        return number

    @property
    def num_top(self) -> int | None:
        """As in `SamplingFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Of an answer; None: what the context leaves."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingFields):
    """A request to go on with a text, or with tokens."""

    prompt: str | list[str] | list[Whole] | list[list[Whole]]
    max_tokens: Whole | None = Field(default=16, ge=1)
    logprobs: Whole | None = Field(default=None, ge=0, le=MAX_TOP)
    # what changes nothing is taken, anything else is refused
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_top(self) -> int | None:
        """As in `SamplingFields`."""
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """Of an answer; None: what the context leaves."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, however they were written."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [cast(list[int], self.prompt)]
        return cast(list[str] | list[list[int]], self.prompt)


class TokenizeRequest(Asked):
    """A text, or a conversation as the model would get it, to be cut into tokens (as vLLM's)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
