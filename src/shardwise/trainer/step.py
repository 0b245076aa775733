"""One optimizer step, and one pass of evaluation, by the numerics contract.

The loss is (sum of cross-entropy over all trained tokens of the step, over all ranks and
micro-batches) / (their number), and the number is known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import Train
from shardwise.errors import ShardwiseError
from shardwise.parallel.apply import ShardedModel
from shardwise.parallel.data import begin_micro_batch, let_go
from shardwise.parallel.grads import clip, global_norm, local_part, sum_partial
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor import region_of, vocab_range
from shardwise.trainer.data.batches import Batch, num_targets
from shardwise.trainer.loss import head_loss_sum, shift_labels


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
    model, total_targets = sharded.model, _count(batches, mesh)
    loss = torch.zeros((), device=mesh.device)
    optimizer.zero_grad()
    for number, batch in enumerate(batches, start=1):
        begin_micro_batch(model, mesh.layout, is_last=number == len(batches))
        part = batch_loss_sum(model, batch, mesh) / max(1, total_targets)
        part.backward()
        loss += part.detach()
    mesh.sum_over(loss, mesh.data_axes)
    sum_partial(model, sharded.partial, mesh)
    params = list(model.parameters())
    norm = global_norm(params, mesh)
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
    return StepResult(loss=loss.item(), grad_norm=norm.item(), num_targets=total_targets)


@torch.no_grad()
def evaluate(sharded: ShardedModel, batches: Sequence[Batch], mesh: Mesh) -> float:
    """Mean cross-entropy of all trained tokens of the given rows, in nats."""
    model = sharded.model.eval()
    total_targets = _count(batches, mesh)
    loss = torch.zeros((), device=mesh.device)
    for batch in batches:
        loss += batch_loss_sum(model, batch, mesh)
    model.train()
    let_go(model)
    return mesh.sum_over(loss, mesh.data_axes).item() / max(1, total_targets)


def batch_loss_sum(model: PreTrainedModel, batch: Batch, mesh: Mesh) -> torch.Tensor:
    """Sum of the cross-entropy over a micro-batch's trained tokens (fp32 scalar)."""
    ids, labels = batch
    head = model.get_output_embeddings()
    hidden = head_input(model, head, ids)
    group = mesh.group("tp") if mesh.size("tp") > 1 else None
    if group is not None:
        hidden = region_of(mesh).enter(hidden)
    vocab = vocab_range(model.config.vocab_size, mesh.group("tp"))
    weight = local_part(head.weight)
    return head_loss_sum(hidden, weight, shift_labels(labels), vocab=vocab, group=group)


def head_input(model: PreTrainedModel, head: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What the model gives to its head: the logits are made with the loss, a few at a time."""
    forward = head.forward
    head.forward = lambda hidden: hidden
    try:
        return model(input_ids=ids, use_cache=False).logits
    finally:
        head.forward = forward


def _count(batches: Sequence[Batch], mesh: Mesh) -> int:
    counted = torch.tensor(num_targets(batches), device=mesh.device)
    return int(mesh.sum_over(counted, mesh.data_axes).item())
