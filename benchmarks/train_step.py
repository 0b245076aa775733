"""Measure a training step of Shardwise and of its peers, side by side in one run.

    python benchmarks/train_step.py --peers fsdp2,ddp,ds1,ds2,ds3,hf --json result.json

Each round runs every engine once, in a fresh group of two processes; the order rotates. What is
equal and what is not: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

from benchmarks.cases import PEERS, Case, Engine, engines_of, refusal, rotated
from benchmarks.group import ALLOCATORS, GroupFailed, run_group
from benchmarks.report import Round, Row, rows_of, table
from benchmarks.workload import NUM_RANKS, SIZES, save_model

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
DTYPES = ("bf16", "fp32")
Results = dict[Case, dict[str, list[Round]]]
"""case -> engine -> rounds"""
Failures = dict[tuple[Case, str], str]
"""the error of an engine on a case"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        Exit code: 0; 1 if an engine failed or did other work than the rest; 2 if something that
        was asked for cannot be run here.
    """
    options = _parse(arguments)
    engines = engines_of(options.peers)
    problem = refusal(engines) or _device_problem(options.device)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    cases = [
        Case(size=size, dtype=dtype, seq_len=seq_len, allocator=allocator)
        for size, dtype, seq_len, allocator in product(
            options.sizes, options.dtypes, options.seq_lens, options.allocators
        )
    ]
    if options.device == "cpu":  # DeepSpeed looks for accelerators as soon as it is imported
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops the ranks
    results: Results = {case: {engine.name: [] for engine in engines} for case in cases}
    failures: Failures = {}
    try:
        _measure(options, results, failures, engines)
    finally:  # also what an interrupted run has measured is worth its time
        rows = [row for case in cases for row in rows_of(case, results[case])]
        print("\n" + table(rows))
        for (case, name), error in failures.items():
            print(f"FAILED: {name}, {case}: {error.splitlines()[-1]}")
        options.json.write_text(json.dumps(_document(options, rows, failures), indent=2) + "\n")
    return 1 if failures or any(row.refused for row in rows) else 0


def _measure(
    options: argparse.Namespace, results: Results, failures: Failures, engines: Sequence[Engine]
) -> None:
    """Every round of every engine on every case; an engine that failed is not tried again."""
    with tempfile.TemporaryDirectory(prefix="train-step-models-") as folder:
        for size in options.sizes:
            save_model(size, Path(folder, size))
        for turn in range(options.rounds):
            for case, engine in product(results, rotated(engines, turn)):
                if (case, engine.name) in failures:
                    continue
                began = time.monotonic()
                try:
                    ranks = run_group(
                        _request(options, case, engine, Path(folder)),
                        allocator=case.allocator,
                        device=options.device,
                        timeout_s=options.timeout,
                    )
                except GroupFailed as error:
                    failures[case, engine.name] = str(error)
                    print(f"{engine.name}, {case}: FAILED\n{error}", file=sys.stderr, flush=True)
                    continue
                results[case][engine.name].append(ranks)
                _progress(turn + 1, case, engine, ranks, time.monotonic() - began)


def _request(
    options: argparse.Namespace, case: Case, engine: Engine, models: Path
) -> dict[str, Any]:
    """The fields of `benchmarks.run.Run`, but for the folder and the device."""
    return {
        "engine": engine.name,
        "model": str(models / case.size),
        "dtype": case.dtype,
        "seq_len": case.seq_len,
        "num_warmup": options.warmup,
        "num_steps": options.steps,
    }


def _progress(turn: int, case: Case, engine: Engine, ranks: Round, seconds: float) -> None:
    median_s = sorted(ranks[0]["step_s"])[len(ranks[0]["step_s"]) // 2]
    print(f"round {turn}, {case}, {engine.name}: {median_s:.3f} s a step ({seconds:.0f} s in all)")
    sys.stdout.flush()


def _document(
    options: argparse.Namespace, rows: Sequence[Row], failures: Failures
) -> dict[str, Any]:
    return {
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "load": os.getloadavg()[0],
            "device": options.device,
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "ranks": NUM_RANKS,
        "rounds": options.rounds,
        "warmup_steps": options.warmup,
        "steps": options.steps,
        "rows": [asdict(row) for row in rows],
        "failures": [
            {"case": asdict(case), "engine": name, "error": error}
            for (case, name), error in failures.items()
        ],
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_problem(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    count = torch.cuda.device_count()
    if count >= NUM_RANKS:
        return None
    return f"--device {device} needs {NUM_RANKS} devices, one a rank; torch sees {count}."


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=_list_of(PEERS), required=True, help=", ".join(PEERS))
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("--sizes", type=_list_of(tuple(SIZES)), default=["135m"])
    parser.add_argument("--dtypes", type=_list_of(DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--seq-lens", type=_list_of(None), default=[256], help="tokens of a row")
    parser.add_argument("--allocator", choices=(*ALLOCATORS, "both"), default="ours")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--steps", type=_positive, default=3, help="measured steps of a round")
    parser.add_argument("--warmup", type=_positive, default=1, help="steps before those")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one group")
    options = parser.parse_args(arguments)
    options.allocators = list(ALLOCATORS) if options.allocator == "both" else [options.allocator]
    return options


def _list_of(allowed: tuple[str, ...] | None) -> Any:
    """Reads "a,b": words that are allowed, or positive numbers."""

    def read(text: str) -> list[Any]:
        items = [item.strip() for item in text.split(",")]
        if allowed is None:
            return [_positive(item) for item in items]
        unknown = [item for item in items if item not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)!r} is not one of {', '.join(allowed)}"
            )
        return items

    return read


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
