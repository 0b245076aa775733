"""The loss is one mean over all trained tokens of the step, however the step is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import save_model
from tests.oracle import LOSS_RTOL, AdamW, assert_close, run_oracle
from tests.ranks.steps import RAGGED, random_rows, run_steps

CUTS = [  # ranks and rows of a micro-batch: eight rows a step, five ways (bug bank 14)
    ({"fsdp": 1}, 1),
    ({"fsdp": 1}, 2),
    ({"fsdp": 2}, 1),
    ({"fsdp": 2}, 2),
    ({"fsdp": 4}, 1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("LL", tmp_path_factory.mktemp("tokens") / "LL")


def test_accumulation_and_ranks_with_uneven_token_counts(model: Path) -> None:
    batch = random_rows(RAGGED)
    want = run_oracle(model, [batch], AdamW(lr=1e-3))[0]
    for layout, micro_batch in CUTS:
        got = run_steps(model, layout, [batch], micro_batch=micro_batch)[0][0]
        assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL), (layout, micro_batch)
        for key, grad in want.grads.items():
            assert_close(f"{key} {layout} {micro_batch}", got.grads[key], grad)


def test_tensor_parallel_does_not_multiply_the_loss(model: Path) -> None:
    """The reported loss and gradients are those of one process (bug bank 1)."""
    batch = random_rows(RAGGED)
    want = run_oracle(model, [batch], AdamW(lr=1e-3))[0]
    got = run_steps(model, {"tp": 2}, [batch], micro_batch=8)[0][0]
    assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
    assert got.norm == pytest.approx(want.norm, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_run_out_of_rows_together(model: Path, num_ranks: int) -> None:
    """Seven rows: no rank waits for another one, and every row counts once (bug bank 20)."""
    batch = random_rows(RAGGED[:7])
    want = run_oracle(model, [batch], AdamW(lr=1e-3))[0]
    for micro_batch in (1, 2):
        ranks = run_steps(model, {"fsdp": num_ranks}, [batch], micro_batch=micro_batch)
        for (got,) in ranks:
            assert got.num_tokens == sum(RAGGED[:7])
            assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
        for key, grad in want.grads.items():
            assert_close(key, ranks[0][0].grads[key], grad)


def test_rows_without_targets_add_nothing(model: Path) -> None:
    """A masked row, a masked micro-batch and a masked rank: no NaN, no hang (bug bank 16 a-c)."""
    batch = random_rows(RAGGED)
    for masked in ([3], [2, 3], [1, 3, 5, 7]):
        rows = [
            (ids, [0] * len(ids)) if i in masked else (ids, m) for i, (ids, m) in enumerate(batch)
        ]
        want = run_oracle(model, [rows], AdamW(lr=1e-3))[0]
        got = run_steps(model, {"fsdp": 2}, [rows], micro_batch=1)[0][0]
        assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
        for key, grad in want.grads.items():
            assert_close(key, got.grads[key], grad)
