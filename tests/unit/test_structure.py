"""The shape of the package: imports go one way, planning needs no torch, files stay readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent
ORDER = [  # each may import what stands before it
    ("errors", "signals", "parsing", "config", "catalog", "console"),
    ("models.hub", "models.stored"),
    ("models.families", "models.planned", "models.layers", "models.adapters", "models.facts"),
    ("models.nf4",),
    ("models.sizes", "models.read", "models.gguf", "models.lookup"),
    ("planner",),
    ("models.attention", "models.build", "parallel", "probe"),
    ("weights",),
    ("trainer", "server"),
    ("launch",),
    ("api",),
    ("cli_catalog", "cli"),
]


def level(module: str) -> int:
    """Place of a module like `planner.layout` in the order."""
    for place, names in enumerate(ORDER):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return place
    raise AssertionError(f"{module} has no place in the order of imports")


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name and path.read_text().strip():
            found[name] = path
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            base = (node.module or "").removeprefix("shardwise").removeprefix(".")
            names |= {base} if base else {a.name for a in node.names if a.name != "__version__"}
    return names


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    for other in imported(modules()[name]):
        assert level(other) <= level(name), f"{name} imports {other}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_private_imports_stand_in_one_file() -> None:
    """Of torch and transformers: nothing with a leading underscore elsewhere."""
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "torch",
                "transformers",
            ):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                private = [part for part in parts if part.startswith("_")]
                assert not private or name == "parallel._torch", f"{name} imports {private}"


@pytest.mark.parametrize(
    "code",
    [
        "import shardwise.cli",
        "import shardwise; shardwise.plan",
        "import shardwise.weights.index, shardwise.launch.start, shardwise.trainer.report",
        "import shardwise.launch.inspect; shardwise.launch.inspect.look_at",
    ],
)
def test_planning_and_checking_import_no_torch(code: str) -> None:
    check = f"import sys; {code}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_no_device_is_written_into_the_library() -> None:
    for name, path in modules().items():
        assert "cuda" not in path.read_text().lower(), name


def test_user_input_is_not_checked_by_assert() -> None:
    for name, path in modules().items():
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not any(isinstance(node, ast.Assert) for node in nodes), name
