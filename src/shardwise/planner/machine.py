"""What `shardwise probe` measured on a machine, as the planner reads it."""

from __future__ import annotations

import bisect
import math
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from shardwise.config import Config, parse, read_yaml
from shardwise.errors import UserError

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "all_to_all"]


class Timing(Config):
    """One measured collective."""

    op: Op
    num_bytes: int = Field(gt=0, description="bytes of the whole (gathered or reduced) tensor")
    seconds: float = Field(gt=0)


class Machine(Config):
    """Speeds of one process while all of them work, and of their collectives."""

    date: str
    host: str
    num_processes: int = Field(ge=1)
    matmul_flops: dict[Literal["fp32", "bf16"], float]
    """floating-point operations per second of one process, by compute dtype"""
    memory_bytes_per_s: float = Field(gt=0)
    """bytes per second that one process reads and writes in an element-wise operation"""
    collectives: list[Timing]

    def collective_s(self, op: Op, num_bytes: float) -> float:
        """Seconds of a collective, interpolated between measured sizes on a log scale."""
        rows = sorted((t.num_bytes, t.seconds) for t in self.collectives if t.op == op)
        if not rows:
            raise UserError(f"the probe file has no timing of {op}; run `shardwise probe` again.")
        sizes = [size for size, _ in rows]
        if num_bytes <= sizes[0]:
            return rows[0][1]
        if num_bytes >= sizes[-1] or len(rows) == 1:
            return rows[-1][1] * num_bytes / sizes[-1]
        i = bisect.bisect_right(sizes, num_bytes)
        (size0, s0), (size1, s1) = rows[i - 1], rows[i]
        share = math.log(num_bytes / size0) / math.log(size1 / size0)
        return math.exp(math.log(s0) + share * math.log(s1 / s0))

    def to_yaml(self) -> str:
        """The measurements as YAML text."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def load_machine(path: Path) -> Machine:
    """Read what `Machine.to_yaml` gave (`UserError` if it cannot be read)."""
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the probe file {path}: {error}.") from None
    return parse(Machine, data, source=str(path))
