"""One optimizer step, and one pass of evaluation, by the numerics contract.

The loss is (sum of cross-entropy over all trained tokens of the step, over all ranks and
micro-batches) / (their number), and the number is known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from shardwise.parallel.pipeline import LossFunction
from shardwise.parallel.replicas import check_no_gradients, check_replicas
from shardwise.parallel.sharded import ShardedModel
from shardwise.parallel.tensor import region_of, vocab_range
from shardwise.probe.process import give_back_freed_blocks
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
        loss = _run_pipeline(sharded, sharded.pipeline.run, batches, total)
    else:
        (part,) = sharded.parts
        loss = torch.zeros((), device=mesh.device)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            begin_micro_batch(part, mesh.layout, is_first=index == 0, is_last=is_last)
            own, whole = _batch_losses(part.model, batch, mesh)
            (own / total).backward()
            loss += whole / total
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
            loss += _batch_loss_sum(sharded.model, batch, mesh) / total
    sharded.train()
    for part in sharded.parts:
        let_go(part.root)
    return mesh.sum_over(loss, mesh.data_axes).item()


def _run_pipeline(
    sharded: ShardedModel,
    run: Callable[[torch.Tensor, torch.Tensor, LossFunction, int], torch.Tensor],
    batches: Sequence[Batch],
    total: int,
) -> torch.Tensor:
    """All micro-batches through all stages; the loss of this rank's rows, on every stage."""
    mesh, last = sharded.mesh, sharded.parts[-1]  # if this rank has the last stage, it is here
    twice = sharded.pipeline is not None and sharded.pipeline.splits_backward
    ids = torch.cat([batch.ids for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])

    def loss_function(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head_loss(hidden, _head(last.model), targets, mesh, twice=twice) / total

    return mesh.sum_over(run(ids, targets, loss_function, len(batches)), ["pp"])


def _batch_loss_sum(model: PreTrainedModel, batch: Batch, mesh: Mesh) -> torch.Tensor:
    """Sum of the cross-entropy over a micro-batch's trained tokens (fp32 scalar)."""
    return head_loss(_run_body(model, batch.ids).logits, _head(model), batch.targets, mesh)


def _batch_losses(
    model: PreTrainedModel, batch: Batch, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is differentiated, on this rank, and its part of the whole loss (fp32 scalars).

    They differ where the ranks of `tp` each have a part of the router's balance loss.
    """
    output = _run_body(model, batch.ids)
    loss = head_loss(output.logits, _head(model), batch.targets, mesh)
    if not getattr(model.config, "output_router_logits", False):
        return loss, loss.detach()
    chosen, weight = model.config.num_experts_per_tok, model.config.router_aux_loss_coef
    balance = balance_loss_sum(output.router_logits, batch, mesh, num_chosen=chosen)
    whole = balance.detach().clone()
    if mesh.layout.sequence_parallel:
        mesh.sum_over(whole, ["tp"])
    return loss + weight * balance, loss.detach() + weight * whole


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
    if mesh.device.type == "cpu":
        give_back_freed_blocks()  # a step's peak is here, so nothing may lie unused
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


def _run_body(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    """The model's output with, as `logits`, what it gives to its head: the logits are made with
    the loss, a few at a time."""
    head = _head(model)
    forward = head.forward
    head.forward = lambda hidden: hidden
    try:
        return model(input_ids=ids, use_cache=False)
    finally:
        head.forward = forward


def _count(batches: Sequence[Batch], mesh: Mesh) -> int:
    counted = torch.tensor(num_targets(batches), device=mesh.device)
    return int(mesh.sum_over(counted, mesh.data_axes).item())
