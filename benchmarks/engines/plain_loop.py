"""The training loop that the plain PyTorch engines share."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from benchmarks import workload
from benchmarks.meter import Meter
from benchmarks.run import Run


def train_plainly(
    run: Run,
    meter: Meter,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: AbstractContextManager[object],
) -> None:
    """Forward, backward, clip, update.

    Each rank's loss is the mean over its tokens, and gradients are averaged over ranks. Rows are
    equally long, so that is the mean over all tokens.

    Args:
        precision: entered for each forward pass.
    """
    clock = meter.clock
    params = list(model.parameters())
    for ids in run.rows():
        meter.begin()
        with clock.section("forward"), precision:
            loss = model(input_ids=ids, labels=ids).loss
        with clock.section("backward"):
            loss.backward()
        with clock.section("optimizer"):
            nn.utils.clip_grad_norm_(params, workload.CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        meter.end(loss.detach())
