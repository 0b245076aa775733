"""Bad input ends with exit code 2 and one line that says what is wrong, before a rank starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.shell import Done, assert_none_left, listed_checkpoints, metrics, shardwise
from tests.models import model_config, save_model
from tests.tokenizer import save_tokenizer

LIMIT_S = 30.0
"""a refusal takes 5 s at most on a machine at rest, of which torch's import is the most"""
slow = pytest.mark.slow


def _fast_first(cases: Sequence[Any], number: int = 1) -> list[Any]:
    """The cases as parameters, of which all but the first few are slow."""
    return [*cases[:number], *(pytest.param(case, marks=slow) for case in cases[number:])]


SPY = """
import os
if "RANK" in os.environ:
    with open(os.environ["SPY_FILE"], "a") as file:
        file.write(os.environ["RANK"])
"""


@dataclass
class Bench:
    """A plan with its model and data that work, for a test to break in one place."""

    folder: Path
    model: Path
    rows: Path
    plan: dict[str, Any]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def run(self, *arguments: str | Path) -> Done:
        """Run a command; every process that is started as a rank is noted."""
        spy = self.folder / "spy"
        spy.mkdir(exist_ok=True)
        (spy / "sitecustomize.py").write_text(SPY)
        path = os.pathsep.join(filter(None, [str(spy), os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": path, "SPY_FILE": str(self.folder / "started")}
        return shardwise(self.folder, *arguments, limit=LIMIT_S, env=env)

    def train(self, *more: str | Path) -> Done:
        """Run `shardwise train` on the plan as it now is."""
        file = self.folder / "plan.yaml"
        file.write_text(yaml.safe_dump(self.plan, sort_keys=False), encoding="utf-8")
        return self.run("train", file, "--data", self.rows, "--out", self.out, *more)

    def assert_refused(self, done: Done, *named: str) -> None:
        """Exit code 2 and one line that names everything in `named`; nothing was started."""
        assert done.code == 2, done.text
        lines = done.err.splitlines()
        assert len(lines) == 1, done.text
        assert lines[0].startswith("shardwise: "), done.text
        missing = [text for text in named if text not in lines[0]]
        assert not missing, f"{missing} not in: {lines[0]}"
        assert not (self.folder / "started").exists(), "ranks were started"
        assert not (self.out / "checkpoints").exists()
        assert_none_left(self.folder)


@pytest.fixture
def bench(tmp_path: Path, ll: Path, rows: Path) -> Iterator[Bench]:
    """A plan that would train."""
    train = {"seq_len": 64, "global_batch": 4, "max_steps": 1}
    plan = {"model": str(ll), "task": "full", "layout": {"fsdp": 2}, "train": train}
    yield Bench(tmp_path, ll, rows, plan)


# --- the plan -------------------------------------------------------------------------------


def _set(plan: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        plan = plan.setdefault(parent, {})
    plan[last] = value


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("train.learing_rate", 1e-3, ["learing_rate", "did you mean", "learning_rate"]),
        ("layout.fdsp", 2, ["fdsp", "did you mean", "fsdp"]),
        ("traim", {"seq_len": 8}, ["traim", "did you mean", "train"]),
        ("train.seq_len", "long", ["train.seq_len", "long"]),
        ("train.seq_len", 6.5, ["train.seq_len", "6.5"]),
        ("train.max_steps", 0, ["train.max_steps", "0"]),
        ("train.learning_rate", -1.0, ["train.learning_rate", "-1"]),
        ("train.learning_rate", float("nan"), ["train.learning_rate", "nan"]),
        pytest.param(
            "train.learning_rate", float("inf"), ["train.learning_rate", "inf"], marks=slow
        ),
        pytest.param("train.timeout_s", float("inf"), ["train.timeout_s", "inf"], marks=slow),
        ("train.schedule", "cosinus", ["train.schedule", "cosine"]),
        ("layout.fsdp", "two", ["layout.fsdp", "two"]),
        ("layout.fsdp", 0, ["layout.fsdp", "0"]),
        ("layout.fsdp", True, ["layout.fsdp"]),
        ("layout", [2], ["layout"]),
        ("layout", None, ["layout"]),
        ("task", "fine-tune", ["task", "full"]),
        ("task", "serve", ["task", "serve"]),
        ("model", 7, ["model", "7"]),
        ("version", 2, ["version", "2"]),
        ("precision.compute", "fp8", ["precision.compute", "bf16"]),
        ("devices.kind", "H1000", ["H1000"]),
    ],
)
def test_a_plan_value_that_is_wrong(bench: Bench, key: str, value: Any, named: list[str]) -> None:
    """An unknown key is answered with the nearest one, a wrong value with the key and the value."""
    _set(bench.plan, key, value)
    bench.assert_refused(bench.train(), *named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: [unclosed", ["plan.yaml"]),
        ("- model\n- task\n", ["plan.yaml"]),
        ("", ["plan.yaml"]),
        ("model: x\n\ttask: full\n", ["plan.yaml"]),
        ("task: full\nlayout: {fsdp: 2}\n", ["model"]),
    ],
    ids=["unclosed", "list", "empty", "tab", "no-model"],
)
def test_a_plan_that_is_no_plan(bench: Bench, text: str, named: list[str]) -> None:
    """A file that is no YAML mapping, or lacks a required key."""
    file = bench.folder / "plan.yaml"
    file.write_text(text)
    bench.assert_refused(bench.run("train", file, "--data", bench.rows, "--out", bench.out), *named)


def test_a_plan_that_is_not_there(bench: Bench) -> None:
    """The missing file is named."""
    bench.assert_refused(
        bench.run("train", "nowhere.yaml", "--data", bench.rows, "--out", bench.out),
        "nowhere.yaml",
    )


@pytest.mark.parametrize("binary", [b"\xff\xfe\x00", b"\x00" * 8], ids=["not-utf-8", "zeros"])
def test_a_plan_of_bytes(bench: Bench, binary: bytes) -> None:
    """A file that is no text."""
    (bench.folder / "plan.yaml").write_bytes(binary)
    bench.assert_refused(
        bench.run("train", "plan.yaml", "--data", bench.rows, "--out", bench.out), "plan.yaml"
    )


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("nonsense", ["nonsense"]),
        ("nonsense=1", ["nonsense"]),
        ("train.max_step=1", ["max_step", "max_steps"]),
        ("train.seq_len=", ["train.seq_len"]),
        ("train.max_steps=many", ["train.max_steps", "many"]),
        ("train=5", ["train", "5"]),
        ("=5", ["=5"]),
        ("train.max_steps.deeper=1", ["max_steps"]),
        ("train.max_steps=[", ["train.max_steps"]),
    ],
)
def test_a_set_option_that_is_wrong(bench: Bench, setting: str, named: list[str]) -> None:
    """`--set` with a key that is not there, or a value that does not fit."""
    bench.assert_refused(bench.train("--set", setting), *named)


