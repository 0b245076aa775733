"""What holds of every plan, tried on random models, layouts and devices."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import GIB, Devices, Layout, Plan, Precision, Train
from shardwise.models.facts import ModelFacts
from shardwise.models.read import facts_of_config
from shardwise.planner.layout import legal_layouts, why_illegal, why_too_few_rows
from shardwise.planner.memory import RankSizes, predict_memory, stage_bytes
from shardwise.planner.network import Group, ring_seconds
from shardwise.planner.search import search
from shardwise.planner.stages import stages_of, why_not_scheduled
from shardwise.planner.traffic import traffic


@st.composite
def models(draw: Any) -> ModelFacts:
    """A llama or a mixture of experts of any sizes that fit together."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4]))
    config = {
        "model_type": draw(st.sampled_from(["llama", "qwen3_moe"])),
        "hidden_size": heads * draw(st.sampled_from([16, 64, 128])),
        "intermediate_size": 16 * draw(st.integers(2, 400)),
        "num_hidden_layers": draw(st.integers(1, 24)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": draw(st.integers(300, 130_000)),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": draw(st.booleans()),
        "num_experts": draw(st.sampled_from([4, 8, 16])),
        "num_experts_per_tok": draw(st.integers(1, 4)),
        "moe_intermediate_size": 16 * draw(st.integers(2, 100)),
    }
    return facts_of_config(config, source="random")


@st.composite
def plans(draw: Any) -> tuple[Plan, ModelFacts]:
    """A training plan that could run."""
    facts, count = draw(models()), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    task = draw(st.sampled_from(["full", "lora", "qlora"]))
    layouts = list(legal_layouts(facts, count, task=task, most_cp=2)) or [Layout()]
    train = Train(
        seq_len=draw(st.integers(2, 4096)),
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        global_batch=draw(st.integers(16, 128)),
        checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
        packing=draw(st.booleans()),
    )
    plan = Plan(
        model="x",
        task=task,
        layout=draw(st.sampled_from(layouts)),
        devices=Devices(kind="H100-80GB", count=count, memory_gib=79.0),
        precision=Precision(compute=draw(st.sampled_from(["fp32", "bf16"]))),
        train=train,
    )
    if why_too_few_rows(plan) or why_not_scheduled(plan, facts):
        plan = plan.model_copy(update={"layout": Layout()})
    return plan, facts


@given(plans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_part_is_negative_and_the_worst_stage_is_the_worst(
    case: tuple[Plan, ModelFacts],
) -> None:
    plan, facts = case
    memory = predict_memory(plan, facts)
    assert all(value >= 0 for value in memory.model_dump().values())
    assert memory.weights > 0
    assert max(stage_bytes(plan, facts) or [0]) <= memory.total
    for rank in range(plan.layout.pp):
        for line in traffic(plan, facts, rank):
            assert line.count > 0
            assert line.num_bytes > 0


@given(plans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_parameter_is_on_some_rank(case: tuple[Plan, ModelFacts]) -> None:
    """The ranks of a pipeline together, and their shards, hold the whole model at least."""
    plan, facts = case
    layout = plan.layout
    held = sum(RankSizes.of(facts, layout, [stage]).own(layout) for stage in stages_of(plan, facts))
    copies = layout.num_shards * layout.tp
    assert held * copies >= facts.num_parameters
    layers = [number for stage in stages_of(plan, facts) for number in stage.layers]
    assert layers == list(range(facts.num_layers))


@given(models(), st.sampled_from([2, 4, 8, 64]), st.sampled_from([1, 2, 3]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_more_shards_never_keep_more(facts: ModelFacts, ranks: int, zero: Any) -> None:
    def at(fsdp: int) -> Any:
        train = Train(global_batch=256, seq_len=256)
        layout = Layout(fsdp=fsdp, zero=zero if fsdp > 1 else 3)
        return predict_memory(Plan(model="x", task="full", layout=layout, train=train), facts)

    few, many = at(ranks), at(2 * ranks)
    assert many.weights <= few.weights
    assert many.optimizer <= few.optimizer
    assert at(ranks).weights <= at(1).weights


@given(models(), st.integers(1, 200))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_what_is_chosen_fits_is_legal_and_is_never_beaten(facts: ModelFacts, quarters: int) -> None:
    """And with more memory for each device nothing that did fit ceases to."""
    verdicts = []
    for capacity in (quarters / 4, quarters / 2):
        devices = Devices(kind="H100-80GB", count=4, memory_gib=capacity)
        train = Train(global_batch=8, seq_len=1024, micro_batch=2)
        plan = Plan(model="x", task="full", layout=Layout(), devices=devices, train=train)
        answer = search(plan, facts, None, fixed=False)
        verdicts.append(answer.chosen is not None)
        if answer.chosen is None:
            continue
        chosen = answer.chosen
        assert chosen.memory.total <= capacity * GIB
        assert why_illegal(chosen.plan.layout, chosen.facts, task=chosen.plan.task) is None
        for other in answer.ranked[1:]:
            same = other.plan.layout.world_size == chosen.plan.layout.world_size
            quick = other.plan.train.checkpointing == chosen.plan.train.checkpointing
            if same and quick and other.slowdown <= chosen.slowdown:
                ours = chosen.waiting_bytes, chosen.traffic_bytes
                assert (other.waiting_bytes, other.traffic_bytes) >= ours
    assert verdicts == sorted(verdicts)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]),
    st.integers(1, 2**34),
    st.sampled_from([2, 4, 8, 16, 64]),
    st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_larger_messages_and_slower_links_never_take_less(
    op: Any, num_bytes: int, size: int, per_node: int
) -> None:
    group = Group(size=size, per_node=min(size, per_node))

    def seconds(num_bytes: float, network: float) -> float:
        return ring_seconds(
            op, num_bytes, group, link_bytes_per_s=4e11, network_bytes_per_s=network
        )

    assert 0 < seconds(num_bytes, 5e10) <= seconds(2 * num_bytes, 5e10)
    assert seconds(num_bytes, 5e10) <= seconds(num_bytes, 1e9)
    assert math.isfinite(seconds(num_bytes, 1e9))
