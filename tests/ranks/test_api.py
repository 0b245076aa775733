"""The public functions, as a Python user calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardwise
from tests.models import save_model
from tests.run_ranks import run_ranks


def load_on_rank(rank: int, model_dir: str) -> Any:
    """`shardwise.load` inside a process group of the caller's."""
    plan = shardwise.Plan(model=model_dir, task="serve", layout=shardwise.Layout(tp=2))
    model = shardwise.load(plan)
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 2, 3]])).logits


def load_alone(rank: int, model_dir: str) -> Any:
    """`shardwise.load` where nobody has made a process group."""
    import torch.distributed as dist

    dist.destroy_process_group()
    plan = shardwise.Plan(model=model_dir, task="serve", layout=shardwise.Layout())
    with torch.no_grad():
        return shardwise.load(plan)(input_ids=torch.tensor([[1, 2, 3]])).logits


def test_load_gives_a_model_with_whole_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model("Q3_321", tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = plain(input_ids=torch.tensor([[1, 2, 3]])).logits
    got = [*run_ranks(2, load_on_rank, str(folder)), *run_ranks(1, load_alone, str(folder))]
    for logits in got:
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


def test_every_public_name_is_there() -> None:
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None
        if callable(getattr(shardwise, name)):
            assert getattr(shardwise, name).__doc__
