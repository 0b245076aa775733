"""The planner's answer: in order, with reasons, and the same every time."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shardwise
from shardwise.config import GIB, Lora
from shardwise.models.adapters import write_adapters
from shardwise.planner.answer import Answer
from shardwise.planner.cost import Job, Rate
from shardwise.planner.layout import check_plan
from shardwise.planner.machine import Machine, Timing
from shardwise.planner.report import render, to_json, verdict_text
from tests.models import model_config
from tests.unit.test_facts import LLAMA_3_1_8B, SMOLLM2

MACHINE = Machine(
    date="2026-11-30",
    host="test",
    num_processes=2,
    matmul_flops={"fp32": 1e11, "bf16": 3e11},
    memory_bytes_per_s=1e10,
    collectives=[
        Timing(op=op, num_bytes=size, seconds=1e-4 + size / 1e9)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send", "all_to_all")
        for size in (2**16, 2**20, 2**26)
    ],
)


@pytest.fixture
def smol(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def ask(model: Path, gpus: str, memory_gib: float, *overrides: str) -> Answer:
    settings = ["train.seq_len=160", "train.global_batch=4", "train.micro_batch=2", *overrides]
    return shardwise.plan(model, gpus=gpus, memory_gib=memory_gib, overrides=settings)


def test_what_fits_one_device_needs_no_sharding(smol: Path) -> None:
    answer = ask(smol, "cpu:1", 8.0)
    assert answer.verdict == "fits_one_device"
    assert answer.chosen is answer.single
    assert "no sharding is needed" in verdict_text(answer)


def test_a_cheaper_setting_comes_before_sharding(smol: Path) -> None:
    answer = ask(smol, "cpu:1", 3.1)
    assert answer.verdict == "fits_compressed"
    assert answer.chosen is not None
    assert answer.chosen.plan.train.micro_batch == 1
    assert answer.chosen.memory.total <= 3.1 * GIB


def test_what_nothing_else_helps_is_sharded(smol: Path) -> None:
    answer = ask(smol, "cpu:2", 2.5)
    assert answer.verdict == "shard"
    assert answer.chosen is not None
    assert answer.chosen.plan.layout.fsdp == 2
    assert (
        "tp=2",
        "tp=2 does not divide the model's 9 attention heads; tp sizes that work: 1, 3",
    ) in (answer.rejected)
    assert len(answer.levers) == 4  # rounded matrices are not needed
    assert [lever.plan.task for lever in answer.levers if lever.fits] == ["lora"]


def test_adapters_are_what_is_left_where_nothing_else_fits(smol: Path) -> None:
    """Said to be another task, and with its own memory; not before the task that was asked for."""
    answer = ask(smol, "cpu:1", 2.0)
    assert answer.verdict == "fits_compressed"
    assert answer.chosen is not None
    assert answer.chosen.plan.task == "lora"
    assert answer.chosen.facts.adapters is not None
    assert "The plan is for that: task=lora, not full." in verdict_text(answer)
    check_plan(answer.chosen.plan, answer.chosen.facts)
    assert ask(smol, "cpu:1", 3.1).chosen.plan.task == "full"  # type: ignore[union-attr]


def test_rounded_matrices_are_the_last_resort(smol: Path) -> None:
    """Where adapters on the matrices as they are do not fit, and never in place of a layout."""
    least = ask(smol, "cpu:1", 0.5).levers[-1]
    assert least.plan.method == "qlora"
    answer = ask(smol, "cpu:1", least.memory.total / GIB + 0.01)
    assert answer.verdict == "fits_compressed"
    assert answer.chosen is not None
    assert answer.chosen.plan.lora is not None
    assert answer.chosen.plan.lora.quantize == "nf4"
    assert "The plan is for that: task=qlora, not full." in verdict_text(answer)
    assert [lever.fits for lever in answer.levers] == [False] * 4 + [True]


def test_the_method_that_learns_most_comes_first() -> None:
    """Over all devices, before a lesser one that fits one of them; and no layout is given up before
    the last method has been tried (70B and 405B on four devices of 80 GB)."""
    settings = ["train.seq_len=2048"]
    seventy = shardwise.plan("llama-3.1-70b", gpus="4xH100-80GB", overrides=settings)
    assert seventy.chosen is not None
    assert (seventy.verdict, seventy.chosen.plan.method) == ("shard", "lora")
    assert seventy.chosen.plan.layout.world_size == 4
    assert "The plan is for that: task=lora, not full." in verdict_text(seventy)
    for task in ("full", "lora"):
        huge = shardwise.plan("llama-3.1-405b", task=task, gpus="4xH100-80GB", overrides=settings)
        assert huge.chosen is not None
        assert (huge.verdict, huge.chosen.plan.method) == ("shard", "qlora")
        assert huge.chosen.facts.num_packed_parameters > 4e11
    single = shardwise.plan("llama-3.1-70b", gpus="1xH100-80GB").chosen  # shorter rows
    assert single is not None
    assert (single.plan.method, single.plan.train.checkpointing) == ("qlora", "none")


def test_adapters_that_are_there_are_not_trained_on_other_matrices(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config = {**model_config("LLW").to_dict(), "num_hidden_layers": 1000}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    write_adapters(tmp_path, Lora(targets=["q_proj"]), tmp_path / "base")
    answer = shardwise.plan(tmp_path, task="lora", gpus="cpu:1", memory_gib=0.7)
    assert answer.chosen is None
    assert {lever.plan.method for lever in answer.levers} == {"lora"}


def test_the_impossible_says_what_would_be_needed(smol: Path) -> None:
    answer = ask(smol, "cpu:2", 0.5)
    assert answer.verdict == "impossible"
    assert answer.chosen is None
    assert "No layout over the given devices fits" in verdict_text(answer)
    assert "1, 3" in verdict_text(answer)
    assert "at the least with --task qlora" in verdict_text(answer)
    assert any("fsdp=2" in name and "GiB" in reason for name, reason in answer.rejected)


def test_three_devices_can_split_three_kv_heads(smol: Path) -> None:
    answer = ask(smol, "cpu:3", 2.0, "train.global_batch=6")
    names = [name for name, _ in answer.rejected] + [answer.chosen.name if answer.chosen else ""]
    assert any(name.startswith("tp=3") for name in names)


def test_broken_weights_are_told_while_planning(smol: Path) -> None:
    """And weights that are not there at all are noted (bug bank 37)."""
    assert ask(smol, "cpu:2", 2.5).notes == ("no weights here: planned from config.json alone",)
    (smol / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(shardwise.UserError, match=r"model\.safetensors is not a whole"):
        ask(smol, "cpu:2", 2.5)


def test_a_layout_of_the_user_is_judged_and_not_replaced(smol: Path) -> None:
    layout = shardwise.Layout(fsdp=2)
    answer = shardwise.plan(smol, gpus="cpu:2", memory_gib=9.0, layout=layout)
    assert answer.chosen is not None
    assert answer.chosen.plan.layout == layout
    with pytest.raises(shardwise.UserError, match="needs 4 devices, the plan has 2"):
        shardwise.plan(smol, gpus="cpu:2", layout=shardwise.Layout(fsdp=4))
    with pytest.raises(shardwise.UserError, match="9 attention heads"):
        shardwise.plan(smol, gpus="cpu:2", layout=shardwise.Layout(tp=2))


def test_a_layout_in_an_override_is_judged_too(smol: Path) -> None:
    """`--set layout.tp=3` is not taken and then ignored."""
    answer = ask(smol, "cpu:3", 9.0, "layout.tp=3")
    assert answer.chosen is not None
    assert answer.chosen.plan.layout == shardwise.Layout(tp=3)
    with pytest.raises(shardwise.UserError, match="9 attention heads"):
        ask(smol, "cpu:2", 9.0, "layout.tp=2")


def test_no_layout_is_proposed_that_training_would_refuse(smol: Path) -> None:
    """Fewer rows than data ranks: said among the reasons, and never chosen."""
    for count in (2, 3):
        answer = ask(smol, f"cpu:{count}", 2.5, "train.global_batch=1", "train.micro_batch=1")
        assert any("global_batch=1 rows" in reason for _, reason in answer.rejected)
        if count == 2:  # nine heads, one micro-batch, a short row
            assert answer.chosen is not None
            assert answer.chosen.plan.task == "lora"
        else:
            assert answer.chosen is not None
            assert answer.chosen.plan.layout.tp == 3
            check_plan(answer.chosen.plan, answer.facts)


def test_a_stricter_capacity_never_makes_more_fit(smol: Path) -> None:
    fits = [ask(smol, "cpu:2", gib / 4).chosen is not None for gib in range(2, 20)]
    assert fits == sorted(fits)


def test_the_same_question_gets_the_same_answer(smol: Path) -> None:
    first, second = (json.dumps(to_json(ask(smol, "cpu:4", 2.0))) for _ in range(2))
    assert first == second


def test_the_chosen_plan_is_complete_and_carries_its_evidence(smol: Path) -> None:
    answer = shardwise.plan(smol, gpus="cpu:2", memory_gib=3.0, machine=MACHINE)
    assert answer.chosen is not None
    predicted = answer.chosen.plan.predicted
    assert predicted is not None
    assert predicted.memory == answer.chosen.memory
    assert predicted.step_s == pytest.approx(answer.chosen.step_s)
    assert "measured 2026-11-30" in predicted.step_evidence
    unmeasured = ask(smol, "cpu:2", 3.0).chosen
    assert unmeasured is not None
    assert unmeasured.step_s is None
    assert unmeasured.plan.predicted is not None
    assert "shardwise probe" in unmeasured.plan.predicted.step_evidence


def test_json_holds_what_programs_read(smol: Path) -> None:
    data = json.loads(json.dumps(to_json(ask(smol, "cpu:2", 2.5))))
    assert data["verdict"] == "shard"
    worst = data["memory"]["worst_rank"]
    parts = [value for part, value in worst.items() if part != "total"]
    assert worst["total"] == pytest.approx(sum(parts), abs=1e-3)
    assert data["memory"]["capacity"] == 2.5
    assert {"option", "reason"} == set(data["rejected"][0])
    assert data["plan"]["layout"]["fsdp"] == 2
    assert {line["group"] for line in data["traffic"]} == {"fsdp"}


def test_an_8b_model_on_one_and_on_eight_gpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    one = shardwise.plan(tmp_path, gpus="1xH100-80GB", overrides=["train.seq_len=4096"])
    assert one.verdict == "fits_compressed"  # 16 bytes a parameter are 120 GiB
    assert one.chosen is not None
    assert one.chosen.plan.task == "lora"
    eight = shardwise.plan(tmp_path, gpus="8xH100-80GB", overrides=["train.seq_len=4096"])
    assert eight.verdict == "shard"
    assert eight.chosen is not None
    assert eight.chosen.plan.layout.world_size == 8
    assert eight.chosen.plan.precision.compute == "bf16"


@pytest.mark.parametrize("size", [2**16, 2**18, 2**20, 2**23, 2**26, 2**28])
def test_collective_times_are_interpolated_and_grow(size: int) -> None:
    seconds = MACHINE.collective_s("all_gather", size)
    assert 0 < seconds <= MACHINE.collective_s("all_gather", 2 * size)
    assert seconds == pytest.approx(1e-4 + size / 1e9, rel=0.6)


@pytest.mark.parametrize(
    "gpus", ["", "cpu:0", "cpu:x", "0xH100-80GB", "8xH1000", "8", "x", "cpu:-1"]
)
def test_devices_that_do_not_exist(smol: Path, gpus: str) -> None:
    with pytest.raises(shardwise.UserError, match="--gpus"):
        shardwise.plan(smol, gpus=gpus)


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan")])
def test_memory_must_be_above_nothing(smol: Path, memory: float) -> None:
    with pytest.raises(shardwise.UserError, match="memory_gib"):
        shardwise.plan(smol, gpus="cpu:2", memory_gib=memory)


def test_a_pipeline_is_proposed_only_where_nothing_simpler_fits(smol: Path) -> None:
    """It idles and its stages are uneven; its low traffic alone is no reason."""
    answer = ask(smol, "cpu:4", 2.0, "train.global_batch=8")
    assert answer.chosen is not None
    assert answer.chosen.plan.layout.pp == 1
    assert any("its pipeline takes" in reason for _, reason in answer.rejected)


def test_long_rows_may_be_cut_over_ranks(smol: Path) -> None:
    """Context parallelism is proposed for rows of which each rank keeps 2048 tokens."""
    layouts = {
        seq_len: {name for name, _ in ask(smol, "cpu:2", 1.0, f"train.seq_len={seq_len}").rejected}
        for seq_len in (1024, 4096)
    }
    assert not any("cp=2" in name for name in layouts[1024])
    assert any("cp=2" in name for name in layouts[4096])


def test_a_schedule_that_is_asked_for_is_kept_for_pipelines_only(smol: Path) -> None:
    """A plan that comes out of a search is one that training takes."""
    answer = ask(smol, "cpu:2", 3.0, "train.pipeline_schedule=gpipe")
    assert answer.chosen is not None
    assert answer.chosen.plan.layout.pp == 1
    check_plan(answer.chosen.plan, answer.facts)
    assert any(name.startswith("pp=2") for name, _ in answer.rejected)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return tmp_path


def fast(model: Path, gpus: str | None, *overrides: str, **asked: Any) -> Answer:
    settings = ["train.seq_len=4096", "train.global_batch=64", *overrides]
    return shardwise.plan(model, gpus=gpus, overrides=settings, **asked)


def test_accelerators_of_the_catalogue_have_speeds(llama: Path) -> None:
    """And no layout that fits is faster than the chosen one by more than what counts as equal."""
    answer = fast(llama, "2x8xH100-80GB")
    assert answer.chosen is not None
    assert answer.ranked[0].step is answer.chosen.step
    times = [option.step_s or 0.0 for option in answer.ranked]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= 1.03 * min(times)
    predicted = answer.chosen.plan.predicted
    assert predicted is not None
    assert predicted.step_s == answer.chosen.step_s
    assert "nine of ten" in predicted.step_evidence
    assert "aiconfigurator" in predicted.step_evidence


def test_json_holds_speed_traffic_and_cost(llama: Path) -> None:
    job = Job(tokens=1e9, rate=Rate.given(2.5), overhead=0.1)
    answer = fast(llama, "2x8xH100-80GB", job=job)
    data = json.loads(json.dumps(to_json(answer, top=3)))
    time, cost = data["time"], data["cost"]
    parts = ("compute_s", "memory_s", "host_s", "idle_s", "exposed_s")
    assert time["step_s"] == pytest.approx(sum(time[part] for part in parts))
    assert time["tokens_per_s_per_device"] == pytest.approx(64 * 4096 / 16 / time["step_s"])
    assert 0.2 < time["mfu"] < 0.7
    assert data["traffic"]
    for line in data["traffic"]:
        assert {"group", "op", "bytes_per_step", "link", "time_s", "exposed_s"} <= set(line)
        assert 0 <= line["exposed_s"] <= line["time_s"]
    exposed = sum(line["exposed_s"] for line in data["traffic"])
    assert exposed == pytest.approx(time["exposed_s"])
    hours = 1e9 / 64 / 4096 * time["step_s"] * 1.1 / 3600
    assert cost["hours"] == pytest.approx(hours)
    assert cost["usd"] == pytest.approx(hours * 16 * 2.5)
    assert cost["usd_per_million_tokens"] == pytest.approx(cost["usd"] / 1000)
    assert cost["price"]["source"] == "given by you"
    assert len(data["ranked"]) == 3
    assert data["ranked"][0]["step_s"] == time["step_s"]
    assert "published runs" in data["evidence"]["time"]


def test_what_is_rented_has_devices_a_network_and_a_price(llama: Path) -> None:
    answer = fast(llama, None, instance="aws:p4de.24xlarge@ap-southeast-1", num_instances=2)
    assert answer.chosen is not None
    devices = answer.chosen.plan.devices
    assert (devices.kind, devices.count, devices.per_node) == ("A100-80GB", 16, 8)
    assert devices.network_gbit == 400.0
    assert answer.cost is not None
    assert answer.cost.rate is not None
    assert "ap-southeast-1" in answer.cost.rate.what
    cheaper = fast(
        llama,
        None,
        instance="aws:p4de.24xlarge@ap-southeast-1",
        job=Job(rate=Rate.given(1.0)),
    )
    assert cheaper.cost is not None
    assert cheaper.cost.rate is not None
    assert cheaper.cost.rate.usd_per_device_hour == 1.0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"gpus": "cpu:2", "instance": "aws:p5.48xlarge@us-east-1"}, "both name devices"),
        ({"gpus": None, "instance": "aws:p5.48xlarge@us-east-1", "num_instances": 0}, "at least 1"),
        ({"gpus": None, "instance": "aws:nothing@us-east-1"}, "no on-demand price"),
        ({"gpus": "8xH100-80GB", "catalog_file": Path("none.yaml")}, "cannot read"),
    ],
)
def test_what_cannot_be_rented(llama: Path, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(shardwise.UserError, match=reason) as caught:
        fast(llama, **asked)
    assert "\n" not in str(caught.value)


def test_a_network_that_nobody_told_is_not_guessed(llama: Path) -> None:
    """Of rented machines, and of nodes of another size than the catalogue's."""
    rented: dict[str, Any] = {"gpus": None, "instance": "lambda:gpu_8x_h100_sxm5@US"}
    assert fast(llama, **rented).ranked[0].step_s is not None
    for asked in ({**rented, "num_instances": 2}, {"gpus": "4x2xH100-80GB"}):
        answer = fast(llama, **asked)
        assert answer.chosen is not None
        assert answer.chosen.step_s is None
        assert answer.chosen.plan.predicted is not None
        assert "devices.network_gbit" in answer.chosen.plan.predicted.step_evidence
    told = shardwise.plan(
        llama,
        **rented,
        num_instances=2,
        overrides=["train.seq_len=4096", "train.global_batch=64", "devices.network_gbit=1600.0"],
    )
    assert told.chosen is not None
    assert told.chosen.step_s is not None


