"""What is proved and what is refused: docs/capabilities.md, from the rules in force."""

from __future__ import annotations

from shardwise.models.families import FAMILIES

KINDS = ("fsdp", "tp", "fsdp x tp", "serve tp")


def table() -> str:
    """A Markdown table: family x kind -> proved, or refused."""
    lines = [f"| family | {' | '.join(KINDS)} |", "|" + "---|" * (len(KINDS) + 1)]
    for family in FAMILIES.values():
        cells = ["proved" if kind in family.proved else "refused" for kind in KINDS]
        lines.append(f"| {family.model_type} | {' | '.join(cells)} |")
    return "\n".join(lines)
