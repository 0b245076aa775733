"""The pure parts of the benchmarks: order, medians, ratios, what is refused. Nothing is timed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import train_step
from benchmarks.cases import BY_NAME, ENGINES, PEERS, Case, engines_of, refusal, rotated
from benchmarks.group import ALLOCATORS, environment
from benchmarks.meter import Clock
from benchmarks.report import MIB, Row, rows_of, table, unequal_losses
from benchmarks.workload import NUM_RANKS

CASE = Case(size="30m", dtype="bf16", seq_len=64, allocator="ours")
REQUIREMENTS = Path(train_step.__file__).parent / "requirements.txt"


def rank_result(
    step_s: float, peak_mib: int = 100, losses: tuple[float, ...] = (3.0, 2.0), **parts: Any
) -> dict[str, Any]:
    names = {"forward": 0.1, "backward": 0.2, "communication": 0.3, "optimizer": 0.4}
    return {
        "losses": list(losses),
        "step_s": [step_s, step_s + 10.0, step_s],
        "cpu_s": 1.5,
        "parts_s": {**names, **parts},
        "peak_bytes": peak_mib * MIB,
        "load_peak_bytes": 10 * MIB,
    }


def one_round(step_s: float, **given: Any) -> list[dict[str, Any]]:
    return [rank_result(step_s, **given) for _ in range(NUM_RANKS)]


def by_engine(rows: list[Row]) -> dict[str, Row]:
    return {row.engine: row for row in rows}


def test_every_engine_has_every_place_in_the_order_once() -> None:
    orders = [rotated("abcd", turn) for turn in range(4)]
    assert orders[0] == list("abcd")
    assert orders[1] == list("bcda")
    for place in range(4):
        assert {order[place] for order in orders} == set("abcd")
    assert rotated("abcd", 5) == orders[1]


def test_ours_run_at_the_stages_of_the_chosen_peers() -> None:
    assert [e.name for e in engines_of(["ds3"])] == ["shardwise-zero3", "ds-zero3"]
    assert [e.name for e in engines_of(["ddp"])] == [
        "shardwise-dp",
        "shardwise-zero1",
        "ddp",
        "ddp-zero1",
    ]
    assert set(engines_of(PEERS)) == set(ENGINES)


def test_a_missing_package_is_named_with_the_peers_that_need_it() -> None:
    line = refusal(engines_of(["ds2", "ds3", "hf"]), lambda package: package != "deepspeed")
    assert line is not None
    assert line.startswith("deepspeed is not installed, which ds2, ds3 needs")
    assert "benchmarks/requirements.txt" in line
    assert "\n" not in line
    assert refusal(engines_of(PEERS), lambda package: True) is None
    assert refusal(engines_of(["fsdp2", "ddp"]), lambda package: False) is None


def test_missing_peers_end_the_program_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    monkeypatch.setattr(train_step, "_measure", lambda *_: pytest.fail("something ran"))
    target = tmp_path / "result.json"
    assert train_step.main(["--peers", "fsdp2,ds1", "--json", str(target)]) == 2
    assert "deepspeed is not installed" in capsys.readouterr().err
    assert not target.exists()


def test_every_package_of_a_peer_is_pinned() -> None:
    pinned = re.findall(r"^([\w-]+)==", REQUIREMENTS.read_text(), flags=re.MULTILINE)
    assert {package for engine in ENGINES for package in engine.packages} <= set(pinned)


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_step.main(["--peers", "horovod", "--json", "x"])
    assert "'horovod' is not one of fsdp2" in capsys.readouterr().err


def test_medians_and_ratios_to_the_best_peer_of_the_stage() -> None:
    rows = by_engine(
        rows_of(
            CASE,
            {
                "shardwise-zero3": [one_round(s, peak_mib=150) for s in (3.0, 9.0, 2.0)],
                "fsdp2-zero3": [one_round(s, peak_mib=100) for s in (4.0, 4.0, 4.0)],
                "ds-zero3": [one_round(s, peak_mib=200) for s in (2.0, 2.0, 8.0)],
                "fsdp2-zero2": [one_round(1.0, peak_mib=10)],
            },
        )
    )
    ours = rows["shardwise-zero3"]
    assert ours.step_s == 3.0  # median over steps, then over rounds
    assert ours.rounds_step_s == [3.0, 9.0, 2.0]
    assert ours.step_ratio == pytest.approx(3.0 / 2.0)
    assert ours.peak_ratio == pytest.approx(150 / 100)
    assert rows["fsdp2-zero3"].step_ratio == pytest.approx(2.0)
    assert rows["ds-zero3"].step_ratio == 1.0
    assert rows["fsdp2-zero2"].step_ratio == 1.0  # its own stage


def test_the_worst_rank_counts_for_memory_and_time() -> None:
    ranks = [rank_result(1.0, peak_mib=100), rank_result(2.0, peak_mib=300)]
    (row,) = rows_of(CASE, {"ddp": [ranks]})
    assert row.step_s == 2.0
    assert row.cpu_s == 3.0  # of all ranks
    assert row.peak_mib == 300


def test_a_part_that_is_not_known_stays_unknown() -> None:
    (row,) = rows_of(CASE, {"ddp": [one_round(1.0, communication=None)]})
    assert row.parts_s["communication"] is None
    assert row.parts_s["backward"] == pytest.approx(0.2)


def test_unequal_losses_are_refused_loudly_and_nothing_is_compared_with_them() -> None:
    rows = rows_of(
        CASE,
        {
            "shardwise-dp": [one_round(2.0, losses=(3.0, 2.005))],
            "ddp": [one_round(2.0)],
            "hf-ddp": [one_round(1.0, losses=(3.0, 2.03))],
        },
    )
    row = by_engine(rows)["hf-ddp"]
    assert row.refused == "in step 2 its loss is 2.0300, the engines' median 2.0050"
    assert row.step_ratio is None
    assert by_engine(rows)["shardwise-dp"].refused is None
    assert by_engine(rows)["shardwise-dp"].step_ratio == 1.0
    text = table(rows)
    assert re.search(r"hf-ddp .*REFUSED .*REFUSED", text)
    assert "REFUSED: hf-ddp, 30m bf16 64 tokens, ours allocator: in step 2" in text


@pytest.mark.parametrize("broken", [[[3.0, float("nan")]], [[3.0, 2.0], [3.0, 2.5]]])
def test_one_bad_step_of_one_round_is_enough(broken: list[list[float]]) -> None:
    losses = {"ddp": [[3.0, 2.0]] * 2, "fsdp2-zero3": [[3.0, 2.0]] * 2, "ds-zero3": broken}
    assert set(unequal_losses(losses)) == {"ds-zero3"}


def test_other_numbers_of_steps_are_unequal_work() -> None:
    assert set(unequal_losses({"ddp": [[3.0, 2.0]], "hf-ddp": [[3.0]]})) == {"ddp", "hf-ddp"}


def test_a_failed_engine_has_no_row() -> None:
    rows = rows_of(CASE, {"ddp": [one_round(1.0)], "hf-ddp": []})
    assert [row.engine for row in rows] == ["ddp"]


def test_the_clock_charges_the_innermost_section(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0])  # forward begins, collective begins, ends, forward ends
    monkeypatch.setattr("benchmarks.meter.time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = Clock()
    with clock.section("forward"):
        clock.timed("communication", lambda: None)()
    assert clock.take() == {
        "forward": 4.0,
        "backward": 0.0,
        "communication": 2.0,
        "optimizer": 0.0,
    }
    assert set(clock.take().values()) == {0.0}


def test_our_allocator_settings_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.launch import local

    for name in ALLOCATORS["ours"]:
        monkeypatch.delenv(name, raising=False)
    group: Any = SimpleNamespace(
        job=SimpleNamespace(num_processes=NUM_RANKS, kind="train"), folder=Path("x")
    )
    launcher = local._environment(group, 0)
    assert ALLOCATORS["ours"] == {name: launcher[name] for name in ALLOCATORS["ours"]}


def test_the_default_allocator_is_not_the_one_of_the_users_shell() -> None:
    given = environment(1, "default", "cpu", {"MALLOC_MMAP_THRESHOLD_": "1", "HOME": "/home/me"})
    assert not set(ALLOCATORS["ours"]) & set(given)
    assert given["HOME"] == "/home/me"
    assert (given["RANK"], given["WORLD_SIZE"]) == ("1", str(NUM_RANKS))


def test_names_and_tables_agree() -> None:
    assert len(BY_NAME) == len(ENGINES)
    folder = Path(train_step.__file__).parent / "engines"
    assert all((folder / f"{engine.module}.py").exists() for engine in ENGINES)
    longer = replace(CASE, seq_len=128)
    rows = [row for case in (CASE, longer) for row in rows_of(case, {"ddp": [one_round(1.0)]})]
    assert table(rows).count("ddp") == 2
    json.dumps([row.parts_s for row in rows])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_real_round_beside_a_peer(tmp_path: Path) -> None:
    """Our engine's clock sits on names of the library, which may change; the losses agree."""
    file = tmp_path / "result.json"
    options = "--peers ddp --sizes 30m --dtypes fp32 --seq-lens 32 --rounds 1 --steps 1 --warmup 1"
    assert train_step.main([*options.split(), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    ours = [row for row in rows if row["engine"].startswith("shardwise")]
    assert {row["engine"] for row in ours} == {f"shardwise-{s}" for s in ("dp", "zero1")}
    for row in ours:
        assert row["refused"] is None
        assert all(row["parts_s"][part] > 0 for part in ("forward", "backward", "optimizer"))
