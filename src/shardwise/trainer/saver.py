"""Checkpoints written by a thread of their own while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from shardwise.config import Plan
from shardwise.parallel.mesh import Mesh
from shardwise.trainer.checkpoint import States, save_checkpoint
from shardwise.trainer.state import State


class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has one."""

    def __init__(
        self, plan: Plan, mesh: Mesh, model_files: Path, on_written: Callable[[State, float], None]
    ) -> None:
        """Makes a process group, if the plan's checkpoints are written while training goes on.

        Args:
            on_written: is told what has been written in the background, and in how many seconds.
        """
        self._plan, self._model_files, self._on_written = plan, model_files, on_written
        self._group = mesh.host_group() if plan.saves_behind else None
        self._writing: _Writing | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let what is being written be completed, after a failure of the training too."""
        if value is None:
            self.wait()
        elif self._writing is not None:
            self._writing.join()

    def save(self, path: Path, states: States, state: State) -> None:
        """Write a checkpoint; back when it is complete."""
        self.wait()
        save_checkpoint(path, states, self._plan, state, self._model_files)

    def save_behind(self, path: Path, states: States, state: State) -> None:
        """Copy what a checkpoint holds and begin to write it, when the one before is complete."""
        self.wait()
        self._writing = _Writing(
            state,
            partial(
                save_checkpoint,
                path,
                states.copied(),
                self._plan,
                state,
                self._model_files,
                self._group,
            ),
        )

    def poll(self) -> None:
        """Raise what went wrong in the background, or tell what has been written there."""
        if self._writing is not None and not self._writing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written (raises and tells as `poll`)."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error
            self._on_written(writing.state, writing.seconds)


class _Writing(threading.Thread):
    """One checkpoint on its way to the disk; a process that ends does not wait for it."""

    def __init__(self, state: State, write: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.state, self.seconds = state, 0.0
        self.error: BaseException | None = None
        self._write: Callable[[], None] | None = write
        self.start()

    def run(self) -> None:
        """Write, and let go of the copy."""
        write, self._write = self._write, None
        began = time.perf_counter()
        try:
            if write is not None:
                write()
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - began
