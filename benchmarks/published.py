"""The planner against published runs.

    python benchmarks/published.py --runs benchmarks/published_runs.csv --json result.json

Reads any CSV of the columns of `published_runs.csv` and prints, for each source and method: rows,
the error of memory and of throughput (median and 90th percentile of |predicted / published - 1|),
rows that ran out of memory and were predicted to fit, and pairs of rows that differ in one choice
and were put in the right order. A row without a prediction is counted with its reason.

Memory is compared with what the row says it is: reserved, allocated, states only, or the first
stage. Throughput is compared in tokens per second and device; where only TFLOP/s or MFU is printed,
in FLOPs by the source's convention (SC21 counts recomputation; all of them the full square of
attention).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

from benchmarks.published_peers import (
    PeerSpeeds,
    peer_memory_gib,
    step_seconds,
    tokens_per_s,
)
from benchmarks.published_rows import Row, Run, read_rows, real, run_of
from benchmarks.published_software import Unplanned
from shardwise.catalog import load_catalog
from shardwise.config import Plan
from shardwise.errors import UserError
from shardwise.planner.accelerator import accelerator

_SETTING = ("source", "model", "gpu", "gpu_mem_GB", "n_gpus", "seq_len", "global_batch", "method")
_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("tp", "pp", "dp", "cp", "ep", "zero_stage_or_fsdp"),
    "interleave": ("interleave",),
    "micro-batch": ("micro_batch",),
    "recomputation": ("recompute",),
    "precision": ("precision",),
    "optimizer": ("optimizer",),
}
CONTEXT_GIB = 1.0
"""of the device's context and communicators: the planner's own number"""
_TIE = 0.03
"""published numbers that are nearer than this have no order"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row and what was predicted for it."""

    row: Row
    reason: str | None = None
    """why there is no prediction of anything"""
    speed_reason: str | None = None
    """why there is none of the throughput"""
    memory_gib: float | None = None
    throughput: float | None = None
    """in the unit of `published_throughput`"""
    published_throughput: float | None = None
    unit: str | None = None
    fits: bool | None = None
    micro_batch: int | None = None

    @property
    def published_gib(self) -> float | None:
        """Memory of one device as printed."""
        return real(self.row, "measured_mem_GiB")

    @property
    def memory_error(self) -> float | None:
        """Predicted over published, less one."""
        return _error(self.memory_gib, self.published_gib)

    @property
    def throughput_error(self) -> float | None:
        """Predicted over published, less one."""
        return _error(self.throughput, self.published_throughput)

    @property
    def out_of_memory(self) -> bool:
        """Whether the run did not fit."""
        note = self.row.get("note", "").lower()
        return "oom" in note.split() or "out of memory" in note or "does not fit" in note


def judge(row: Row) -> Result:
    """Predict one row."""
    catalog = load_catalog()
    unit, published = _published_throughput(row)
    try:
        run = run_of(row, catalog)
    except (Unplanned, UserError) as error:
        return Result(row=row, reason=str(error))
    shapes = [_judged(plan, run, unit) for plan in run.plans]
    # of what a row leaves open, the fastest that fits
    fitting = [shape for shape in shapes if shape.fits] or shapes[:1]
    best = max(fitting, key=lambda shape: shape.throughput or 0.0)
    return replace(best, published_throughput=published)


def _judged(plan: Plan, run: Run, unit: str | None) -> Result:
    memory = peer_memory_gib(plan, run.facts, run.software, run.interleave)
    # what is on the card, whatever was published: allocated memory is not all of it
    software = run.software
    if software.measures == "allocated":
        software = replace(software, measures="reserved")
    need = peer_memory_gib(plan, run.facts, software, run.interleave) + CONTEXT_GIB
    step_s = _step_s(plan, run)
    known = not isinstance(step_s, str)
    return Result(
        row=run.row,
        speed_reason=None if known else str(step_s),
        memory_gib=memory,
        throughput=_in_unit(tokens_per_s(plan, float(step_s)), unit, plan, run) if known else None,
        unit=unit,
        fits=need <= run.device.usable_gib,
        micro_batch=plan.train.micro_batch,
    )