# --- the layout and the model ---------------------------------------------------------------


def test_tensor_parallelism_that_does_not_divide_the_heads(bench: Bench, odd: Path) -> None:
    """The heads and the sizes that would work are named."""
    bench.plan |= {"model": str(odd), "layout": {"tp": 2}}
    bench.assert_refused(bench.train(), "tp=2", "9", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"tp": 3}, ["tp=3", "4"]),
        ({"pp": 5}, ["5 stages", "4 layers", "at most 4"]),
        ({"pp": 2, "fsdp": 2}, ["zero=3", "pp=2", "zero=1"]),
        ({"tp": 8}, ["tp=8", "4 attention heads", "1, 2, 4"]),
        ({"fsdp": 2, "ep": 2}, ["ep=2", "llama", "ep=1"]),
        ({"fsdp": 2, "sequence_parallel": True}, ["sequence_parallel", "tp=1", "false"]),
    ],
    ids=str,
)
def test_a_layout_that_the_model_cannot_have(
    bench: Bench, layout: dict[str, Any], named: list[str]
) -> None:
    """The axis and the model's number are named, and a value that works."""
    bench.plan["layout"] = layout
    bench.assert_refused(bench.train(), *named)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("fsdp=2", ["fsdp=2"]),
        ("dp=2", ["dp=2"]),
        ("tp=3", ["tp=3", "4"]),
        ("tp", ["'tp'", "--layout"]),
        ("tq=2", ["'tq'", "--layout"]),
        ("tp=x", ["tp", "'x'", "--layout"]),
        ("tp=-1", ["tp", "-1", "--layout"]),
    ],
)
def test_a_layout_that_cannot_serve(bench: Bench, layout: str, named: list[str]) -> None:
    """`serve --layout` names what it cannot use."""
    bench.assert_refused(bench.run("serve", bench.model, "--layout", layout), *named)


