"""The loss function of one rank against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.trainer.loss import IGNORE, cross_entropy_sum, shift_labels


def reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 700])
def test_sum_and_gradient_over_chunks(num_tokens: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, num_tokens, 33) * 5).requires_grad_()
    labels = torch.randint(0, 33, (1, num_tokens))
    labels[:, ::3] = IGNORE
    ours = cross_entropy_sum(logits, labels, vocab=range(33), group=None)
    (grad,) = torch.autograd.grad(ours * 0.25, logits)
    theirs = reference(logits, labels)
    (expected,) = torch.autograd.grad(theirs * 0.25, logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grad, expected)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([[1]]), vocab=range(3), group=None)
    assert loss.item() == pytest.approx(2e4)
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.tolist() == [[[1.0, -1.0, 0.0]]]


def test_nothing_to_train_is_zero_and_not_nan() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.full((2, 3), IGNORE)
    loss = cross_entropy_sum(logits, labels, vocab=range(5), group=None)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0
    assert not grad.any()


def test_bf16_logits_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 64, 1000).bfloat16().requires_grad_()
    labels = torch.randint(0, 1000, (1, 64))
    loss = cross_entropy_sum(logits, labels, vocab=range(1000), group=None)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference(logits, labels))
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.dtype == torch.bfloat16


def test_labels_are_shifted_within_a_row() -> None:
    labels = torch.tensor([[IGNORE, 1, 2], [3, 4, 5]])
    assert shift_labels(labels).tolist() == [[1, 2, IGNORE], [4, 5, IGNORE]]
