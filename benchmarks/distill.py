"""Measurements of others -> the small tables of the catalogue.

    python benchmarks/distill.py --comms comms.csv --gemm gemm.csv --hardware hardware.csv \
        --out src/shardwise/catalog

Reads CSV files with these columns and writes `collectives.csv`, `matmuls.csv` and `prices.csv`:

- comms: system, op, n_gpus, bytes, latency_us, source (inside a node, bytes of the whole tensor)
- gemm: system, m, n, k, latency_ms, source
- hardware: kind=instance rows with name, provider, instance, gpus, region, price_usd_per_hour,
  price_kind, price_date, source, note, inter_node_Gbps_per_node

Points of a curve are dropped where the log-log interpolation of what stays is within
`--tolerance` of them. Rows that contradict themselves, or that their own note doubts, are left out
and printed.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardwise.catalog import Device, Price, contradictions, load_devices
from shardwise.parsing import parse
from shardwise.planner.interpolate import at

Points = Sequence[tuple[int, float]]
DEVICES = {
    "a100_sxm": "A100-80GB",
    "h100_sxm": "H100-80GB",
    "h200_sxm": "H200-141GB",
    "b200_sxm": "B200-180GB",
    "b300_sxm": "B300-288GB",
    "gb200": "GB200-186GB",
    "gb300": "GB300-288GB",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000",
}
"""name of a measured system -> of the catalogue's device"""
INSTANCE_DEVICES = {
    "T4": "T4",
    "V100-SXM 16GB": "V100-16GB",
    "A10G": "A10G",
    "L4": "L4",
    "L40S": "L40S",
    "A100-SXM 40GB": "A100-40GB",
    "A100-SXM 80GB": "A100-80GB",
    "H100-SXM": "H100-80GB",
    "H200": "H200-141GB",
    "B200": "B200-180GB",
    "B300": "B300-288GB",
}
OPS = {"alltoall": "all_to_all"}
KINDS = {"on-demand": "on-demand", "host+GPU, labelled on-demand": "on-demand", "spot": "spot"}
MIN_M = 16


def thinned(points: Points, tolerance: float) -> list[tuple[int, float]]:
    """The fewest points, ends included, whose interpolation is within `tolerance` of all."""
    ordered = sorted(points)
    kept = [ordered[0]]
    while kept[-1] is not ordered[-1]:
        begin = ordered.index(kept[-1])
        end = next(
            end
            for end in range(len(ordered) - 1, begin, -1)
            if end == begin + 1
            or all(
                abs(at([ordered[begin], ordered[end]], x) / y - 1) <= tolerance
                for x, y in ordered[begin + 1 : end]
            )
        )
        kept.append(ordered[end])
    return kept


def collectives(
    rows: Iterable[dict[str, str]], tolerance: float
) -> tuple[dict[str, str], list[list[object]]]:
    """Thinned curves of collectives inside a node, by device, op and number of ranks."""
    curves: dict[tuple[str, str, int], dict[int, float]] = {}
    sources: dict[str, str] = {}
    for row in rows:
        device = DEVICES.get(row["system"])
        if device is None or not row["latency_us"] or row["scope"] != "intra-node":
            continue
        key = (device, OPS.get(row["op"], row["op"]), int(row["n_gpus"]))
        curves.setdefault(key, {})[int(row["bytes"])] = float(row["latency_us"]) / 1e6
        sources[device] = f"NCCL {row['nccl']}, {_short(row['source'])}"
    return sources, [
        [device, op, ranks, size, f"{seconds:.4g}"]
        for (device, op, ranks), curve in sorted(curves.items())
        for size, seconds in thinned(list(curve.items()), tolerance)
    ]


