"""The checkpoints of a run: written, copied elsewhere and dropped while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

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
        is_behind = plan.saves_behind or self._copies is not None
        self._group = mesh.host_group() if is_behind else None
        self._running: _Running | None = None
        self._not_copied: str | None = None

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
            self._drop_others()  # the last one has been evaluated since
        elif self._running is not None:
            self._running.join()

    def save(self, states: States, state: State) -> None:
        """Write a checkpoint, which is complete then."""
        self.wait()
        self._writer(states, state)()
        if self._copies is None:
            self._drop_others()
        else:
            self._running = _Running(_Task(state=state, copy=partial(self._copy, state)))

    def save_behind(self, states: States, state: State) -> None:
        """Copy what a checkpoint holds and begin to write it, when the one before is complete."""
        self.wait()
        copy = None if self._copies is None else partial(self._copy, state)
        write = self._writer(states.copied(), state, self._group)
        self._running = _Running(_Task(state=state, write=write, copy=copy))

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
        path = checkpoint_dir(self._folder, state.step)
        files = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
        others = [name for name in files if name != STATE_FILE]
        problem = self._put(path, others[dist.get_rank() :: dist.get_world_size()])
        last = [STATE_FILE] if dist.get_rank() == 0 and problem is None else []
        return problem or self._put(path, last)

    def _put(self, path: Path, names: list[str]) -> str | None:
        """Copy some files; the first problem that any rank had."""
        problem = None
        try:
            if self._copies is not None:
                self._copies.put(path, names)
        except UserError as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self._group)
        return next((one for one in problems if one is not None), None)

    def _drop_others(self) -> None:
        """Remove the checkpoints that need not stay, here and where they were copied to."""
        keep = self._plan.train.keep
        if dist.get_rank() > 0 or keep is None:
            return
        for name in drop_others(self._folder, keep):
            try:
                if self._copies is not None and self._not_copied is None:
                    self._copies.drop(name)
            except UserError as error:
                console.out.print(f"the copy of {name} was not removed: {error}")


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What is done with one checkpoint while training goes on."""

    state: State
    write: Callable[[], None] | None = None
    copy: Callable[[], str | None] | None = None
    """gives what went wrong; training goes on without a copy"""


class _Running(threading.Thread):
    """One checkpoint on its way; a process that ends does not wait for it."""

    def __init__(self, task: _Task) -> None:
        super().__init__(daemon=True)
        self.task, self.seconds = task, 0.0
        self.error: BaseException | None = None
        self.not_copied: str | None = None
        self.start()

    def run(self) -> None:
        """Write, then copy."""
        began = time.perf_counter()
        try:
            if self.task.write is not None:
                self.task.write()
            if self.task.copy is not None:
                self.not_copied = self.task.copy()
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - began
