"""A plan, a model and rows that work, for the tests of bad input to break in one place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.shell import Done, assert_none_left, shardwise

LIMIT_S = 30.0
"""a refusal takes 5 s at most on a machine at rest, of which torch's import is the most"""


def fast_first(cases: Sequence[Any], number: int = 1) -> list[Any]:
    """The cases as parameters, of which all but the first few are slow."""
    return [
        *cases[:number],
        *(
            pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
            for case in cases[number:]
        ),
    ]


def long_last(cases: Sequence[Any], number: int) -> list[Any]:
    """The cases as parameters, of which all but the first few run in `make test-long` only."""
    return [
        *cases[:number],
        *(
            pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.long)
            for case in cases[number:]
        ),
    ]


SPY = """
import os
if "RANK" in os.environ:
    with open(os.environ["SPY_FILE"], "a") as file:
        file.write(os.environ["RANK"])
"""


@dataclass
class Bench:
    """A plan with its model and data that work, for a test to break in one place."""

    folder: Path
    model: Path
    rows: Path
    plan: dict[str, Any]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def run(self, *arguments: str | Path) -> Done:
        """Run a command; every process that is started as a rank is noted."""
        spy = self.folder / "spy"
        spy.mkdir(exist_ok=True)
        (spy / "sitecustomize.py").write_text(SPY)
        path = os.pathsep.join(filter(None, [str(spy), os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": path, "SPY_FILE": str(self.folder / "started")}
        return shardwise(self.folder, *arguments, limit=LIMIT_S, env=env)

    def train(self, *more: str | Path) -> Done:
        """Run `shardwise train` on the plan as it now is."""
        file = self.folder / "plan.yaml"
        file.write_text(yaml.safe_dump(self.plan, sort_keys=False), encoding="utf-8")
        return self.run("train", file, "--data", self.rows, "--out", self.out, *more)

    def assert_refused(self, done: Done, *named: str) -> None:
        """Exit code 2 and one line that names everything in `named`; nothing was started."""
        assert done.code == 2, done.text
        lines = done.err.splitlines()
        assert len(lines) == 1, done.text
        assert lines[0].startswith("shardwise: "), done.text
        missing = [text for text in named if text not in lines[0]]
        assert not missing, f"{missing} not in: {lines[0]}"
        assert not (self.folder / "started").exists(), "ranks were started"
        assert not (self.out / "checkpoints").exists()
        assert_none_left(self.folder)
