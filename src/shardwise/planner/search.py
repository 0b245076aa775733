"""Answer in order: does it fit one device, would cheaper settings do, and only then a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.config import GIB, Layout, Lora, Plan, Precision, Prediction
from shardwise.models.adapters import complete, why_not_packed
from shardwise.models.facts import ModelFacts
from shardwise.models.families import LORA, QLORA
from shardwise.planner.answer import MEMORY_EVIDENCE, Answer, Option, Verdict
from shardwise.planner.layout import check_plan, legal_layouts, why_illegal, why_too_few_rows
from shardwise.planner.memory import predict_memory, stage_bytes
from shardwise.planner.network import place
from shardwise.planner.ranking import MODES, by_cost, ranked_options, why_slower
from shardwise.planner.speeds import Speeds
from shardwise.planner.stages import DEFAULT_SCHEDULE, slowdown, why_not_scheduled
from shardwise.planner.timing import SHARD_AXES, StepTimer
from shardwise.planner.traffic import Collective, traffic

_LEAST_CONTEXT = 2048
"""tokens of a sequence that a rank keeps where context parallelism is proposed; fewer on request
only: gathering keys and values would be most of the work"""
_SCHEDULED = 12
"""of the best options, whose pipelines are tried with another schedule"""
_HOPELESS = 1.2
"""times the memory that there is: nothing that keeps more than the least needs a sixth less"""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What times the options of a search, or the reason why nothing does."""

    timer: StepTimer | None = None
    why_none: str | None = None
    node: int | None = None
    """devices of a node; None: they are all in one"""

    @classmethod
    def of(cls, facts: ModelFacts, speeds: Speeds | str | None, node: int | None) -> Clock:
        """For a model on a machine."""
        if speeds is None or isinstance(speeds, str):
            return cls(why_none=speeds, node=node)
        return cls(timer=StepTimer(facts, speeds), node=speeds.node or node)

    def of_facts(self, facts: ModelFacts) -> Clock:
        """For another model on the same machine."""
        return Clock.of(facts, self.speeds or self.why_none, self.node)

    @property
    def speeds(self) -> Speeds | None:
        """Of the machine."""
        return None if self.timer is None else self.timer.speeds


def search(
    plan: Plan,
    facts: ModelFacts,
    speeds: Speeds | str | None,
    *,
    fixed: bool,
    node: int | None = None,
    adapters_stay: bool = False,
) -> Answer:
    """Find the best way to run a plan's task on its devices.

    Args:
        plan: the task, settings and devices; its layout counts only if `fixed`.
        speeds: of the devices; a text: the reason why they are not known.
        fixed: keep the layout and the micro-batch as they are and only judge them.
        node: devices of a node, where speeds do not tell; None: they are all in one.
        adapters_stay: the model holds its adapters already, for matrices as they are.

    Raises:
        UserError: the settings are not legal for the model, whatever the layout.
    """
    checked = check_plan(plan if fixed else _with(plan, Layout()), facts)
    plan = _train(plan, seq_len=checked.train.seq_len)
    clock = Clock.of(facts, speeds, node)
    peak = None if clock.speeds is None else clock.speeds.peak_flops
    single = _option("one device, as asked", _with(plan, Layout()), facts, clock)
    if single.fits and not fixed and _count(plan) == 1:
        return Answer(
            facts=facts,
            verdict="fits_one_device",
            chosen=single,
            single=single,
            ranked=[single],
            peak_flops=peak,
            node=clock.node,
        )
    methods = {} if adapters_stay else _methods(plan, facts)
    levers = [] if single.fits else _levers(plan, facts, clock, methods)
    options, illegal = _sharded(plan, facts, clock, fixed=fixed)
    fitting = [option for option in options if option.fits]
    too_large = sorted((o for o in options if not o.fits), key=lambda o: o.memory.total)
    if single.fits and not fixed:
        fitting.append(single)
    same_task = [o for o in levers if o.fits and o.plan.method == plan.method]
    if not fitting and not fixed:  # the task as asked, sharded, before cheaper settings on one
        fitting = same_task[:1] or _other_methods(plan, clock, methods, levers)
    elif not fixed and "pipeline_schedule" not in plan.train.model_fields_set:
        fitting += _interleaved(ranked_options(fitting)[:_SCHEDULED], facts, clock)
    fitting = ranked_options(fitting)
    chosen = fitting[0] if fitting else None
    rejected = [(o.name, why_slower(o, chosen)) for o in fitting[1:] if chosen is not None]
    rejected += [(option.name, option.shortfall) for option in too_large] + illegal
    return Answer(
        facts=facts,
        verdict=_verdict(single, levers, chosen),
        chosen=_with_stages(chosen, facts) if chosen else None,
        single=single,
        given=options[0] if fixed and options else None,
        levers=levers,
        rejected=rejected,
        ranked=fitting,
        peak_flops=peak,
        node=clock.node,
    )


