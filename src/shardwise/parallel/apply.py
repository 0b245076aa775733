"""The one function that applies a layout to a model, in one written order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from shardwise.config import Plan
from shardwise.models.build import Absent, decoder_layers
from shardwise.models.facts import ModelFacts
from shardwise.parallel.adapters import apply_adapters
from shardwise.parallel.context import apply_context
from shardwise.parallel.data import DTYPES, apply_fsdp
from shardwise.parallel.expert import apply_expert_parallel, experts_of
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Pipeline, Stage
from shardwise.parallel.recompute import apply_checkpointing
from shardwise.parallel.routing import Routing
from shardwise.parallel.sharded import Part, ShardedModel
from shardwise.parallel.tensor import apply_tensor_parallel
from shardwise.planner.stages import StageSpec, stages_of


def parallelize(
    build: Callable[[], PreTrainedModel],
    plan: Plan,
    facts: ModelFacts,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
) -> ShardedModel:
    """Shard a transformers model that lies on the meta device.

    Args:
        build: makes the whole model on the meta device (`models.build.build_on_meta`); called
            once for each stage of this rank. Its code is not changed.
        plan: `layout`, `precision`, `task` and `train` are used.
        facts: with the adapters that are trained (`models.read.facts_of_plan`), if any.
        dtype: of adapters at rest.

    Returns:
        This rank's parts. For training, the logits of a model that is one part are this rank's
        chunk of the vocabulary; for serving they are whole.
    """
    stages = stages_of(plan, facts)
    specs = [spec for spec in stages if spec.rank == mesh.rank("pp")]
    routing = _routing(facts, mesh)
    parts = tuple(_part(build(), spec, plan, facts, mesh, routing, dtype) for spec in specs)
    pipeline = None
    if plan.layout.pp > 1:
        pipeline = Pipeline(
            mesh=mesh,
            schedule=plan.train.pipeline_schedule,
            stages=[(part.spec, part.root) for part in parts],
            ranks=[spec.rank for spec in stages],
            hidden_size=facts.hidden_size,
            sequence_parts=plan.layout.sequence_parts,
            dtype=DTYPES[plan.precision.compute],
            routing=routing,
        )
    return ShardedModel(
        parts=parts,
        mesh=mesh,
        tied=facts.tied,
        embedding=facts.family.names.embedding,
        pipeline=pipeline,
        routing=routing,
        adapters=facts.adapters,
    )


def _routing(facts: ModelFacts, mesh: Mesh) -> Routing | None:
    if facts.balance_weight is None:
        return None
    return Routing(
        mesh=mesh,
        weight=facts.balance_weight,
        num_experts=facts.num_experts,
        num_chosen=facts.experts_per_token,
        num_layers=sum(kind.has_experts for kind in facts.layers),
    )


def _part(
    model: PreTrainedModel,
    spec: StageSpec,
    plan: Plan,
    facts: ModelFacts,
    mesh: Mesh,
    routing: Routing | None,
    dtype: torch.dtype,
) -> Part:
    """One stage. The order matters:
    1. pipeline: take out what other stages have, so that nothing more is done to it;
    2. adapters, as parameters of the modules that they belong to, so that all that follows treats
       them as it treats those;
    3. expert parallel, so that what follows finds experts that are already split;
    4. tensor parallel, while the modules are still plain and their rules can be read;
    5. context parallel and packed rows, which work on what attention sees of its heads;
    6. activation checkpointing, around layers that are already split;
    7. compilation, of what a layer has become;
    8. FSDP last, so that it shards what the others left and gathers it layer by layer.
    Weights are loaded afterwards, each rank reading only its own slices.
    """
    serving, layout = not plan.trains, plan.layout
    root, partial, sums = model, {}, None
    if layout.pp > 1:
        root = Stage(model, spec, sequence_parts=layout.sequence_parts, routing=routing)
    layers = [layer for layer in decoder_layers(model) if not isinstance(layer, Absent)]
    if facts.adapters is not None:
        apply_adapters(model, facts, dtype)
    experts = experts_of(layers) if layout.ep > 1 else []
    for module in experts:
        apply_expert_parallel(module, mesh)
    if layout.tp > 1:
        partial = apply_tensor_parallel(model, mesh, facts, gather_logits=serving)
    packed = plan.train.packing and not serving
    if layout.cp > 1 or packed:
        apply_context(model, mesh, packed=packed)
    if not serving:
        apply_checkpointing(model, layers, plan.train)
        if plan.train.compile:
            for layer in layers:
                layer.compile()
        sums = apply_fsdp(root, layers, experts, mesh, plan)
    return Part(model=model, root=root, spec=spec, partial=partial, sums=sums)
