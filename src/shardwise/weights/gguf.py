"""The tensors of a GGUF file as pieces of the model's own parameters. No torch.

llama.cpp's converter changes some of them: it interleaves the two halves of Llama's query and key
heads (for another way to rotate them), and adds one to Gemma's norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, missing_extra
from shardwise.models.facts import ModelFacts
from shardwise.models.gguf import Header
from shardwise.models.layers import DOWN, GATE_UP
from shardwise.weights.index import Ggml, Piece, WeightIndex

READ = ("gemma3", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")
"""architectures whose tensors are known to be the same numbers, but for the changes above"""
_HALVES_INTERLEAVED = ("llama",)
_ONE_ADDED = ("gemma3",)
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_package() -> Any:
    """The package that knows ggml's number formats.

    Raises:
        UserError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise missing_extra("gguf", "gguf", "reading the weights of a GGUF file") from None
    return gguf


@cache
def _can_decode(kind: Any, block_bytes: int) -> bool:
    """Whether the package makes numbers of a format: it knows the sizes of more."""
    import numpy

    try:
        gguf_package().dequantize(numpy.zeros((1, block_bytes), dtype=numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


def why_not_read(header: Header) -> str | None:
    """The reason why a file's weights are not read; None if they are."""
    architecture = header.values.get("general.architecture")
    if architecture not in READ:
        return f"of GGUF files those of {', '.join(READ)} are read, not {architecture!r}"
    scaling = header.values.get(f"{architecture}.rope.scaling.type", "none")
    tables = [name for name in _ROPE_TABLES if name in header.tensors]
    if scaling != "none" or tables:
        how = tables[0] if tables else f"rope.scaling.type={scaling!r}"
        return f"it scales its rotary embedding ({how}), which transformers would not know of"
    return None


def open_gguf(header: Header, facts: ModelFacts, directory: Path) -> WeightIndex:
    """The pieces of every parameter, under the model's own names.

    Args:
        directory: with the config and tokenizer of the same model.

    Raises:
        UserError: a file is cut short, a tensor has another shape or an unknown number format, or
            the package `gguf` is missing.
    """
    architecture = str(header.values["general.architecture"])
    kinds = gguf_package().MODEL_ARCH_NAMES.items()
    kind = next(kind for kind, name in kinds if name == architecture)
    names = gguf_package().get_tensor_name_map(kind, facts.num_layers)
    pieces: dict[str, tuple[Piece, ...]] = {}
    for name, shape in facts.stored_shapes.items():
        found = tuple(_pieces(name, shape, header, facts, names))
        if found:
            pieces[name] = found
    return WeightIndex(directory=directory, pieces=pieces)


def _pieces(
    name: str, shape: tuple[int, ...], header: Header, facts: ModelFacts, names: Any
) -> Iterator[Piece]:
    """Those of one parameter: of stacked experts one a matrix."""
    if name.endswith((GATE_UP, DOWN)):
        block = f"blk.{name.split('.')[2]}"
        parts = ("gate", "up") if name.endswith(GATE_UP) else ("down",)
        rows = shape[1] // len(parts)
        for number, part in enumerate(parts):
            inner = (shape[0], rows, shape[2])
            yield _piece(f"{block}.ffn_{part}_exps.weight", inner, (0, number * rows, 0), header)
        return
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if stored not in header.tensors:
        return
    architecture = header.values["general.architecture"]
    is_head = ".attn_q." in stored or ".attn_k." in stored
    yield _piece(
        stored,
        shape,
        (0,) * len(shape),
        header,
        head_dim=facts.head_dim if is_head and architecture in _HALVES_INTERLEAVED else None,
        less=1.0 if architecture in _ONE_ADDED and "norm" in stored else 0.0,
    )


def _piece(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], header: Header, **how: Any
) -> Piece:
    place, sizes = header.places.get(name), gguf_package().GGML_QUANT_SIZES
    if place is None:
        raise UserError(f"{header.path}: the tensor {name} is missing.")
    if header.tensors[name] != shape:
        raise UserError(
            f"{header.path}: {name} has the shape {list(header.tensors[name])}; the header's sizes "
            f"ask for {list(shape)}."
        )
    if place.kind not in {int(kind) for kind in sizes}:
        raise UserError(f"{header.path}: {name} has the unknown number format {place.kind}.")
    kind = gguf_package().GGMLQuantizationType(place.kind)
    values, block_bytes = sizes[kind]
    if not _can_decode(kind, block_bytes):
        raise UserError(f"{header.path}: {name} is stored as {kind.name}, which is not read.")
    if shape[-1] % values:
        raise UserError(
            f"{header.path}: rows of {name} have {shape[-1]} values, {kind.name} has blocks of "
            f"{values}."
        )
    row_bytes = shape[-1] // values * block_bytes
    num_bytes = math.prod(shape[:-1]) * row_bytes
    size = place.file.stat().st_size
    if place.start + num_bytes > size:
        raise UserError(
            f"{place.file} has {size} bytes, {name} would end at {place.start + num_bytes}; fetch "
            "it again."
        )
    common: dict[str, Any] = {"file": place.file, "name": name, "num_bytes": num_bytes}
    common |= {"data_start": place.start, "offset": offset}
    rows = Piece(**common, dtype="U8", shape=(*shape[:-1], row_bytes))
    return Piece(**common, dtype=kind.name, shape=shape, codec=Ggml(rows=rows, **how))
