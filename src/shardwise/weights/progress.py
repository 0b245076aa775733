"""How much a rank has read of its weights, and how fast."""

from __future__ import annotations

import time
from types import TracebackType

import torch
import torch.distributed as dist
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from shardwise import console
from shardwise.parallel.mesh import Mesh


class Loading:
    """Counts the bytes that this rank reads; the first rank shows its own on a bar."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.num_bytes, self._began = mesh, 0, time.perf_counter()
        self._bar = Progress(
            TextColumn("loading"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console.out,
            transient=True,
            disable=dist.get_rank() > 0 or not console.out.is_terminal,
        )
        self._task = self._bar.add_task("load", total=0)

    def __enter__(self) -> Loading:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def expect(self, num_bytes: int) -> None:
        """This rank will read so many bytes, besides those that are expected already."""
        self._bar.update(self._task, total=(self._bar.tasks[0].total or 0) + num_bytes)

    def read(self, num_bytes: int) -> None:
        """It has read so many."""
        self.num_bytes += num_bytes
        self._bar.update(self._task, advance=num_bytes)

    def summary(self) -> str:
        """Bytes of all ranks, seconds, and bytes a second; every rank must ask for it."""
        total = torch.tensor(self.num_bytes, dtype=torch.int64, device=self._mesh.device)
        dist.all_reduce(total)
        seconds = time.perf_counter() - self._began
        gb = int(total) / 1e9
        return f"{gb:.2f} GB in {seconds:.1f} s, {gb / seconds:.2f} GB/s"
