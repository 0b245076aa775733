"""A pytest plugin (`-p tests.mutants.watch`): write down what became of each test, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RECORDS = "SHARDWISE_MUTANT_RECORDS"
"""environment variable: the file that gets one line of JSON a test"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Record the outcome of each phase, with the type of the error and its first line."""
    report = yield
    if call.when == "call" or report.outcome != "passed":
        error = call.excinfo
        record = {
            "test": item.nodeid,
            "when": call.when,
            "outcome": report.outcome,
            "error": None if error is None else error.type.__name__,
            "text": "" if error is None else _text(error.value),
        }
        with Path(os.environ[RECORDS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return report


def _text(error: BaseException) -> str:
    """The first line, and the comparison that failed if that is another one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    signs = ("assert ", "Expected ", "Greatest absolute difference")
    comparisons = [line for line in lines[1:] if line.startswith(signs)]
    return " ".join(lines[:1] + comparisons[:1])
