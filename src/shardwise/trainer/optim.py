"""AdamW over sharded parameters, and the learning rate of each step."""

from __future__ import annotations

import math

import torch

from shardwise.config import Train
from shardwise.parallel.sharded import ShardedModel


def make_optimizer(sharded: ShardedModel, train: Train) -> torch.optim.AdamW:
    """AdamW with fp32 moments on every rank's own shard; 1-D parameters do not decay.

    The fused kernel updates in place: it needs no temporary copy of the shard.
    """
    params = [param for _, param in sharded.named_parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )


def learning_rate_at(step: int, num_steps: int, train: Train) -> float:
    """Learning rate of optimizer step `step` (from 0) of `num_steps`.

    Linear warm-up over `warmup_steps`, then the schedule; it would reach 0 at step `num_steps`.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, num_steps - train.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[train.schedule]
    return train.learning_rate * factor
