"""Attention that torch's fused kernels do not have as it is: sinks, and values of another width.

A head with a sink has a logit that takes from all others: softmax over one more key, whose value is
zero. The key is made so that its product with every query is the sink: heads get one more
dimension, in which the query holds the sink, the added key one and all others zero. Where no mask
is given, causal attention lets every query see the first key; a query for the sink's own position
is added then, and left out again.

Values that are narrower than keys are made as wide: kernels that keep no scores want them so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from shardwise.models.families import Family
from shardwise.models.layers import SINK_PADDING

ATTENTION = "shardwise"
"""name of this attention among transformers' own"""


def attention_of(family: Family) -> str:
    """Which of transformers' attentions a family's models use."""
    return ATTENTION if family.sinks or family.attention == "latent" else "sdpa"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' `sdpa_attention_forward`, which it is where nothing has to be added.

    Args:
        query: [rows, heads, tokens, head_dim]; keys and values have as many heads or fewer.
        attention_mask: [rows or 1, heads or 1, queries, keys], boolean or added to the products.
        s_aux: [heads], the sinks.

    Returns:
        [rows, tokens, heads, head_dim of the values]
    """
    head_dim, v_dim = query.shape[-1], value.shape[-1]
    options["scaling"] = head_dim**-0.5 if scaling is None else scaling
    added = int(s_aux is not None and attention_mask is None and query.shape[2] > 1)
    if s_aux is not None:
        sinks = (s_aux / options["scaling"]).to(query.dtype)[None, :, None, None]
        query = torch.cat((query, sinks.expand(len(query), -1, query.shape[2], 1)), dim=-1)
        query = pad(query, (0, SINK_PADDING - 1, added, 0))
        first = pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
        key = torch.cat((first, pad(key, (0, 1))), dim=2)
        key, value = pad(key, (0, SINK_PADDING - 1)), pad(value, (0, 0, 1, 0))
        if attention_mask is not None:
            visible = True if attention_mask.dtype == torch.bool else 0.0
            attention_mask = pad(attention_mask, (1, 0), value=visible)
    value = pad(value, (0, key.shape[-1] - v_dim))
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output[:, added:, :, :v_dim], None


def causal_mask(
    before: int, chunk: int, window: int | None, like: torch.Tensor
) -> torch.Tensor | None:
    """What queries may see of `before` earlier keys and of their own `chunk`: 0, else -inf.

    Returns:
        [1, 1, chunk, before + chunk] in the dtype of the queries `like` (from a boolean one,
        attention would make and keep its own in each layer); None where plain causal attention
        says the same.
    """
    if before == 0 and (window is None or window >= chunk):
        return None
    steps = torch.arange(before + chunk, device=like.device) - before
    ahead = steps[None] - torch.arange(chunk, device=like.device)[:, None]  # of a query
    hidden = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
    mask = torch.zeros(ahead.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))[None, None]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
