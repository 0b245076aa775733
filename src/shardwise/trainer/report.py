"""Planned against measured, after a run."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from shardwise.config import GIB, Config, load_plan
from shardwise.errors import UserError
from shardwise.parsing import parse
from shardwise.trainer.measured import MEASURED_FILE, Measured


class Row(Config):
    """One quantity."""

    quantity: str
    unit: str
    planned: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        """(planned - measured) / measured."""
        if self.planned is None or not self.measured:
            return None
        return self.planned / self.measured - 1


def compare(run: Path) -> list[Row]:
    """The rows of a finished run.

    Raises:
        UserError: the run has not finished.
    """
    file = run / MEASURED_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{run} holds no {MEASURED_FILE}: it is not a finished run.") from None
    measured, plan = parse(Measured, data, source=str(file)), load_plan(run)
    predicted, num_ranks = plan.predicted, len(measured.peak_bytes)
    planned: list[float | None] = [None] * num_ranks
    if predicted is not None:
        stages = predicted.stage_bytes or [predicted.memory.total]
        # the first ranks have the first stage: `pp` is the outermost axis
        planned = [stages[rank * len(stages) // num_ranks] / GIB for rank in range(num_ranks)]
    rows = [
        Row(
            quantity=f"peak memory, rank {rank}",
            unit="GiB",
            planned=planned[rank],
            measured=peak / GIB,
        )
        for rank, peak in enumerate(measured.peak_bytes)
    ]
    step_s = predicted.step_s if predicted else None
    rows.append(Row(quantity="time of a step", unit="s", planned=step_s, measured=measured.step_s))
    return rows


def render(rows: list[Row]) -> Table:
    """The closing table."""
    table = Table(title="planned against measured", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("planned", "measured", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:+.0%}"
        table.add_row(row.quantity, _cell(row.planned, row), _cell(row.measured, row), difference)
    return table


def _cell(value: float | None, row: Row) -> str:
    return "not known" if value is None else f"{value:.2f} {row.unit}"
