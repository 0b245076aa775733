"""Training, reporting and exporting through the command line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.bench import long_last
from tests.e2e.shell import (
    Done,
    assert_none_left,
    listed_checkpoints,
    metrics,
    shardwise,
    write_plan,
)

TRAIN = {"seq_len": 64, "global_batch": 4, "micro_batch": 2, "learning_rate": 1e-3}
LAYOUTS = {"one": {}, "fsdp": {"fsdp": 2}, "tp": {"tp": 2}}
STEPS = 3


@dataclass
class Trained:
    """A finished run and what its command printed."""

    folder: Path
    done: Done

    @property
    def run(self) -> Path:
        return self.folder / "run"


TrainOnce = Callable[[str], Trained]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, ll: Path, rows: Path, eval_rows: Path
) -> TrainOnce:
    """The run of a layout, made when a test first asks for it."""

    @cache
    def train(name: str) -> Trained:
        folder = tmp_path_factory.mktemp(name)
        plan = write_plan(
            folder / "plan.yaml", ll, LAYOUTS[name], train={**TRAIN, "max_steps": STEPS}
        )
        done = shardwise(
            folder, "train", plan, "--data", rows, "--eval-data", eval_rows, "--out", "run"
        )
        assert_none_left(folder)
        return Trained(folder, done)

    return train


@pytest.mark.parametrize("name", LAYOUTS)
def test_train_ends_well_and_writes_its_files(trained: TrainOnce, name: str) -> None:
    """Exit 0, one record a step, the measurements, and one complete checkpoint."""
    it = trained(name)
    assert it.done.code == 0, it.done.text
    assert it.done.err == ""
    records = metrics(it.run)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(math.isfinite(record["loss"]) for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    measured = json.loads((it.run / "measured.json").read_text(encoding="utf-8"))
    assert measured["steps"] == STEPS
    assert len(measured["peak_bytes"]) == (1 if name == "one" else 2)
    assert listed_checkpoints(it.run) == [STEPS]
    checkpoint = it.run / "checkpoints" / "step-000003"
    assert (checkpoint / "plan.yaml").is_file()
    assert (checkpoint / "state.json").is_file()
    left = [p for p in it.run.rglob("*") if "partial" in p.name or p.suffix in (".tmp", ".part")]
    assert left == []
    assert list((it.folder / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_train_prints_eval_loss_before_and_after(trained: TrainOnce, name: str) -> None:
    """The evaluation loss is printed before the first and after the last step, and it falls."""
    it = trained(name)
    measured = json.loads((it.run / "measured.json").read_text(encoding="utf-8"))
    before, after = measured["eval_loss_before"], measured["eval_loss_after"]
    lines = [line for line in it.done.out.splitlines() if line.startswith("evaluation loss")]
    assert len(lines) == 2
    assert "step 0" in lines[0]
    assert f"{before:.4f}" in lines[0]
    assert f"step {STEPS}" in lines[1]
    assert f"{after:.4f}" in lines[1]
    assert after < before


def test_train_prints_from_the_first_rank_alone(trained: TrainOnce) -> None:
    """No line twice, none of the second rank on the terminal or in its log."""
    it = trained("fsdp")
    lines = it.done.out.splitlines()
    assert len(lines) == len(set(lines))
    assert sum("checkpoint: " in line for line in lines) == 1
    assert sum(line.startswith(f"step {STEPS}/{STEPS}") for line in lines) == 1
    assert "rank 1" not in it.done.out + it.done.err
    assert (it.run / "work" / "logs" / "rank-1.log").read_text() == ""


def test_losses_agree_between_layouts(trained: TrainOnce) -> None:
    """Each step's loss and gradient norm, and both evaluations, do not depend on the layout."""
    runs = {name: metrics(trained(name).run) for name in LAYOUTS}
    evals = {
        name: json.loads((trained(name).run / "measured.json").read_text()) for name in LAYOUTS
    }
    for name in ("fsdp", "tp"):
        for mine, reference in zip(runs[name], runs["one"], strict=True):
            assert mine["loss"] == pytest.approx(reference["loss"], rel=1e-4)
            assert mine["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
            for key in ("targets", "tokens", "learning_rate"):
                assert mine[key] == reference[key]
        for key in ("eval_loss_before", "eval_loss_after"):
            assert evals[name][key] == pytest.approx(evals["one"][key], rel=1e-4)


def test_report_prints_a_table_and_json(trained: TrainOnce, tmp_path: Path) -> None:
    """One row for each rank's memory and one for the step time; --json says the same."""
    it = trained("fsdp")
    table = shardwise(tmp_path, "report", it.run)
    assert (table.code, table.err) == (0, ""), table.text
    assert "peak memory, rank 0" in table.out
    assert "peak memory, rank 1" in table.out
    as_json = shardwise(tmp_path, "report", it.run, "--json")
    assert (as_json.code, as_json.err) == (0, ""), as_json.text
    answer = json.loads(as_json.out)
    assert [row["quantity"] for row in answer] == [
        "peak memory, rank 0",
        "peak memory, rank 1",
        "time of a step",
    ]
    measured = json.loads((it.run / "measured.json").read_text(encoding="utf-8"))
    assert answer[0]["measured"] == pytest.approx(measured["peak_bytes"][0] / 2**30)
    assert answer[2]["measured"] == pytest.approx(measured["step_s"])


def _assert_loads(folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == getattr(torch, dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_export_writes_what_transformers_loads(trained: TrainOnce, tmp_path: Path) -> None:
    """A bf16 export of a sharded run loads in plain transformers, tokenizer and all."""
    it = trained("tp")
    done = shardwise(tmp_path, "export", it.run, "--out", tmp_path / "hf", "--dtype", "bf16")
    assert (done.code, done.err) == (0, ""), done.text
    _assert_loads(tmp_path / "hf", "bfloat16")
    again = shardwise(tmp_path, "export", it.run, "--out", tmp_path / "hf", "--dtype", "bf16")
    assert again.code == 2, again.text
    assert len(again.err.splitlines()) == 1
    assert str(tmp_path / "hf") in again.err


@pytest.mark.slow
@pytest.mark.parametrize("name", long_last(["tp", "fsdp", "one"], 1))
@pytest.mark.parametrize(("dtype", "full_name"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_export_with_check(
    trained: TrainOnce, tmp_path: Path, name: str, dtype: str, full_name: str
) -> None:
    """`--check` compares plain transformers with the sharded model, says so, and leaves nothing."""
    it = trained(name)
    done = shardwise(
        tmp_path, "export", it.run, "--out", tmp_path / "hf", "--dtype", dtype, "--check"
    )
    assert (done.code, done.err) == (0, ""), done.text
    assert "equal" in done.out
    _assert_loads(tmp_path / "hf", full_name)
    assert_none_left(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_exports_of_the_layouts_agree(trained: TrainOnce, tmp_path: Path) -> None:
    """The fp32 weights after three steps do not depend on the layout, and training moved them."""
    import torch
    from safetensors.torch import load_file

    weights = {}
    for name in LAYOUTS:
        out = tmp_path / name
        done = shardwise(tmp_path, "export", trained(name).run, "--out", out, "--dtype", "fp32")
        assert done.code == 0, done.text
        weights[name] = load_file(out / "model.safetensors")
    for name in ("fsdp", "tp"):
        assert weights[name].keys() == weights["one"].keys()
        for key, tensor in weights["one"].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=1e-3, atol=1e-4)


def test_a_finished_run_is_not_overwritten(trained: TrainOnce, tmp_path: Path, rows: Path) -> None:
    """A second training into the same directory is refused in one line; nothing changes there."""
    it = trained("fsdp")
    files = {path: path.stat().st_mtime_ns for path in it.run.rglob("*") if path.is_file()}
    done = shardwise(
        tmp_path, "train", it.folder / "plan.yaml", "--data", rows, "--out", it.run, limit=20
    )
    assert done.code == 2, done.text
    (line,) = done.err.splitlines()
    assert line.startswith("shardwise: ")
    assert str(it.run) in line
    assert "--resume" in line
    assert files == {path: path.stat().st_mtime_ns for path in it.run.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", long_last([{"fsdp": 2}, {"tp": 2}], 1), ids=["fsdp", "tp"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, ll: Path, rows: Path, layout: dict[str, int]
) -> None:
    """Two steps and a resumed two give the losses and the weights of four steps at once."""
    import torch
    from safetensors.torch import load_file

    train = {**TRAIN, "schedule": "constant", "max_steps": 2}
    plan = write_plan(tmp_path / "plan.yaml", ll, layout, train=train)
    parts = ["train", plan, "--data", rows, "--out", tmp_path / "parts"]
    whole = ["train", plan, "--data", rows, "--out", tmp_path / "whole"]
    four = ["--set", "train.max_steps=4"]
    for arguments in (parts, [*parts, "--resume", *four], [*whole, *four]):
        done = shardwise(tmp_path, *arguments)
        assert (done.code, done.err) == (0, ""), done.text
        assert_none_left(tmp_path)
    assert [record["step"] for record in metrics(tmp_path / "parts")] == [1, 2, 3, 4]
    assert [record["step"] for record in metrics(tmp_path / "whole")] == [1, 2, 3, 4]
    for mine, reference in zip(
        metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True
    ):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(reference[key], rel=1e-6)
        for key in ("learning_rate", "targets", "tokens"):
            assert mine[key] == reference[key]
    weights = []
    for name in ("parts", "whole"):
        out = tmp_path / f"{name}-hf"
        done = shardwise(tmp_path, "export", tmp_path / name, "--out", out, "--dtype", "fp32")
        assert done.code == 0, done.text
        weights.append(load_file(out / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    for key, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][key], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(
    trained: TrainOnce, tmp_path: Path, rows: Path
) -> None:
    """`--resume` of a run that has all its steps ends well, with the same records."""
    it = trained("fsdp")
    before = metrics(it.run)
    done = shardwise(
        tmp_path, "train", it.folder / "plan.yaml", "--data", rows, "--out", it.run, "--resume"
    )
    assert "Traceback" not in done.err
    assert done.code in (0, 2), done.text
    assert metrics(it.run) == before
    assert listed_checkpoints(it.run) == [STEPS]
    assert_none_left(it.folder)


@pytest.mark.slow
def test_resume_without_a_run_says_so(tmp_path: Path, ll: Path, rows: Path) -> None:
    """`--resume` where nothing was trained is refused in one line, or starts at the first step."""
    plan = write_plan(tmp_path / "plan.yaml", ll, {}, train={**TRAIN, "max_steps": 1})
    done = shardwise(tmp_path, "train", plan, "--data", rows, "--out", tmp_path / "run", "--resume")
    if done.code == 0:
        assert [record["step"] for record in metrics(tmp_path / "run")] == [1]
    else:
        assert done.code == 2, done.text
        (line,) = done.err.splitlines()
        assert str(tmp_path / "run") in line


@pytest.mark.slow
def test_rows_that_do_not_divide_over_the_ranks(tmp_path: Path, ll: Path, rows: Path) -> None:
    """Three rows a step, seven in all: two ranks train on the same tokens as one process."""
    losses = {}
    few = tmp_path / "rows.jsonl"
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[:7]))
    for name in ("one", "fsdp"):
        plan = write_plan(
            tmp_path / f"{name}.yaml",
            ll,
            LAYOUTS[name],
            train={**TRAIN, "global_batch": 3, "max_steps": 4},
        )
        done = shardwise(tmp_path, "train", plan, "--data", few, "--out", tmp_path / name)
        assert (done.code, done.err) == (0, ""), done.text
        losses[name] = [
            (record["targets"], record["tokens"], record["loss"])
            for record in metrics(tmp_path / name)
        ]
    assert len(losses["one"]) >= 2
    for mine, reference in zip(losses["fsdp"], losses["one"], strict=True):
        assert mine == pytest.approx(reference, rel=1e-4)


@pytest.mark.slow
def test_packed_rows_are_counted_and_their_order_is_kept(
    tmp_path: Path, ll: Path, rows: Path
) -> None:
    """How full the sequences are is printed, every token comes once an epoch, and a run is not
    resumed with rows packed in another way."""
    train = {**TRAIN, "seq_len": 200, "packing": True, "global_batch": 2, "micro_batch": 1}
    plan = write_plan(tmp_path / "plan.yaml", ll, {"fsdp": 2}, train=train)
    arguments = ["train", plan, "--data", rows, "--out", tmp_path / "run"]
    done = shardwise(tmp_path, *arguments)
    assert (done.code, done.err) == (0, ""), done.text
    told = re.search(r"packing: (\d+) rows in (\d+) sequences, (\d+)% full", done.out)
    assert told, done.out
    num_rows, num_sequences, share = map(int, told.groups())
    assert num_rows == 16
    assert 1 < num_sequences < num_rows
    (read,) = re.findall(r"16 rows, (\d+) tokens", done.out)
    assert share == round(100 * int(read) / (num_sequences * 200))
    records = metrics(tmp_path / "run")
    assert len(records) == -(-num_sequences // 2)
    assert sum(record["tokens"] for record in records) == int(read)
    for change in ("train.seq_len=220", "train.packing=false"):
        done = shardwise(tmp_path, *arguments, "--resume", "--set", change)
        assert done.code == 2, done.text
        assert "packed_to was 200 and is now" in done.err
