"""The planner's serving half against measured runs of inference engines.

    python benchmarks/serving_runs.py --runs benchmarks/serving_runs.csv --json result.json

Reads any CSV of the columns of `serving_runs.csv` (those of AIConfigurator's silicon measurements)
and prints, for each system, model and engine: rows, the error of the time between two tokens
(|predicted / measured - 1|: mean, median, 90th percentile), how many pairs of rows have their times
to the first token in the right order, and how many rows that measured long waiting were told to
queue. A row without a prediction is counted with its reason. `--systems` takes some of them only.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

from benchmarks.distill import DEVICES
from shardwise.catalog import load_catalog
from shardwise.catalog.models import find_model
from shardwise.config import GIB, Layout
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.lookup import look_up
from shardwise.planner.accelerator import accelerator
from shardwise.planner.devices import parse_devices
from shardwise.planner.kernels import ENGINES, Engine, engine
from shardwise.planner.serving import Server
from shardwise.planner.serving_memory import Load
from shardwise.planner.serving_search import why_not_served

Row = Mapping[str, str]
IN_VIEW = ("h200_sxm", "b200_sxm")
"""systems whose rows were in view when it was decided which effects are modelled"""
_COPIES = re.compile(r"-(fp8|nvfp4|fp4|int4|awq)$", re.IGNORECASE)
"""ends of names of quantised copies, which have the sizes of the model"""
_NODE = 8
"""devices of a node of the collectors"""
_WAVES = 10
"""requests of a benchmark for each one that it keeps under way: it sends the first all at once"""
_TIE = 0.05
"""times to the first token that are nearer than this have no order"""
_LONG_S = 15.0
"""a measured time to the first token that is longer shows waiting: no prompt here takes so long"""


class Unplanned(Exception):
    """Why a row has no prediction."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row and what was predicted for it."""

    row: Row
    reason: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    queued: int = 0

    @property
    def measured_tpot_s(self) -> float:
        """Between two tokens."""
        return _real(self.row, "silicon_tpot_ms") / 1e3

    @property
    def measured_ttft_s(self) -> float:
        """To the first token."""
        return _real(self.row, "silicon_ttft_ms") / 1e3

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.tpot_s is None else self.tpot_s / self.measured_tpot_s - 1

    @property
    def waited(self) -> bool:
        """Whether the measured time to the first token is that of a queue."""
        return self.measured_ttft_s > _LONG_S


def read(path: Path) -> list[Row]:
    """Rows of a CSV file, without lines that begin with a mark."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if line[:1] != "#"))


def judge(row: Row) -> Result:
    """Predict one row."""
    try:
        measured = [_real(row, f"silicon_{name}_ms") for name in ("tpot", "ttft")]
        if min(measured) <= 0:
            raise Unplanned("a measured time that is not above 0")
        facts, load = _facts(row.get("model_path", "")), _load(row)
        predict = _disaggregated if row.get("mode") == "disagg" else _together
        return predict(row, facts, load)
    except (Unplanned, UserError) as error:
        return Result(row=row, reason=str(error))


def _together(row: Row, facts: ModelFacts, load: Load) -> Result:
    """Prompts and answers on the same devices."""
    time = _server(row, facts, "").time(load)
    if time is None:
        raise Unplanned("not one request fits beside the weights")
    ahead = (time.running / layout_dp(row, facts) - 1) / 2 * time.prefill_s / _WAVES
    return Result(row=row, ttft_s=time.ttft_s + ahead, tpot_s=time.tpot_s, queued=time.queued)


def layout_dp(row: Row, facts: ModelFacts) -> int:
    """Replicas of attention."""
    return _layout(row, facts, "").dp


def _disaggregated(row: Row, facts: ModelFacts, load: Load) -> Result:
    """Prompts on some devices, answers on others: answers grow undisturbed."""
    workers = [_whole(row, f"{side}_num_workers") for side in ("prefill", "decode")]
    if None in workers:
        raise Unplanned("disaggregated, and the numbers of workers are not given")
    num_prefill, num_decode = (max(1, number or 1) for number in workers)
    decode, prefill = _server(row, facts, "decode_"), _server(row, facts, "prefill_")
    replicas = num_decode * decode.layout.dp
    room = decode.room(load).requests(load.length) * replicas
    if room < 1:
        raise Unplanned("not one request fits beside the weights")
    running = min(load.concurrency, room)
    tpot = decode.pass_time(max(1.0, running / replicas), load.mean_context, 0, 0).total_s
    prompt = prefill.prefill_s(load, 0)
    each = load.output_len * tpot + prompt + tpot
    busy = min(0.95, running * prompt / (each * num_prefill * prefill.layout.dp))
    own = prompt * (1 + busy / (2 * (1 - busy))) + tpot
    queue = (load.concurrency - running) * each / running
    return Result(row=row, ttft_s=own + queue, tpot_s=tpot, queued=load.concurrency - running)


@cache
def _facts(model: str) -> ModelFacts:
    """Of the catalogue's model, or of the one that a quantised copy is of."""
    names = [model, model.split("/")[-1]]
    names += [_COPIES.sub("", name) for name in names]
    for name in names:
        if name and find_model(name) is not None:
            return look_up(name).facts
    raise Unplanned(f"model {model} is not in the catalogue")


