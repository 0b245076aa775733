"""The planner's serving half: bytes of the cache, what requests see, and how a layout is found."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from benchmarks import serving_runs

import shardwise
from shardwise.catalog import load_catalog
from shardwise.config import GIB, Layout
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.lookup import look_up
from shardwise.planner.accelerator import Accelerator, accelerator
from shardwise.planner.answer import Answer
from shardwise.planner.cost import Job, Rate
from shardwise.planner.devices import parse_devices
from shardwise.planner.formats import FORMATS
from shardwise.planner.kernels import Engine, engine
from shardwise.planner.page import page
from shardwise.planner.report import render, to_json
from shardwise.planner.serving import Server, ServeTime
from shardwise.planner.serving_memory import Deployment, Load
from shardwise.planner.serving_report import plan_to_run
from shardwise.planner.serving_search import serving_layouts, why_not_served
from shardwise.planner.serving_work import touched

RUNS = Path(__file__).parents[2] / "benchmarks/serving_runs.csv"
LOAD = Load(concurrency=16, prompt_len=1024, output_len=1024)


def facts_of(name: str) -> ModelFacts:
    return look_up(name).facts


def held(
    name: str, layout: Layout | None = None, weights: str = "bf16", gib: float = 80
) -> Deployment:
    return Deployment(
        facts=facts_of(name), layout=layout or Layout(), weights=weights, capacity=gib * GIB
    )


def engine_of(gpus: str) -> Engine:
    catalog = load_catalog()
    speeds = accelerator(parse_devices(gpus, catalog=catalog), catalog)
    assert isinstance(speeds, Accelerator)
    found = engine(speeds, catalog)
    assert isinstance(found, Engine)
    return found


def served(
    name: str,
    gpus: str,
    load: Load,
    layout: Layout | None = None,
    weights: str = "bf16",
) -> ServeTime:
    engine_ = engine_of(gpus)
    server = Server(
        facts=facts_of(name),
        layout=layout or Layout(),
        weights=weights,
        capacity=engine_.speeds.device.usable_gib * GIB,
        engine=engine_,
    )
    found = server.time(load)
    assert found is not None
    return found


def ask(
    model: str = "llama-3.1-70b", gpus: str = "8xH100-80GB", *settings: str, **more: Any
) -> Answer:
    overrides = [f"serve.{setting}" for setting in settings]
    return shardwise.plan(model, task="serve", gpus=gpus, overrides=overrides, **more)


@pytest.mark.parametrize(
    ("name", "weights", "kib"),
    [
        ("llama-3.1-70b", "bf16", 320),  # 2 x 80 layers x 8 heads x 128 x 2 bytes
        ("llama-3.1-8b", "bf16", 128),
        ("llama-3.1-70b", "fp8", 160),
        ("deepseek-v3", "bf16", 61 * 576 * 2 / 1024),  # 68.6 KiB: a latent of 512 and a key of 64
    ],
)
def test_bytes_that_a_token_caches(name: str, weights: str, kib: float) -> None:
    assert held(name, weights=weights).room(LOAD).token_bytes / 1024 == pytest.approx(kib)


def test_heads_are_divided_until_there_is_one_each() -> None:
    whole = held("llama-3.1-70b").room(LOAD).token_bytes
    for tp, share in ((2, 2), (8, 8), (16, 8)):
        assert held("llama-3.1-70b", Layout(tp=tp)).room(LOAD).token_bytes == whole / share
    latent = held("deepseek-v3").room(LOAD).token_bytes
    assert held("deepseek-v3", Layout(tp=8)).room(LOAD).token_bytes == latent


def test_windows_forget_and_states_do_not_grow() -> None:
    """GPT-OSS: 18 of 36 layers see 128 tokens. Qwen3.5: 45 of 60 layers keep a state."""
    room = held("gpt-oss-120b", weights="mxfp4").room(LOAD)
    per_layer = 2 * 8 * 64 * 1  # keys and values in 8 bits
    assert room.bytes_of(10_000) == 18 * per_layer * (10_000 + 128)
    assert room.bytes_of(100) == 36 * per_layer * 100
    linear = held("qwen3.5-397b-a17b").room(LOAD)
    facts = facts_of("qwen3.5-397b-a17b")
    assert linear.request_bytes == facts.state_size * 4
    assert linear.token_bytes == facts.num_layers_with_cache * facts.cache_size * 2


def test_weights_are_counted_once() -> None:
    """But for norms and biases, which are a millionth of them."""
    for name in ("llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b"):
        facts, room = facts_of(name), held(name).room(LOAD)
        assert room.weights == pytest.approx(2 * facts.num_parameters, rel=1e-3)
    facts = facts_of("deepseek-v3")
    layout = Layout(tp=4, dp=2, ep=8)
    experts = sum(facts.num_expert_parameters(kind) for kind in facts.layers)
    dense = facts.num_parameters - experts
    part = held("deepseek-v3", layout).room(LOAD).weights
    assert 2 * (experts / 8 + dense / 4) <= part <= 2 * (experts / 8 + dense / 2)


def test_room_is_what_weights_and_reserve_leave() -> None:
    room = held("llama-3.1-8b", gib=24).room(LOAD)
    used = room.weights + room.activations + room.logits + room.reserve
    assert room.cache == 24 * GIB - used
    assert room.requests(2048) == int(room.cache // (2048 * 128 * 1024))
    assert held("llama-3.1-8b", gib=12).room(LOAD).requests(2048) == 0


def test_experts_that_a_batch_meets() -> None:
    assert touched(256, 8 / 256, 1) == pytest.approx(8)
    assert touched(256, 8 / 256, 10_000) == pytest.approx(256)
    assert 8 < touched(256, 8 / 256, 4) < 32


@pytest.mark.parametrize("name", ["llama-3.1-70b", "gpt-oss-120b", "deepseek-v3"])
def test_more_requests_never_lower_the_rate_until_the_cache_is_full(name: str) -> None:
    rates, queues = [], []
    for concurrency in (1, 2, 4, 8, 16, 64, 256, 1024, 4096):
        load = Load(concurrency=concurrency, prompt_len=512, output_len=512)
        time = served(name, "8xH200-141GB", load, Layout(tp=8), "fp8")
        rates.append(time.output_tokens_per_s)
        queues.append(time.queued)
        assert time.running + time.queued == concurrency
        assert (time.queue_s > 0) == (time.queued > 0)
    assert all(b >= a * 0.999 for a, b in pairwise(rates))
    assert queues == sorted(queues)


@pytest.mark.parametrize("gpus", ["1xH100-80GB", "1xB200-180GB", "1xL40S", "1xA100-80GB"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_fewer_bits_never_take_longer(gpus: str, concurrency: int) -> None:
    """With few requests, which read weights most of the time."""
    load = Load(concurrency=concurrency, prompt_len=256, output_len=256)
    times = [served("llama-3.1-8b", gpus, load, weights=w).tpot_s for w in ("bf16", "fp8", "int4")]
    assert times == sorted(times, reverse=True)


def test_a_pass_is_longer_than_reading_the_weights() -> None:
    for gpus in ("1xH100-80GB", "1xB200-180GB"):
        device = engine_of(gpus).speeds.device
        time = served("llama-3.1-8b", gpus, Load(concurrency=1, prompt_len=128, output_len=128))
        least = 2 * 7.5e9 / ((device.hbm_gb_per_s or 0) * 1e9)
        assert least < time.tpot_s < 3 * least


def test_devices_that_share_a_layer_talk() -> None:
    load = Load(concurrency=8, prompt_len=512, output_len=512)
    alone = served("llama-3.1-8b", "8xH100-80GB", load)
    assert alone.decode.collectives_s == 0
    inside = served("llama-3.1-8b", "8xH100-80GB", load, Layout(tp=8))
    assert inside.decode.collectives_s > 0
    assert inside.tpot_s < alone.tpot_s
    assert isinstance(accelerator(parse_devices("2x4xH100-80GB"), load_catalog()), str)
    across = served("llama-3.1-8b", "2x8xH100-80GB", load, Layout(tp=16))
    assert across.decode.collectives_s > 2 * inside.decode.collectives_s


def test_layouts_are_those_that_a_model_allows() -> None:
    facts = facts_of("deepseek-v3")
    found = list(serving_layouts(facts, 16))
    assert len(found) == len(set(map(str, found)))
    assert all(layout.world_size == 16 for layout in found)
    assert Layout(dp=16, ep=16) in found
    for layout, words in (
        (Layout(tp=3), "128 attention heads"),
        (Layout(ep=3), "256 experts"),
        (Layout(pp=62), "61 layers"),
        (Layout(fsdp=2), "set fsdp=1"),
    ):
        assert words in (why_not_served(layout, facts) or "")
    assert "has no experts" in (why_not_served(Layout(ep=2), facts_of("llama-3.1-8b")) or "")


def test_the_answer_says_speed_room_money_and_why_others_lost() -> None:
    settings = ("weights=fp8", "concurrency=64", "prompt_len=1024", "output_len=512")
    answer = ask("llama-3.1-70b", "8xH100-80GB", *settings, job=Job(rate=Rate.given(2.5)))
    assert answer.chosen is not None
    data = to_json(answer, top=3)
    time = data["time"]
    assert time["output_tokens_per_s_per_device"] == pytest.approx(time["output_tokens_per_s"] / 8)
    assert time["requests_per_s"] == pytest.approx(time["output_tokens_per_s"] / 512)
    usd = 8 * 2.5 / 3600 / time["output_tokens_per_s"] * 1e6
    assert data["cost"]["usd_per_million_tokens"] == pytest.approx(usd)
    assert data["memory"]["worst_rank"]["kv_cache"] > 0
    tokens = data["capacity"]["kv_cache_tokens"]
    replicas = answer.chosen.plan.layout.dp
    assert data["capacity"]["requests"] == tokens // 1536 * replicas
    assert {row["weights"] for row in data["levers"]} == {"bf16", "int8", "int4"}
    assert all(row["quality"] for row in data["levers"])
    assert any("output tokens/s, the chosen one" in row["reason"] for row in data["rejected"])
    assert any("GiB" in row["reason"] for row in data["rejected"]) or tokens > 0
    json.dumps(data)
    html = page(answer)
    for words in ("between tokens", "int4 weights", "A million output tokens cost", "a pass"):
        assert words in html
    assert render(answer, top=3) is not None


def test_idle_devices_are_paid_for() -> None:
    job = Job(tokens=1e9, rate=Rate.given(2.0))
    half = ask("llama-3.1-8b", "8xH100-80GB", layout=Layout(tp=4), job=job)
    full = ask("llama-3.1-8b", "4xH100-80GB", layout=Layout(tp=4), job=job)
    assert half.cost is not None
    assert full.cost is not None
    assert half.cost.usd == pytest.approx(2 * (full.cost.usd or 0))
    assert half.cost.hours == full.cost.hours


def test_targets_reject_with_the_number() -> None:
    settings = ("weights=fp8", "concurrency=64", "tpot_ms=16")
    answer = ask("llama-3.1-70b", "8xH100-80GB", *settings)
    assert answer.chosen is not None
    assert answer.chosen.served is not None
    assert answer.chosen.served.tpot_s <= 0.016
    reasons = [reason for _, reason in answer.rejected if "TPOT" in reason]
    assert reasons
    assert all("more than the 16 ms asked" in reason for reason in reasons)
    none = ask("llama-3.1-70b", "8xH100-80GB", "ttft_ms=0.1")
    assert none.chosen is None
    assert none.verdict == "impossible"
    assert "more than the 0.1 ms asked" in to_json(none)["verdict_text"]


def test_requests_without_room_are_said_to_wait() -> None:
    answer = ask("llama-3.1-70b", "2xH100-80GB", "concurrency=64")
    assert answer.chosen is not None
    assert answer.chosen.served is not None
    assert answer.chosen.served.queued > 0
    time = to_json(answer)["time"]
    assert time["queue_ms"] > 1000
    assert time["ttft_ms"] > time["queue_ms"]
    assert answer.verdict == "fits_compressed"  # one device would do with fp8


def test_only_what_runs_becomes_a_plan() -> None:
    one = ask("llama-3.1-8b", "1xH100-80GB", "concurrency=8", "context=8192")
    plan = plan_to_run(one)
    assert plan is not None
    assert plan.serve.model_fields_set == {"context"}
    assert plan.predicted is not None
    assert plan_to_run(ask("llama-3.1-8b", "1xH100-80GB", "weights=fp8")) is None
    replicas = ask("llama-3.1-8b", "2xH100-80GB", layout=Layout(dp=2))
    assert plan_to_run(replicas) is None
    assert to_json(replicas)["plan"] is None
    for answer in (one, replicas):
        assert any("one request at a time" in note for note in answer.notes)
    assert any("no plan file" in note for note in replicas.notes)


def test_unknown_speeds_are_said_and_memory_still_told() -> None:
    answer = ask("llama-3.1-8b", "1xMI300X", "concurrency=8")
    assert answer.chosen is not None
    data = to_json(answer)
    assert data["time"]["tpot_ms"] is None
    assert data["capacity"]["requests"] > 100
    assert "MI300X" in data["evidence"]["time"]


@pytest.mark.parametrize(
    ("gpus", "settings", "words"),
    [
        ("1xH100-80GB", ["prompt_len=900", "output_len=200", "context=1000"], ["900", "1000"]),
        ("1xH100-80GB", ["context=999999"], ["999999", "131072"]),
        ("1xH100-80GB", ["weights=fp9"], ["fp9", "int4"]),
        ("1xH100-80GB", ["concurrency=0"], ["concurrency", "1"]),
        ("1xH100-80GB", ["ttft_ms=-1"], ["ttft_ms"]),
        ("cpu:2", ["concurrency=4"], ["concurrency", "accelerators"]),
    ],
)
def test_bad_input_is_one_line(gpus: str, settings: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        ask("llama-3.1-8b", gpus, *settings)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), ["tp=3", "32 attention heads"]),
        (Layout(tp=16), ["16 devices", "8"]),
        (Layout(fsdp=8), ["fsdp=1"]),
        (Layout(ep=2), ["no experts", "ep=1"]),
    ],
)
def test_layouts_that_cannot_be_are_refused_in_one_line(layout: Layout, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        ask("llama-3.1-8b", "8xH100-80GB", layout=layout)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_serving_in_fp32_is_refused() -> None:
    with pytest.raises(UserError, match="planned in bf16"):
        shardwise.plan(
            "llama-3.1-8b", task="serve", gpus="1xL40S", overrides=["precision.compute=fp32"]
        )


def test_few_bits_are_refused_by_the_server() -> None:
    from shardwise.config import Plan, Serve
    from shardwise.launch.start import start_serve

    plan = Plan(model="x", task="serve", layout=Layout(), serve=Serve(weights="fp8"))
    with pytest.raises(UserError, match="fp8 is planned only"):
        start_serve(plan)


def test_planning_stays_fast() -> None:
    ask()
    begin = perf_counter()
    answer = ask("deepseek-v3", "16x8xH100-80GB", "weights=fp8", "concurrency=2048")
    assert answer.chosen is not None
    assert perf_counter() - begin < 5


def test_every_kernel_is_of_a_device_and_a_format() -> None:
    catalog = load_catalog()
    for device, rows in catalog.kernels.items():
        assert device in catalog.devices
        for (_, _, fmt), row in rows.items():
            assert fmt in FORMATS
            assert 0 < row.fixed_us < 500
    for curves in catalog.reductions.values():
        for curve in curves.values():
            assert [x for x, _ in curve] == sorted({x for x, _ in curve})


@pytest.fixture(scope="module")
def referee() -> dict[str, Any]:
    return serving_runs.report([serving_runs.judge(row) for row in serving_runs.read(RUNS)])


def test_the_referee_s_bounds(referee: dict[str, Any]) -> None:
    """What docs/planner.md says of the project's own rows."""
    rows = {row["name"]: row for row in referee["all"]}
    whole = rows["all"]
    assert whole["planned"] >= 480
    assert whole["tpot_mean"] < 0.18
    assert whole["tpot_median"] < 0.13
    assert whole["ttft_pairs_right"] > 0.87 * whole["ttft_pairs"]
    assert rows["kept back"]["tpot_median"] < 0.13
    models = {row["name"]: row for row in referee["models"]}
    for name in (
        "Llama-3.1-70B, vllm, agg",
        "Llama-3.1-8B-Instruct, trtllm, agg",
    ):
        assert models[f"meta-llama/{name}"]["tpot_mean"] < 0.12
    assert whole["rows"] == whole["planned"] + sum(referee["unplanned"].values())