def test_a_reason_that_an_option_lost_names_two_numbers_that_differ(llama: Path) -> None:
    reasons = dict(fast(llama, "8xMI300X", "train.global_batch=8").rejected)
    assert (
        reasons.pop("fsdp=8 (ZeRO-2), micro_batch=1") == "as good as the chosen one, but no better"
    )
    pairs = [re.findall(r"[\d.]+ GiB", reason) for reason in reasons.values()]
    compared = [pair for pair in pairs if len(pair) == 2]
    assert len(compared) > 3
    assert all(a != b for a, b in compared)


def test_what_is_not_calibrated_is_to_be_probed(llama: Path) -> None:
    answer = fast(llama, "8xMI300X")
    assert answer.chosen is not None
    assert answer.chosen.step_s is None
    assert to_json(answer)["time"]["mfu"] is None
    assert answer.chosen.plan.predicted is not None
    assert "shardwise probe --kind MI300X" in answer.chosen.plan.predicted.step_evidence


def test_a_probe_is_not_advised_where_it_tells_nothing(llama: Path) -> None:
    """A server's times need kernels of engines; the network of nodes is to be told."""
    for gpus, task in (("8xMI300X", "serve"), ("2x3xH100-80GB", "full")):
        answer = shardwise.plan(llama, gpus=gpus, task=task)
        assert answer.chosen is not None
        assert answer.chosen.plan.predicted is not None
        told = answer.chosen.plan.predicted.step_evidence
        assert ("MI300X has no" in told) or ("devices.network_gbit" in told)
        assert "probe" not in told


