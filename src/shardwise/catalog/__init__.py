"""Facts about the world: small files, each value with its source and date.

A file of the user's may replace any of it: the same keys, under `devices`, `collectives`,
`matmuls`, `kernels` and `prices`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field

from shardwise.config import Config
from shardwise.errors import UserError
from shardwise.parsing import parse, read_yaml

Curve = tuple[tuple[int, float], ...]
"""(bytes of the whole tensor, seconds) by size"""
SECTIONS = ("devices", "collectives", "matmuls", "kernels", "prices")


class Device(Config):
    """One kind of accelerator. What is None is not known: a plan that needs it says so."""

    name: str
    usable_gib: float = Field(gt=0)
    """GiB that a process can allocate, as the driver reports it"""
    bf16_tflops: float | None = Field(default=None, gt=0)
    sustained_tflops: float | None = Field(default=None, gt=0)
    """best bf16 product of random values under load; None: as the measured table says"""
    fp16_tflops: float | None = Field(default=None, gt=0)
    fp8_tflops: float | None = Field(default=None, gt=0)
    fp4_tflops: float | None = Field(default=None, gt=0)
    hbm_gb_per_s: float | None = Field(default=None, gt=0)
    per_node: int = Field(default=8, ge=1)
    """devices that the fast link joins"""
    link: str | None = None
    link_gb_per_s: float | None = Field(default=None, gt=0)
    """GB/s of one device in one direction"""
    network_gbit: float | None = Field(default=None, gt=0)
    """Gb/s of a whole node in one direction"""
    attention: float | None = Field(default=None, gt=0, le=1)
    """share of the bf16 peak that fused causal attention reaches, forward and backward"""
    like: str | None = None
    """device whose measured matrix products, as shares of the peak, are taken for this one's"""
    source: str
    date: str


class CollectiveRow(Config):
    """Measured seconds of one collective inside a node."""

    device: str
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    ranks: int = Field(ge=2)
    bytes: int = Field(gt=0)
    """of the whole tensor"""
    seconds: float = Field(gt=0)
    source: str


class MatmulRow(Config):
    """Measured rate of a bf16 product of (m, k) and (k, n) with n = k."""

    device: str
    m: int = Field(gt=0)
    n: int = Field(gt=0)
    share: float = Field(gt=0, le=1)
    """of the bf16 peak"""
    source: str


class KernelRow(Config):
    """Kernels of an inference engine: seconds = fixed + hypot(bytes / (memory share x bandwidth),
    FLOPs / (compute share x peak of the format))."""

    device: str
    engine: Literal["vllm", "trtllm", "sglang"]
    """the second is TensorRT-LLM"""
    kind: Literal["product", "experts", "cached attention", "latent attention", "prompt attention"]
    """of attention: over a cache, a latent cache, a prompt; experts: all of a rank"""
    format: Literal["bf16", "fp8", "int8", "int4", "fp4", "mxfp4"]
    fixed_us: float = Field(ge=0)
    memory_share: float = Field(gt=0, le=1)
    compute_share: float = Field(gt=0, le=1)
    peak: Literal["bf16", "fp8", "fp4"]
    error: float = Field(ge=0)
    """mean |log(predicted / measured)| over the kernels that it is of"""
    version: str
    """of the engine"""


