"""Where files and models name weights differently: experts, apart or stacked. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.models.facts import DOWN, GATE_UP, ModelFacts
from shardwise.weights.index import Piece, WeightIndex, open_index


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor as Hugging Face files hold it: a box of one of the model's parameters."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    offset: tuple[int, ...]
    """of the box in the parameter"""

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape with as many dimensions as the parameter has."""
        return (1,) * (len(self.offset) - len(self.shape)) + self.shape


def stored_tensors(facts: ModelFacts) -> Iterator[Stored]:
    """Every tensor of the model's Hugging Face files, in the order of the parameters."""
    for name, shape in facts.parameter_shapes.items():
        if facts.family.experts is None or ".mlp." not in name:
            yield Stored(name=name, shape=shape, parameter=name, offset=(0,) * len(shape))
        else:
            yield from _of_experts(name, shape, facts)


def _of_experts(name: str, shape: tuple[int, ...], facts: ModelFacts) -> Iterator[Stored]:
    names = facts.family.experts
    if names is None:
        return
    layer = name.split("mlp.")[0]
    if not name.endswith((GATE_UP, DOWN)):  # the router
        stored = name.replace("mlp.", f"{names.block}.", 1)
        yield Stored(name=stored, shape=shape, parameter=name, offset=(0,) * len(shape))
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


def open_model_index(directory: str | Path, facts: ModelFacts) -> WeightIndex:
    """The weights of a directory under the model's own names (errors as `open_index`)."""
    index = open_index(directory)
    if facts.family.experts is None:
        return index
    pieces = dict(index.pieces)
    found: dict[str, list[Piece]] = {}
    for stored in stored_tensors(facts):
        if stored.name != stored.parameter and stored.name in pieces:
            for piece in pieces.pop(stored.name):
                found.setdefault(stored.parameter, []).append(_in_parameter(piece, stored))
    renamed = {name: tuple(found[name]) for name in found if name not in pieces}
    return replace(index, pieces={**pieces, **renamed})


def _in_parameter(piece: Piece, stored: Stored) -> Piece:
    added = len(stored.offset) - len(piece.offset)
    offset = (0,) * added + piece.offset
    return replace(
        piece,
        offset=tuple(a + b for a, b in zip(offset, stored.offset, strict=True)),
        shape=(1,) * added + piece.shape,
        num_added=added,
    )
