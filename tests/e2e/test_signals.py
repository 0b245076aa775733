"""What signals do to a training: stop it with a checkpoint, at once, or save and go on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

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
)
from tests.e2e.test_faults import START_S, Case, make_case

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_interrupted_command_says_so(tmp_path: Path, ll: Path, rows: Path, name: str) -> None:
    """One line on stderr says that the run was interrupted."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2})
    began = time.monotonic()
    process = start(case.folder, *case.arguments())
    with running(process, case.folder):
        wait_for(lambda: len(workers(case.folder)) == 2, START_S, "two ranks")
        process.send_signal(getattr(signal, name))
        done = finish(process, case.folder, 40, began)
    (line,) = done.err.splitlines()
    assert line.startswith("shardwise: interrupted")


@pytest.mark.slow
def test_a_training_that_is_told_twice_ends_at_once(tmp_path: Path, ll: Path, rows: Path) -> None:
    """A rank stands still, so that the step never ends; `--resume` ends the run with every step
    once."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2})
    process = start(case.folder, *case.arguments(), env=case.fault("train_step:sleep:3"))
    began = time.monotonic()
    with running(process, case.folder):
        wait_for((case.folder / "fault-time").exists, START_S + 20, "step 3")
        process.terminate()
        said = "stopping after this step, with a checkpoint; once more stops at once"
        wait_for(lambda: said in (case.folder / "stdout").read_text(), 10, said)
        time.sleep(1)
        assert len(workers(case.folder)) == 2
        process.terminate()
        asked = time.monotonic()
        done = finish(process, case.folder, 40, began)
        assert time.monotonic() - asked < 10, done.text
        assert done.code != 0, done.text
        assert_none_left(case.folder)
    case.assert_resumes_after(2)


def _interrupted(case: Case, name: str, env: dict[str, str]) -> Done:
    """A training that gets a signal after its first step."""
    process = start(case.folder, *case.arguments(), env=env)
    began = time.monotonic()
    with running(process, case.folder):
        wait_for((case.run / "metrics.jsonl").exists, START_S + 20, "step 1")
        process.send_signal(getattr(signal, name))
        return finish(process, case.folder, 60, began)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_last(["SIGTERM", "SIGINT"], 1))
def test_a_training_that_is_told_to_stop_saves_first(
    tmp_path: Path, ll: Path, rows: Path, name: str
) -> None:
    """After the step that is under way, whenever the plan would save; nothing is trained twice."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2}, save_every=None, max_steps=6, epochs=2)
    done = _interrupted(case, name, case.fault("train_step:slow:5"))
    assert done.code == 130, done.text
    assert_none_left(case.folder)
    (step,) = listed_checkpoints(case.run)
    assert 1 <= step < 6
    assert f"stopped after step {step} of 6, as asked" in done.out
    assert done.err == (
        f"shardwise: interrupted; all ranks have been stopped; step-00000{step} is complete: "
        "go on with --resume.\n"
    )
    before = metrics(case.run)
    assert [record["step"] for record in before] == list(range(1, step + 1))
    done = shardwise(case.folder, *case.arguments("--resume"))
    assert (done.code, done.err) == (0, ""), done.text
    assert metrics(case.run)[:step] == before
    assert [record["step"] for record in metrics(case.run)] == [1, 2, 3, 4, 5, 6]
    assert listed_checkpoints(case.run) == [step, 6]


@pytest.mark.slow
def test_a_training_that_is_told_to_save_goes_on(tmp_path: Path, ll: Path, rows: Path) -> None:
    """SIGUSR1: one more checkpoint, and the run ends as it would have."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2}, save_every=None, max_steps=6, epochs=2)
    done = _interrupted(case, "SIGUSR1", case.fault("train_step:slow:5"))
    assert (done.code, done.err) == (0, ""), done.text
    early, last = listed_checkpoints(case.run)
    assert 1 <= early < last == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_comes_while_the_ranks_start(
    tmp_path: Path, ll: Path, rows: Path, name: str
) -> None:
    """SIGUSR1 kills nobody; SIGTERM ends the command with a line."""
    case = make_case(tmp_path, ll, rows, {"fsdp": 2}, save_every=None)
    process = start(case.folder, *case.arguments())
    began = time.monotonic()
    with running(process, case.folder):
        wait_for(lambda: workers(case.folder), START_S, "a rank")
        process.send_signal(getattr(signal, name))
        done = finish(process, case.folder, 60, began)
    assert_none_left(case.folder)
    assert done.code == (0 if name == "SIGUSR1" else 130), done.text
