"""Rows packed into sequences train like rows alone: loss, norm, every gradient, parameters."""

from __future__ import annotations

import pytest

from tests.ranks.layouts import PACKED_FAST, PACKED_SLOW, Case
from tests.ranks.test_parity import BATCHES, check_parity

SEQ_LEN = 80
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
    settings = {"packing": True, "seq_len": SEQ_LEN, **case.train}
    check_parity(Case(model=case.model, layout=case.layout, train=settings), ROWS)
