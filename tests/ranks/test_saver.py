"""Checkpoints that are written while training goes on: what they hold, and what they do not hold
up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import long_last
from tests.models import save_model
from tests.ranks.test_loop import prepare
from tests.run_ranks import RankFailed, run_ranks


def train_on_rank(
    rank: int, model: str, layout: dict[str, Any], folder: str, hook: str, more: dict[str, Any]
) -> int:
    """Six steps with a checkpoint after each; how many were done when the first was complete."""
    import threading
    import time

    from shardwise.config import Layout, Plan, Train
    from shardwise.errors import UserError
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer import loop, saver

    steps_done = 0
    complete_at: list[int] = []
    third_begins = threading.Event()
    train_step, save_checkpoint = loop.train_step, saver.save_checkpoint

    def counted(*args: Any) -> Any:
        nonlocal steps_done
        if steps_done == 2:
            third_begins.set()
        if hook == "fails while copying" and steps_done == 3:
            raise ArithmeticError("injected fault 4711")
        result = train_step(*args)
        steps_done += 1
        return result

    def hooked(*args: Any) -> None:
        is_behind = threading.current_thread() is not threading.main_thread()
        while hook == "late" and is_behind and steps_done <= args[3].step:
            time.sleep(0.01)  # until the next step has changed everything
        if hook == "hold up" and not third_begins.wait(8):
            raise TimeoutError("training waits for a checkpoint")
        if hook == "fail" and args[0].name == "step-000002" and rank == 1:
            raise OSError(28, "No space left on device")
        save_checkpoint(*args)
        complete_at.append(steps_done)

    def put(copies: Any, checkpoint: Path, names: Any) -> None:
        if hook == "fails while copying":
            time.sleep(100)
        if hook == "no copy" and checkpoint.name == "step-000002" and rank == 1:
            raise UserError("no room there")
        put_files(copies, checkpoint, names)

    put_files = saver.Copies.put
    saver.Copies.put = put
    loop.train_step, saver.save_checkpoint = counted, hooked
    train = Train(epochs=2, global_batch=3, micro_batch=1, learning_rate=1e-2, **more)
    plan = Plan(model=model, task="full", layout=Layout(**layout), train=train)
    loop.run_train(plan, Path(folder), Path(folder) / "work", build_mesh(plan.layout, "cpu"))
    return complete_at[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("LL321T", tmp_path_factory.mktemp("saver") / "LL321T")


def run(model: Path, folder: Path, layout: dict[str, Any], hook: str = "", **more: Any) -> Any:
    folder.mkdir()
    prepare(model, folder)
    more.setdefault("save_every", 1)
    num_ranks = 4 if len(layout) > 1 else 2
    return run_ranks(num_ranks, train_on_rank, str(model), layout, str(folder), hook, more)


def content(run_dir: Path) -> dict[str, Any]:
    """What every checkpoint holds."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted((run_dir / "checkpoints").rglob("*")):
        name = str(file.relative_to(run_dir))
        if file.suffix == ".safetensors":  # whose headers come in any order
            for key, tensor in load_file(file).items():
                found[f"{name}: {key}"] = tensor.numpy().tobytes()
        elif file.name == "state.json":
            found[name] = json.loads(file.read_text())
            found[name] |= {"digests": None, "files": None, "run": None}
        elif file.is_file() and file.name not in ("plan.yaml", "metrics.jsonl"):
            found[name] = file.read_bytes()
    return found


@pytest.mark.parametrize(
    "layout",
    long_last([{"fsdp": 2}, {"pp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "pp": 2}], 2),
    ids=str,
)
def test_what_is_written_behind_is_what_was_there(
    model: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Bit for bit the files of a training that stands still for them, though parameters and moments
    change while they are written."""
    run(model, tmp_path / "behind", layout, "late")
    run(model, tmp_path / "waits", layout, async_save=False)
    behind, waits = content(tmp_path / "behind"), content(tmp_path / "waits")
    assert sum(name.endswith("state.json") for name in waits) == 6
    assert [name for name, value in waits.items() if behind.get(name) != value] == []
    assert behind.keys() == waits.keys()


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(model: Path, tmp_path: Path) -> None:
    """The first one, of step 2, is not written until the third step has begun. Training that waits
    for it never gets there."""
    ranks = run(model, tmp_path / "run", {"fsdp": 2}, "hold up", save_every=2)
    assert all(done >= 2 for done in ranks)
    with pytest.raises(RankFailed, match="training waits for a checkpoint"):
        run(model, tmp_path / "again", {"fsdp": 2}, "hold up", save_every=2, async_save=False)


def test_a_save_that_fails_behind_ends_the_training(model: Path, tmp_path: Path) -> None:
    """And what was complete before stays."""
    from shardwise.trainer.state import complete_checkpoints

    with pytest.raises(RankFailed, match="No space left on device"):
        run(model, tmp_path / "run", {"fsdp": 2}, "fail")
    names = [path.name for path in complete_checkpoints(tmp_path / "run")]
    assert names == ["step-000001"]


@pytest.mark.slow
def test_only_the_newest_and_the_best_stay(model: Path, tmp_path: Path) -> None:
    from shardwise.trainer.state import complete_checkpoints

    run(model, tmp_path / "run", {"fsdp": 2}, keep=1)
    names = {path.name for path in complete_checkpoints(tmp_path / "run")}
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    losses = [json.loads(line) for line in lines if json.loads(line)["step"] > 0]
    best = min(losses, key=lambda record: record["eval_loss"])["step"]
    assert names == {"step-000006", f"step-{best:06d}"}


def test_a_copy_is_whole_or_none(model: Path, tmp_path: Path) -> None:
    """Also if one rank cannot bring its share there."""
    from shardwise.trainer.copies import Copies

    there = tmp_path / "there"
    run(model, tmp_path / "run", {"fsdp": 2}, "no copy", copy_to=str(there), save_every=2)
    copies = Copies(str(there))
    assert copies.names() == ["step-000006", "step-000004", "step-000002"]
    assert [name for name in copies.names() if copies.state(name) is not None] == [
        "step-000006",
        "step-000004",
    ]
    assert not (there / "step-000002" / "state.json").exists()


@pytest.mark.slow
def test_a_failure_does_not_wait_for_a_copy(model: Path, tmp_path: Path) -> None:
    """Nor is it taken for that of a rank which did not answer."""
    from shardwise.trainer.state import complete_checkpoints

    more = {"copy_to": str(tmp_path / "there"), "save_every": 2}
    began = time.monotonic()
    with pytest.raises(RankFailed, match="injected fault 4711"):
        run(model, tmp_path / "run", {"fsdp": 2}, "fails while copying", **more)
    assert time.monotonic() - began < 50
    names = [path.name for path in complete_checkpoints(tmp_path / "run")]
    assert names == ["step-000002"]
