"""Where a run stands, and which of its checkpoints are complete. No torch.

step-000024/
  model/       config, tokenizer and this step's weights, one set of files a rank; a weight
               source like any other, so it can be served or exported as it is
  optimizer/   the two moments of AdamW, one set of files a rank
  plan.yaml    the plan of the run
  state.json   step, order of the rows, sizes and digests of the files; written last
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from shardwise.config import Config, Plan
from shardwise.errors import UserError
from shardwise.models.adapters import ADAPTER_CONFIG
from shardwise.models.facts import ModelFacts
from shardwise.parsing import parse
from shardwise.trainer.data.store import IDS_FILE, open_rows

CHECKPOINTS_DIR = "checkpoints"
STATE_FILE = "state.json"
MODEL_DIR, OPTIMIZER_DIR = "model", "optimizer"
_NAME = re.compile(r"step-(\d{6,})$")
_PARTIAL = re.compile(r"\.step-(\d{6,})\.(partial|dropped)$")


class RowOrder(Config):
    """What decides which rows an optimizer step has."""

    num_rows: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    seed: int = Field(ge=0)
    data_digest: str = Field(description="SHA-256 of the rows' token ids")
    packed_to: int | None = Field(
        default=None, description="tokens of a sequence of several rows; None: rows are not packed"
    )


class State(Config):
    """Where a run stands."""

    version: Literal[1] = 1
    step: int = Field(ge=0, description="optimizer steps done")
    row_order: RowOrder
    loss: float
    files: dict[str, int] = Field(default={}, description="file -> bytes")
    digests: dict[str, str] = Field(
        default={}, description="file -> SHA-256; older checkpoints have none"
    )
    run: str | None = Field(
        default=None, description="what tells a run from others; older checkpoints have none"
    )
    base: str | None = Field(
        default=None, description="fingerprint of the weights that adapters were trained on"
    )


def row_order(plan: Plan, rows_folder: Path) -> RowOrder:
    """The order that a plan gives to the rows that `write_rows` has written."""
    digest = hashlib.sha256((rows_folder / IDS_FILE).read_bytes()).hexdigest()
    return RowOrder(
        num_rows=len(open_rows(rows_folder)),
        global_batch=plan.train.global_batch,
        seed=plan.train.seed,
        data_digest=digest,
        packed_to=plan.train.seq_len if plan.train.packing else None,
    )


def checkpoint_bytes(facts: ModelFacts) -> int:
    """Size of a checkpoint: fp32 weights and the two moments, of what is trained."""
    return 12 * facts.num_trained_parameters


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / CHECKPOINTS_DIR / f"step-{step:06d}"


def checkpoint_step(path: Path) -> int | None:
    """The step in the name of a checkpoint; None if that is another one's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, complete or not, by its name or what it holds."""
    if _NAME.match(path.name) or _PARTIAL.match(path.name):
        return True
    beside = (path / STATE_FILE).exists() or (path / OPTIMIZER_DIR).is_dir()
    return beside and (path / MODEL_DIR).is_dir()


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first. Partial ones are never listed."""
    found = [p for p in (run_dir / CHECKPOINTS_DIR).glob("step-*") if _NAME.match(p.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Those of the checkpoints that are complete, oldest first."""
    return [path for path in checkpoints_of(run_dir) if why_incomplete(path) is None]


def partial_checkpoints(run_dir: Path) -> list[Path]:
    """What a command was writing or removing when it ended, or what one is at."""
    found = [p for p in (run_dir / CHECKPOINTS_DIR).glob(".step-*") if _PARTIAL.match(p.name)]
    return sorted(found)


def why_incomplete(path: Path) -> str | None:
    """What a checkpoint lacks first; None if it is complete."""
    return next(defects(path), None)


def defects(path: Path) -> Iterator[str]:
    """Everything that a checkpoint lacks."""
    try:
        state = read_state(path)
    except UserError as error:
        yield str(error)
        return
    adapters = path / MODEL_DIR / ADAPTER_CONFIG  # which says where their model is, of any size
    if state.base is not None and not adapters.is_file():
        yield f"{adapters} is missing"
    for name, size in state.files.items():
        file = path / name
        if not file.is_file():
            yield f"{file} is missing"
        elif file.stat().st_size != size:
            yield f"{file} has {file.stat().st_size} bytes, not {size}"


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_state(path: Path) -> State:
    """The state of a checkpoint (`UserError` if there is none that can be read)."""
    file = path / STATE_FILE
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{path} is no complete checkpoint: {error}.") from None
    return parse_state(content, source=str(file))


def parse_state(content: bytes, *, source: str) -> State:
    """The state in the content of a file (`UserError` if there is none)."""
    try:
        data = json.loads(content)
    except ValueError as error:
        raise UserError(f"{source} is no state of a checkpoint: {error}.") from None
    return parse(State, data, source=source)
