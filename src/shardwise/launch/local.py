"""Start the ranks of a job on this machine, watch them, and leave none behind.

The ranks meet through a file of a folder made for this group, so no port can be taken by someone
else; there they also report their errors, so that a full disk of the job's can be reported. The
first rank's output goes to the terminal, the others' to log files. When one rank fails, all are
killed within seconds and the error of the one that failed first is reported. Each rank holds the
read end of a pipe whose write end is the launcher's: when the launcher dies, however, so do they.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise import console
from shardwise.errors import Interrupted, RunFailed, ShardwiseError, UserError
from shardwise.launch.job import Job
from shardwise.signals import handling
from shardwise.trainer.state import complete_checkpoints

LOG_DIR = "logs"
GROUP_FOLDER = "SHARDWISE_GROUP_FOLDER"
"""environment variable that tells a rank where its group's folder is"""
GRACE_S = 30.0
"""how long ranks may take to stop after SIGTERM"""
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(128 * 2**10),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**10),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
"""Left alone, glibc keeps freed blocks of up to 32 MiB, half as much again as the tensors need.
Given back at once, the resident set is what the plan says; huge pages make up for most of the page
faults that this costs. Of bf16 products oneDNN keeps code and buffers for each shape, and rows of
all lengths have many: 1,024 of them, if it is let."""
SERVING_ALLOCATOR = {
    **ALLOCATOR,
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}
"""A server's passes are short and alike: giving blocks back costs a fifth of its time (the half of
that of a prompt), and keeping them next to nothing."""
_POLL_S = 0.05
_AFTERMATH_S = 0.5
_NOTICE_S = 2.0


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    ended_at: float | None = None
    killed: bool = False
    """by the launcher, because another rank had failed"""

    def watch(self) -> None:
        self.process.wait()
        self.ended_at = time.time()


