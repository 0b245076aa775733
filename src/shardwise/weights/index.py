"""Find and verify weight files before any parameter is touched. No torch.

A weight source is a set of pieces: (file, tensor name, offset of the piece in the full tensor).
A Hugging Face directory has one piece a tensor, at offset 0; a training checkpoint has one a rank.
So one loader reads both, whatever layout wrote them.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import UserError
from shardwise.models.facts import HEAD, ModelFacts

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OFFSETS_KEY = "DCP_SHARDING_INFO"  # where torch.distributed.checkpoint notes a piece's offset
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_MAX_HEADER_BYTES = 100 * 2**20
_VALUE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_VALUE_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_FLOATS = ("F32", "F16", "BF16")
Report = Callable[[str], None]
"""what to do with each thing that is wrong"""


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Numbers that are a byte each, times a scale."""

    scales: Piece
    block: tuple[int, ...]
    """how many numbers along each dimension share one"""


@dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """Numbers of four bits, of which 32 share a power of two."""

    codes: Piece
    """[experts, outputs, blocks of inputs, bytes]"""
    scales: Piece
    """[experts, outputs, blocks of inputs]"""


@dataclass(frozen=True, kw_only=True)
class Ggml:
    """Rows of blocks, in one of ggml's number formats."""

    rows: Piece
    """of bytes"""
    head_dim: int | None = None
    """of a projection whose heads have their two halves interleaved, row by row"""
    less: float = 0.0
    """taken off each number"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one tensor that lies in one file."""

    file: Path
    name: str
    """in the file"""
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data_start: int
    """first byte in the file"""
    num_bytes: int
    num_added: int = 0
    """leading dimensions of length one that the file does not have"""
    codec: Fp8 | Mxfp4 | Ggml | None = None
    """how its numbers are made of what the file holds; None: they are that"""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        return self.shape[self.num_added :]

    def moved(self, rows: int) -> Piece:
        """The same piece so many rows further on; one that has no rows stays."""
        if not self.offset:
            return self
        first, *others = self.offset
        return replace(self, offset=(first + rows, *others))


@dataclass(frozen=True, kw_only=True)
class WeightIndex:
    """Tensor name -> its pieces, and what the user should know about the directory."""

    directory: Path
    pieces: Mapping[str, tuple[Piece, ...]]
    notes: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """parameter that is some rows of a tensor -> that tensor, and the first row"""

    def __contains__(self, name: str) -> bool:
        return name in self.pieces or self.parts.get(name, ("",))[0] in self.pieces

    def pieces_of(self, name: str) -> tuple[Piece, ...]:
        """The pieces of a parameter, in its own coordinates."""
        if name not in self.parts:
            return self.pieces[name]
        whole, first = self.parts[name]
        return tuple(piece.moved(-first) for piece in self.pieces[whole])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        ends = ([o + n for o, n in zip(p.offset, p.shape, strict=True)] for p in self.pieces[name])
        return tuple(max(end) for end in zip(*ends, strict=False))

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.num_bytes for pieces in self.pieces.values() for piece in pieces)


