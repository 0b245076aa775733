"""Write a plain Hugging Face directory from any weight source, one tensor at a time."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.config import Lora
from shardwise.errors import UserError
from shardwise.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    BASE_FILE,
    LORA_A,
    LORA_B,
    file_name,
    write_adapters,
)
from shardwise.models.facts import ModelFacts
from shardwise.models.hub import CONFIG_FILE, TOKENIZER_FILE
from shardwise.models.nf4 import rounded
from shardwise.models.read import base_of, directory_with
from shardwise.parallel.data import DTYPES as COMPUTE_DTYPES
from shardwise.weights.index import INDEX_FILE, SINGLE_FILE, WeightIndex
from shardwise.weights.load import read_into
from shardwise.weights.names import Stored, stored_tensors

DTYPES = {**COMPUTE_DTYPES, "fp16": torch.float16}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_FILE_BYTES = 4 * 2**30


def export_model(
    index: WeightIndex,
    facts: ModelFacts,
    target: Path,
    dtype: torch.dtype,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Write config, tokenizer and weights of a verified source to a new directory.

    Holds one tensor in memory, never the model. The directory appears under its name only when
    it is whole. Tied weights are written once. Adapters are merged into the matrices that they
    are beside, in fp32, before those are cast; matrices that were in four bits in training are
    written as they were then.

    Returns:
        Bytes of the tensors written.

    Raises:
        UserError: the directory exists, or cannot be written.
    """
    lora, packed = facts.adapters, facts.packed_parameters()
    facts = replace(facts, adapters=None)
    with _published(target) as partial:
        copy_model_files(base_of(index.directory) or index.directory, partial)
        copy_model_files(directory_with(TOKENIZER_FILE, index.directory), partial)
        name = str(dtype).removeprefix("torch.")
        _change_config(partial / CONFIG_FILE, torch_dtype=None, dtype=name)
        files = list(_files(facts, dtype, max_file_bytes))
        weight_map: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            name = _file_name(number, len(files))
            _write_file(partial / name, index, names, dtype, lora, packed)
            weight_map.update(dict.fromkeys((stored.name for stored in names), name))
        written = sum(_num_bytes(stored, dtype) for stored in stored_tensors(facts))
        if len(files) > 1:
            content = {"metadata": {"total_size": written}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return written


def rounding_error(index: WeightIndex, facts: ModelFacts) -> float:
    """How far the first layer's matrices of four bits are from the stored ones: the root mean
    square of the difference, as a share of theirs."""
    first = f"{facts.family.names.layers}.0."
    lost = there = 0.0
    for name in facts.packed_parameters():
        if name.startswith(first):
            whole = _whole(index, name)
            lost += float((rounded(whole) - whole).pow(2).sum())
            there += float(whole.pow(2).sum())
    return math.sqrt(lost / there) if there else 0.0


def export_adapters(index: WeightIndex, facts: ModelFacts, target: Path, dtype: torch.dtype) -> int:
    """Write the adapters of a verified source to a new directory, as PEFT reads them; the
    tokenizer too (returns and errors as `export_model`)."""
    if facts.adapters is None:
        raise ValueError("the facts have no adapters")
    base = base_of(index.directory)
    tensors = [
        Stored(name=file_name(name), shape=shape, parameter=name, offset=(0,) * len(shape))
        for name, shape in facts.parameter_shapes.items()
        if name.endswith((LORA_A, LORA_B))
    ]
    with _published(target) as partial:
        copy_model_files(directory_with(TOKENIZER_FILE, index.directory), partial)
        (partial / CONFIG_FILE).unlink(missing_ok=True)  # PEFT's directories have none
        write_adapters(partial, facts.adapters, base or index.directory)
        _write_file(partial / ADAPTER_FILE, index, tensors, dtype)
    return sum(_num_bytes(stored, dtype) for stored in tensors)


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """A new directory that gets its name when it is whole, and is removed if that fails."""
    if target.exists():
        raise UserError(f"{target} exists already; give another --out.")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_model_files(source: Path, target: Path) -> None:
    """Copy what makes a directory a Hugging Face model besides its weights."""
    for file in source.iterdir():
        is_small = file.suffix in (".json", ".jinja", ".model", ".txt")
        if is_small and file.name not in (INDEX_FILE, ADAPTER_CONFIG, BASE_FILE):
            shutil.copyfile(file, target / file.name)
    if (target / CONFIG_FILE).exists():
        _change_config(target / CONFIG_FILE, quantization_config=None)  # it was of other weights


def _files(facts: ModelFacts, dtype: torch.dtype, max_file_bytes: int) -> Iterator[list[Stored]]:
    """The tensors of each output file."""
    tensors: list[Stored] = []
    size = 0
    for stored in stored_tensors(facts):
        num_bytes = _num_bytes(stored, dtype)
        if tensors and size + num_bytes > max_file_bytes:
            yield tensors
            tensors, size = [], 0
        tensors.append(stored)
        size += num_bytes
    yield tensors


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_file(
    path: Path,
    index: WeightIndex,
    tensors: Sequence[Stored],
    dtype: torch.dtype,
    lora: Lora | None = None,
    packed: Container[str] = (),
) -> None:
    """Write one safetensors file (header length, JSON header, tensors) tensor by tensor.

    Args:
        lora: adapters to merge.
        packed: parameters that are rounded to four bits before.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored in tensors:
        begin, end = end, end + _num_bytes(stored, dtype)
        header[stored.name] = {
            "dtype": _SAFETENSORS_NAMES[_dtype(stored, dtype)],
            "shape": stored.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for stored in tensors:
            a, b = (f"{stored.parameter.removesuffix('.weight')}.{x}" for x in (LORA_A, LORA_B))
            is_merged, is_packed = lora is not None and a in index, stored.parameter in packed
            exact = torch.float32 if is_merged or is_packed else _dtype(stored, dtype)
            tensor = _read(index, stored, exact)
            if is_packed:
                tensor = rounded(tensor)
            if lora is not None and is_merged:
                tensor.addmm_(_whole(index, b), _whole(index, a), alpha=lora.scale)
            file.write(tensor.to(_dtype(stored, dtype)).view(torch.uint8).numpy().data)


def _read(index: WeightIndex, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(stored.box_shape, dtype=dtype)
    ends = zip(stored.offset, stored.box_shape, strict=True)
    box = tuple(slice(begin, begin + size) for begin, size in ends)
    read_into(tensor, box, index.pieces[stored.parameter], stored.name)
    return tensor


def _whole(index: WeightIndex, name: str) -> torch.Tensor:
    """A parameter of the source, in fp32."""
    shape = index.shape(name)
    stored = Stored(name=name, shape=shape, parameter=name, offset=(0,) * len(shape))
    return _read(index, stored, torch.float32)


def _dtype(stored: Stored, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if stored.is_buffer else dtype


def _num_bytes(stored: Stored, dtype: torch.dtype) -> int:
    return torch.Size(stored.shape).numel() * _dtype(stored, dtype).itemsize


def _change_config(file: Path, **changes: str | None) -> None:
    """Set keys of a config.json, or drop those that get None; a file that says it already stays."""
    config = json.loads(file.read_text(encoding="utf-8"))
    changed = {**config, **changes}
    changed = {key: value for key, value in changed.items() if key not in changes or value}
    if changed != config:
        file.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