@dataclass
class LocalGroup:
    """The running ranks of one job."""

    job: Job
    folder: Path
    """of this group alone: rendezvous and error reports"""
    ranks: list[_Rank] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until every rank has ended well.

        Raises:
            RunFailed: a rank failed; all others have been killed.
            UserError: a rank refused its input.
        """
        while any(rank.ended_at is None for rank in self.ranks):
            if any(self._has_failed(rank) for rank in self.ranks):
                time.sleep(_AFTERMATH_S)  # ranks that fail because another one did come right after
                break
            time.sleep(_POLL_S)
        silent = [rank for rank in self.ranks if rank.ended_at is None]
        failed = [rank for rank in self.ranks if self._has_failed(rank)]
        self.kill()
        if failed:
            raise self._failure(failed, silent)

    def _has_failed(self, rank: _Rank) -> bool:
        """Whether a rank ended by itself without having done its work."""
        done = done_file(self.folder, rank.number).exists()
        return rank.ended_at is not None and not rank.killed and not done

    def stop(self) -> None:
        """Ask the ranks to end; kill those that do not within the grace time.

        Those that train end after the step that is under way, with a checkpoint: they get the time
        that this takes, unless one of them fails.
        """
        self.send(signal.SIGTERM)
        saves = self.job.kind == "train"
        deadline = float("inf") if saves else time.monotonic() + GRACE_S
        while any(rank.ended_at is None for rank in self.ranks) and time.monotonic() < deadline:
            if saves and any(self._has_failed(rank) for rank in self.ranks):
                break
            time.sleep(_POLL_S)
        self.kill()

    def send(self, number: signal.Signals) -> None:
        """Send every rank a signal."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                rank.process.send_signal(number)

    def kill(self) -> None:
        """Kill every rank that still runs, with its children."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.killed = True
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()

    def _failure(self, failed: list[_Rank], silent: list[_Rank]) -> ShardwiseError:
        """The error of the rank that failed first; or, if it had waited in vain, for whom."""
        deaths = [(*self._death(rank), rank) for rank in failed]
        _, report, rank = min(deaths, key=lambda death: death[0])
        if report.get("user_error"):
            return UserError(str(report["user_error"]))
        details = report.get("traceback") or self._last_words(rank)
        reason = report.get("summary") or _how_it_ended(rank.process.returncode)
        summary = f"rank {rank.number} of {len(self.ranks)} failed first: {reason}"
        if silent and "timed out" in details.lower():
            names = " and ".join(f"rank {other.number}" for other in silent)
            summary = (
                f"{names} of {len(self.ranks)} did not answer: rank {rank.number} waited for "
                f"{self.job.timeout_s:g} s, as {self.job.timeout_key} says"
            )
        return RunFailed(f"{details.rstrip()}\n{summary}".lstrip())

    def _death(self, rank: _Rank) -> tuple[float, dict[str, Any]]:
        """When a rank failed, and its own report if it could write one."""
        file = error_file(self.folder, rank.number)
        with suppress(OSError, ValueError):
            report = json.loads(file.read_text(encoding="utf-8"))
            return float(report["time"]), report
        # it was torn away; whoever talked to it may have noticed before the launcher did
        return (rank.ended_at or time.time()) - _NOTICE_S, {}

    def _last_words(self, rank: _Rank) -> str:
        log = self.job.work / LOG_DIR / f"rank-{rank.number}.log"
        lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        return "\n".join(f"[rank {rank.number}] {line}" for line in lines)


def error_file(group_folder: Path, rank: int) -> Path:
    """Where a rank reports the error that ended it."""
    return group_folder / f"rank-{rank}.error"


def done_file(group_folder: Path, rank: int) -> Path:
    """What a rank leaves when it has done its work."""
    return group_folder / f"rank-{rank}.done"


@contextmanager
def local_group(job: Job) -> Iterator[LocalGroup]:
    """Start the ranks of a job; none is left when the block ends, however it ends."""
    logs = job.work / LOG_DIR
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    job_file = job.save()
    with TemporaryDirectory(prefix="shardwise-group-") as folder:
        group = LocalGroup(job, Path(folder))
        try:
            for number in range(job.num_processes):
                with _uninterrupted():
                    group.ranks.append(_start(group, job_file, number))
            yield group
        finally:
            group.kill()


def run_local(job: Job) -> None:
    """Run a job to its end on this machine (errors as `LocalGroup.wait`).

    Ctrl-C and SIGTERM stop the ranks; a second one kills them. That is how a server ends well; any
    other job raises Interrupted. SIGUSR1 is passed on to those that train, who save then.
    """
    # Before the first rank: they may come while the ranks start. These inherit that SIGUSR1 is
    # ignored, so that none dies of one that comes before it can do what it asks for.
    with handling({signal.SIGTERM: _interrupt, signal.SIGUSR1: signal.SIG_IGN}):
        try:
            with local_group(job) as group:
                save = {signal.SIGUSR1: lambda *_: group.send(signal.SIGUSR1)}
                with handling(save if job.kind == "train" else {}):
                    _wait_or_stop(group)
        except KeyboardInterrupt:
            if job.kind != "serve":
                raise _interrupted(job) from None


def _wait_or_stop(group: LocalGroup) -> None:
    try:
        group.wait()
    except KeyboardInterrupt:
        if group.job.kind == "train":
            console.out.print(
                "stopping after this step, with a checkpoint; once more stops at once"
            )
        group.stop()
        raise


def _interrupted(job: Job) -> Interrupted:
    checkpoints = complete_checkpoints(job.path) if job.kind == "train" else []
    more = f"; {checkpoints[-1].name} is complete: go on with --resume" if checkpoints else ""
    return Interrupted(f"interrupted; all ranks have been stopped{more}.")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C or SIGTERM counts after the block: a rank that is started in it is known by then,
    and can be stopped."""
    noted: list[int] = []
    note = {n: lambda number, _: noted.append(number) for n in (signal.SIGINT, signal.SIGTERM)}
    with handling(note):
        yield
    if noted:
        raise KeyboardInterrupt


def _start(group: LocalGroup, job_file: Path, number: int) -> _Rank:
    log = (group.job.work / LOG_DIR / f"rank-{number}.log").open("wb")
    output = None if number == 0 else log
    with log:
        process = subprocess.Popen(
            # -P: what lies in the user's folder must not stand in for a library
            [sys.executable, "-P", "-m", "shardwise.launch.worker", str(job_file)],
            stdin=subprocess.PIPE,  # held open; its end tells the rank that the launcher is gone
            stdout=output,
            stderr=output,
            env=_environment(group, number),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops the ranks
        )
    rank = _Rank(number, process)
    threading.Thread(target=rank.watch, daemon=True).start()
    return rank


def _environment(group: LocalGroup, number: int) -> Mapping[str, str]:
    num_ranks = group.job.num_processes
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo" if Path("/sys/class/net/lo").exists() else "",
        **(SERVING_ALLOCATOR if group.job.kind == "serve" else ALLOCATOR),
    }
    ranks = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        GROUP_FOLDER: str(group.folder),
    }
    given = {name: value for name, value in defaults.items() if value}
    return {**given, **os.environ, **ranks}


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "it was killed by SIGKILL (often the kernel, when memory runs out)"
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with exit code {code} and no error message"