def test_a_layout_that_is_empty(bench: Bench) -> None:
    """`--layout ""` is not taken for "any layout"."""
    options = ["--seq-len", "64", "--layout", ""]
    bench.assert_refused(bench.run("plan", bench.model, *options), "--layout")


def test_rows_longer_than_the_model_can_read(bench: Bench) -> None:
    """Both lengths are named."""
    bench.plan["train"]["seq_len"] = 257
    bench.assert_refused(bench.train(), "seq_len", "257", "256")


def test_a_context_longer_than_the_model_can_read(bench: Bench) -> None:
    """Both lengths are named."""
    bench.assert_refused(
        bench.run("serve", bench.model, "--set", "serve.context=257"), "context", "257", "256"
    )


@pytest.mark.slow
def test_a_batch_that_leaves_a_rank_without_a_row(bench: Bench) -> None:
    """One row for two ranks: both numbers are named."""
    bench.plan["train"]["global_batch"] = 1
    bench.assert_refused(bench.train(), "global_batch=1", "2")


@pytest.mark.slow
def test_too_little_memory(bench: Bench) -> None:
    """What is needed and what is there are named."""
    bench.plan["devices"] = {"memory_gib": 0.05}
    bench.assert_refused(bench.train(), "0.05", "devices.memory_gib")


# --- the data -------------------------------------------------------------------------------

GOOD = json.dumps(
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
)


def _row(*messages: Any, **keys: Any) -> str:
    return json.dumps({"messages": list(messages), **keys})


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


WRONG_ROWS = {
    "cut": GOOD[:-9],
    "content-null": _row(USER, {"role": "assistant", "content": None}),
    "content-number": _row(USER, {"role": "assistant", "content": 5}),
    "no-content": _row(USER, {"role": "assistant"}),
    "wrong-role": _row(USER, {"role": "robot", "content": "b"}),
    "role-null": _row(USER, {"role": None, "content": "b"}),
    "list-instead-of-string": _row({"role": "user", "content": ["a"]}, ANSWER),
    "message-is-text": _row(USER, "b"),
    "messages-is-text": json.dumps({"messages": "a"}),
    "no-messages": json.dumps({"messages": []}),
    "misspelt-key": json.dumps({"message": [USER, ANSWER]}),
    "row-is-a-list": json.dumps([USER, ANSWER]),
    "row-is-text": json.dumps("text"),
    "row-is-null": "null",
    "lone-surrogate": _row({"role": "user", "content": "\ud800"}, ANSWER),
}


@pytest.mark.parametrize("kind", _fast_first(list(WRONG_ROWS)))
def test_a_row_that_is_wrong(bench: Bench, kind: str) -> None:
    """The file and the number of the line are named."""
    line = WRONG_ROWS[kind]
    bench.rows = bench.folder / "bad.jsonl"
    bench.rows.write_text(f"{GOOD}\n{GOOD}\n{line}\n{GOOD}\n" + f"{GOOD}\n" * 4)
    bench.assert_refused(bench.train(), "bad.jsonl", "3")


@pytest.mark.slow
def test_rows_in_latin_1(bench: Bench) -> None:
    """The file, the line and the encoding that is wanted are named."""
    bench.rows = bench.folder / "latin.jsonl"
    row = '{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]}'
    bench.rows.write_bytes(f"{GOOD}\n{row}\n".encode("latin-1"))
    bench.assert_refused(bench.train(), "latin.jsonl", "2", "UTF-8")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "\n\n"], ids=["empty", "blank-lines"])
def test_no_rows(bench: Bench, content: str) -> None:
    """A file without a row is named."""
    bench.rows = bench.folder / "none.jsonl"
    bench.rows.write_text(content)
    bench.assert_refused(bench.train(), "none.jsonl")


