"""The planner against published runs: bounds that hold, and a referee that takes any file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import published
from benchmarks.published import Result, judge, main, pairs, percentile, report
from benchmarks.published_peers import korthikanti_bytes
from benchmarks.published_rows import PlainFacts, device_of, facts_of, read_rows, run_of
from benchmarks.published_software import Software, Unplanned, software_of

from shardwise.catalog import load_catalog
from shardwise.config import GIB

RUNS = Path(published.__file__).with_name("published_runs.csv")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return report([judge(row) for row in read_rows(RUNS)])


def group(data: dict[str, Any], source: str) -> dict[str, Any]:
    found = [g for g in data["groups"] if g["source"].startswith(source) and g["method"] == "full"]
    assert len(found) == 1
    return found[0]


def test_memory_is_within_the_bounds_told(data: dict[str, Any]) -> None:
    memory = data["all"]["memory"]
    assert memory["rows"] >= 90
    assert memory["median"] <= 0.10
    assert memory["p90"] <= 0.20


def test_throughput_is_within_the_bounds_told(data: dict[str, Any]) -> None:
    assert data["all"]["throughput"]["rows"] >= 490
    assert data["dense"]["throughput"]["median"] <= 0.10
    assert data["dense"]["throughput"]["p90"] <= 0.30
    assert data["mixtures of experts"]["throughput"]["median"] <= 0.25
    for source in ("Megatron SC21 Table 1", "Korthikanti Table 5", "Megatron-LM README", "llm-f"):
        speed = group(data, source)["throughput"]
        assert speed["median"] <= 0.10, source
        assert speed["p90"] <= 0.30, source


def test_the_page_tells_the_result_of_this_file(data: dict[str, Any]) -> None:
    page = (RUNS.parents[1] / "docs" / "planner.md").read_text()
    for name in ("dense", "mixtures of experts", "all"):
        speed = data[name]["throughput"]
        cells = f"{speed['rows']}, {speed['median']:.0%}, {speed['p90']:.0%}"
        assert re.search(rf"\*\*{name}\*\*.*\| {cells} \|", page), cells


def test_nothing_that_ran_out_of_memory_is_predicted_to_fit(data: dict[str, Any]) -> None:
    assert data["all"]["out_of_memory"] == {"rows": 4, "predicted_to_fit": 0}


def test_most_pairs_are_in_the_right_order(data: dict[str, Any]) -> None:
    order = data["all"]["pairs"]
    assert order["number"] >= 39
    assert order["right"] >= 35


def test_every_row_is_in_the_report(data: dict[str, Any]) -> None:
    """With a number, or with the reason why there is none."""
    assert len(data["rows"]) == len(read_rows(RUNS))
    for row in data["rows"]:
        numbers = (row["memory_error"], row["throughput_error"])
        assert row["reason"] or any(n is not None for n in numbers) or row["fits"] is not None


def test_figure_1_of_zero() -> None:
    """7.5B parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054)."""
    rows = [row for row in read_rows(RUNS) if row["source"].startswith("ZeRO")]
    found = {row["zero_stage_or_fsdp"]: judge(row).memory_gib or 0.0 for row in rows}
    printed = {"0": 120.0, "1": 31.4, "2": 16.6, "3": 1.88}
    size = run_of(rows[0], load_catalog()).facts.num_parameters / 7.5e9  # of the model of that size
    for stage, gigabytes in printed.items():
        assert found[stage] * GIB / 1e9 / size == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("tp", "split", "again", "per_token_and_width"),
    [
        (1, False, False, 34 + 5 * 96 * 2048 / 12288),  # equation 1
        (8, False, False, 10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8),  # equation 2
        (8, True, False, (34 + 5 * 96 * 2048 / 12288) / 8),  # equation 4
        (8, True, True, 34 / 8),  # equation 6
    ],
)
def test_activations_of_korthikanti(
    tp: int, split: bool, again: bool, per_token_and_width: float
) -> None:
    """arXiv 2205.05198, of a GPT-3: bytes of a layer, a token and a unit of width."""
    row = next(r for r in read_rows(RUNS) if r["model"] == "GPT 175B")
    run = run_of(row, load_catalog())
    layout = run.plans[0].layout.model_copy(update={"tp": tp, "pp": 1, "sequence_parallel": split})
    train = run.plans[0].train.model_copy(update={"checkpointing": "none", "micro_batch": 1})
    plan = run.plans[0].model_copy(update={"layout": layout, "train": train})
    kept = korthikanti_bytes(plan, run.facts, Software(name="megatron", attention_again=again), 1)
    embedding = 2048 * 12288 / tp  # its dropout
    assert kept - embedding == pytest.approx(96 * 2048 * 12288 * per_token_and_width)


@pytest.mark.parametrize(
    ("name", "params"),
    [("GPT 175B", 175e9), ("GPT 1008.0B", 1008e9), ("Llama 3.1 8B", 8.03e9), ("MPT 7b", 6.66e9)],
)
def test_a_models_facts_come_from_its_columns(name: str, params: float) -> None:
    row = next(r for r in read_rows(RUNS) if r["model"] == name)
    facts = facts_of(row)
    assert facts.num_parameters == pytest.approx(params, rel=0.02)
    assert isinstance(facts, PlainFacts) == (not name.startswith("Llama"))


HEADER = RUNS.read_text().splitlines()[0]


@pytest.mark.parametrize(
    "line",
    [
        "",
        ",,,,",
        "s,u,m,x,-1,0,nan,inf,,,,,H100,80,0,0,0,0,0,0,9,9,0,0,0,bf16,full,Adam,full,a,b,c,d,e",
        "s,u,GPT,7,32,4096,33,5,16384,51200,,,H100-SXM,80,8,3,1,,,,3,,1,8,2048,bf16,,,full,,9,,,",
        "s,u,GPT,7,32,4096,32,32,16384,51200,,,H1000,80,8,1,1,8,,,3,,1,8,2048,bf16,,,full,,9,,,",
        "s,u,GPT,7,2,4096,32,32,16384,51200,,,H100-SXM,80,8,1,4,2,,,0,,1,8,2048,bf16,,,full,,9,,,",
        "s,u,x,7,32,4096,32,32,16384,51200,8,2,H100,80,8,1,1,8,,3,1,,1,8,2048,bf16,,,full,,9,,,",
        "s,u,x,,32,4096,32,32,,51200,,,L4,24,8,1,1,8,,,what,,1,8,2048,bf16,,,full,,9,,,",
        "s,u,x,,32,4096,32,32,,51200,,,A10G,24,8,1,1,8,,,3,,1,8,2048,bf16,,,full,,9,,,OOM",
        '"a\nb",u,x,,32,4096,32,32,,51200,,,A100,40,8,1,1,8,,,3,,1,8,1e6,fp8,,,dora,,9,,,',
    ],
)
def test_any_file_of_these_columns_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    runs, out = tmp_path / "runs.csv", tmp_path / "out.json"
    good = RUNS.read_text().splitlines()[1]
    runs.write_text(f"{HEADER}\n{good}\n{line}\n")
    main(["--runs", str(runs), "--json", str(out)])
    assert "Megatron SC21" in capsys.readouterr().out
    assert json.loads(out.read_text())["all"]["rows"] >= 1


@pytest.mark.parametrize("text", [None, "", HEADER, "\x00\xff"])
def test_what_is_no_file_of_runs_is_one_line(tmp_path: Path, text: str | None) -> None:
    runs = tmp_path / "runs.csv"
    if text is not None:
        runs.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["--runs", str(runs)])
    assert caught.value.code == 2


def test_runs_without_some_columns_are_judged_too(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text("source,model,measured_mem_GiB\na,b,1\n")
    (result,) = [judge(row) for row in read_rows(runs)]
    assert result.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "int4"}, "int4"),
        ({"note": "activation offload"}, "offload"),
        ({"precision": "see note"}, "not given"),
    ],
)
def test_what_the_planner_has_no_model_of_is_said(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(Unplanned, match=reason):
        software_of({"source": "x", "precision": "bf16", **changes})


@pytest.mark.parametrize(
    ("gpu", "memory", "name"),
    [
        ("A100-SXM", "40", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "", "H100-80GB"),
        ("H200", "141", "H200-141GB"),
        ("L40S", "48", "L40S"),
        ("RTX 4090", "24", "RTX 4090"),  # whose memory is all that is known of it
        ("H100-PCIe", "80", "H100-PCIe"),
    ],
)
def test_devices_have_many_names(gpu: str, memory: str, name: str) -> None:
    device = device_of({"gpu": gpu, "gpu_mem_GB": memory}, load_catalog())
    assert device.name == name
    assert 0.9 * float(memory or 80) <= device.usable_gib <= float(memory or 80)


def test_a_device_that_nothing_is_known_of_is_told() -> None:
    with pytest.raises(Unplanned, match="device abacus is not in the catalogue"):
        device_of({"gpu": "abacus"}, load_catalog())


def result(layout: str, published_: float, predicted: float, **row: str) -> Result:
    cells = {"source": "s", "model": "m", "tp": layout, **row}
    return Result(row=cells, throughput=predicted, published_throughput=published_, unit="tokens/s")


def test_pairs_differ_in_one_choice_and_have_an_order() -> None:
    assert [p["right"] for p in pairs([result("1", 10, 5), result("8", 20, 6)])] == [True]
    assert [p["right"] for p in pairs([result("1", 10, 5), result("8", 20, 4)])] == [False]
    assert pairs([result("1", 10, 5), result("8", 10.1, 4)]) == []  # as good as equal
    assert pairs([result("1", 10, 5), result("8", 20, 6, recompute="full")]) == []  # two choices
    assert pairs([result("1", 10, 5), result("8", 20, 6, model="other")]) == []
    with_batch = [result("1", 10, 5, micro_batch="4"), result("8", 20, 6, micro_batch="1")]
    assert [p["choice"] for p in pairs(with_batch)] == ["layout"]


def test_percentiles_are_of_the_list() -> None:
    assert percentile([5, 1, 4, 2, 3, 6, 7, 8, 9, 10], 0.9) == 9
    assert percentile([1.0], 0.9) == 1.0
    assert percentile([], 0.9) is None
