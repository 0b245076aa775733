"""Copies of a run's checkpoints in another place: an object store, or any other file system that
fsspec knows. No torch.

An object store renames nothing, so the file that says what a checkpoint consists of is copied last:
a copy without it, or with a file of another size, is none.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import UserError
from shardwise.models.adapters import ADAPTER_CONFIG
from shardwise.trainer.measured import EVALUATIONS_FILE, METRICS_FILE
from shardwise.trainer.state import (
    CHECKPOINTS_DIR,
    MODEL_DIR,
    STATE_FILE,
    State,
    checkpoint_step,
    complete_checkpoints,
    digest_of,
    parse_state,
    read_state,
)

_TRIAL = ".shardwise-can-write"


class Copies:
    """The checkpoints at a URL such as s3://bucket/runs/a."""

    def __init__(self, url: str) -> None:
        """Nothing is asked of the place yet.

        Raises:
            UserError: nothing that is installed knows such URLs, or it names no folder.
        """
        scheme, mark, path = url.rpartition("://")
        self.url = f"{scheme}{mark}{path.rstrip('/')}"
        if not path.strip("/") or scheme == "memory":
            raise UserError(
                f"train.copy_to={url!r} names no place that stays; give a folder, such as "
                "s3://bucket/runs/a."
            )
        with _told(self.url):
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(self.url)

    def check(self) -> None:
        """Make sure that files can be written and removed there (`UserError` if not)."""
        with _told(self.url):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/{_TRIAL}", b"")
            self._files.rm_file(f"{self._root}/{_TRIAL}")

    def put(self, checkpoint: Path, names: Sequence[str]) -> None:
        """Copy some files of a checkpoint."""
        with _told(self.url):
            for name in names:
                target = f"{self._root}/{checkpoint.name}/{name}"
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(checkpoint / name), target)

    def complete(self, checkpoint: Path) -> None:
        """Make a copy of what has been put there.

        Raises:
            UserError: not all of it has.
        """
        absent = self._lacks(checkpoint.name, read_state(checkpoint).files)
        if absent is not None:
            raise UserError(f"train.copy_to={self.url}: {checkpoint.name}/{absent} did not arrive")
        self.put(checkpoint, [STATE_FILE])

    def drop(self, name: str) -> None:
        """Remove the copy of a checkpoint, whole or not: what makes it one first."""
        with _told(self.url):
            folder = f"{self._root}/{name}"
            if self._files.exists(f"{folder}/{STATE_FILE}"):
                self._files.rm_file(f"{folder}/{STATE_FILE}")
            if self._files.exists(folder):
                self._files.rm(folder, recursive=True)

    def names(self) -> list[str]:
        """Of what is or was to be a copy, newest first."""
        with _told(self.url):
            self._files.invalidate_cache()
            if not self._files.exists(self._root):
                return []
            paths = self._files.ls(self._root, detail=False)
        found = {str(path).rstrip("/").rpartition("/")[2] for path in paths}
        steps = {name: checkpoint_step(Path(name)) for name in found}
        known = {name: step for name, step in steps.items() if step is not None}
        return sorted(known, key=lambda name: known[name], reverse=True)

    def newest(self) -> str | None:
        """Name of the newest complete checkpoint; None if there is none."""
        return next((name for name in self.names() if self.state(name) is not None), None)

    def state(self, name: str) -> State | None:
        """Of a complete copy; None: it is none."""
        with _told(self.url):
            file = f"{self._root}/{name}/{STATE_FILE}"
            content = self._files.cat_file(file) if self._files.exists(file) else b""
        try:
            state = parse_state(content, source=file)
        except UserError:
            return None
        return state if self._lacks(name, state.files) is None else None

    def fetch(self, name: str, run_dir: Path) -> Path:
        """Bring a complete copy back into a run, and make sure that it is what was written.

        Raises:
            UserError: a file is not, or something cannot be read or written.
        """
        state = self.state(name)
        if state is None:
            raise UserError(f"train.copy_to={self.url}: {name} is not complete")
        target = run_dir / CHECKPOINTS_DIR / name
        partial = target.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        adapters = [f"{MODEL_DIR}/{ADAPTER_CONFIG}"] if state.base is not None else []
        with _told(self.url):
            for file in (*state.files, *adapters, STATE_FILE):
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(partial / file))
        for file, digest in state.digests.items():
            if digest_of(partial / file) != digest:
                raise UserError(
                    f"{self.url}/{name}/{file} is not what was written (its SHA-256 differs); "
                    "remove that copy to continue from the one before it."
                )
        shutil.rmtree(target, ignore_errors=True)  # one that is not complete
        partial.rename(target)
        return target

    def _lacks(self, name: str, files: Mapping[str, int]) -> str | None:
        """The first of some files that is not there in full."""
        folder = f"{self._root}/{name}"
        with _told(self.url):
            self._files.invalidate_cache()
            found = self._files.find(folder, detail=True)
        sizes = {str(path)[len(folder) :].lstrip("/"): info["size"] for path, info in found.items()}
        return next((file for file, size in files.items() if sizes.get(file) != size), None)


def prepare_new(copies: Copies) -> None:
    """Make sure that the copies of a new run are not mixed with those of another one.

    Raises:
        UserError: there are some, whole or not, or nothing can be written.
    """
    copies.check()
    names = copies.names()
    if names:
        raise UserError(
            f"train.copy_to={copies.url} already holds {names[0]}; continue it with --resume, or "
            "give another place."
        )


def prepare_resumed(copies: Copies, run_dir: Path) -> str | None:
    """Bring the newest copy into a run that has no checkpoint as new; or copy the newest of the run
    if the place has none as new. What was done, if anything was.

    Raises:
        UserError: the place holds another run, or something cannot be read or written.
    """
    copies.check()
    name, here = copies.newest(), complete_checkpoints(run_dir)
    state = None if name is None else copies.state(name)
    mine = read_state(here[-1]) if here else None
    if state is not None and mine is not None and state.run != mine.run and state.run and mine.run:
        raise UserError(
            f"train.copy_to={copies.url} holds the checkpoints of another run than {run_dir}; give "
            "another place."
        )
    if name is not None and state is not None and (mine is None or mine.step < state.step):
        fetched = copies.fetch(name, run_dir)
        for record in (METRICS_FILE, EVALUATIONS_FILE):  # an older machine's are of fewer steps
            if (fetched / record).exists():
                shutil.copyfile(fetched / record, run_dir / record)
        return f"fetched {name} from {copies.url}"
    if mine is not None and (state is None or state.step < mine.step):
        copies.drop(here[-1].name)
        files = [str(f.relative_to(here[-1])) for f in here[-1].rglob("*") if f.is_file()]
        copies.put(here[-1], sorted(set(files) - {STATE_FILE}))
        copies.complete(here[-1])
        return f"copied {here[-1].name}, which was not in {copies.url}"
    return None


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Make one line of what goes wrong between here and there: each place has errors of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError) and url.startswith("s3:"):
            reason += "; pip install 'shardwise[s3]'"
        raise UserError(f"train.copy_to={url}: {reason}") from None
