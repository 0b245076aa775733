"""What the user sees: one rich console, and a few phrasings."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn

out = Console(highlight=False, markup=False, soft_wrap=True)


class Bar:
    """A progress bar, there for the time of a block; where there is no terminal, none."""

    def __init__(self, *columns: ProgressColumn, enabled: bool, transient: bool = False) -> None:
        is_shown = enabled and out.is_terminal
        self.bar = Progress(*columns, console=out, transient=transient, disable=not is_shown)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()


def gib(num_bytes: float) -> str:
    """Bytes as GiB with two digits."""
    return f"{num_bytes / 2**30:.2f} GiB"


def count(number: float) -> str:
    """A large number in words: 134.5 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def seconds(number: float) -> str:
    """Seconds with three digits: 12.3 s, 41.0 ms."""
    if number >= 1:
        return f"{number:.1f} s" if number < 1000 else f"{number:,.0f} s"
    return f"{number * 1e3:.3g} ms"