def _interleaved(options: list[Option], facts: ModelFacts, clock: Clock) -> list[Option]:
    """The pipelines among some options with two stages a rank, where that runs and fits: half of
    the idle time for twice the messages. Schedules that split the backward pass are left to those
    who ask for them: what they idle less, torch's two passes cost in an amount not known here."""
    found = []
    for option in options:
        plan = _train(option.plan, pipeline_schedule="interleaved")
        if plan.layout.pp > 1 and why_not_scheduled(plan, facts) is None:
            other = _option(_name(plan), plan, facts, clock)
            found += [other] if other.fits else []
    return found


def _with_stages(option: Option, facts: ModelFacts) -> Option:
    """Note what each stage of the chosen pipeline needs, which is not asked of all options."""
    predicted = option.plan.predicted
    if predicted is None:
        return option
    stages = {"stage_bytes": stage_bytes(option.plan, facts)}
    plan = option.plan.model_copy(update={"predicted": predicted.model_copy(update=stages)})
    return replace(option, plan=plan)


def _verdict(single: Option, levers: list[Option], chosen: Option | None) -> Verdict:
    """Adapters are another task: they are what is left where nothing else fits."""
    if single.fits:
        return "fits_one_device"
    method = single.plan.method if chosen is None else chosen.plan.method
    if any(o.fits and o.plan.method in (method, single.plan.method) for o in levers):
        return "fits_compressed"
    if chosen is None:
        return "impossible"
    return "shard" if chosen.plan.layout.world_size > 1 else "fits_compressed"


