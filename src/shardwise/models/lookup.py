"""What the user calls a model -> its facts, or the directory to run it from. No torch.

`plan` accepts a directory, a config.json, a GGUF file, a hub id or a name of the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.catalog.models import KnownModel, find_model, nearest_name
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.gguf import check_count, config_of_gguf, is_gguf, read_header
from shardwise.models.hub import (
    CONFIG_FILE,
    cached_directory,
    fetch_config,
    is_hub_id,
    read_config,
)
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.read import base_of, facts_of_config, read_facts, why_not_run

_TEXT_PART = "the language part of a model that also does other things"
_OUTER_KEYS = ("tie_word_embeddings", "quantization_config")
"""that a config of several parts may have outside of the language part"""


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model as `plan` needs it."""

    model: str
    """what a plan of it keeps: a path, or an id on the hub"""
    facts: ModelFacts
    directory: Path | None = None
    """where its weights are, if it can be run from there"""
    notes: tuple[str, ...] = ()
    """where the facts are from, and what cannot be done with the model but plan"""


def look_up(model: str | Path) -> FoundModel:
    """Find a model by what the user calls it.

    A path that exists comes first, then the catalogue, then the local hub cache, then the hub.

    Raises:
        UserError: there is no such model, or it cannot be planned; one line with what could be
            meant.
    """
    path, text = Path(model), str(model)
    if path.is_dir():
        if base_of(path) is not None:
            return FoundModel(model=str(path.resolve()), facts=read_facts(path), directory=path)
        return _in_directory(path)
    if path.exists():
        return _in_file(path)
    known = find_model(text)
    if known is not None:
        return _known(*known)
    if not is_hub_id(text):
        raise UserError(_no_such_model(text))
    found = cached_directory(text)
    if found is not None:
        file = found / CONFIG_FILE
        return _of_config(read_config(file), str(file), model=text, directory=found)
    config = fetch_config(text, _did_you_mean(text))
    return _of_config(config, f"{text}/{CONFIG_FILE}", model=text)


def local_model(model: str) -> str:
    """The directory of a plan's model, which may be named by its hub id or in the catalogue.

    Raises:
        UserError: a GGUF file, a model that is planned only, or one whose files are not here.
    """
    path = Path(model)
    if path.is_file() and is_gguf(path):
        raise UserError(
            f"{model} is a GGUF file: make a directory of it with `shardwise export {model} --out "
            "DIR`, or give that of the model that it was made of."
        )
    known = None if path.exists() else find_model(model)
    if known is not None:
        reason = _why_not_run(known[0])
        if reason is not None:
            raise UserError(f"Shardwise plans {model!r} and does not run it: {reason}.")
        model = known[1]
    if path.exists() or not is_hub_id(model):
        return model
    found = cached_directory(model)
    if found is None:
        raise UserError(
            f"no directory {model!r}, and the local hub cache has no model of that id: fetch it "
            f"with `hf download {model}`, or give its directory in place of the id."
        )
    return str(found)


def _in_directory(path: Path) -> FoundModel:
    file = path / CONFIG_FILE
    if not file.exists():
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"give the GGUF file in it: {path / files[0]}" if files else "give another directory"
        raise UserError(f"no model at {str(path)!r}: the directory has no {CONFIG_FILE}; {hint}.")
    return _of_config(read_config(file), str(file), model=str(path.resolve()), directory=path)


def _in_file(path: Path) -> FoundModel:
    if path.name == CONFIG_FILE:  # weights are looked for beside it
        return _in_directory(path.parent)
    model = str(path.resolve())
    if not is_gguf(path):
        return _of_config(read_config(path), str(path), model=model)
    header = read_header(path)
    facts = facts_of_config(config_of_gguf(header), source=str(path), planning=True)
    check_count(header, facts)
    note = (
        "planned only: from the header of a GGUF file, as if its weights were not quantised; "
        "`shardwise export` makes a directory of it that can be run"
    )
    return FoundModel(model=model, facts=facts, notes=(note,))


def _known(known: KnownModel, hub_id: str) -> FoundModel:
    source = f"the catalogue's {known.name}"
    facts = facts_of_config(known.config, source=source, planning=True)
    where = "; ".join(source.what for source in known.sources)
    reason = _why_not_run(known)
    notes = (f"sizes of {hub_id} from the catalogue: {where}", *_only_planned(reason))
    return FoundModel(model=hub_id, facts=facts, notes=notes)


def _why_not_run(known: KnownModel) -> str | None:
    return known.only_planned or why_not_run(known.config)


def _of_config(
    config: Mapping[str, Any], source: str, *, model: str, directory: Path | None = None
) -> FoundModel:
    """The model of a config.json, which may be a part of a larger one."""
    reason, inner = None, config.get("text_config")
    if str(config.get("model_type")) not in ALL_FAMILIES and isinstance(inner, Mapping):
        outer = {key: config[key] for key in _OUTER_KEYS if key in config}
        config, reason = {**outer, **inner}, _TEXT_PART
    facts = facts_of_config(config, source=source, planning=True)
    reason = reason or why_not_run(config)
    return FoundModel(
        model=model,
        facts=facts,
        directory=None if reason else directory,
        notes=_coded(facts) if reason is None else _only_planned(reason),
    )


def _coded(facts: ModelFacts) -> tuple[str, ...]:
    if facts.stored_as is None:
        return ()
    return (
        f"its files are in {facts.stored_as}; they are read as the numbers that they stand for",
    )


def _only_planned(reason: str | None) -> tuple[str, ...]:
    return () if reason is None else (f"planned only: {reason}",)


def _no_such_model(text: str) -> str:
    return (
        f"no model {text!r}: expected a directory with {CONFIG_FILE}, that file, a GGUF file, a "
        f"hub id (OWNER/NAME), or a name of `shardwise catalog models`{_did_you_mean(text)}"
    )


def _did_you_mean(text: str) -> str:
    near = nearest_name(text)
    return f"; did you mean {near!r}?" if near else "."
