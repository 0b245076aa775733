"""The other way round: which rented machines do a job, cheapest first. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.catalog import Price
from shardwise.errors import UserError
from shardwise.planner.answer import Answer

_COUNTS = (1, 2, 4, 8, 16, 32)
"""instances that are tried, as long as more of them can help"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a job may take."""

    hours: float | None = None
    usd: float | None = None
    region: str | None = None
    """a part of the name of a region or provider"""


@dataclass(frozen=True, kw_only=True)
class Rental:
    """Some instances of one kind that do the job within the limits."""

    price: Price
    num_instances: int
    answer: Answer
    hours: float
    usd: float


@dataclass(frozen=True, kw_only=True)
class Rentals:
    """What can be rented for a job."""

    found: tuple[Rental, ...]
    """cheapest first; of equal ones the faster"""
    rejected: tuple[tuple[str, str], ...]
    """kind of instance, and why it does not do"""


def find_rentals(
    prices: Iterable[Price], answer_of: Callable[[Price, int], Answer], limits: Limits
) -> Rentals:
    """The fewest instances of each kind that do a job, since more of them never cost less.

    Args:
        answer_of: the plan for so many instances of a kind, with hours and money.

    Raises:
        UserError: no price is of that region.
    """
    prices = list(prices)
    near = [price for price in prices if _is_in(price, limits.region)]
    if not near:
        regions = sorted({f"{price.provider}:{price.region}" for price in prices})
        raise UserError(
            f"--region {limits.region!r}: no price is of there; there are: {', '.join(regions)}."
        )
    found, rejected = [], []
    for price in near:
        result = _fewest(price, answer_of, limits)
        if isinstance(result, Rental):
            found.append(result)
        else:
            rejected.append((_named(price), result))
    found.sort(key=lambda rental: (rental.usd, rental.hours))
    return Rentals(found=tuple(found), rejected=tuple(rejected))


def check_alone(**options: object) -> None:
    """Refuse options that say what is searched for (UserError naming the first that is given)."""
    for option, value in options.items():
        if value is not None:
            raise UserError(f"--find-gpus finds devices and prices: leave out --{option}.")


def _fewest(
    price: Price, answer_of: Callable[[Price, int], Answer], limits: Limits
) -> Rental | str:
    """The smallest rental that does, or the reason why none does."""
    reason = ""
    for count in _COUNTS:
        answer = answer_of(price, count)
        cost = answer.cost
        several = "1 instance" if count == 1 else f"{count} instances"
        method = answer.single.plan.method
        if answer.chosen is None or answer.chosen.plan.method != method:
            reason = f"{several}: the task does not fit"
        elif cost is None or cost.hours is None or cost.usd is None:
            evidence = answer.chosen.plan.predicted
            return f"{several}: {evidence.step_evidence if evidence else 'no step time'}"
        elif limits.hours is not None and cost.hours > limits.hours:
            reason = f"{several}: {cost.hours:,.1f} hours, not {limits.hours:g}"
        elif limits.usd is not None and cost.usd > limits.usd:
            return f"{several}: {cost.usd:,.2f} USD, not {limits.usd:g}"
        else:
            return Rental(
                price=price, num_instances=count, answer=answer, hours=cost.hours, usd=cost.usd
            )
    return reason


def _is_in(price: Price, region: str | None) -> bool:
    return region is None or region.lower() in f"{price.provider}:{price.region}".lower()


def _named(price: Price) -> str:
    return f"{price.provider}:{price.instance}@{price.region}, {price.kind}"


def render_rentals(rentals: Rentals, *, top: int) -> RenderableType:
    """What can be rented for a job, cheapest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rent", no_wrap=True)
    table.add_column("devices", no_wrap=True)
    table.add_column("hours", justify="right")
    table.add_column("USD", justify="right")
    table.add_column("layout")
    for rental in rentals.found[:top]:
        price, chosen = rental.price, rental.answer.chosen
        spot = "/spot" if price.kind == "spot" else ""
        table.add_row(
            f"{rental.num_instances} x {price.provider}:{price.instance}@{price.region}{spot}",
            f"{rental.num_instances * price.count}x{price.device}",
            f"{rental.hours:,.1f}",
            f"{rental.usd:,.2f}",
            str(chosen.plan.layout) if chosen else "",
        )
    hidden = len(rentals.found) - top
    words = [f"{hidden} more do it for more money"] if hidden > 0 else []
    words += [f"{len(rentals.rejected)} do not do it"] if rentals.rejected else []
    rest = Text(f"{', '.join(words)} (--json has all)\n" if words else "", style="dim")
    return Group(Text("cheapest first:", style="bold"), Padding(table, (0, 0, 0, 2)), rest)


def rentals_json(rentals: Rentals) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "found": [
            {
                "instance": f"{r.price.provider}:{r.price.instance}@{r.price.region}",
                "kind": r.price.kind,
                "count": r.num_instances,
                "devices": r.num_instances * r.price.count,
                "device": r.price.device,
                "hours": r.hours,
                "usd": r.usd,
                "layout": r.answer.chosen.plan.layout.model_dump() if r.answer.chosen else None,
                "price_date": r.price.date,
                "price_source": r.price.source,
            }
            for r in rentals.found
        ],
        "rejected": [{"option": name, "reason": reason} for name, reason in rentals.rejected],
    }


def nothing_found(rentals: Rentals) -> str:
    """Why no instance does the job, by the most frequent reasons."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rentals.rejected[:3])
    more = len(rentals.rejected) - 3
    return f"no instance of the catalogue does the job: {reasons}" + (
        f"; and {more} more." if more > 0 else "."
    )
