"""What one pass of an inference engine reads, computes and sends, layer by layer. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.config import Layout
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind
from shardwise.planner.formats import FORMATS, Format
from shardwise.planner.network import Op
from shardwise.planner.remember import per_model

_MERGED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "q_a_proj": "a",
    "kv_a_proj_with_mqa": "a",
}
"""matrices that engines lay side by side and multiply at once"""
BF16 = 2


class Matrix(NamedTuple):
    """Matrices of a layer that one kernel multiplies, on one rank."""

    values: float
    rows: float
    """outputs"""
    columns: float
    """inputs"""
    fmt: Format


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """What one rank has of a layer."""

    matrices: tuple[Matrix, ...]
    num_experts: int
    """of them here"""
    expert_values: float
    """of one expert's part here"""
    expert_format: Format
    cache_bytes: float
    """that a token adds to the cache here; of a layer without one, 0"""
    state_bytes: float
    """that a request keeps here, however long it is"""
    small_kernels: int

    @property
    def weight_bytes(self) -> float:
        """Of all matrices and experts."""
        dense = sum(m.values * m.fmt.num_bytes for m in self.matrices)
        return dense + self.num_experts * self.expert_values * self.expert_format.num_bytes


def cache_bytes_per_value(fmt: Format) -> int:
    """Of keys and values: engines keep them in 8 bits beside weights that compute in 8 or fewer."""
    return 1 if fmt.rate != "bf16" or fmt.name == "mxfp4" else BF16


@per_model
def layer_parts(
    facts: ModelFacts, kind: LayerKind, tp: int, ep: int, weights: str, cache_bytes: int
) -> LayerParts:
    """What a rank has of a layer of a kind.

    `ep` ranks divide the experts; of a group of `tp` ranks with fewer of them, the others cut each
    expert's width. Linear attention is cut by heads, as engines do.

    Args:
        weights: name of a format.
        cache_bytes: of one value of the cache.
    """
    fmt = FORMATS[weights]
    dense = FORMATS["bf16"] if fmt.experts_only and facts.num_experts else fmt
    cut = max(1, tp // ep)  # of an expert's width
    merged: dict[str, list[float]] = {}
    num_experts, expert_values = 0, 0.0
    for name, param in facts.params_on_rank(kind, tp=tp, ep=1).items():
        if param.cut == "experts":
            if len(param.shape) == 3:
                num_experts = max(1, param.shape[0] // ep)
                expert_values += math.prod(param.shape[1:]) / cut
            continue
        if len(param.shape) != 2:
            continue
        parent, leaf = name.rsplit(".", 2)[0], name.split(".")[-2]
        is_linear = "linear_attn" in name
        key = f"{parent}.{'in' if leaf.startswith('in_proj') else _MERGED.get(leaf, leaf)}"
        rows, columns = param.shape
        values = rows * columns / (tp if is_linear else 1)
        found = merged.setdefault(key, [0.0, 0.0, columns])
        found[0], found[1] = found[0] + values, found[1] + values / columns
    router = FORMATS["bf16"]
    return LayerParts(
        matrices=tuple(
            Matrix(values, rows, columns, router if rows == facts.num_experts else dense)
            for values, rows, columns in merged.values()
        ),
        num_experts=num_experts,
        expert_values=expert_values,
        expert_format=fmt,
        cache_bytes=0.0 if kind.is_linear else _cached(facts, tp) * cache_bytes,
        state_bytes=facts.linear.state * 4 / tp if kind.is_linear and facts.linear else 0.0,
        small_kernels=_small_kernels(facts, kind),
    )


def _cached(facts: ModelFacts, tp: int) -> float:
    """Values that a rank caches of a token in a layer: heads are not cut, a latent is shared."""
    if facts.latent is not None:
        return facts.cache_size
    return facts.cache_size / min(tp, facts.num_kv_heads)


def _small_kernels(facts: ModelFacts, kind: LayerKind) -> int:
    """Kernels of a layer besides products, experts and attention.

    Counted in the code of engines: two norms that add, rotary embedding, a copy into the cache, an
    activation. Norms of queries and keys; of a latent, its norm and two products that absorb it.
    Routers choose and the shared expert is added. Linear attention has a convolution, gates and a
    norm of its own.
    """
    number = len(facts.family.norms) + 3
    number += 1 if facts.qk_norm else 0
    number += 3 if facts.latent is not None else 0
    number += 2 if kind.has_experts else 0
    number += 1 if kind.has_experts and facts.shared_width else 0
    return number + (3 if kind.is_linear else 0)


def touched(num_experts: int, share: float, tokens: float) -> float:
    """Experts of a rank that at least one of so many tokens chooses, chosen at random.

    Args:
        share: of a layer's experts that a token chooses.
    """
    return num_experts * (1 - (1 - share) ** tokens)


class Message(NamedTuple):
    """A collective of a layer."""

    axis: str
    op: Op
    values: float
    """of the whole tensor, for each token of a rank"""
    value_bytes: float


def messages(facts: ModelFacts, kind: LayerKind, layout: Layout, fmt: Format) -> list[Message]:
    """What a layer sends: attention and MLP are each summed over `tp`; experts that more replicas
    of attention share get their tokens, in the format of their products, and send them back."""
    found = []
    h = facts.hidden_size
    spread = kind.has_experts and layout.ep > layout.tp
    if layout.tp > 1:
        found += [Message("tp", "all_reduce", h, BF16)] * (1 if spread else 2)
    if spread:
        chosen = h * facts.experts_per_token / layout.tp
        found += [
            Message("ep", "all_to_all", chosen, min(BF16, fmt.input_bytes)),
            Message("ep", "all_to_all", chosen, BF16),
        ]
    return found
