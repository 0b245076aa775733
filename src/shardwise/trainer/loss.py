"""Token-sum cross-entropy of the head's logits, which never exist whole.

The head's product and the loss are one function: it takes a few hundred tokens at a time, and
makes their gradients as soon as their logits are there, so that no pass is done twice. Tokens that
are not trained (prompts, padding) are left out before the product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.planner.memory import LOSS_CHUNK_TOKENS

_BLOCK = 4096
"""rows of the head whose gradient is added up at a time"""
IGNORE = -100
"""label of a token that is not trained (transformers' convention)"""


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Move each row's labels one to the left, so that position t is judged by token t + 1.

    Args:
        labels: [rows, tokens].

    Returns:
        [rows, tokens]; the last column is IGNORE.
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def head_loss_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab: range,
    group: dist.ProcessGroup | None,
    twice: bool = False,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label]; tokens with IGNORE add nothing.

    Args:
        hidden: [rows, tokens, hidden], the input of the head, in the compute dtype.
        weight: [len(vocab), hidden], this rank's rows of the head.
        labels: [rows, tokens], already shifted, ids of the whole vocabulary.
        vocab: the ids of this rank's rows.
        group: ranks that hold the other rows; None if these are all. Logits are never gathered:
            what crosses ranks is two numbers a token from each.
        twice: whether the backward pass is run once for inputs and once more for weights.

    Returns:
        fp32 scalar, equal on every rank of the group.
    """
    trained = labels != IGNORE
    return _HeadLossSum.apply(hidden[trained], weight, labels[trained], vocab, group, twice)


class _HeadLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        vocab: range,
        group: dist.ProcessGroup | None,
        twice: bool,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        grads = None
        if any(ctx.needs_input_grad):
            grads = _Grads(hidden, weight, weight_is_trained=ctx.needs_input_grad[1])
        for begin in range(0, len(labels), LOSS_CHUNK_TOKENS):
            rows = slice(begin, begin + LOSS_CHUNK_TOKENS)
            losses, logits_grad = _chunk(hidden[rows], weight, labels[rows], vocab, group)
            total += losses.sum()
            if grads is not None:
                grads.add(rows, logits_grad)
        ctx.twice = twice
        ctx.grads = grads  # not by save_for_backward, which would keep a second reference
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.grads.hidden, ctx.grads.weight
        if ctx.twice:
            hidden, weight = hidden * grad, None if weight is None else weight * grad
        else:
            ctx.grads = None
            hidden.mul_(grad)
            if weight is not None:
                weight.mul_(grad)
        return hidden, weight, None, None, None, None


class _Grads:
    """The gradients of the head's input and weight, of a loss whose own gradient is one."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, *, weight_is_trained: bool
    ) -> None:
        self._inputs = hidden, weight
        self.hidden = torch.empty_like(hidden)
        self.weight: torch.Tensor | None = None
        if not weight_is_trained:
            return
        # the sum over chunks is in fp32, as it is inside a single product
        several = len(hidden) > LOSS_CHUNK_TOKENS
        self.weight = torch.zeros_like(weight, dtype=torch.float32 if several else weight.dtype)

    def add(self, rows: slice, logits_grad: torch.Tensor) -> None:
        """Take in the gradient of some tokens' logits."""
        hidden, weight = self._inputs
        torch.mm(logits_grad, weight, out=self.hidden[rows])
        if self.weight is None:
            return
        if weight.dtype == self.weight.dtype:
            self.weight.addmm_(logits_grad.T, hidden[rows])
            return
        for begin in range(0, len(weight), _BLOCK):  # the whole product need not exist
            ids = slice(begin, begin + _BLOCK)
            self.weight[ids] += logits_grad[:, ids].T @ hidden[rows]


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: range,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of some tokens, and the gradient of their logits (softmax - one at the label)."""
    logits = (hidden @ weight.T).float()
    here = (labels >= vocab.start) & (labels < vocab.stop)
    ids = (labels - vocab.start).masked_fill(~here, 0)[:, None]
    targets = logits.gather(1, ids)[:, 0].masked_fill(~here, 0.0)
    maxima = logits.amax(-1)
    powers = logits.sub_(maxima[:, None]).exp_()
    log_norms = powers.sum(-1).log() + maxima
    if group is not None:
        log_norms, targets = _over_vocabulary(log_norms, targets, group)
    softmax = powers.mul_((maxima - log_norms).exp()[:, None])
    # in fp32 it must not be there any more when the next products need room
    grad = softmax.scatter_add_(1, ids, -here.float()[:, None]).to(weight.dtype)
    return log_norms - targets, grad


def _over_vocabulary(
    log_norms: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the ranks' log-sum-exp and target logits, in one message."""
    mine = torch.stack((log_norms, targets)).contiguous()
    both = mine.new_empty(dist.get_world_size(group) * 2, len(targets))
    dist.all_gather_into_tensor(both, mine, group=group)
    return both[0::2].logsumexp(0), both[1::2].sum(0)
