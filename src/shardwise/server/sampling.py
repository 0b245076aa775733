"""Choose the next token."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor, *, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    """Sample a token id from logits [vocab].

    Args:
        temperature: 0 takes the likeliest token.
        top_p: keep the smallest set of tokens whose probability reaches this.
    """
    if temperature == 0:
        return int(logits.argmax())
    probs = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, ids = probs.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        probs = torch.zeros_like(probs).scatter(0, ids, ordered.masked_fill(before >= top_p, 0))
    return int(torch.multinomial(probs.cpu(), 1, generator=generator))
