"""A run's directory: never somebody else's, one command at a time, resumed as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardwise.config import Layout, Lora, Plan, Train
from shardwise.errors import UserError
from shardwise.launch.rundir import as_resumed, check_resume, check_same_rows, claimed, tidy
from shardwise.models.adapters import write_adapters
from shardwise.models.read import facts_of_config
from shardwise.trainer.data.chat import Example
from shardwise.trainer.data.store import write_rows
from shardwise.trainer.state import State, row_order
from tests.unit.test_facts import SMOLLM2


def plan(**train: int) -> Plan:
    return Plan(model="x", task="full", layout=Layout(), train=Train(**train))


def rows(folder: Path, num_rows: int) -> Path:
    row = Example(ids=[1, 2, 3], trained=[False, True, True])
    write_rows(folder, [row] * num_rows, seq_len=8, vocab_size=10)
    return folder


def checkpoint(run: Path, step: int, asked: Plan, rows_folder: Path) -> None:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    state = State(step=step, row_order=row_order(asked, rows_folder), loss=1.0)
    (folder / "state.json").write_text(state.model_dump_json())


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "data" / "rows.jsonl"
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(UserError, match="is not empty and is no Shardwise run"), claimed(tmp_path):
        pass
    assert mine.read_text() == "precious"
    with pytest.raises(UserError, match="is not empty and is no Shardwise run"), claimed(mine):
        pass


def test_one_command_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with (
        claimed(run),
        pytest.raises(UserError, match="another command is training"),
        claimed(run),
    ):
        pass
    with claimed(run):  # and again, when the first one is over
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), claimed(tmp_path / "file" / "run"):
        pass


def test_starting_over_and_resuming_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete checkpoint"):
        check_resume(tmp_path, resume=True)
    checkpoint(tmp_path, 3, plan(), rows(tmp_path / "rows", 8))
    with pytest.raises(UserError, match="already holds step-000003"):
        check_resume(tmp_path, resume=False)
    check_resume(tmp_path, resume=True)


def test_a_run_is_resumed_on_the_same_rows_in_the_same_order_only(tmp_path: Path) -> None:
    same = rows(tmp_path / "rows", 8)
    checkpoint(tmp_path, 3, plan(global_batch=4), same)
    check_same_rows(tmp_path, plan(global_batch=4, micro_batch=2), same, 10)
    for other, words in (
        (plan(global_batch=8), "global_batch was 4 and is now 8"),
        (plan(global_batch=4, seed=1), "seed was 0 and is now 1"),
    ):
        with pytest.raises(UserError, match=words):
            check_same_rows(tmp_path, other, same, 10)
    fewer = rows(tmp_path / "fewer", 7)
    with pytest.raises(UserError, match="num_rows was 8 and is now 7"):
        check_same_rows(tmp_path, plan(global_batch=4), fewer, 10)
    with pytest.raises(UserError, match="already at step 3 of 3"):
        check_same_rows(tmp_path, plan(global_batch=4), same, 3)


def test_leftovers_go_and_room_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of_config(SMOLLM2, source="test")
    partial = tmp_path / "checkpoints" / ".step-000005.partial"
    partial.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    tidy(tmp_path, facts, resume=True)
    assert not partial.exists()
    assert (tmp_path / "metrics.jsonl").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(UserError, match=r"has 0\.00 GiB left, one checkpoint needs 1\.50 GiB"):
        tidy(tmp_path, facts, resume=True)


@pytest.mark.parametrize(
    ("said", "takes_theirs"),
    [
        (None, True),
        (Lora(rank=4), True),
        (Lora(quantize="nf4"), True),
        (Lora(targets=["v_proj", "q_proj"]), True),
        (Lora(rank=8), False),
        (Lora(quantize=None), False),
        (Lora(targets=["v_proj"]), False),
    ],
    ids=str,
)
def test_a_resumed_plan_has_the_adapters_of_its_run(
    tmp_path: Path, said: Lora | None, takes_theirs: bool
) -> None:
    """All of them, whatever part of them it says; one that says another thing is left as it is, and
    refused where it is compared."""
    asked = plan().model_copy(update={"task": "lora", "lora": said})
    assert as_resumed(tmp_path, asked) == asked
    checkpoint(tmp_path, 3, plan(), rows(tmp_path / "rows", 8))
    model = tmp_path / "checkpoints" / "step-000003" / "model"
    model.mkdir()
    theirs = Lora(rank=4, alpha=8.0, targets=["q_proj", "v_proj"], quantize="nf4")
    write_adapters(model, theirs, tmp_path)
    assert as_resumed(tmp_path, asked).lora == (theirs if takes_theirs else said)
