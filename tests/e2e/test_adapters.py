"""Adapters through the command line: planned, trained, resumed, exported, merged and served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.bench import Bench
from tests.e2e.shell import metrics, running, shardwise
from tests.e2e.test_serve import _serve, _wait_until_healthy

SETTINGS = [
    *("--set", "train.global_batch=4"),
    *("--set", "train.learning_rate=1e-2"),
    *("--set", "lora.rank=4"),
]


def run(folder: Path, *arguments: str | Path) -> str:
    done = shardwise(folder, *arguments, limit=100)
    assert done.code == 0, done.text
    return done.out


@pytest.mark.slow
def test_from_plan_to_answers(tmp_path: Path, ll: Path, rows: Path) -> None:
    """Trained on one layout, resumed on another, exported alone and merged; both answer alike, and
    not as the model did."""
    text = run(
        tmp_path,
        *("plan", ll, "--task", "lora", "--gpus", "cpu:2", "--layout", "tp=2"),
        *("--seq-len", "64", "--out", "plan.yaml", *SETTINGS),
    )
    assert "fine-tuning of adapters" in text
    assert "of them in adapters" in text
    train = ("train", "plan.yaml", "--data", rows, "--out", "run")
    run(tmp_path, *train, "--set", "train.max_steps=2")
    other = ("--set", "layout.tp=1", "--set", "layout.pp=2")
    text = run(tmp_path, *train, "--resume", *other, "--set", "train.epochs=3")
    assert "continuing after step 2 of 12" in text
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert "peak memory, rank 1" in run(tmp_path, "report", "run")
    assert "equal:" in run(tmp_path, "export", "run", "--out", "adapters", "--check")
    merged = ("export", "run", "--out", "merged", "--merge", "--dtype", "bf16", "--check")
    assert "equal:" in run(tmp_path, *merged)
    run(tmp_path, "export", "adapters", "--out", "again", "--merge", "--dtype", "fp32")
    answers = [
        answer(tmp_path / "1", tmp_path / "adapters", ["tp=2"]),
        answer(tmp_path / "2", tmp_path / "again", []),
        answer(tmp_path / "3", ll, []),
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def answer(folder: Path, model: Path, layout: list[str]) -> str:
    folder.mkdir()
    server = _serve(folder, model, layout)
    with running(server.process, folder):
        _wait_until_healthy(server)
        return server.answer(max_tokens=12, temperature=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["task=lora", "lora.targets=[q_proj,gate]"], ["'gate'", "gate_proj"]),
        (["lora.rank=4"], ["task=full", "task=lora"]),
        (["task=qlora"], ["'qlora'", "'lora'"]),
        (["task=lora", "lora.dropout=0.1"], ["'lora.dropout'", "rank"]),
    ],
    ids=str,
)
def test_bad_settings_of_adapters(bench: Bench, settings: list[str], words: list[str]) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    bench.assert_refused(bench.train(*options), *words)


def test_a_run_is_not_resumed_as_another(bench: Bench) -> None:
    """Neither with other adapters nor without them."""
    bench.plan["task"] = "lora"
    assert bench.train().code == 0
    for setting, words in (
        ("lora.rank=4", ["lora.rank=4", "16"]),
        ("task=full", ["task was lora", "full"]),
    ):
        done = bench.train("--resume", "--set", setting, "--set", "train.max_steps=2")
        assert done.code == 2, done.text
        assert len(done.err.splitlines()) == 1, done.text
        assert all(word in done.err for word in words), done.text
