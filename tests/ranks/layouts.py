"""The matrix of the proofs: which layouts are compared with one process, for which models."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from shardwise.models.families import AXES
from tests.models import MODELS, PLANNED

LORA, QLORA = "+lora", "+qlora"
"""of a model's name: its adapters are trained, and nothing else; on matrices of four bits"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model trained by one layout, and settings that differ from the usual ones."""

    model: str
    layout: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = {**self.layout, **self.train}
        return "-".join([self.model, *(f"{key}={value}" for key, value in settings.items())])

    @property
    def kinds(self) -> set[str]:
        """Names in the capability table of what this case proves."""
        if self.train.get("pipeline_schedule", "1f1b") != "1f1b" or len(self.train) > 1:
            return set()
        if self.model.endswith(LORA):
            return {"lora"}
        if self.model.endswith(QLORA):
            return {"qlora"}
        axes = [axis for axis in AXES if self.layout.get(axis, 1) > 1]
        if self.layout.get("ep", 1) > 1:
            return {"ep"} if axes == ["fsdp"] else set()
        if axes == ["fsdp"] and self.layout.get("zero", 3) < 3:
            return {f"ZeRO-{self.layout['zero']}"}
        kind = " x ".join(axes)
        if not self.layout.get("sequence_parallel"):
            return {kind}
        split = {"sequence parallel"} if axes == ["tp"] else set()
        # experts always have the sequence split
        return split | {kind} if self.model in EXPERT_MODELS else split


SPLIT = {"sequence_parallel": True}
SIZES: list[dict[str, Any]] = [
    {"fsdp": 1},
    {"fsdp": 4},
    {"fsdp": 5},  # leaves ranks without a part of the smallest parameters
]
SINGLES: list[dict[str, Any]] = [
    *SIZES,
    {"fsdp": 2},
    {"fsdp": 2, "zero": 1},
    {"fsdp": 2, "zero": 2},
    {"dp": 2},
    {"tp": 2},
    {"tp": 2, **SPLIT},
    {"pp": 2},
    {"cp": 2},
]
FEWER = [layout for layout in SINGLES if layout not in SIZES]
THREE: list[dict[str, Any]] = [{"tp": 3}, {"tp": 3, **SPLIT}, {"pp": 3}]
"""for the model of nine heads"""


def _pair(one: str, other: str) -> dict[str, Any]:
    layout = {one: 2, other: 2}
    return {**layout, "zero": 1} if one == "pp" and other in ("fsdp", "cp") else layout


