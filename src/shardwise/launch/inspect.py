"""What a path is, and whether it is whole: a model, a checkpoint, a run, a plan. No torch.

Headers, sizes of files and small files are read; weights are not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.config import PLAN_FILE, Plan, load_plan
from shardwise.errors import UserError
from shardwise.launch.found import Found
from shardwise.launch.inspect_model import adapters_at, model_at, sizes_at
from shardwise.launch.job import WORK_DIR
from shardwise.launch.rundir import LOCK_FILE
from shardwise.models.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from shardwise.models.gguf import is_gguf
from shardwise.models.hub import CONFIG_FILE, read_config
from shardwise.models.lookup import local_model
from shardwise.parsing import parse
from shardwise.trainer.data.order import Order
from shardwise.trainer.measured import MEASURED_FILE, METRICS_FILE, Measured
from shardwise.trainer.state import (
    CHECKPOINTS_DIR,
    MODEL_DIR,
    OPTIMIZER_DIR,
    State,
    checkpoints_of,
    defects,
    is_checkpoint,
    partial_checkpoints,
    read_state,
    why_incomplete,
)
from shardwise.weights.index import INDEX_FILE

_EXPECTED = (
    "expected a directory of a model or of adapters, a run, a checkpoint, a plan file, "
    f"{CONFIG_FILE}, or a GGUF file"
)
_DIGITS = 12
"""of a digest: enough to tell two apart"""


def look_at(path: Path) -> Found:
    """Find out what a path is, and what it lacks.

    Raises:
        UserError: there is nothing at the path, or nothing that Shardwise knows.
    """
    if not path.exists():
        raise UserError(f"no file or directory {str(path)!r}; {_EXPECTED}.")
    found = _look_into(path) if path.is_dir() else _look_at_file(path)
    problems = [text.removeprefix(f"{path}: ").removeprefix(f"{path}/") for text in found.problems]
    return replace(found, path=path, problems=tuple(dict.fromkeys(problems)))


def _look_into(path: Path) -> Found:
    """A directory; what is most special is asked first."""
    real = path.resolve()  # `.` has no name
    if (path / ADAPTER_CONFIG).exists():
        return _with_checkpoint(adapters_at(path))
    if (path / CONFIG_FILE).exists():
        return _with_checkpoint(model_at(path))
    if is_checkpoint(real):
        return _checkpoint(path)
    if _is_run(path):
        return _run(path)
    if (path / ADAPTER_FILE).exists():
        return adapters_at(path)
    is_optimizer = real.name == OPTIMIZER_DIR and is_checkpoint(real.parent)
    has_weights = (path / INDEX_FILE).exists() or any(path.glob("*.safetensors"))
    if has_weights and not is_optimizer:
        return model_at(path)
    raise UserError(f"{path} is nothing that Shardwise knows; {_EXPECTED}.")


def _look_at_file(path: Path) -> Found:
    if not path.is_file():  # reading a pipe might never end
        raise UserError(f"{path} is nothing that Shardwise knows; {_EXPECTED}.")
    if path.suffix in (".yaml", ".yml"):
        return _plan(path)
    if path.name == ADAPTER_CONFIG:
        return adapters_at(path.parent)
    if is_gguf(path):
        return sizes_at(path, "gguf")
    if path.suffix == ".json" and "model_type" in read_config(path):
        return sizes_at(path, "config")
    raise UserError(f"{path} is nothing that Shardwise knows; {_EXPECTED}.")


def _with_checkpoint(found: Found) -> Found:
    """A model, and the checkpoint that it is in."""
    real = found.path.resolve()
    if real.name != MODEL_DIR or not is_checkpoint(real.parent):
        return found
    return replace(found, fields={**found.fields, "checkpoint": _listed(real.parent)})


def _checkpoint(path: Path) -> Found:
    problems = list(defects(path))
    try:
        fields = _planned(load_plan(path / PLAN_FILE))
    except UserError as error:
        fields = {}
        if f"{path / PLAN_FILE} is missing" not in problems:
            problems.append(str(error))
    state, sizes = _state(path), {}
    if state is not None:
        fields |= {"step": state.step, "loss": state.loss}
        fields["rows_digest"] = state.row_order.data_digest[:_DIGITS]
        fields["base"] = None if state.base is None else state.base[:_DIGITS]
    for folder in (MODEL_DIR, OPTIMIZER_DIR):
        sizes[folder] = sum(f.stat().st_size for f in (path / folder).glob("*.safetensors"))
        fields[f"{folder}_bytes"] = sizes[folder]
        if not sizes[folder] and not problems:
            problems.append(f"{path / folder} holds no weights")
    return Found(path=path, kind="checkpoint", fields=fields, problems=tuple(problems))


def _state(path: Path) -> State | None:
    try:
        return read_state(path)
    except UserError:  # `defects` says why
        return None


def _planned(plan: Plan, **of_model: bool) -> dict[str, Any]:
    """What a plan says of itself; `of_model` stands with its model."""
    method = {"task": plan.task, "method": plan.method}
    return {**method, "model": plan.model, **of_model, "layout": str(plan.layout)}


def _listed(checkpoint: Path) -> dict[str, Any]:
    why = why_incomplete(checkpoint)
    return {"name": checkpoint.name, "complete": why is None, "why_not": why}


def _is_run(path: Path) -> bool:
    """Whether a directory is one that training has written to."""
    known = (path / WORK_DIR / LOCK_FILE).exists() or (path / METRICS_FILE).exists()
    return known or bool(checkpoints_of(path) or partial_checkpoints(path))


def _run(path: Path) -> Found:
    problems: list[str] = []
    plan = None
    try:
        plan = load_plan(path)
    except UserError as error:
        problems.append(str(error))
    listed = [_listed(checkpoint) for checkpoint in checkpoints_of(path)]
    problems += [one["why_not"] for one in listed if not one["complete"]]
    newest = next((one["name"] for one in reversed(listed) if one["complete"]), None)
    if newest is None:
        problems.append("there is no complete checkpoint")
    state = None if newest is None else _state(path / CHECKPOINTS_DIR / newest)
    step, loss = _last_record(path)
    done = max(step, 0 if state is None else state.step)
    partial = [folder.name for folder in partial_checkpoints(path)]
    fields = {
        **({} if plan is None else _planned(plan)),
        "steps": {"done": done, "of": _num_steps(path, plan, state, done)},
        "loss": loss,
        "checkpoints": listed,
        "newest": newest,
        "leftovers": partial,
    }
    notes = [f"{name} is being written, or was when a command ended" for name in partial]
    return Found(path=path, kind="run", fields=fields, problems=tuple(problems), notes=tuple(notes))


def _num_steps(path: Path, plan: Plan | None, state: State | None, done: int) -> int | None:
    """Optimizer steps of a whole run; None: it has not finished, and only its rows would tell."""
    if plan is not None and state is not None and not plan.train.packing:
        rows = range(state.row_order.num_rows)  # where they are not packed, their number is enough
        return Order(lengths=rows, train=plan.train).num_steps
    file = path / MEASURED_FILE
    try:
        steps = parse(Measured, read_config(file), source=str(file)).steps
    except UserError:
        return None
    return steps if steps >= done else None  # of the run before it was trained on


def _last_record(path: Path) -> tuple[int, float | None]:
    """Step and loss of the newest record of a run's metrics; a line that is cut is passed over."""
    try:
        lines = (path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return 0, None
    for line in reversed(lines[-2:]):
        try:
            record = json.loads(line)
            return int(record["step"]), float(record["loss"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0, None


def _plan(path: Path) -> Found:
    plan = load_plan(path)
    notes: tuple[str, ...] = ()
    try:
        is_there = Path(local_model(plan.model)).exists()
    except UserError as error:
        is_there, notes = Path(plan.model).exists(), (str(error),)
    predicted, devices = plan.predicted, plan.devices
    fields = {
        **_planned(plan, model_is_there=is_there),
        "devices": {
            "kind": devices.kind,
            "count": devices.count or plan.layout.world_size,
            "memory_gib": devices.memory_gib,
        },
        "predicted_bytes": None if predicted is None else predicted.memory.total,
        "predicted_step_s": None if predicted is None else predicted.step_s,
    }
    return Found(path=path, kind="plan", fields=fields, notes=notes)
