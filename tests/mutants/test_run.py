"""What counts as caught: a failed comparison on the changed copy, and nothing else."""

from __future__ import annotations

import pytest

from tests.mutants import run
from tests.mutants.fault import Fault
from tests.mutants.run import Untested, copy_of_source, judge, run_proofs, unmutated

OLD = "    if step < train.warmup_steps:\n"
PROOF = "tests/unit/test_optim.py::test_schedules[linear-0.5]"


def fault(new: str, old: str = OLD, file: str = "trainer/optim.py", proof: str = PROOF) -> Fault:
    return Fault(name="made-up", history="a/b#1", file=file, old=old, new=new, proof=proof)


@pytest.mark.parametrize(
    ("new", "word", "text"),
    [
        (f"    step += 1\n{OLD}", "caught", "assert 0.9"),
        (f"    step += 0\n{OLD}", "SURVIVED", PROOF),
        (f"    step += missing\n{OLD}", "broken", "call: NameError: name 'missing'"),
        pytest.param(
            *(f"    import time; time.sleep(60)\n{OLD}", "broken", "stopped after 30 s"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["other number", "same number", "crash", "hang"],
)
def test_a_failed_comparison_alone_counts(
    monkeypatch: pytest.MonkeyPatch, new: str, word: str, text: str
) -> None:
    monkeypatch.setattr(run, "LIMIT_S", 30.0)
    verdict = judge(fault(new))
    assert verdict.word == word, verdict
    assert text in verdict.text


def test_a_module_that_cannot_be_imported_is_not_caught() -> None:
    verdict = judge(fault("import maths\n", old="import math\n"))
    assert verdict.word == "broken", verdict
    assert "no test ran" in verdict.text


def test_a_proof_that_never_sees_the_change_is_an_error() -> None:
    """As when another copy of the package is what is imported."""
    with pytest.raises(Untested, match="has not imported the copy's server/engine"):
        judge(fault("import queue as q\n", old="import queue\n", file="server/engine.py"))


def test_a_proof_that_fails_without_a_fault_is_named() -> None:
    missing = PROOF.replace("linear", "square")
    failed = unmutated([fault("", proof=missing)])
    assert failed[0] == missing


def test_the_package_beside_the_tests_is_never_what_is_tested() -> None:
    with copy_of_source() as folder:
        (folder / "shardwise").rename(folder / "away")
        with pytest.raises(Untested, match="not the copy is imported"):
            run_proofs(folder, [PROOF], "__init__.py", 10.0)