PAIRS = [_pair(*pair) for pair in combinations(AXES, 2)]
MORE: list[dict[str, Any]] = [
    {"dp": 2, "fsdp": 2, "zero": 1},
    {"fsdp": 2, "tp": 2, "zero": 1},
    {"fsdp": 2, "tp": 2, **SPLIT},
    {"pp": 2, "tp": 2, **SPLIT},
    {"cp": 2, "tp": 2, **SPLIT},
    {"tp": 4, **SPLIT},
    {"cp": 4},
    {"pp": 4},
]
TRIPLES: list[dict[str, Any]] = [
    {"dp": 2, "fsdp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "fsdp": 2, "tp": 2, "zero": 1, **SPLIT},
    {"pp": 2, "dp": 2, "fsdp": 2, "zero": 1},
    {"pp": 2, "cp": 2, "tp": 2, "zero": 1, **SPLIT},
    {"fsdp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "fsdp": 2, "cp": 2, "zero": 1},
]
SCHEDULES = ["gpipe", "interleaved", "zbv", "dualpipev"]
FAMILY_MODELS = ["LL", "MI_SW", "Q2_SW", "Q3", "G3", "PHI"]
"""one of each family, for the pairs"""

EXPERT_MODELS = ["MIX", "MOE", "MOE0", "MOED", "MOE4", "OSS", "OSS64", "OSSB", "DS", "DSQ"]
FEW: dict[str, list[str]] = {
    "MOE0": ["pp", "tp"],
    "MOE4": [],
    "MOED": ["tp", "pp", "ep"],
    "OSS64": [],
    "OSSB": ["pp", "cp"],
    "DSQ": ["tp", "pp"],
}
"""variants of a family, which are run on layouts of these axes alone"""
WIDE_MODELS = ["LLW", "LLBW", "MIW", "Q2W", "Q3W", "G3W", "PHIW"]
"""for matrices of four bits alone"""
UNRULED = "GPT2"
"""whose matrices nobody has rules for"""

EXPERTS: list[dict[str, Any]] = [
    {"fsdp": 2, "ep": 2},
    {"fsdp": 4, "ep": 2},
    {"fsdp": 4, "ep": 4, "zero": 1},
    {"dp": 2, "fsdp": 2, "ep": 2, "zero": 2},
    {"cp": 2, "ep": 2},
    {"tp": 2, "ep": 2, **SPLIT},
    {"fsdp": 2, "tp": 2, "ep": 4, **SPLIT},
    {"cp": 2, "tp": 2, "ep": 2, **SPLIT},
    {"pp": 2, "fsdp": 2, "ep": 2, "zero": 1},
    {"pp": 2, "tp": 2, "ep": 2, **SPLIT},
]

FAST = [
    Case(model="MIX", layout={"fsdp": 2, "ep": 2}),
    Case(model="MOE", layout={"fsdp": 2, "tp": 2, "ep": 4, **SPLIT}),
    Case(model="MOE", layout={"cp": 2}),
    Case(model="MOE0", layout={"pp": 2, "fsdp": 2, "ep": 2, "zero": 1}),
    Case(model="MOE", layout={"pp": 2, "tp": 2, **SPLIT}),
    Case(model="OSS", layout={"fsdp": 2, "ep": 2}),
    Case(model="OSS", layout={"tp": 2, **SPLIT}),
    Case(model="OSS", layout={"cp": 2}),
    Case(model="DS", layout={"fsdp": 2, "tp": 2, "ep": 4, **SPLIT}),
    Case(model="DS", layout={"pp": 2}),
    Case(model="DS", layout={"cp": 2}),
    Case(model="PHI", layout={"tp": 2}),
    Case(model="PHI", layout={"tp": 4, **SPLIT}),
    Case(model="GPT2", layout={"fsdp": 2}),
    Case(model="LL", layout={"tp": 2}),
    Case(model="LL", layout={"fsdp": 2, "tp": 2}),
    Case(model="LL321", layout={"tp": 2}),
    Case(model="LL321T", layout={"fsdp": 2, "tp": 2}),
    Case(model="ODD", layout={"tp": 3}),
    Case(model="ODD", layout={"fsdp": 2}),
    Case(model="Q3", layout={"fsdp": 2, "tp": 2}),
    Case(model="G3", layout={"tp": 2}),
    Case(model="LL", layout={"dp": 2}),
    Case(model="LL321T", layout={"dp": 2, "fsdp": 2}),
    Case(model="ODD", layout={"fsdp": 2, "zero": 1}),
    Case(model="Q3", layout={"fsdp": 2, "zero": 2}),
    Case(model="MI_SW", layout={"fsdp": 2, "tp": 2}),
    Case(model="LL", layout={"tp": 2, **SPLIT}),
    Case(model="LLB", layout={"tp": 4, **SPLIT}),
    Case(model="LL1", layout={"tp": 2}),
    Case(model="Q3", layout={"pp": 2}),
    Case(model="LL321T", layout={"pp": 2}, train={"pipeline_schedule": "zbv"}),
    Case(model="ODD", layout={"pp": 3}),
    Case(model="Q3", layout={"pp": 2, "tp": 2, **SPLIT}),
    Case(model="LL", layout={"pp": 2, "fsdp": 2, "zero": 1}),
    Case(model="G3", layout={"cp": 2}),
    Case(model="MI_SW", layout={"fsdp": 2, "cp": 2}),
    Case(model="LL", layout={"pp": 2, "cp": 2, "zero": 1}),
]


def _slow() -> list[Case]:
    cases = []
    for model in EXPERT_MODELS:
        layouts = [
            {**layout, **SPLIT} if "tp" in layout else layout
            for layout in (*(FEWER if model != "MIX" else SINGLES + MORE[:4]), *PAIRS, *EXPERTS)
        ]
        cases += [
            Case(model=model, layout=layout)
            for layout in layouts
            if layout.get("pp", 1) <= 2  # of two layers
            and (model not in FEW or {*layout} & {*AXES, "ep"} <= {*FEW[model]})
        ]
    ruled = [layout for layout in SINGLES if not {"tp", "pp", "cp"} & set(layout)]
    cases += [Case(model=UNRULED, layout=layout) for layout in [*ruled, _pair("dp", "fsdp")]]
    for model in sorted(set(MODELS) - {*EXPERT_MODELS, *PLANNED, *WIDE_MODELS, UNRULED}):
        singles = SINGLES if model in ("LL", "Q3", "LL321T") else FEWER
        if model not in (*FAMILY_MODELS, "ODD", "LL321T"):  # variants of a family
            singles = [layout for layout in FEWER if "zero" not in layout and "dp" not in layout]
        if model == "ODD":
            singles = [case for case in SINGLES if "tp" not in case] + THREE
        cases += [Case(model=model, layout=layout) for layout in singles]
    for model in FAMILY_MODELS:
        more = MORE if model in ("LL", "G3") else []
        cases += [Case(model=model, layout=layout) for layout in PAIRS + more]
    cases += [Case(model="ODD", layout=layout) for layout in PAIRS if "tp" not in layout]
    for model in ("LL", "Q3"):
        for schedule in SCHEDULES:
            products = [{"pp": 2, "fsdp": 2, "zero": 1}, {"pp": 2, "tp": 2}]
            for layout in [{"pp": 2}, *(products if model == "Q3" else [])]:
                train: dict[str, Any] = {"pipeline_schedule": schedule}
                if schedule == "dualpipev" or "fsdp" in layout:
                    train["micro_batch"] = 1
                cases.append(Case(model=model, layout=layout, train=train))
    for schedule in SCHEDULES:  # two layers for as many stages, or four for twice as many
        model = "MOE" if schedule == "gpipe" else "MOE4"
        train = {"pipeline_schedule": schedule, "micro_batch": 1}
        cases.append(Case(model=model, layout={"pp": 2}, train=train))
    cases += [
        Case(model="Q3", layout={"pp": 2}, train={"pipeline_schedule": "gpipe", "micro_batch": 8}),
        Case(model="Q3", layout={"pp": 4}, train={"pipeline_schedule": "gpipe", "micro_batch": 4}),
    ]  # fewer micro-batches than stages
    for model in ("Q3", "G3"):
        for layout in TRIPLES:
            # eight rows over four data ranks: a row each time, for two micro-batches
            few = {"pp", "dp", "fsdp"} <= set(layout)
            cases.append(Case(model=model, layout=layout, train={"micro_batch": 1} if few else {}))
    return cases


SLOW = [case for number, case in enumerate(_slow()) if case not in FAST + _slow()[:number]]


PACKED_FAST = [
    Case(model="LL", layout={"fsdp": 2}),
    Case(model="G3", layout={"tp": 2, **SPLIT}),
    Case(model="Q3", layout={"pp": 2}),
    Case(model="G3", layout={"cp": 2}),
    Case(model="MOE", layout={"cp": 2}),
    Case(model="OSS", layout={"cp": 2}),
    Case(model="MOE", layout={"pp": 2}),
    Case(model="MI_SW", layout={"pp": 2, "cp": 2, "zero": 1}),
]
"""several rows in a sequence"""


def _packed() -> list[Case]:
    layouts: list[dict[str, Any]] = [
        {"fsdp": 2},
        {"tp": 2},
        {"tp": 2, **SPLIT},
        {"pp": 2},
        {"cp": 2},
        {"pp": 2, "cp": 2, "zero": 1},
        {"cp": 2, "tp": 2},
    ]
    models = ("LL", "Q3", "G3", "PHI")
    cases = [Case(model=model, layout=layout) for model in models for layout in layouts]
    three = {"pp": 2, "cp": 2, "tp": 2, "zero": 1, **SPLIT}
    cases += [Case(model=model, layout=three) for model in ("Q3", "G3", "DS")]
    cases.append(Case(model=UNRULED, layout={"fsdp": 2}))
    for model in ("MIX", "MOE", "MOE0", "OSS", "DS"):
        alone = [*EXPERTS[:1], *EXPERTS[4:6], {"cp": 2, "tp": 2, **SPLIT}]
        split = [
            layout for layout in layouts if "tp" not in layout or SPLIT.items() <= layout.items()
        ]
        cases += [
            Case(model=model, layout=layout)
            for layout in (*split, *alone)
            if model != "MOE0" or "pp" in layout
        ]
    for schedule in SCHEDULES:
        train: dict[str, Any] = {"pipeline_schedule": schedule, "micro_batch": 1}
        cases.append(Case(model="G3", layout={"pp": 2}, train=train))
    for model, layout in (
        ("Q3", {"pp": 2}),
        ("G3", {"cp": 2}),
        ("G3", {"pp": 2, "cp": 2, "zero": 1}),
    ):
        for checkpointing in ("full", "selective"):
            cases.append(Case(model=model, layout=layout, train={"checkpointing": checkpointing}))
    return cases


PACKED_SLOW = [case for case in _packed() if case not in PACKED_FAST]


def adapted(model: str, layout: dict[str, Any], **train: Any) -> Case:
    """The same with adapters."""
    return Case(model=model + LORA, layout=layout, train=train)


ADAPTED_FAST = [
    adapted("LL", {"fsdp": 2}),
    adapted("LL321", {"tp": 4, **SPLIT}),
    adapted("Q3", {"fsdp": 2, "tp": 2}),
    adapted("Q3", {"pp": 2}, pipeline_schedule="zbv"),
    adapted("G3", {"cp": 2}),
    adapted("PHI", {"tp": 2}),
    adapted("OSS", {"tp": 2, **SPLIT}),
    adapted("DS", {"fsdp": 2, "tp": 2, "ep": 4, **SPLIT}),
]


def _adapted() -> list[Case]:
    alone: list[dict[str, Any]] = [
        {"fsdp": 2},
        {"fsdp": 2, "zero": 1},
        {"dp": 2},
        {"tp": 2},
        {"tp": 2, **SPLIT},
        {"pp": 2},
        {"cp": 2},
    ]
    few = [layout for layout in alone if "dp" not in layout and "zero" not in layout]
    cases = [adapted(model, layout) for model in ("LL", "G3", "PHI") for layout in alone]
    cases += [adapted(model, layout) for model in ("MI_SW", "Q2_SW", "Q3") for layout in few]
    cases += [adapted("LLB", layout) for layout in alone[3:5]]
    cases += [adapted("ODD", layout) for layout in THREE]
    split = [layout for layout in few if "tp" not in layout or SPLIT.items() <= layout.items()]
    for model in ("MIX", "MOE", "OSS", "DS"):
        cases += [adapted(model, layout) for layout in (*split, *EXPERTS[:1], *EXPERTS[5:6])]
    cases += [adapted("MOED", {"pp": 2}), adapted("DSQ", {"tp": 2, **SPLIT})]
    cases += [adapted("G3", layout) for layout in PAIRS]
    cases += [adapted("Q3", layout) for layout in TRIPLES if "pp" not in layout]
    cases += [adapted("Q3", TRIPLES[1]), adapted("PHI", {"tp": 4, **SPLIT})]
    cases += [adapted("Q3", {"pp": 2}, pipeline_schedule=name, micro_batch=1) for name in SCHEDULES]
    for mode in ("selective", "full"):
        cases += [
            adapted("Q3", {"fsdp": 2, "tp": 2, **SPLIT}, checkpointing=mode),
            adapted("DS", {"tp": 2, "ep": 2, **SPLIT}, checkpointing=mode),
            adapted("LL", {"pp": 2}, checkpointing=mode),
        ]
    return cases


ADAPTED_SLOW = [
    case for number, case in enumerate(_adapted()) if case not in ADAPTED_FAST + _adapted()[:number]
]


def rounded(model: str, layout: dict[str, Any], **train: Any) -> Case:
    """The same with adapters on matrices of four bits."""
    return Case(model=model + QLORA, layout=layout, train=train)


ROUNDED_FAST = [
    rounded("LLW", {"fsdp": 2}),
    rounded("LLW", {"tp": 2}),
    rounded("PHIW", {"fsdp": 2, "tp": 2}),
    rounded("Q3W", {"pp": 2, "tp": 2, **SPLIT}),
    rounded("G3W", {"cp": 2}),
]


def _rounded() -> list[Case]:
    cases = [rounded("LLW", layout) for layout in (*SINGLES, {"tp": 4, **SPLIT}, *PAIRS)]
    some: list[dict[str, Any]] = [{"fsdp": 2}, {"tp": 2, **SPLIT}, {"pp": 2}, {"cp": 2}]
    cases += [rounded(model, layout) for model in WIDE_MODELS[1:] for layout in some]
    cases += [rounded("LLBW", {"tp": 2}), rounded("PHIW", {"tp": 4, **SPLIT})]
    cases += [rounded("Q3W", layout) for layout in TRIPLES[:3] if "pp" not in layout]
    for name in SCHEDULES[1:]:
        cases.append(rounded("LLW", {"pp": 2}, pipeline_schedule=name, micro_batch=1))
    for mode in ("selective", "full"):
        cases.append(rounded("PHIW", {"fsdp": 2, "tp": 2, **SPLIT}, checkpointing=mode))
    return cases


ROUNDED_SLOW = [case for case in _rounded() if case not in ROUNDED_FAST]
