"""One optimizer step, and one pass of evaluation, by the numerics contract.

The loss is (sum of cross-entropy over all trained tokens of the step, over all ranks and
micro-batches) / (their number), and the number is known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import Train
from shardwise.errors import ShardwiseError
from shardwise.parallel.data import begin_micro_batch, let_go, sum_over_replicas
from shardwise.parallel.grads import clip, global_norm, local_part
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import LossFunction, Output
from shardwise.parallel.replicas import check_no_gradients, check_replicas
from shardwise.parallel.routing import Routing
from shardwise.parallel.sharded import ShardedModel
from shardwise.parallel.tensor import region_of, vocab_range
from shardwise.trainer.balance import balance_loss_sum
from shardwise.trainer.data.batches import Batch, num_targets
from shardwise.trainer.loss import head_loss_sum


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did; the same numbers on every rank."""

    loss: float
    """mean cross-entropy of the trained tokens, in nats: the number that was differentiated"""
    grad_norm: float
    """global norm before clipping: the number that was clipped by"""
    num_targets: int


def train_step(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    mesh: Mesh,
    train: Train,
    learning_rate: float,
) -> StepResult:
    """Accumulate gradients over the micro-batches, clip by the global norm, update.

    Raises:
        ShardwiseError: the loss or the norm is not finite; nothing has been updated then.
    """
    total_targets = _count(batches, mesh)
    optimizer.zero_grad()
    if train.check_replicas:
        check_no_gradients(sharded)
    loss = _accumulate(sharded, batches, max(1, total_targets))
    sharded.finish_gradients()
    params = [param for _, param in sharded.named_parameters()]
    counted = [param for _, param in sharded.named_parameters(copies=False)]
    norm = global_norm(counted, mesh)
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise ShardwiseError(
            f"the loss is {loss.item()} and the gradient norm {norm.item()}; the weights were not "
            "updated. Lower train.learning_rate or look at the rows of this step."
        )
    if train.clip_norm is not None:
        clip(params, norm, train.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    if train.check_replicas:
        check_replicas(sharded)
    return StepResult(loss=loss.item(), grad_norm=norm.item(), num_targets=total_targets)


def _accumulate(sharded: ShardedModel, batches: Sequence[Batch], total: int) -> torch.Tensor:
    """Forward and backward of every micro-batch; the step's loss, equal on every rank."""
    mesh = sharded.mesh
    if sharded.pipeline is not None:
        run = sharded.pipeline.run
        loss = _run_pipeline(sharded, run, batches, total, sharded.routing)
    else:
        (part,) = sharded.parts
        loss = torch.zeros((), device=mesh.device)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            begin_micro_batch(part, mesh.layout, is_first=index == 0, is_last=is_last)
            one = _batch_loss(sharded, batch) / total
            one.backward()
            loss += one.detach()
        if mesh.layout.sums_by_itself:
            sum_over_replicas(part.root, mesh)
    return mesh.sum_over(loss, mesh.data_axes)


@torch.no_grad()
def evaluate(sharded: ShardedModel, batches: Sequence[Batch], mesh: Mesh) -> float:
    """Mean cross-entropy of all trained tokens of the given rows, in nats."""
    sharded.train(False)
    total = max(1, _count(batches, mesh))
    loss = torch.zeros((), device=mesh.device)
    if sharded.pipeline is not None:
        at_once = 2 * len(sharded.pipeline.ranks)  # enough to keep every stage busy
        for begin in range(0, len(batches), at_once):
            some = batches[begin : begin + at_once]
            loss += _run_pipeline(sharded, sharded.pipeline.run_forward, some, total)
    else:
        for batch in batches:
            hidden = _run_body(sharded.model, batch).logits
            loss += head_loss(hidden, _head(sharded.model), batch.targets, mesh) / total
    sharded.train()
    for part in sharded.parts:
        let_go(part.root)
    return mesh.sum_over(loss, mesh.data_axes).item()


def _run_pipeline(
    sharded: ShardedModel,
    run: Callable[
        [torch.Tensor, Mapping[str, torch.Tensor], torch.Tensor, LossFunction, int], torch.Tensor
    ],
    batches: Sequence[Batch],
    total: int,
    routing: Routing | None = None,
) -> torch.Tensor:
    """All micro-batches through all stages; the loss of this rank's rows, on every stage.

    Args:
        routing: where the balance loss is a part of it.
    """
    mesh, last = sharded.mesh, sharded.parts[-1]  # if this rank has the last stage, it is here
    twice = sharded.pipeline is not None and sharded.pipeline.splits_backward
    fields = [torch.cat(tensors) for tensors in zip(*map(_given, batches), strict=True)]
    ids, targets, real, *positions = fields
    inputs = dict(zip(("position_ids",), positions, strict=False))
    if routing is not None:
        inputs["real"] = real
        targets = torch.stack(fields[1:], dim=1)  # as long, what the balance loss needs of rows

    def loss_function(output: Output, targets: torch.Tensor) -> torch.Tensor:
        if routing is None or not isinstance(output, tuple):
            return head_loss(output, _head(last.model), targets, mesh, twice=twice) / total
        hidden, tally = output
        targets, real, *positions = targets.unbind(1)
        loss = head_loss(hidden, _head(last.model), targets, mesh, twice=twice)
        where = positions[0] if positions else None
        balance = balance_loss_sum(tally, targets, real.bool(), where, routing)
        return (loss + routing.weight * balance) / total

    return mesh.sum_over(run(ids, inputs, targets, loss_function, len(batches)), ["pp"])


def _given(batch: Batch) -> list[torch.Tensor]:
    return [tensor for tensor in batch if tensor is not None]


def _batch_loss(sharded: ShardedModel, batch: Batch) -> torch.Tensor:
    """What a micro-batch adds to the loss (fp32 scalar): cross-entropy over its trained tokens,
    and the balance of its experts."""
    output = _run_body(sharded.model, batch)
    loss = head_loss(output.logits, _head(sharded.model), batch.targets, sharded.mesh)
    routing = sharded.routing
    if routing is None:
        return loss
    tally = routing.tally(output.router_logits, batch.real, batch.positions)
    balance = balance_loss_sum(tally, batch.targets, batch.real, batch.positions, routing)
    return loss + routing.weight * balance


def _head(model: PreTrainedModel) -> nn.Module:
    return model.get_output_embeddings()


def head_loss(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, mesh: Mesh, *, twice: bool = False
) -> torch.Tensor:
    """Sum of the cross-entropy over the trained tokens of some rows (fp32 scalar).

    Args:
        hidden: [rows, tokens, hidden], what the model gives to its head.
        targets: [rows, tokens], for each position the token that should come next.
        twice: whether the backward pass is run once for inputs and once more for weights.
    """
    group = mesh.group("tp") if mesh.size("tp") > 1 else None
    if group is not None:
        hidden = region_of(mesh).enter(hidden)
    return head_loss_sum(
        hidden,
        local_part(head.weight),
        targets,
        vocab=vocab_range(head.weight.shape[0], mesh.group("tp")),
        group=group,
        twice=twice,
    )


def _run_body(model: PreTrainedModel, batch: Batch) -> Any:
    """The model's output with, as `logits`, what it gives to its head: the logits are made with
    the loss, a few at a time."""
    head = _head(model)
    forward = head.forward
    head.forward = lambda hidden: hidden
    try:
        return model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
    finally:
        head.forward = forward


def _count(batches: Sequence[Batch], mesh: Mesh) -> int:
    counted = torch.tensor(num_targets(batches), device=mesh.device)
    return int(mesh.sum_over(counted, mesh.data_axes).item())
