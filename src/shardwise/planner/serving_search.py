"""How to serve a model on accelerators: on one, with fewer bits, or over which layout. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.config import GIB, Layout, Memory, Plan, Prediction, Serve
from shardwise.console import seconds
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.planner.answer import MEMORY_EVIDENCE, Answer, Option, Verdict
from shardwise.planner.kernels import Engine
from shardwise.planner.layout import divisors, why_illegal
from shardwise.planner.memory import predict_memory
from shardwise.planner.serving import Server
from shardwise.planner.serving_memory import Deployment, Load, Room

_LEVERS = ("bf16", "fp8", "int8", "int4")
_EVEN = 0.03
"""rates that are nearer to each other than this are taken for equal: the error is larger"""
_MEMORY = (
    "analytic: weights and cache by count; a tenth of the device is kept back, as vLLM does, and "
    "1 GiB for its context"
)
_ERROR = (
    "half of the measured runs of engines are within 12% between two tokens and nine of ten within "
    "37%; times to the first token are right in order more than in size"
)
LOAD_KEYS = ("weights", "concurrency", "prompt_len", "output_len", "ttft_ms", "tpot_ms")
"""of `serve`: what is planned of a load, and not run"""
PLANNED_ONLY = (
    "planned for an engine with continuous batching, like vLLM, SGLang or TensorRT-LLM; "
    "`shardwise serve` answers one request at a time so far, in bf16 or fp32, over tp alone"
)


def load_of(plan: Plan, facts: ModelFacts) -> Load:
    """What is asked of the server.

    Raises:
        UserError: a request is longer than the context.
    """
    serve = plan.serve
    context = serve.context or facts.max_positions
    if context > facts.max_positions:
        raise UserError(
            f"serve.context={context} is longer than the model's "
            f"max_position_embeddings={facts.max_positions}; set it to at most that."
        )
    prompt = serve.prompt_len or min(1024, max(1, context // 2))
    output = serve.output_len or min(prompt, max(1, context - prompt))
    if prompt + output > context:
        limit = "serve.context" if serve.context else "the model's max_position_embeddings"
        raise UserError(
            f"serve.prompt_len={prompt} + serve.output_len={output} tokens are more than "
            f"{limit}={context}; shorten them to {context} together."
        )
    return Load(concurrency=serve.concurrency, prompt_len=prompt, output_len=output)


def search_serving(plan: Plan, facts: ModelFacts, engine: Engine | str, *, fixed: bool) -> Answer:
    """Find the best way to serve a model on accelerators.

    Args:
        plan: model, load, targets and devices; its layout counts only if `fixed`.
        engine: of the devices; a text: the reason why it is not known.
        fixed: only judge the plan's layout.

    Raises:
        UserError: the load or the layout is not possible for the model.
    """
    _check(plan, facts, fixed=fixed)
    load = load_of(plan, facts)
    count = plan.devices.count or plan.layout.world_size
    asked = plan.serve.weights or "bf16"
    one = Layout()
    single = _option("one device, as asked", plan, facts, engine, load, one, asked)
    levers = [
        _option(f"{name} weights", plan, facts, engine, load, one, name)
        for name in _LEVERS
        if name != asked
    ]
    layouts = [plan.layout] if fixed else list(serving_layouts(facts, count))
    options = [single] if not fixed and count == 1 else []
    options += [
        _option(str(layout), plan, facts, engine, load, layout, asked)
        for layout in layouts
        if fixed or layout != one
    ]
    fitting = [option for option in options if option.fits]
    if not fitting and not fixed:  # the task as asked, sharded, before fewer bits on one
        fitting = [lever for lever in levers if lever.fits][:1]
    missed = [(o, reason) for o in fitting if (reason := why_missed(o)) is not None]
    meeting = ranked([o for o in fitting if why_missed(o) is None])
    chosen = meeting[0] if meeting else None
    rejected = [(o.name, _why_less(o, chosen)) for o in meeting[1:] if chosen is not None]
    rejected += [(option.name, reason) for option, reason in missed]
    too_large = sorted((o for o in options if not o.fits), key=lambda o: o.memory.total)
    rejected += [(option.name, option.shortfall) for option in too_large]
    rejected += [] if fixed else _illegal(facts, count)
    speeds = None if isinstance(engine, str) else engine.speeds
    return Answer(
        facts=facts,
        verdict=_verdict(single, levers, chosen),
        chosen=chosen,
        single=single,
        given=options[0] if fixed and options else None,
        levers=levers,
        rejected=rejected,
        ranked=meeting,
        peak_flops=None if speeds is None else speeds.peak_flops,
        node=None if speeds is None else speeds.node,
        load=load,
        missed=[option for option, _ in missed],
    )


def _check(plan: Plan, facts: ModelFacts, *, fixed: bool) -> None:
    """Refuse what no engine can have."""
    if plan.precision.compute == "fp32":
        raise UserError(
            "precision.compute=fp32: serving on accelerators is planned in bf16; leave it out."
        )
    if not fixed:
        return
    reason = why_not_served(plan.layout, facts)
    if reason is not None:
        raise UserError(f"layout {reason}.")
    count, size = plan.devices.count or plan.layout.world_size, plan.layout.world_size
    if size > count:
        raise UserError(
            f"layout {plan.layout} needs {size} devices, the plan has {count}; set "
            f"devices.count={size}, or a smaller layout."
        )


def _verdict(single: Option, levers: list[Option], chosen: Option | None) -> Verdict:
    if single.fits and chosen is not None:
        return "fits_one_device"
    if chosen is None:
        return "impossible"
    return "fits_compressed" if any(lever.fits for lever in levers) else "shard"


def serving_layouts(facts: ModelFacts, count: int) -> Iterator[Layout]:
    """Every layout over exactly so many devices: replicas, stages, cut layers, spread experts."""
    for tp in divisors(count):
        for pp in divisors(count // tp):
            dp = count // tp // pp
            # experts cut by width, spread over the ranks of a layer, or over all replicas too
            eps = {1, tp, tp * dp if pp == 1 else tp} if facts.num_experts else {1}
            for ep in sorted(eps):
                layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep)
                if why_not_served(layout, facts) is None:
                    yield layout


def why_not_served(layout: Layout, facts: ModelFacts) -> str | None:
    """The reason why an engine cannot have a layout; None if it can."""
    tp, ep = layout.tp, layout.ep
    if layout.fsdp * layout.cp > 1 or layout.sequence_parallel:
        return (
            f"{layout}: serving shards with dp, pp, tp and ep; set fsdp=1, cp=1 and "
            "sequence_parallel=false"
        )
    if facts.num_heads % tp:
        sizes = ", ".join(map(str, divisors(facts.num_heads)))
        return f"tp={tp} does not divide {facts.num_heads} attention heads; sizes that do: {sizes}"
    kv = facts.num_kv_heads
    if facts.latent is None and kv % tp and tp % kv:
        return f"tp={tp} neither divides {kv} KV heads nor is a multiple of them; use tp={kv}"
    if facts.linear is not None and facts.linear.num_value_heads % tp:
        heads = facts.linear.num_value_heads
        return f"tp={tp} does not divide {heads} heads of linear attention; use tp=1"
    if layout.pp > facts.num_layers:
        return f"pp={layout.pp} is more than the {facts.num_layers} layers; use at most that"
    if ep > 1 and not facts.num_experts:
        return f"ep={ep}: {facts.model_type} has no experts; set ep=1"
    if ep > 1 and (facts.num_experts % ep or (tp * layout.dp) % ep or max(tp, ep) % min(tp, ep)):
        return (
            f"ep={ep} does not divide {facts.num_experts} experts and tp x dp="
            f"{tp * layout.dp} ranks, or is not a multiple or part of tp={tp}; use ep=1"
        )
    width, cut = facts.expert_width, max(1, tp // ep)
    if facts.num_experts and width % cut:
        return f"tp={tp} cuts experts of width {width} in {cut} uneven parts; use ep={tp}"
    if any(not kind.has_experts for kind in facts.layers) and facts.intermediate_size % tp:
        return f"tp={tp} does not divide {facts.intermediate_size} feed-forward columns; use tp=1"
    return None


def _illegal(facts: ModelFacts, count: int) -> list[tuple[str, str]]:
    """Of tensor parallelism, which people ask for first."""
    found = []
    for tp in divisors(count)[1:]:
        reason = why_not_served(Layout(tp=tp, dp=count // tp), facts)
        if reason is not None:
            found.append((f"tp={tp}", reason))
    return found


def _option(
    name: str,
    plan: Plan,
    facts: ModelFacts,
    engine: Engine | str,
    load: Load,
    layout: Layout,
    weights: str,
) -> Option:
    capacity = (plan.devices.memory_gib or 0.0) * GIB
    held: dict[str, Any] = {
        "facts": facts,
        "layout": layout,
        "weights": weights,
        "capacity": capacity,
    }
    room, served = Deployment(**held).room(load), None
    if not isinstance(engine, str):
        served = Server(**held, engine=engine).time(load)
    memory = _memory(room, load, layout)
    serve = plan.serve.model_copy(update={"weights": weights})
    why = engine if isinstance(engine, str) else evidence(engine)
    predicted = Prediction(memory=memory, memory_evidence=_MEMORY, step_evidence=why)
    changes = {"layout": layout, "serve": serve, "predicted": predicted}
    return Option(
        name=name,
        plan=plan.model_copy(update=changes),
        facts=facts,
        memory=memory,
        step=None,
        traffic_bytes=0,
        slowdown=1.0,
        capacity=capacity,
        served=served,
        room=room,
    )


def evidence(engine: Engine) -> str:
    """What times rest on."""
    return f"analytic: single {engine.sources} ({engine.speeds.sources}); {_ERROR}"


def _memory(room: Room, load: Load, layout: Layout) -> Memory:
    """What a rank holds with as many requests as run: at least one, which may not fit."""
    wanted = -(-load.concurrency // layout.dp)
    running = max(1, min(wanted, room.requests(load.length)))
    return Memory(
        weights=room.weights,
        gradients=0,
        optimizer=0,
        activations=room.activations,
        logits=room.logits,
        buffers=0,
        kv_cache=int(running * room.bytes_of(load.length)),
        reserve=room.reserve,
    )


def why_missed(option: Option) -> str | None:
    """The target that an option misses, with its number."""
    served, serve = option.served, option.plan.serve
    if served is None:
        return None
    found = (("TTFT", served.ttft_s, serve.ttft_ms), ("TPOT", served.tpot_s, serve.tpot_ms))
    for name, value, most in found:
        if most is not None and value * 1e3 > most:
            waiting = served.queue_s if name == "TTFT" else 0.0
            more = f", {seconds(waiting)} of it in the queue" if waiting else ""
            return f"{name} {seconds(value)}{more}: more than the {most:g} ms asked"
    return None


def ranked(options: list[Option]) -> list[Option]:
    """The most output first; of those that are as good, the one that communicates least."""

    def simple(option: Option) -> tuple[float, ...]:
        layout = option.plan.layout
        return (layout.world_size // layout.dp, layout.tp, layout.pp, layout.ep)

    if not options or options[0].served is None:
        return sorted(options, key=simple)
    by_rate = sorted(options, key=lambda o: (-_rate(o), *simple(o)))
    even = [o for o in by_rate if _rate(o) >= (1 - _EVEN) * _rate(by_rate[0])]
    chosen = min(even, key=simple)
    return [chosen, *(o for o in by_rate if o is not chosen)]


def _rate(option: Option) -> float:
    return 0.0 if option.served is None else option.served.output_tokens_per_s


def _why_less(option: Option, chosen: Option) -> str:
    """The numbers that make an option that fits worse than the chosen one."""
    served, best = option.served, chosen.served
    if served is None or best is None:
        return "more ranks for each replica, so more communication; no speeds are known"
    rate, most = served.output_tokens_per_s, best.output_tokens_per_s
    text = f"{rate:,.0f} output tokens/s, the chosen one {most:,.0f}"
    if rate >= (1 - _EVEN) * most:
        return f"{text}: as good, but its ranks communicate more"
    parts = served.decode.parts()
    longest = {name: s - best.decode.parts()[name] for name, s in parts.items()}
    part = max(longest, key=lambda name: longest[name])
    if served.queued > best.queued:
        return f"{text}; {served.queued} of {served.load.concurrency} requests wait for room"
    if longest[part] <= 0:
        return f"{text}; a prompt adds {seconds(served.prefill_s)} to passes"
    return (
        f"{text}; {part} take {seconds(parts[part])} of a pass of {seconds(served.decode.total_s)}"
    )


def why_not_run(option: Option) -> str | None:
    """Why Shardwise's own server cannot run an option; None if it can."""
    weights = option.plan.serve.weights
    if weights not in (None, "bf16"):
        return f"{weights} weights are planned only"
    reason = why_illegal(option.plan.layout, option.facts, task="serve")
    if reason is not None:
        return reason
    need = predict_memory(runnable(option), option.facts).total
    if need <= option.capacity:
        return None
    context = option.plan.serve.context or option.facts.max_positions
    return (
        f"`shardwise serve` keeps room for one whole context of {context} tokens and needs "
        f"{need / GIB:.2f} GiB for it, a device has {option.capacity / GIB:.2f} GiB; give a "
        "smaller --context"
    )


def runnable(option: Option) -> Plan:
    """The plan of an option for Shardwise's own server, which takes one request at a time."""
    plan = option.plan
    kept = {name: getattr(plan.serve, name) for name in plan.serve.model_fields_set - {*LOAD_KEYS}}
    plan = plan.model_copy(update={"serve": Serve(**kept)})
    memory = predict_memory(plan, option.facts)
    found = Prediction(memory=memory, memory_evidence=MEMORY_EVIDENCE, step_evidence=PLANNED_ONLY)
    return plan.model_copy(update={"predicted": found})
