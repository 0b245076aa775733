"""Step times: what is added up, what hides behind what, and what crosses which link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from shardwise.catalog import load_catalog
from shardwise.config import Layout, Lora, Plan, Precision, Train
from shardwise.models.adapters import complete
from shardwise.models.facts import ModelFacts
from shardwise.models.read import facts_of_config
from shardwise.planner.accelerator import Accelerator, accelerator
from shardwise.planner.devices import parse_devices
from shardwise.planner.machine import Machine
from shardwise.planner.memory import local_tokens
from shardwise.planner.network import Group, Op
from shardwise.planner.speeds import Dtype
from shardwise.planner.stages import head_cost, layer_costs
from shardwise.planner.timing import (
    StepTime,
    StepTimer,
    model_flops_per_token,
    step_time,
)
from shardwise.planner.traffic import traffic
from shardwise.planner.work import head_product, layer_work
from tests.unit.test_facts import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_3_1_8B
from tests.unit.test_search import MACHINE

LLAMA = facts_of_config(LLAMA_3_1_8B, source="test")


@dataclass(frozen=True)
class Toy:
    """Speeds that a test can add up by hand."""

    overlaps: bool = True
    host_s: float = 0.0
    node: int | None = 8
    peak_flops: float | None = 1e15
    evidence: str = "made up"
    collective: float = 1e-3

    def matmul_s(self, m: float, n: int, k: int, dtype: Dtype) -> float:
        return 2 * m * n * k / 5e14

    def attention_s(self, flops: float, dtype: Dtype) -> float:
        return flops / 5e14

    def memory_s(self, num_bytes: float) -> float:
        return num_bytes / 1e12

    def collective_s(self, op: Op, num_bytes: float, group: Group | None = None) -> float:
        return self.collective

    def link(self, group: Group) -> str:
        return "between" if group.crosses else "inside"


def plan_of(gpus: str, layout: Layout, **train: Any) -> Plan:
    devices = parse_devices(gpus)
    settings = {"seq_len": 4096, "global_batch": 32, "micro_batch": 1, **train}
    return Plan(
        model="any",
        task="full",
        layout=layout,
        devices=devices,
        precision=Precision(compute="bf16"),
        train=Train(**settings),
    )


def step_flops(plan: Plan) -> float:
    """Six for each multiply-add of the forward pass on one rank, without recomputation."""
    train = plan.train
    tokens = train.num_micro_batches(plan.layout) * train.micro_batch * train.seq_len
    return 6 * tokens * (sum(layer_costs(plan, LLAMA)) + head_cost(LLAMA))


def time_of(gpus: str, layout: Layout, facts: ModelFacts = LLAMA, **train: Any) -> StepTime:
    plan = plan_of(gpus, layout, **train)
    found = accelerator(plan.devices, load_catalog())
    assert isinstance(found, Accelerator)
    return step_time(plan, facts, found)


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, DEEPSEEK_V3, GPT_OSS_120B])
def test_products_are_the_multiply_adds_of_a_layer(config: dict[str, Any]) -> None:
    """Matrices of a layer, each once a token: vectors are all that the count of FLOPs has more."""
    facts = facts_of_config(config, source="test")
    plan = plan_of("1xH100-80GB", Layout(), seq_len=1024)
    tokens = local_tokens(plan)
    costs = dict(zip(facts.layers, layer_costs(plan, facts), strict=True))
    for kind, cost in costs.items():
        work = layer_work(plan, facts, kind)
        products = sum(p.num * p.m * p.n * p.k for p in work.products)
        attention = work.attention_flops / 2
        assert (products + attention) / tokens == pytest.approx(cost, rel=2e-3)
    num, m, n, k, _ = head_product(plan, facts)
    assert num * m * n * k / tokens == head_cost(facts)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_share_the_products(tp: int) -> None:
    whole, part = (
        layer_work(plan_of("8xH100-80GB", layout), LLAMA, LLAMA.layers[0])
        for layout in (Layout(), Layout(tp=tp))
    )
    flops = [sum(p.num * p.m * p.n * p.k for p in work.products) for work in (whole, part)]
    assert flops[1] == pytest.approx(flops[0] / tp)
    assert part.attention_flops == pytest.approx(whole.attention_flops / tp)


def test_a_step_on_one_device_is_its_parts() -> None:
    plan, speeds = plan_of("1xH100-80GB", Layout(), global_batch=4), Toy()
    time = step_time(plan, LLAMA, speeds)
    attention = sum(layer_work(plan, LLAMA, kind).attention_flops for kind in LLAMA.layers)
    extra = 4 * attention * (2.5 - 2) / 5e14  # the backward pass of fused attention
    assert time.compute_s - extra == pytest.approx(step_flops(plan) / 5e14, rel=2e-3)
    assert time.lines == ()
    assert time.idle_s == time.host_s == time.collectives_s == 0
    assert time.total_s == pytest.approx(time.compute_s + time.memory_s)


def test_a_slow_host_is_waited_for() -> None:
    plan = plan_of("1xH100-80GB", Layout(), seq_len=16)
    assert step_time(plan, LLAMA, Toy(host_s=1e-3)).host_s > 0
    assert step_time(plan, LLAMA, Toy(host_s=1e-9)).host_s == 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_hides_behind_compute_is_not_seen(zero: int) -> None:
    """All but the first gather of a pass and the last reduction, where computing takes longer."""
    plan = plan_of("8xH100-80GB", Layout(fsdp=8, zero=zero), global_batch=64)  # type: ignore[arg-type]
    time = step_time(plan, LLAMA, Toy())
    gathers = 8 if zero > 1 else 1
    assert time.collectives_s == pytest.approx((gathers + 1) * 1e-3)
    slow = step_time(plan, LLAMA, Toy(collective=10.0))
    hidden = slow.compute_s + slow.memory_s
    taken = sum(line.time_s for line in slow.lines)
    assert taken - 1.1 * hidden < slow.collectives_s < taken


def test_nothing_hides_where_nothing_overlaps() -> None:
    plan = plan_of("8xH100-80GB", Layout(fsdp=8))
    for speeds in (Toy(overlaps=False), MACHINE):
        time = step_time(plan, LLAMA, speeds)
        assert time.collectives_s == pytest.approx(sum(line.time_s for line in time.lines))


def test_replicas_and_tensor_parallelism_are_always_seen() -> None:
    for layout, axis in ((Layout(dp=8), "dp"), (Layout(tp=8), "tp"), (Layout(fsdp=4, cp=2), "cp")):
        time = step_time(plan_of("8xH100-80GB", layout), LLAMA, Toy())
        lines = [line for line in time.lines if line.line.axis == axis]
        assert lines
        assert all(line.exposed_s == pytest.approx(line.time_s) for line in lines)


def test_every_line_of_the_ledger_is_timed() -> None:
    plan = plan_of("2x8xH100-80GB", Layout(pp=2, fsdp=2, tp=4, zero=1))
    time = StepTimer(LLAMA, Toy()).step(plan)
    ledgers = [traffic(plan, LLAMA, rank) for rank in range(2)]
    assert [timed.line for timed in time.lines] in ledgers


@pytest.mark.parametrize(("tp", "link"), [(8, "NVLink 4"), (16, "3200 Gb/s network")])
def test_a_group_uses_the_link_of_its_ranks(tp: int, link: str) -> None:
    """Over sixteen ranks tensor parallelism leaves the node, and a step takes longer."""
    time = time_of("2x8xH100-80GB", Layout(fsdp=16 // tp, tp=tp), facts=_wide())
    assert {line.link for line in time.lines if line.line.axis == "tp"} == {link}


def _wide() -> ModelFacts:
    return facts_of_config({**LLAMA_3_1_8B, "num_key_value_heads": 16}, source="test")


def test_tensor_parallelism_over_nodes_costs_more_than_inside() -> None:
    inside = time_of("2x8xH100-80GB", Layout(fsdp=2, tp=8), facts=_wide())
    across = time_of("2x8xH100-80GB", Layout(tp=16), facts=_wide())
    assert across.exposed_by_axis()["tp"] > 2 * inside.exposed_by_axis()["tp"]


def test_a_slower_network_is_felt_only_by_what_crosses_it() -> None:
    def at(gbit: float, layout: Layout) -> float:
        plan = plan_of("2x8xH100-80GB", layout, global_batch=16, seq_len=512)
        devices = plan.devices.model_copy(update={"network_gbit": gbit})
        found = accelerator(devices, load_catalog())
        assert isinstance(found, Accelerator)
        return step_time(plan.model_copy(update={"devices": devices}), LLAMA, found).total_s

    assert at(100, Layout(fsdp=16)) > 2 * at(3200, Layout(fsdp=16))
    assert at(100, Layout(fsdp=2, tp=8)) > at(3200, Layout(fsdp=2, tp=8))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_takes_time(mode: str) -> None:
    plain = time_of("8xH100-80GB", Layout(fsdp=8))
    again = time_of("8xH100-80GB", Layout(fsdp=8), checkpointing=mode)
    assert again.memory_s > plain.memory_s
    if mode == "full":
        assert again.compute_s == pytest.approx(plain.compute_s * 4 / 3, rel=0.03)
    else:
        assert again.compute_s == pytest.approx(plain.compute_s)


def test_compiled_layers_move_fewer_bytes() -> None:
    """Of a Llama layer (arXiv 2407.21783's 8B), counted by hand: 17 h + 8 f + 4 (q + k) values."""
    eager, compiled = (
        layer_work(plan_of("8xH100-80GB", Layout(fsdp=8), compile=c), LLAMA, LLAMA.layers[0])
        for c in (False, True)
    )
    moved = [work.forward_bytes + work.backward_bytes for work in (eager, compiled)]
    by_hand = 17 * 4096 + 8 * 14336 + 4 * (4096 + 1024)
    assert moved[1] / 4096 == pytest.approx(2 * by_hand)
    assert moved[0] > 4 * moved[1]
    assert compiled.products == eager.products


def test_a_pipeline_idles_by_its_bubble() -> None:
    time = step_time(plan_of("8xH100-80GB", Layout(pp=8)), LLAMA, Toy(collective=0.0))
    updates = time.memory_s  # the slowest stage's, a share of what it reads and writes
    assert 7 / 32 * time.compute_s < time.idle_s <= 7 / 32 * (time.compute_s + updates)


def test_longer_steps_for_more_work_and_no_device_above_its_peak() -> None:
    times = [time_of("8xH100-80GB", Layout(fsdp=8), global_batch=n).total_s for n in (8, 16, 64)]
    assert times == sorted(times)
    for gpus in ("8xA100-80GB", "8xH100-80GB", "8xB200-180GB"):
        plan = plan_of(gpus, Layout(fsdp=8), compile=True)
        found = accelerator(plan.devices, load_catalog())
        assert isinstance(found, Accelerator)
        step_s = step_time(plan, LLAMA, found).total_s
        tokens = plan.train.global_batch * plan.train.seq_len / 8 / step_s
        assert 0.1 < tokens * model_flops_per_token(plan, LLAMA) / found.peak_flops < 0.8


def test_the_convention_of_mfu_by_hand() -> None:
    """6 a parameter of a matrix, and causal attention: 6 L h s for multi-head, of 2 x h s / 2."""
    plan = plan_of("8xH100-80GB", Layout(fsdp=8))
    table = LLAMA.vocab_size * LLAMA.hidden_size  # the embedding only looks up
    by_hand = 6 * (LLAMA.num_parameters - table) + 6 * 32 * 4096 * 4096
    assert model_flops_per_token(plan, LLAMA) == pytest.approx(by_hand, rel=1e-3)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    """Four FLOPs a frozen parameter where a trained one has six, and as much less time."""
    adapted = replace(LLAMA, adapters=complete(Lora(rank=8), LLAMA))
    full = plan_of("1xH100-80GB", Layout(), global_batch=4)
    lora = full.model_copy(update={"task": "lora"})
    flops = model_flops_per_token(lora, adapted), model_flops_per_token(full, LLAMA)
    assert flops[0] == pytest.approx(flops[1] * 2 / 3, rel=0.05)
    times = [step_time(plan, facts, Toy()) for plan, facts in ((lora, adapted), (full, LLAMA))]
    assert times[0].compute_s == pytest.approx(times[1].compute_s * 2 / 3, rel=0.05)
    assert times[0].memory_s < times[1].memory_s


def test_rounded_matrices_are_made_whole_each_time() -> None:
    """As many FLOPs, and bytes for each number of a matrix: forward, backward and made again."""
    adapted = replace(LLAMA, adapters=complete(Lora(rank=8), LLAMA))
    rounded = replace(LLAMA, adapters=complete(Lora(rank=8, quantize="nf4"), LLAMA))
    plan = plan_of("1xH100-80GB", Layout(), global_batch=4)
    for again, mode in ((2, "none"), (3, "full"), (3, "selective")):
        train = plan.train.model_copy(update={"checkpointing": mode})
        one = plan.model_copy(update={"task": "lora", "train": train})
        times = [step_time(one, facts, Toy()) for facts in (adapted, rounded)]
        assert times[0].compute_s == times[1].compute_s
        passes = again * plan.train.num_micro_batches(plan.layout)
        more = Toy().memory_s(passes * rounded.num_packed_parameters * 22.5)
        assert times[1].memory_s - times[0].memory_s == pytest.approx(more, rel=1e-3)


def test_a_probed_machine_answers_as_before() -> None:
    """Its products at one rate, element-wise traffic, and every collective in full."""
    plan = plan_of("cpu:2", Layout(fsdp=2), global_batch=2)
    time = step_time(plan, LLAMA, MACHINE)
    assert isinstance(MACHINE, Machine)
    assert time.compute_s == pytest.approx(step_flops(plan) / 3e11, rel=2e-3)
    lines = traffic(plan, LLAMA)
    seconds = sum(line.count * MACHINE.collective_s(line.op, line.num_bytes) for line in lines)
    assert time.collectives_s == pytest.approx(seconds)
    assert time.host_s == 0
