"""Numbers of a config, each of the kind that is expected. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """A config, read strictly; what is wrong is named by its key."""

    config: Mapping[str, Any]
    source: str
    keys: Mapping[str, str]
    """what the family calls some of them"""

    def required(self, key: str, *, least: int = 1) -> int:
        key = self.keys.get(key, key)
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(
                f"{self.source}: {key} is {value!r}; expected a whole number of at least {least}."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A setting that is on or off."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{self.source}: {key} is {value!r}; expected true or false.")
        return value

    def number(self, key: str, default: float) -> float:
        """A number that need not be whole."""
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{self.source}: {key} is {value!r}; expected a number.")
        return float(value)

    def optional(self, key: str, default: int | None, *, least: int = 1) -> int:
        """Without a default the key is required."""
        given = self.config.get(self.keys.get(key, key)) is not None
        if given or default is None:
            return self.required(key, least=least)
        return default
