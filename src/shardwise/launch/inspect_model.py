"""What a directory of a model or of adapters holds, and what it lacks. No torch."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import UserError
from shardwise.launch.found import Found
from shardwise.models.adapters import ADAPTER_CONFIG, read_adapters
from shardwise.models.facts import ModelFacts
from shardwise.models.hub import CONFIG_FILE, read_config
from shardwise.models.lookup import look_up
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.read import base_of, read_facts
from shardwise.weights.index import open_index, verify
from shardwise.weights.names import open_model_index

_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8", "MXFP4": "mxfp4"}


def model_at(path: Path) -> Found:
    """A directory with weights of a model: what its config says of it, and whether the files hold
    that. A config that cannot be read, and files that are missing or cut, are among its problems.
    """
    problems: list[str] = []
    fields, facts = _described(path, problems)
    stored, notes = _stored(path, facts, problems)
    return Found(
        path=path, kind="model", fields=fields | stored, problems=tuple(problems), notes=notes
    )


def _described(path: Path, problems: list[str]) -> tuple[dict[str, Any], ModelFacts | None]:
    """What the config of a model says; its facts, if the weights can be compared with them."""
    if not (path / CONFIG_FILE).exists():
        problems.append(f"{path / CONFIG_FILE} is missing")
        return {}, None
    try:
        model_type = str(read_config(path / CONFIG_FILE).get("model_type"))
    except UserError as error:
        problems.append(str(error))
        return {}, None
    try:
        found = look_up(path)
    except UserError as error:
        fields = {"family": model_type, "runs": False}
        if model_type in ALL_FAMILIES:
            problems.append(str(error))
            return fields, None
        return {**fields, "why_not": str(error)}, None  # it may be a good model of another kind
    runs = found.directory is not None
    fields = {
        **_counted(found.facts),
        "runs": runs,
        "why_not": None if runs else "; ".join(found.notes) or None,
    }
    return fields, found.facts if runs else None


def _counted(facts: ModelFacts) -> dict[str, Any]:
    return {
        "family": facts.model_type,
        "parameters": facts.num_parameters,
        "active_parameters": facts.num_parameters_met if facts.num_experts else None,
        "tied": facts.tied,
    }


def _stored(
    path: Path, facts: ModelFacts | None, problems: list[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the weight files of a directory hold, and notes on it.

    Tensors are compared with the facts only where all files are whole: what a missing file held
    need not be told twice.
    """
    before = len(problems)
    try:
        if facts is None:
            index = open_index(path, report=problems.append)
        else:
            index = open_model_index(path, facts, report=problems.append)
    except UserError as error:
        problems.append(str(error))
        return {}, ()
    notes = index.notes
    if facts is None:
        notes = (*notes, "the tensors are not compared with the config")
    elif len(problems) == before:
        notes = verify(index, facts, compare_tied=False, report=problems.append)
    own = [p for pieces in index.pieces.values() for p in pieces if p.file.parent == path]
    dtypes: Counter[str] = Counter()
    for piece in own:
        dtypes[_DTYPES.get(piece.dtype, piece.dtype)] += piece.num_bytes
    fields = {
        "stored_values": sum(math.prod(p.shape) for p in own) if facts is None else None,
        "dtypes": [name for name, _ in dtypes.most_common()],
        "files": len({piece.file for piece in own}),
        "bytes": sum(piece.num_bytes for piece in own),
    }
    return fields, notes


def adapters_at(path: Path) -> Found:
    """A directory of adapters: what they are, whether their model is there, and whether the files
    of both hold what they should."""
    problems: list[str] = []
    fields = _named(path, problems)
    facts, why_not = None, None
    try:
        if "model" in fields:  # else the file cannot be read, which is said already
            lora = read_adapters(path)
            fields |= lora.model_dump(include={"rank", "alpha", "targets", "quantize"})
        facts = read_facts(path) if fields["model_is_there"] else None
    except UserError as error:
        why_not = str(error)
    stored, notes = _stored(path, facts, problems)
    if facts is None:
        fields["trained_parameters"] = stored.pop("stored_values", None)
    else:
        fields |= {**_counted(facts), "trained_parameters": facts.num_trained_parameters}
    fields |= {"runs": facts is not None, "why_not": why_not, **stored}
    return Found(path=path, kind="adapters", fields=fields, problems=tuple(problems), notes=notes)


def _named(path: Path, problems: list[str]) -> dict[str, Any]:
    """The model that adapters name, and whether it is there."""
    fields: dict[str, Any] = {}
    if not (path / ADAPTER_CONFIG).exists():
        problems.append(f"{path / ADAPTER_CONFIG} is missing")
        return {"model_is_there": False}
    try:
        given = read_config(path / ADAPTER_CONFIG).get("base_model_name_or_path")
        fields["model"] = None if given is None else str(given)
        fields["model_is_there"] = base_of(path) is not None
    except UserError as error:
        problems.append(str(error))
        fields["model_is_there"] = False
    return fields


def sizes_at(path: Path, kind: Literal["gguf", "config"]) -> Found:
    """A file that says the sizes of a model and holds no weights that Shardwise reads.

    Raises:
        UserError: it cannot be read, or the model cannot be planned.
    """
    found = look_up(path)
    notes = ("planned from sizes only; no weights are looked at", *found.notes)
    return Found(path=path, kind=kind, fields=_counted(found.facts), notes=notes)
