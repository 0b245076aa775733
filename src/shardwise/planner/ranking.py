"""Which option is best, and why another one lost."""

from __future__ import annotations

from shardwise.config import GIB, Layout
from shardwise.console import seconds
from shardwise.planner.answer import Option
from shardwise.planner.timing import StepTime, TimedCollective

MODES = ["none", "selective", "full"]
"""of recomputation, each cheaper in memory and dearer in time than the one before"""
_EVEN = 0.03
"""step times that are nearer to each other than this are taken for equal: the error is larger"""


def by_cost(option: Option) -> tuple[float, ...]:
    """Fastest first; unmeasured, recomputation costs most, then ranks that wait for each other over
    several nodes, then traffic, that which can be hidden last, then small passes."""
    train, layout = option.plan.train, option.plan.layout
    recompute = float(MODES.index(train.checkpointing))
    # without a measurement, more devices are taken to be worth more than their traffic
    unmeasured = (
        recompute,
        -layout.world_size,
        option.crosses_nodes,
        round(option.slowdown, 2),
        option.waiting_bytes,
        option.traffic_bytes,
        -train.micro_batch,
        layout.tp,
        option.memory.total,
    )
    return unmeasured if option.step_s is None else (option.step_s, *unmeasured)


def ranked_options(options: list[Option]) -> list[Option]:
    """The best first; of those that are as good as the fastest, the one of fewest axes."""
    ranked = sorted(options, key=by_cost)
    if not ranked or ranked[0].step_s is None:
        return ranked
    limit = ranked[0].step_s * (1 + _EVEN)
    even = [o for o in ranked if o.step_s is not None and o.step_s <= limit]
    chosen = min(even, key=lambda o: (_num_axes(o.plan.layout), even.index(o)))
    return [chosen, *(o for o in ranked if o is not chosen)]


def _num_axes(layout: Layout) -> int:
    return sum(getattr(layout, axis) > 1 for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep"))


def why_slower(option: Option, chosen: Option) -> str:
    """The number that makes an option that fits worse than the chosen one."""
    if option.step is not None and chosen.step is not None:
        return _why_longer(option, option.step, chosen.step)
    if option.plan.layout.world_size < chosen.plan.layout.world_size:
        return f"leaves {option.num_devices - option.plan.layout.world_size} device(s) idle"
    if option.crosses_nodes and not chosen.crosses_nodes:
        return "has ranks that wait for each other in every layer in several nodes"
    if option.slowdown > chosen.slowdown + 0.005:
        return f"its pipeline takes {option.slowdown:.2f} times its share of the work"
    if option.plan.train.checkpointing != chosen.plan.train.checkpointing:
        return f"fits only with train.checkpointing={option.plan.train.checkpointing}"
    if option.waiting_bytes > chosen.waiting_bytes:
        return (
            f"waits for {option.waiting_bytes / GIB:.2f} GiB a step that cannot be hidden, "
            f"the chosen one for {chosen.waiting_bytes / GIB:.2f} GiB"
        )
    if option.traffic_bytes > chosen.traffic_bytes:
        return (
            f"moves {option.traffic_bytes / GIB:.2f} GiB a step, "
            f"the chosen one {chosen.traffic_bytes / GIB:.2f} GiB"
        )
    micro, larger = option.plan.train.micro_batch, chosen.plan.train.micro_batch
    if micro < larger:
        return f"moves as much in micro-batches of {micro}, the chosen one of {larger}"
    if option.memory.total > chosen.memory.total:
        return (
            f"moves as much and needs {option.memory.total / GIB:.2f} GiB on a device, "
            f"the chosen one {chosen.memory.total / GIB:.2f} GiB"
        )
    return "as good as the chosen one, but no better"


def _why_longer(option: Option, step: StepTime, best: StepTime) -> str:
    """The one part of a step that explains most of what it is longer than the best."""
    whole = f"{seconds(step.total_s)} a step"
    longer = step.total_s - best.total_s
    if longer <= _EVEN * best.total_s:
        return f"{whole}, as good as the chosen one's {seconds(best.total_s)}, but no simpler"
    axes, others = step.exposed_by_axis(), best.exposed_by_axis()
    parts = {
        **{axis: (value, value - others.get(axis, 0.0)) for axis, value in axes.items()},
        "idle": (step.idle_s, step.idle_s - best.idle_s),
        "memory": (step.memory_s, step.memory_s - best.memory_s),
        "compute": (step.compute_s, step.compute_s - best.compute_s),
    }
    part = max(parts, key=lambda name: parts[name][1])
    taken, more = parts[part]
    if more < longer / 2:
        return f"{whole}, the chosen one {seconds(best.total_s)}"
    of_whole = f"{seconds(taken)} of {whole}"
    if part in axes:
        return f"{_named(option.plan.layout, part)} {_on_link(step, part, of_whole)}"
    verbs = {
        "idle": "its pipeline idles",
        "memory": "element-wise operations take",
        "compute": "computes",
    }
    return f"{verbs[part]} {of_whole}, the chosen one {seconds(taken - more)}"


def _named(layout: Layout, axis: str) -> str:
    """An axis of the ledger with its size: shards may be over two axes of the layout."""
    if axis == "fsdp" and layout.cp > 1:
        return f"fsdp x cp={layout.num_shards}"
    size = layout.num_expert_shards if axis == "efsdp" else getattr(layout, axis)
    return f"{axis}={size}"


def _on_link(step: StepTime, axis: str, of_whole: str) -> str:
    worst: TimedCollective = max(
        (timed for timed in step.lines if timed.line.axis == axis), key=lambda t: t.exposed_s
    )
    where = "crosses nodes" if worst.group.crosses else "waits for its ranks"
    return f"{where}: {of_whole} on the {worst.link}"
