"""The checkpoints of a run: written, copied elsewhere and dropped while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from shardwise import console
from shardwise.config import Plan
from shardwise.errors import UserError
from shardwise.parallel.mesh import Mesh
from shardwise.trainer.checkpoint import States, save_checkpoint
from shardwise.trainer.copies import Copies
from shardwise.trainer.keep import drop_others
from shardwise.trainer.measured import EVALUATIONS_FILE, METRICS_FILE
from shardwise.trainer.state import STATE_FILE, State, checkpoint_dir


class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has one."""

    def __init__(self, plan: Plan, mesh: Mesh, folder: Path, model_files: Path) -> None:
        """Makes a process group, if anything is done while training goes on.

        Args:
            folder: of the run.
            model_files: directory with the model's config and tokenizer.
        """
        self._plan, self._folder, self._model_files = plan, folder, model_files
        self._copies = None if plan.train.copy_to is None else Copies(plan.train.copy_to)
        self._device = mesh.device
        self._group = mesh.host_group("saves") if plan.saves_behind else None
        # one rank's share may take much longer than another's
        self._copying = mesh.host_group("copies", timedelta(days=1)) if self._copies else None
        self._running: _Running | None = None
        self._not_copied: str | None = None
        self._to_drop: list[str] = []

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let what is being written be completed, after a failure of the training too: in less time
        than other ranks wait for this one, so that it is this failure that is told."""
        if value is None:
            self.wait()
            self._drop_others()  # the last one has been evaluated since
        elif self._running is not None:
            self._running.written.wait(self._plan.train.timeout_s / 2)

    def save(self, states: States, state: State) -> None:
        """Write a checkpoint, which is complete then."""
        self.wait()
        self._writer(states, state)()
        if self._copies is None:
            self._drop_others()
        else:
            task = _Task(state=state, copy=partial(self._copy, state))
            self._running = _Running(task, self._device)

    def save_behind(self, states: States, state: State) -> None:
        """Copy what a checkpoint holds and begin to write it, when the one before is complete."""
        self.wait()
        copy = None if self._copies is None else partial(self._copy, state)
        write = self._writer(states.copied(), state, self._group)
        self._running = _Running(_Task(state=state, write=write, copy=copy), self._device)

    def poll(self) -> None:
        """Raise what went wrong in the background, or tell what has been done there."""
        if self._running is not None and not self._running.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written (raises and tells as `poll`)."""
        running, self._running = self._running, None
        if running is None:
            return
        running.join()
        if running.error is not None:
            raise running.error
        self._not_copied = running.not_copied
        if dist.get_rank() == 0:
            step, url = running.task.state.step, self._plan.train.copy_to
            done = ["written"] if running.task.write is not None else []
            done += [] if url is None or running.not_copied else [f"copied to {url}"]
            if done:
                how = f"{' and '.join(done)} in the background, {running.seconds:.1f} s"
                console.out.print(f"checkpoint of step {step} {how}")
            if running.not_copied is not None:
                console.out.print(f"checkpoint of step {step} NOT copied: {running.not_copied}")
        self._drop_others()

    def check_copied(self) -> None:
        """Make sure that the last checkpoint has been copied, if that was asked for.

        Raises:
            UserError: on every rank, saying why it has not.
        """
        if self._not_copied is not None:
            raise UserError(f"the last checkpoint was written and not copied: {self._not_copied}")

    def _writer(
        self, states: States, state: State, group: dist.ProcessGroup | None = None
    ) -> Callable[[], None]:
        """What writes a checkpoint, with the records of the run until now."""
        files = [self._folder / name for name in (METRICS_FILE, EVALUATIONS_FILE)]
        return partial(
            save_checkpoint,
            checkpoint_dir(self._folder, state.step),
            states,
            self._plan,
            state,
            self._model_files,
            {file.name: file.read_bytes() for file in files if file.exists()},
            group,
        )

    def _copy(self, state: State) -> str | None:
        """Copy a complete checkpoint, each rank its share; what went wrong, if anything did."""
        path, copies = checkpoint_dir(self._folder, state.step), self._copies
        if copies is None:
            return None
        names: list[list[str]] = [[]]
        if dist.get_rank() == 0:  # another rank may not see all files yet
            found = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
            names = [[name for name in found if name != STATE_FILE]]
        dist.broadcast_object_list(names, src=0, group=self._copying)
        mine = names[0][dist.get_rank() :: dist.get_world_size()]
        return (
            self._agreed(lambda: copies.drop(path.name), first=True)
            or self._agreed(lambda: copies.put(path, mine))
            or self._agreed(lambda: copies.complete(path), first=True)
        )

    def _agreed(self, do: Callable[[], None], *, first: bool = False) -> str | None:
        """Do something on all ranks or on the first; the first problem that any rank had."""
        problem = None
        try:
            if dist.get_rank() == 0 or not first:
                do()
        except UserError as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self._copying)
        return next((one for one in problems if one is not None), None)

    def _drop_others(self) -> None:
        """Remove the checkpoints that need not stay, here and where they were copied to."""
        keep = self._plan.train.keep
        if dist.get_rank() > 0 or keep is None:
            return
        self._to_drop += drop_others(self._folder, keep)
        if self._copies is None or self._not_copied is not None:  # older copies are all there is
            return
        try:
            while self._to_drop:
                self._copies.drop(self._to_drop[0])
                del self._to_drop[0]
        except UserError as error:
            console.out.print(f"the copy of {self._to_drop[0]} was not removed: {error}")


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What is done with one checkpoint while training goes on."""

    state: State
    write: Callable[[], None] | None = None
    copy: Callable[[], str | None] | None = None
    """gives what went wrong; training goes on without a copy"""


class _Running(threading.Thread):
    """One checkpoint on its way; a process that ends does not wait for it."""

    def __init__(self, task: _Task, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.task, self.seconds, self._device = task, 0.0, device
        self.error: BaseException | None = None
        self.not_copied: str | None = None
        self.written = threading.Event()
        """set too if that failed"""
        self.start()

    def run(self) -> None:
        """Write, then copy."""
        if self._device.type != "cpu":  # each thread has a current device of its own
            torch.get_device_module(self._device.type).set_device(self._device)
        began = time.perf_counter()
        try:
            if self.task.write is not None:
                self.task.write()
            self.written.set()
            if self.task.copy is not None:
                self.not_copied = self.task.copy()
        except BaseException as error:
            self.error = error
        finally:
            self.written.set()
        self.seconds = time.perf_counter() - began
