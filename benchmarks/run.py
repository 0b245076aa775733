"""What one rank is asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cases import BY_NAME
from benchmarks.workload import row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Run:
    """One engine, one case, on one rank."""

    engine: str
    model: str
    """directory of the saved model"""
    dtype: str
    seq_len: int
    num_warmup: int
    num_steps: int
    """measured steps, after the warm-up steps"""
    device: str
    folder: str
    """of this group alone: rendezvous, logs and results"""

    @property
    def stage(self) -> int:
        """ZeRO stage of the engine; 0: replicas."""
        return BY_NAME[self.engine].stage

    def torch_device(self) -> torch.device:
        """The device of this rank's tensors."""
        import torch

        index = None if self.device == "cpu" else int(os.environ["LOCAL_RANK"])
        return torch.device(self.device, index)

    def rows(self, rank: int | None = None) -> list[torch.Tensor]:
        """This rank's (or another one's) row of every step, warm-up steps first."""
        rank = int(os.environ["RANK"]) if rank is None else rank
        steps = range(self.num_warmup + self.num_steps)
        return [row(step, rank, self.seq_len).to(self.torch_device()) for step in steps]
