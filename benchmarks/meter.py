"""Time by part, peak memory and losses of the steps of one rank."""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PARTS = ("forward", "backward", "communication", "optimizer")
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured."""

    losses: list[float]
    """of every step, warm-up steps too: mean cross-entropy of this rank's tokens, in nats"""
    step_s: list[float]
    """seconds from a barrier to a barrier, without the warm-up steps"""
    cpu_s: float
    """Median processor seconds of a step of this rank, all threads, user and system. Other programs
    on the machine disturb it less than they disturb the time of a step."""
    parts_s: dict[str, float | None]
    """median seconds of a step by part; None where a part cannot be told from another one"""
    peak_bytes: int
    """largest resident set while steps ran (on cuda: of torch's allocator)"""
    load_peak_bytes: int
    """the same before the first step: while the model was built and loaded"""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


class Clock:
    """Charges the main thread's time to the innermost section that it is in."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0
        self._thread = threading.get_ident()

    @contextmanager
    def section(self, part: str) -> Iterator[None]:
        """Time spent in the block belongs to `part`, except what inner sections take."""
        if threading.get_ident() != self._thread:  # works beside the step, not in its way
            yield
            return
        self._charge()
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time charged to `part`."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.section(part):
                return function(*args, **kwargs)

        return call

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class Meter:
    """Every engine calls `begin` and `end` around each step, and times its parts by `clock`."""

    def __init__(self, device: torch.device, *, num_warmup: int, communication: bool) -> None:
        """Wrap the collectives, if the engine's are called from Python.

        Must be called before an engine's library is imported: some keep the functions they find.
        """
        self.clock = Clock()
        self._device = device
        self._num_warmup = num_warmup
        self._communication = communication
        self._losses: list[float] = []
        self._step_s: list[float] = []
        self._cpu_s: list[float] = []
        self._parts: list[dict[str, float]] = []
        self._load_peak: int | None = None
        self._began = self._cpu_began = 0.0
        self._barrier = dist.barrier
        if communication and device.type == "cpu":
            for name in filter(partial(hasattr, dist), _COLLECTIVES):
                setattr(dist, name, self.clock.timed("communication", getattr(dist, name)))
            # how every other way to call one ends, those with async_op=True too
            dist.Work.wait = self.clock.timed("communication", dist.Work.wait)

    def begin(self) -> None:
        """The ranks are about to start a step."""
        if self._load_peak is None:
            self._load_peak = peak_bytes(self._device)
            forget_peak(self._device)
        self._synchronise()
        self.clock.take()
        self._cpu_began = time.process_time()
        self._began = time.perf_counter()

    def end(self, loss: torch.Tensor | float) -> None:
        """A step is over on this rank; it has ended when it has on all.

        Args:
            loss: mean cross-entropy of this rank's tokens, or of all.
        """
        self._synchronise()
        self._step_s.append(time.perf_counter() - self._began)
        self._cpu_s.append(time.process_time() - self._cpu_began)
        self._parts.append(self.clock.take())
        self._losses.append(float(loss))

    def result(self) -> RankResult:
        """What was measured; call it when all steps are done."""
        parts = self._parts[self._num_warmup :]
        medians: dict[str, float | None] = {
            part: statistics.median(seconds[part] for seconds in parts) for part in PARTS
        }
        if not self._communication:
            medians["communication"] = None
        if self._device.type != "cpu":  # the host's clock says nothing about work in a queue
            medians = dict.fromkeys(PARTS)
        return RankResult(
            losses=self._losses,
            step_s=self._step_s[self._num_warmup :],
            cpu_s=statistics.median(self._cpu_s[self._num_warmup :]),
            parts_s=medians,
            peak_bytes=peak_bytes(self._device),
            load_peak_bytes=self._load_peak or 0,
        )

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)
        self._barrier()


def peak_bytes(device: torch.device) -> int:
    """Peak memory since the last `forget_peak`, in bytes."""
    if device.type != "cpu":
        return int(torch.get_device_module(device.type).max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def forget_peak(device: torch.device) -> None:
    """Start measuring the peak anew, from what is in use now."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device.type).reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):  # what loading has left free is no need of the steps
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
