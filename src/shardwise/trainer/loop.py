"""The training run of one rank, from the plan to the last checkpoint."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist

from shardwise import console
from shardwise.config import Plan
from shardwise.models.read import base_of
from shardwise.parallel.context import own_columns
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.sharded import ShardedModel
from shardwise.probe.process import peak_bytes
from shardwise.trainer.checkpoint import States, check_digests, load_optimizer
from shardwise.trainer.data.batches import Batch, micro_batches
from shardwise.trainer.data.order import Order, sequences_of
from shardwise.trainer.data.store import Rows, open_rows
from shardwise.trainer.measured import EVALUATIONS_FILE, MEASURED_FILE, METRICS_FILE, Measured
from shardwise.trainer.optim import learning_rate_at, make_optimizer
from shardwise.trainer.progress import Progress
from shardwise.trainer.requests import Requests
from shardwise.trainer.saver import Saver
from shardwise.trainer.state import (
    State,
    checkpoint_dir,
    complete_checkpoints,
    read_state,
    row_order,
)
from shardwise.trainer.step import StepResult, evaluate, train_step
from shardwise.weights.index import fingerprint
from shardwise.weights.load import load_model
from shardwise.weights.progress import Loading

TRAIN_ROWS, EVAL_ROWS, MODEL_FILES = "data/train", "data/eval", "model-files"
"""folders below the job's work folder, prepared before the ranks start"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank works with."""

    plan: Plan
    folder: Path
    """of the run: checkpoints and metrics"""
    work: Path
    """of the job: rows and the model's small files"""
    mesh: Mesh
    rows: Rows
    order: Order
    eval_rows: Rows | None
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    saver: Saver
    start: int
    """optimizer steps done before"""
    name: str | None
    """what tells the run from others"""
    base: str | None
    """fingerprint of what adapters are trained on"""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.order.num_steps

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return dist.get_rank() == 0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step and what it took."""

    result: StepResult
    num_tokens: int
    seconds: float


def run_train(plan: Plan, folder: Path, work: Path, mesh: Mesh) -> None:
    """Train by the plan on prepared rows; every rank runs this.

    Continues from the newest complete checkpoint of the run's folder, if there is one. The first
    rank writes metrics and what was measured; every rank writes its shards of the checkpoints.
    """
    run = _set_up(plan, folder, work, mesh)
    if run.is_first:
        for name in (METRICS_FILE, EVALUATIONS_FILE):
            _forget_after(folder / name, run.start)
    before = _evaluate(run, run.start)
    requests = Requests(mesh.device)
    with requests.listening(), run.saver:
        records, after = _run_steps(run, requests)
    done = run.start + len(records)
    _write_measured(run, records, before, after)
    run.saver.check_copied()
    if run.is_first and done < run.num_steps:
        console.out.print(f"stopped after step {done} of {run.num_steps}, as asked", style="bold")
    if run.is_first:
        console.out.print(f"checkpoint: {checkpoint_dir(folder, done)}")


def _set_up(plan: Plan, folder: Path, work: Path, mesh: Mesh) -> Run:
    """Load the model (or the newest checkpoint) and the rows."""
    checkpoints = complete_checkpoints(folder)
    if checkpoints:
        check_digests(checkpoints[-1])
    source = str(checkpoints[-1] / "model") if checkpoints else plan.model
    rows, eval_folder = open_rows(work / TRAIN_ROWS), work / EVAL_ROWS
    order = Order(lengths=rows.lengths, train=plan.train)
    start = read_state(checkpoints[-1]).step if checkpoints else 0
    if start and dist.get_rank() == 0:
        console.out.print(f"continuing after step {start} of {order.num_steps}")
    with Loading(mesh) as loading:
        begun = plan.model_copy(update={"model": source})
        sharded = load_model(begun, mesh, torch.float32, loading=loading)
        optimizer = make_optimizer(sharded, plan.train)
        if checkpoints:
            load_optimizer(checkpoints[-1], sharded, optimizer, loading)
    summary = loading.summary()
    if dist.get_rank() == 0:
        console.out.print(f"each rank has loaded its shards ({summary})")
    return Run(
        plan=plan,
        folder=folder,
        work=work,
        mesh=mesh,
        rows=rows,
        order=order,
        eval_rows=open_rows(eval_folder) if eval_folder.exists() else None,
        sharded=sharded,
        optimizer=optimizer,
        saver=Saver(plan, mesh, folder, work / MODEL_FILES),
        start=start,
        name=(read_state(checkpoints[-1]).run if checkpoints else None) or uuid4().hex,
        base=_base(plan) if dist.get_rank() == 0 else None,
    )


def _base(plan: Plan) -> str | None:
    if plan.task != "lora":
        return None
    return fingerprint(base_of(Path(plan.model)) or Path(plan.model))


def _run_steps(run: Run, requests: Requests) -> tuple[list[StepRecord], float | None]:
    """All steps that are left, or until a stop is asked for, with progress, metrics and
    checkpoints; also the last evaluation loss, if there are rows for one."""
    records, eval_loss = [], None
    with Progress(run.num_steps, run.start, enabled=run.is_first) as progress:
        for step in range(run.start, run.num_steps):
            record = _run_step(run, step)
            records.append(record)
            peak = peak_bytes(run.mesh.device)
            if run.is_first:
                _append(run.folder / METRICS_FILE, _metrics(run, step, record, peak))
            speed = record.num_tokens / record.seconds
            progress.update(step + 1, record.result.loss, speed, peak)
            asked = requests.agreed()
            if _is_save_step(run, step + 1) or asked.save or asked.stop:
                is_last = asked.stop or step + 1 == run.num_steps
                _save(run, step + 1, record.result.loss, is_last=is_last)
                is_cut = asked.stop and step + 1 < run.num_steps
                eval_loss = None if is_cut else _evaluate(run, step + 1)
                requests.saved()
            run.saver.poll()
            if asked.stop:
                break
    return records, eval_loss


def _run_step(run: Run, step: int) -> StepRecord:
    train, began = run.plan.train, time.perf_counter()
    sequences = run.order.of_step(step)
    rate = learning_rate_at(step, run.num_steps, train)
    # a pipeline's schedule is made for so many, also where an epoch's last step has fewer rows
    least = train.num_micro_batches(run.plan.layout) if run.plan.layout.pp > 1 else 1
    batches = _batches(run, run.rows, sequences, least)
    result = train_step(run.sharded, run.optimizer, batches, run.mesh, train, rate)
    num_tokens = sum(len(run.rows[row][0]) for rows in sequences for row in rows)
    seconds = time.perf_counter() - began
    return StepRecord(result=result, num_tokens=num_tokens, seconds=seconds)


def _save(run: Run, step: int, loss: float, *, is_last: bool) -> None:
    """Write a checkpoint: while training goes on, if it does and the plan has room for that."""
    began = time.perf_counter()
    order = row_order(run.plan, run.work / TRAIN_ROWS)
    states = States.of(run.sharded, run.optimizer)
    state = State(step=step, row_order=order, loss=loss, run=run.name, base=run.base)
    behind = run.plan.saves_behind and not is_last
    (run.saver.save_behind if behind else run.saver.save)(states, state)
    seconds = time.perf_counter() - began
    if run.is_first:
        how = "copied" if behind else "written"
        console.out.print(f"checkpoint of step {step} {how}, training paused for {seconds:.1f} s")


def _batches(
    run: Run, rows: Rows, sequences: Sequence[Sequence[int]], least: int = 1
) -> list[Batch]:
    return micro_batches(
        rows,
        sequences,
        packing=run.plan.train.packing,
        micro_batch=run.plan.train.micro_batch,
        data_rank=run.mesh.data_rank,
        num_data_ranks=run.plan.layout.num_data_ranks,
        multiple=run.plan.layout.sequence_multiple,
        same_shape=run.plan.layout.pp > 1,
        least=least,
        columns=own_columns(run.mesh),
        device=run.mesh.device,
    )


def _evaluate(run: Run, step: int) -> float | None:
    """The loss of the evaluation rows, printed and noted; None if there are none."""
    if run.eval_rows is None:
        return None
    if run.is_first:
        console.out.print(f"evaluating {len(run.eval_rows)} rows at step {step} ...")
    sequences = sequences_of(run.eval_rows.lengths, range(len(run.eval_rows)), run.plan.train)
    batches = _batches(run, run.eval_rows, sequences)
    loss = evaluate(run.sharded, batches, run.mesh)
    if run.is_first:
        console.out.print(f"evaluation loss at step {step}: {loss:.4f}", style="bold")
        _append(run.folder / EVALUATIONS_FILE, {"step": step, "eval_loss": loss})
    return loss


def _is_save_step(run: Run, step: int) -> bool:
    every = run.plan.train.save_every
    return step == run.num_steps or (every is not None and step % every == 0)


def _metrics(run: Run, step: int, record: StepRecord, peak: int) -> dict[str, float]:
    return {
        "step": step + 1,
        "loss": record.result.loss,
        "grad_norm": record.result.grad_norm,
        "learning_rate": learning_rate_at(step, run.num_steps, run.plan.train),
        "targets": record.result.num_targets,
        "tokens": record.num_tokens,
        "step_s": round(record.seconds, 4),
        "peak_bytes": peak,
    }


def _write_measured(
    run: Run, records: Sequence[StepRecord], before: float | None, after: float | None
) -> None:
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes(run.mesh.device))
    if not run.is_first or not records:
        return
    seconds = [record.seconds for record in records]
    done = run.start + len(records)
    measured = Measured(
        peak_bytes=peaks,
        step_s=statistics.median(seconds[1:]) if len(seconds) > 1 else None,
        tokens_per_s=sum(record.num_tokens for record in records) / sum(seconds),
        steps=done,
        train_loss=records[-1].result.loss,
        eval_loss_before=before,
        eval_loss_after=after,
    )
    (run.folder / MEASURED_FILE).write_text(measured.model_dump_json(indent=2), encoding="utf-8")


def _forget_after(path: Path, step: int) -> None:
    """Drop the records of steps that will be run again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _append(path: Path, record: Mapping[str, float]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
