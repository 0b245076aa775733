"""The catalogue of open models: sizes from their published configs, found by name or hub id."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from typing import Any

from pydantic import Field

from shardwise.config import Config
from shardwise.parsing import parse, read_yaml

_FILE = "models.yaml"


class Source(Config):
    """Where sizes were read."""

    what: str
    date: str


class Row(Config):
    """One model of the file."""

    name: str
    hub: list[str]
    """its ids on the hub, of which plans keep the first; all have the same config"""
    like: str | None = None
    """name of the row above whose config it has, but for what `config` says"""
    config: dict[str, str | int | bool | None] = Field(default_factory=dict)
    sources: list[str]
    only_planned: str | None = None
    """why Shardwise does not run the hub's files, where it runs other models of the family"""


class KnownModel(Config):
    """One model, with its whole config."""

    name: str
    hub: list[str]
    config: dict[str, Any]
    """as much of a config.json as says the sizes; `models.read` understands it"""
    sources: list[Source]
    only_planned: str | None


@cache
def load_models() -> dict[str, KnownModel]:
    """The catalogue, by name."""
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    data = read_yaml(text)
    sources = {
        name: parse(Source, row, source=f"{_FILE}: {name}") for name, row in data["sources"].items()
    }
    found: dict[str, KnownModel] = {}
    for number, entry in enumerate(data["models"], start=1):
        row = parse(Row, entry, source=f"{_FILE}: model {number}")
        base = found[row.like].config if row.like else {}
        found[row.name] = KnownModel(
            name=row.name,
            hub=row.hub,
            config={**base, **row.config},
            sources=[sources[name] for name in row.sources],
            only_planned=row.only_planned,
        )
    return found


def find_model(text: str) -> tuple[KnownModel, str] | None:
    """The model that a name, a hub id or the second half of one means, in any case of letters,
    and its id on the hub; None if the catalogue has none."""
    return _by_any_name().get(text.lower())


def nearest_name(text: str) -> str | None:
    """The name (or hub id) in the catalogue that is most like a text; None if none is."""
    known = sorted(_by_any_name())
    if "/" not in text:
        known = [name for name in known if "/" not in name]
    near = difflib.get_close_matches(text.lower(), known, n=1)
    if not near:
        return None
    _, hub_id = _by_any_name()[near[0]]
    return hub_id if "/" in text else near[0]


@cache
def _by_any_name() -> dict[str, tuple[KnownModel, str]]:
    names: dict[str, tuple[KnownModel, str]] = {}
    for model in load_models().values():
        for hub_id in model.hub:
            names[hub_id.lower()] = (model, hub_id)
            names.setdefault(hub_id.split("/")[1].lower(), (model, hub_id))
    return names | {model.name: (model, model.hub[0]) for model in load_models().values()}
