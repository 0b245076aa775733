"""Answer in order: does it fit one device, would cheaper settings do, and only then a layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.config import GIB, Layout, Memory, Plan, Precision, Prediction
from shardwise.models.facts import ModelFacts
from shardwise.planner.layout import (
    check_plan,
    legal_layouts,
    legal_tp_sizes,
    why_illegal,
    why_too_few_rows,
)
from shardwise.planner.machine import Machine
from shardwise.planner.memory import predict_memory, stage_bytes
from shardwise.planner.stages import DEFAULT_SCHEDULE, slowdown, why_not_scheduled
from shardwise.planner.timing import step_time
from shardwise.planner.traffic import traffic

Verdict = Literal["fits_one_device", "fits_compressed", "shard", "impossible"]
_MODES = ["none", "selective", "full"]
"""of recomputation, each cheaper in memory and dearer in time than the one before"""
_LEAST_CONTEXT = 2048
"""tokens of a sequence that a rank keeps where context parallelism is proposed; fewer on request
only: gathering keys and values would be most of the work"""
MEMORY_EVIDENCE = "analytic, within 8% of measured runs on CPU; not measured on accelerators"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run the task, with what it needs."""

    name: str
    plan: Plan
    memory: Memory
    step_s: float | None
    traffic_bytes: int
    slowdown: float
    """how much longer a pipeline takes than its ranks' share of the work; 1 without one"""
    capacity: float
    """bytes of one device"""

    @property
    def fits(self) -> bool:
        """Whether the worst rank stays within the device's memory."""
        return self.memory.total <= self.capacity

    @property
    def shortfall(self) -> str:
        """The number that rules this option out."""
        return (
            f"needs {self.memory.total / GIB:.2f} GiB a device, "
            f"a device has {self.capacity / GIB:.2f} GiB"
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The planner's answer."""

    facts: ModelFacts
    verdict: Verdict
    chosen: Option | None
    single: Option
    """the task on one device, as asked for"""
    levers: list[Option] = field(default_factory=list)
    """one device again, with cheaper settings"""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """option, and the reason why it lost"""
    notes: tuple[str, ...] = ()
    """what the user should know of the model's files"""


def search(plan: Plan, facts: ModelFacts, machine: Machine | None, *, fixed: bool) -> Answer:
    """Find the best way to run a plan's task on its devices.

    Args:
        plan: the task, settings and devices; its layout counts only if `fixed`.
        fixed: keep the layout and the micro-batch as they are and only judge them.

    Raises:
        UserError: the settings are not legal for the model, whatever the layout.
    """
    checked = check_plan(plan if fixed else _with(plan, Layout()), facts)
    plan = _train(plan, seq_len=checked.train.seq_len)
    single = _option("one device, as asked", _with(plan, Layout()), facts, machine)
    if single.fits and not fixed and _count(plan) == 1:
        return Answer(facts=facts, verdict="fits_one_device", chosen=single, single=single)
    levers = [] if single.fits else _levers(plan, facts, machine)
    options, rejected = _sharded(plan, facts, machine, fixed=fixed)
    fitting = [option for option in options if option.fits]
    too_large = sorted((o for o in options if not o.fits), key=lambda o: o.memory.total)
    rejected += [(option.name, option.shortfall) for option in too_large]
    if single.fits and not fixed:
        fitting.append(single)
    one_device = [lever for lever in levers if lever.fits]
    if not fitting and not fixed:  # the task as asked, sharded, before cheaper settings on one
        fitting = one_device[:1]
    chosen = min(fitting, key=_cost) if fitting else None
    if chosen is not None:
        others = sorted((o for o in fitting if o is not chosen), key=_cost)
        rejected += [(option.name, _why_slower(option, chosen)) for option in others]
    return Answer(
        facts=facts,
        verdict=_verdict(single, one_device, chosen),
        chosen=_with_stages(chosen, facts) if chosen else None,
        single=single,
        levers=levers,
        rejected=rejected,
    )


def _with_stages(option: Option, facts: ModelFacts) -> Option:
    """Note what each stage of the chosen pipeline needs, which is not asked of all options."""
    predicted = option.plan.predicted
    if predicted is None:
        return option
    stages = {"stage_bytes": stage_bytes(option.plan, facts)}
    plan = option.plan.model_copy(update={"predicted": predicted.model_copy(update=stages)})
    return replace(option, plan=plan)


def _verdict(single: Option, one_device: list[Option], chosen: Option | None) -> Verdict:
    if single.fits:
        return "fits_one_device"
    if one_device:
        return "fits_compressed"
    return "impossible" if chosen is None else "shard"


def _sharded(
    plan: Plan, facts: ModelFacts, machine: Machine | None, *, fixed: bool
) -> tuple[list[Option], list[tuple[str, str]]]:
    """Every legal layout over all devices, at its best micro-batch; and the illegal ones."""
    count = _count(plan)
    if fixed:
        layouts = [plan.layout]
    else:
        most_cp = max(1, plan.train.seq_len // _LEAST_CONTEXT)
        found = legal_layouts(facts, count, task=plan.task, most_cp=most_cp)
        layouts = list(found) if count > 1 else []
    options = []
    illegal = [] if fixed else _illegal(plan, facts, count)
    for layout in layouts:
        asked = _with(plan, layout)
        shapes = _shapes(asked, facts, fixed=fixed)
        reason = why_too_few_rows(asked)
        if reason is None and not shapes:
            reason = why_not_scheduled(_train(asked, micro_batch=1), facts)
        if reason is not None:
            illegal.append((str(layout), reason))
            continue
        shaped = [_option(_name(shape), shape, facts, machine) for shape in shapes]
        options.append(
            min(shaped, key=lambda o: (not o.fits, _cost(o) if o.fits else o.memory.total))
        )
    return options, illegal


def _shapes(plan: Plan, facts: ModelFacts, *, fixed: bool) -> list[Plan]:
    """A layout with every micro-batch up to the one asked for, without and with recomputation."""
    if fixed or plan.task == "serve":
        return [plan]
    sizes = [n for n in range(plan.train.micro_batch, 0, -1) if plan.train.micro_batch % n == 0]
    modes = _MODES[_MODES.index(plan.train.checkpointing) :]
    shapes = [_train(plan, micro_batch=n, checkpointing=mode) for mode in modes for n in sizes]
    # a larger micro-batch makes fewer of them, perhaps too few for the pipeline
    return [shape for shape in shapes if why_not_scheduled(shape, facts) is None]


def _illegal(plan: Plan, facts: ModelFacts, count: int) -> list[tuple[str, str]]:
    found = []
    for tp in range(2, count + 1):
        if count % tp == 0:
            split = facts.num_experts > 0 and plan.task == "full"  # which experts need
            layout = Layout(fsdp=count // tp, tp=tp, sequence_parallel=split)
            reason = why_illegal(layout, facts, task=plan.task)
            if reason is not None:
                found.append((str(layout), reason))
    return found


def _levers(plan: Plan, facts: ModelFacts, machine: Machine | None) -> list[Option]:
    """The task on one device with cheaper settings, each with the ones before it."""
    one = _with(plan, Layout())
    if plan.task == "serve":
        is_half = one.precision.compute == "bf16"
        return [] if is_half else [_option("bf16 weights", _bf16(one), facts, machine)]
    steps = []
    if one.train.micro_batch > 1:
        one = _train(one, micro_batch=1)
        steps.append(("micro_batch=1 (same step, more passes)", one))
    if one.train.checkpointing == "none":
        one = _train(one, checkpointing="full")
        steps.append(("+ checkpointing=full (a third more compute)", one))
    if one.precision.compute == "fp32":
        one = _bf16(one)
        steps.append(("+ compute=bf16 (states stay fp32)", one))
    return [_option(name, candidate, facts, machine) for name, candidate in steps]


def _option(name: str, plan: Plan, facts: ModelFacts, machine: Machine | None) -> Option:
    memory = predict_memory(plan, facts)
    training = plan.task == "full"
    step_s = step_time(plan, facts, machine).total_s if machine and training else None
    moved = sum(line.bytes_per_step for line in traffic(plan, facts)) if training else 0
    evidence = {"memory": memory, "memory_evidence": MEMORY_EVIDENCE, "step_s": step_s}
    if machine is not None and step_s is not None:
        evidence["step_evidence"] = (
            f"analytic on speeds measured {machine.date}, within 40% so far on CPU"
        )
    capacity = plan.devices.memory_gib
    return Option(
        name=name,
        plan=plan.model_copy(update={"predicted": Prediction(**evidence)}),  # type: ignore[arg-type]
        memory=memory,
        step_s=step_s,
        traffic_bytes=moved,
        slowdown=slowdown(plan, facts) if training else 1.0,
        capacity=float("inf") if capacity is None else capacity * GIB,
    )


def _cost(option: Option) -> tuple[float, ...]:
    """Fastest first; unmeasured, recomputation costs most, then traffic, then small passes."""
    train, layout = option.plan.train, option.plan.layout
    recompute = float(_MODES.index(train.checkpointing))
    # without a measurement, more devices are taken to be worth more than their traffic
    unmeasured = (
        recompute,
        -layout.world_size,
        round(option.slowdown, 2),
        option.traffic_bytes,
        -train.micro_batch,
        layout.tp,
        option.memory.total,
    )
    return unmeasured if option.step_s is None else (option.step_s, *unmeasured)


def _why_slower(option: Option, chosen: Option) -> str:
    if option.step_s is not None and chosen.step_s is not None:
        return f"{option.step_s:.1f} s a step, the chosen one {chosen.step_s:.1f} s"
    if option.plan.layout.world_size < chosen.plan.layout.world_size:
        return f"leaves {_count(option.plan) - option.plan.layout.world_size} device(s) idle"
    if option.slowdown > chosen.slowdown + 0.005:
        return f"its pipeline takes {option.slowdown:.2f} times its share of the work"
    if option.plan.train.checkpointing != chosen.plan.train.checkpointing:
        return f"fits only with train.checkpointing={option.plan.train.checkpointing}"
    return (
        f"moves {option.traffic_bytes / GIB:.2f} GiB a step, "
        f"the chosen one {chosen.traffic_bytes / GIB:.2f} GiB"
    )


def _name(plan: Plan) -> str:
    if plan.task == "serve":
        return str(plan.layout)
    train = plan.train
    mode = train.checkpointing
    recompute = "" if mode == "none" else f", checkpointing={mode}"
    return f"{plan.layout}, micro_batch={train.micro_batch}{recompute}"


def _count(plan: Plan) -> int:
    return plan.devices.count or plan.layout.world_size


def _with(plan: Plan, layout: Layout) -> Plan:
    if layout.pp == 1:  # the schedule that was asked for is for layouts that have a pipeline
        plan = _train(plan, pipeline_schedule=DEFAULT_SCHEDULE)
    return plan.model_copy(update={"layout": layout})


def _bf16(plan: Plan) -> Plan:
    return plan.model_copy(update={"precision": Precision(compute="bf16")})


def _train(plan: Plan, **changes: object) -> Plan:
    return plan.model_copy(update={"train": plan.train.model_copy(update=changes)})


def suggest(answer: Answer) -> str:
    """What would make an impossible task possible."""
    facts = answer.facts
    least = min((o.memory.total for o in (answer.single, *answer.levers)), default=0)
    sizes = ", ".join(str(n) for n in legal_tp_sizes(facts))
    return (
        f"one device would need {least / GIB:.2f} GiB at the least; take more devices or larger "
        f"ones (tensor-parallel sizes that fit this model: {sizes}), or a smaller model."
    )
