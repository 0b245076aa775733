"""What the planner asks of a machine: seconds of products, of memory traffic, of collectives."""

from __future__ import annotations

from typing import Literal, Protocol

from shardwise.planner.network import Group, Op

Dtype = Literal["fp32", "bf16"]


class Speeds(Protocol):
    """One process of a machine while all of them work: probed, or of the catalogue."""

    @property
    def overlaps(self) -> bool:
        """Whether what FSDP gathers and reduces crosses while the process computes."""

    @property
    def host_s(self) -> float:
        """Seconds that the host needs to start one operation of the device."""

    @property
    def node(self) -> int | None:
        """Devices of a node; None: there is one link only."""

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s in bf16, of which MFU is a share; None: not known."""

    @property
    def evidence(self) -> str:
        """What the numbers rest on, with their error."""

    def matmul_s(self, m: float, n: int, k: int, dtype: Dtype) -> float:
        """Seconds of a product of (m, k) and (k, n)."""

    def attention_s(self, flops: float, dtype: Dtype) -> float:
        """Seconds of so many operations of attention."""

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to read or write so many bytes in element-wise operations."""

    def collective_s(self, op: Op, num_bytes: float, group: Group | None = None) -> float:
        """Seconds of a collective over a tensor of so many bytes."""

    def link(self, group: Group) -> str:
        """The link that a group talks over, in words."""
