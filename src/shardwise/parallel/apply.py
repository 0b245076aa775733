"""The one function that applies a layout to a model, in one written order."""

from __future__ import annotations

from torch import nn

from shardwise.config import Plan
from shardwise.parallel.data import apply_fsdp
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor import apply_tensor_parallel


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
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
    if plan.layout.tp > 1:
        apply_tensor_parallel(model, mesh, gather_logits=serving)
    if serving:
        return model
    if plan.train.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_fsdp(model, mesh, plan.precision)
    return model
