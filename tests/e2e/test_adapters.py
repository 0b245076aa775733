"""Adapters through the command line: planned, trained, resumed, exported, merged and served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.e2e.bench import Bench
from tests.e2e.shell import metrics, running, shardwise
from tests.e2e.test_serve import start_server, wait_until_healthy
from tests.models import save_adapters

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
    server = start_server(folder, model, layout)
    with running(server.process, folder):
        wait_until_healthy(server)
        return server.answer(max_tokens=12, temperature=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["task=lora", "lora.targets=[q_proj,gate]"], ["'gate'", "gate_proj"]),
        (["lora.rank=4"], ["task=full", "task=lora"]),
        (["task=dora"], ["'dora'", "'lora'"]),
        (["task=qlora", "layout.tp=2", "layout.fsdp=1"], ["tp=2", "1 blocks of 64 inputs"]),
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
        ("task=qlora", ["lora.quantize=nf4", "None"]),
        ("task=full", ["task was lora", "full"]),
    ):
        done = bench.train("--resume", "--set", setting, "--set", "train.max_steps=2")
        assert done.code == 2, done.text
        assert len(done.err.splitlines()) == 1, done.text
        assert all(word in done.err for word in words), done.text


@pytest.mark.slow
def test_the_model_below_a_run_may_move_but_not_change(
    bench: Bench, odd: Path, tmp_path: Path
) -> None:
    """Other weights are refused on a resume, an export and when served, the same ones at another
    place are not; nothing that was trained is lost on the way."""
    model = tmp_path / "LL"
    shutil.copytree(bench.model, model)
    bench.plan |= {"task": "lora", "model": str(model)}
    assert bench.train().code == 0
    checkpoint = bench.out / "checkpoints" / "step-000001"
    trained = sorted(file.read_bytes() for file in (checkpoint / "model").glob("*.safetensors"))
    more = ("--resume", "--set", "train.max_steps=2")
    done = bench.train(*more, "--set", f"model={odd}")
    assert done.code == 2, done.text
    assert "were trained on" in done.err
    moved = model.rename(tmp_path / "moved")
    done = bench.run("export", bench.out, "--out", "x")
    assert done.code == 2
    assert "is not there" in done.err
    assert bench.train("--set", f"model={moved}").code == 2  # not over what there is
    kept = sorted(file.read_bytes() for file in (checkpoint / "model").glob("*.safetensors"))
    assert kept == trained
    assert bench.train(*more, "--set", f"model={moved}").code == 0
    assert bench.run("export", bench.out, "--out", "adapters").code == 0
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(moved)
    file = moved / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    done = bench.run("export", bench.out, "--out", "y", "--merge")
    assert done.code == 2
    assert "were trained on" in done.err


@pytest.mark.slow
def test_adapters_keep_their_own_chat_template(bench: Bench, tmp_path: Path) -> None:
    """What rows were rendered with goes along: to the checkpoint, the export, the merged model."""
    adapters = save_adapters(bench.model, tmp_path / "start")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(bench.model / name, adapters / name)
    template = (adapters / "chat_template.jinja").read_text() + "{# own #}"
    (adapters / "chat_template.jinja").write_text(template)
    bench.plan |= {"task": "lora", "model": str(adapters)}
    assert bench.train().code == 0
    assert bench.run("export", bench.out, "--out", "alone").code == 0
    assert bench.run("export", bench.out, "--out", "merged", "--merge").code == 0
    for name in ("alone", "merged"):
        assert (tmp_path / name / "chat_template.jinja").read_text() == template


@pytest.mark.slow
def test_a_resumed_plan_takes_the_adapters_of_its_run(bench: Bench) -> None:
    """Also where it says nothing of them: they are what is planned and saved."""
    bench.plan |= {"task": "lora", "lora": {"rank": 2, "targets": ["v_proj"]}}
    assert bench.train().code == 0
    del bench.plan["lora"]
    assert bench.train("--resume", "--set", "train.max_steps=2").code == 0
    saved = yaml.safe_load((bench.out / "checkpoints/step-000002/plan.yaml").read_text())
    assert saved["lora"] == {"rank": 2, "alpha": 32.0, "targets": ["v_proj"]}