def _load(row: Row) -> Load:
    """Requests at a time: what the source says, or those of all replicas."""
    stated = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
    batch = _whole(row, "batch_size")
    if stated is None and batch is None:
        raise Unplanned("the number of requests at a time is not given")
    lengths = [int(_real(row, name)) for name in ("isl", "osl")]
    if min(lengths) < 1:
        raise Unplanned("a prompt or an answer of no tokens")
    number = int(stated[1]) if stated else (batch or 1) * (_whole(row, "attention_dp_size") or 1)
    return Load(
        concurrency=max(1, number),
        prompt_len=lengths[0],
        output_len=max(2, lengths[1]),
    )


def _server(row: Row, facts: ModelFacts, side: str) -> Server:
    layout = _layout(row, facts, side)
    reason = why_not_served(layout, facts)
    if reason is not None:
        raise Unplanned(reason)
    engine_ = _engine(row.get("system", ""), row.get("backend", ""), layout.world_size)
    device = engine_.speeds.device
    weights = _weights(row, facts)
    return Server(
        facts=facts,
        engine=engine_,
        layout=layout,
        weights=weights,
        capacity=device.usable_gib * GIB,
        cache_bytes=2 if weights == "bf16" else 1,
        keeps_of_rest=row.get("backend") == "trtllm",
    )


def _layout(row: Row, facts: ModelFacts, side: str) -> Layout:
    """Of the columns with a prefix; attention has tp ranks in each of its replicas.

    Some rows count ranks twice. The same measurement is there with tp=16, ep=4 and with tp=4, ep=4;
    and four devices with a replica of attention each are tp=4, attention dp=4, ep=16. All are of
    one node, so a layout that is larger than a node is read as the smaller one.
    """
    names = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, pp, dp, moe_tp, ep = (_whole(row, side + name) or 1 for name in names)
    if not facts.num_experts:
        return Layout(tp=max(1, tp), pp=pp, dp=dp)
    if tp == dp > 1 and ep == tp * dp:
        tp, ep = 1, dp
    elif not side and ep > 1 and tp * dp > _NODE:
        tp, dp = (tp // ep, dp) if tp >= ep else (tp, dp // ep)
        tp, dp, moe_tp = max(1, tp), max(1, dp), 1
    if dp > 1 and moe_tp * ep == tp and tp % dp == 0:  # replicas within the group of experts
        tp //= dp
    if ep == 1 and dp > 1 and moe_tp > tp:
        raise Unplanned(f"moe_tp={moe_tp} cuts experts over replicas of attention")
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep)


def _weights(row: Row, facts: ModelFacts) -> str:
    """The format of the weights: of experts, where they have another one."""
    mode = (row.get("moe_quant_mode") if facts.num_experts else "") or row.get("gemm_quant_mode")
    text = f"{row.get('precision') or ''} {mode or ''} {row.get('model_path', '')}".lower()
    if "gpt-oss" in text and "bf16" not in text:
        return "mxfp4"
    for mark, name in (("fp4", "fp4"), ("int4", "int4"), ("fp8", "fp8"), ("int8", "int8")):
        if mark in text:
            return name
    return "bf16"


