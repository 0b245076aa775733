"""Checkpoints: what one layout writes, any layout reads; nothing half-written is ever taken."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.e2e.bench import long_last
from tests.models import save_model
from tests.oracle import assert_close
from tests.ranks.steps import RAGGED, _collect, _micro_batches, random_rows
from tests.run_ranks import run_ranks

BATCHES = [random_rows(RAGGED, seed=seed) for seed in range(4)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"fsdp": 1},
    "fsdp2": {"fsdp": 2},
    "fsdp4": {"fsdp": 4},
    "tp2": {"tp": 2},
    "both": {"fsdp": 2, "tp": 2},
    "tp4": {"tp": 4},  # of two KV heads
    "pp2": {"pp": 2},
    "pp2 x fsdp2": {"pp": 2, "fsdp": 2, "zero": 1},
    "v": {"pp": 2, "pipeline_schedule": "zbv"},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "dp2 x fsdp2": {"dp": 2, "fsdp": 2},
    "ep2": {"fsdp": 2, "ep": 2},
    "ep2 x tp2": {"tp": 2, "ep": 2, "sequence_parallel": True},
}


def train_on_rank(
    rank: int, model: str, layout: dict[str, Any], resume: str | None, save: str | None, todo: range
) -> Any:
    """Train on the batches of `todo`, from a checkpoint and to a checkpoint if given."""
    import torch

    from shardwise.config import Layout, Plan, Train
    from shardwise.models.adapters import ADAPTER_CONFIG
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.checkpoint import States, load_optimizer, save_checkpoint
    from shardwise.trainer.optim import make_optimizer
    from shardwise.trainer.state import RowOrder, State
    from shardwise.trainer.step import train_step
    from shardwise.weights.load import load_model

    schedule = layout.pop("pipeline_schedule", "1f1b")
    train = Train(eps=1e-3, micro_batch=2, learning_rate=1e-3, pipeline_schedule=schedule)
    source = model if resume is None else f"{resume}/model"
    has_adapters = (Path(source) / ADAPTER_CONFIG).exists()
    task: Literal["full", "lora"] = "lora" if has_adapters else "full"
    plan = Plan(model=source, task=task, layout=Layout(**layout), train=train)
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, train)
    if resume is not None:
        load_optimizer(Path(resume), sharded, optimizer)
    steps = []
    for number in todo:
        micro = _micro_batches(BATCHES[number], plan, mesh)
        result = train_step(sharded, optimizer, micro, mesh, train, train.learning_rate)
        steps.append(_collect(sharded, result))
    if save is not None:
        order = RowOrder(num_rows=8, global_batch=8, seed=0, data_digest="")
        state = State(step=todo.stop, row_order=order, loss=steps[-1].loss)
        states = States.of(sharded, optimizer)
        save_checkpoint(Path(save), states, plan, state, Path(model))
    return steps


def run(model: Path, layout: str, todo: range, **paths: Path) -> Any:
    axes = LAYOUTS[layout]
    num_ranks = math.prod(axes.get(axis, 1) for axis in ("pp", "dp", "fsdp", "cp", "tp"))
    resume, save = paths.get("resume"), paths.get("save")
    names = [None if p is None else str(p) for p in (resume, save)]
    return run_ranks(num_ranks, train_on_rank, str(model), axes, *names, todo)


def _joined(ranks: list[Any]) -> list[tuple[float, dict[str, Any]]]:
    """Loss and parameters of each step, from all pipeline stages; fused matrices whole."""
    return [
        (steps[0].loss, _whole({n: p for step in steps for n, p in step.params.items()}))
        for steps in zip(*ranks, strict=True)
    ]


def _whole(params: dict[str, Any]) -> dict[str, Any]:
    """Put the parts together into which tensor parallelism takes fused matrices."""
    import torch

    found: dict[str, list[Any]] = {}
    for name, param in params.items():
        module, _, leaf = name.rpartition("_proj.")
        whole = f"{module.rpartition('.')[0]}.{leaf}" if "_proj." in module else name
        found.setdefault(whole, []).append(param)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary and a tie that make every cut uneven."""
    return save_model("LL321T", tmp_path_factory.mktemp("checkpoint") / "LL321T")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("both", "both"),
        ("fsdp2", "fsdp2"),
        ("both", "fsdp4"),
        ("tp2", "fsdp2"),
        ("fsdp4", "one"),
        ("one", "both"),
        ("tp4", "pp2"),
        ("pp2", "pp2"),
        ("pp2 x fsdp2", "tp4"),
        ("v", "fsdp2"),
        ("cp2", "v"),
    ],
)
def test_resume_on_the_same_or_another_layout(
    model: Path, tmp_path: Path, written: str, read: str
) -> None:
    """Steps 3 and 4 after a resume equal those of an uninterrupted run; bitwise on one layout."""
    check_resume(model, tmp_path, written, read)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("PHI", "tp2", "tp4"),  # fused matrices: parts by other parts, whole by parts, and back
        ("PHI", "fsdp2", "tp2"),
        ("PHI", "both", "pp2"),
        ("DS", "ep2", "pp2"),
        ("DS", "ep2 x tp2", "ep2"),
        ("OSS", "fsdp2", "ep2 x tp2"),
        ("LL", "dp2", "one"),
        pytest.param("LL", "one", "dp2", marks=pytest.mark.long),
        ("MOE", "ep2", "ep2"),
        pytest.param("MOE", "ep2", "one", marks=pytest.mark.long),
        pytest.param("LL", "dp2 x tp2", "dp2 x tp2", marks=pytest.mark.long),
        pytest.param("LL", "tp2", "one", marks=pytest.mark.long),
        pytest.param("LL", "tp2", "pp2", marks=pytest.mark.long),
        pytest.param("LL", "fsdp2", "tp2", marks=pytest.mark.long),
    ],
)
def test_resume_of_other_families(tmp_path: Path, name: str, written: str, read: str) -> None:
    check_resume(save_model(name, tmp_path / name), tmp_path, written, read)


