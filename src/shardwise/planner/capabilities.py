"""What is proved, planned and refused: docs/capabilities.md, from the rules in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.catalog.models import load_models
from shardwise.models.families import KINDS, PAIRS, Family
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.read import facts_of_config, why_not_run


def table() -> str:
    """Two Markdown tables, of kinds alone and of pairs: family x kind -> proved, planned (of a
    family that nothing is proved for), or refused."""
    return f"{_table(KINDS)}\n\n{_table(PAIRS)}"


def _table(kinds: Sequence[str]) -> str:
    lines = [f"| family | {' | '.join(kinds)} |", "|" + "---|" * (len(kinds) + 1)]
    for family in ALL_FAMILIES.values():
        cells = [_state(family, kind) for kind in kinds]
        lines.append(f"| {family.model_type} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _state(family: Family, kind: str) -> str:
    if kind in family.proved:
        return "proved"
    return "planned" if kind in family.kinds else "refused"


def known_models() -> list[dict[str, Any]]:
    """The catalogue as plain data, with the parameters of each model and of a mixture those that
    work on a token; context in tokens."""
    rows = []
    for model in load_models().values():
        facts = facts_of_config(model.config, source=model.name, planning=True)
        reason = model.only_planned or why_not_run(model.config)
        rows.append(
            {
                "name": model.name,
                "hub": model.hub,
                "family": facts.model_type,
                "parameters": facts.num_parameters,
                "active": facts.num_parameters_met if facts.num_experts else None,
                "context": facts.max_positions,
                "runs": reason is None,
                "why_not": reason,
                "sources": [source.model_dump() for source in model.sources],
            }
        )
    return rows
