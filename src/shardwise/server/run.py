"""The serving run of one rank: load, then answer (the first) or follow (the others)."""

from __future__ import annotations

import signal

import torch.distributed as dist

from shardwise import console
from shardwise.config import Plan
from shardwise.models.hub import name_of
from shardwise.models.read import read_facts
from shardwise.parallel.data import DTYPES
from shardwise.parallel.mesh import Mesh
from shardwise.server.api import run_api
from shardwise.server.engine import Engine, follow
from shardwise.weights.load import load_model
from shardwise.weights.progress import Loading


def run_serve(plan: Plan, mesh: Mesh) -> None:
    """Load this rank's part of the model and serve until told to stop."""
    with Loading(mesh) as loading:
        at_rest = DTYPES[plan.precision.compute]
        model = load_model(plan, mesh, at_rest, loading=loading).model.eval()
    summary = loading.summary()
    context = plan.serve.context or read_facts(plan.model).max_positions
    if dist.get_rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank says when it is over
        follow(model, mesh)
        return
    console.out.print(f"each rank has loaded its shards ({summary})")
    engine = Engine(model, mesh, plan)
    console.out.print(
        f"serving {name_of(plan.model)} on http://{plan.serve.host}:{plan.serve.port}/v1 "
        f"({plan.layout}), context {context} tokens"
    )
    engine.start()
    try:
        run_api(engine, plan, context)
    finally:
        engine.stop()
    if engine.failure is not None:
        raise engine.failure
