"""A training that a rank ruins, or that somebody kills, ends soon, says why and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import long_last
from tests.e2e.shell import (
    Done,
    assert_none_left,
    finish,
    listed_checkpoints,
    metrics,
    running,
    shardwise,
    start,
    wait_for,
    workers,
    write_plan,
)

pytestmark = pytest.mark.timeout(240)

TRAIN = {"seq_len": 64, "global_batch": 4, "micro_batch": 2, "learning_rate": 1e-3}
START_S = 30.0
"""a loaded machine needs some of this before the first step"""
END_S = 30.0
"""after the fault, everything must be over"""

SITECUSTOMIZE = '''
"""Ruin one function of the training loop on one rank."""
import os
import signal
import time

if os.environ.get("FAULT") and os.environ.get("RANK") == os.environ.get("FAULT_RANK", "1"):
    import shardwise.trainer.loop as loop
    import shardwise.trainer.saver as saver

    def fail(kind):
        with open(os.environ["FAULT_FILE"], "w") as file:
            file.write(str(time.time()))
        if kind == "raise":
            raise ArithmeticError("injected fault 4711")
        if kind == "exit":
            os._exit(1)
        if kind == "exit0":
            os._exit(0)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "sleep":
            time.sleep(1000)

    def wrap(name, kind, call, after=False):
        module = saver if name == "save_checkpoint" else loop
        real, calls = getattr(module, name), []

        def ruined(*args, **kwargs):
            calls.append(1)
            if kind == "slow":
                time.sleep(call / 10)
                return real(*args, **kwargs)
            if len(calls) == call and not after:
                fail(kind)
            result = real(*args, **kwargs)
            if len(calls) == call and after:
                fail(kind)
            return result

        setattr(module, name, ruined)

    name, kind, call = os.environ["FAULT"].split(":")
    wrap(name, kind, int(call))
'''


@dataclass
class Case:
    """A training of four steps with a checkpoint after each."""

    folder: Path
    plan: Path
    rows: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def arguments(self, *more: str | Path) -> list[str | Path]:
        return ["train", self.plan, "--data", self.rows, "--out", self.run, *more]

    def fault(self, fault: str, rank: int = 1) -> dict[str, str]:
        """The environment that lets `function:kind:call` fail on a rank."""
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
            "FAULT": fault,
            "FAULT_RANK": str(rank),
            "FAULT_FILE": str(self.folder / "fault-time"),
        }

    def ruin(self, fault: str, *more: str, rank: int = 1, allowed: float = END_S) -> Done:
        """Train with a fault; everything must have ended in time after it."""
        limit = START_S + allowed
        done = shardwise(
            self.folder, *self.arguments(*more), env=self.fault(fault, rank), limit=limit
        )
        ended = time.time()
        assert_none_left(self.folder)
        fault_time = float((self.folder / "fault-time").read_text())
        assert ended - fault_time < allowed
        assert done.code != 0, done.text
        return done

    def assert_resumes_after(self, step: int, *, recorded: int | None = None) -> None:
        """The newest complete checkpoint is of `step`, and training goes on from there to 4."""
        assert listed_checkpoints(self.run) == list(range(1, step + 1))
        before = (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        done = shardwise(self.folder, *self.arguments("--resume"))
        assert (done.code, done.err) == (0, ""), done.text
        assert listed_checkpoints(self.run) == [1, 2, 3, 4]
        again = range(step + 1, (recorded or step) + 1)
        steps = [record["step"] for record in metrics(self.run)]
        assert steps in ([1, 2, 3, 4], [*range(1, step + 1), *again, *range(step + 1, 5)])
        after = (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert after[:step] == before[:step], "steps before the checkpoint were trained again"
        partial = [path for path in self.run.rglob("*") if "partial" in path.name]
        assert partial == []


def make_case(folder: Path, model: Path, rows: Path, layout: dict[str, int], **train: Any) -> Case:
    settings = {**TRAIN, "max_steps": 4, "save_every": 1, "async_save": False, **train}
    return Case(folder, write_plan(folder / "plan.yaml", model, layout, train=settings), rows)


@pytest.fixture
def behind(tmp_path: Path, ll: Path, rows: Path) -> Case:
    """The same, that writes its checkpoints while it goes on."""
    return make_case(tmp_path, ll, rows, {"fsdp": 2}, async_save=True)


@pytest.fixture
def case(tmp_path: Path, ll: Path, rows: Path) -> Case:
    """A case with fsdp=2."""
    return make_case(tmp_path, ll, rows, {"fsdp": 2})


def _assert_names_rank_1(done: Done, *last: str) -> None:
    """The last line on stderr names rank 1 and why; every traceback shown is rank 1's."""
    lines = done.err.splitlines()
    assert lines, done.text
    assert "rank 1" in lines[-1], done.text
    for text in last:
        assert text in lines[-1], done.text
    assert "[rank 0]" not in done.err, done.text


