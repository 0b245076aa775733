"""`cpu:2`, `8xH100-80GB`, `2x8xH100-80GB` -> Devices: what they hold, and in which nodes."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from shardwise.catalog import Catalog, load_catalog
from shardwise.config import GIB, Devices
from shardwise.errors import UserError
from shardwise.parsing import parse

_CPU = re.compile(r"cpu(?::(\d+))?$")
_GPUS = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z0-9].*)$")


def parse_devices(
    text: str, memory_gib: float | None = None, catalog: Catalog | None = None
) -> Devices:
    """Devices of a text like `cpu:2`, `8xH100-80GB`, or nodes x devices: `2x8xH100-80GB`.

    Args:
        memory_gib: memory of one device in GiB; None: the catalogue's, or an equal part of what
            this machine (or its container) has.
        catalog: None: the one of the package.

    Raises:
        UserError: the text names no device of the catalogue.
    """
    if match := _CPU.match(text):
        count = int(match[1] or 1)
        if count == 0:
            raise UserError(f"--gpus {text!r} names no device; give at least cpu:1.")
        gib = host_gib() / count if memory_gib is None else memory_gib
        return parse(Devices, {"kind": "cpu", "count": count, "memory_gib": gib}, source=text)
    if "+" in text:
        raise UserError(
            f"--gpus {text!r}: kinds of devices in one plan are not built, since every step would "
            f"wait for the slowest; plan each alone, like --gpus {text.split('+')[0]}."
        )
    known = (catalog or load_catalog()).devices
    match = _GPUS.match(text)
    if match is None or match[3] not in known or "0" in (match[1], match[2]):
        raise UserError(
            f"--gpus {text!r}: expected cpu:N, NxNAME or NODESxNxNAME with one of "
            f"{', '.join(sorted(known))}."
        )
    device = known[match[3]]
    nodes, per_node = (match[1], match[2]) if match[2] else ("1", match[1] or "1")
    found = {
        "kind": device.name,
        "count": int(nodes) * int(per_node),
        "memory_gib": device.usable_gib if memory_gib is None else memory_gib,
        "per_node": int(per_node) if match[2] else None,
    }
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


def free_gib() -> float:
    """What of that is not in use now, in GiB; what the system can give up counts as free."""
    free = host_gib() * GIB
    with suppress(OSError, KeyError, ValueError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        meminfo = {words[0]: int(words[1]) * 1024 for words in lines}
        free = min(free, meminfo["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = {words[0]: int(words[1]) for words in lines}["inactive_file"]
        free = min(free, limit - int((group / "memory.current").read_text()) + files)
    return free / GIB
