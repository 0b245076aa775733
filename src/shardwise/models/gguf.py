"""The header of a GGUF file -> the keys of a config.json; no tensor is read. No torch, no package.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.planned import ALL_FAMILIES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""type in the file -> that of `struct`"""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
"""bytes; where the header says nothing, tensors begin at multiples of them"""
_ATTENTION_BIAS = re.compile(r"blk\.0\.attn_(q|k|v|output|kv_a_mqa)\.bias")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt-oss": "gpt_oss",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "deepseek2": "deepseek_v3",
}
"""`general.architecture` -> model_type"""
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""after the architecture's name -> key of a config.json"""
_NO_PARAMETERS = re.compile(r"rope_|.*\.exp_probs_b\.bias$")
"""tables for the rotary embedding, and the router's correction, which is stored and not trained"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor's values are."""

    file: Path
    kind: int
    """number format, by ggml's number of it"""
    start: int
    """first byte in the file"""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a GGUF file says of itself."""

    path: Path
    values: dict[str, Any]
    """of a list of texts only how many they are"""
    tensors: dict[str, tuple[int, ...]]
    """name -> shape, outermost dimension first"""
    places: dict[str, Place]

    def number(self, key: str) -> int | None:
        """A whole number of the metadata; None: it is not there.

        Raises:
            UserError: it is something else.
        """
        value = self.values.get(key)
        if value is not None and type(value) is not int:
            raise UserError(f"{self.path}: {key} is {value!r}; expected a whole number.")
        return value


def is_gguf(path: Path) -> bool:
    """Whether a file is one, by its name or its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def config_of_gguf(header: Header) -> dict[str, Any]:
    """The keys of a config.json that a GGUF file's header says.

    Raises:
        UserError: it is of a kind of model that is not read.
    """
    architecture = header.values.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise UserError(
            f"{header.path}: a GGUF file of the architecture {architecture!r} cannot be planned; "
            f"those that can: {', '.join(sorted(_MODEL_TYPES))}."
        )
    embedding = header.tensors.get("token_embd.weight")
    if not embedding:
        raise UserError(f"{header.path}: the GGUF file has no tensor 'token_embd.weight'.")
    return {
        **_sizes(header, architecture),
        "dtype": "bfloat16",
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(map(_ATTENTION_BIAS.match, header.tensors)),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _sizes(header: Header, architecture: str) -> dict[str, Any]:
    """What the metadata says of sizes, and the model_type that they make."""

    def number(name: str) -> int | None:
        return header.number(f"{architecture}.{name}")

    model_type = _MODEL_TYPES[architecture]
    found = {key: number(name) for name, key in _KEYS.items()}
    blocks = number("block_count")
    if blocks is not None:  # the last may predict a second token
        found["num_hidden_layers"] = blocks - (number("nextn_predict_layers") or 0)
    num_experts = number("expert_count")
    if num_experts:
        model_type = "mixtral" if architecture == "llama" else model_type
        found[ALL_FAMILIES[model_type].keys.get("num_experts", "num_experts")] = num_experts
    if model_type == "gpt_oss":  # which has no plain MLP
        found["intermediate_size"] = found.pop("moe_intermediate_size")
    given = {key: value for key, value in found.items() if value is not None}
    if given.get("sliding_window") == 0:  # as some files say that there is none
        del given["sliding_window"]
    latent = _latent(number) if model_type == "deepseek_v3" else {}
    return {**given, **latent, "model_type": model_type}


def _latent(number: Callable[[str], int | None]) -> dict[str, int | None]:
    """Sizes of a latent attention. Those of a head's keys and values have names of their own where
    the file is written for attention on the latent itself."""
    key = number("attention.key_length_mla") or number("attention.key_length")
    rope = number("rope.dimension_count")
    return {
        "num_key_value_heads": number("attention.head_count"),
        "q_lora_rank": number("attention.q_lora_rank"),
        "kv_lora_rank": number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope if key and rope else None,
        "v_head_dim": number("attention.value_length_mla") or number("attention.value_length"),
    }


def check_count(header: Header, facts: ModelFacts) -> None:
    """Make sure that a file's tensors have as many values as its header's sizes make.

    Raises:
        UserError: they have not, so that the plan would be of another model.
    """
    num_layers, count = facts.num_layers, 0
    for name, shape in header.tensors.items():
        block = _BLOCK.match(name)
        is_extra = block is not None and int(block[1]) >= num_layers
        if not is_extra and not _NO_PARAMETERS.match(name):
            count += math.prod(shape)
    if count != facts.num_parameters:
        raise UserError(
            f"{header.path}: its tensors hold {count:,} values, a {facts.model_type} of its sizes "
            f"has {facts.num_parameters:,} parameters; plan with the model's config.json."
        )


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, and those of its other parts if it is in several.

    Raises:
        UserError: the file is no GGUF, ends within its header, or a part is missing.
    """
    header = _read_one(path)
    num_parts = header.number("split.count") or 1
    if num_parts <= 1:
        return header
    match = _PART.fullmatch(path.name)
    if match is None:
        raise UserError(
            f"{path} is one of {num_parts} parts; expected a name like "
            f"MODEL-00001-of-{num_parts:05}.gguf."
        )
    values: dict[str, Any] = {}
    tensors: dict[str, tuple[int, ...]] = {}
    places: dict[str, Place] = {}
    for number in range(num_parts, 0, -1):  # the first part says most
        part = path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        if not part.exists():
            raise UserError(f"{path} is one of {num_parts} parts, and {part.name} is not there.")
        one = _read_one(part)
        values |= one.values
        tensors |= one.tensors
        places |= one.places
    return Header(path=path, values=values, tensors=tensors, places=places)


def _read_one(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            reader = _Reader(file, path.stat().st_size)
            if reader.bytes(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{path} is no GGUF file: it does not begin with 'GGUF'.")
            version = reader.number("I")
            if version not in _VERSIONS:
                raise UserError(f"{path}: GGUF version {version} is not read; 2 and 3 are.")
            num_tensors, num_values = reader.number("Q"), reader.number("Q")
            values = {reader.text(): reader.value() for _ in range(num_values)}
            infos = [reader.tensor() for _ in range(num_tensors)]
            unit = values.get("general.alignment", _ALIGNMENT)
            begin = -(-file.tell() // unit) * unit if type(unit) is int and unit > 0 else 0
            return Header(
                path=path,
                values=values,
                tensors={name: shape for name, shape, *_ in infos},
                places={
                    name: Place(file=path, kind=kind, start=begin + offset)
                    for name, _, kind, offset in infos
                },
            )
    except (_Broken, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the GGUF file's header is broken: {error}.") from None


class _Broken(Exception):
    """The bytes make no header."""


class _Reader:
    """Reads the parts of a header, never past the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def bytes(self, count: int) -> bytes:
        if count > self._left:
            raise _Broken("the file ends within it")
        self._left -= count
        return self._file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self) -> Any:
        return self._of_type(self.number("I"))

    def _of_type(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise _Broken(f"a value has the unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, count: int) -> Any:
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self.bytes(count * size)))
        if kind != _STRING:
            raise _Broken(f"a list has values of the type {kind}")
        for _ in range(count):  # the vocabulary
            self.bytes(self.number("Q"))
        return count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Its name and shape, number format, and first byte after the header."""
        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        return name, tuple(reversed(shape)), self.number("I"), self.number("Q")