def test_a_rank_that_raises(case: Case) -> None:
    """The error of rank 1 in step 3 is reported with its traceback; step 2 can be resumed."""
    done = case.ruin("train_step:raise:3")
    _assert_names_rank_1(done, "injected fault 4711")
    assert "Traceback" in done.err
    assert "ArithmeticError: injected fault 4711" in done.err
    assert listed_checkpoints(case.run) == [1, 2]
    assert [record["step"] for record in metrics(case.run)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("layout", long_last([{"fsdp": 2}, {"tp": 2}], 1), ids=str)
def test_training_goes_on_after_a_fault(
    tmp_path: Path, ll: Path, rows: Path, layout: dict[str, int]
) -> None:
    """`--resume` continues from the step before the one that failed."""
    case = make_case(tmp_path, ll, rows, layout)
    _assert_names_rank_1(case.ruin("train_step:raise:3"), "injected fault 4711")
    case.assert_resumes_after(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word"),
    long_last([("kill", "SIGKILL"), ("raise", "injected fault 4711"), ("exit", "exit code 1")], 1),
)
def test_one_of_four_ranks_fails(
    tmp_path: Path, ll: Path, rows: Path, kind: str, word: str
) -> None:
    """Of four ranks the one that failed is named, and all are gone."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2, "tp": 2})
    _assert_names_rank_1(case.ruin(f"train_step:{kind}:3"), word)
    assert listed_checkpoints(case.run) == [1, 2]


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_fails_to_load_its_rows(case: Case) -> None:
    """An error between two steps is reported as one within a step is."""
    _assert_names_rank_1(case.ruin("micro_batches:raise:3"), "injected fault 4711")
    case.assert_resumes_after(2)


@pytest.mark.long
@pytest.mark.slow
def test_a_first_rank_that_raises(case: Case) -> None:
    """The error of rank 0 is reported just as well."""
    done = case.ruin("train_step:raise:3", rank=0)
    assert "rank 0" in done.err.splitlines()[-1], done.text
    assert "injected fault 4711" in done.err.splitlines()[-1]
    assert "[rank 1]" not in done.err
    assert listed_checkpoints(case.run) == [1, 2]


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_exits(case: Case) -> None:
    """A rank that ends by itself, with exit code 1 and no word, is named with its code."""
    done = case.ruin("train_step:exit:3")
    _assert_names_rank_1(done, "exit code 1")
    case.assert_resumes_after(2)


@pytest.mark.slow
def test_a_rank_that_exits_as_if_all_were_well(case: Case) -> None:
    """A rank that ends early with exit code 0 has failed too, and is named."""
    done = case.ruin("train_step:exit0:3")
    _assert_names_rank_1(done)
    assert listed_checkpoints(case.run) == [1, 2]


@pytest.mark.slow
def test_a_rank_that_is_killed(case: Case) -> None:
    """A rank that SIGKILL ended, as the kernel does when memory runs out, is named."""
    done = case.ruin("train_step:kill:3")
    _assert_names_rank_1(done, "SIGKILL")
    case.assert_resumes_after(2)


STILL = ["stop", "sleep"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", STILL)
def test_a_rank_that_stands_still(case: Case, kind: str) -> None:
    """A rank that is stopped or hangs ends the run after train.timeout_s; it can be resumed."""
    done = case.ruin(f"train_step:{kind}:3", "--set", "train.timeout_s=8", allowed=8 + END_S)
    assert "8000" in done.err or "timeout_s" in done.err, done.text
    assert "Timed out" in done.err or "timeout_s" in done.err, done.text
    case.assert_resumes_after(2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STILL)
def test_a_rank_that_stands_still_is_named(case: Case, kind: str) -> None:
    """It is rank 1 that did not answer, and train.timeout_s that says how long to wait."""
    done = case.ruin(f"train_step:{kind}:3", "--set", "train.timeout_s=8", allowed=8 + END_S)
    last = done.err.splitlines()[-1]
    assert "rank 1" in last, done.text
    assert "train.timeout_s" in last, done.text


@pytest.mark.long
@pytest.mark.slow
def test_resume_says_where_it_continues(case: Case) -> None:
    """The checkpoint that training continues from is printed."""
    case.ruin("train_step:raise:3")
    done = shardwise(case.folder, *case.arguments("--resume"))
    assert done.code == 0, done.text
    assert "step-000002" in done.out or "step 2" in done.out, done.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_last(["kill", "raise"], 1))
def test_a_rank_that_fails_while_saving(case: Case, kind: str) -> None:
    """The checkpoint that rank 1 could not write is not listed; the one before is resumed."""
    done = case.ruin(f"save_checkpoint:{kind}:2")
    if kind == "raise":
        _assert_names_rank_1(done, "injected fault 4711")
    case.assert_resumes_after(1, recorded=2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", long_last([0, 1], 1))
def test_a_rank_that_raises_while_a_checkpoint_is_written(behind: Case, rank: int) -> None:
    """The checkpoint before the step that failed is completed all the same."""
    done = behind.ruin("train_step:raise:3", rank=rank)
    assert "injected fault 4711" in done.err, done.text
    behind.assert_resumes_after(2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_last(["raise", "kill"], 1))
def test_a_rank_that_fails_while_it_writes_behind(behind: Case, kind: str) -> None:
    """The training ends, and goes on after the checkpoint that was complete before."""
    done = behind.ruin(f"save_checkpoint:{kind}:2")
    _assert_names_rank_1(done, "injected fault 4711" if kind == "raise" else "SIGKILL")
    behind.assert_resumes_after(1, recorded=3)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_saving_is_named(case: Case) -> None:
    """Of a killed rank and one that lost its connection to it, the killed one is named."""
    _assert_names_rank_1(case.ruin("save_checkpoint:kill:2"), "SIGKILL")


@pytest.mark.long
@pytest.mark.slow
def test_resume_leaves_one_record_a_step(case: Case) -> None:
    """Steps that are trained again replace their records in metrics.jsonl."""
    case.ruin("save_checkpoint:raise:2")
    done = shardwise(case.folder, *case.arguments("--resume"))
    assert done.code == 0, done.text
    assert [record["step"] for record in metrics(case.run)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_two_trainings_at_once(tmp_path: Path, ll: Path, rows: Path) -> None:
    """Two runs with the defaults do not get in each other's way."""
    cases = [make_case(tmp_path / name, ll, rows, {"fsdp": 2}, max_steps=2) for name in ("a", "b")]
    began = time.monotonic()
    first, second = (start(case.folder, *case.arguments()) for case in cases)
    with running(first, cases[0].folder), running(second, cases[1].folder):
        for process, case in zip((first, second), cases, strict=True):
            done = finish(process, case.folder, 90, began)
            assert (done.code, done.err) == (0, ""), done.text
            assert listed_checkpoints(case.run) == [1, 2]
    assert_none_left(tmp_path)


def listed_checkpoints_now(run: Path) -> int:
    """How many checkpoints a run that is still going has finished."""
    return len(list((run / "checkpoints").glob("step-*/state.json")))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "training"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_the_command_is_killed(
    tmp_path: Path, ll: Path, rows: Path, name: str, moment: str
) -> None:
    """Its ranks end within ten seconds, and it does not end as if all were well."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2}, max_steps=100000, epochs=100000)
    began = time.monotonic()
    process = start(case.folder, *case.arguments())
    with running(process, case.folder):
        if moment == "starting":
            wait_for(lambda: len(workers(case.folder)) == 2, START_S, "two ranks")
        else:
            wait_for(lambda: listed_checkpoints_now(case.run) >= 2, START_S + 20, "two steps")
        ranks = workers(case.folder)
        assert sorted(ranks) == [0, 1]
        process.send_signal(getattr(signal, name))
        killed = time.monotonic()
        done = finish(process, case.folder, 40, began)
        assert_none_left(case.folder, 10)
        assert time.monotonic() - killed < 10
    assert done.code != 0, done.text
    assert "Traceback" not in done.err, done.text
    if name != "SIGKILL":
        assert done.code == 130
        assert len(done.err.splitlines()) <= 1, done.text


@pytest.mark.slow
def test_the_newest_checkpoints_and_the_best_stay(tmp_path: Path, ll: Path, rows: Path) -> None:
    """The best is that of the lowest evaluation loss, with so high a rate not the last one."""
    case = make_case(
        tmp_path, ll, rows, {"fsdp": 2}, keep=2, max_steps=7, epochs=2, learning_rate=0.05
    )
    done = shardwise(case.folder, *case.arguments("--eval-data", rows))
    assert (done.code, done.err) == (0, ""), done.text
    lines = (case.run / "evaluations.jsonl").read_text().splitlines()
    losses = {record["step"]: record["eval_loss"] for record in map(json.loads, lines)}
    assert list(losses) == [0, 1, 2, 3, 4, 5, 6, 7]
    del losses[0]
    best = min(losses, key=lambda step: losses[step])
    assert listed_checkpoints(case.run) == sorted({best, 6, 7})
    assert not list((case.run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_checkpoint_that_the_disk_has_changed(tmp_path: Path, ll: Path, rows: Path) -> None:
    """One bit of a file of the right size: named, and the checkpoint before it is still there."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2}, max_steps=2)
    assert shardwise(case.folder, *case.arguments()).code == 0
    checkpoint = case.run / "checkpoints" / "step-000002"
    file = max((checkpoint / "optimizer").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    more = case.arguments("--resume", "--set", "train.max_steps=3")
    done = shardwise(case.folder, *more)
    assert done.code == 2, done.text
    (line,) = done.err.splitlines()
    assert f"{file} is not what was written" in line
    checkpoint.rename(tmp_path / "away")
    done = shardwise(case.folder, *more)
    assert done.code == 0, done.text
    assert "continuing after step 1 of 3" in done.out
    assert listed_checkpoints(case.run) == [1, 2, 3]
