"""What is proved and what is refused: docs/capabilities.md, from the rules in force."""

from __future__ import annotations

from shardwise.models.families import ALL_KINDS, FAMILIES


def table() -> str:
    """A Markdown table: family x kind -> proved, or refused."""
    lines = [f"| family | {' | '.join(ALL_KINDS)} |", "|" + "---|" * (len(ALL_KINDS) + 1)]
    for family in FAMILIES.values():
        cells = ["proved" if kind in family.proved else "refused" for kind in ALL_KINDS]
        lines.append(f"| {family.model_type} | {' | '.join(cells)} |")
    return "\n".join(lines)
