"""Medians over rounds, ratios to the best peer, and the refusal of unequal work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cases import BY_NAME, Case

MIB = 2**20
LOSS_TOLERANCE = 0.01
"""Relative. Engines whose losses on the same tokens differ by more did not do the same work; each
one may be half as far from their median."""
Round = Sequence[Mapping[str, Any]]
"""of each rank, what `meter.RankResult` holds"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine on one case; medians over rounds."""

    case: Case
    engine: str
    step_s: float
    rounds_step_s: list[float]
    """seconds of a step in each round: how far to trust the median"""
    cpu_s: float
    """processor seconds of a step, all ranks together"""
    parts_s: dict[str, float | None]
    peak_mib: float
    """of the rank that needs most, while steps run"""
    load_peak_mib: float
    """of the rank that needs most, before the first step"""
    first_loss: float
    last_loss: float
    refused: str | None = None
    """why this row must not be compared with the others"""
    step_ratio: float | None = None
    """to the fastest peer of the same ZeRO stage; above 1 is slower"""
    peak_ratio: float | None = None
    """to the peer of the same ZeRO stage that needs least memory"""


def rows_of(case: Case, results: Mapping[str, Sequence[Round]]) -> list[Row]:
    """One row an engine, from what every round measured.

    Args:
        results: engine name -> rounds.
    """
    losses = {
        engine: [_mean_losses(one) for one in rounds]
        for engine, rounds in results.items()
        if rounds
    }
    unequal = unequal_losses(losses)
    rows = []
    for engine, rounds in results.items():
        if not rounds:
            continue
        steps = [max(statistics.median(rank["step_s"]) for rank in one) for one in rounds]
        rows.append(
            Row(
                case=case,
                engine=engine,
                step_s=statistics.median(steps),
                rounds_step_s=steps,
                cpu_s=statistics.median(sum(rank["cpu_s"] for rank in one) for one in rounds),
                parts_s=_parts(rounds),
                peak_mib=_worst_rank(rounds, "peak_bytes"),
                load_peak_mib=_worst_rank(rounds, "load_peak_bytes"),
                first_loss=losses[engine][0][0],
                last_loss=losses[engine][0][-1],
                refused=unequal.get(engine),
            )
        )
    return with_ratios(rows)


def unequal_losses(losses: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, str]:
    """Engines whose loss in any step of any round is not that of the majority, and the numbers.

    Args:
        losses: engine -> rounds -> loss of each step, in nats.
    """
    unequal: dict[str, str] = {}
    every_run = [run for runs in losses.values() for run in runs]
    if len({len(run) for run in every_run}) > 1:
        return dict.fromkeys(losses, "the engines ran different numbers of steps")
    for step, values in enumerate(zip(*every_run, strict=True), start=1):
        middle = statistics.median(values)
        for engine, runs in losses.items():
            for run in runs:
                loss = run[step - 1]
                if not abs(loss - middle) <= LOSS_TOLERANCE / 2 * abs(middle):  # nan is unequal too
                    unequal.setdefault(
                        engine,
                        f"in step {step} its loss is {loss:.4f}, the engines' median {middle:.4f}",
                    )
    return unequal


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their ratios to the best peer of the same stage; refused ones have none."""
    compared = []
    for row in rows:
        stage = BY_NAME[row.engine].stage
        peers = [
            other
            for other in rows
            if BY_NAME[other.engine].peer
            and BY_NAME[other.engine].stage == stage
            and other.refused is None
        ]
        if peers and row.refused is None:
            fastest = min(peer.step_s for peer in peers)
            leanest = min(peer.peak_mib for peer in peers)
            compared.append(
                replace(row, step_ratio=row.step_s / fastest, peak_ratio=row.peak_mib / leanest)
            )
        else:
            compared.append(row)
    return compared


def table(rows: Sequence[Row]) -> str:
    """Plain text, one line an engine, sorted by case and stage."""
    lines = []
    cases = list(dict.fromkeys(row.case for row in rows))
    for case in cases:
        lines += [str(case), _HEAD]
        of_case = [row for row in rows if row.case == case]
        lines += [_line(row) for row in sorted(of_case, key=_by_stage)] + [""]
    refused = [row for row in rows if row.refused is not None]
    lines += [f"REFUSED: {row.engine}, {row.case}: {row.refused}." for row in refused]
    return "\n".join(lines)


_HEAD = (
    f"  {'engine':<16}{'step s':>8}{'ratio':>8}{'cpu s':>8}{'forward':>9}{'backward':>9}"
    f"{'waits':>8}{'update':>8}{'peak MiB':>10}{'ratio':>8}{'load MiB':>10}{'loss first':>12}"
    f"{'last':>9}"
)


def _line(row: Row) -> str:
    parts = [row.parts_s[part] for part in ("forward", "backward", "communication", "optimizer")]
    forward, backward, waits, update = ("-" if s is None else f"{s:.3f}" for s in parts)
    return (
        f"  {row.engine:<16}{row.step_s:>8.3f}{_ratio(row, row.step_ratio):>8}{row.cpu_s:>8.3f}"
        f"{forward:>9}{backward:>9}{waits:>8}{update:>8}{row.peak_mib:>10.0f}"
        f"{_ratio(row, row.peak_ratio):>8}{row.load_peak_mib:>10.0f}{row.first_loss:>12.4f}"
        f"{row.last_loss:>9.4f}"
    )


def _ratio(row: Row, ratio: float | None) -> str:
    if row.refused is not None:
        return "REFUSED"
    return "-" if ratio is None else f"{ratio:.2f}"


def _by_stage(row: Row) -> tuple[int, bool, float]:
    engine = BY_NAME[row.engine]
    return engine.stage, bool(engine.peer), row.step_s


def _mean_losses(one: Round) -> list[float]:
    """Rows are equally long, so the mean over ranks is the mean over tokens."""
    return [statistics.fmean(step) for step in zip(*(rank["losses"] for rank in one), strict=True)]


def _parts(rounds: Sequence[Round]) -> dict[str, float | None]:
    """Of each part the mean over ranks, then the median over rounds; None where it is not known."""
    parts: dict[str, float | None] = {}
    for part in rounds[0][0]["parts_s"]:
        seconds = [[rank["parts_s"][part] for rank in one] for one in rounds]
        known = all(value is not None for one in seconds for value in one)
        parts[part] = statistics.median(map(statistics.fmean, seconds)) if known else None
    return parts


def _worst_rank(rounds: Sequence[Round], key: str) -> float:
    return statistics.median(max(rank[key] for rank in one) for one in rounds) / MIB