def fingerprint(directory: Path) -> str:
    """What tells a directory's weights from others: names, sizes, headers and samples of the files
    (SHA-256). A moved or copied directory keeps it; changed weights do not, but for a change that
    all samples miss."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            for number in range(_NUM_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def refuse(problem: str) -> NoReturn:
    """Stop at the first thing that is wrong."""
    raise UserError(problem)


def open_index(directory: str | Path, *, report: Report = refuse) -> WeightIndex:
    """Read the headers of all weight files of a directory and check them against the files.

    Args:
        report: is told of each file that is missing, cut short or not safetensors; what it held is
            left out, if this returns.

    Raises:
        UserError: there are no such files at all; by `report`, naming the files.
    """
    path = Path(directory)
    names = sorted(p.name for p in path.glob("*.safetensors")) if path.is_dir() else []
    pickles = sorted(p.name for p in path.glob("*.bin")) if path.is_dir() else []
    if not names:
        raise UserError(_nothing_to_load(path, pickles))
    notes = [f"{', '.join(pickles)}: ignored, the safetensors files are used"] if pickles else []
    weight_map: dict[str, str] | None = None
    if SINGLE_FILE in names:  # as transformers has it: the single file wins over an index
        names = [SINGLE_FILE]
    else:
        weight_map = _read_weight_map(path)
    if weight_map is not None:
        absent = sorted(set(weight_map.values()) - set(names))
        if absent:
            lost = sorted(k for k, f in weight_map.items() if f in absent)
            report(
                f"{path}: {INDEX_FILE} names {_some(absent)}, which {_is(absent)} not there; "
                f"it holds {_some(lost)}. Fetch the missing files again."
            )
        names = sorted(set(weight_map.values()) - set(absent))
    headers: dict[str, dict[str, Piece]] = {}
    for name in names:
        try:
            headers[name] = _read_header(path / name)
        except UserError as error:
            report(str(error))
    pieces: dict[str, list[Piece]] = {}
    for header in headers.values():
        for key, piece in header.items():
            pieces.setdefault(key, []).append(piece)
    lost = sorted({k for k, f in (weight_map or {}).items() if f in headers} - set(pieces))
    if lost:
        report(f"{path}: {INDEX_FILE} lists {_some(lost)}, but no file holds {_it(lost)}.")
    frozen = {key: tuple(found) for key, found in pieces.items()}
    return WeightIndex(directory=path, pieces=frozen, notes=tuple(notes))


def verify(
    index: WeightIndex, facts: ModelFacts, *, compare_tied: bool = True, report: Report = refuse
) -> tuple[str, ...]:
    """Check that an index holds exactly what the model needs.

    Args:
        index: under the model's own names (`weights/names.py`).
        compare_tied: read a stored head too, to tell whether it equals the embedding.
        report: is told of each tensor that is wrong, and once of all that are missing.

    Returns:
        Warnings for the user, such as tensors that the model does not use.

    Raises:
        UserError: by `report`: a tensor is missing, has another shape, has holes or is not floating
            point.
    """
    expected, embedding = facts.stored_shapes, facts.family.names.embedding
    unknown = sorted(set(index.pieces) - set(expected) - ({HEAD} if facts.tied else set()))
    missing = sorted(set(expected) - set(index.pieces))
    if missing:
        strangers = f" It holds unknown tensors instead: {_some(unknown)}." if unknown else ""
        report(f"{index.directory}: the weights lack {_some(missing)}.{strangers}")
    for name, shape in expected.items():
        wrong = _why_wrong(index, name, shape) if name in index.pieces else None
        if wrong is not None:
            report(wrong)
    warnings = list(index.notes)
    if unknown:
        warnings.append(f"tensors that the model does not use: {_some(unknown)}")
    if facts.tied and compare_tied and {HEAD, embedding} <= set(index.pieces):
        text = f"the model ties its head to its embedding: {embedding} is used, the stored {HEAD} "
        if _equal_bytes(index.pieces[HEAD], index.pieces[embedding]):
            warnings.append(f"{text}is equal to it and is not")
        else:
            warnings.append(
                f"{text}has DIFFERENT values and is not (plain transformers would use both; set "
                "tie_word_embeddings to false in config.json for that)"
            )
    return tuple(warnings)


def _why_wrong(index: WeightIndex, name: str, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a tensor; None: nothing."""
    pieces = index.pieces[name]
    found = index.shape(name)
    files = _some(sorted({piece.file.name for piece in pieces}))
    if found != shape:
        return (
            f"{index.directory}: {name} has the shape {list(found)} in {files}; "
            f"the config asks for {list(shape)}."
        )
    stored = sum(math.prod(piece.shape) for piece in pieces)
    if stored != math.prod(shape):
        return (
            f"{index.directory}: the pieces of {name} in {files} hold {stored} values "
            f"of {math.prod(shape)}; a file of the checkpoint is missing or doubled."
        )
    if any(piece.dtype not in _FLOATS and piece.codec is None for piece in pieces):
        return (
            f"{index.directory}: {name} is stored as {pieces[0].dtype} in {files}; "
            f"this version loads {', '.join(_FLOATS)}."
        )
    return None


def _nothing_to_load(path: Path, pickles: list[str]) -> str:
    if not path.is_dir():
        return f"no weights at {str(path)!r}: it is not a directory."
    if pickles:
        return (
            f"{path} has only pickle files ({_some(pickles)}), which can run code and are not "
            "loaded; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)."
        )
    return f"{path} holds no *.safetensors file, so there are no weights to load."


def _read_weight_map(path: Path) -> dict[str, str] | None:
    file = path / INDEX_FILE
    if not file.exists():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(name) for key, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {file}: {type(error).__name__}: {error}.") from None


def _read_header(file: Path) -> dict[str, Piece]:
    """Header of one safetensors file, checked against the file's real size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        offsets = json.loads(header.pop("__metadata__", {}).get(_OFFSETS_KEY, "{}"))
        pieces = {
            key: _piece(file, key, entry, 8 + length, offsets.get(key))
            for key, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{file} is not a whole safetensors file: {error}.") from None
    end = max((piece.data_start + piece.num_bytes for piece in pieces.values()), default=8 + length)
    if end != size:
        raise UserError(f"{file} has {size} bytes, its header says {end}; fetch it again.")
    return pieces


def _piece(
    file: Path,
    name: str,
    entry: Mapping[str, Any],
    data_start: int,
    offset: Mapping[str, Any] | None,
) -> Piece:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    dtype = str(entry["dtype"])
    value_bytes = _VALUE_BYTES.get(dtype)
    if value_bytes is not None and math.prod(shape) * value_bytes != end - begin:
        raise ValueError(f"{end - begin} bytes for the shape {list(shape)} of {dtype}")
    return Piece(
        file=file,
        name=name,
        dtype=dtype,
        offset=tuple(offset["saved_offsets"]) if offset else (0,) * len(shape),
        shape=shape,
        data_start=data_start + begin,
        num_bytes=end - begin,
    )


def _equal_bytes(left: tuple[Piece, ...], right: tuple[Piece, ...]) -> bool:
    """Whether two tensors that lie in one piece each hold the same bytes."""
    if len(left) != 1 or len(right) != 1 or left[0].num_bytes != right[0].num_bytes:
        return False
    with left[0].file.open("rb") as a, right[0].file.open("rb") as b:
        a.seek(left[0].data_start)
        b.seek(right[0].data_start)
        todo = left[0].num_bytes
        while todo > 0:
            step = min(todo, 2**20)
            if a.read(step) != b.read(step):
                return False
            todo -= step
    return True


def _some(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
