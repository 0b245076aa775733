"""The planner's answer in words, tables and JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config import GIB, Memory
from shardwise.console import count, gib
from shardwise.planner.memory import state_bytes
from shardwise.planner.search import MEMORY_EVIDENCE, Answer, Option, suggest
from shardwise.planner.traffic import traffic

_REJECTED_PER_REASON = 3
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer moments",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "gathered and reduced buffers",
    "kv_cache": "KV cache",
    "reserve": "process and allocator",
}


def verdict_text(answer: Answer) -> str:
    """The answer in one or two sentences."""
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
        text += f" It would fit one device with {fitting.name}: {gib(fitting.memory.total)}."
    elif answer.levers:
        best = min(answer.levers, key=lambda lever: lever.memory.total)
        text += f" Cheaper settings do not help enough: {gib(best.memory.total)} at the least."
    if chosen is None:
        return f"{text} No layout over the given devices fits: {suggest(answer)}"
    if chosen.plan.layout.world_size > 1:
        devices = chosen.plan.layout.world_size
        text += f" Sharded over {devices} devices ({chosen.name}) it needs "
        text += f"{gib(chosen.memory.total)} on each: it fits."
    return text


def render(answer: Answer) -> RenderableType:
    """The terminal page: verdict first, numbers below."""
    facts, asked = answer.facts, answer.single.plan
    what = "full fine-tuning" if asked.task == "full" else "serving"
    title = Text.assemble(
        (f"{what} of {asked.model.rstrip('/').rsplit('/', 1)[-1]}", "bold"),
        f"  {facts.model_type}, {count(facts.num_parameters)} parameters, "
        f"{facts.num_layers} layers, {facts.num_heads} heads, {facts.num_kv_heads} KV heads",
    )
    parts: list[RenderableType] = [title, Text(verdict_text(answer), style="bold"), Text()]
    if asked.task == "full":
        states = gib(state_bytes(facts))
        note = f"weights, gradients and moments alone take 16 bytes a parameter: {states}"
        parts.append(Text(note, style="dim"))
    parts += [Text(f"note: {note}", style="dim") for note in answer.notes]
    parts.append(_memory_table(answer))
    if answer.levers:
        parts += [Text("on one device, would a cheaper setting do?"), _levers(answer)]
    if answer.chosen is not None:
        parts.append(_speed(answer.chosen))
    if answer.rejected:
        parts += [Text("not chosen:"), _rejected(answer)]
    return Group(*parts)


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as plain data."""
    chosen = answer.chosen
    shown = chosen or answer.single
    predicted = shown.plan.predicted
    capacity = shown.plan.devices.memory_gib
    return {
        "verdict": answer.verdict,
        "verdict_text": verdict_text(answer),
        "layout": shown.plan.layout.model_dump(),
        "memory": {
            "worst_rank": _gib_parts(shown.memory),
            "one_device": _gib_parts(answer.single.memory),
            "capacity": capacity,
        },
        "time": {"step_s": shown.step_s},
        "traffic": _traffic(shown, answer),
        "levers": [{"option": o.name, "total": _gib(o.memory.total)} for o in answer.levers],
        "rejected": [{"option": name, "reason": reason} for name, reason in answer.rejected],
        "evidence": {
            "memory": MEMORY_EVIDENCE,
            "time": predicted.step_evidence if predicted else None,
        },
        "notes": list(answer.notes),
        "parameters": answer.facts.num_parameters,
        "plan": chosen.plan.model_dump(exclude_none=True) if chosen else None,
    }


def _traffic(option: Option, answer: Answer) -> list[dict[str, Any]]:
    if option.plan.task == "serve":
        return []
    return [
        {"group": line.axis, "op": line.op, "bytes_per_step": line.bytes_per_step}
        for line in traffic(option.plan, answer.facts)
    ]


def _memory_table(answer: Answer) -> RenderableType:
    single, chosen = answer.single, answer.chosen
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("bytes per device, at its peak moment")
    table.add_column("one device", justify="right")
    both = chosen is not None and chosen is not single
    if both:
        table.add_column("chosen", justify="right")
    for part, name in _PARTS.items():
        values = [getattr(single.memory, part)]
        values += [getattr(chosen.memory, part)] if both and chosen else []
        if any(values):
            table.add_row(name, *(gib(value) if value else "-" for value in values))
    totals = [single, *([chosen] if both and chosen else [])]
    table.add_row("total", *(gib(o.memory.total) for o in totals), style="bold")
    table.add_row("a device has", *(gib(o.capacity) for o in totals))
    return Padding(table, (0, 0, 1, 2))


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
        kind = reason.split()[0]
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= _REJECTED_PER_REASON:
            table.add_row(name, reason)
    hidden = sum(max(0, n - _REJECTED_PER_REASON) for n in kinds.values())
    if hidden:
        table.add_row(f"and {hidden} more", "all of them with --json")
    return Padding(table, (0, 0, 1, 2))


def _speed(option: Option) -> Text:
    predicted = option.plan.predicted
    if option.plan.task == "serve" or predicted is None:
        return Text()
    if option.step_s is None:
        return Text(f"step time: unknown, {predicted.step_evidence}\n", style="dim")
    moved = gib(option.traffic_bytes)
    return Text(
        f"step time: {option.step_s:.1f} s ({predicted.step_evidence}); "
        f"a rank moves {moved} a step\n"
    )


def _gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 4)


def _gib_parts(memory: Memory) -> dict[str, float]:
    parts = {part: _gib(getattr(memory, part)) for part in _PARTS}
    return {**parts, "total": _gib(memory.total)}
