"""What `shardwise probe` measured on a machine, as the planner reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from shardwise.config import Config
from shardwise.errors import UserError
from shardwise.parsing import parse, read_yaml
from shardwise.planner.interpolate import at
from shardwise.planner.network import Group, Op
from shardwise.planner.speeds import Dtype


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

    @property
    def overlaps(self) -> bool:
        """On gloo nothing does."""
        return False

    @property
    def host_s(self) -> float:
        """Part of what was measured."""
        return 0.0

    @property
    def node(self) -> int | None:
        """All processes of a probe are on one machine."""
        return None

    @property
    def peak_flops(self) -> float | None:
        """Not known."""
        return None

    @property
    def evidence(self) -> str:
        """When it was measured, and the largest error seen so far."""
        return f"analytic on speeds measured {self.date}, within 40% so far on CPU"

    def matmul_s(self, m: float, n: int, k: int, dtype: Dtype) -> float:
        """Seconds of a product of (m, k) and (k, n), at the one rate measured."""
        return 2 * m * n * k / self.matmul_flops[dtype]

    def attention_s(self, flops: float, dtype: Dtype) -> float:
        """Seconds of so many operations of attention, at the same rate."""
        return flops / self.matmul_flops[dtype]

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to read or write so many bytes."""
        return num_bytes / self.memory_bytes_per_s

    def link(self, group: Group) -> str:
        """There is one."""
        return "this machine"

    def collective_s(self, op: Op, num_bytes: float, group: Group | None = None) -> float:
        """Seconds of a collective, interpolated between measured sizes on a log scale."""
        rows = sorted((t.num_bytes, t.seconds) for t in self.collectives if t.op == op)
        if not rows:
            raise UserError(f"the probe file has no timing of {op}; run `shardwise probe` again.")
        return at(rows, num_bytes)

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
