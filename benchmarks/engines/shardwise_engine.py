"""Shardwise itself, through the functions that its own training loop calls."""

from __future__ import annotations

import torch

from benchmarks import workload
from benchmarks.meter import Clock, Meter
from benchmarks.run import Run
from shardwise.config import Layout, Plan, Precision, Train
from shardwise.parallel.mesh import build_mesh
from shardwise.trainer import step as step_module
from shardwise.trainer.data.batches import Batch
from shardwise.trainer.loss import shift_labels
from shardwise.trainer.optim import make_optimizer
from shardwise.weights.load import load_model


def train(run: Run, meter: Meter) -> None:
    """ZeRO 1 to 3 over all ranks, or replicas."""
    plan = _plan(run)
    mesh = build_mesh(plan.layout, run.device)
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, plan.train)
    _time_parts(meter.clock, optimizer)
    for ids in run.rows():
        meter.begin()
        result = step_module.train_step(
            sharded,
            optimizer,
            [Batch(ids, shift_labels(ids), torch.ones_like(ids, dtype=torch.bool))],
            mesh,
            plan.train,
            plan.train.learning_rate,
        )
        meter.end(result.loss)


def _plan(run: Run) -> Plan:
    beta1, beta2 = workload.BETAS
    num_ranks = workload.NUM_RANKS
    settings = Train(
        seq_len=run.seq_len,
        global_batch=num_ranks,
        learning_rate=workload.LEARNING_RATE,
        weight_decay=workload.WEIGHT_DECAY,
        beta1=beta1,
        beta2=beta2,
        eps=workload.EPS,
        clip_norm=workload.CLIP_NORM,
    )
    layout = {"fsdp": num_ranks, "zero": run.stage} if run.stage else {"dp": num_ranks}
    return Plan(
        model=run.model,
        task="full",
        layout=Layout(**layout),
        precision=Precision(compute=run.dtype),
        train=settings,
    )


def _time_parts(clock: Clock, optimizer: torch.optim.Optimizer) -> None:
    """`train_step` is one call: put the clock around the functions that it calls."""
    step_module._batch_loss = clock.timed("forward", step_module._batch_loss)
    torch.Tensor.backward = clock.timed("backward", torch.Tensor.backward)
    step_module.global_norm = clock.timed("optimizer", step_module.global_norm)
    step_module.clip = clock.timed("optimizer", step_module.clip)
    optimizer.step = clock.timed("optimizer", optimizer.step)
