"""Where files and models name weights differently: experts apart or stacked, matrices fused or in
parts, a body without its prefix. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.models.adapters import parameter_name
from shardwise.models.facts import HEAD, ModelFacts
from shardwise.models.layers import DOWN, GATE_UP
from shardwise.models.read import base_of
from shardwise.weights.codes import join_codes
from shardwise.weights.index import Piece, Report, WeightIndex, open_index, refuse


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor as Hugging Face files hold it: a box of one of the model's parameters."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    offset: tuple[int, ...]
    """of the box in the parameter"""
    is_buffer: bool = False
    """whether it is not trained, and stays fp32 whatever the others become"""

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape with as many dimensions as the parameter has."""
        return (1,) * (len(self.offset) - len(self.shape)) + self.shape


def stored_tensors(facts: ModelFacts) -> Iterator[Stored]:
    """Every tensor of the model's Hugging Face files, in the order of the parameters."""
    stacked = facts.family.experts is None or facts.family.experts.stored is None
    for name, shape in facts.stored_shapes.items():
        if stacked or ".mlp." not in name:
            yield _as_it_is(name, shape, facts)
        else:
            yield from _of_experts(name, shape, facts)


def _as_it_is(name: str, shape: tuple[int, ...], facts: ModelFacts) -> Stored:
    is_buffer = name in facts.buffer_shapes
    offset = (0,) * len(shape)
    return Stored(name=name, shape=shape, parameter=name, offset=offset, is_buffer=is_buffer)


def _of_experts(name: str, shape: tuple[int, ...], facts: ModelFacts) -> Iterator[Stored]:
    names = facts.family.experts.stored if facts.family.experts else None
    if names is None:
        return
    layer = name.split("mlp.")[0]
    if not name.endswith((GATE_UP, DOWN)):  # the router, or an MLP
        stored = name.replace("mlp.", f"{names.block}.", 1)
        yield replace(_as_it_is(name, shape, facts), name=stored)
        return
    parts = (names.gate, names.up) if name.endswith(GATE_UP) else (names.down,)
    num_experts, rows, columns = shape
    height = rows // len(parts)
    for expert in range(num_experts):
        for position, part in enumerate(parts):
            yield Stored(
                name=f"{layer}{names.block}.{part.format(expert)}",
                shape=(height, columns),
                parameter=name,
                offset=(expert, position * height, 0),
            )


def open_model_index(
    directory: str | Path, facts: ModelFacts, *, report: Report = refuse
) -> WeightIndex:
    """The weights of a directory under the model's own names, of adapters those of their model too
    (`report` and errors as `open_index`)."""
    base = base_of(Path(directory))
    if base is not None:
        model = open_model_index(base, replace(facts, adapters=None), report=report)
        own = open_index(directory, report=report)
        adapters = {parameter_name(name): pieces for name, pieces in own.pieces.items()}
        known = {*facts.parameter_shapes, *fused_parts(facts)}
        strangers = [name for name in adapters if name not in known or name in model]
        if strangers:
            report(
                f"{directory}: the files hold {strangers[0]}, which is no part of plain adapters "
                f"({len(strangers)} such); merge them with PEFT, and use the merged model."
            )
            adapters = {n: pieces for n, pieces in adapters.items() if n not in strangers}
        both = replace(own, pieces={**model.pieces, **adapters}, notes=model.notes)
        return join_parts(both, facts)
    found = join_codes(open_index(directory, report=report), facts.stored_as, report=report)
    index = with_prefix(found, facts)
    pieces = dict(index.pieces)
    boxes: dict[str, list[Piece]] = {}
    for stored in stored_tensors(facts):
        if stored.name != stored.parameter and stored.name in pieces:
            for piece in pieces.pop(stored.name):
                if len(piece.shape) == len(stored.shape):
                    boxes.setdefault(stored.parameter, []).append(_in_parameter(piece, stored))
                else:
                    report(
                        f"{directory}: {stored.name} has the shape {list(piece.shape)} in "
                        f"{piece.file.name}; the config asks for {list(stored.shape)}."
                    )
    renamed = {name: tuple(boxes[name]) for name in boxes if name not in pieces}
    return join_parts(replace(index, pieces={**pieces, **renamed}), facts)


def with_prefix(index: WeightIndex, facts: ModelFacts) -> WeightIndex:
    """As if a body that was saved without its head had the names it has in the whole model."""
    embedding = facts.family.names.embedding
    prefix, _, bare = embedding.partition(".")
    if embedding in index.pieces or bare not in index.pieces:
        return index
    pieces = {
        name if name == HEAD else f"{prefix}.{name}": found for name, found in index.pieces.items()
    }
    return replace(index, pieces=pieces)


def join_parts(index: WeightIndex, facts: ModelFacts, *, prefix: str = "") -> WeightIndex:
    """Let fused matrices be found whole and in parts, however they were saved: tensor parallelism
    takes them apart, and its checkpoints hold the parts."""
    parts = {
        f"{prefix}{name}": (f"{prefix}{whole}", first)
        for name, (whole, first) in fused_parts(facts).items()
    }
    pieces = dict(index.pieces)
    for name, (whole, first) in parts.items():
        if name in pieces:
            moved = tuple(piece.moved(first) for piece in pieces.pop(name))
            pieces[whole] = (*pieces.get(whole, ()), *moved)
    return replace(index, pieces=pieces, parts={**index.parts, **parts})


def fused_parts(facts: ModelFacts) -> dict[str, tuple[str, int]]:
    """Name of each matrix in a fused one -> the fused one, and its first row there."""
    found = {}
    for number, kind in enumerate(facts.layers):
        for name, param in facts.params_of(kind).items():
            if param.parts is None:
                continue
            whole, first = f"{facts.family.names.layers}.{number}.{name}", 0
            module, _, leaf = whole.rpartition(".")
            for part, matrix in param.parts.items():
                found[f"{module}.{part}.{leaf}"] = whole, first
                first += matrix.shape[0]
    return found


def _in_parameter(piece: Piece, stored: Stored) -> Piece:
    added = len(stored.offset) - len(piece.offset)
    offset = (0,) * added + piece.offset
    return replace(
        piece,
        offset=tuple(a + b for a, b in zip(offset, stored.offset, strict=True)),
        shape=(1,) * added + piece.shape,
        num_added=added,
    )