def test_money_that_cannot_be_told_is_not_left_out_in_silence(smol: Path, llama: Path) -> None:
    job = Job(tokens=1e9, rate=Rate.given(2.5))
    for answer in (
        shardwise.plan(smol, gpus="cpu:2", job=job),
        fast(llama, "8xMI300X", job=job),
        shardwise.plan(llama, task="serve", gpus="8xMI300X", job=job),
    ):
        assert answer.cost is None
        assert any("they need a step time" in note for note in answer.notes)
    assert not any("hours" in note for note in fast(llama, "8xH100-80GB", job=job).notes)
    assert not any("hours" in note for note in fast(llama, "8xMI300X").notes)


def test_the_number_that_killed_an_option_is_told(llama: Path) -> None:
    """Tensor parallelism over two nodes, on a slow network."""
    answer = fast(llama, "2x8xH100-80GB", "devices.network_gbit=100.0")
    reasons = dict(answer.rejected)
    across = next(reason for name, reason in reasons.items() if name.startswith("tp=16"))
    assert "tp=16 crosses nodes" in across
    assert "100 Gb/s network" in across
    assert answer.chosen is not None
    assert answer.chosen.plan.layout.tp < 16


def num_axes(layout: shardwise.Layout) -> int:
    return sum(getattr(layout, axis) > 1 for axis in ("dp", "fsdp", "tp", "pp", "cp"))


