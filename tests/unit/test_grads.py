"""The norm of gradients that are longer than those of the tiny models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.parallel.grads import global_norm


def test_the_norm_of_a_long_gradient_is_exact() -> None:
    """17 M values in pieces and a rest, against float64; and a short one beside it."""
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), sum_over=lambda value, axes: value)
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.empty(n)) for n in (2**24 + 40_000, 3)]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    want = sum(float(p.grad.double().pow(2).sum()) for p in params if p.grad is not None) ** 0.5
    assert global_norm(params, mesh).item() == pytest.approx(want, rel=1e-6)
