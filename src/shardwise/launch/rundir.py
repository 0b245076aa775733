"""The directory of a run: never another one's, never two commands at once, resumed as it was."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.config import PLAN_FILE, Plan, load_plan
from shardwise.errors import UserError
from shardwise.launch.job import WORK_DIR
from shardwise.models.adapters import ADAPTER_CONFIG, read_adapters, write_adapters
from shardwise.models.facts import ModelFacts
from shardwise.models.read import base_of, facts_of_plan
from shardwise.trainer.measured import EVALUATIONS_FILE, METRICS_FILE
from shardwise.trainer.state import (
    CHECKPOINTS_DIR,
    checkpoint_bytes,
    complete_checkpoints,
    partial_checkpoints,
    read_state,
    row_order,
    why_incomplete,
)
from shardwise.weights.index import fingerprint

LOCK_FILE = "lock"


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a run's directory for this process alone; creates it.

    Raises:
        UserError: it holds something else, another command is working in it, or it cannot be
            written.
    """
    work = run_dir / WORK_DIR
    is_ours = (work / LOCK_FILE).exists()
    if run_dir.exists() and not is_ours and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"{run_dir} is not empty and is no Shardwise run; give another --out.")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / LOCK_FILE).open("a")
    except OSError as error:
        raise UserError(f"cannot write to {run_dir}: {error}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another command is training in {run_dir}; wait for it, or give another --out."
            ) from None
        yield


def check_resume(run_dir: Path, *, resume: bool) -> None:
    """Refuse to start over in a run that has checkpoints, or to resume one that has none."""
    checkpoints = complete_checkpoints(run_dir)
    if checkpoints and not resume:
        raise UserError(
            f"{run_dir} already holds {checkpoints[-1].name}; continue it with --resume, or give "
            "another --out."
        )
    broken = next(iter(sorted((run_dir / CHECKPOINTS_DIR).glob("step-*/state.json"))), None)
    if not resume and broken is not None:
        raise UserError(
            f"{broken.parent} is not complete: {why_incomplete(broken.parent)}; mend it, or give "
            "another --out."
        )
    if resume and not checkpoints:
        raise UserError(f"{run_dir} holds no complete checkpoint to resume from.")


def check_same_task(run_dir: Path, plan: Plan) -> None:
    """Refuse to resume to train something else: another task, or other adapters."""
    checkpoints = complete_checkpoints(run_dir)
    if not checkpoints:
        return
    then = load_plan(checkpoints[-1] / PLAN_FILE).task
    if then != plan.task:
        raise UserError(
            f"cannot resume {checkpoints[-1]}: task was {then} and is now {plan.task}; give the "
            "same task, or another --out."
        )
    if plan.task == "lora":
        _check_base(checkpoints[-1], plan)
    try:
        facts_of_plan(plan.model_copy(update={"model": str(checkpoints[-1] / "model")}))
    except UserError as error:
        raise UserError(f"cannot resume {checkpoints[-1]}: {error}") from None


def _check_base(checkpoint: Path, plan: Plan) -> None:
    """Refuse other weights below the adapters than those they were trained on; the same ones at
    another place are noted in the checkpoint."""
    base = base_of(Path(plan.model)) or Path(plan.model)
    then = read_state(checkpoint).base
    if then is not None and then != fingerprint(base):
        raise UserError(
            f"cannot resume {checkpoint}: {base} does not hold the weights that its adapters were "
            "trained on; give the directory that does with --set model=DIR."
        )
    lora = read_adapters(checkpoint / "model")
    write_adapters(checkpoint / "model", lora, base)


def as_resumed(run_dir: Path, plan: Plan) -> Plan:
    """A plan with the adapters of the run that it continues, unless it says other things of them
    (which is refused)."""
    checkpoints = complete_checkpoints(run_dir)
    if not checkpoints or plan.task != "lora":
        return plan
    model = checkpoints[-1] / "model"
    if not (model / ADAPTER_CONFIG).exists():
        return plan
    lora = read_adapters(model)
    for key in plan.lora.model_fields_set if plan.lora is not None else ():
        said, then = getattr(plan.lora, key), getattr(lora, key)
        if said != then and not (key == "targets" and set(said or then) == set(then)):
            return plan
    return plan.model_copy(update={"lora": lora})


def check_same_rows(run_dir: Path, plan: Plan, rows_folder: Path, num_steps: int) -> None:
    """Refuse to resume on other rows, in another order, or past the end.

    Raises:
        UserError: naming the value in the checkpoint and the one given now.
    """
    checkpoints = complete_checkpoints(run_dir)
    if not checkpoints:
        return
    state = read_state(checkpoints[-1])
    then, now = state.row_order, row_order(plan, rows_folder)
    for name, value in then.model_dump().items():
        if getattr(now, name) != value:
            raise UserError(
                f"cannot resume {checkpoints[-1]}: {name} was {value} and is now "
                f"{getattr(now, name)}; give the same data and settings."
            )
    if state.step >= num_steps:
        raise UserError(
            f"{run_dir} is already at step {state.step} of {num_steps}; raise train.max_steps or "
            "train.epochs to train on."
        )


def tidy(run_dir: Path, facts: ModelFacts, *, resume: bool) -> None:
    """Remove what an interrupted command has left, and make sure that a checkpoint has room.

    Raises:
        UserError: the disk has less room than one checkpoint needs.
    """
    for left in partial_checkpoints(run_dir):
        shutil.rmtree(left, ignore_errors=True)
    if not resume:
        for name in (METRICS_FILE, EVALUATIONS_FILE):
            (run_dir / name).unlink(missing_ok=True)
    free, need = shutil.disk_usage(run_dir).free, checkpoint_bytes(facts)
    if free < need:
        raise UserError(
            f"the disk of {run_dir} has {free / 2**30:.2f} GiB left, one checkpoint needs "
            f"{need / 2**30:.2f} GiB; make room, or give another --out."
        )