def check_resume(model: Path, tmp_path: Path, written: str, read: str) -> None:
    import torch

    whole = _joined(run(model, written, range(4)))
    run(model, written, range(2), save=tmp_path / "step-000002")
    resumed = _joined(run(model, read, range(2, 4), resume=tmp_path / "step-000002"))
    for (loss, params), (want_loss, want) in zip(resumed, whole[2:], strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert set(params) == set(want)
        for name, param in want.items():
            if written == read:
                assert torch.equal(params[name], param), name
            else:
                assert_close(name, params[name], param)


def test_a_checkpoint_is_complete_or_not_listed(model: Path, tmp_path: Path) -> None:
    """A missing, short or unfinished checkpoint is never taken."""
    import shutil

    from shardwise.trainer.state import complete_checkpoints, why_incomplete

    folder = tmp_path / "checkpoints"
    run(model, "fsdp2", range(1), save=folder / "step-000001")
    for step in (2, 3, 4):
        shutil.copytree(folder / "step-000001", folder / f"step-{step:06d}")
    (folder / "step-000002" / "state.json").unlink()
    shard = next((folder / "step-000003" / "optimizer").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    next((folder / "step-000004" / "model").glob("*.safetensors")).unlink()
    (folder / ".step-000005.partial").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]
    assert "state.json" in str(why_incomplete(folder / "step-000002"))
    assert "bytes" in str(why_incomplete(folder / "step-000003"))
    assert "missing" in str(why_incomplete(folder / "step-000004"))


@pytest.mark.parametrize("layout", long_last(["dp2 x tp2", "tp4", "dp2", "dp2 x fsdp2", "pp2"], 2))
def test_every_number_is_written_once(model: Path, tmp_path: Path, layout: str) -> None:
    """Whoever else holds it: replicas, ranks with the same KV head, both ends of a pipeline."""
    from shardwise.models.read import read_facts
    from shardwise.trainer.state import why_incomplete
    from shardwise.weights.index import open_index

    run(model, layout, range(1), save=tmp_path / "step-000001")
    assert why_incomplete(tmp_path / "step-000001") is None
    count = read_facts(model).num_parameters
    for folder, times in (("model", 1), ("optimizer", 2)):
        index = open_index(tmp_path / "step-000001" / folder)
        assert index.num_bytes == 4 * times * count


def test_moments_of_another_checkpoint_beside_its_own_are_refused(
    model: Path, tmp_path: Path
) -> None:
    import shutil

    from tests.run_ranks import RankFailed

    run(model, "fsdp2", range(1), save=tmp_path / "step-000001")
    run(model, "one", range(1), save=tmp_path / "other")
    stray = next((tmp_path / "other" / "optimizer").iterdir())
    shutil.copyfile(stray, tmp_path / "step-000001" / "optimizer" / "stray.safetensors")
    with pytest.raises(RankFailed, match="a file of another checkpoint lies beside it"):
        run(model, "fsdp2", range(1, 2), resume=tmp_path / "step-000001")


def test_no_pickle_in_a_checkpoint(model: Path, tmp_path: Path) -> None:
    run(model, "both", range(1), save=tmp_path / "step-000001")
    suffixes = {path.suffix for path in (tmp_path / "step-000001").rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".yaml"}
