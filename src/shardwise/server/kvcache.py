"""The paged cache of keys and values, as transformers' models see it, and attention over it.

A pass has tokens of many sequences next to each other, in one row. A model gives keys and values of
all of them to `KVCache.update`, which writes them to the blocks of each sequence; attention then
takes one sequence at a time, over what the cache has of that one alone. So no sequence pays for
another, and there is no mask but where a part of a prompt follows an earlier part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from shardwise.config import Layout
from shardwise.models.attention import attend, causal_mask
from shardwise.models.facts import ModelFacts
from shardwise.server.blocks import BLOCK_TOKENS
from shardwise.server.messages import Span

ATTENTION = "shardwise_paged"
"""name of this attention among transformers' own; it has no mask there, so models make none"""


def cache_widths(facts: ModelFacts, layout: Layout) -> tuple[int, int, int]:
    """Heads that a rank caches in each layer, and numbers of a key and of a value."""
    if facts.latent is not None:
        return 1, facts.latent.kv_rank, facts.latent.rope_dim
    heads = facts.num_kv_heads // min(layout.tp, facts.num_kv_heads)
    return heads, facts.head_dim, facts.v_size // facts.num_kv_heads


class KVCache:
    """Keys and values of all sequences, in blocks; called by models as transformers' caches are."""

    def __init__(
        self,
        facts: ModelFacts,
        layout: Layout,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads, key, value = cache_widths(facts, layout)
        slots = num_blocks * BLOCK_TOKENS

        def room(width: int) -> list[torch.Tensor]:
            # not filled: memory that no token has used yet costs nothing on CPU
            return [
                torch.empty(heads, slots, width, dtype=dtype, device=device)
                for _ in range(facts.num_layers)
            ]

        self.keys, self.values = room(key), room(value)
        self.spans: Sequence[Span] = ()
        self._slots = torch.empty(0, dtype=torch.long, device=device)
        self._masks: dict[tuple[int, int, int | None], torch.Tensor | None] = {}

    def begin(self, spans: Sequence[Span]) -> torch.Tensor:
        """What the next pass computes.

        Returns:
            Positions [tokens] of its tokens, each in its own sequence.
        """
        self.spans = spans
        self._masks.clear()
        slots: list[int] = []
        positions: list[int] = []
        for span in spans:
            positions += range(span.start, span.end)
            slots += _slots(span)
        device = self._slots.device
        self._slots = torch.tensor(slots, device=device)
        return torch.tensor(positions, device=device)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values [1, heads, tokens, numbers] of a pass.

        Returns:
            The same; attention reads those of each sequence from the cache.
        """
        self.keys[layer_idx].index_copy_(1, self._slots, keys[0])
        self.values[layer_idx].index_copy_(1, self._slots, values[0])
        return keys, values

    def mask(self, span: Span, begin: int, window: int | None, like: torch.Tensor) -> Any:
        """What the queries of a span may see of the keys from `begin`; the same in all layers."""
        key = (span.start - begin, len(span.tokens), window)
        if key not in self._masks:
            self._masks[key] = causal_mask(*key, like)
        return self._masks[key]


def _slots(span: Span) -> list[int]:
    """Where in the cache the tokens of a span are."""
    slots: list[int] = []
    before = 0
    for first, count in span.runs:
        size = count * BLOCK_TOKENS
        begin, end = max(span.start - before, 0), min(span.end - before, size)
        slots += range(first * BLOCK_TOKENS + begin, first * BLOCK_TOKENS + end)
        before += size
    return slots


def _read(cached: torch.Tensor, span: Span, begin: int) -> torch.Tensor:
    """[heads, tokens, numbers] of a sequence from its token `begin` on: in place if it is in one
    run of blocks, else a copy."""
    parts = []
    before = 0
    for first, count in span.runs:
        size = count * BLOCK_TOKENS
        start, stop = max(begin - before, 0), min(span.end - before, size)
        if start < stop:
            parts.append(cached[:, first * BLOCK_TOKENS + start : first * BLOCK_TOKENS + stop])
        before += size
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def apply_cache(model: PreTrainedModel, cache: KVCache) -> None:
    """Let a model's attention read its keys and values from the cache."""
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        if hasattr(module, "is_causal"):  # every attention, and nothing else
            module.shardwise_cache = cache
        if hasattr(module, "expand_kv"):
            # what is cached is a latent, and keys and values are made of it a sequence at a time
            module.shardwise_expand = module.expand_kv
            module.expand_kv = lambda latent, shared_key: (latent, shared_key)


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the queries [1, heads, tokens, head_dim] of a pass, a sequence at a time.

    Returns:
        [1, tokens, heads, head_dim of the values]
    """
    cache: KVCache = module.shardwise_cache
    layer: int = module.layer_idx
    expand = getattr(module, "shardwise_expand", None)
    outputs, at = [], 0
    for span in cache.spans:
        number = len(span.tokens)
        queries = query[:, :, at : at + number]
        begin = 0 if sliding_window is None else max(0, span.start - sliding_window + 1)
        keys = _read(cache.keys[layer], span, begin)[None]
        values = _read(cache.values[layer], span, begin)[None]
        if expand is not None:
            keys, values = expand(keys, values)
        if number == 1 and s_aux is None and keys.shape[-1] == values.shape[-1]:
            outputs.append(_one_query(queries, keys, values, scaling))
        else:
            mask = cache.mask(span, begin, sliding_window, query)
            options = {"scaling": scaling, "s_aux": s_aux}
            outputs.append(attend(module, queries, keys, values, mask, **options)[0])
        at += number
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _one_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of a single token: the query heads that share a KV head are as tokens of it."""
    heads = key.shape[1]
    grouped = query.view(1, heads, -1, query.shape[-1])
    output = scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return output.reshape(1, 1, -1, value.shape[-1])


AttentionInterface.register(ATTENTION, _paged_attention)
