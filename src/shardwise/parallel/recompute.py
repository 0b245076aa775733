"""Activation checkpointing: what a layer keeps for its backward pass, and what it makes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from shardwise.config import Train

_KEPT_OPERATIONS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""what "selective" does not do twice: matrix products and attention"""


def apply_checkpointing(model: PreTrainedModel, layers: Sequence[nn.Module], train: Train) -> None:
    """Let layers make their activations again in the backward pass.

    Args:
        layers: those that the model has here.
        train: its `checkpointing` and `checkpoint_every`.
    """
    if train.checkpointing == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if train.checkpointing == "selective":
        options["context_fn"] = _contexts
    model.activation_checkpointing_enable(options)
    # transformers lets frozen embeddings have a gradient, which only reentrant recomputation needs
    model.disable_input_require_grads()
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % train.checkpoint_every == 0


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    if operation in _KEPT_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
