"""What a row of the table of faults says, and short names for the proofs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of the source that has to be noticed."""

    name: str
    history: str
    """the public report or fix that it is after"""
    file: str
    """below src/shardwise"""
    old: str
    """what is replaced; stands once in the file"""
    new: str
    proof: str
    """id of the test that has to fail, by a comparison of numbers"""


ONES = "tests/ranks/test_norm.py::test_norm_of_ones_is_the_root_of_their_number"
TOKENS = "tests/ranks/test_tokens.py::"
RUN = "tests/ranks/test_loop.py::test_a_run_equals_one_process_also_when_it_is_resumed"
EVALUATION = "tests/ranks/test_parity.py::test_evaluation_is_the_same_by_every_layout"
RESUME = "tests/ranks/test_checkpoint.py::test_resume_on_the_same_or_another_layout"
_PARITY = "tests/ranks/test_parity.py::test_layout_equals_one_process"


def parity(case: str, *, slow: bool = False) -> str:
    """The comparison of a layout with one process; `case` as tests/ranks/layouts.py writes it."""
    return f"{_PARITY}{'_slow' if slow else ''}[{case}]"
