"""Which layouts are legal for a model: decided before any process starts, with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product
from typing import Literal

from shardwise.config import Layout, Plan
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.families import AXES, LORA, QLORA
from shardwise.models.layers import NF4_BLOCK
from shardwise.planner.stages import why_not_scheduled

KV = "KV heads"
_STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
_NO_STAGE: tuple[Literal[3], ...] = (3,)


def why_illegal(layout: Layout, facts: ModelFacts, *, task: str) -> str | None:
    """The reason why a layout cannot run, with a value that can; None if it is legal."""
    reason = _why_not_expert(layout, facts, task)
    if reason is not None:
        return reason
    if layout.sequence_parallel and (task == "serve" or layout.tp == 1):
        return (
            "sequence_parallel splits the sequence over the tp ranks of a training run; "
            f"with task={task} and tp={layout.tp} set it to false"
        )
    if task == "serve":
        for axis in ("dp", "fsdp", "cp", "pp"):
            if getattr(layout, axis) > 1:
                return f"{axis}={getattr(layout, axis)}: serving shards with tp only; set {axis}=1"
    if layout.num_shards == 1 and layout.zero != 3:
        return (
            f"zero={layout.zero} says what is shared between fsdp x cp ranks, of which there is 1; "
            "set fsdp to 2 or more, or leave zero out"
        )
    if layout.pp > 1 and layout.num_shards > 1 and layout.zero != 1:
        return (
            f"zero={layout.zero} with pp={layout.pp}: a pipeline keeps parameters gathered and "
            "reduces gradients once a step, which is ZeRO-1; set zero=1"
        )
    family = facts.family
    others = sorted(_kinds(layout, facts, task) - set(family.kinds))
    if others:
        done, known = "proved" if family.proved else "planned", ", ".join(family.kinds) or "none"
        kind = f"with task={others[0]}" if others[0] in (LORA, QLORA) else others[0]
        return f"{kind} is not {done} for {facts.model_type}; {done} for it: {known}"
    if layout.tp == 1:
        return None
    for what, number in _split_by_tp(facts).items():
        if not _splits(number, layout.tp, repeat=what == KV):
            sizes = ", ".join(str(n) for n in legal_tp_sizes(facts))
            return (
                f"tp={layout.tp} does not divide the model's {number} {what}; "
                f"tp sizes that work: {sizes}"
            )
    if layout.tp > facts.vocab_size:
        return f"tp={layout.tp} is larger than the vocabulary of {facts.vocab_size}"
    return None


def _why_not_expert(layout: Layout, facts: ModelFacts, task: str) -> str | None:
    """What a mixture of experts cannot do, and what only one can."""
    if not facts.num_experts:
        return (
            f"ep={layout.ep}: {facts.model_type} has no experts; set ep=1"
            if layout.ep > 1
            else None
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        if task == "serve":
            return f"tp={layout.tp}: experts are served by one process so far; set tp=1"
        return (
            f"tp={layout.tp}: the experts of {facts.model_type} work on whole tokens, so the tp "
            "ranks must split the sequence; set sequence_parallel=true"
        )
    inner = layout.fsdp * layout.cp * layout.tp
    for what, number in (("experts", facts.num_experts), ("fsdp x cp x tp ranks", inner)):
        if number % layout.ep:
            sizes = [n for n in divisors(number) if facts.num_experts % n == inner % n == 0]
            return (
                f"ep={layout.ep} does not divide the {number} {what}; ep sizes that work: "
                f"{', '.join(map(str, sizes))}"
            )
    return None


def why_too_few_rows(plan: Plan) -> str | None:
    """The reason why a training step cannot be dealt to the data ranks; None if it can."""
    rows, num_ranks = plan.train.global_batch, plan.layout.num_data_ranks
    if plan.task == "serve" or rows >= num_ranks:
        return None
    return (
        f"train.global_batch={rows} rows leave some of the {num_ranks} data ranks (dp x fsdp) "
        f"without a row; set it to at least {num_ranks}"
    )


def legal_tp_sizes(facts: ModelFacts) -> list[int]:
    """Every tensor-parallel size that splits the heads and the feed-forward width evenly.

    KV heads may also be fewer than ranks, if each can be held by equally many.
    """
    if not {"tp", "serve tp"} & set(facts.family.kinds):
        return [1]
    split = _split_by_tp(facts)
    return [
        tp
        for tp in divisors(facts.num_heads)
        if all(_splits(number, tp, repeat=what == KV) for what, number in split.items())
    ]


def _splits(number: int, tp: int, *, repeat: bool) -> bool:
    return number % tp == 0 or (repeat and tp % number == 0)


def legal_layouts(
    facts: ModelFacts, num_devices: int, *, task: str, most_cp: int = 1
) -> Iterator[Layout]:
    """Every legal layout that uses exactly `num_devices` devices.

    Args:
        most_cp: the most ranks that a sequence is cut for.
    """
    for tp, pp, cp, fsdp, dp in _shares(num_devices, facts, task, most_cp):
        # a stage of an axis of one is none, a pipeline has only the first
        zeros = (_STAGES if pp == 1 else _STAGES[:1]) if fsdp * cp > 1 else _NO_STAGE
        splits = (False, True) if tp > 1 else (False,)
        eps = divisors(math.gcd(facts.num_experts, fsdp * cp * tp)) if facts.num_experts else [1]
        for zero, split, ep in product(zeros, splits, eps):
            layout = Layout(
                dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, sequence_parallel=split
            )
            if why_illegal(layout, facts, task=task) is None:
                yield layout


def _shares(
    num_devices: int, facts: ModelFacts, task: str, most_cp: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Sizes of tp, pp, cp, fsdp and dp whose product is the number of devices."""
    alone = task == "serve"
    for tp in set(legal_tp_sizes(facts)) & set(divisors(num_devices)):
        for pp in divisors(num_devices // tp):
            for cp in divisors(num_devices // tp // pp):
                if max(pp, cp) > 1 and (alone or pp > facts.num_layers or cp > most_cp):
                    continue
                left = num_devices // tp // pp // cp
                for fsdp in divisors(left):
                    yield tp, pp, cp, fsdp, left // fsdp


def check_plan(plan: Plan, facts: ModelFacts) -> Plan:
    """Refuse a plan that cannot run.

    Returns:
        The plan, with a sequence length that nobody has set lowered to the model's limit.

    Raises:
        UserError: one sentence with the two numbers in conflict and a value that works.
    """
    reason = why_illegal(plan.layout, facts, task=plan.task)
    if reason is not None:
        raise UserError(f"layout {reason}.")
    if facts.dropout is not None and plan.trains:
        key, value = facts.dropout
        raise UserError(
            f"{key}={value} in the model's config: dropout cannot be proved equal to one process; "
            "set it to 0.0 there."
        )
    if "seq_len" not in plan.train.model_fields_set:
        shortest = min(plan.train.seq_len, facts.max_positions)
        settings = plan.train.model_copy(update={"seq_len": shortest})
        plan = plan.model_copy(update={"train": settings})
    count = plan.devices.count
    if count is not None and plan.layout.world_size > count:
        raise UserError(
            f"layout {plan.layout} needs {plan.layout.world_size} devices, the plan has {count}; "
            f"set devices.count={plan.layout.world_size}, or a smaller layout."
        )
    train = plan.train
    if plan.trains and train.seq_len > facts.max_positions:
        raise UserError(
            f"train.seq_len={train.seq_len} is longer than the model's "
            f"max_position_embeddings={facts.max_positions}; set it to at most that."
        )
    if train.checkpoint_every > 1 and train.checkpointing == "none":
        raise UserError(
            f"train.checkpoint_every={train.checkpoint_every} chooses among layers that recompute, "
            "and train.checkpointing=none has none; set that to selective or full."
        )
    if train.compile and facts.adapters is not None and facts.adapters.quantize is not None:
        raise UserError(
            "train.compile=true with matrices in four bits: compiled, a layer keeps what it "
            "unpacks, and the memory that they save is lost; set train.compile=false."
        )
    reason = why_too_few_rows(plan) or why_not_scheduled(plan, facts)
    if reason is not None:
        raise UserError(f"{reason}.")
    context = plan.serve.context
    if plan.task == "serve" and context is not None and context > facts.max_positions:
        raise UserError(
            f"serve.context={context} is longer than the model's "
            f"max_position_embeddings={facts.max_positions}; set it to at most that."
        )
    return plan


def _kinds(layout: Layout, facts: ModelFacts, task: str) -> set[str]:
    """The kinds of parallelism (rows of the capability table) that a layout uses."""
    adapters = set() if facts.adapters is None or facts.adapters.quantize is None else {QLORA}
    if task == "serve":
        return {*adapters, "serve tp"} if layout.tp > 1 else adapters
    adapters |= {LORA} if task == "lora" else set()
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    kinds = {*adapters, *axes, *(" x ".join(pair) for pair in combinations(axes, 2))}
    if layout.sequence_parallel:
        kinds.add("sequence parallel")
    if layout.ep > 1:
        kinds.add("ep")
    if layout.num_shards > 1 and layout.zero < 3:
        kinds.add(f"ZeRO-{layout.zero}")
    return kinds


def divisors(number: int) -> list[int]:
    """All numbers that divide one, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _split_by_tp(facts: ModelFacts) -> dict[str, int]:
    split = {"attention heads": facts.num_heads, KV: facts.num_kv_heads}
    if not all(kind.has_experts for kind in facts.layers):
        split["feed-forward columns"] = facts.intermediate_size
    if facts.shared_width:
        split["columns of shared experts"] = facts.shared_width
    split |= {
        f"blocks of {NF4_BLOCK} inputs of {name.split('.')[-2]}": param.shape[1] // NF4_BLOCK
        for kind in set(facts.layers)
        for name, param in facts.params_of(kind).items()
        if param.packed and param.cut == "rows"
    }
    return split
