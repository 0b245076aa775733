"""What is proved and what is refused: docs/capabilities.md, from the rules in force."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.models.families import FAMILIES, KINDS, PAIRS


def table() -> str:
    """Two Markdown tables, of kinds alone and of pairs: family x kind -> proved, or refused."""
    return f"{_table(KINDS)}\n\n{_table(PAIRS)}"


def _table(kinds: Sequence[str]) -> str:
    lines = [f"| family | {' | '.join(kinds)} |", "|" + "---|" * (len(kinds) + 1)]
    for family in FAMILIES.values():
        cells = ["proved" if kind in family.proved else "refused" for kind in kinds]
        lines.append(f"| {family.model_type} | {' | '.join(cells)} |")
    return "\n".join(lines)