def matmuls(
    rows: Iterable[dict[str, str]], devices: dict[str, Device], tolerance: float
) -> tuple[dict[str, str], list[list[object]]]:
    """Shares of the peak of square weights. Odd sizes, which kernels pad, are left out."""
    tables: dict[tuple[str, int], dict[int, float]] = {}
    sources: dict[str, str] = {}
    for row in rows:
        device = DEVICES.get(row["system"])
        m, n, k = (int(row[key]) for key in ("m", "n", "k"))
        if device is None or m < MIN_M or n != k or m % 16:
            continue
        peak = devices[device].bf16_tflops
        if peak is None:
            continue
        share = 2 * m * n * k / (float(row["latency_ms"]) / 1e3) / (peak * 1e12)
        tables.setdefault((device, n), {})[m] = min(1.0, share)
        sources[device] = f"{row['backend']}, {_short(row['source'])}"
    return sources, [
        [device, m, n, f"{share:.4g}"]
        for (device, n), table in sorted(tables.items())
        for m, share in thinned(list(table.items()), tolerance)
    ]


def prices(rows: Iterable[dict[str, str]], devices: dict[str, Device]) -> list[list[object]]:
    """Instances with a price; what its own note calls suspect, or a part of one, is left out."""
    found = []
    for row in rows:
        device, kind = INSTANCE_DEVICES.get(row["name"]), KINDS.get(row["price_kind"])
        name = f"{row['provider']} {row['instance']} {row['region']}"
        if row["kind"] != "instance":
            continue
        region = re.sub(r"\s*\(.*\)|,.*|-centred list", "", row["region"]).strip()
        doubted = "SUSPECT" in row["note"] or "stale" in row["note"]
        if device is None or kind is None or doubted or not region or " " in row["instance"]:
            print(f"left out: {name}: {row['note'] or row['price_kind'] or 'no device'}")
            continue
        data = {
            "provider": row["provider"].lower(),
            "instance": row["instance"],
            "device": device,
            "count": int(row["gpus"]),
            "region": region,
            "kind": kind,
            "usd_per_hour": float(row["price_usd_per_hour"]),
            "network_gbit": float(row["inter_node_Gbps_per_node"] or 0) or None,
            "date": row["price_date"].split(" (")[0].split(", US")[0].replace(",", ";"),
            "source": row["source"].split(" @")[0].split("://")[-1],
        }
        found.append(parse(Price, data, source=name))
    wrong = contradictions(found, devices)
    for reason in wrong:
        print(f"left out: {reason}")
    good = [row for row in found if not any(row.instance in reason for reason in wrong)]
    return [
        list({**row.model_dump(), "network_gbit": row.network_gbit or ""}.values()) for row in good
    ]


def _short(source: str) -> str:
    """The project, commit and licence of a source."""
    project = re.split(r" aic-core| \(", source)[0]
    licence = re.search(r"\([^()]*\)$", source)
    return " ".join([project, *([licence[0]] if licence else [])]).replace(",", ";")


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(
    path: Path, header: str, sources: dict[str, str], rows: Sequence[Sequence[object]]
) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("# written by benchmarks/distill.py\n")
        file.writelines(f"# source {name}: {text}\n" for name, text in sorted(sources.items()))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header.split(","))
        writer.writerows(rows)
    print(f"{path.name}: {len(rows)} rows")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the files that are given, write the tables that they make."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--comms", type=Path)
    parser.add_argument("--gemm", type=Path)
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args(argv)
    devices = dict(load_devices())
    if not math.isfinite(args.tolerance) or args.tolerance < 0:
        sys.exit("--tolerance is a share, like 0.05")
    if args.comms:
        made = collectives(_read(args.comms), args.tolerance)
        _write(args.out / "collectives.csv", "device,op,ranks,bytes,seconds", *made)
    if args.gemm:
        made = matmuls(_read(args.gemm), devices, args.tolerance)
        _write(args.out / "matmuls.csv", "device,m,n,share", *made)
    if args.hardware:
        rows = prices(_read(args.hardware), devices)
        _write(args.out / "prices.csv", ",".join(Price.model_fields), {}, rows)


if __name__ == "__main__":
    main()
