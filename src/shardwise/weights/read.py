"""A box of a stored tensor -> its numbers, a few megabytes at a time, whatever the files hold.

Files are read, not mapped: no process holds pages of a file, and a network file system that fails
raises an error in place of a signal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from shardwise.errors import UserError
from shardwise.weights.codes import MXFP4_BLOCK
from shardwise.weights.index import Fp8, Ggml, Mxfp4, Piece

Box = tuple[slice, ...]
"""One range per dimension"""
_CHUNK_VALUES, _CODED_VALUES = 2**21, 2**19
"""numbers that are read at a time; of codes fewer, since several tensors are made on the way"""
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""what the codes 0 to 7 stand for (E2M1); the next eight are these with a minus"""
_PAIRS = torch.cartesian_prod(*[torch.tensor([*_FP4, *(-value for value in _FP4)])] * 2).flip(1)
_PAIRS = _PAIRS.contiguous().view(torch.float64).flatten()  # fetched as one, twice as fast
"""what a byte stands for, two numbers: its lower half comes first"""


def read_parts(piece: Piece, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """The numbers of a box of a piece, part by part: where in the piece, and the numbers.

    Raises:
        UserError: the file ends before its header says.
    """
    _announce(piece, box)
    most = _CHUNK_VALUES if piece.codec is None else _CODED_VALUES
    dims = (0, 2, 1) if isinstance(piece.codec, Mxfp4) else range(len(box))  # as they lie there
    for part in _parts(box, most, tuple(dims)):
        if isinstance(piece.codec, Fp8):
            yield part, _fp8(piece, piece.codec, part)
        elif isinstance(piece.codec, Ggml):
            yield part, _ggml(piece.dtype, piece.codec, part)
        elif isinstance(piece.codec, Mxfp4):
            yield part, _mxfp4(piece.codec, part)
        else:
            yield part, _stored(piece, part)


def _announce(piece: Piece, box: Box) -> None:
    """Let the system fetch what will be read of a plain tensor, while its first part is cast."""
    if piece.codec is not None or not hasattr(os, "posix_fadvise"):
        return
    shape, width = piece.stored_shape, _TYPES[piece.dtype].itemsize
    first = _place([cut.start for cut in box], shape)
    last = _place([cut.stop - 1 for cut in box], shape) + 1
    with piece.file.open("rb", buffering=0) as file:
        start, length = piece.data_start + first * width, (last - first) * width
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


def _place(indices: Sequence[int], shape: Sequence[int]) -> int:
    """How many numbers of a tensor lie before one."""
    place = 0
    for index, size in zip(indices, shape, strict=False):
        place = place * size + index
    return place


def _parts(box: Box, most: int, dims: tuple[int, ...]) -> Iterator[Box]:
    """A box in parts of at most so many numbers, cut across the first of some dimensions."""
    sizes = [cut.stop - cut.start for cut in box]
    dim = next((dim for dim in dims if sizes[dim] > 1), None)
    if dim is None or math.prod(sizes) <= most:
        yield box
        return
    step = max(1, most // (math.prod(sizes) // sizes[dim]))
    for start in range(box[dim].start, box[dim].stop, step):
        cut = slice(start, min(start + step, box[dim].stop))
        yield from _parts((*box[:dim], cut, *box[dim + 1 :]), most, dims)


def _stored(piece: Piece, box: Box) -> torch.Tensor:
    """What a file holds of a box."""
    dtype = _TYPES[piece.dtype]
    sizes = [cut.stop - cut.start for cut in box]
    buffer = torch.empty(math.prod(sizes) * dtype.itemsize, dtype=torch.uint8)
    target, position = memoryview(buffer.numpy()), 0
    with piece.file.open("rb", buffering=0) as file:
        for start, length in _runs(box, piece.stored_shape, dtype.itemsize):
            end = position + length
            while position < end:
                begin = piece.data_start + start + length - (end - position)
                num_bytes = os.preadv(file.fileno(), [target[position:end]], begin)
                if num_bytes == 0:
                    raise UserError(f"{piece.file} has become shorter while it was read.")
                position += num_bytes
    return buffer.view(dtype).view(sizes)


def _runs(box: Box, shape: tuple[int, ...], width: int) -> Iterator[tuple[int, int]]:
    """First byte and number of bytes of what lies together of a box in a tensor of numbers of so
    many bytes."""
    whole = [cut.start == 0 and cut.stop == size for cut, size in zip(box, shape, strict=True)]
    last = max((dim for dim, is_whole in enumerate(whole) if not is_whole), default=None)
    if last is None:
        yield 0, math.prod(shape) * width
        return
    inner = math.prod(shape[last + 1 :]) * width
    cut = box[last]
    for index in product(*(range(outer.start, outer.stop) for outer in box[:last])):
        yield (
            (_place(index, shape) * shape[last] + cut.start) * inner,
            (cut.stop - cut.start) * inner,
        )


def _fp8(piece: Piece, codec: Fp8, box: Box) -> torch.Tensor:
    numbers = _stored(piece, box).float()
    if math.prod(codec.scales.shape) == 1:
        return numbers * _stored(codec.scales, _whole(codec.scales)).float().view(())
    blocks = [
        slice(cut.start // width, -(-cut.stop // width))
        for cut, width in zip(box, codec.block, strict=True)
    ]
    shape = codec.scales.shape
    scales = _stored(codec.scales, tuple(blocks[: len(shape)])).float()
    scales = scales.view([cut.stop - cut.start for cut in blocks])
    for dim, (cut, width, block) in enumerate(zip(box, codec.block, blocks, strict=True)):
        first = cut.start - block.start * width
        scales = scales.repeat_interleave(width, dim).narrow(dim, first, cut.stop - cut.start)
    return numbers.mul_(scales)


def _whole(piece: Piece) -> Box:
    return tuple(slice(0, size) for size in piece.shape)


def _mxfp4(codec: Mxfp4, box: Box) -> torch.Tensor:
    """Of a box of [experts, inputs, outputs]; files hold [experts, outputs, blocks of inputs]."""
    experts, inputs, outputs = box
    blocks = slice(inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK))
    codes = _stored(codec.codes, (experts, outputs, blocks, slice(0, MXFP4_BLOCK // 2)))
    powers = _stored(codec.scales, (experts, outputs, blocks)).int() - 127
    scales = torch.ldexp(torch.ones(powers.shape), powers).unsqueeze(-1)
    numbers = (_PAIRS[codes.int()].view(torch.float32) * scales).flatten(-2)
    first = inputs.start - blocks.start * MXFP4_BLOCK
    return numbers.narrow(-1, first, inputs.stop - inputs.start).transpose(1, 2)


def _ggml(kind: str, codec: Ggml, box: Box) -> torch.Tensor:
    """Of heads whose halves are interleaved, whole heads are read: their rows are made together."""
    if codec.head_dim is None:
        return _ggml_rows(kind, codec.rows, box) - codec.less
    (cut, *inner), size = box, codec.head_dim  # [heads x head_dim, inputs], or a bias without these
    heads = slice(cut.start // size * size, -(-cut.stop // size) * size)
    mixed = _ggml_rows(kind, codec.rows, (heads, *inner))
    apart = mixed.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).reshape(mixed.shape)
    return apart[cut.start - heads.start :][: cut.stop - cut.start]


def _ggml_rows(kind: str, rows: Piece, box: Box) -> torch.Tensor:
    """Of rows of blocks, whole rows are read."""
    import gguf

    *outer, columns = box
    stored = _stored(rows, (*outer, slice(0, rows.shape[-1])))
    numbers = gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(numbers).float()[..., columns]
