"""The planner's answer in words, tables and JSON."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config import GIB, Memory
from shardwise.console import count, gib, seconds
from shardwise.planner.answer import MEMORY_EVIDENCE, Answer, Option, suggest
from shardwise.planner.cost import Cost
from shardwise.planner.memory import host_bytes_for_saves, state_bytes
from shardwise.planner.serving_report import (
    capacity,
    lever_data,
    lever_notes,
    options_table,
    plan_to_run,
    serving_headline,
    serving_speed,
    serving_time,
    serving_verdict,
)
from shardwise.planner.timing import StepTime
from shardwise.planner.traffic import traffic

_REJECTED_PER_REASON = 3
_REJECTED = 10
_NUMBERS = re.compile(r"[\d.,]+")
TASKS = {
    "full": "full fine-tuning",
    "lora": "fine-tuning of adapters",
    "qlora": "fine-tuning of adapters on matrices of four bits",
    "serve": "serving",
}
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer moments",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "gathered and reduced buffers",
    "kv_cache": "KV cache",
    "saving": "a checkpoint being written",
    "reserve": "process and allocator",
}


def verdict_text(answer: Answer) -> str:
    """The answer in one or two sentences."""
    if answer.load is not None:
        return serving_verdict(answer)
    single, chosen = answer.single, answer.chosen
    need = f"On one device the task needs {gib(single.memory.total)}"
    has = f"a device has {gib(single.capacity)}"
    if answer.verdict == "fits_one_device":
        text = f"{need} and {has}: it fits, no sharding is needed."
        if chosen is None:
            text += " The layout that was given does not fit."
        if chosen is not None and chosen.plan.layout.world_size > 1:
            text += f" With {chosen.name} all {chosen.plan.layout.world_size} devices work on it."
        return text
    text = f"{need}, but {has}: it does not fit."
    fitting = next((lever for lever in answer.levers if lever.fits), None)
    if fitting is not None:
        name = fitting.name.removeprefix("+ ")
        text += f" It would fit one device with {name}: {gib(fitting.memory.total)}."
    elif answer.levers:
        best = min(answer.levers, key=lambda lever: lever.memory.total)
        text += f" Cheaper settings do not help enough: {gib(best.memory.total)} at the least."
    if chosen is None and answer.given is not None:
        given = answer.given
        text += f" The layout that was given ({given.name}) needs {gib(given.memory.total)} on each"
        return f"{text}: it does not fit either. Without a layout, one that fits is searched for."
    if chosen is None:
        return f"{text} No layout over the given devices fits: {suggest(answer)}"
    if chosen.plan.layout.world_size > 1:
        devices = chosen.plan.layout.world_size
        text += f" Sharded over {devices} devices ({chosen.name}) it needs "
        text += f"{gib(chosen.memory.total)} on each: it fits."
    if chosen.plan.method != single.plan.method:
        text += f" The plan is for that: task={chosen.plan.method}, not {single.plan.method}."
    return text


def render(answer: Answer, *, top: int = 1) -> RenderableType:
    """The terminal page: verdict, speed and money first, numbers below.

    Args:
        top: layouts to compare in a table; 1: none.
    """
    facts, asked = answer.facts, answer.single.plan
    what = TASKS[asked.method]
    title = Text.assemble(
        (f"{what} of {asked.model.rstrip('/').rsplit('/', 1)[-1]}", "bold"),
        f"  {facts.model_type}, {count(facts.num_parameters)} parameters, "
        f"{facts.num_layers} layers, {facts.num_heads} heads, {facts.num_kv_heads} KV heads",
        f", {count(facts.num_trained_parameters)} of them in adapters" if facts.adapters else "",
    )
    parts: list[RenderableType] = [title, Text(verdict_text(answer), style="bold")]
    parts += [Text(line, style="bold") for line in headline(answer)]
    parts.append(Text())
    if asked.trains:
        note = f"weights, gradients and moments alone take {gib(state_bytes(asked, facts))}"
        if facts.adapters is None:
            note += ": 16 bytes a parameter"
        parts.append(Text(note, style="dim"))
    parts += [Text(f"note: {note}", style="dim") for note in answer.notes]
    parts.append(_memory_table(answer))
    if answer.load is not None:
        return Group(*parts, *_serving_parts(answer, top))
    if answer.levers:
        parts += [Text("on one device, would a cheaper setting do?"), _levers(answer)]
    if answer.chosen is not None:
        parts.append(_speed(answer.chosen, answer))
    if answer.cost is not None:
        parts.append(_cost_text(answer.cost))
    if top > 1 and len(answer.ranked) > 1:
        parts += [Text(f"the best {min(top, len(answer.ranked))}:"), _ranked(answer, top)]
    if answer.rejected:
        parts += [Text("not chosen:"), _rejected(answer)]
    return Group(*parts)


def _serving_parts(answer: Answer, top: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if answer.chosen is not None:
        parts.append(serving_speed(answer.chosen, answer))
    if answer.cost is not None:
        parts.append(_cost_text(answer.cost))
    parts.append(Text("on one device, with other weights:"))
    parts.append(options_table([answer.single, *answer.levers], answer))
    parts += [Text(f"  {note}", style="dim") for note in lever_notes(answer)]
    parts.append(Text())
    if top > 1 and len(answer.ranked) > 1:
        parts.append(Text(f"the best {min(top, len(answer.ranked))}:"))
        parts.append(options_table(answer.ranked[:top], answer))
    if answer.rejected:
        parts += [Text("not chosen:"), _rejected(answer)]
    return parts


def to_json(answer: Answer, *, top: int = 1) -> dict[str, Any]:
    """The answer as plain data; `top` layouts are listed under `ranked`."""
    chosen = answer.chosen
    shown = chosen or answer.single
    predicted = shown.plan.predicted
    written = plan_to_run(answer)
    return {
        "verdict": answer.verdict,
        "verdict_text": verdict_text(answer),
        "layout": shown.plan.layout.model_dump(),
        "memory": {
            "worst_rank": _gib_parts(shown.memory),
            "one_device": _gib_parts(answer.single.memory),
            "capacity": shown.plan.devices.memory_gib,
        },
        "time": _time(shown, answer),
        "traffic": _traffic(shown, answer),
        "capacity": capacity(shown, answer) if answer.load is not None else None,
        "cost": _cost(answer.cost),
        "ranked": [_summary(option, answer) for option in answer.ranked[:top]],
        "levers": [lever_data(option) for option in answer.levers],
        "rejected": [{"option": name, "reason": reason} for name, reason in answer.rejected],
        "evidence": {
            "memory": predicted.memory_evidence if predicted else MEMORY_EVIDENCE,
            "time": predicted.step_evidence if predicted else None,
        },
        "notes": list(answer.notes),
        "parameters": answer.facts.num_parameters,
        "trained_parameters": answer.facts.num_trained_parameters,
        "plan": None if written is None else written.model_dump(exclude_none=True),
    }


def _time(option: Option, answer: Answer) -> dict[str, Any]:
    if answer.load is not None:
        return serving_time(option.served)
    step = option.step
    parts = {} if step is None else _parts(step)
    return {
        "step_s": option.step_s,
        "tokens_per_s_per_device": option.tokens_per_s_per_device,
        "mfu": option.mfu(answer.peak_flops),
        **{f"{name}_s": value for name, value in parts.items()},
    }


def _parts(step: StepTime) -> dict[str, float]:
    return {
        "compute": step.compute_s,
        "memory": step.memory_s,
        "host": step.host_s,
        "idle": step.idle_s,
        "exposed": step.collectives_s,
    }


def _traffic(option: Option, answer: Answer) -> list[dict[str, Any]]:
    if option.plan.task == "serve":
        return []
    if option.step is None:
        return [
            {"group": line.axis, "op": line.op, "bytes_per_step": line.bytes_per_step}
            for line in traffic(option.plan, option.facts)
        ]
    return [
        {
            "group": timed.line.axis,
            "op": timed.line.op,
            "bytes_per_step": timed.line.bytes_per_step,
            "link": timed.link,
            "crosses_nodes": timed.group.crosses,
            "time_s": timed.time_s,
            "exposed_s": timed.exposed_s,
        }
        for timed in option.step.lines
    ]


def _cost(cost: Cost | None) -> dict[str, Any]:
    if cost is None:
        return {"hours": None, "usd": None, "usd_per_million_tokens": None}
    rate = cost.rate
    return {
        "hours": cost.hours,
        "usd": cost.usd,
        "usd_per_million_tokens": cost.usd_per_million_tokens,
        "tokens": cost.tokens,
        "overhead": cost.overhead,
        "price": None
        if rate is None
        else {
            "usd_per_device_hour": rate.usd_per_device_hour,
            "what": rate.what,
            "date": rate.date,
            "source": rate.source,
        },
    }


def _summary(option: Option, answer: Answer) -> dict[str, Any]:
    one = {
        "option": option.name,
        "layout": option.plan.layout.model_dump(),
        "total": _gib(option.memory.total),
    }
    if answer.load is not None:
        return {**one, **serving_time(option.served)}
    return {
        **one,
        "step_s": option.step_s,
        "tokens_per_s_per_device": option.tokens_per_s_per_device,
        "mfu": option.mfu(answer.peak_flops),
    }


def headline(answer: Answer) -> list[str]:
    """Speed and money in a sentence each, as far as they are known."""
    if answer.load is not None:
        return serving_headline(answer)
    chosen, lines = answer.chosen, []
    if chosen is not None and chosen.tokens_per_s_per_device is not None:
        text = f"A step takes {seconds(chosen.step_s or 0.0)}: "
        text += f"{chosen.tokens_per_s_per_device:,.0f} tokens a second and device"
        mfu = chosen.mfu(answer.peak_flops)
        lines.append(f"{text}, {100 * mfu:.0f}% MFU." if mfu is not None else f"{text}.")
    cost = answer.cost
    if cost is not None:
        money = "" if cost.usd is None else f" and {cost.usd:,.2f} USD"
        if cost.hours is not None and cost.tokens is not None:
            lines.append(f"{count(cost.tokens)} tokens take {cost.hours:,.1f} hours{money}.")
        if cost.usd_per_million_tokens is not None:
            lines.append(f"A million tokens cost {cost.usd_per_million_tokens:.3g} USD.")
    return lines


def _cost_text(cost: Cost) -> Text:
    """What hours and money rest on."""
    overhead = f"restarts and idling: {100 * cost.overhead:.0f}% of the time (--overhead)"
    if cost.rate is None:
        return Text(f"{overhead}; no price (--price, --instance)\n", style="dim")
    rate = cost.rate
    return Text(f"price: {rate.what} ({rate.source}, {rate.date}); {overhead}\n", style="dim")


def _ranked(answer: Answer, top: int) -> RenderableType:
    """The best layouts side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("layout", "GiB", "step", "tokens/s/device", "MFU", "exposed", "idle"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for option in answer.ranked[:top]:
        step, tokens = option.step, option.tokens_per_s_per_device
        mfu = option.mfu(answer.peak_flops)
        table.add_row(
            option.name,
            f"{option.memory.total / GIB:.1f}",
            "-" if step is None else seconds(step.total_s),
            "-" if tokens is None else f"{tokens:,.0f}",
            "-" if mfu is None else f"{100 * mfu:.0f}%",
            "-" if step is None else seconds(step.collectives_s),
            "-" if step is None else seconds(step.idle_s),
        )
    return Padding(table, (0, 0, 1, 2))


def _memory_table(answer: Answer) -> RenderableType:
    single, chosen = answer.single, answer.chosen
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("bytes per device, at its peak moment")
    table.add_column("one device", justify="right")
    both = chosen is not None and chosen is not single
    if both:
        table.add_column("chosen", justify="right")
    for part, name in PARTS.items():
        values = [getattr(single.memory, part)]
        values += [getattr(chosen.memory, part)] if both and chosen else []
        if any(values):
            table.add_row(name, *(gib(value) if value else "-" for value in values))
    totals = [single, *([chosen] if both and chosen else [])]
    table.add_row("total", *(gib(o.memory.total) for o in totals), style="bold")
    table.add_row("a device has", *(gib(o.capacity) for o in totals))
    lines: list[RenderableType] = [Padding(table, (0, 0, 1, 2))]
    host = host_bytes_for_saves(chosen.plan, chosen.facts) if chosen is not None else 0
    if host:
        text = f"and {gib(host)} of host memory a process, to write checkpoints from"
        lines.append(Padding(text, (0, 0, 1, 2)))
    return Group(*lines)


def _levers(answer: Answer) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for lever in answer.levers:
        fits = Text("fits", "green") if lever.fits else Text("does not fit", "red")
        table.add_row(lever.name, gib(lever.memory.total), fits)
    return Padding(table, (0, 0, 1, 2))


def _rejected(answer: Answer) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    kinds: dict[str, int] = {}  # of each kind of reason only the best few
    for name, reason in answer.rejected:
        kind = " ".join(_NUMBERS.sub("", reason).split()[:2])
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= _REJECTED_PER_REASON and table.row_count < _REJECTED:
            table.add_row(name, reason)
    hidden = len(answer.rejected) - table.row_count
    if hidden:
        table.add_row(f"and {hidden} more", "all of them with --json")
    return Padding(table, (0, 0, 1, 2))


def _speed(option: Option, answer: Answer) -> RenderableType:
    """Where the time of a step goes."""
    predicted = option.plan.predicted
    if option.plan.task == "serve" or predicted is None:
        return Text()
    if option.step is None:
        return Text(f"step time: unknown, {predicted.step_evidence}\n", style="dim")
    step, moved = option.step, gib(option.traffic_bytes)
    parts = {name: value for name, value in _parts(step).items() if value >= 5e-4 * step.total_s}
    shares = ", ".join(f"{name} {seconds(value)}" for name, value in parts.items())
    rows: list[RenderableType] = [
        Text(f"step time: {seconds(step.total_s)} = {shares}; a rank moves {moved} a step"),
    ]
    if step.lines:
        rows.append(_groups(step))
    convention = ""
    if option.mfu(answer.peak_flops) is not None:
        convention = "MFU: 6 FLOPs a trained parameter and token (4 a frozen one) plus causal "
        convention += "attention, nothing counted "
        convention += "twice, of the dense bf16 peak. "
    rows.append(Text(f"{convention}{predicted.step_evidence}\n", style="dim"))
    return Group(*rows)


def _groups(step: StepTime) -> RenderableType:
    """Each group of ranks: bytes, link, and how much of its time shows."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "link", "bytes a step", "time", "of it exposed"):
        table.add_column(name, justify="left" if name in ("group", "link") else "right")
    for axis, exposed in step.exposed_by_axis().items():
        lines = [timed for timed in step.lines if timed.line.axis == axis]
        table.add_row(
            axis,
            lines[0].link,
            gib(sum(timed.line.bytes_per_step for timed in lines)),
            seconds(sum(timed.time_s for timed in lines)),
            seconds(exposed),
        )
    return Padding(table, (0, 0, 0, 2))


def _gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 4)


def _gib_parts(memory: Memory) -> dict[str, float]:
    parts = {part: _gib(getattr(memory, part)) for part in PARTS}
    return {**parts, "total": _gib(memory.total)}
