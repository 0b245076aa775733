"""The planner's answer as one HTML page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardwise import __version__
from shardwise.config import GIB, Memory, Plan
from shardwise.console import count, seconds
from shardwise.planner.answer import Answer, Option
from shardwise.planner.drawing import draw_pipeline
from shardwise.planner.placement import nodes_of
from shardwise.planner.report import PARTS, TASKS, headline, verdict_text
from shardwise.planner.serving_report import lever_notes, plan_to_run, serving_row
from shardwise.planner.timing import StepTime

_TEMPLATE = "page.html.j2"
_LAYOUTS = 12
"""of the ranked ones that are shown"""
_WORDS = {
    "fits_one_device": "It fits one device",
    "fits_compressed": "It fits one device with cheaper settings",
    "shard": "Shard it",
    "impossible": "It does not fit these devices",
}
_CAPACITIES = 2.5
"""that the widest bar of memory shows; longer ones are cut, so that the others can be read"""
_TIME = {
    "compute": "matrix products and attention",
    "memory": "element-wise operations, update, copies",
    "host": "waiting for the host",
    "idle": "idling in the pipeline",
}

_PASS = {
    "weights": "reading weights, or computing with them",
    "attention": "attention over the cache",
    "kernels": "starting kernels, and small ones",
    "collectives": "collectives",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a bar."""

    name: str
    text: str
    percent: float
    """of the width of the page's widest bar"""
    color: int
    """number of the page's palette"""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that is made of parts."""

    label: str
    total: str
    parts: tuple[Part, ...]
    fits: bool | None = None
    is_cut: bool = False
    """whether it is longer than the page shows"""
    mark: float | None = None
    """where a device's memory ends, in percent"""


def page(answer: Answer) -> str:
    """The whole page as HTML: verdict, speed and money first, then what they rest on."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    chosen, facts = answer.chosen, answer.facts
    shown, served, to_run = chosen or answer.single, answer.load is not None, plan_to_run(answer)
    return environment.get_template(_TEMPLATE).render(
        version=__version__,
        task=TASKS[answer.single.plan.method],
        model=shown.plan.model.rstrip("/").rsplit("/", 1)[-1],
        sizes=f"{facts.model_type}, {count(facts.num_parameters)} parameters, "
        f"{facts.num_layers} layers, {facts.num_heads} heads, {facts.num_kv_heads} KV heads",
        verdict=answer.verdict,
        word=_WORDS[answer.verdict],
        text=verdict_text(answer),
        headline=headline(answer),
        devices=_devices(shown.plan),
        memory=memory_bars(answer),
        legend=[(name, number) for number, name in enumerate(PARTS.values())],
        layouts=[] if served else [_layout_row(o, answer) for o in answer.ranked[:_LAYOUTS]],
        servers=[serving_row(o, answer) for o in answer.ranked[:_LAYOUTS]] if served else [],
        weights=[serving_row(o, answer) for o in (answer.single, *answer.levers)] if served else [],
        quality=lever_notes(answer) if served else [],
        num_fitting=len(answer.ranked),
        rejected=answer.rejected,
        time=None if chosen is None else _time_bar(chosen),
        groups=[] if chosen is None or chosen.step is None else _group_rows(chosen.step),
        nodes=None if chosen is None else nodes_of(chosen.plan, answer.node),
        pipeline=None if chosen is None else draw_pipeline(chosen.plan, chosen.facts),
        sources=_sources(answer),
        plan=None if to_run is None else to_run.to_yaml(),
    )


def memory_bars(answer: Answer) -> list[Bar]:
    """The task on one device, cheaper settings there, and what was chosen, stage by stage."""
    options = [answer.single, *answer.levers]
    wanted = answer.chosen or answer.given
    if wanted is not None and not any(wanted is option for option in options):
        options.append(wanted)
    finite = [o.capacity for o in options if o.capacity < float("inf")]
    widest = float(max(o.memory.total for o in options))
    if finite:
        widest = max(max(finite), min(widest, _CAPACITIES * max(finite)))
    bars = [_memory_bar(option, widest) for option in options]
    predicted = answer.chosen.plan.predicted if answer.chosen is not None else None
    for rank, total in enumerate((predicted.stage_bytes if predicted else None) or ()):
        part = Part(name="all", text=_gib(total), percent=_percent(total, widest), color=len(PARTS))
        bars.append(Bar(label=f"chosen, stage rank {rank}", total=_gib(total), parts=(part,)))
    return bars


def _memory_bar(option: Option, widest: float) -> Bar:
    return Bar(
        label=option.name,
        total=_gib(option.memory.total),
        parts=tuple(_memory_parts(option.memory, widest)),
        fits=option.fits,
        is_cut=option.memory.total > widest,
        mark=None if option.capacity == float("inf") else _percent(option.capacity, widest),
    )


def _memory_parts(memory: Memory, widest: float) -> list[Part]:
    """In the order of the legend, as far as the widest bar goes."""
    found, left = [], 100.0
    for number, (part, name) in enumerate(PARTS.items()):
        value = getattr(memory, part)
        percent = min(left, _percent(value, widest))
        left -= percent
        if percent > 0:
            found.append(Part(name=name, text=_gib(value), percent=percent, color=number))
    return found


def _time_bar(option: Option) -> Bar | None:
    """Where the time of a step goes, or that of a server's pass."""
    step, served = option.step, option.served
    if served is not None:
        parts = served.decode.parts()
        named = {f"{_PASS[name]}": s for name, s in parts.items()}
        return _split_bar("a pass, one token of each request", named, served.decode.total_s)
    if step is None:
        return None
    values: dict[str, float] = {text: getattr(step, f"{name}_s") for name, text in _TIME.items()}
    values |= {f"{axis}: not hidden": s for axis, s in step.exposed_by_axis().items()}
    return _split_bar("a step", values, step.total_s)


