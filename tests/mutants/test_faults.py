"""The table of faults cannot rot: each can still be put into the source, and its proof exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.mutants.fault import Fault
from tests.mutants.faults import FAULTS
from tests.mutants.run import ROOT, SOURCE, mutated


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_source(fault: Fault) -> None:
    """It replaces one place, by something else that compiles, and is after a public report."""
    assert (SOURCE / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    compile(mutated(fault), fault.file, "exec")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.history)


def test_names_are_used_once() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_every_proof_is_a_test_that_exists() -> None:
    files = sorted({fault.proof.partition("::")[0] for fault in FAULTS})
    options = ["-o", "addopts=", "--collect-only", "-q"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {fault.proof for fault in FAULTS} <= set(done.stdout.splitlines())