def _step_s(plan: Plan, run: Run) -> float | str:
    catalog = load_catalog()
    own = {**catalog.devices, run.device.name: run.device}
    device = accelerator(plan.devices, type(catalog)(**{**vars(catalog), "devices": own}))
    if isinstance(device, str):
        return device
    peaks = {"fp8": run.device.fp8_tflops, "fp4": run.device.fp4_tflops}
    if run.software.narrow is not None and peaks[run.software.narrow] is None:
        return f"no peak in {run.software.narrow} of {run.device.name}"
    speeds = PeerSpeeds(device=device, software=run.software, plan=plan, facts=run.facts)
    return step_seconds(plan, run.facts, speeds, run.interleave)


def _published_throughput(row: Row) -> tuple[str | None, float | None]:
    for unit, key in (
        ("tokens/s", "measured_tokens_per_s_per_gpu"),
        ("TFLOP/s", "measured_tflops_per_gpu"),
        ("MFU", "measured_mfu"),
    ):
        value = real(row, key)
        if value is not None and value > 0:
            return unit, value
    return None, None


def _in_unit(tokens: float, unit: str | None, plan: Plan, run: Run) -> float:
    """Tokens a second in the unit that is printed."""
    if unit in (None, "tokens/s"):
        return tokens
    facts, train = run.facts, plan.train
    layers = sum(facts.num_active_parameters(kind) for kind in facts.layers)
    scores = 2 * facts.num_layers * facts.attention_size * train.seq_len
    told = f"{run.row.get('source', '')} {run.row.get('note', '')}".lower()
    hardware = "counts recompute" in told or "sc21" in told
    again = 4 / 3 if hardware and train.checkpointing == "full" else 1.0
    flops = 6 * (again * (layers + scores) + facts.vocab_size * facts.hidden_size)
    per_s = tokens * flops
    return per_s / 1e12 if unit == "TFLOP/s" else per_s / ((run.device.bf16_tflops or 1) * 1e12)


def _error(predicted: float | None, published: float | None) -> float | None:
    if predicted is None or published is None or published <= 0:
        return None
    return predicted / published - 1


