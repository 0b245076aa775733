"""Bad plans, rows and arguments end with exit code 2 and one line that says what is wrong, before a
rank starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import Bench, fast_first

slow = pytest.mark.slow

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


@pytest.mark.parametrize("kind", fast_first(list(WRONG_ROWS)))
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
@pytest.mark.parametrize("option", fast_first(["--data", "--eval-data"]))
def test_a_data_file_that_is_not_there(bench: Bench, option: str) -> None:
    """The missing file is named, for training and for evaluation."""
    bench.assert_refused(bench.train(option, "nowhere.jsonl"), "nowhere.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--data", "--eval-data"])
def test_a_directory_for_data(bench: Bench, option: str) -> None:
    """A directory is no data file."""
    (bench.folder / "folder.jsonl").mkdir()
    bench.assert_refused(bench.train(option, "folder.jsonl"), "folder.jsonl")


# --- the output and the arguments -----------------------------------------------------------


@pytest.mark.parametrize("out", fast_first(["file", "/proc/run", "file/run"]))
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


@pytest.mark.parametrize("verb", fast_first(["plan", "export"]))
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
        (["inspect", "nowhere"], ["nowhere", "expected a directory"]),
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
