"""Matrices in four bits (NF4; Dettmers et al., arXiv 2305.14314, section 3 and appendix E).

Each block of 64 inputs of a row is 32 bytes of codes, two a byte, and their largest magnitude in
fp32. A block lies in one piece, so that a matrix of bytes is cut over ranks as one of numbers is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.models.layers import NF4_BLOCK, NF4_BLOCK_BYTES

_CODES = NF4_BLOCK // 2
"""bytes of codes in a block"""
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""what the 16 codes stand for: quantiles of a normal distribution, zero among them"""
_PIECE = {"cpu": 2**20}
"""numbers that are packed or unpacked at a time, for a processor's cache"""
_LARGE_PIECE = 2**23


def packed_shape(num_out: int, num_in: int) -> tuple[int, int]:
    """Rows and bytes of a row of a matrix whose inputs are whole blocks."""
    return num_out, num_in // NF4_BLOCK * NF4_BLOCK_BYTES


def unpacked_columns(columns: slice) -> slice:
    """Inputs of whole blocks, of which a slice of a packed row are the bytes."""
    ends = (columns.start, columns.stop)
    if any(end % NF4_BLOCK_BYTES for end in ends):
        raise ValueError(f"bytes {ends} cut a block of {NF4_BLOCK_BYTES}")
    start, stop = (end // NF4_BLOCK_BYTES * NF4_BLOCK for end in ends)
    return slice(start, stop)


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Round a matrix [out, in] of floating-point numbers to bytes [out, in / 64 * 36]."""
    num_out, num_in = matrix.shape
    packed = matrix.new_empty(packed_shape(num_out, num_in), dtype=torch.uint8)
    levels = torch.tensor(_LEVELS, device=matrix.device)
    middles = (levels[1:] + levels[:-1]) / 2
    least = torch.finfo(torch.float32).tiny
    num_rows = _rows_at_a_time(matrix)
    for source, target in zip(matrix.split(num_rows), packed.split(num_rows), strict=True):
        blocks = source.reshape(len(source), num_in // NF4_BLOCK, NF4_BLOCK).float()
        largest = blocks.abs().amax(-1, keepdim=True)
        codes = torch.bucketize(blocks / largest.clamp(min=least), middles, out_int32=True)
        codes = codes.to(torch.uint8)
        pairs = codes[..., 0::2] << 4 | codes[..., 1::2]
        target.copy_(torch.cat([pairs, largest.view(torch.uint8)], dim=-1).flatten(1))
    return packed


def _rows_at_a_time(matrix: torch.Tensor) -> int:
    piece = _PIECE.get(matrix.device.type, _LARGE_PIECE)
    return max(1, piece // max(1, matrix.shape[1]))


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [out, in] that a packed matrix stands for, each rounded once."""
    blocks = packed.unflatten(1, (-1, NF4_BLOCK_BYTES))
    whole = torch.empty(*blocks.shape[:2], NF4_BLOCK, dtype=dtype, device=packed.device)
    num_rows = _rows_at_a_time(whole.flatten(1))
    for source, target in zip(blocks.split(num_rows), whole.split(num_rows), strict=True):
        largest = source[..., _CODES:].contiguous().view(torch.float32)
        numbers = F.embedding(source[..., :_CODES].int(), _pairs(packed.device))
        target.copy_(numbers.flatten(-2).mul_(largest))
    return whole.flatten(1)


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix as it is after it was packed, in its own dtype."""
    return unpack(pack(matrix), matrix.dtype)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """[256, 2]: the two numbers of each byte."""
    levels = torch.tensor(_LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


class _Linear(torch.autograd.Function):
    """x W^T + b of a packed, frozen W, of which nothing but the packed bytes is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, grad.dtype), None, None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b [..., out] of a matrix of numbers or of a packed one, which is frozen."""
    if weight.dtype == torch.uint8:
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