@pytest.mark.slow
def test_rows_without_an_answer(bench: Bench) -> None:
    """Rows that train nothing are refused, and the file is named."""
    bench.rows = bench.folder / "questions.jsonl"
    bench.rows.write_text(f"{_row(USER)}\n" * 8)
    bench.assert_refused(bench.train(), "questions.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("option", _fast_first(["--data", "--eval-data"]))
def test_a_data_file_that_is_not_there(bench: Bench, option: str) -> None:
    """The missing file is named, for training and for evaluation."""
    bench.assert_refused(bench.train(option, "nowhere.jsonl"), "nowhere.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--data", "--eval-data"])
def test_a_directory_for_data(bench: Bench, option: str) -> None:
    """A directory is no data file."""
    (bench.folder / "folder.jsonl").mkdir()
    bench.assert_refused(bench.train(option, "folder.jsonl"), "folder.jsonl")


# --- the model's files ----------------------------------------------------------------------


@pytest.fixture
def own(bench: Bench, ll: Path) -> Bench:
    """The bench with its own copy of the model."""
    bench.model = bench.folder / "own"
    shutil.copytree(ll, bench.model)
    bench.plan["model"] = str(bench.model)
    return bench


@pytest.fixture
def sharded(bench: Bench) -> Bench:
    """The bench with a model of several weight files."""
    bench.model = bench.folder / "sharded"
    save_model("LL", bench.model, max_shard_size="200KB")
    save_tokenizer(bench.model)
    bench.plan["model"] = str(bench.model)
    return bench


def _first_shard(model: Path) -> Path:
    return min(model.glob("model-*.safetensors"))


def _rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_a_model_that_is_not_there(bench: Bench) -> None:
    """The missing directory is named by train, serve, plan and export."""
    bench.plan["model"] = "/nowhere/model"
    bench.assert_refused(bench.train(), "/nowhere/model")
    for command in (["serve"], ["plan"], ["export", "--out", "x"]):
        bench.assert_refused(bench.run(*command, "/nowhere/model"), "/nowhere/model")


