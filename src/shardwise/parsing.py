"""Text -> plain data -> config classes; what is wrong with either, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from shardwise.errors import UserError

C = TypeVar("C", bound=BaseModel)


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 reads `2e-5` as text; people mean the number."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str) -> Any:
    """Plain data of a YAML text (`yaml.YAMLError` if it is none)."""
    return yaml.load(text, Loader=_YamlLoader)  # a subclass of SafeLoader: builds no objects


def parse(cls: type[C], data: Any, *, source: str) -> C:
    """Build a config class from plain data.

    Raises:
        UserError: one line that names the key, the value and what would work.
    """
    if not isinstance(data, Mapping):
        raise UserError(
            f"{source}: expected a mapping of keys to values, got {type(data).__name__}."
        )
    try:
        return cls.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(f"{source}: {_one_line(cls, error)}") from None


def _one_line(cls: type[BaseModel], error: ValidationError) -> str:
    """The first problem of a pydantic error as one sentence."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"{first['msg']}."
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _fields_at(cls, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
        return f"unknown key {where!r}; {hint}"
    if first["type"] == "missing":
        return f"the key {where!r} is missing."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where} = {first['input']!r}: {message}."


def _fields_at(cls: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Names of the fields of the section at `path` below `cls`."""
    for part in path:
        field = cls.model_fields.get(str(part))
        options = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        sections = [t for t in options if isinstance(t, type) and issubclass(t, BaseModel)]
        if not sections:
            return []
        cls = sections[0]
    return sorted(cls.model_fields)
