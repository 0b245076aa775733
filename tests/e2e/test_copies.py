"""Checkpoints are copied to another place while training goes on, and fetched from there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.trainer.copies import Copies, prepare_resumed
from shardwise.trainer.state import why_incomplete
from tests.e2e.bench import long_last
from tests.e2e.shell import Done, listed_checkpoints, metrics, shardwise, write_plan
from tests.e2e.test_faults import TRAIN
from tests.e2e.test_kill import saved


class Case:
    """A training of six steps whose checkpoints are copied to a directory."""

    def __init__(self, folder: Path, model: Path, rows: Path, **train: Any) -> None:
        self.folder, self.rows = folder, rows
        self.there = folder / "there"
        settings = {**TRAIN, "max_steps": 6, "epochs": 2, "save_every": 2}
        settings |= {"copy_to": f"file://{self.there}", **train}
        self.plan = write_plan(folder / "plan.yaml", model, {"fsdp": 2}, train=settings)

    def train(self, run: str, *more: str) -> Done:
        data = ["--data", str(self.rows), "--out", str(self.folder / run)]
        return shardwise(self.folder, "train", self.plan, *data, *more, limit=120)


@pytest.fixture
def case(tmp_path: Path, ll: Path, rows: Path) -> Case:
    return Case(tmp_path, ll, rows)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("behind", long_last([True, False], 1))
def test_a_run_goes_on_elsewhere(tmp_path: Path, ll: Path, rows: Path, behind: bool) -> None:
    """On a machine that has only the copies: fetched, resumed, and bitwise as if uninterrupted."""
    case = Case(tmp_path, ll, rows, async_save=behind)
    done = case.train("whole")
    assert (done.code, done.err) == (0, ""), done.text
    assert names(case.there) == ["step-000002", "step-000004", "step-000006"]
    assert f"copied to file://{case.there} in the background" in done.out
    again = case.train("again")
    assert again.code == 2, again.text
    assert "already holds step-000006; continue it with --resume" in again.err
    shutil.rmtree(case.there / "step-000006")
    done = case.train("elsewhere", "--resume")
    assert (done.code, done.err) == (0, ""), done.text
    assert "fetched step-000004 from" in done.out
    assert "continuing after step 4 of 6" in done.out
    assert listed_checkpoints(tmp_path / "elsewhere") == [4, 6]
    assert [record["step"] for record in metrics(tmp_path / "elsewhere")] == list(range(1, 7))
    ours = saved(tmp_path / "elsewhere" / "checkpoints" / "step-000006")
    assert ours == saved(tmp_path / "whole" / "checkpoints" / "step-000006")
    assert saved(case.there / "step-000006") == ours


@pytest.mark.slow
def test_only_whole_copies_count(case: Case) -> None:
    """One that lacks a file, or its state, is none; one that the place has changed is named."""
    assert case.train("run").code == 0
    copies, other = Copies(f"file://{case.there}"), case.folder / "other"
    other.mkdir()
    state = case.there / "step-000006" / "state.json"
    state.write_text(state.read_text()[:-9])
    assert copies.newest() == "step-000004"
    shard = next((case.there / "step-000004" / "optimizer").iterdir())
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert copies.newest() == "step-000002"
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert copies.newest() == "step-000004"
    with pytest.raises(UserError, match=f"{shard.name} is not what was written"):
        prepare_resumed(copies, other)
    assert list(other.glob("checkpoints/step-*")) == []
    # the run itself has newer ones, and brings the newest there
    assert prepare_resumed(copies, case.folder / "run") == (
        f"copied step-000006, which was not in {copies.url}"
    )
    assert copies.newest() == "step-000006"
    assert prepare_resumed(copies, case.folder / "run") is None
    # a file of an earlier copy that was never whole is no part of this one
    stray = case.there / "step-000006" / "optimizer" / "stray.safetensors"
    stray.write_bytes(content)
    assert prepare_resumed(copies, other) == f"fetched step-000006 from {copies.url}"
    assert not list(other.rglob("stray*"))
    # a checkpoint that the disk has changed is fetched again
    broken = next((other / "checkpoints" / "step-000006" / "model").glob("*.safetensors"))
    broken.write_bytes(b"")
    assert prepare_resumed(copies, other) == f"fetched step-000006 from {copies.url}"
    assert why_incomplete(other / "checkpoints" / "step-000006") is None


@pytest.mark.long
@pytest.mark.slow
def test_another_runs_copies_are_left_alone(case: Case) -> None:
    """Also if they are of later steps."""
    assert case.train("run").code == 0
    short = ["--set", "train.max_steps=2"]
    assert case.train("other", "--set", "train.copy_to=null", *short).code == 0
    done = case.train("other", "--resume")
    assert done.code == 2, done.text
    assert "holds the checkpoints of another run than" in done.err
    assert listed_checkpoints(case.folder / "other") == [2]
    assert names(case.there) == ["step-000002", "step-000004", "step-000006"]


@pytest.mark.long
@pytest.mark.slow
def test_copies_are_dropped_as_checkpoints_are(tmp_path: Path, ll: Path, rows: Path) -> None:
    case = Case(tmp_path, ll, rows, keep=1)
    assert case.train("run").code == 0
    assert names(case.there) == ["step-000006"]
    assert listed_checkpoints(case.folder / "run") == [6]


GONE = """
import os

if "RANK" in os.environ:
    from shardwise.errors import UserError
    from shardwise.trainer.copies import Copies

    def put(self, checkpoint, names):
        raise UserError("the place is gone")

    Copies.put = put
"""


@pytest.mark.slow
def test_a_place_that_fails_later(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on and its checkpoints stay; the end says that they were not copied, and a
    resume copies the last one."""
    site = case.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GONE)
    usual = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{usual}")
    done = case.train("run")
    assert done.code == 2, done.text
    assert "the last checkpoint was written and not copied" in done.err.splitlines()[-1]
    assert done.out.count("NOT copied: the place is gone") == 3
    assert listed_checkpoints(case.folder / "run") == [2, 4, 6]
    assert json.loads((case.folder / "run" / "measured.json").read_text())["steps"] == 6
    monkeypatch.setenv("PYTHONPATH", usual)
    done = case.train("run", "--resume")
    assert "copied step-000006, which was not in" in done.out
    assert "already at step 6 of 6" in done.err
    assert Copies(f"file://{case.there}").newest() == "step-000006"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere://bucket/runs", "nowhere"),
        ("s3://bucket/runs", "s3"),
        ("file:///proc/runs", "/proc"),
        ("s3://", "a folder, such as"),
        ("file:///", "a folder, such as"),
        ("memory://runs", "no place that stays"),
    ],
)
def test_a_place_that_does_not_work_is_refused_before_anything(
    tmp_path: Path, ll: Path, rows: Path, url: str, words: str
) -> None:
    case = Case(tmp_path, ll, rows, copy_to=url)
    done = case.train("run")
    assert done.code == 2, done.text
    (line,) = done.err.splitlines()
    assert "train.copy_to=" in line
    assert url in line
    assert words in line
    assert not (tmp_path / "run").exists()


def test_nothing_there_yet(tmp_path: Path, ll: Path, rows: Path) -> None:
    case = Case(tmp_path, ll, rows)
    done = case.train("run", "--resume")
    assert done.code == 2, done.text
    assert "no complete checkpoint to resume from" in done.err