def test_the_referee_never_stops(tmp_path: Path) -> None:
    """Broken rows, missing columns, an empty file."""
    row = dict(next(iter(serving_runs.read(RUNS))))
    broken: list[dict[str, str]] = [{}, {"id": "x"}]
    for name in row:
        broken += [{**row, name: value} for value in ("", "nan", "-1", "0", "1e400", "x", "3")]
    results = [serving_runs.judge(one) for one in broken]
    assert all(result.reason or result.tpot_s for result in results)
    assert serving_runs.report(results)["all"][-1]["rows"] == len(broken)
    assert serving_runs.report([])["all"][-1]["planned"] == 0


def test_waiting_is_recognised_by_the_referee() -> None:
    """128 requests of 1024 + 8192 tokens on one H200 have no room: measured, 369 s to the first."""
    row = {
        "model_path": "meta-llama/Llama-3.1-70B",
        "system": "h200_sxm",
        "backend": "trtllm",
        "precision": "fp8",
        "mode": "agg",
        "isl": "1024",
        "osl": "8192",
        "gemm_quant_mode": "fp8",
        "batch_size": "128",
        "tp_size": "1",
        "pp_size": "1",
        "silicon_ttft_ms": "368967",
        "silicon_tpot_ms": "30",
    }
    result = serving_runs.judge(row)
    assert result.queued > 0
    assert result.waited
    assert result.ttft_s == pytest.approx(369, rel=0.7)


def test_a_catalogue_of_yours_replaces_kernels(tmp_path: Path) -> None:
    """Ten times the fixed time of each product; and names that are none."""
    row = load_catalog().kernels["H100-80GB"]["vllm", "product", "bf16"].model_dump()
    slow, wrong = tmp_path / "slow.yaml", tmp_path / "wrong.yaml"
    slow.write_text(json.dumps({"kernels": [{**row, "fixed_us": 10 * row["fixed_us"]}]}))
    wrong.write_text(json.dumps({"kernels": [{**row, "engine": "mine"}]}))
    usual, slower = (
        to_json(ask("llama-3.1-8b", "1xH100-80GB", catalog_file=file))["time"]["decode_ms"]
        for file in (None, slow)
    )
    # queries, keys and values at once, output, gate and up at once, down: 4 products in 32 layers
    more = 9 * row["fixed_us"] * 4 * 32 / 1e3
    assert slower["kernels"] - usual["kernels"] == pytest.approx(more)
    with pytest.raises(UserError, match="mine"):
        ask("llama-3.1-8b", "1xH100-80GB", catalog_file=wrong)
