"""What `shardwise inspect` has found, as a page and as JSON. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from shardwise.console import count, gib, seconds

Kind = Literal["model", "adapters", "checkpoint", "run", "plan", "gguf", "config"]
_TITLES: dict[Kind, tuple[str, str, str]] = {
    "model": ("a Hugging Face model", "whole", "NOT whole"),
    "adapters": ("adapters", "whole", "NOT whole"),
    "checkpoint": ("a checkpoint", "complete", "NOT complete"),
    "run": ("a training run", "what it saved is complete", "NOT complete"),
    "plan": ("a plan", "", ""),
    "gguf": ("a GGUF file", "", ""),
    "config": ("sizes of a model", "", ""),
}
"""kind -> what it is called, and what is said of one without and with problems"""
_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a path is."""

    path: Path
    kind: Kind
    fields: Mapping[str, Any]
    """name -> value as JSON can hold it; sizes in bytes; None: there is none, or it is not known"""
    problems: tuple[str, ...] = ()
    """what is missing, cut short, wrong or incomplete, a sentence each"""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `whole`: there are no problems."""
        head = {"path": str(self.path), "kind": self.kind, "whole": not self.problems}
        tail = {"problems": list(self.problems), "notes": list(self.notes)}
        return {**head, **self.fields, **tail}


def render(found: Found) -> RenderableType:
    """The terminal page: what it is, its fields, what is wrong, notes."""
    name, good, bad = _TITLES[found.kind]
    state, style = (bad, "bold red") if found.problems else (good, "bold green")
    title = Text.assemble((f"{found.path}: {name}", "bold"))
    if state:
        title.append(", ").append(state, style=style)
    fields = dict(found.fields)
    if found.problems and fields.get("runs"):
        fields["runs"] = "yes, once it is whole"
    rows = [(_label(key), _lines(key, value)) for key, value in fields.items()]
    rows = [(label, lines) for label, lines in rows if lines]
    width = max((len(label) for label, _ in rows), default=0)
    parts: list[RenderableType] = [title]
    for label, lines in rows:
        for number, line in enumerate(lines):
            parts.append(Text(f"  {'' if number else label:<{width}}  {line}"))
    parts += [Text(f"  - {line}", style="red") for line in _first(found.problems)]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _label(key: str) -> str:
    return _LABELS.get(key, key.replace("_", " "))


def _lines(key: str, value: Any) -> list[str]:
    """A field in words, a line or more; none of what is not known."""
    if key in _WORDS:
        text = _WORDS[key](value)
        return _first(text) if isinstance(text, list) else [text]
    if value is None or value == []:
        return []
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if key.endswith(("parameters", "values")):
        return [count(value)]
    if key.endswith("bytes"):
        return [gib(value)]
    return [", ".join(value) if isinstance(value, list) else f"{value}"]


def _first(lines: list[str] | tuple[str, ...]) -> list[str]:
    more = len(lines) - _MOST_LINES
    rest = [f"and {more} more (all of them: --json)"] if more > 0 else []
    return [*lines[:_MOST_LINES], *rest]


def _checkpoint(value: Mapping[str, Any]) -> str:
    return f"{value['name']}  {'complete' if value['complete'] else 'NOT complete'}"


def _checkpoint_around(value: Mapping[str, Any]) -> str:
    return _checkpoint(value) + ("" if value["complete"] else f": {value['why_not']}")


def _checkpoints(value: list[Mapping[str, Any]]) -> list[str]:
    """The newest first: they are what is asked for, and a long list is cut."""
    return [_checkpoint(one) for one in reversed(value)] or ["none"]


def _devices(value: Mapping[str, Any]) -> str:
    memory = value["memory_gib"]
    text = f"{value['count']} x {value['kind']}"
    return text if memory is None else f"{text}, {memory:.2f} GiB each"


def _steps(value: Mapping[str, int | None]) -> str:
    return f"{value['done']}" if value["of"] is None else f"{value['done']} of {value['of']}"


_LABELS = {
    "bytes": "size",
    "model_bytes": "weights",
    "optimizer_bytes": "optimizer state",
    "predicted_bytes": "memory a device",
    "predicted_step_s": "time of a step",
    "dtypes": "stored as",
    "model_is_there": "model is there",
    "runs": "Shardwise runs it",
    "base": "digest of the model",
}
"""of a field, where it is not its name"""
_WORDS: dict[str, Callable[[Any], str | list[str]]] = {
    "quantize": lambda value: value or "no",
    "checkpoint": _checkpoint_around,
    "checkpoints": _checkpoints,
    "devices": _devices,
    "steps": _steps,
    "loss": lambda value: "not known" if value is None else f"{value:.4f}",
    "alpha": lambda value: f"{value:g}",
    "predicted_step_s": lambda value: "not known" if value is None else seconds(value),
}
"""of a field, where its value says too little"""
