"""Results that a search asks for thousands of times, found once. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

from shardwise.models.facts import ModelFacts

T = TypeVar("T")
_MOST = 4096


def per_model(function: Callable[..., T]) -> Callable[..., T]:
    """Remember what a function of a model's facts and of hashable values gave.

    Facts hold tables that have no hash, so they are told apart as objects; a result keeps its
    facts alive, so that no other object can take their place.
    """
    found: dict[tuple[Hashable, ...], tuple[ModelFacts, T]] = {}

    @wraps(function)
    def remembered(facts: ModelFacts, *values: Hashable) -> T:
        key = (id(facts), *values)
        if key not in found:
            if len(found) >= _MOST:
                found.clear()
            found[key] = (facts, function(facts, *values))
        return found[key][1]

    return remembered
