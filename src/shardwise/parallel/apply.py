"""The one function that applies a layout to a model, in one written order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from shardwise.config import Plan
from shardwise.models.facts import ModelFacts
from shardwise.parallel.data import apply_fsdp
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor import apply_tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """A transformers model as this rank holds it, and what the optimizer step must know of it."""

    model: PreTrainedModel
    partial: Mapping[str, str]
    """parameter name -> axis over which its gradient is still to be summed after the backward
    pass, because each rank of the axis has seen only a part of its use"""


def parallelize(model: PreTrainedModel, plan: Plan, facts: ModelFacts, mesh: Mesh) -> ShardedModel:
    """Shard a transformers model that lies on the meta device, in place.

    The order matters:
      1. tensor parallel, while the modules are still plain and their rules can be read;
      2. activation checkpointing, around layers that are already split;
      3. FSDP last, so that it shards what the others left and gathers it layer by layer.
    Weights are loaded afterwards, each rank reading only its own slices.

    Args:
        model: as `models.build.build_on_meta` returns it; its code is not changed.
        plan: `layout`, `precision`, `task` and `train.checkpointing` are used.

    Returns:
        The same model. For training its logits are this rank's chunk of the vocabulary; for
        serving they are whole.
    """
    serving = plan.task == "serve"
    partial: Mapping[str, str] = {}
    if plan.layout.tp > 1:
        partial = apply_tensor_parallel(
            model, mesh, num_kv_heads=facts.num_kv_heads, gather_logits=serving
        )
    if not serving:
        if plan.train.checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        apply_fsdp(model, mesh, plan.precision)
    return ShardedModel(model=model, partial=partial)
