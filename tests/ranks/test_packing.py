"""Rows packed into sequences train like rows alone, in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.trainer.data.order import Order, pack
from tests.models import save_model
from tests.oracle import LOSS_RTOL, NORM_RTOL, AdamW, Row, assert_close, run_oracle
from tests.ranks.layouts import PACKED_FAST, PACKED_SLOW, Case
from tests.ranks.steps import RAGGED, _micro_batches, random_rows, run_steps
from tests.ranks.test_loop import ROWS as RUN_ROWS
from tests.ranks.test_loop import prepare, saved_weights
from tests.ranks.test_parity import BATCHES, check_evaluation, check_parity, saved
from tests.run_ranks import run_ranks

PACKED: dict[str, Any] = {"packing": True, "seq_len": 80}
ROWS = [[(ids, [1] * len(ids)) for ids, _ in rows] for rows in BATCHES]
"""as the oracle's, but for the mark of the first token, which no row can train"""


@pytest.mark.parametrize("case", PACKED_FAST, ids=str)
def test_packed_rows_equal_rows_alone(case: Case) -> None:
    check_packed(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PACKED_SLOW, ids=str)
def test_packed_rows_equal_rows_alone_slow(case: Case) -> None:
    check_packed(case)


def check_packed(case: Case) -> None:
    check_parity(Case(model=case.model, layout=case.layout, train={**PACKED, **case.train}), ROWS)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_run_out_of_sequences_together(num_ranks: int) -> None:
    """Five sequences: no rank waits for another one, and every row counts once (bug bank 20)."""
    batch = random_rows((*RAGGED, 50))
    assert len(pack([len(ids) for ids, _ in batch], range(9), 80)) == 5
    want = run_oracle(saved("LL"), [batch], AdamW(lr=1e-3))[0]
    ranks = run_steps(saved("LL"), {"fsdp": num_ranks}, [batch], micro_batch=1, **PACKED)
    for (got,) in ranks:
        assert got.num_tokens == sum(RAGGED) + 50
        assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
    for key, grad in want.grads.items():
        assert_close(key, ranks[0][0].grads[key], grad)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiled_layers_train_packed_rows_the_same() -> None:
    """Attention, whose pieces are other ones each time, is left as it is."""
    batch = random_rows((31, 20, 9, 31, 14, 31, 31, 5))
    want = run_oracle(saved("LL"), [batch, batch[::-1]], AdamW(lr=1e-3, eps=1e-3))
    settings = {**PACKED, "micro_batch": 4, "compile": True, "eps": 1e-3}
    (got,) = run_steps(saved("LL"), {"fsdp": 1}, [batch, batch[::-1]], timeout_s=450, **settings)
    for step, expected in zip(got, want, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=LOSS_RTOL)
        for name, grad, _ in step.named:
            assert_close(name, grad, expected.grads[name])


@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_evaluation_of_packed_rows(layout: dict[str, Any]) -> None:
    check_evaluation(layout, **PACKED)


DOCUMENTS = [(8, 8), (5, 12, 3, 17, 27)]
"""tokens of the documents of one sequence (bug bank 8 and 47)"""


def documents(lengths: tuple[int, ...], *, changed: int | None) -> list[Row]:
    """Documents of 40 different ids each, one of them with another second token."""
    rows = []
    for number, length in enumerate(lengths):
        ids = [40 * number + (7 * i) % 39 for i in range(length)]
        if number == changed:
            ids[1] = 40 * number + 39
        rows.append((ids, [1] * length))
    return rows


