"""What stays in fp32 where the rest is computed in bf16."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks.steps import RAGGED, _train_on_rank, random_rows, run_steps
from tests.ranks.test_parity import saved
from tests.run_ranks import run_ranks

ROWS = random_rows(RAGGED)
BF16: dict[str, Any] = {"micro_batch": 2, "compute": "bf16"}


def test_experts_on_other_ranks_are_weighted_in_fp32() -> None:
    """DeepSeek's router gives fp32 weights; rounded on their way the loss is off by 1e-5."""
    alone = run_steps(saved("DS"), {"fsdp": 2}, [ROWS], **BF16)[0][0]
    apart = run_steps(saved("DS"), {"fsdp": 2, "ep": 2}, [ROWS], **BF16)[0][0]
    assert apart.loss == pytest.approx(alone.loss, rel=3e-6)


def tally_dtypes_on_rank(rank: int, model_dir: str, layout: dict[str, int], rows: Any) -> set[str]:
    """dtypes in which this rank's stages received what other routers chose."""
    import torch

    from shardwise.parallel.pipeline import Stage

    seen: set[str] = set()
    forward = Stage.forward

    def watched(self: Any, x: Any, tally: torch.Tensor | None = None, **options: Any) -> Any:
        if tally is not None:
            seen.add(str(tally.dtype))
        return forward(self, x, tally, **options)

    with patch.object(Stage, "forward", watched):
        _train_on_rank(rank, model_dir, layout, [rows], dict(BF16))
    return seen


def test_choices_are_counted_in_fp32_in_a_pipeline() -> None:
    """bf16 counts to 256."""
    first, last = run_ranks(2, tally_dtypes_on_rank, str(saved("MOE")), {"pp": 2}, ROWS)
    assert first == set()
    assert last == {"torch.float32"}
