"""Four-bit matrices: the bytes of bitsandbytes, and what a cut, an empty block or a dtype does."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from shardwise.models.nf4 import linear, pack, packed_shape, rounded, unpack, unpacked_columns


def matrix(
    num_out: int = 96, num_in: int = 320, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_out, num_in, generator=generator).mul_(0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_numbers_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Every code, every scale and every number, bit for bit."""
    weight = matrix(1000, 1024, dtype)
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = pack(weight)
    assert packed.shape == packed_shape(1000, 1024) == (1000, 576)
    blocks = packed.view(1000, -1, 36)
    assert torch.equal(blocks[..., :32].flatten(), codes.flatten())
    assert torch.equal(blocks[..., 32:].contiguous().view(torch.float32).flatten(), state.absmax)
    assert torch.equal(unpack(packed, dtype), dequantize_4bit(codes, state))


def test_a_block_is_as_precise_as_the_paper_says() -> None:
    """Of normal numbers about a tenth is lost, of the largest of each block nothing."""
    weight = matrix(2000, 256)
    error = rounded(weight) - weight
    assert float(error.pow(2).mean() / weight.pow(2).mean()) ** 0.5 == pytest.approx(0.09, abs=0.01)
    blocks = weight.view(-1, 64)
    largest = blocks.abs().argmax(-1, keepdim=True)
    assert not error.view(-1, 64).gather(1, largest).any()
    assert torch.equal(rounded(rounded(weight)), rounded(weight))


def test_a_part_of_the_bytes_is_the_bytes_of_a_part() -> None:
    """However ranks cut it: rows, or whole blocks of inputs; and pieces that are not contiguous."""
    weight = matrix()
    packed = pack(weight)
    assert torch.equal(packed[10:30], pack(weight[10:30]))
    columns = slice(36, 4 * 36)
    assert unpacked_columns(columns) == slice(64, 256)
    assert torch.equal(packed[:, columns], pack(weight[:, 64:256]))
    assert torch.equal(unpack(packed[:, columns], torch.float32), rounded(weight)[:, 64:256])
    with pytest.raises(ValueError, match="cut a block"):
        unpacked_columns(slice(0, 35))


def test_blocks_of_zeros_and_of_one_number() -> None:
    weight = torch.zeros(2, 128)
    weight[1, 5] = -3e-38
    assert torch.equal(rounded(weight), weight)
    assert not rounded(torch.full((1, 64), 1e-45)).isnan().any()


def test_large_matrices_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(matrix())
    whole = unpack(packed, torch.bfloat16)
    monkeypatch.setattr("shardwise.models.nf4._PIECE", {"cpu": 7 * 320})
    assert torch.equal(unpack(packed, torch.bfloat16), whole)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)], ids=str)
def test_a_rank_may_have_nothing(shape: tuple[int, int]) -> None:
    """The last shards of a matrix of few rows are empty."""
    packed = pack(torch.empty(shape))
    assert packed.shape == packed_shape(*shape)
    assert unpack(packed, torch.bfloat16).shape == shape


def test_the_gradient_is_that_of_the_numbers() -> None:
    """Nothing but the bytes is kept for it."""
    weight, x, bias = matrix(), torch.randn(2, 5, 320), torch.randn(96)
    x, grad = x.requires_grad_(), torch.randn(2, 5, 96)
    packed, kept = pack(weight), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(x, packed, bias)
    assert [t.data_ptr() for t in kept] == [packed.data_ptr()]
    want = torch.nn.functional.linear(x, rounded(weight), bias)
    assert torch.equal(y, want)
    (got,) = torch.autograd.grad(y, x, grad)
    (expected,) = torch.autograd.grad(want, x, grad)
    assert torch.equal(got, expected)
