"""What the answer says of a server: words, tables and JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config import GIB, Plan
from shardwise.console import count, gib, seconds
from shardwise.planner.answer import Answer, Option
from shardwise.planner.formats import FORMATS
from shardwise.planner.serving import ServeTime
from shardwise.planner.serving_search import PLANNED_ONLY, runnable, why_missed, why_not_run


def serving_verdict(answer: Answer) -> str:
    """The answer in one to three sentences."""
    single, chosen = answer.single, answer.chosen
    need = f"On one device serving needs {gib(single.memory.total)} with one request"
    if single.room is not None and single.fits:
        need = f"On one device weights take {gib(single.memory.weights)}"
    text = f"{need}, a device has {gib(single.capacity)}: "
    text += "it fits." if single.fits else "it does not fit."
    lever = next((option for option in answer.levers if option.fits), None)
    if not single.fits and lever is not None:
        name = lever.plan.serve.weights
        text += f" It would with {name} weights: {gib(lever.memory.weights)}."
    if chosen is not None:
        if chosen.plan.layout.world_size > 1:
            text += f" With {chosen.name} all {chosen.plan.layout.world_size} devices work on it."
        return text
    if answer.missed:
        best = min(answer.missed, key=lambda o: o.served.ttft_s if o.served else 0.0)
        return f"{text} No option meets the targets; nearest, {best.name}: {why_missed(best)}."
    if answer.given is not None:
        return f"{text} {answer.given.name} {answer.given.shortfall}."
    return f"{text} No layout over the given devices fits: take more of them or larger ones."


def serving_headline(answer: Answer) -> list[str]:
    """Speed, room and money in a sentence each."""
    chosen = answer.chosen
    if chosen is None or chosen.room is None:
        return []
    lines = []
    served = chosen.served
    if served is not None:
        load = served.load
        lines.append(
            f"First token after {seconds(served.ttft_s)}, then one every "
            f"{seconds(served.tpot_s)}, with {load.concurrency} requests of {load.prompt_len} + "
            f"{load.output_len} tokens at a time."
        )
        lines.append(
            f"{served.output_tokens_per_s:,.0f} output tokens a second "
            f"({served.output_tokens_per_s_per_device:,.0f} a device), "
            f"{served.requests_per_s:.3g} requests a second."
        )
        if served.queued:
            lines.append(
                f"{served.queued} of them wait: {served.running} have room; a request waits "
                f"{seconds(served.queue_s)} on average."
            )
    cost = answer.cost
    if cost is not None and cost.usd_per_million_tokens is not None:
        lines.append(f"A million output tokens cost {cost.usd_per_million_tokens:.3g} USD.")
    if cost is not None and cost.hours is not None and cost.tokens is not None:
        money = "" if cost.usd is None else f" and {cost.usd:,.2f} USD"
        lines.append(f"{count(cost.tokens)} output tokens take {cost.hours:,.1f} hours{money}.")
    return lines


def serving_notes(answer: Answer) -> tuple[str, ...]:
    """What can be run of it, and what is only planned."""
    shown = answer.chosen or answer.single
    reason = why_not_run(shown)
    notes = [PLANNED_ONLY]
    if answer.chosen is not None and reason is not None:
        notes.append(f"no plan file can be written: {reason}")
    return tuple(notes)


def capacity(option: Option, answer: Answer) -> dict[str, float | int | None]:
    """Of the cache: of a replica in tokens, of the server in requests of the asked length."""
    if option.room is None or answer.load is None:
        return {"kv_cache_tokens": None, "requests": None, "kv_cache_bytes_per_token": None}
    each = option.room.requests(answer.load.length)
    return {
        "kv_cache_tokens": option.room.tokens if option.room.token_bytes else None,
        "requests": each * option.plan.layout.dp,
        "kv_cache_bytes_per_token": option.room.token_bytes,
    }


def serving_time(served: ServeTime | None) -> dict[str, Any]:
    """For `--json`."""
    if served is None:
        return {
            "ttft_ms": None,
            "tpot_ms": None,
            "output_tokens_per_s": None,
            "output_tokens_per_s_per_device": None,
            "requests_per_s": None,
        }
    return {
        "ttft_ms": served.ttft_s * 1e3,
        "queue_ms": served.queue_s * 1e3,
        "tpot_ms": served.tpot_s * 1e3,
        "prefill_ms": served.prefill_s * 1e3,
        "output_tokens_per_s": served.output_tokens_per_s,
        "output_tokens_per_s_per_device": served.output_tokens_per_s_per_device,
        "requests_per_s": served.requests_per_s,
        "running": served.running,
        "queued": served.queued,
        "decode_ms": {name: value * 1e3 for name, value in served.decode.parts().items()},
    }


def serving_row(option: Option, answer: Answer) -> dict[str, str]:
    """An option in a table."""
    served, room = option.served, capacity(option, answer)["requests"]
    return {
        "name": option.name,
        "memory": f"{option.memory.total / GIB:,.1f} GiB",
        "room": "-" if room is None else f"{room:,}",
        "ttft": "-" if served is None else seconds(served.ttft_s),
        "tpot": "-" if served is None else seconds(served.tpot_s),
        "rate": "-" if served is None else f"{served.output_tokens_per_s:,.0f}",
    }


def lever_notes(answer: Answer) -> list[str]:
    """What fewer bits cost in quality, and who says so."""
    names = [option.plan.serve.weights or "bf16" for option in answer.levers]
    return [f"{name}: {FORMATS[name].quality}" for name in names if name != "bf16"]


def options_table(options: list[Option], answer: Answer) -> RenderableType:
    """Options side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("option", "memory", "room for", "TTFT", "TPOT", "output tokens/s"):
        table.add_column(name, justify="left" if name == "option" else "right")
    for option in options:
        table.add_row(*serving_row(option, answer).values())
    return Padding(table, (0, 0, 1, 2))


