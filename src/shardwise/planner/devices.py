"""`cpu:2`, `8xH100-80GB` -> Devices: what they hold and how much of it a process may use."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardwise.catalog import load_devices
from shardwise.config import GIB, Devices, parse
from shardwise.errors import UserError

_CPU = re.compile(r"cpu(?::(\d+))?$")
_GPUS = re.compile(r"(?:(\d+)x)?([A-Za-z0-9].*)$")


def parse_devices(text: str, memory_gib: float | None = None) -> Devices:
    """Devices of a text like `cpu:2` or `8xH100-80GB`.

    Args:
        memory_gib: memory of one device in GiB; None: the catalogue's, or an equal part of what
            this machine (or its container) has.

    Raises:
        UserError: the text names no device of the catalogue.
    """
    if match := _CPU.match(text):
        count = int(match[1] or 1)
        if count == 0:
            raise UserError(f"--gpus {text!r} names no device; give at least cpu:1.")
        gib = host_gib() / count if memory_gib is None else memory_gib
        return parse(Devices, {"kind": "cpu", "count": count, "memory_gib": gib}, source=text)
    known = load_devices()
    match = _GPUS.match(text)
    if match is None or match[2] not in known or match[1] == "0":
        raise UserError(
            f"--gpus {text!r}: expected cpu:N or NxNAME with one of {', '.join(sorted(known))}."
        )
    device = known[match[2]]
    gib = device.usable_gib if memory_gib is None else memory_gib
    found = {"kind": device.name, "count": int(match[1] or 1), "memory_gib": gib}
    return parse(Devices, found, source=text)


def host_gib() -> float:
    """Memory that processes on this machine may use together, in GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total / GIB
