"""Room for keys and values beside the weights of a server. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from shardwise.config import GIB, Layout
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind
from shardwise.planner.formats import FORMATS, Format
from shardwise.planner.serving_work import BF16, LayerParts, cache_bytes_per_value, layer_parts

KEPT_BACK = 0.1
"""of a device that engines leave free: vLLM's gpu_memory_utilization is 0.9"""
RUNTIME_BYTES = GIB
"""context of the device and buffers of communicators: 0.5 to 2 GiB, and 0.35 to 0.4 GiB"""


CHUNK_TOKENS = 8192
"""of prompts in a pass, at most: what vLLM, SGLang and TensorRT-LLM do on devices of 70 GiB or more
(max_num_batched_tokens, chunked_prefill_size, max_num_tokens)"""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What users ask of the server."""

    concurrency: int
    """requests that are there at a time, running or waiting"""
    prompt_len: int
    """tokens, on average"""
    output_len: int
    """tokens, on average"""

    @property
    def length(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_len + self.output_len

    @property
    def mean_context(self) -> float:
        """Tokens that a request has in the cache, on average while it answers."""
        return self.prompt_len + self.output_len / 2


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of the rank that has most to hold."""

    weights: int
    activations: int
    logits: int
    reserve: int
    """runtime, and what engines keep back"""
    capacity: float
    token_bytes: float
    """that a token adds to the cache of the rank"""
    request_bytes: float
    """that a request keeps, however long it is"""
    windowed: tuple[tuple[int, float], ...]
    """window, bytes of a token: layers that forget"""

    @property
    def cache(self) -> float:
        """Bytes that are left for keys and values."""
        used = self.weights + self.activations + self.logits + self.reserve
        return max(0.0, self.capacity - used)

    def bytes_of(self, length: int) -> float:
        """Of a request of so many tokens."""
        forgetting = sum(min(window, length) * one for window, one in self.windowed)
        return length * self.token_bytes + forgetting + self.request_bytes

    @property
    def tokens(self) -> int:
        """Tokens that the cache has room for, in one long request."""
        return int(self.cache / self.token_bytes) if self.token_bytes else 0

    def requests(self, length: int) -> int:
        """Requests of so many tokens that have room at a time."""
        one = self.bytes_of(length)
        return int(self.cache / one) if one else 0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model in one layout: what its ranks hold."""

    facts: ModelFacts
    layout: Layout
    """`dp` replicas of attention, each `pp` stages of `tp` ranks; `ep` ranks divide the experts,
    those of `ep / tp` replicas together where that is more than one"""
    weights: str
    """name of a format"""
    capacity: float
    """bytes of a device"""
    cache_bytes: int | None = None
    """of a value of the cache; None: as engines do"""
    keeps_of_rest: bool = False
    """whether a tenth of what is left is kept back (TensorRT-LLM's free_gpu_memory_fraction), and
    not a tenth of the device (vLLM)"""

    @property
    def fmt(self) -> Format:
        """Of the weights."""
        return FORMATS[self.weights]

    @cached_property
    def kinds(self) -> Counter[LayerKind]:
        """How many layers of each kind there are."""
        return Counter(self.facts.layers)

    def parts(self, kind: LayerKind) -> LayerParts:
        """What a rank has of a layer."""
        one = self.cache_bytes or cache_bytes_per_value(self.fmt)
        tp, ep = self.layout.tp, self.layout.ep
        return layer_parts(self.facts, kind, tp, ep, self.weights, one)

    def room(self, load: Load) -> Room:
        """What the rank that has most of it holds, and what that leaves for the cache.

        The first and the last stage of a pipeline have the embedding and the head; layers that do
        not divide evenly make one stage larger.
        """
        facts, pp = self.facts, self.layout.pp
        share = -(-facts.num_layers // pp) / facts.num_layers
        layers = [(kind.window, self.parts(kind), count) for kind, count in self.kinds.items()]
        table = facts.vocab_size * facts.hidden_size / self.layout.tp * BF16
        tables = 2 if pp == 1 and not facts.tied else 1
        weights = share * sum(count * parts.weight_bytes for _, parts, count in layers)
        width = max(facts.intermediate_size, facts.expert_width * facts.experts_per_token)
        kept = (2 * facts.hidden_size + (2 * width + facts.q_size) / self.layout.tp) * BF16
        whole = sum(n * parts.cache_bytes for window, parts, n in layers if window is None)
        activations, logits = min(CHUNK_TOKENS, load.prompt_len) * kept, 2 * 4 * facts.vocab_size
        used = weights + tables * table + activations + logits + RUNTIME_BYTES
        whole_or_rest = max(0.0, self.capacity - used) if self.keeps_of_rest else self.capacity
        return Room(
            weights=int(weights + tables * table),
            activations=int(activations),
            logits=logits,
            reserve=int(RUNTIME_BYTES + KEPT_BACK * whole_or_rest),
            capacity=self.capacity,
            token_bytes=share * whole,
            request_bytes=share * sum(n * parts.state_bytes for _, parts, n in layers),
            windowed=tuple(
                (window, share * n * parts.cache_bytes)
                for window, parts, n in layers
                if window is not None
            ),
        )
