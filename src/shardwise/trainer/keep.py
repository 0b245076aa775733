"""Which checkpoints of a run stay: the newest few, and the one of the lowest evaluation loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from shardwise.trainer.measured import EVALUATIONS_FILE
from shardwise.trainer.state import complete_checkpoints, read_state


def drop_others(run_dir: Path, keep: int) -> list[str]:
    """Remove all complete checkpoints but the newest `keep` and the best; called when the newest
    one is complete. Returns the names of the removed ones.

    Each loses its name first: one that is half removed must not look like one that broke.
    """
    checkpoints = complete_checkpoints(run_dir)
    best = best_checkpoint(run_dir, checkpoints)
    others = [path for path in checkpoints[:-keep] if path != best]
    for path in others:
        dropped = path.with_name(f".{path.name}.dropped")
        path.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)
    return [path.name for path in others]


def best_checkpoint(run_dir: Path, checkpoints: list[Path]) -> Path | None:
    """That of the lowest evaluation loss, the earliest of equals; None if none was evaluated."""
    file = run_dir / EVALUATIONS_FILE
    if not file.exists():
        return None
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    losses = {record["step"]: record["eval_loss"] for record in records}
    steps = {read_state(path).step: path for path in checkpoints}
    known = [step for step in steps if step in losses]
    return steps[min(known, key=lambda step: (losses[step], step))] if known else None
