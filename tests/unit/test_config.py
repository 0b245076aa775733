"""The plan file: strict, complete, and written back as it was read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.config import Layout, Lora, Plan, load_plan, plan_schema
from shardwise.errors import UserError
from shardwise.parsing import parse, read_yaml

MINIMAL = "model: some/dir\ntask: full\nlayout: {fsdp: 2}\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_of_three_keys_is_valid_and_comes_back_equal(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path / "plan.yaml", MINIMAL))
    assert plan.layout == Layout(fsdp=2)
    assert plan.layout.world_size == 2
    again = parse(Plan, read_yaml(plan.to_yaml()), source="test")
    assert again == plan


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("layout.tpp=3", ["layout.tpp", "did you mean 'tp'"]),
        ("train.lerning_rate=1", ["train.lerning_rate", "did you mean 'learning_rate'"]),
        ("train.zzzzzz=1", ["train.zzzzzz", "known keys", "micro_batch"]),
        ("layout.tp=0", ["layout.tp = 0", "greater than or equal to 1"]),
        ("layout.tp=two", ["layout.tp = 'two'", "valid integer"]),
        ("layout.tp=true", ["layout.tp = True", "valid integer"]),
        ("train.learning_rate=-1", ["train.learning_rate = -1"]),
        ("train.learning_rate=.nan", ["train.learning_rate = nan"]),
        ("task=dora", ["task = 'dora'", "'full', 'lora', 'qlora' or 'serve'"]),
        ("lora.quantize=int4", ["lora.quantize = 'int4'", "'nf4'"]),
        ("layout=3", ["layout = 3"]),
        ("version=2", ["version = 2"]),
        ("layout.tp", ["not of the form key=value"]),
        ("=3", ["not of the form key=value"]),
        ("model.x=3", ["'model' holds a value"]),
    ],
)
def test_bad_values_get_one_line(tmp_path: Path, override: str, words: list[str]) -> None:
    file = write(tmp_path / "plan.yaml", MINIMAL)
    with pytest.raises(UserError) as caught:
        load_plan(file, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model: x\ntask: full\n", "'layout' is missing"),
        ("- 1\n", "expected a mapping"),
        ("model: [\n", "not YAML"),
        ("", "expected a mapping"),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        load_plan(write(tmp_path / "plan.yaml", text))


def test_overrides_are_typed_and_numbers_may_be_written_as_people_do(tmp_path: Path) -> None:
    file = write(tmp_path / "plan.yaml", MINIMAL)
    sets = ["train.learning_rate=2e-4", "layout.tp=3", "train.clip_norm=null", "train.eps=1E-6"]
    plan = load_plan(file, sets)
    assert plan.train.learning_rate == 2e-4
    assert plan.train.eps == 1e-6
    assert plan.train.clip_norm is None
    assert plan.layout.tp == 3


def test_plans_are_frozen_and_keyword_only() -> None:
    plan = parse(Plan, read_yaml(MINIMAL), source="test")
    with pytest.raises(ValueError, match="frozen"):
        plan.model = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Layout(2)  # type: ignore[call-arg]


def test_the_schema_is_json_and_knows_every_section() -> None:
    schema = json.loads(json.dumps(plan_schema()))
    assert set(schema["required"]) == {"model", "task", "layout"}
    assert schema["additionalProperties"] is False
    assert {"Layout", "Train", "Serve", "Precision", "Devices"} <= set(schema["$defs"])


def test_micro_batches_of_a_step_round_up() -> None:
    plan = load_plan_text("train: {global_batch: 7, micro_batch: 2}")
    assert plan.train.num_micro_batches(Layout(fsdp=2)) == 2
    assert plan.train.num_micro_batches(Layout(tp=2)) == 4


def load_plan_text(more: str) -> Plan:
    return parse(Plan, read_yaml(MINIMAL + more), source="test")


def test_the_short_name_of_adapters_on_rounded_matrices(tmp_path: Path) -> None:
    """`qlora` is written out, so that a plan says it in one way; what it is given besides stays."""
    file = write(tmp_path / "plan.yaml", MINIMAL)
    plan = load_plan(file, ["task=qlora", "lora.rank=4"])
    assert (plan.task, plan.method) == ("lora", "qlora")
    assert plan.lora == Lora(rank=4, quantize="nf4")
    assert parse(Plan, read_yaml(plan.to_yaml()), source="test") == plan
    assert load_plan(file, ["task=lora"]).method == "lora"
    assert load_plan(file, ["task=qlora"]).lora == Lora(quantize="nf4")
    assert load_plan(file, ["task=lora", "lora.quantize=nf4"]) == load_plan(file, ["task=qlora"])
    with pytest.raises(UserError, match=r"lora\.quantize is null, and task=qlora says nf4"):
        load_plan(file, ["task=qlora", "lora.quantize=null"])
    with pytest.raises(UserError, match="lora = 3"):
        load_plan(file, ["task=qlora", "lora=3"])
