"""Models and data of the end-to-end tests, made once; no test may leave a process behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import shell
from tests.e2e.bench import Bench
from tests.models import save_model
from tests.tokenizer import save_tokenizer


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Kill and report what a test leaves running."""
    yield
    left = shell.kill_all(tmp_path)
    assert not left, f"left running: {left}"


def _lively_model(name: str, folder: Path) -> Path:
    """A tiny model with a tokenizer whose greedy answers vary: its layers' matrices are scaled."""
    from safetensors.torch import load_file, save_file

    save_model(name, folder)
    save_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    for key, tensor in weights.items():
        if tensor.ndim == 2 and "embed" not in key:
            tensor.mul_(8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def ll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with 4 heads, 2 of them key/value heads."""
    return _lively_model("LL", tmp_path_factory.mktemp("models") / "LL")


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama with 9 heads, 3 of them key/value heads."""
    return _lively_model("ODD", tmp_path_factory.mktemp("models") / "ODD")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen rows for training."""
    return shell.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="session")
def eval_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five rows for evaluation."""
    return shell.write_rows(tmp_path_factory.mktemp("data") / "eval.jsonl", 5, first=100)


@pytest.fixture
def bench(tmp_path: Path, ll: Path, rows: Path) -> Iterator[Bench]:
    """A plan that would train."""
    train = {"seq_len": 64, "global_batch": 4, "max_steps": 1}
    plan = {"model": str(ll), "task": "full", "layout": {"fsdp": 2}, "train": train}
    yield Bench(tmp_path, ll, rows, plan)
