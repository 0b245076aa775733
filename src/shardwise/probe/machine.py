"""Measure this machine: matrix products, memory traffic and collectives, all processes at once."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.parallel.data import DTYPES
from shardwise.parallel.mesh import Mesh
from shardwise.planner.machine import Machine, Timing
from shardwise.planner.network import Op

MACHINE_FILE = "machine.yaml"
_MATMUL = (512, 768, 2048)  # tokens x hidden x feed-forward of a small layer
_STREAM_VALUES = 2**18  # 1 MiB, the size of a small model's activations
_SIZES = (2**16, 2**20, 2**23, 2**26)  # bytes of the whole tensor


def run_probe(folder: Path, mesh: Mesh) -> None:
    """Measure on every rank at once; rank 0 writes the slowest rank's numbers."""
    device = mesh.device
    group = mesh.group("fsdp")
    flops = {name: _matmul_flops(device, dtype) for name, dtype in DTYPES.items()}
    stream = _stream_bytes_per_s(device)
    timings = [
        Timing(
            op=op, num_bytes=size, seconds=_slowest(_collective_s(op, size, device, group), device)
        )
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send", "all_to_all")
        for size in _SIZES
    ]
    machine = Machine(
        date=date.today().isoformat(),
        host=f"{platform.machine()} {device.type}, torch {torch.__version__}",
        num_processes=dist.get_world_size(),
        matmul_flops={name: 1 / _slowest(1 / value, device) for name, value in flops.items()},  # type: ignore[misc]
        memory_bytes_per_s=1 / _slowest(1 / stream, device),
        collectives=timings,
    )
    if dist.get_rank() == 0:
        (folder / MACHINE_FILE).write_text(machine.to_yaml(), encoding="utf-8")


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    m, k, n = _MATMUL
    a = torch.randn(m, k, device=device, dtype=dtype)
    w = torch.randn(n, k, device=device, dtype=dtype)
    return 2 * m * k * n / _seconds(lambda: torch.nn.functional.linear(a, w), device)


def _stream_bytes_per_s(device: torch.device) -> float:
    """An element-wise product into fresh memory, as most operations of a step are."""
    a = torch.randn(_STREAM_VALUES, device=device)
    return 3 * a.nbytes / _seconds(lambda: a * a, device)


def _collective_s(op: Op, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> float:
    num_ranks = dist.get_world_size(group)
    whole = torch.ones(num_bytes // 4 // num_ranks * num_ranks, device=device)
    part = torch.ones(whole.numel() // num_ranks, device=device)
    received = torch.empty_like(whole)
    run: dict[Op, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
        "send": lambda: _send_around(whole, received, group),
    }
    return _seconds(run[op], device, budget_s=0.5)


def _send_around(mine: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """To the next rank, and from the one before."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if num_ranks == 1:
        received.copy_(mine)
        return
    steps = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=(rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % num_ranks),
    ]
    for work in dist.batch_isend_irecv(steps):
        work.wait()


def _seconds(run: Callable[[], object], device: torch.device, budget_s: float = 1.0) -> float:
    """Median seconds of a call, after a warm-up; the same number of calls on every rank."""
    first = [_timed(run, device) for _ in range(3)]
    wanted = min(30.0, max(3.0, budget_s / max(*first, 1e-6)))
    repeats = int(_slowest(wanted, device))
    return statistics.median(_timed(run, device) for _ in range(repeats))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    return time.perf_counter() - began


def _slowest(value: float, device: torch.device) -> float:
    """The largest value over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)
