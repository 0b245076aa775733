"""The progress line of a training run, on rank 0's terminal only."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from shardwise import console


class Progress(console.Bar):
    """A bar with loss, tokens/s and peak memory; a line every tenth step where there is no tty."""

    def __init__(self, num_steps: int, start: int, *, enabled: bool) -> None:
        super().__init__(
            *(TextColumn("training"), BarColumn(bar_width=20), MofNCompleteColumn()),
            *(TextColumn("{task.fields[status]}"), TimeRemainingColumn()),
            enabled=enabled,
        )
        self._enabled, self._num_steps = enabled, num_steps
        self._task = self.bar.add_task("train", total=num_steps, completed=start, status="")

    def update(self, step: int, loss: float, tokens_per_s: float, peak: int) -> None:
        """Show the state after a step."""
        if not self._enabled:
            return
        status = f"loss {loss:.4f}  {tokens_per_s:.0f} tokens/s  peak {console.gib(peak)}"
        self.bar.update(self._task, completed=step, status=status)
        if not console.out.is_terminal and (step % 10 == 0 or step in (1, self._num_steps)):
            console.out.print(f"step {step}/{self._num_steps}  {status}")
