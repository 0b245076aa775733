"""Load a model into its shards, beside a plain read of the same bytes, side by side in one run.

    python benchmarks/load.py ./model --layout tp=2 --rounds 5 --json result.json

Files leave the page cache before each measurement. The plain read: as many processes as the layout
has, each an equal part of the files, in pieces of 16 MiB into memory that it keeps: as they are
(`read`), and cast to the dtype that the shards are in (`read and cast`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

import torch
import torch.distributed as dist
from tests.run_ranks import run_ranks

from shardwise.config import Layout, Plan
from shardwise.parallel.data import DTYPES
from shardwise.parallel.mesh import build_mesh
from shardwise.parsing import parse, read_yaml
from shardwise.weights.load import load_model

PIECE_BYTES = 16 * 2**20
WAYS = ("load", "read", "read and cast")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print medians and ratios, write the JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("model", type=Path, help="directory with safetensors files in bf16")
    parser.add_argument("--layout", default="fsdp=2", help="such as tp=2 or pp=2,fsdp=2")
    parser.add_argument("--dtypes", default="fp32,bf16", help="of the shards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args(arguments)
    axes = read_yaml("{" + options.layout.replace("=", ": ") + "}")
    layout = parse(Layout, axes, source="--layout")
    num_bytes = sum(file.stat().st_size for file in options.model.glob("*.safetensors"))
    result: dict[str, Any] = {"layout": options.layout, "bytes": num_bytes, "seconds": {}}
    for dtype in options.dtypes.split(","):
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                ranks = run_ranks(layout.world_size, _measure, str(options.model), axes, dtype, way)
                seconds[way].append(max(ranks))
        result["seconds"][dtype] = seconds
        median = {way: statistics.median(values) for way, values in seconds.items()}
        for way in WAYS:
            share = median[way] and median["read"] / median[way]
            print(
                f"{dtype} {way:14} {median[way]:6.2f} s  "
                f"{num_bytes / median[way] / 1e9:5.2f} GB/s  {share:5.0%} of a plain read"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """The description as it stands above."""


def _measure(rank: int, model: str, axes: dict[str, int], dtype: str, way: str) -> float:
    """Seconds of one rank, from all being ready to all having ended."""
    files = sorted(Path(model).glob("*.safetensors"))
    plan = Plan(model=model, task="full", layout=Layout(**axes))
    mesh = build_mesh(plan.layout, "cpu")
    if rank == 0:
        for file in files:
            _leave_cache(file)
    do: Callable[[], object] = lambda: load_model(plan, mesh, DTYPES[dtype])  # noqa: E731
    if way != "load":
        do = lambda: _read(files, rank, DTYPES[dtype] if way == "read and cast" else None)  # noqa: E731
    dist.barrier()
    began = time.perf_counter()
    kept = do()
    dist.barrier()
    seconds = time.perf_counter() - began
    del kept
    return seconds


def _leave_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _read(files: Sequence[Path], rank: int, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """This rank's part of every file."""
    kept = []
    for file in files:
        size = file.stat().st_size // dist.get_world_size() // 2 * 2
        whole = torch.empty(size // (1 if dtype is None else 2), dtype=dtype or torch.uint8)
        piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        with file.open("rb", buffering=0) as stream:
            for start in range(0, size, PIECE_BYTES):
                length = min(PIECE_BYTES, size - start)
                if dtype is None:
                    view = memoryview(whole.numpy())[start : start + length]
                    os.preadv(stream.fileno(), [view], rank * size + start)
                else:
                    view = memoryview(piece.numpy())[:length]
                    os.preadv(stream.fileno(), [view], rank * size + start)
                    numbers = piece[:length].view(torch.bfloat16)
                    whole[start // 2 : (start + length) // 2].copy_(numbers)
        kept.append(whole)
    return kept


if __name__ == "__main__":
    sys.exit(main())