def _split_bar(label: str, values: Mapping[str, float], total: float) -> Bar:
    parts = [
        Part(name=name, text=seconds(s), percent=_percent(s, total), color=number)
        for number, (name, s) in enumerate(values.items())
        if s >= 5e-4 * total
    ]
    return Bar(label=label, total=seconds(total), parts=tuple(parts))


def _group_rows(step: StepTime) -> list[Mapping[str, str]]:
    """Each group of ranks that talk: link, bytes, time, and how much of it shows."""
    rows: list[Mapping[str, str]] = []
    for axis, exposed in step.exposed_by_axis().items():
        lines = [timed for timed in step.lines if timed.line.axis == axis]
        group = lines[0].group
        rows.append(
            {
                "axis": axis,
                "ranks": f"{group.size} ({group.per_node} in a node)",
                "link": lines[0].link,
                "operations": ", ".join(dict.fromkeys(timed.line.op for timed in lines)),
                "bytes": _gib(sum(timed.line.bytes_per_step for timed in lines)),
                "time": seconds(sum(timed.time_s for timed in lines)),
                "exposed": seconds(exposed),
            }
        )
    return rows


def _layout_row(option: Option, answer: Answer) -> Mapping[str, str]:
    step, tokens, mfu = option.step, option.tokens_per_s_per_device, option.mfu(answer.peak_flops)
    return {
        "name": option.name,
        "memory": _gib(option.memory.total),
        "step": "-" if step is None else seconds(step.total_s),
        "tokens": "-" if tokens is None else f"{tokens:,.0f}",
        "mfu": "-" if mfu is None else f"{100 * mfu:.0f}%",
        "exposed": "-" if step is None else seconds(step.collectives_s),
        "idle": "-" if step is None else seconds(step.idle_s),
    }


def _devices(plan: Plan) -> str:
    devices = plan.devices
    number = devices.count or plan.layout.world_size
    memory = "" if devices.memory_gib is None else f", {devices.memory_gib:.2f} GiB each"
    return f"{number} x {devices.kind}{memory}"


def _sources(answer: Answer) -> Sequence[tuple[str, str]]:
    """What the numbers rest on."""
    shown = answer.chosen or answer.single
    predicted, cost = shown.plan.predicted, answer.cost
    found = [("model", note) for note in answer.notes]
    if predicted is not None:
        found += [("memory", predicted.memory_evidence)]
        timed = shown.plan.trains or answer.load is not None
        found += [("time", predicted.step_evidence)] if timed else []
    if cost is not None and cost.rate is not None:
        found.append(("price", f"{cost.rate.what} ({cost.rate.source}, {cost.rate.date})"))
    if cost is not None:
        found.append(("overhead", f"restarts and idling: {100 * cost.overhead:.0f}% of the time"))
    return found


def _percent(value: float, whole: float) -> float:
    return round(100 * value / whole, 3) if whole else 0.0


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
