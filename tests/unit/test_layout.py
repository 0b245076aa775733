"""Which layouts are refused, with the two numbers and a value that works."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import Layout, Plan, Serve, Train
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.read import facts_of_config
from shardwise.planner.layout import check_plan, legal_layouts, legal_tp_sizes, why_illegal
from tests.models import model_config


def facts(name: str, **changes: Any) -> ModelFacts:
    return facts_of_config({**model_config(name).to_dict(), **changes}, source=name)


def test_nine_heads_are_not_cut_in_two() -> None:
    """Refused at plan time with the sizes that work (bug bank 26)."""
    reason = why_illegal(Layout(tp=2), facts("ODD"), task="full")
    assert reason == "tp=2 does not divide the model's 9 attention heads; tp sizes that work: 1, 3"
    assert why_illegal(Layout(tp=3), facts("ODD"), task="full") is None
    for count in (2, 4):
        assert all(layout.tp == 1 for layout in legal_layouts(facts("ODD"), count, task="full"))


def test_kv_heads_are_held_by_equally_many_ranks() -> None:
    """Fewer heads than ranks are repeated, if it comes out even (bug bank 25)."""
    assert legal_tp_sizes(facts("LL")) == [1, 2, 4]  # 4 heads, 2 KV heads
    assert legal_tp_sizes(facts("LL", num_key_value_heads=1)) == [1, 2, 4]
    uneven = facts("LL", num_attention_heads=12, num_key_value_heads=4, intermediate_size=120)
    reason = why_illegal(Layout(tp=6), uneven, task="full")
    assert reason == "tp=6 does not divide the model's 4 KV heads; tp sizes that work: 1, 2, 4, 12"


def test_sequence_parallelism_needs_ranks_that_split_matrices() -> None:
    for layout, task in (
        (Layout(sequence_parallel=True), "full"),
        (Layout(tp=2, sequence_parallel=True), "serve"),
    ):
        assert "set it to false" in str(why_illegal(layout, facts("LL"), task=task))


def test_a_pipeline_over_shards_is_zero_1() -> None:
    reason = why_illegal(Layout(pp=2, fsdp=2), facts("LL"), task="full")
    assert reason is not None
    assert reason.endswith("which is ZeRO-1; set zero=1")
    assert why_illegal(Layout(pp=2, fsdp=2, zero=1), facts("LL"), task="full") is None


def test_sizes_must_divide_the_feed_forward_width_too() -> None:
    assert legal_tp_sizes(facts("LL", intermediate_size=129)) == [1]
    reason = why_illegal(Layout(tp=2), facts("LL", intermediate_size=129), task="full")
    assert reason is not None
    assert "129 feed-forward columns" in reason


def test_experts_are_split_evenly_over_ranks_that_read_different_tokens() -> None:
    assert why_illegal(Layout(ep=2), facts("LL"), task="full") == (
        "ep=2: llama has no experts; set ep=1"
    )
    reasons = {
        size: str(why_illegal(Layout(fsdp=6, ep=size), facts("MIX"), task="full"))
        for size in (2, 3, 4)
    }
    assert reasons[2] == "None"
    assert reasons[3].endswith("does not divide the 4 experts; ep sizes that work: 1, 2")
    assert "4 does not divide the 6 fsdp x cp x tp ranks" in reasons[4]
    assert "sequence_parallel=true" in str(why_illegal(Layout(tp=2), facts("MIX"), task="full"))


def test_serving_does_not_shard_with_fsdp() -> None:
    reason = why_illegal(Layout(fsdp=2), facts("LL"), task="serve")
    assert reason == "fsdp=2: serving shards with tp only; set fsdp=1"


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ({"train": Train(seq_len=300)}, {}, ["seq_len=300", "256"]),
        ({"train": Train(global_batch=1), "layout": Layout(fsdp=2)}, {}, ["global_batch=1", "2"]),
        ({"layout": Layout(pp=2), "train": Train(global_batch=1)}, {}, ["global_batch to 2"]),
        ({"train": Train(checkpoint_every=4)}, {}, ["checkpoint_every=4", "selective or full"]),
        ({"train": Train(pipeline_schedule="zbv")}, {}, ["zbv", "pp=1", "1f1b"]),
        ({"layout": Layout(dp=2, zero=2)}, {}, ["zero=2", "leave zero out"]),
        ({}, {"attention_dropout": 0.1}, ["attention_dropout=0.1", "0.0"]),
        ({"task": "serve", "serve": Serve(context=300)}, {}, ["context=300", "256"]),
    ],
)
def test_settings_that_cannot_run(
    plan: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    asked = Plan(**{"model": "x", "task": "full", "layout": Layout(), **plan})
    with pytest.raises(UserError) as caught:
        check_plan(asked, facts("LL", **changes))
    assert all(word in str(caught.value) for word in words)


def test_a_sequence_length_that_nobody_set_follows_the_model() -> None:
    plan = check_plan(Plan(model="x", task="full", layout=Layout()), facts("LL"))
    assert plan.train.seq_len == 256
