"""What signals ask of a training: save and stop after the step that is under way, or save only.

Every rank may be asked, or only one; after each step they agree on what has been asked of any.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.signals import handling


class Asked(NamedTuple):
    """What has been asked of any rank."""

    stop: bool
    save: bool


class Requests:
    """What has been asked of this rank."""

    def __init__(self, device: torch.device) -> None:
        """Nothing yet; ranks will agree through a tensor on their device."""
        self._device = device
        self._stop = self._save = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask to stop, SIGUSR1 asks for a checkpoint."""
        stops = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self._note_stop)
        with handling({**stops, signal.SIGUSR1: self._note_save}):
            yield

    def _note_stop(self, *_: object) -> None:
        self._stop = True

    def _note_save(self, *_: object) -> None:
        self._save = True

    def saved(self) -> None:
        """A checkpoint has been written: who asked for one meanwhile has it. Signals reach ranks at
        different times, and must not make two."""
        self._save = False

    def agreed(self) -> Asked:
        """What has been asked of any rank; every rank must call this after each step."""
        asked = (self._stop, self._save)
        flags = torch.tensor(asked, dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return Asked(*(bool(flag) for flag in flags.tolist()))
