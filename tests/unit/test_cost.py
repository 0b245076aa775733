"""Hours and money."""

from __future__ import annotations

import pytest

from shardwise.catalog import find_price, load_catalog
from shardwise.config import Devices, Layout, Plan, Train
from shardwise.errors import UserError
from shardwise.planner.cost import Job, Rate, cost_of, read_tokens

PLAN = Plan(
    model="any",
    task="full",
    layout=Layout(fsdp=16),
    devices=Devices(kind="H100-80GB", count=16, memory_gib=79.1),
    train=Train(seq_len=1000, global_batch=36, epochs=2),
)


def test_hours_and_money_by_hand() -> None:
    """36,000 tokens in a step of 10 s are 12.96 M an hour; 16 devices at 2 USD cost 32."""
    cost = cost_of(PLAN, 10.0, Job(tokens=12.96e6, rate=Rate.given(2.0)))
    assert cost is not None
    assert cost.hours == pytest.approx(1.0)
    assert cost.usd == pytest.approx(32.0)
    assert cost.usd_per_million_tokens == pytest.approx(32 / 12.96)


def test_overhead_lengthens_everything() -> None:
    plain, more = (
        cost_of(PLAN, 10.0, Job(tokens=1e6, rate=Rate.given(2.0), overhead=share))
        for share in (0.0, 0.25)
    )
    assert plain is not None
    assert more is not None
    assert more.hours == pytest.approx(1.25 * (plain.hours or 0))
    assert more.usd == pytest.approx(1.25 * (plain.usd or 0))


def test_rows_are_as_long_as_a_sequence_and_count_each_epoch() -> None:
    cost = cost_of(PLAN, 10.0, Job(rows=72))
    assert cost is not None
    assert cost.tokens == 2 * 72 * 1000
    assert cost.hours == pytest.approx(4 * 10 / 3600)
    assert cost.usd is None


def test_a_price_alone_gives_the_price_of_tokens() -> None:
    price = find_price(load_catalog(), "aws:p5.48xlarge@us-east-1")
    cost = cost_of(PLAN, 10.0, Job(rate=Rate.of(price)))
    assert cost is not None
    assert cost.hours is None
    assert cost.usd_per_million_tokens == pytest.approx(16 * 6.88 / 12.96)
    assert cost.rate is not None
    assert "aws:p5.48xlarge@us-east-1" in cost.rate.what
    assert cost.rate.date
    assert "skypilot" in cost.rate.source


def test_nothing_known_is_nothing_said() -> None:
    assert cost_of(PLAN, None, Job(tokens=1e6, rate=Rate.given(2.0))) is None
    assert cost_of(PLAN, 10.0, Job()) is None


@pytest.mark.parametrize(
    ("text", "tokens"), [("2000000", 2e6), ("1.5B", 1.5e9), ("15e12", 15e12), ("300k", 3e5)]
)
def test_numbers_of_tokens(text: str, tokens: float) -> None:
    assert read_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "many", "-5", "0", "1.5X", "1e999", "nan"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(UserError, match="--tokens"):
        read_tokens(text)


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_price(price: float) -> None:
    with pytest.raises(UserError, match="--price"):
        Rate.given(price)
