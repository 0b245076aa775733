"""What software a published run was made with, and what that does differently from Shardwise.

Each difference is from the software's documentation, code or paper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.planner.speeds import Dtype

FOUR_BITS = 0.5 + 0.127 / 8
"""bytes of a parameter in NF4 with its constants quantised too (arXiv 2305.14314, section 3)"""


class Unplanned(Exception):
    """Why a row has no prediction."""


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a run was made, as far as it matters for memory and time."""

    name: str
    compute: Dtype = "bf16"
    reduce: Dtype = "fp32"
    checkpointing: Recompute = "none"
    """none where a row does not say: no software recomputes unless it is told to"""
    fused: bool = True
    """element-wise operations are fused: compiled, or kernels written by hand"""
    flash: bool = True
    """attention never writes its scores"""
    attention_share: float = 1.0
    """of the device's rate of attention: FlashAttention of 2022 has 0.55 of that of 2023 (arXiv
    2307.08691, figure 4)"""
    products_again: float = 0.0
    """share of the matrix products that selective recomputation makes again (torchtitan: every
    second one)"""
    attention_again: bool = False
    """only attention is computed again (Korthikanti, section 5)"""
    overlaps_pipeline: bool = True
    """gradients are reduced, and messages between stages sent, while the pipeline runs"""
    overlaps_tensor: bool = False
    """products are cut in as many parts as there are ranks, each sent while the next is made"""
    gathers_parameters: bool = False
    """each parameter is gathered by itself, when it is needed (DeepSpeed before its prefetch)"""
    sends_once_a_node: bool = False
    """a token that goes to several experts of a node crosses to it once (DeepEP)"""
    adapters: int | None = None
    """rank of the adapters that are trained beside frozen weights; None: all weights are trained"""
    base_bytes: float = 2.0
    """of a frozen matrix's parameter"""
    unpack_bytes: float = 0.0
    """read and written to unpack a frozen parameter: 2.5 by one kernel (NF4); 25 by the operations
    of torch that AutoGPTQ trains with (shift, cast, mask, zeros and scales by group, product)"""
    table_bytes: float = 2.0
    """of a parameter of a frozen embedding or head (peft casts what is not in 4 bits to fp32)"""
    trains_tables: bool = False
    """embedding and head are trained too, in copies of their own"""
    narrow: Literal["fp8", "fp4"] | None = None
    """format of both inputs of products, where it is not bf16"""
    states: tuple[float, float, float] | None = None
    """bytes of a parameter's weight, gradient and optimizer state; None: as Shardwise"""
    logit_bytes: int | None = 14
    """of a logit at its peak: in bf16, then cast, its softmax and gradient in fp32 (14); compiled,
    fp32 but once (8); without the cast, shifted (10). None: the loss is made in chunks"""
    measures: Literal["reserved", "allocated", "states", "first stage"] = "reserved"


def software_of(row: Mapping[str, str]) -> Software:
    """The software of a row, from its source, precision, recomputation and note."""
    source, note = row.get("source", "").lower(), row.get("note", "").lower()
    precision = row.get("precision", "").lower()
    recompute = row.get("recompute", "").lower()
    method = row.get("method", "").lower()
    adapted = method in ("lora", "qlora")
    if any(word in precision for word in ("int4", "int8")) and not adapted:
        raise Unplanned(f"products in {row['precision']}")
    if "see note" in precision:
        raise Unplanned("precision not given")
    if "rowwise" in precision:
        raise Unplanned("float8 with a scale a row")
    if note.startswith("baseline") and "unpacked" in note:
        raise Unplanned("rows that are not full")
    if "offload" in note and "cpu offload false" not in note:
        raise Unplanned("offload")
    if "backward" in note and "optimizer-in-backward" in note:
        raise Unplanned("optimizer inside the backward pass")
    full = "full" in recompute
    selective = "selective" in recompute
    megatron = "megatron" in source or "megascale" in source or "korthikanti" in source
    old = any(word in source for word in ("sc21", "korthikanti")) or "zero fig" in source
    if not recompute and "qwen readme" in source:
        full = True  # its finetune script sets gradient_checkpointing
    mode: Recompute = "full" if full else "none"
    if selective and not old:
        mode = "selective"
    # kernels written by hand or compiled; what nothing is said of runs a model's code as it is
    told = f"{source} {note}"
    eager = not megatron and not re.search("nemo|maxtext|foundry|compile|liger|unsloth", told)
    tuned = "torchtune" in source  # each row of its ladder has what the ones before it have
    if tuned:
        eager = note.startswith(("baseline", "+packed"))
    chunked = "chunked" in note or (
        tuned and not note.startswith(("baseline", "+packed", "+compile"))
    )
    measures: Literal["reserved", "allocated", "states", "first stage"] = "reserved"
    if "active" in note or "allocated" in note:
        measures = "allocated"
    if "model states" in note:
        measures = "states"
    if "first-stage" in note:
        measures = "first stage"
    states = None
    if megatron:
        states = (2.0, 4.0, 12.0)
    sharding = row.get("zero_stage_or_fsdp", "").lower()
    if not megatron and (
        re.fullmatch(r"[123]|zero-?[123].*|.*deepspeed.*", sharding)
        or re.search("deepspeed|qwen readme", source)
    ):
        states = (2.0, 2.0, 12.0)  # DeepSpeed keeps 16-bit weights and gradients of its own
    if re.search("true|pure", precision):
        states = (2.0, 2.0, 4.0)
    if measures == "states":
        states = (2.0, 2.0, 12.0)
    if precision == "bf16" and ("torchtune" in source):
        moments = 2.0 if "8-bit" in row.get("optimizer", "").lower() else 4.0
        states = (2.0, 2.0, moments)
    return Software(
        name="megatron" if megatron else source.split(" ")[0],
        compute="fp32" if re.match("fp32|tf32|32", precision) else "bf16",
        reduce="bf16" if "pure" in note else "fp32",
        checkpointing=mode,
        fused=not eager,
        flash=not old,
        attention_again=selective and old,
        attention_share=0.55 if "foundry" in source else 1.0,
        products_again=0.5 if "(op)" in recompute else 0.0,
        overlaps_tensor=(megatron and not old) or bool(re.search("async ?tp", note)),
        gathers_parameters="zero-3;" in note,
        sends_once_a_node=megatron and not old,
        adapters=_rank(source, note) if adapted else None,
        base_bytes=FOUR_BITS if method == "qlora" else 2.0,
        unpack_bytes=0.0 if method != "qlora" else 25.0 if "int4" in precision else 2.5,
        table_bytes=4.0 if method == "qlora" and "torchtune" not in source else 2.0,
        trains_tables=adapted and "+emb" in note,
        narrow="fp4"
        if "fp4" in precision
        else "fp8"
        if re.search("fp8|float8", precision)
        else None,
        states=states,
        logit_bytes=None if chunked else 10 if "qwen readme" in source else 14 if eager else 8,
        measures=measures,
    )


def _rank(source: str, note: str) -> int:
    """Rank of the adapters: as said, or the one of the software's own recipe."""
    if match := re.search(r"\b(?:rank|lora_r|r)\s*=?\s*(\d+)\b", note):
        return int(match[1])
    return 64 if "qwen readme" in source else 8 if "torchtune" in source else 16
