"""Room for keys and values beside the weights of a server. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import GIB, Layout
from shardwise.models.facts import ModelFacts
from shardwise.planner.serving_work import BF16, LayerParts

KEPT_BACK = 0.1
"""of a device that engines leave free: vLLM's gpu_memory_utilization is 0.9"""
RUNTIME_BYTES = GIB
"""context of the device and buffers of communicators: 0.5 to 2 GiB, and 0.35 to 0.4 GiB"""


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


def room_of(
    facts: ModelFacts,
    layout: Layout,
    layers: Sequence[tuple[LayerParts, int]],
    capacity: float,
    chunk: int,
    windows: Sequence[int | None] = (),
) -> Room:
    """What a rank holds: its stage's share of the layers, embedding and head of their ranks.

    Args:
        layers: what a rank has of each kind of layer, and how many there are.
        chunk: tokens of prompts in a pass.
        windows: of each kind of `layers`.
    """
    share = 1 / layout.pp
    table = facts.vocab_size * facts.hidden_size / layout.tp * BF16
    both = 2 if layout.pp == 1 and not facts.tied else 1
    weights = share * sum(count * parts.weight_bytes for parts, count in layers) + both * table
    width = max(facts.intermediate_size, facts.expert_width * facts.experts_per_token)
    kept = (2 * facts.hidden_size + (2 * width + facts.q_size) / layout.tp) * BF16
    pairs = list(zip(layers, windows, strict=True)) if windows else [(row, None) for row in layers]
    whole = sum(n * parts.cache_bytes for (parts, n), window in pairs if window is None)
    return Room(
        weights=int(weights),
        activations=int(chunk * kept),
        logits=int(2 * 4 * facts.vocab_size),
        reserve=int(RUNTIME_BYTES + KEPT_BACK * capacity),
        capacity=capacity,
        token_bytes=share * whole,
        request_bytes=share * sum(n * parts.state_bytes for parts, n in layers),
        windowed=tuple(
            (window, share * n * parts.cache_bytes)
            for (parts, n), window in pairs
            if window is not None
        ),
    )