class Price(Config):
    """What one instance costs."""

    provider: str
    instance: str
    device: str
    count: int = Field(ge=1)
    """devices of the instance"""
    region: str
    kind: Literal["on-demand", "spot"]
    usd_per_hour: float = Field(gt=0)
    network_gbit: float | None = Field(default=None, gt=0)
    """of the instance; None: as the device's catalogue row says"""
    date: str
    source: str

    @property
    def usd_per_device_hour(self) -> float:
        """What one device costs."""
        return self.usd_per_hour / self.count


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Everything that plans rest on besides the model."""

    devices: Mapping[str, Device]
    collectives: Mapping[str, Mapping[tuple[str, int], Curve]]
    """device -> (op, ranks) -> measured times inside a node"""
    matmuls: Mapping[str, tuple[tuple[int, int, float], ...]]
    """device -> (m, n, share of the bf16 peak)"""
    prices: tuple[Price, ...]
    sources: Mapping[str, str]
    """device -> where its measured tables are from"""
    kernels: Mapping[str, Mapping[tuple[str, str, str], KernelRow]]
    """device -> (engine, kind, format) -> kernels of inference engines"""
    reductions: Mapping[str, Mapping[int, Curve]]
    """device -> ranks -> measured all-reduces of an inference engine inside a node"""


R = TypeVar("R", bound=Config)


@cache
def load_catalog(path: Path | None = None) -> Catalog:
    """The catalogue, with what a file of the user's replaces.

    Args:
        path: YAML with lists under `devices`, `collectives`, `matmuls`, `kernels`, `prices`. A
            device, a price or a kind of kernel replaces the one of the same name; other measured
            rows replace the whole curve, or table of products, that they are of.

    Raises:
        UserError: the file cannot be read, or a row of it is wrong or contradicts itself.
    """
    given = _read_user(path) if path is not None else {}
    rows = read_yaml(_text("devices.yaml"))
    devices = {row["name"]: parse(Device, row, source="devices.yaml") for row in rows}
    devices |= {row.name: row for row in _parsed(Device, given, "devices")}
    collectives, matmuls, sources = _read_measured()
    for (device, op, ranks), curve in _curves(_parsed(CollectiveRow, given, "collectives")).items():
        collectives.setdefault(device, {})[op, ranks] = curve
        sources[device] = str(path)
    replaced: dict[str, list[tuple[int, int, float]]] = {}
    for row in _parsed(MatmulRow, given, "matmuls"):
        replaced.setdefault(row.device, []).append((row.m, row.n, row.share))
        sources[row.device] = str(path)
    prices = {_key(row): row for row in [*_read_prices(), *_parsed(Price, given, "prices")]}
    for reason in contradictions(prices.values(), devices):
        raise UserError(f"{path or 'prices.csv'}: {reason}.")
    return Catalog(
        devices=devices,
        collectives=collectives,
        matmuls=matmuls | {device: tuple(sorted(rows)) for device, rows in replaced.items()},
        prices=tuple(prices.values()),
        sources=sources,
        kernels=_kernels(given),
        reductions=_read_reductions(),
    )


def load_devices() -> Mapping[str, Device]:
    """The device catalogue, by name."""
    return load_catalog().devices


def contradictions(prices: Iterable[Price], devices: Mapping[str, Device]) -> list[str]:
    """What is wrong with some prices taken together, a sentence each."""
    found, on_demand = [], {}
    rows = list(prices)
    for row in rows:
        name = f"{row.provider}:{row.instance}@{row.region}"
        if row.device not in devices:
            found.append(f"{name} has the device {row.device!r}, which is not in the catalogue")
        if row.kind == "on-demand":
            on_demand[name] = row
    for row in rows:
        name = f"{row.provider}:{row.instance}@{row.region}"
        full = on_demand.get(name)
        if row.kind == "spot" and full is not None and row.usd_per_hour > full.usd_per_hour:
            found.append(
                f"{name}: spot {row.usd_per_hour} USD an hour is more than on-demand "
                f"{full.usd_per_hour}"
            )
        if full is not None and (row.count, row.device) != (full.count, full.device):
            found.append(
                f"{name} has {row.count}x{row.device} in one row and "
                f"{full.count}x{full.device} in another"
            )
    return found


def find_price(catalog: Catalog, text: str) -> Price:
    """The price of a text like `aws:p5.48xlarge@us-east-1` (`/spot` at the end: of that kind).

    Raises:
        UserError: no such instance, or not in that region; says which there are.
    """
    name, _, kind = text.partition("/")
    provider, _, rest = name.partition(":")
    instance, _, region = rest.partition("@")
    if not (provider and instance):
        raise UserError(
            f"--instance {text!r} is not of the form provider:instance@region, like "
            "aws:p5.48xlarge@us-east-1."
        )
    of_kind = [row for row in catalog.prices if row.kind == (kind or "on-demand")]
    of_provider = [row for row in of_kind if row.provider == provider]
    named = [row for row in of_provider if row.instance == instance]
    if not named:
        known = sorted({row.instance for row in of_provider})
        have = f"known of {provider}: {', '.join(known)}" if known else _providers(of_kind)
        raise UserError(f"--instance {text!r}: no {kind or 'on-demand'} price of it; {have}.")
    regions = {row.region: row for row in named}
    if region in regions:
        return regions[region]
    if not region and len(regions) == 1:
        return named[0]
    listed = ", ".join(sorted(regions))
    raise UserError(
        f"--instance {text!r}: {instance} is not listed in region {region or '(none given)'}; "
        f"regions with a price: {listed}."
    )


def _providers(prices: Sequence[Price]) -> str:
    return f"providers with prices: {', '.join(sorted({row.provider for row in prices}))}"


def _key(row: Price) -> tuple[str, str, str, str]:
    return (row.provider, row.instance, row.region, row.kind)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _table(name: str) -> Iterable[dict[str, str]]:
    return csv.DictReader(line for line in _text(name).splitlines() if not line.startswith("#"))


def _sources(name: str) -> dict[str, str]:
    """What the head of a table says of each device."""
    mark = "# source "
    lines = [line.removeprefix(mark) for line in _text(name).splitlines() if line.startswith(mark)]
    return {device: text for device, _, text in (line.partition(": ") for line in lines)}


def _read_measured() -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The distilled tables: nothing is validated here, a test does it once for all."""
    points: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in _table("collectives.csv"):
        key = (row["device"], row["op"], int(row["ranks"]))
        points.setdefault(key, []).append((int(row["bytes"]), float(row["seconds"])))
    collectives: dict[str, Any] = {}
    for (device, op, ranks), curve in points.items():
        collectives.setdefault(device, {})[op, ranks] = tuple(sorted(curve))
    matmuls: dict[str, Any] = {}
    for row in _table("matmuls.csv"):
        rate = (int(row["m"]), int(row["n"]), float(row["share"]))
        matmuls.setdefault(row["device"], []).append(rate)
    sources = {name: f"products {text}" for name, text in _sources("matmuls.csv").items()}
    for name, text in _sources("collectives.csv").items():
        sources[name] = "; ".join([*([sources[name]] if name in sources else []), text])
    return collectives, {device: tuple(sorted(rows)) for device, rows in matmuls.items()}, sources


