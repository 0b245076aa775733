"""The loss function of one rank against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.planner.memory import LOSS_CHUNK_TOKENS
from shardwise.trainer.loss import IGNORE, head_loss_sum, shift_labels


def inputs(num_tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The head's input, its weight and labels of which every third is not trained."""
    torch.manual_seed(0)
    hidden = torch.randn(1, num_tokens, 16).requires_grad_()
    weight = torch.randn(vocab, 16).requires_grad_()
    labels = torch.randint(0, vocab, (1, num_tokens))
    labels[:, 1::3] = IGNORE
    return hidden, weight, labels


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return head_loss_sum(hidden, weight, labels, vocab=range(len(weight)), group=None)


def reference(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("num_tokens", [1, 2, 383, 384, 385, 1000])
def test_sum_and_gradients_over_chunks(num_tokens: int) -> None:
    hidden, weight, labels = inputs(num_tokens, 33)
    loss, expected = ours(hidden, weight, labels), reference(hidden, weight, labels)
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(loss * 0.25, (hidden, weight))
    for grad, want in zip(got, torch.autograd.grad(expected * 0.25, (hidden, weight)), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[[1e4]]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    loss = ours(hidden, weight, torch.tensor([[1]]))
    assert loss.item() == pytest.approx(2e4)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad.tolist() == [[[2.0]]]


def test_nothing_to_train_is_zero_and_not_nan() -> None:
    hidden, weight, labels = inputs(6, 5)
    loss = ours(hidden, weight, torch.full_like(labels, IGNORE))
    assert loss.item() == 0.0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert not grad.any()


def test_logits_never_exist_whole() -> None:
    """No tensor of the loss or its gradient has a row of logits for more than a chunk of tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        num_rows = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == 997:
                self.num_rows = max(self.num_rows, out.shape[0])
            return out

    hidden, weight, labels = inputs(2000, 997)
    with Largest() as largest:
        ours(hidden, weight, labels).backward()
    assert 0 < largest.num_rows <= LOSS_CHUNK_TOKENS


def test_without_gradients_none_is_made() -> None:
    hidden, weight, labels = inputs(300, 33)
    with torch.no_grad():
        loss = ours(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference(hidden, weight, labels).detach())


def test_bf16_logits_and_gradients_are_summed_in_fp32() -> None:
    """The loss and the weight's gradient over many chunks are as exact as those of one product."""
    hidden, weight, labels = inputs(20_000, 50)
    half_hidden, half_weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
    whole_weight = half_weight.float().requires_grad_()
    (exact,) = torch.autograd.grad(
        reference(half_hidden.float(), whole_weight, labels), whole_weight
    )
    half_weight.requires_grad_()
    loss, expected = (fn(half_hidden, half_weight, labels) for fn in (ours, reference))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, half_weight)
    (of_one_product,) = torch.autograd.grad(expected, half_weight)
    assert grad.dtype == torch.bfloat16
    assert (grad.float() - exact).norm() < 1.5 * (of_one_product.float() - exact).norm()


def test_labels_are_shifted_within_a_row() -> None:
    labels = torch.tensor([[IGNORE, 1, 2], [3, 4, 5]])
    assert shift_labels(labels).tolist() == [[1, 2, IGNORE], [4, 5, IGNORE]]
