"""Facts about the world: rows are well formed, a file of the user's replaces them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.distill import main as distill
from benchmarks.distill import thinned

from shardwise.catalog import (
    CollectiveRow,
    MatmulRow,
    Price,
    contradictions,
    find_price,
    load_catalog,
    load_devices,
)
from shardwise.config import Devices
from shardwise.errors import UserError
from shardwise.parsing import parse
from shardwise.planner.accelerator import Accelerator, accelerator
from shardwise.planner.devices import parse_devices
from shardwise.planner.interpolate import at, level
from shardwise.planner.network import Group

CATALOG = Path(__file__).parents[2] / "src" / "shardwise" / "catalog"


def speeds(gpus: str) -> Accelerator:
    found = accelerator(parse_devices(gpus), load_catalog())
    assert isinstance(found, Accelerator)
    return found


def table(name: str) -> list[dict[str, str]]:
    text = (CATALOG / name).read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def test_every_measured_row_is_well_formed() -> None:
    for row in table("collectives.csv"):
        data = {**row, "ranks": int(row["ranks"]), "bytes": int(row["bytes"]), "source": "any"}
        assert parse(CollectiveRow, {**data, "seconds": float(row["seconds"])}, source="row")
        assert row["device"] in load_devices()
    for row in table("matmuls.csv"):
        data = {**row, "m": int(row["m"]), "n": int(row["n"]), "source": "any"}
        assert parse(MatmulRow, {**data, "share": float(row["share"])}, source="row")
        assert row["device"] in load_devices()
    measured = {row["device"] for name in ("collectives.csv", "matmuls.csv") for row in table(name)}
    assert measured == set(load_catalog().sources)


def test_no_price_contradicts_another() -> None:
    catalog = load_catalog()
    assert len(catalog.prices) > 30
    assert contradictions(catalog.prices, catalog.devices) == []


def price(**changes: Any) -> Price:
    data = {
        "provider": "cloud",
        "instance": "big",
        "device": "H100-80GB",
        "count": 8,
        "region": "here",
        "kind": "on-demand",
        "usd_per_hour": 20.0,
        "date": "2026-01",
        "source": "a page",
    }
    return parse(Price, {**data, **changes}, source="price")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "spot", "usd_per_hour": 21.0}, "spot 21.0 USD an hour is more than on-demand"),
        ({"kind": "spot", "count": 12, "usd_per_hour": 9.0}, "12xH100-80GB in one row"),
        ({"region": "there", "device": "H1000"}, "'H1000', which is not in the catalogue"),
    ],
)
def test_rows_that_contradict_themselves_are_found(changes: dict[str, Any], reason: str) -> None:
    found = contradictions([price(), price(**changes)], load_devices())
    assert len(found) == 1
    assert reason in found[0]


def test_a_price_is_found_by_name_and_place() -> None:
    found = find_price(load_catalog(), "aws:p5.48xlarge@us-east-1")
    assert (found.count, found.device, found.usd_per_hour) == (8, "H100-80GB", 55.04)
    assert found.usd_per_device_hour == pytest.approx(6.88)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("p5.48xlarge", "provider:instance@region"),
        ("", "provider:instance@region"),
        ("aws:p9@us-east-1", "known of aws"),
        ("mars:big@here", "providers with prices"),
        ("aws:p5.48xlarge@ap-southeast-1", "regions with a price"),
        ("aws:p5.48xlarge@us-east-1/spot", "no spot price"),
    ],
)
def test_prices_that_are_not_there(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        find_price(load_catalog(), text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gpus", ["8xA100-80GB", "8xH100-80GB", "8xL40S", "4xB200-180GB"])
def test_measured_points_are_hit_exactly(gpus: str) -> None:
    machine = speeds(gpus)
    for (op, ranks), curve in machine.collectives.items():
        group = Group(size=ranks, per_node=ranks)
        for size, seconds in curve:
            assert machine.collective_s(op, size, group) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_square_products_get_the_measured_share_of_what_is_sustained() -> None:
    machine = speeds("8xA100-80GB")
    best = max(share for _, _, share in machine.matmuls)
    assert best * 312e12 == pytest.approx(294e12, rel=0.01)  # of values that switch little
    for m, n, share in machine.matmuls:
        if m <= n:  # the rows are the smallest of the three
            flops = 2 * m * n * n / machine.matmul_s(m, n, n, "bf16")
            assert flops == pytest.approx(share / best * 271.2e12)


def test_a_short_sum_writes_more_for_its_work() -> None:
    """A result of 2 bytes for each 2048 operations takes its time; for as many as were measured,
    it is part of what was measured."""
    machine = speeds("8xH100-80GB")
    m, n, k = 8192, 8192, 1024
    products = 2 * m * n * k / (machine.share(m, n, k) * machine.peak_flops)
    written = machine.memory_s(2 * m * n * (1 - k / 8192))
    assert machine.matmul_s(m, n, k, "bf16") == pytest.approx(products + written)
    assert written > 0.05 * products
    cube = 2 * n**3 / (machine.share(n, n, n) * machine.peak_flops)
    assert machine.matmul_s(n, n, n, "bf16") == pytest.approx(cube)


def test_interpolation_is_straight_in_logarithms() -> None:
    points = [(10, 1.0), (1000, 100.0)]
    assert at(points, 100) == pytest.approx(10.0)
    assert at(points, 5) == 1.0
    assert at(points, 10_000) == pytest.approx(1000.0)
    assert level(points, 10_000) == 100.0


def test_thinning_keeps_what_interpolation_cannot_give() -> None:
    straight = [(2**k, 2.0**k) for k in range(10)]
    assert thinned(straight, 0.01) == [straight[0], straight[-1]]
    bent = [*straight, (2**10, 5000.0)]
    assert thinned(bent, 0.01) == [straight[0], straight[-1], bent[-1]]


def test_distilling_again_writes_tables_that_load(tmp_path: Path) -> None:
    comms = tmp_path / "comms.csv"
    comms.write_text(
        "system,nccl,device,op,n_gpus,bytes,latency_us,busbw_GBps,scope,source\n"
        "h100_sxm,2.27,H100,alltoall,8,1024,10.0,,intra-node,somebody@1\n"
        "h100_sxm,2.27,H100,alltoall,8,1048576,20.0,,intra-node,somebody@1\n"
        "unknown,2.27,X,alltoall,8,1024,10.0,,intra-node,somebody@1\n"
    )
    distill(["--comms", str(comms), "--out", str(tmp_path)])
    lines = (tmp_path / "collectives.csv").read_text().splitlines()
    assert lines[1] == "# source H100-80GB: NCCL 2.27, somebody@1"
    assert lines[3:] == [
        "H100-80GB,all_to_all,8,1024,1e-05",
        "H100-80GB,all_to_all,8,1048576,2e-05",
    ]


def user_file(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_file_of_the_users_replaces_facts(tmp_path: Path) -> None:
    device = load_devices()["H100-80GB"].model_dump(exclude_none=True)
    mine = {
        "devices": [{**device, "network_gbit": 800.0}],
        "collectives": [
            {"device": "H100-80GB", "op": "all_reduce", "ranks": 8, "bytes": n, "seconds": s}
            | {"source": "mine"}
            for n, s in ((1024, 1e-3), (2**30, 1.0))
        ],
        "prices": [price().model_dump(exclude_none=True)],
    }
    catalog = load_catalog(user_file(tmp_path, mine))
    assert catalog.devices["H100-80GB"].network_gbit == 800.0
    assert find_price(catalog, "cloud:big@here").usd_per_hour == 20.0
    machine = accelerator(Devices(kind="H100-80GB", count=8, memory_gib=80.0), catalog)
    assert isinstance(machine, Accelerator)
    assert machine.collective_s("all_reduce", 1024, Group(size=8, per_node=8)) == 1e-3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([1, 2], "expected lists under some of"),
        ({"device": []}, "expected lists under some of"),
        ({"devices": [{"name": "X"}]}, "usable_gib"),
        ({"prices": [{"provider": "x"}]}, "missing"),
        ({"prices": [7]}, "expected a mapping"),
    ],
)
def test_files_that_are_no_catalogue(tmp_path: Path, data: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        load_catalog(user_file(tmp_path, data))
    assert "\n" not in str(caught.value)


def test_a_price_that_is_too_good_is_refused(tmp_path: Path) -> None:
    rows = [price(), price(kind="spot", usd_per_hour=30.0)]
    path = user_file(tmp_path, {"prices": [row.model_dump(exclude_none=True) for row in rows]})
    with pytest.raises(UserError, match=r"spot 30\.0 USD an hour is more"):
        load_catalog(path)


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ("8xA10G", "no measured matrix products and no known bf16 rate"),
        ("8xL4", "no measured matrix products"),
        ("16xRTX-PRO-6000", "no measured matrix products"),
        ("16xL40S", "network between nodes"),
    ],
)
def test_what_is_not_calibrated_has_no_speeds(gpus: str, reason: str) -> None:
    found = accelerator(parse_devices(gpus), load_catalog())
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(("gpus", "gbit"), [("16xH100-80GB", 3200.0), ("12xH100-80GB", 2400.0)])
def test_a_node_that_is_used_in_part_has_a_part_of_the_network(gpus: str, gbit: float) -> None:
    assert speeds(gpus).network_gbit == gbit


@pytest.mark.parametrize(
    ("text", "count", "node"),
    [("8xH100-80GB", 8, 8), ("2x8xH100-80GB", 16, 8), ("4x2xH100-80GB", 8, 2), ("H100-80GB", 1, 1)],
)
def test_devices_in_nodes(text: str, count: int, node: int) -> None:
    devices = parse_devices(text)
    assert (devices.count, devices.node(8)) == (count, node)