@pytest.mark.slow
@pytest.mark.parametrize("content", _fast_first(["{", "[]", "", '{"model_type": 5}', "{}"]))
def test_a_config_that_is_broken(own: Bench, content: str) -> None:
    """The file is named."""
    (own.model / "config.json").write_text(content)
    own.assert_refused(own.train(), "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "many", 0, -4, 4.5], ids=repr)
def test_a_config_number_that_is_wrong(own: Bench, value: Any) -> None:
    """The key is named."""
    config = json.loads((own.model / "config.json").read_text())
    (own.model / "config.json").write_text(json.dumps({**config, "num_attention_heads": value}))
    own.assert_refused(own.train(), "num_attention_heads")


@pytest.mark.slow
def test_a_family_that_is_not_supported(own: Bench) -> None:
    """gpt2 is named, and a family that is supported."""
    config = json.loads((own.model / "config.json").read_text())
    (own.model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    own.assert_refused(own.train(), "gpt2", "llama")


@pytest.mark.slow
def test_weights_in_pickle_files_only(own: Bench) -> None:
    """A pickle file is not read; the file is named, and how to convert it."""
    (own.model / "model.safetensors").rename(own.model / "pytorch_model.bin")
    own.assert_refused(own.train(), "pytorch_model.bin", "save_pretrained")


def test_a_shard_that_is_deleted(sharded: Bench) -> None:
    """The missing file is named."""
    shard = _first_shard(sharded.model)
    shard.unlink()
    sharded.assert_refused(sharded.train(), shard.name)


@pytest.mark.parametrize("verb", _fast_first(["serve", "train", "export"]))
def test_a_shard_that_is_cut(sharded: Bench, verb: str) -> None:
    """The file that lacks its last kilobyte is named, whatever reads it."""
    shard = _first_shard(sharded.model)
    os.truncate(shard, shard.stat().st_size - 1024)
    if verb == "train":
        done = sharded.train()
    elif verb == "serve":
        done = sharded.run("serve", sharded.model)
    else:
        done = sharded.run("export", sharded.model, "--out", "hf")
        assert not (sharded.folder / "hf").exists()
    sharded.assert_refused(done, shard.name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 4, 100])
def test_a_shard_without_its_header(sharded: Bench, size: int) -> None:
    """A file that ends within its header is named."""
    shard = _first_shard(sharded.model)
    os.truncate(shard, size)
    sharded.assert_refused(sharded.train(), shard.name)


@pytest.mark.slow
def test_a_tensor_that_is_missing(sharded: Bench) -> None:
    """The tensor that the index lists but its file lacks is named."""
    shard = _first_shard(sharded.model)
    names: list[str] = []
    _rewrite(shard, lambda tensors: names.append(tensors.popitem()[0]))
    sharded.assert_refused(sharded.train(), names[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_that_no_file_has(own: Bench, name: str) -> None:
    """The tensor is named."""
    _rewrite(own.model / "model.safetensors", lambda tensors: tensors.pop(name))
    own.assert_refused(own.train(), name)


def test_a_tensor_that_is_transposed(own: Bench) -> None:
    """The tensor and both shapes are named."""
    name = "model.layers.1.mlp.down_proj.weight"
    _rewrite(
        own.model / "model.safetensors",
        lambda tensors: tensors.update({name: tensors[name].T.contiguous()}),
    )
    own.assert_refused(own.train(), name, "128", "64")


@pytest.mark.slow
def test_tensors_with_another_prefix(own: Bench) -> None:
    """A tensor that is missed is named."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.startswith("model."):
                tensors["transformer." + name.removeprefix("model.")] = tensors.pop(name)

    _rewrite(own.model / "model.safetensors", rename)
    own.assert_refused(own.train(), "model.")


@pytest.mark.slow
def test_a_tensor_of_whole_numbers(own: Bench) -> None:
    """Quantized or damaged weights are not taken for weights: the tensor and its type are named."""
    name = "model.layers.1.mlp.down_proj.weight"

    def to_int8(tensors: dict[str, Any]) -> None:
        import torch

        tensors[name] = tensors[name].to(torch.int8)

    _rewrite(own.model / "model.safetensors", to_int8)
    own.assert_refused(own.train(), name)


@pytest.mark.parametrize("verb", _fast_first(["serve", "train"]))
def test_no_tokenizer(own: Bench, verb: str) -> None:
    """The missing file is named."""
    for file in own.model.glob("tokenizer*"):
        file.unlink()
    done = own.train() if verb == "train" else own.run("serve", own.model)
    own.assert_refused(done, "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "serve"])
def test_a_tokenizer_that_is_broken(own: Bench, verb: str) -> None:
    """The broken file is named."""
    (own.model / "tokenizer.json").write_text('{"version": ')
    done = own.train() if verb == "train" else own.run("serve", own.model)
    own.assert_refused(done, "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("verb", _fast_first(["serve", "train"]))
def test_no_chat_template(bench: Bench, verb: str) -> None:
    """The missing template is named."""
    bench.model = bench.folder / "plain"
    save_model("LL", bench.model)
    save_tokenizer(bench.model, chat_template=None)
    bench.plan["model"] = str(bench.model)
    done = bench.train() if verb == "train" else bench.run("serve", bench.model)
    bench.assert_refused(done, "chat template", "plain")


@pytest.mark.slow
def test_a_tokenizer_with_more_ids_than_the_model(bench: Bench) -> None:
    """Ids past the model's vocabulary are noticed before a rank looks them up."""
    bench.model = bench.folder / "small"
    config = model_config("LL")
    config.vocab_size, config.eos_token_id = 200, 1
    config.pad_token_id, config.bos_token_id = 0, 1
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(bench.model)
    save_tokenizer(bench.model)
    bench.plan["model"] = str(bench.model)
    bench.assert_refused(bench.train(), "200")


@pytest.mark.slow
def test_tensors_that_nobody_asked_for_are_a_note(own: Bench) -> None:
    """A further tensor is named in a note, and training works."""

    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.extra"] = tensors["model.norm.weight"].clone()

    _rewrite(own.model / "model.safetensors", add)
    own.plan["layout"] = {}
    done = own.train()
    assert (done.code, done.err) == (0, ""), done.text
    (note,) = [line for line in done.out.splitlines() if line.startswith("note: ")]
    assert "model.layers.0.self_attn.rotary_emb.extra" in note
    assert [record["step"] for record in metrics(own.out)] == [1]
    assert listed_checkpoints(own.out) == [1]


# --- the output and the arguments -----------------------------------------------------------


@pytest.mark.parametrize("out", _fast_first(["file", "/proc/run", "file/run"]))
def test_an_output_that_cannot_be_written(bench: Bench, out: str) -> None:
    """The directory is named; a file in its place is left alone."""
    (bench.folder / "file").write_text("precious")
    done = bench.train("--out", out)
    bench.assert_refused(done, out)
    assert (bench.folder / "file").read_text() == "precious"


@pytest.mark.slow
def test_an_output_directory_with_something_else_in_it(bench: Bench) -> None:
    """Training into a directory with foreign files destroys none of them."""
    bench.out.mkdir()
    (bench.out / "thesis.txt").write_text("precious")
    bench.train("--set", "layout.fsdp=1")
    assert (bench.out / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("verb", _fast_first(["plan", "export"]))
def test_an_answer_that_cannot_be_written(bench: Bench, verb: str) -> None:
    """`export --out` and `plan --out` name the path."""
    short = ["--seq-len", "64"] if verb == "plan" else []
    done = bench.run(verb, bench.model, "--out", "/proc/answer", *short)
    bench.assert_refused(done, "/proc/answer")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float", ""])
def test_an_export_type_that_is_unknown(bench: Bench, dtype: str) -> None:
    """The type is named, and one that works."""
    bench.assert_refused(
        bench.run("export", bench.model, "--out", "hf", "--dtype", dtype), "dtype", "bf16"
    )
    assert not (bench.folder / "hf").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], ["trian", "train"]),
        (["train"], ["--help"]),
        (["train", "p.yaml"], ["--data"]),
        (["train", "p.yaml", "--data", "x", "--out", "y", "--fast"], ["--fast"]),
        (["plan", ".", "--seq-len", "long"], ["--seq-len", "integer"]),
        (["report", "nowhere"], ["nowhere"]),
        (["report", "."], ["measured.json"]),
        pytest.param(["export", ".", "--out", "x"], ["config.json"], marks=slow),
        (["probe", "--processes", "0"], ["--processes", "1"]),
        pytest.param(["probe", "--kind", "abacus"], ["abacus"], marks=slow),
        (["catalog", "colours"], ["colours"]),
    ],
    ids=" ".join,
)
def test_arguments_that_are_wrong(bench: Bench, arguments: list[str], named: list[str]) -> None:
    """The argument, the option or the file is named."""
    bench.assert_refused(bench.run(*arguments), *named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--gpus", "8xABACUS"], ["ABACUS"]),
        (["--gpus", "cpu:0"], ["cpu:0"]),
        (["--gpus", "lots"], ["lots"]),
        (["--task", "dance"], ["dance"]),
        (["--layout", "tp=3", "--gpus", "cpu:3"], ["tp=3"]),
        (["--memory", "-1"], ["-1"]),
        (["--memory", "nan"], ["nan"]),
        (["--seq-len", "257"], ["257", "256"]),
        (["--seq-len", "0"], ["seq_len"]),
        (["--precision", "fp8"], ["precision.compute"]),
        (["--cluster", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--task", "serve", "--context", "257"], ["257", "256"]),
    ],
    ids=" ".join,
)
def test_a_question_that_cannot_be_planned(
    bench: Bench, options: list[str], named: list[str]
) -> None:
    """`shardwise plan` names the option's value."""
    bench.assert_refused(bench.run("plan", bench.model, *options), *named)


@pytest.mark.parametrize(
    ("port", "named"), [("0", "0"), ("65536", "65536"), ("-1", "-1"), ("http", "--port")]
)
def test_a_port_that_is_no_port(bench: Bench, port: str, named: str) -> None:
    """The number or the option is named."""
    bench.assert_refused(bench.run("serve", bench.model, "--port", port), named)


def test_a_port_that_is_taken(bench: Bench) -> None:
    """The number is named in seconds, before a rank starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        bench.assert_refused(bench.run("serve", bench.model, "--port", port), port)
