"""How the files of a model may hold its matrices, other than as plain numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
METHODS = (*FP8_METHODS, "mxfp4")
"""values of `quant_method` that are read: of compressed-tensors those of 8-bit floating point"""

_TRANSFORMERS_BLOCK = [128, 128]
"""of fp8, where a config has no `weight_block_size`; null: a scale is a matrix's"""


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """What a config says of it."""

    method: str
    block: tuple[int, int] | None = None
    """rows and columns that share a scale; None: as many as the scales' own shape says"""

    def __str__(self) -> str:
        name = "mxfp4" if self.method == "mxfp4" else "fp8"
        return f"{name}, blocks of {self.block[0]} x {self.block[1]}" if self.block else name


def stored_format(config: Mapping[str, Any]) -> StoredFormat | str | None:
    """What a config.json says of how its files hold matrices.

    Returns:
        None: as plain numbers; a text: the reason why it is not read.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "")) if isinstance(given, Mapping) else ""
    block: Any = None
    if method == "compressed-tensors":
        weights = _weights_of_groups(given)
        if any(not _is_plain_fp8(one) for one in weights):
            method = "compressed-tensors of other numbers than 8-bit floating point"
        blocks = [one.get("block_structure") for one in weights]
        block = blocks[0] if blocks and all(one == blocks[0] for one in blocks) else None
    elif method == "fp8":
        block = given.get("weight_block_size", _TRANSFORMERS_BLOCK)
        if given.get("expert_dtype", "fp8") != "fp8":
            method = f"fp8 with experts in {given['expert_dtype']}"
    if method not in METHODS:
        how = f" ({method})" if method else ""
        return (
            f"the model is quantised{how}, which this version does not read; give the unquantised "
            f"model, or one in {', '.join(METHODS)}"
        )
    if block is None:
        return StoredFormat(method=method)
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or any(type(size) is not int or size < 1 for size in block):
        return f"quantization_config has blocks of {block!r}; expected two whole numbers"
    return StoredFormat(method=method, block=(block[0], block[1]))


def _is_plain_fp8(weights: Mapping[str, Any]) -> bool:
    """Whether numbers are code x scale, the code one of 8-bit floating point."""
    kind = weights.get("num_bits"), weights.get("type")
    return kind == (8, "float") and weights.get("symmetric", True) is True


def _weights_of_groups(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = given.get("config_groups")
    found = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    return [one if isinstance(one, Mapping) else {} for one in found or [None]]