def _kernels(given: Mapping[str, Any]) -> dict[str, dict[tuple[str, str, str], KernelRow]]:
    """Of the table, with the rows that a user replaces."""
    found: dict[str, dict[tuple[str, str, str], KernelRow]] = {}
    numbers = ("fixed_us", "memory_share", "compute_share", "error")
    for text in _table("kernels.csv"):
        data = {**text, **{name: float(text[name]) for name in numbers}}
        row = parse(KernelRow, data, source="kernels.csv")
        found.setdefault(row.device, {})[row.engine, row.kind, row.format] = row
    for row in _parsed(KernelRow, given, "kernels"):
        found.setdefault(row.device, {})[row.engine, row.kind, row.format] = row
    return found


def _read_reductions() -> dict[str, dict[int, Curve]]:
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in _table("reductions.csv"):
        key = (row["device"], int(row["ranks"]))
        points.setdefault(key, []).append((int(row["bytes"]), float(row["seconds"])))
    found: dict[str, dict[int, Curve]] = {}
    for (device, ranks), curve in points.items():
        found.setdefault(device, {})[ranks] = tuple(sorted(curve))
    return found


def _read_prices() -> list[Price]:
    rows = []
    for row in _table("prices.csv"):
        data: dict[str, Any] = {**row, "count": int(row["count"])}
        data["usd_per_hour"] = float(row["usd_per_hour"])
        data["network_gbit"] = float(row["network_gbit"]) if row["network_gbit"] else None
        rows.append(parse(Price, data, source="prices.csv"))
    return rows


def _curves(rows: Iterable[CollectiveRow]) -> dict[tuple[str, str, int], Curve]:
    points: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in rows:
        points.setdefault((row.device, row.op, row.ranks), []).append((row.bytes, row.seconds))
    return {key: tuple(sorted(curve)) for key, curve in points.items()}


def _parsed(cls: type[R], given: Mapping[str, Any], section: str) -> list[R]:
    return [
        parse(cls, row, source=f"{section}[{number}]")
        for number, row in enumerate(given.get(section) or [])
    ]


def _read_user(path: Path) -> Mapping[str, Any]:
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read the catalogue {path}: {reason}.") from None
    if not isinstance(data, Mapping) or not all(
        key in SECTIONS and isinstance(rows, list) for key, rows in data.items()
    ):
        raise UserError(f"{path}: expected lists under some of {', '.join(SECTIONS)}.")
    return data
