"""How much a rank has read of its weights, and how fast."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from shardwise.console import Bar
from shardwise.parallel.mesh import Mesh


class Loading(Bar):
    """Counts the bytes that this rank reads; the first rank shows its own on a bar."""

    def __init__(self, mesh: Mesh) -> None:
        """Nothing has been read yet, nor is anything expected."""
        super().__init__(
            *(TextColumn("loading"), BarColumn(bar_width=20)),
            *(DownloadColumn(), TransferSpeedColumn()),
            enabled=dist.get_rank() == 0,
            transient=True,
        )
        self._mesh, self.num_bytes, self._began = mesh, 0, time.perf_counter()
        self._task = self.bar.add_task("load", total=0)

    def expect(self, num_bytes: int) -> None:
        """This rank will read so many bytes, besides those that are expected already."""
        self.bar.update(self._task, total=(self.bar.tasks[0].total or 0) + num_bytes)

    def read(self, num_bytes: int) -> None:
        """It has read so many."""
        self.num_bytes += num_bytes
        self.bar.update(self._task, advance=num_bytes)

    def summary(self) -> str:
        """Bytes of all ranks, seconds, and bytes a second; every rank must ask for it."""
        total = torch.tensor(self.num_bytes, dtype=torch.int64, device=self._mesh.device)
        dist.all_reduce(total)
        seconds = time.perf_counter() - self._began
        gb = int(total) / 1e9
        return f"{gb:.2f} GB in {seconds:.1f} s, {gb / seconds:.2f} GB/s"
