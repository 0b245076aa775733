"""Matrices that files hold as codes of a few bits and scales, found and checked. No torch.

Numbers are code x scale. FP8: a code is a byte, a scale belongs to a block of rows and columns, a
row, or the whole matrix. MXFP4 (https://www.opencompute.org/documents, "OCP Microscaling Formats",
1.0): two codes a byte, 32 in a row have one power of two.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardwise.models.stored import StoredFormat
from shardwise.weights.index import Fp8, Mxfp4, Piece, Report, WeightIndex, refuse

MXFP4_BLOCK = 32
_CODES, _SCALES = "_blocks", "_scales"
_FP8_SCALES = ("_scale_inv", "_scale")
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")


def join_codes(
    index: WeightIndex, stored_as: StoredFormat | None, *, report: Report = refuse
) -> WeightIndex:
    """As if the matrices were numbers: pieces know how these are made of codes and scales.

    Args:
        report: is told of codes without scales, or with scales of another shape.
    """
    if stored_as is None:
        return index
    pieces = dict(index.pieces)
    join = _join_mxfp4 if stored_as.method == "mxfp4" else _join_fp8
    for name in list(pieces):
        if name in pieces:
            join(name, pieces, stored_as, report)
    return replace(index, pieces=pieces)


def _join_fp8(
    name: str, pieces: dict[str, tuple[Piece, ...]], stored_as: StoredFormat, report: Report
) -> None:
    (codes, *more) = pieces[name]
    if codes.dtype != "F8_E4M3" or name.endswith(_FP8_SCALES):
        return
    scale_name = next((name + end for end in _FP8_SCALES if name + end in pieces), None)
    if scale_name is None:
        report(f"{codes.file}: {name} is stored as fp8, and {name}{_FP8_SCALES[0]} is missing.")
        return
    (scales, *more_scales) = pieces.pop(scale_name)
    block = _block(codes.shape, scales.shape, stored_as.block)
    if block is None or more or more_scales or scales.dtype not in _SCALE_TYPES:
        given = f", and the config's blocks are {stored_as.block}" if stored_as.block else ""
        report(
            f"{codes.file}: {name} has the shape {list(codes.shape)}, its scales {scale_name} "
            f"{list(scales.shape)} of {scales.dtype}{given}."
        )
        return
    pieces[name] = (
        replace(
            codes,
            num_bytes=codes.num_bytes + scales.num_bytes,
            codec=Fp8(scales=scales, block=block),
        ),
    )


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], given: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """How many numbers along each dimension share a scale; None: the shapes do not fit.

    Where the config gives no blocks, the scales are one of a matrix, or one of each row or column:
    of any other number nothing says where the first ends.
    """
    if given is not None and len(shape) >= 2:
        block = (*((1,) * (len(shape) - 2)), *given)
        counts = tuple(-(-size // width) for size, width in zip(shape, block, strict=True))
        is_one = math.prod(counts) == math.prod(scales) == 1
        return block if scales == counts or is_one else None
    if math.prod(scales) == 1:
        return shape
    if scales == shape[:-1]:
        scales = (*scales, 1)
    if len(scales) != len(shape) or len(shape) < 2:
        return None
    block = tuple(1 if count == size else size for count, size in zip(scales, shape, strict=True))
    fits = all(count in (1, size) for count, size in zip(scales, shape, strict=True))
    return block if fits else None


def _join_mxfp4(
    name: str, pieces: dict[str, tuple[Piece, ...]], _: StoredFormat, report: Report
) -> None:
    if not name.endswith(_CODES):
        return
    whole = name.removesuffix(_CODES)
    (codes, *more) = pieces[name]
    if whole + _SCALES not in pieces:
        report(f"{codes.file}: it holds {name}, and {whole}{_SCALES} is missing.")
        return
    (scales, *more_scales) = pieces[whole + _SCALES]
    is_whole = codes.dtype == scales.dtype == "U8" and not more and not more_scales
    half = MXFP4_BLOCK // 2
    if not is_whole or codes.shape != (*scales.shape, half) or len(scales.shape) != 3:
        report(
            f"{codes.file}: {name} has the shape {list(codes.shape)} of {codes.dtype}, its scales "
            f"{list(scales.shape)} of {scales.dtype}; expected {half} bytes a scale."
        )
        return
    del pieces[name], pieces[whole + _SCALES]
    experts, columns, blocks = scales.shape
    pieces[whole] = (
        replace(
            codes,
            name=whole,
            dtype="MXFP4",
            offset=(0, 0, 0),
            shape=(experts, blocks * MXFP4_BLOCK, columns),  # files have the outputs first
            num_bytes=codes.num_bytes + scales.num_bytes,
            codec=Mxfp4(codes=codes, scales=scales),
        ),
    )
