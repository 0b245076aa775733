"""Copies of a run's checkpoints in another place: an object store, or any other file system that
fsspec knows. No torch.

An object store renames nothing, so the file that says what a checkpoint consists of is copied last:
a copy without it, or with a file of another size, is none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import UserError
from shardwise.trainer.measured import EVALUATIONS_FILE, METRICS_FILE
from shardwise.trainer.state import (
    CHECKPOINTS_DIR,
    STATE_FILE,
    checkpoint_step,
    complete_checkpoints,
    digest_of,
    read_state,
)

_TRIAL = ".shardwise-can-write"


class Copies:
    """The checkpoints at a URL such as s3://bucket/runs/a."""

    def __init__(self, url: str) -> None:
        """Nothing is asked of the place yet.

        Raises:
            UserError: nothing that is installed knows such URLs.
        """
        self.url = url.rstrip("/")
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

    def drop(self, name: str) -> None:
        """Remove the copy of a checkpoint, what makes it one first."""
        with _told(self.url):
            folder = f"{self._root}/{name}"
            if self._files.exists(f"{folder}/{STATE_FILE}"):
                self._files.rm_file(f"{folder}/{STATE_FILE}")
            if self._files.exists(folder):
                self._files.rm(folder, recursive=True)

    def newest(self) -> str | None:
        """Name of the newest complete checkpoint; None if there is none."""
        with _told(self.url):
            self._files.invalidate_cache()
            if not self._files.exists(self._root):
                return None
            paths = self._files.ls(self._root, detail=False)
            found = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        names = [name for name in found if checkpoint_step(Path(name)) is not None]
        names.sort(key=lambda name: checkpoint_step(Path(name)) or 0, reverse=True)
        return next((name for name in names if self._is_complete(name)), None)

    def fetch(self, name: str, run_dir: Path) -> Path:
        """Bring a checkpoint back into a run, and make sure that it is what was written.

        Raises:
            UserError: a file is not, or something cannot be read or written.
        """
        target = run_dir / CHECKPOINTS_DIR / name
        partial, folder = target.with_name(f".{name}.partial"), f"{self._root}/{name}"
        shutil.rmtree(partial, ignore_errors=True)
        with _told(self.url):
            for file in self._sizes(folder):
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{folder}/{file}", str(partial / file))
        for file, digest in read_state(partial).digests.items():
            if digest_of(partial / file) != digest:
                raise UserError(
                    f"{self.url}/{name}/{file} is not what was written (its SHA-256 differs); "
                    "remove that copy to continue from the one before it."
                )
        partial.rename(target)
        return target

    def _sizes(self, folder: str) -> dict[str, int]:
        """Files below a folder -> bytes."""
        found = self._files.find(folder, detail=True)
        return {str(path)[len(folder) :].lstrip("/"): info["size"] for path, info in found.items()}

    def _is_complete(self, name: str) -> bool:
        """Whether all files that its state names are there, of the right sizes."""
        folder = f"{self._root}/{name}"
        with _told(self.url):
            sizes = self._sizes(folder)
            if STATE_FILE not in sizes:
                return False
            state = json.loads(self._files.cat_file(f"{folder}/{STATE_FILE}"))
            return all(sizes.get(file) == size for file, size in state["files"].items())


def fetch_newest(url: str, run_dir: Path) -> Path | None:
    """Bring the newest copy into a run that has no checkpoint as new, and the run's records if it
    has none; None if nothing was brought (errors as `Copies.fetch`)."""
    copies = Copies(url)
    name = copies.newest()
    here = [checkpoint_step(path) for path in complete_checkpoints(run_dir)]
    step = None if name is None else checkpoint_step(Path(name))
    if name is None or step is None or any(one is not None and one >= step for one in here):
        return None
    fetched = copies.fetch(name, run_dir)
    for record in (METRICS_FILE, EVALUATIONS_FILE):
        if (fetched / record).exists() and not (run_dir / record).exists():
            shutil.copyfile(fetched / record, run_dir / record)
    return fetched


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
