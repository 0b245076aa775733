"""Training checkpoints: complete or absent, readable by any layout, safetensors and JSON only.

    step-000024/
      model/       config, tokenizer and this step's weights, one file a rank; a weight source
                   like any other, so it can be served or exported as it is
      optimizer/   the two moments of AdamW, one file a rank
      plan.yaml    the plan of the run
      state.json   step and file sizes; written last

A checkpoint is written under another name and published by a rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import nn

from shardwise.config import PLAN_FILE, Config, Plan, parse
from shardwise.errors import UserError
from shardwise.parallel._torch import HuggingFaceStorageWriter
from shardwise.parallel.grads import local_part
from shardwise.weights.index import open_index
from shardwise.weights.load import local_box, read_into
from shardwise.weights.save import copy_model_files

STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d{6,})$")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILE_BYTES = 64 * 2**20
"""about so many bytes of a rank go into one file"""


class State(Config):
    """Where a run stands."""

    version: int = 1
    step: int = Field(ge=0, description="optimizer steps done")
    num_rows: int = Field(ge=1, description="rows of the data set")
    loss: float
    files: dict[str, int] = Field(default={}, description="file -> bytes")


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. Partial ones are never listed."""
    found = [
        path
        for path in (run_dir / "checkpoints").glob("step-*")
        if _NAME.match(path.name) and why_incomplete(path) is None
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def why_incomplete(path: Path) -> str | None:
    """What a checkpoint lacks; None if it is complete."""
    try:
        state = read_state(path)
    except UserError as error:
        return str(error)
    for name, size in state.files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes, not {size}"
    return None


def read_state(path: Path) -> State:
    """The state of a checkpoint (`UserError` if there is none that can be read)."""
    file = path / STATE_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no complete checkpoint: {error}.") from None
    return parse(State, data, source=str(file))


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, state: State
) -> None:
    """Write a checkpoint; every rank calls this and writes its own shards."""
    partial = path.with_name(f".{path.name}.partial")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    params = {name: param.detach() for name, param in model.named_parameters()}
    moments = {
        f"{moment}/{name}": optimizer.state[param][moment]
        for name, param in model.named_parameters()
        for moment in _MOMENTS
    }
    for folder, tensors in (("model", params), ("optimizer", moments)):
        writer = HuggingFaceStorageWriter(
            str(partial / folder), fqn_to_index_mapping=_buckets(tensors), save_distributed=True
        )
        dcp.save(tensors, storage_writer=writer)
    if is_first:
        copy_model_files(Path(plan.model), partial / "model")
        plan.save(partial / PLAN_FILE)
        files = {
            str(file.relative_to(partial)): file.stat().st_size
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        complete = state.model_copy(update={"files": files})
        (partial / STATE_FILE).write_text(complete.model_dump_json(indent=2), encoding="utf-8")
        _sync(partial)
        shutil.rmtree(path, ignore_errors=True)  # an incomplete one of an earlier attempt
        partial.rename(path)
    dist.barrier()


def _buckets(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Tensor name -> number of the file (from 1) it goes to.

    The writer holds a file in memory until it is written, so each rank's part of it is bounded.
    Computed from full sizes, which are the same on every rank.
    """
    limit = _FILE_BYTES * dist.get_world_size()
    numbers: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()  # of the full tensor
        if size and size + num_bytes > limit:
            number, size = number + 1, 0
        numbers[name] = number
        size += num_bytes
    return numbers


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the moments of a checkpoint, each rank its own slices, whatever layout wrote them."""
    index = open_index(path / "optimizer")
    step = read_state(path).step
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        state["step"] = torch.tensor(float(step), device=local_part(param).device)
        for moment in _MOMENTS:
            key = f"{moment}/{name}"
            if key not in index.pieces:
                raise UserError(f"{path}: the optimizer state lacks {key}.")
            state[moment] = torch.zeros_like(param)
            read_into(local_part(state[moment]), local_box(param), index.pieces[key], key)


def _sync(folder: Path) -> None:
    """Make the files durable before the rename makes them visible."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
