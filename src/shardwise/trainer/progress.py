"""The progress line of a training run, on rank 0's terminal only."""

from __future__ import annotations

from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from shardwise import console


class Progress:
    """A bar with loss, tokens/s and peak memory; a line every tenth step where there is no tty."""

    def __init__(self, num_steps: int, start: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console.out,
            disable=not enabled or not console.out.is_terminal,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=start, status="")
        self._num_steps = num_steps

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_s: float, peak: int) -> None:
        """Show the state after a step."""
        if not self._enabled:
            return
        status = f"loss {loss:.4f}  {tokens_per_s:.0f} tokens/s  peak {console.gib(peak)}"
        self._bar.update(self._task, completed=step, status=status)
        if not console.out.is_terminal and (step % 10 == 0 or step in (1, self._num_steps)):
            console.out.print(f"step {step}/{self._num_steps}  {status}")