def _sharded(
    plan: Plan, facts: ModelFacts, clock: Clock, *, fixed: bool
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
        options.append(_best_shape(shapes, facts, clock))
    return options, illegal


def _best_shape(shapes: list[Plan], facts: ModelFacts, clock: Clock) -> Option:
    """The best of a layout's shapes, without judging all of them.

    The last one, which keeps least, is judged first: where it needs much more than there is, so do
    the others. And where a shape fits, one that only recomputes more is slower.
    """
    least = _option(_name(shapes[-1]), shapes[-1], facts, clock)
    if least.memory.total > _HOPELESS * least.capacity:
        return least
    fitting: dict[int, Option] = {}  # by micro-batch
    judged = []
    for shape in shapes[:-1]:
        if shape.train.micro_batch not in fitting:
            option = _option(_name(shape), shape, facts, clock)
            judged.append(option)
            if option.fits:
                fitting[shape.train.micro_batch] = option
    if shapes[-1].train.micro_batch not in fitting:
        judged.append(least)
    return min(judged, key=lambda o: (not o.fits, by_cost(o) if o.fits else o.memory.total))


def _shapes(plan: Plan, facts: ModelFacts, *, fixed: bool) -> list[Plan]:
    """A layout with every micro-batch up to the one asked for, without and with recomputation."""
    if fixed or plan.task == "serve":
        return [plan]
    sizes = [n for n in range(plan.train.micro_batch, 0, -1) if plan.train.micro_batch % n == 0]
    modes = MODES[MODES.index(plan.train.checkpointing) :]
    shapes = [_train(plan, micro_batch=n, checkpointing=mode) for mode in modes for n in sizes]
    # a larger micro-batch makes fewer of them, perhaps too few for the pipeline
    return [shape for shape in shapes if why_not_scheduled(shape, facts) is None]


def _illegal(plan: Plan, facts: ModelFacts, count: int) -> list[tuple[str, str]]:
    found = []
    for tp in range(2, count + 1):
        if count % tp == 0:
            split = facts.num_experts > 0 and plan.trains  # which experts need
            layout = Layout(fsdp=count // tp, tp=tp, sequence_parallel=split)
            reason = why_illegal(layout, facts, task=plan.task)
            if reason is not None:
                found.append((str(layout), reason))
    return found


def _methods(plan: Plan, facts: ModelFacts) -> dict[str, ModelFacts]:
    """Other methods than the one asked for, which learn less and need less: facts with their
    adapters, the milder one first."""
    found = {}
    if plan.task == "full" and LORA in facts.family.proved:
        found[LORA] = replace(facts, adapters=complete(Lora(), facts))
    can_round = QLORA in facts.family.proved and why_not_packed(facts) is None
    if plan.trains and plan.method != QLORA and can_round:
        lora = (facts.adapters or Lora()).model_copy(update={"quantize": "nf4"})
        found[QLORA] = replace(facts, adapters=complete(lora, facts))
    return found


def _other_methods(
    plan: Plan, clock: Clock, methods: dict[str, ModelFacts], levers: list[Option]
) -> list[Option]:
    """What fits of the first other method of which anything does: over all devices, on one, or on
    one with cheaper settings."""
    for method, facts in methods.items():
        other, own = _by(plan, facts), clock.of_facts(facts)
        options, _ = _sharded(other, facts, own, fixed=False)
        options.append(_best_shape(_shapes(_with(other, Layout()), facts, fixed=False), facts, own))
        options += [lever for lever in levers if lever.plan.method == method]
        fitting = [option for option in options if option.fits]
        if fitting:
            return fitting
    return []


def _levers(
    plan: Plan, facts: ModelFacts, clock: Clock, methods: dict[str, ModelFacts]
) -> list[Option]:
    """The task on one device with cheaper settings, each with the ones before it."""
    one = _with(plan, Layout())
    if plan.task == "serve":
        is_half = one.precision.compute == "bf16"
        return [] if is_half else [_option("bf16 weights", _bf16(one), facts, clock)]
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
    options = [_option(name, candidate, facts, clock) for name, candidate in steps]
    for method, other in methods.items():
        if method == LORA or not any(option.fits for option in options):
            name = f"+ task={method} ({_what(method, other)})"
            options.append(_option(name, _by(one, other), other, clock.of_facts(other)))
    return options


def _by(plan: Plan, facts: ModelFacts) -> Plan:
    """The same plan, training the adapters of some facts."""
    return plan.model_copy(update={"task": "lora", "lora": facts.adapters})


def _what(method: str, facts: ModelFacts) -> str:
    if method == LORA:
        share = 100 * facts.num_trained_parameters / facts.num_parameters
        return f"trains {share:.2g}% of the parameters: adapters, not the model"
    share = 100 * facts.num_packed_parameters / facts.num_parameters
    return f"{share:.2g}% of the parameters rounded to four bits"


def _option(name: str, plan: Plan, facts: ModelFacts, clock: Clock) -> Option:
    """An option, timed only if it fits: most of a large search do not."""
    memory = predict_memory(plan, facts)
    capacity = plan.devices.memory_gib
    limit = float("inf") if capacity is None else capacity * GIB
    if memory.saving and memory.total > limit and "async_save" not in plan.train.model_fields_set:
        plan = _train(plan, async_save=False)
        memory = predict_memory(plan, facts)
        name = f"{name}, training waits for saves" if memory.total <= limit else name
    weighed = plan.trains and memory.total <= limit
    step = clock.timer.step(plan) if clock.timer is not None and weighed else None
    lines = [timed.line for timed in step.lines] if step is not None else []
    if weighed and step is None:
        lines = traffic(plan, facts)
    evidence: dict[str, object] = {"memory": memory, "memory_evidence": MEMORY_EVIDENCE}
    if step is not None and clock.speeds is not None:
        evidence |= {"step_s": step.total_s, "step_evidence": clock.speeds.evidence}
    elif clock.timer is not None and plan.trains:
        evidence["step_evidence"] = "not timed: it does not fit"
    elif clock.why_none is not None:
        evidence["step_evidence"] = clock.why_none
    return Option(
        name=name,
        plan=plan.model_copy(update={"predicted": Prediction(**evidence)}),  # type: ignore[arg-type]
        facts=facts,
        memory=memory,
        step=step,
        traffic_bytes=sum(line.bytes_per_step for line in lines),
        waiting_bytes=_waiting_bytes(plan, lines),
        crosses_nodes=_crosses(plan, clock.node),
        slowdown=slowdown(plan, facts) if weighed else 1.0,
        capacity=limit,
    )


def _waiting_bytes(plan: Plan, lines: list[Collective]) -> int:
    if plan.devices.kind == "cpu":  # where nothing is hidden
        return 0
    return sum(line.bytes_per_step for line in lines if line.axis not in SHARD_AXES)


def _crosses(plan: Plan, node: int | None) -> bool:
    axes = [axis for axis in ("tp", "cp", "ep") if getattr(plan.layout, axis) > 1]
    return node is not None and any(place(plan.layout, axis, node).crosses for axis in axes)


def _name(plan: Plan) -> str:
    if plan.task == "serve":
        return str(plan.layout)
    train = plan.train
    mode = train.checkpointing
    recompute = "" if mode == "none" else f", checkpointing={mode}"
    usual = train.pipeline_schedule == DEFAULT_SCHEDULE
    schedule = "" if usual else f", {train.pipeline_schedule}"
    return f"{plan.layout}, micro_batch={train.micro_batch}{recompute}{schedule}"


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
