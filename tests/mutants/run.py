"""Inject known faults one at a time, and demand that a proof catches each.

    python -m tests.mutants.run            all of them
    python -m tests.mutants.run NAME ...   those named

Each fault (see faults.py) is put into a copy of the package, and its proof is run on that copy.
Only a failed comparison counts as caught: a crash, a hang or a test that cannot be collected shows
nothing about the numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.mutants.fault import Fault
from tests.mutants.faults import FAULTS
from tests.mutants.watch import RECORDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"
LIMIT_S = 180.0
"""of one fault, ten times what it takes; hangs end sooner, by the limits of the tests themselves"""


class Untested(Exception):
    """The proof did not run on the copy: nothing that follows would mean anything."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a proof says of a fault."""

    word: str
    """caught, SURVIVED or broken"""
    text: str


def main(names: Sequence[str]) -> int:
    """Run the faults named (all without a name); 0 if each is caught."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}")
        return 2
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy and its test go too
    failed = unmutated(faults)
    if failed:
        print("\n".join(["these proofs fail without any fault:", *failed]))
        return 1
    num_caught = 0
    for fault in faults:
        began = time.monotonic()
        verdict = judge(fault)
        num_caught += verdict.word == "caught"
        seconds = time.monotonic() - began
        print(f"{fault.name:<38} {verdict.word:<8} {seconds:5.1f} s  {verdict.text[:150]}")
        sys.stdout.flush()
    print(f"caught {num_caught} of {len(faults)}")
    return 0 if num_caught == len(faults) else 1


def unmutated(faults: Sequence[Fault]) -> list[str]:
    """Run every proof on an unchanged copy; what did not pass."""
    proofs = list(dict.fromkeys(fault.proof for fault in faults))
    began = time.monotonic()
    with copy_of_source() as folder:
        records, output = run_proofs(folder, proofs, "__init__.py", LIMIT_S + 30 * len(proofs))
    passed = {r["test"] for r in records if r["outcome"] == "passed" and r["when"] == "call"}
    bad = [f"{r['test']}: {r['error']}: {r['text']}" for r in records if r["outcome"] != "passed"]
    missing = [proof for proof in proofs if proof not in passed]
    seconds = time.monotonic() - began
    print(f"{len(passed)} of {len(proofs)} proofs pass on the unchanged source ({seconds:.0f} s)")
    sys.stdout.flush()
    return [*bad, *missing, *([output] if missing and not bad else [])]


def judge(fault: Fault) -> Verdict:
    """Put one fault into a copy, run its proof there, and say what it found."""
    with copy_of_source() as folder:
        target = folder / "shardwise" / fault.file
        target.write_text(mutated(fault), encoding="utf-8")
        records, output = run_proofs(folder, [fault.proof], fault.file, LIMIT_S)
    if not records:
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return Verdict(word="broken", text=" ".join(["no test ran:", *last]))
    bad = [record for record in records if record["outcome"] != "passed"]
    if not bad:
        return Verdict(word="SURVIVED", text=f"passes: {fault.proof}")
    (first, *_) = bad
    is_comparison = first["when"] == "call" and first["error"] == "AssertionError"
    text = first["text"] if is_comparison else f"{first['when']}: {first['error']}: {first['text']}"
    return Verdict(word="caught" if is_comparison else "broken", text=text)


def mutated(fault: Fault) -> str:
    """The text of the fault's file with the fault in it."""
    text = (SOURCE / fault.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise Untested(
            f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}"
        )
    return text.replace(fault.old, fault.new)


@contextmanager
def copy_of_source() -> Iterator[Path]:
    """A folder with a fresh copy of the package, to be imported in place of the installed one."""
    with TemporaryDirectory(prefix="shardwise-mutant-", ignore_cleanup_errors=True) as name:
        shutil.copytree(
            SOURCE, Path(name) / "shardwise", ignore=shutil.ignore_patterns("__pycache__")
        )
        yield Path(name)


def run_proofs(
    folder: Path, proofs: Sequence[str], file: str, limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run tests on the package in `folder`; the records of the plugin, and pytest's output.

    Args:
        file: of the package, which must have been imported from the copy.

    Raises:
        Untested: the copy's `file` was not imported, so something else was tested.
    """
    taken_away = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTEST_ADDOPTS")
    env = {name: value for name, value in os.environ.items() if name not in taken_away}
    temporary = folder / "tmp"
    temporary.mkdir()
    records = folder / "records"
    env |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", RECORDS: str(records)}
    env |= {"TMPDIR": str(temporary)}
    where = [sys.executable, "-c", "import shardwise; print(shardwise.__file__)"]
    imported = subprocess.run(where, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if not imported.stdout.startswith(f"{folder}{os.sep}"):
        raise Untested(f"not the copy is imported but {imported.stdout}{imported.stderr}")
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command = [*pytest, "-p", "tests.mutants.watch", *proofs]
    output = _run(command, env, folder / "output", limit_s)
    lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
    module = folder / "shardwise" / file
    # Python leaves the compiled module beside the one that it has imported
    compiled = (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc")
    if lines and not any(compiled):
        raise Untested(f"the proof {proofs[0]} has not imported the copy's {file}")
    return [json.loads(line) for line in lines], output


def _run(command: Sequence[str], env: dict[str, str], output: Path, limit_s: float) -> str:
    """Run a command in a session of its own, of which nothing is left when it ends."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {limit_s:.0f} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return output.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