def test_a_step_that_is_as_good_is_left_for_a_simpler_layout(llama: Path) -> None:
    """The error of a step time is larger than three percent, and fewer axes are easier to run."""
    num_even = 0
    for nodes, seq_len in ((1, 8192), (2, 4096), (4, 4096), (4, 8192)):
        answer = fast(llama, f"{nodes}x8xH100-80GB", f"train.seq_len={seq_len}")
        chosen, *others = answer.ranked
        even = [
            o for o in others if (o.step_s or 0.0) <= 1.03 * min(o.step_s or 0.0 for o in others)
        ]
        even = [o for o in even if (o.step_s or 0.0) <= (chosen.step_s or 0.0)]
        num_even += len(even)
        for option in even:
            assert num_axes(option.plan.layout) >= num_axes(chosen.plan.layout)
    assert num_even


def test_405b_on_16384_devices_is_answered_while_you_wait(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_1_8B, **sizes}))
    begin = time.perf_counter()
    answer = fast(tmp_path, "16384xH100-80GB", "train.global_batch=2048")
    assert time.perf_counter() - begin < 20  # two seconds on two quiet cores
    assert answer.chosen is not None
    assert answer.chosen.step_s is not None
    assert len(answer.rejected) > 1000


def test_the_page_has_the_managers_numbers_at_its_top(llama: Path) -> None:
    job = Job(tokens=1e9, rate=Rate.given(2.5))
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(render(fast(llama, "2x8xH100-80GB", job=job), top=3))
    lines = console.export_text().splitlines()
    assert "Sharded over 16 devices" in lines[1]
    assert re.search(
        r"A step takes [\d.]+ s: [\d,]+ tokens a second and device, \d+% MFU", lines[2]
    )
    assert re.search(r"1\.0 B tokens take [\d.]+ hours and [\d,.]+ USD", lines[3])
    assert "A million tokens cost" in lines[4]
    text = "\n".join(lines)
    assert "the best 3:" in text
    assert re.search(r"fsdp +3200 Gb/s network +[\d.]+ GiB", text)
    assert "restarts and idling: 0% of the time" in text


def test_without_a_network_ranks_that_wait_stay_in_a_node(tmp_path: Path) -> None:
    """Where nobody knows how fast nodes talk: tp within them, shards across (planning without
    measurements goes by what cannot be hidden)."""
    settings = ["train.seq_len=2048", "train.global_batch=256"]
    answer = shardwise.plan("llama-3.1-70b", gpus="8x8xL40S", overrides=settings)
    assert answer.chosen is not None
    assert answer.chosen.step_s is None
    assert answer.chosen.plan.layout.tp <= 8
    assert not answer.chosen.crosses_nodes
    reasons = [reason for name, reason in answer.rejected if "tp=16" in name or "tp=32" in name]
    assert any("in several nodes" in reason for reason in reasons)


def test_kinds_of_devices_are_not_mixed() -> None:
    with pytest.raises(shardwise.UserError, match="plan each alone, like --gpus 8xA100-80GB") as e:
        shardwise.plan("llama-3.1-8b", gpus="8xA100-80GB+8xL40S")
    assert "\n" not in str(e.value)