def hidden_on_rank(
    rank: int, model_dir: str, layout: dict[str, Any], *versions: list[Row]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each version of the rows, ids [1, tokens] and what the head gets [1, tokens, hidden]."""
    from shardwise.config import Layout, Plan, Train
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.step import _run_body
    from shardwise.weights.load import load_model

    train = Train(packing=True, seq_len=64)
    plan = Plan(model=model_dir, task="full", layout=Layout(**layout), train=train)
    mesh = build_mesh(plan.layout, "cpu")
    model = load_model(plan, mesh, torch.float32).model
    found = []
    for rows in versions:
        (batch,) = _micro_batches(rows, plan, mesh)
        with torch.no_grad():
            found.append((batch.ids, _run_body(model, batch).logits))
    return found


@pytest.mark.parametrize("layout", [{"fsdp": 1}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("name", ["LL", "MI_SW", "Q2_SW", "Q3", "G3"])
def test_no_document_sees_another(name: str, layout: dict[str, int]) -> None:
    """One token of one document is changed: no state of any other one moves by a bit, and its own
    do."""
    changes = [(lengths, n) for lengths in DOCUMENTS for n in range(len(lengths))]
    versions = [documents(lengths, changed=who) for lengths, n in changes for who in (None, n)]
    ranks = run_ranks(layout.get("cp", 1), hidden_on_rank, str(saved(name)), layout, *versions)
    for number, (lengths, changed) in enumerate(changes):
        num_moved = 0
        for found in ranks:
            (_, before), (ids, after) = found[2 * number : 2 * number + 2]
            moved = (before != after).any(-1)
            own = ids // 40 == changed
            assert not (moved & ~own).any(), f"moved: {ids[moved & ~own]}"
            num_moved += int(moved.sum())
        assert num_moved == lengths[changed] - 1


def train_on_rank(rank: int, model: str, layout: dict[str, int], folder: str) -> None:
    """Two epochs of seven rows in four or five sequences, three of them a step."""
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.loop import run_train

    plan = packed_plan(model, layout)
    run_train(plan, Path(folder), Path(folder) / "work", build_mesh(plan.layout, "cpu"))


def packed_plan(model: str, layout: dict[str, int]) -> Any:
    from shardwise.config import Layout, Plan, Train

    train = Train(
        packing=True,
        seq_len=66,
        epochs=2,
        global_batch=3,
        micro_batch=1,
        learning_rate=1e-3,
        schedule="constant",
        eps=1e-3,
        clip_norm=None,
        save_every=1,
    )
    return Plan(model=model, task="full", layout=Layout(**layout), train=train)


@pytest.mark.parametrize(
    "layout",
    [{"fsdp": 2}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"pp": 2}, {"cp": 2}))],
    ids=str,
)
def test_a_run_of_packed_rows_goes_on_where_it_was(tmp_path: Path, layout: dict[str, int]) -> None:
    """Each row once an epoch, though ranks have unequally many sequences (bug bank 20); resumed
    within an epoch and at its end, the same steps follow (43)."""
    model, run = save_model("LL", tmp_path / "LL"), tmp_path / "run"
    run.mkdir()
    prepare(model, run)
    train = packed_plan(str(model), layout).train
    order = Order(lengths=[len(ids) for ids, _ in RUN_ROWS], train=train)
    steps = [[row for rows in order.of_step(step) for row in rows] for step in range(4)]
    assert order.num_steps == 4
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == list(range(7))
    batches = [[RUN_ROWS[row] for row in rows] for rows in steps]
    want = run_oracle(model, batches, AdamW(lr=1e-3, eps=1e-3))
    for done in (0, 1, 2, 3):
        for step in range(done + 1, 5):
            shutil.rmtree(run / "checkpoints" / f"step-{step:06d}", ignore_errors=True)
        run_ranks(2, train_on_rank, str(model), layout, str(run))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        for record, step in zip(records, want, strict=True):
            assert record["loss"] == pytest.approx(step.loss, rel=LOSS_RTOL), (done, record)
            assert record["grad_norm"] == pytest.approx(step.norm, rel=NORM_RTOL), (done, record)
            assert record["targets"] == step.num_tokens
        got = saved_weights(run / "checkpoints" / "step-000004", want[3].params)
        for key, param in want[3].params.items():
            assert_close(f"{key}, resumed after step {done}", got[key], param)
