"""The one message that a launcher sends to its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from shardwise.config import Config
from shardwise.errors import UserError
from shardwise.parsing import parse

JOB_FILE = "job.json"
WORK_DIR = "work"


class Job(Config):
    """What every rank of a process group shall do."""

    kind: Literal["train", "serve", "logits", "probe"]
    folder: str
    """the plan lies here; results are written here"""
    device_type: str = "cpu"
    num_processes: int
    timeout_s: float
    """a collective that waits longer fails"""

    @property
    def timeout_key(self) -> str:
        """The plan's key of that time."""
        return "serve.timeout_s" if self.kind == "serve" else "train.timeout_s"

    @property
    def path(self) -> Path:
        """The job's folder."""
        return Path(self.folder)

    @property
    def work(self) -> Path:
        """What only the job itself needs: rows, logs, this message."""
        return self.path / WORK_DIR

    def save(self) -> Path:
        """Write the job into its work folder; returns the file."""
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / JOB_FILE
        file.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        return file


def read_job(file: Path) -> Job:
    """Read a job that `Job.save` wrote."""
    try:
        return parse(Job, json.loads(file.read_text(encoding="utf-8")), source=str(file))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the job {file}: {error}.") from None
