"""Hours and money of a whole job. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.catalog import Price
from shardwise.config import Plan
from shardwise.errors import UserError
from shardwise.planner.serving import ServeTime

_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmbt]?)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What one device costs an hour, and who says so."""

    usd_per_device_hour: float
    what: str
    date: str
    source: str

    @classmethod
    def of(cls, price: Price) -> Rate:
        """Of an instance of the catalogue."""
        return cls(
            usd_per_device_hour=price.usd_per_device_hour,
            what=f"{price.provider}:{price.instance}@{price.region}, {price.kind}, "
            f"{price.usd_per_hour:g} USD an hour for {price.count}x{price.device}",
            date=price.date,
            source=price.source,
        )

    @classmethod
    def given(cls, usd_per_device_hour: float) -> Rate:
        """By the user.

        Raises:
            UserError: it is not above 0.
        """
        if not 0 < usd_per_device_hour < float("inf"):
            raise UserError(
                f"--price {usd_per_device_hour:g} is no amount of USD a device and hour, like 2.5."
            )
        what = f"{usd_per_device_hour:g} USD a device and hour"
        return cls(
            usd_per_device_hour=usd_per_device_hour, what=what, date="now", source="given by you"
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """How much is to be trained, and at which price."""

    tokens: float | None = None
    rows: int | None = None
    """of the plan's `train.seq_len` tokens each, `train.epochs` times"""
    rate: Rate | None = None
    overhead: float = 0.0
    """time lost to restarts and idling, as a share of the time of the steps"""

    def tokens_of(self, plan: Plan) -> float | None:
        """Tokens of the whole job; None: not said."""
        if self.rows is not None:
            return float(self.rows) * plan.train.epochs * plan.train.seq_len
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a job, as far as what was said goes."""

    tokens: float | None
    hours: float | None
    usd: float | None
    usd_per_million_tokens: float | None
    rate: Rate | None
    overhead: float


def cost_of(plan: Plan, step_s: float | None, job: Job) -> Cost | None:
    """What a job takes with a plan: all devices of it are paid for, busy or not.

    Returns:
        None if nothing can be said: no step time, or neither an amount nor a price.
    """
    tokens = job.tokens_of(plan)
    if step_s is None or (tokens is None and job.rate is None):
        return None
    per_step = plan.train.global_batch * plan.train.seq_len
    hours_per_token = step_s * (1 + job.overhead) / 3600 / per_step
    hours = None if tokens is None else tokens * hours_per_token
    usd_per_token = None
    if job.rate is not None:
        count = plan.devices.count or plan.layout.world_size
        usd_per_token = hours_per_token * count * job.rate.usd_per_device_hour
    return Cost(
        tokens=tokens,
        hours=hours,
        usd=None if tokens is None or usd_per_token is None else tokens * usd_per_token,
        usd_per_million_tokens=None if usd_per_token is None else usd_per_token * 1e6,
        rate=job.rate,
        overhead=job.overhead,
    )


def cost_of_serving(served: ServeTime | None, num_devices: int, job: Job) -> Cost | None:
    """What output tokens take of a server that is as busy as its load makes it.

    Args:
        num_devices: that are paid for, busy or not.

    Returns:
        None if nothing can be said: no speed, or neither an amount nor a price.
    """
    if served is None or (job.tokens is None and job.rate is None):
        return None
    hours_per_token = (1 + job.overhead) / 3600 / served.output_tokens_per_s
    hours = None if job.tokens is None else job.tokens * hours_per_token
    usd = None
    if job.rate is not None:
        usd = hours_per_token * num_devices * job.rate.usd_per_device_hour
    return Cost(
        tokens=job.tokens,
        hours=hours,
        usd=None if job.tokens is None or usd is None else job.tokens * usd,
        usd_per_million_tokens=None if usd is None else usd * 1e6,
        rate=job.rate,
        overhead=job.overhead,
    )


def read_tokens(text: str) -> float:
    """A number of tokens like `2000000`, `15e12`, `1.5B` or `300k`.

    Raises:
        UserError: it is none.
    """
    match = _NUMBER.match(text.strip())
    value = float(match[1]) * _SUFFIXES[match[2].lower()] if match else 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"--tokens {text!r} is no number of tokens, like 2000000, 1.5B or 15e12.")
    return value
