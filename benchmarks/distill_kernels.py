"""Measured kernels of inference engines -> the catalogue's kernels.csv and reductions.csv.

    python benchmarks/distill_kernels.py DATA    # needs numpy and pyarrow

DATA is `aic-core/src/aiconfigurator_core/systems/data` of ai-dynamo/aiconfigurator (Apache-2.0):
the seconds of single kernels, by device and engine. Of each kind of kernel and format three
numbers are kept,

    seconds = fixed + hypot(bytes / (memory share x bandwidth), FLOPs / (compute share x peak)),

those of least mean |log(predicted / measured)|. No run of a whole model is read here.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

from benchmarks.distill import DEVICES, thinned
from shardwise.catalog import Device, load_devices

OUT = Path(__file__).parents[1] / "src/shardwise/catalog"
SYSTEMS = {system: name for system, name in DEVICES.items() if name != "RTX-PRO-6000"}
"""those that are fitted: the catalogue has no bandwidth and no rate of the RTX PRO 6000"""
FORMATS = {  # of the files -> ours, bits of a weight with its scales, bytes of an input, peak
    "bfloat16": ("bf16", 16.0, 2.0, "bf16"),
    "fp8": ("fp8", 8.0, 1.0, "fp8"),
    "fp8_block": ("fp8", 8.0, 1.0, "fp8"),
    "nvfp4": ("fp4", 4.5, 0.5625, "fp4"),
    "w4a8_mxfp4_mxfp8": ("mxfp4", 4.25, 1.0, "fp8"),
    "w4a16_mxfp4": ("mxfp4", 4.25, 2.0, "bf16"),
    "int4_wo": ("int4", 4.25, 2.0, "bf16"),
}
"""of two that give the same format, the first one that a file has is taken"""
ENGINES = ("vllm", "trtllm", "sglang")
"""each in the newest version that a kind of kernel and a format was measured with"""
LEFT_OUT = {("product", "fp8_block"), ("experts", "fp8"), ("latent attention", "vllm")}
"""files of kernels that were not recorded in a graph (vLLM's products in blocks of fp8, latent
attention), and of experts in fp8 without blocks, which no published model has"""
UNUSED = ("device", "framework", "version", "op_name", "kernel_source")
VERSIONS = 3
"""of an engine that are looked through for a format"""
ROWS = 2000
"""of each fit, evenly over the file"""


class Sample(NamedTuple):
    """One kernel: what it reads and writes, computes, and takes."""

    num_bytes: float
    flops: float
    seconds: float


def products(row: dict[str, Any], bits: float, act: float) -> Sample | None:
    """A product of a weight (n, k) with m rows."""
    m, n, k = row["m"], row["n"], row["k"]
    if min(n, k) < 1024 or max(n, k) > 16384 or m > 8192:
        return None
    converted = m * k * (2 + act) if act < 2 else 0.0
    moved = n * k * bits / 8 + m * k * act + 2 * m * n + converted
    return Sample(moved, 2 * m * n * k, row["latency"] / 1e3)


def experts(row: dict[str, Any], bits: float, act: float) -> Sample | None:
    """All experts of a rank, evenly used: two matrices in, one out. Tokens are sorted by expert,
    multiplied, activated, multiplied, and summed where they came from."""
    if row["distribution"] != "balanced" or row["num_tokens"] > 8192 or row["num_experts"] < 32:
        return None
    width = row["inter_size"] / row["moe_tp_size"]
    chosen = row["num_tokens"] * row["topk"] / row["moe_ep_size"]
    touched = min(row["num_experts"], row["num_tokens"] * row["topk"]) / row["moe_ep_size"]
    one = 3 * row["hidden_size"] * width
    passed = chosen * (row["hidden_size"] * (6 + 2 * act) + width * (8 + 2 * act))
    moved = max(1.0, touched) * one * bits / 8 + passed
    return Sample(moved, 2 * chosen * one, row["latency"] / 1e3)


def cached(row: dict[str, Any], bits: float, act: float) -> Sample | None:
    """One new token of each request over its keys and values."""
    if row.get("window_size") or not 256 <= row["step"] <= 32768 or row["batch_size"] > 512:
        return None
    if row["num_heads"] > 16 * row["num_key_value_heads"]:
        return None
    tokens = row["batch_size"] * (row["step"] + 1)
    size = row["head_dim"]
    one = {"fp8": 1, "bfloat16": 2}[row["kv_cache_dtype"]]
    moved = 2.0 * tokens * row["num_key_value_heads"] * size * one
    return Sample(moved, 4.0 * tokens * row["num_heads"] * size, row["latency"] / 1e3)


def latent(row: dict[str, Any], bits: float, act: float) -> Sample | None:
    """As `cached`, over the latent that all heads share (512 + 64 numbers)."""
    if not 256 <= row["step"] <= 32768 or row["batch_size"] > 512:
        return None
    tokens = row["batch_size"] * (row["step"] + 1)
    one = {"fp8": 1, "bfloat16": 2}[row["kv_cache_dtype"]]
    return Sample(
        576.0 * tokens * one, 2.0 * tokens * row["num_heads"] * (576 + 512), row["latency"] / 1e3
    )


def prompts(row: dict[str, Any], bits: float, act: float) -> Sample | None:
    """Causal attention of whole prompts."""
    if row.get("window_size") or row["step"] or row["isl"] < 512:
        return None
    tokens = row["batch_size"] * row["isl"]
    if tokens > 32768:
        return None
    flops = 2.0 * tokens * row["isl"] * row["num_heads"] * row["head_dim"]
    moved = 2.0 * tokens * row["head_dim"] * 2 * (row["num_heads"] + row["num_key_value_heads"])
    return Sample(moved, flops, row["latency"] / 1e3)


KINDS: dict[str, tuple[str, str | None, Callable[..., Sample | None]]] = {
    "product": ("gemm/{engine}/*/gemm_perf.parquet", "gemm_dtype", products),
    "experts": ("moe/{engine}/*/moe_perf.parquet", "moe_dtype", experts),
    "cached attention": ("attention/{engine}/*/generation_attention_perf.parquet", None, cached),
    "latent attention": ("mla/{engine}/*/generation_mla_perf.parquet", None, latent),
    "prompt attention": ("attention/{engine}/*/context_attention_perf.parquet", None, prompts),
}


def fit(samples: list[Sample], bandwidth: float, peak: float) -> tuple[float, float, float, float]:
    """The three numbers, and the mean error that they leave."""
    moved, flops, seconds = (np.array(column) for column in zip(*samples, strict=True))
    shares = np.round(np.arange(0.10, 1.0001, 0.04), 2)
    least = float(np.quantile(seconds, 0.05))
    best = (9e9, 0.0, 0.0, 0.0)
    for share, fixed in product(shares, np.linspace(0.1, 1.1, 11) * least):
        reads = moved / (share * bandwidth)
        for rate in shares:
            error = np.abs(np.log((fixed + np.hypot(reads, flops / (rate * peak))) / seconds))
            mean = float(error.mean())
            if mean < best[0]:
                best = (mean, float(fixed), float(share), float(rate))
    return best


def peak_flops(device: Device, name: str) -> float | None:
    """Of products in a format."""
    tflops = {"fp8": device.fp8_tflops, "fp4": device.fp4_tflops}.get(name, device.bf16_tflops)
    return None if tflops is None else tflops * 1e12


def versions(data: Path, system: str, engine: str, pattern: str) -> list[Path]:
    """The files of an engine's newest versions, the newest first."""
    found = (data / system).glob(pattern.format(engine=engine))
    numbers = {path: [*map(int, re.findall(r"\d+", path.parent.name))] for path in found}
    return sorted(numbers, key=lambda path: numbers[path], reverse=True)[:VERSIONS]


