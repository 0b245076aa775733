"""Read weights into a sharded model: each rank reads only the bytes of its own slices."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard

from shardwise.config import Plan
from shardwise.models.adapters import LORA_A, LORA_B
from shardwise.models.build import build_on_meta, materialise
from shardwise.models.nf4 import pack, unpack, unpacked_columns
from shardwise.models.read import base_of, facts_of_plan, read_facts
from shardwise.parallel._torch import is_strided_shard
from shardwise.parallel.adapters import initial
from shardwise.parallel.apply import parallelize
from shardwise.parallel.data import DTYPES
from shardwise.parallel.grads import local_part
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.sharded import ShardedModel
from shardwise.planner.layout import check_plan
from shardwise.weights.index import Piece, WeightIndex, verify
from shardwise.weights.names import open_model_index
from shardwise.weights.progress import Loading
from shardwise.weights.read import Box, read_parts


def load_model(
    plan: Plan,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    unpacked: bool = False,
    loading: Loading | None = None,
) -> ShardedModel:
    """Build, shard and load the plan's model: the only way weights get into a model.

    Args:
        dtype: of the parameters at rest; fp32 master weights for training. What adapters freeze
            rests in the compute dtype then.
        unpacked: make numbers of matrices that would rest in four bits, rounded as these.
        loading: is told of the bytes that are read.

    Raises:
        UserError: the plan is not legal for the model, or its files are not whole; no parameter
            has been touched then.
    """
    stored, facts = read_facts(plan.model), facts_of_plan(plan)
    check_plan(plan, facts)
    index = open_model_index(plan.model, stored)
    verify(index, stored, compare_tied=False)
    rounded: set[str] = set()
    if unpacked and facts.adapters is not None:
        rounded = facts.packed_parameters(tp=plan.layout.tp)
        facts = replace(facts, adapters=facts.adapters.model_copy(update={"quantize": None}))
    source = base_of(Path(plan.model)) or plan.model
    at_rest = DTYPES[plan.precision.compute] if plan.task == "lora" else dtype
    sharded = parallelize(lambda: build_on_meta(source, at_rest), plan, facts, mesh, dtype)
    for part in sharded.parts:
        materialise(part.model, mesh.device)
    load_weights(sharded, index, seed=plan.train.seed, rounded=rounded, loading=loading)
    return sharded


def local_box(tensor: torch.Tensor) -> Box:
    """The part of the full tensor that this rank holds.

    FSDP cuts what tensor parallelism left, although its axis comes first in the mesh; torch
    marks that placement as strided. So plain shards are cut first, strided ones after.
    """
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate() or ()
        cuts = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
        for placement, num_ranks, rank in sorted(cuts, key=lambda cut: is_strided_shard(cut[0])):
            if isinstance(placement, Shard) or is_strided_shard(placement):
                dim = placement.dim
                width = -(-sizes[dim] // num_ranks)  # torch's chunk rule
                begin = min(rank * width, sizes[dim])
                starts[dim] += begin
                sizes[dim] = min(width, sizes[dim] - begin)
    return tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))


def load_weights(
    sharded: ShardedModel,
    index: WeightIndex,
    *,
    seed: int = 0,
    rounded: Container[str] = (),
    loading: Loading | None = None,
) -> int:
    """Fill the local part of every parameter from a verified index; of adapters that it does not
    have, with their first values.

    Args:
        seed: of those.
        rounded: names of parameters that get what four bits can say of them.
        loading: is told of the bytes that are read.

    Returns:
        Bytes that this rank read.
    """
    if loading is not None:
        for name, param in sharded.stored_names():
            pieces = index.pieces_of(name) if name in index else ()
            loading.expect(num_bytes_of(local_box(param), pieces))
    num_bytes = 0
    with torch.no_grad():
        for name, param in sharded.stored_names():
            if name not in index and name.endswith((LORA_A, LORA_B)):
                local_part(param).copy_(initial(name, param.shape, seed)[local_box(param)])
                continue
            read = _read_packed if param.dtype == torch.uint8 or name in rounded else read_into
            box, pieces = local_box(param), index.pieces_of(name)
            num_bytes += read(local_part(param), box, pieces, name, loading)
        for name, buffer in sharded.stored_buffers():
            num_bytes += read_into(buffer, local_box(buffer), index.pieces_of(name), name)
    return num_bytes


def _read_packed(
    target: torch.Tensor, box: Box, pieces: Sequence[Piece], name: str, loading: Loading | None
) -> int:
    """As `read_into`, rounded to four bits; a matrix that rests in these has a `box` of bytes."""
    rests = target.dtype == torch.uint8
    if rests:
        rows, columns = box
        box = rows, unpacked_columns(columns)
    whole = torch.empty([s.stop - s.start for s in box], dtype=torch.float32, device=target.device)
    num_bytes = read_into(whole, box, pieces, name, loading)
    packed = pack(whole)
    target.copy_(packed if rests else unpack(packed, target.dtype))
    return num_bytes


def read_into(
    target: torch.Tensor,
    box: Box,
    pieces: Sequence[Piece],
    name: str,
    loading: Loading | None = None,
) -> int:
    """Copy the `box` of a stored tensor into `target` (cast to its dtype); bytes read."""
    if target.shape != torch.Size([s.stop - s.start for s in box]):
        raise RuntimeError(f"{name}: this rank holds {tuple(target.shape)}, its slice is {box}")
    num_bytes = 0
    for piece, source, destination in _overlaps(box, pieces):
        place, inside = target[destination], source[piece.num_added :]
        for part, numbers in read_parts(piece, inside):
            shifts = zip(part, inside, strict=True)
            there = tuple(slice(cut.start - s.start, cut.stop - s.start) for cut, s in shifts)
            place[(*(0,) * piece.num_added, *there)].copy_(numbers)
            part_bytes = piece.num_bytes * numbers.numel() // math.prod(piece.shape)
            num_bytes += part_bytes
            if loading is not None:
                loading.read(part_bytes)
    return num_bytes


def num_bytes_of(box: Box, pieces: Sequence[Piece]) -> int:
    """Bytes that the files hold of a box of a stored tensor."""
    return sum(
        piece.num_bytes * math.prod(s.stop - s.start for s in source) // math.prod(piece.shape)
        for piece, source, _ in _overlaps(box, pieces)
    )


def _overlaps(box: Box, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Box, Box]]:
    """Pieces that overlap a box, with the overlap in the piece's and in the box's coordinates."""
    for piece in pieces:
        ends = [o + n for o, n in zip(piece.offset, piece.shape, strict=True)]
        starts = [max(s.start, o) for s, o in zip(box, piece.offset, strict=True)]
        stops = [min(s.stop, end) for s, end in zip(box, ends, strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            continue
        spans = list(zip(starts, stops, strict=True))
        source = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, piece.offset, strict=True))
        destination = tuple(
            slice(a - s.start, b - s.start) for (a, b), s in zip(spans, box, strict=True)
        )
        yield piece, source, destination