def serving_speed(option: Option, answer: Answer) -> RenderableType:
    """Where the time of a pass goes, and how much the cache holds."""
    predicted, served, room = option.plan.predicted, option.served, option.room
    evidence = predicted.step_evidence if predicted else ""
    if room is None:
        return Text()
    held = capacity(option, answer)
    rows: list[RenderableType] = []
    if held["kv_cache_tokens"] is not None:
        rows.append(
            Text(
                f"cache: {room.token_bytes / 1024:.4g} KiB a token and device, room for "
                f"{held['kv_cache_tokens']:,} tokens in a replica, {held['requests']:,} requests "
                "of the asked length in all"
            )
        )
    if served is None:
        rows.append(Text(f"speed: unknown, {evidence}\n", style="dim"))
        return Group(*rows)
    decode = served.decode
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in decode.parts().items())
    rows.append(
        Text(
            f"a pass: {seconds(decode.total_s)} = {parts}; a prompt makes passes "
            f"{seconds(served.prefill_s)} longer"
        )
    )
    rows.append(Text(f"{evidence}\n", style="dim"))
    return Group(*rows)


def plan_to_run(answer: Answer) -> Plan | None:
    """What a plan file holds; None where nothing was chosen, or nothing that Shardwise can run."""
    chosen = answer.chosen
    if chosen is None or answer.load is None:
        return None if chosen is None else chosen.plan
    return None if why_not_run(chosen) is not None else runnable(chosen)


def lever_data(option: Option) -> dict[str, Any]:
    """For `--json`."""
    one = {"option": option.name, "total": round(option.memory.total / GIB, 4)}
    if option.room is None:
        return one
    weights = option.plan.serve.weights or "bf16"
    return {
        **one,
        "weights": weights,
        "quality": FORMATS[weights].quality,
        **serving_time(option.served),
    }
