"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import shardwise
from shardwise.planner.capabilities import table

ROOT = Path(__file__).parents[2]


def test_capabilities_are_those_of_the_table_in_force() -> None:
    """Write the table anew with: shardwise catalog families."""
    assert table() in (ROOT / "docs" / "capabilities.md").read_text()


def test_the_file_tree_of_the_architecture_is_the_one_there_is() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text.split("```", 2)[1]
    named = set(re.findall(r"^ *(\w+\.(?:py|yaml))\b", tree, flags=re.MULTILINE))
    source = ROOT / "src" / "shardwise"
    real = {
        path.name
        for path in source.rglob("*")
        if path.suffix in (".py", ".yaml") and path.name != "__init__.py"
    }
    assert named == real


def test_the_changelog_starts_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", text, flags=re.MULTILINE)[1] == shardwise.__version__  # type: ignore[index]


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
