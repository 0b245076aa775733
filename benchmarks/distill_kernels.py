"""Measured kernels of inference engines -> the catalogue's kernels.csv and reductions.csv.

    python benchmarks/distill_kernels.py DATA    # needs numpy and pyarrow

DATA is `aic-core/src/aiconfigurator_core/systems/data` of ai-dynamo/aiconfigurator (Apache-2.0): the
seconds of single kernels, by device and engine. Of each kind of kernel and format three numbers are
kept: seconds = fixed + hypot(bytes / (memory share x bandwidth), FLOPs / (compute share x peak)),
those of least mean |log(predicted / measured)|. No run of a whole model is read here.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

from benchmarks.distill import thinned
from shardwise.catalog import Device, load_devices

OUT = Path(__file__).parents[1] / "src/shardwise/catalog"
SYSTEMS = {
    "a100_sxm": "A100-80GB",
    "h100_sxm": "H100-80GB",
    "h200_sxm": "H200-141GB",
    "b200_sxm": "B200-180GB",
    "b300_sxm": "B300-288GB",
    "gb200": "GB200-186GB",
    "gb300": "GB300-288GB",
    "l40s": "L40S",
}
FORMATS = {  # of the files -> ours, bits of a weight with its scales, bytes of an input
    "bfloat16": ("bf16", 16.0, 2.0),
    "fp8": ("fp8", 8.0, 1.0),
    "fp8_block": ("fp8", 8.0, 1.0),
    "nvfp4": ("fp4", 4.5, 0.5625),
    "w4a16_mxfp4": ("mxfp4", 4.25, 2.0),
    "int4_wo": ("int4", 4.25, 2.0),
}
ENGINES = ("vllm", "trtllm", "sglang")
"""the first one that has a kind of kernel and a format is taken, in its newest version"""
LEFT_OUT = {("product", "fp8_block"), ("experts", "fp8"), ("latent attention", "vllm")}
"""files of kernels that were not recorded in a graph (vLLM's products in blocks of fp8, latent
attention), and of experts in fp8 without blocks, which no published model has"""
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
    "product": ("gemm/*/*/gemm_perf.parquet", "gemm_dtype", products),
    "experts": ("moe/*/*/moe_perf.parquet", "moe_dtype", experts),
    "cached attention": ("attention/*/*/generation_attention_perf.parquet", None, cached),
    "latent attention": ("mla/*/*/generation_mla_perf.parquet", None, latent),
    "prompt attention": ("attention/*/*/context_attention_perf.parquet", None, prompts),
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


def peak_flops(device: Device, fmt: str) -> float | None:
    """Of the products that a format is computed in."""
    tflops = {"fp8": device.fp8_tflops, "fp4": device.fp4_tflops}.get(fmt, device.bf16_tflops)
    return None if tflops is None else tflops * 1e12


def _version(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else -1 for part in path.parent.name.split(".")]


def _files(data: Path, system: str, pattern: str) -> Iterator[Path]:
    for engine in ENGINES:
        found = sorted((data / system).glob(pattern.replace("*", engine, 1)), key=_version)
        yield from found[-1:]


def fitted(data: Path) -> Iterator[dict[str, Any]]:
    """The rows of the catalogue."""
    for (system, name), (kind, (pattern, column, read)) in product(
        SYSTEMS.items(), KINDS.items()
    ):
        device, done = load_devices()[name], set()
        for path in _files(data, system, pattern):
            if (kind, path.parent.parent.name) in LEFT_OUT:
                continue
            groups: dict[str, list[Sample]] = {}
            columns = [c for c in parquet.read_schema(path).names if c != "device"]
            for row in parquet.read_table(path, columns=columns).to_pylist():
                key = row[column] if column else "bfloat16"
                if (kind, key) in LEFT_OUT:
                    continue
                if key in FORMATS and FORMATS[key][0] not in done:
                    sample = read(row, *FORMATS[key][1:])
                    if sample is not None and sample.seconds > 0:
                        groups.setdefault(key, []).append(sample)
            for key, samples in groups.items():
                fmt, peak = FORMATS[key][0], peak_flops(device, FORMATS[key][0])
                if len(samples) < 50 or peak is None or device.hbm_gb_per_s is None:
                    continue
                few = samples[:: max(1, len(samples) // ROWS)]
                error, fixed, share, rate = fit(few, device.hbm_gb_per_s * 1e9, peak)
                done.add(fmt)
                yield {
                    "device": name,
                    "kind": kind,
                    "format": fmt,
                    "fixed_us": round(fixed * 1e6, 2),
                    "memory_share": share,
                    "compute_share": rate,
                    "error": round(error, 3),
                    "engine": f"{path.parent.parent.name} {path.parent.name}",
                }


def reductions(data: Path) -> Iterator[dict[str, Any]]:
    """Measured all-reduces of vLLM inside a node, recorded in a graph; their sizes are in numbers
    of bf16."""
    for system, name in SYSTEMS.items():
        found = _files(data, system, "comm/*/*/custom_allreduce_perf.parquet")
        path = next((path for path in found if path.parent.parent.name == "vllm"), None)
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
