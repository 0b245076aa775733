"""Facts about the world: small YAML files, each value with its source and date."""

from __future__ import annotations

from functools import cache
from importlib import resources

from shardwise.config import Config, parse, read_yaml


class Device(Config):
    """One kind of accelerator."""

    name: str
    usable_gib: float
    """GiB that a process can allocate, as the driver reports it"""
    source: str
    date: str


@cache
def load_devices() -> dict[str, Device]:
    """The device catalogue, by name."""
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    rows = read_yaml(text)
    return {row["name"]: parse(Device, row, source="devices.yaml") for row in rows}
