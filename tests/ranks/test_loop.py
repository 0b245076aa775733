"""The whole run of the ranks: rows, learning rates, evaluation and resume equal one process."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.models import save_model
from tests.oracle import LOSS_RTOL, NORM_RTOL, AdamW, OracleStep, assert_close, run_oracle
from tests.ranks.steps import random_rows
from tests.run_ranks import run_ranks

ROWS = random_rows((5, 61, 17, 64, 3, 40, 9), seed=11)
EVAL_ROWS = random_rows((21, 4, 50, 33, 8), seed=12)
RATES = [5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0]
"""of six steps with two of warm-up, then linear; and of none after them"""


@dataclass
class ScheduledAdamW(AdamW):
    """The oracle's optimizer with the rates of above."""

    def step(self, params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> None:
        self.lr = RATES[self.t]
        super().step(params, grads)


def train_on_rank(
    rank: int, model: str, layout: dict[str, Any], folder: str, compute: Literal["fp32", "bf16"]
) -> None:
    """Two epochs of seven rows, three rows a step (one in the last of an epoch)."""
    from shardwise.config import Layout, Plan, Precision, Train
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.loop import run_train

    schedule = layout.pop("pipeline_schedule", "1f1b")
    train = Train(
        pipeline_schedule=schedule,
        epochs=2,
        global_batch=3,
        micro_batch=1,
        learning_rate=1e-2,
        warmup_steps=2,
        schedule="linear",
        weight_decay=0.1,
        eps=1e-3,
        clip_norm=0.5,
        save_every=4,
    )
    plan = Plan(
        model=model,
        task="full",
        layout=Layout(**layout),
        precision=Precision(compute=compute),
        train=train,
    )
    run_train(plan, Path(folder), Path(folder) / "work", build_mesh(plan.layout, "cpu"))


def prepare(model: Path, folder: Path) -> None:
    """What the launcher leaves for the ranks."""
    from shardwise.trainer.data.chat import Example
    from shardwise.trainer.data.store import write_rows
    from shardwise.trainer.loop import EVAL_ROWS as EVAL_FOLDER
    from shardwise.trainer.loop import MODEL_FILES, TRAIN_ROWS

    for name, rows in ((TRAIN_ROWS, ROWS), (EVAL_FOLDER, EVAL_ROWS)):
        examples = [Example(ids=ids, trained=[bool(mark) for mark in marks]) for ids, marks in rows]
        write_rows(folder / "work" / name, examples, seq_len=128, vocab_size=320)
    shutil.copytree(
        model, folder / "work" / MODEL_FILES, ignore=shutil.ignore_patterns("*.safetensors")
    )


def oracle(model: Path) -> list[OracleStep]:
    """The six steps, and a step on the evaluation rows after them."""
    from shardwise.config import Train
    from shardwise.trainer.data.order import Order

    order = Order(lengths=[len(ids) for ids, _ in ROWS], train=Train(epochs=2, global_batch=3))
    assert order.num_steps == 6
    batches = [[ROWS[row] for (row,) in order.of_step(step)] for step in range(6)]
    optimizer = ScheduledAdamW(lr=0.0, eps=1e-3, weight_decay=0.1)
    return run_oracle(model, [*batches, EVAL_ROWS], optimizer, clip_norm=0.5)


def saved_weights(checkpoint: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole weights of a checkpoint."""
    from shardwise.weights.index import open_index
    from shardwise.weights.load import read_into

    index = open_index(checkpoint / "model")
    whole = {key: torch.empty_like(param) for key, param in like.items()}
    for key, param in whole.items():
        read_into(param, tuple(slice(0, n) for n in param.shape), index.pieces[key], key)
    return whole


LAYOUTS = [
    {"fsdp": 2},
    {"dp": 2},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"pp": 2, "pipeline_schedule": "gpipe"},
    {"pp": 2},
    {"pp": 2, "pipeline_schedule": "zbv"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_equals_one_process_also_when_it_is_resumed(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Rates by the optimizer step (bug bank 17), evaluation (19), position of the rows (43)."""
    model, run = save_model("LL", tmp_path / "LL"), tmp_path / "run"
    run.mkdir()
    prepare(model, run)
    want = oracle(model)
    before = run_oracle(model, [EVAL_ROWS], AdamW(lr=0.0))[0].loss
    last = run / "checkpoints" / "step-000006"
    for attempt in ("whole", "resumed"):
        run_ranks(2, train_on_rank, str(model), layout, str(run), "fp32")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
        for record, step, rate in zip(records, want, RATES, strict=False):
            assert record["loss"] == pytest.approx(step.loss, rel=LOSS_RTOL), (attempt, record)
            assert record["grad_norm"] == pytest.approx(step.norm, rel=NORM_RTOL), (attempt, record)
            assert record["learning_rate"] == pytest.approx(rate)
        measured = json.loads((run / "measured.json").read_text())
        assert measured["eval_loss_after"] == pytest.approx(want[6].loss, rel=LOSS_RTOL)
        if attempt == "whole":
            assert measured["eval_loss_before"] == pytest.approx(before, rel=LOSS_RTOL)
        got = saved_weights(last, want[5].params)
        for key, param in want[5].params.items():
            assert_close(f"{key}, {attempt}", got[key], param)
        shutil.rmtree(last)  # the second attempt continues after step 4


def test_a_run_with_bf16_compute_keeps_fp32_weights(tmp_path: Path) -> None:
    """After training, few weights are numbers that bf16 has too; the losses are near fp32's."""
    model, run = save_model("LL", tmp_path / "LL"), tmp_path / "run"
    run.mkdir()
    prepare(model, run)
    want = oracle(model)
    run_ranks(2, train_on_rank, str(model), {"fsdp": 2}, str(run), "bf16")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record, step in zip(records, want, strict=False):
        assert record["loss"] == pytest.approx(step.loss, rel=5e-3)
    for key, param in saved_weights(run / "checkpoints" / "step-000006", want[5].params).items():
        assert (param == param.bfloat16().float()).float().mean() < 0.05, key