@cache
def _engine(system: str, backend: str, world: int) -> Engine:
    catalog = load_catalog()
    if system not in DEVICES:
        raise Unplanned(f"system {system or '(none)'} is not in the catalogue")
    if backend not in ENGINES:
        raise Unplanned(f"engine {backend or '(none)'} is not in the catalogue")
    device = catalog.devices[DEVICES[system]]
    nodes = -(-world // device.per_node)
    text = f"{nodes}x{min(world, device.per_node)}x{device.name}"
    speeds = accelerator(parse_devices(text, catalog=catalog), catalog)
    if isinstance(speeds, str):
        raise Unplanned(speeds)
    found = engine(speeds, catalog, backend)
    if isinstance(found, str):
        raise Unplanned(found)
    return found


def _real(row: Row, name: str) -> float:
    try:
        value = float(row.get(name) or "")
    except ValueError:
        raise Unplanned(f"{name} is no number") from None
    if not 0 <= value < 1e12:
        raise Unplanned(f"{name} is no number")
    return value


def _whole(row: Row, name: str) -> int | None:
    """A number of ranks or requests; None where the row has none."""
    text = (row.get(name) or "").strip()
    try:
        value = int(float(text)) if text else None
    except (ValueError, OverflowError):
        raise Unplanned(f"{name}={text} is no number") from None
    if value is not None and value < 0:
        raise Unplanned(f"{name}={text} is no number")
    return value


def in_order(results: Sequence[Result]) -> tuple[int, int]:
    """Pairs whose times to the first token are in the measured order, and all pairs."""
    right = total = 0
    for a, b in combinations(results, 2):
        first, second = a.measured_ttft_s, b.measured_ttft_s
        if (
            a.ttft_s is None
            or b.ttft_s is None
            or min(first, second) > max(first, second) / (1 + _TIE)
        ):
            continue
        total += 1
        right += (a.ttft_s < b.ttft_s) == (first < second)
    return right, total


def summary(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """What the table says of some rows, which are compared within their groups."""
    planned = [r for r in results if r.error is not None]
    errors = sorted(abs(r.error or 0.0) for r in planned)
    pairs = [in_order(group) for group in grouped(planned).values()]
    waited = [r for r in planned if r.waited]
    return {
        "name": name,
        "rows": len(results),
        "planned": len(planned),
        "tpot_mean": statistics.mean(errors) if errors else None,
        "tpot_median": statistics.median(errors) if errors else None,
        "tpot_p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None,
        "tpot_bias": statistics.median(r.error or 0.0 for r in planned) if planned else None,
        "ttft_pairs_right": sum(right for right, _ in pairs),
        "ttft_pairs": sum(total for _, total in pairs),
        "queued": sum(r.queued > 0 for r in planned),
        "queued_and_waited": sum(r.queued > 0 and r.waited for r in planned),
        "waited": len(waited),
    }


def grouped(
    results: Iterable[Result],
    columns: tuple[str, ...] = ("system", "model_path", "backend", "mode"),
) -> dict[tuple[str, ...], list[Result]]:
    """Results that are alike in some columns."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        key = tuple(result.row.get(name) or "" for name in columns)
        found.setdefault(key, []).append(result)
    return dict(sorted(found.items()))


def report(results: Sequence[Result]) -> dict[str, Any]:
    """All tables as plain data."""
    together = [r for r in results if r.row.get("mode") != "disagg"]
    apart = [r for r in results if r.row.get("mode") == "disagg"]
    seen = [r for r in results if r.row.get("system") in IN_VIEW]
    kept = [r for r in results if r.row.get("system") not in IN_VIEW]
    return {
        "groups": [summary(", ".join(key), group) for key, group in grouped(results).items()],
        "models": [
            summary(", ".join(key), group)
            for key, group in grouped(results, ("model_path", "backend", "mode")).items()
        ],
        "all": [
            summary("together", together),
            summary("disaggregated", apart),
            summary("in view", seen),
            summary("kept back", kept),
            summary("all", results),
        ],
        "unplanned": dict(Counter(r.reason for r in results if r.reason).most_common()),
        "rows": [
            {
                "id": r.row.get("id", ""),
                "reason": r.reason,
                "tpot_s": r.tpot_s,
                "ttft_s": r.ttft_s,
                "queued": r.queued,
                "error": r.error,
            }
            for r in results
        ],
    }


def _line(row: Mapping[str, Any]) -> str:
    if row["tpot_mean"] is None:
        return f"| {row['name']} | {row['rows']} | 0 | - | - | - | - | - |"
    pairs = f"{row['ttft_pairs_right']} of {row['ttft_pairs']}" if row["ttft_pairs"] else "-"
    return (
        f"| {row['name']} | {row['rows']} | {row['planned']} | {row['tpot_mean']:.0%} | "
        f"{row['tpot_median']:.0%} | {row['tpot_p90']:.0%} | {pairs} | "
        f"{row['queued_and_waited']} of {row['queued']}; {row['waited']} |"
    )


def main() -> None:
    """Judge a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="CSV of measured runs")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--systems", nargs="*", help="only these")
    options = parser.parse_args()
    try:
        rows = read(options.runs)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        parser.error(f"cannot read {options.runs}: {error}")
    if options.systems:
        rows = [row for row in rows if row.get("system") in options.systems]
    found = report([judge(row) for row in rows])
    print(
        "| system, model, engine | rows | planned | TPOT mean | median | p90 | TTFT pairs "
        "| queued and waited, of queued; waited |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in [*found["groups"], *found["models"], *found["all"]]:
        print(_line(row))
    for reason, number in found["unplanned"].items():
        print(f"not planned, {number}: {reason}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