def pairs(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Pairs of rows that differ in one choice, with whether their order was right.

    A layout may bring its own micro-batch.
    """
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.throughput_error is not None:
            groups.setdefault(tuple(result.row.get(k, "") for k in _SETTING), []).append(result)
    found = []
    for group in groups.values():
        for one, other in combinations(group, 2):
            choice = _choice(one.row, other.row)
            if choice is None or one.unit != other.unit:
                continue
            a, b = one.published_throughput or 0.0, other.published_throughput or 0.0
            if abs(a - b) <= _TIE * max(a, b):
                continue
            right = (a > b) == ((one.throughput or 0.0) > (other.throughput or 0.0))
            found.append(
                {
                    "source": one.row.get("source", ""),
                    "model": one.row.get("model", ""),
                    "choice": choice,
                    "published": [a, b],
                    "predicted": [one.throughput, other.throughput],
                    "options": [_described(r.row, choice) for r in (one, other)],
                    "right": right,
                }
            )
    return found


def _choice(one: Row, other: Row) -> str | None:
    differing = [
        name
        for name, keys in _CHOICES.items()
        if any(one.get(key, "") != other.get(key, "") for key in keys)
    ]
    if "layout" in differing and set(differing) <= {"layout", "micro-batch", "interleave"}:
        return "layout"
    return differing[0] if len(differing) == 1 else None


def _described(row: Row, choice: str) -> str:
    return " ".join(f"{key}={row[key]}" for key in _CHOICES[choice] if row.get(key))


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The numbers of some rows together."""
    memory = [abs(r.memory_error) for r in results if r.memory_error is not None]
    speed = [abs(r.throughput_error) for r in results if r.throughput_error is not None]
    ordered = pairs(results)
    reasons = Counter(r.reason for r in results if r.reason)
    slow = Counter(r.speed_reason for r in results if r.speed_reason and r.published_throughput)
    nothing = sum(
        r.reason is None
        and r.memory_error is None
        and r.throughput_error is None
        and not r.out_of_memory
        and not r.speed_reason
        for r in results
    )
    if nothing:
        reasons["nothing was published to compare with"] = nothing
    failed = [r for r in results if r.out_of_memory and r.fits is not None]
    return {
        "rows": len(results),
        "memory": _spread(memory),
        "throughput": _spread(speed),
        "signed_throughput_median": _median(
            [r.throughput_error for r in results if r.throughput_error is not None]
        ),
        "signed_memory_median": _median(
            [r.memory_error for r in results if r.memory_error is not None]
        ),
        "out_of_memory": {
            "rows": len(failed),
            "predicted_to_fit": sum(bool(r.fits) for r in failed),
        },
        "pairs": {"number": len(ordered), "right": sum(pair["right"] for pair in ordered)},
        "not_planned": dict(reasons),
        "no_throughput": dict(slow),
    }


def _spread(errors: Sequence[float]) -> dict[str, Any]:
    return {"rows": len(errors), "median": _median(errors), "p90": percentile(errors, 0.9)}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Everything, as plain data: the whole, two kinds of models, each source and method."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        key = (result.row.get("source", ""), result.row.get("method", ""))
        groups.setdefault(key, []).append(result)
    mixtures = [r for r in results if r.row.get("experts")]
    return {
        "all": summary(results),
        "dense": summary([r for r in results if not r.row.get("experts")]),
        "mixtures of experts": summary(mixtures),
        "groups": [
            {"source": source, "method": method, **summary(rows)}
            for (source, method), rows in groups.items()
        ],
        "pairs": pairs(results),
        "rows": [_plain(number, result) for number, result in enumerate(results, start=2)],
    }


def _plain(number: int, result: Result) -> dict[str, Any]:
    data = {key: value for key, value in asdict(result).items() if key != "row"}
    names = ("source", "model", "method", "gpu", "n_gpus")
    return {
        "line": number,
        **{name: result.row.get(name, "") for name in names},
        **data,
        "published_gib": result.published_gib,
        "memory_error": result.memory_error,
        "throughput_error": result.throughput_error,
    }


def table(data: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{'source, method':<58} {'rows':>5} | {'memory':>6} {'med':>5} {'p90':>5} | "
        f"{'speed':>5} {'med':>5} {'p90':>5} | {'oom':>5} | {'pairs':>7}"
    ]
    totals = [
        {"source": name, "method": "", **data[name]}
        for name in ("dense", "mixtures of experts", "all")
    ]
    for group in [*data["groups"], *totals]:
        memory, speed = group["memory"], group["throughput"]
        oom, order = group["out_of_memory"], group["pairs"]
        wrong = f"{oom['predicted_to_fit']}/{oom['rows']}" if oom["rows"] else "-"
        right = f"{order['right']}/{order['number']}" if order["number"] else "-"
        name = ", ".join(x for x in (group["source"], group["method"]) if x)[:58]
        lines.append(
            f"{name:<58} {group['rows']:>5} | {memory['rows']:>6} {_percent(memory['median'])} "
            f"{_percent(memory['p90'])} | {speed['rows']:>5} {_percent(speed['median'])} "
            f"{_percent(speed['p90'])} | {wrong:>5} | {right:>7}"
        )
    lines.append("(oom: rows that ran out of memory and were predicted to fit; pairs: in order)")
    lines += _reasons("not planned", data["all"]["not_planned"])
    lines += _reasons("no throughput", data["all"]["no_throughput"])
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "    -" if value is None else f"{100 * value:>4.0f}%"


def _reasons(title: str, reasons: Mapping[str, int]) -> Iterable[str]:
    if reasons:
        yield f"{title}:"
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        yield f"  {count:>4}  {reason}"


def main(argv: Sequence[str] | None = None) -> None:
    """Judge a file and print what came out."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="CSV of published runs")
    parser.add_argument("--json", type=Path, help="write everything here")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.runs)
    except (OSError, UnicodeDecodeError) as error:
        parser.exit(2, f"published.py: cannot read {args.runs}: {error}\n")
    if not rows:
        parser.exit(2, f"published.py: {args.runs} has no rows\n")
    data = report([judge(row) for row in rows])
    print(table(data))
    if args.json:
        args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