def samples_of(path: Path, kind: str) -> dict[str, list[Sample]]:
    """The kernels of a file by format, as it names them: of several for one shape the fastest,
    which an engine that has tuned itself takes."""
    _, column, read = KINDS[kind]
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    columns = [name for name in parquet.read_schema(path).names if name not in UNUSED]
    shape = [name for name in columns if name != "latency"]
    for row in parquet.read_table(path, columns=columns).to_pylist():
        key = tuple(row[name] for name in shape)
        if key not in best or row["latency"] < best[key]["latency"]:
            best[key] = row
    groups: dict[str, list[Sample]] = {}
    for row in best.values():
        name = row[column] if column else "bfloat16"
        if name in FORMATS and (kind, name) not in LEFT_OUT:
            sample = read(row, *FORMATS[name][1:3])
            if sample is not None and sample.seconds > 0:
                groups.setdefault(name, []).append(sample)
    return groups


def fitted(data: Path) -> Iterator[dict[str, Any]]:
    """The rows of the catalogue."""
    for (system, name), engine, kind in product(SYSTEMS.items(), ENGINES, KINDS):
        device, done = load_devices()[name], set[str]()
        if (kind, engine) in LEFT_OUT or device.hbm_gb_per_s is None:
            continue
        for path in versions(data, system, engine, KINDS[kind][0]):
            groups = samples_of(path, kind)
            for key, (fmt, _, _, rate) in FORMATS.items():
                samples, peak = groups.get(key, []), peak_flops(device, rate)
                if len(samples) < 50 or fmt in done or peak is None:
                    continue
                done.add(fmt)
                few = samples[:: max(1, len(samples) // ROWS)]
                error, fixed, share, of_peak = fit(few, device.hbm_gb_per_s * 1e9, peak)
                yield {
                    "device": name,
                    "engine": engine,
                    "kind": kind,
                    "format": fmt,
                    "fixed_us": round(fixed * 1e6, 2),
                    "memory_share": share,
                    "compute_share": of_peak,
                    "peak": rate,
                    "error": round(error, 3),
                    "version": path.parent.name,
                }


def reductions(data: Path) -> Iterator[dict[str, Any]]:
    """Measured all-reduces of vLLM inside a node, recorded in a graph; their sizes are in numbers
    of bf16."""
    for system, name in SYSTEMS.items():
        pattern = "comm/{engine}/*/custom_allreduce_perf.parquet"
        path = next(iter(versions(data, system, "vllm", pattern)), None)
        curves: dict[int, list[tuple[int, float]]] = {}
        for row in [] if path is None else parquet.read_table(path).to_pylist():
            if row["backend"] == "vllm_graph" and row["message_size"] >= 1024:
                point = (2 * row["message_size"], row["latency"] / 1e3)
                curves.setdefault(row["num_gpus"], []).append(point)
        for ranks, points in sorted(curves.items()):
            for num_bytes, seconds in thinned(points, 0.05):
                yield {
                    "device": name,
                    "ranks": ranks,
                    "bytes": num_bytes,
                    "seconds": f"{seconds:.3g}",
                }


def main() -> None:
    """Write the tables."""
    data = Path(sys.argv[1])
    _write(OUT / "kernels.csv", list(fitted(data)))
    _write(OUT / "reductions.csv", list(reductions(data)))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("# written by benchmarks/distill_kernels.py\n")
        file.write("# source: kernels of ai-dynamo/aiconfigurator@095f58a5 (Apache-2.0)\n")
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
