"""Token-sum cross-entropy on logits that may be split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.planner.memory import LOSS_CHUNK_TOKENS

IGNORE = -100
"""label of a token that is not trained (transformers' convention)"""


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Move each row's labels one to the left, so that logits[t] is judged by token t + 1.

    Args:
        labels: [rows, tokens].

    Returns:
        [rows, tokens]; the last column is IGNORE.
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def cross_entropy_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab: range,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(logits)[label], in fp32; tokens with IGNORE add nothing.

    Args:
        logits: [rows, tokens, len(vocab)], this rank's chunk of the vocabulary.
        labels: [rows, tokens], already shifted, ids of the whole vocabulary.
        vocab: the ids of this rank's chunk.
        group: ranks that hold the other chunks; None if the chunk is the whole vocabulary.

    Returns:
        fp32 scalar, equal on every rank of the group. The logits are never gathered: what
        crosses ranks is three numbers a token.
    """
    flat = logits.flatten(0, 1)
    return _CrossEntropySum.apply(flat, labels.flatten(), vocab, group)


class _CrossEntropySum(torch.autograd.Function):
    """Saves the logits themselves and one number a token; the softmax is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab: range,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        maxima = torch.cat([c.amax(-1).float() for c in logits.split(LOSS_CHUNK_TOKENS)])
        if group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums, targets = torch.empty_like(maxima), torch.empty_like(maxima)
        for rows in _chunks(len(labels)):
            chunk = logits[rows].float()
            sums[rows] = (chunk - maxima[rows, None]).exp_().sum(-1)
            here, ids = _local_ids(labels[rows], vocab)
            targets[rows] = chunk.gather(1, ids[:, None])[:, 0].masked_fill(~here, 0.0)
        if group is not None:
            both = torch.stack((sums, targets))
            dist.all_reduce(both, group=group)
            sums, targets = both
        log_norms = sums.log() + maxima
        ctx.save_for_backward(logits, labels, log_norms)
        ctx.vocab = vocab
        return (log_norms - targets).masked_fill(labels == IGNORE, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, log_norms = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _chunks(len(labels)):
            chunk = (logits[rows].float() - log_norms[rows, None]).exp_()
            here, ids = _local_ids(labels[rows], ctx.vocab)
            chunk.scatter_add_(1, ids[:, None], -here.float()[:, None])
            chunk.masked_fill_((labels[rows] == IGNORE)[:, None], 0.0)
            result[rows] = chunk.mul_(grad)
        return result, None, None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(i, i + LOSS_CHUNK_TOKENS) for i in range(0, num_tokens, LOSS_CHUNK_TOKENS)]


def _local_ids(labels: torch.Tensor, vocab: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each label lies in this rank's chunk, and its position there (0 if not)."""
    here = (labels >= vocab.start) & (labels < vocab.stop)
    return here, (labels - vocab.start).masked_fill(~here, 0)
