"""What a search gives: options with what they need, and the answer made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.config import GIB, Memory, Plan
from shardwise.models.facts import ModelFacts
from shardwise.planner.cost import Cost
from shardwise.planner.layout import legal_tp_sizes
from shardwise.planner.serving import ServeTime
from shardwise.planner.serving_memory import Load, Room
from shardwise.planner.timing import StepTime, model_flops_per_token

Verdict = Literal["fits_one_device", "fits_compressed", "shard", "impossible"]
MEMORY_EVIDENCE = (
    "analytic, within 8% of measured runs on CPU (mixtures of experts 17%); not measured on "
    "accelerators, where nine of ten published runs of other software are within 20%"
)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run the task, with what it needs."""

    name: str
    plan: Plan
    facts: ModelFacts
    """of the plan's model, with the adapters that it trains"""
    memory: Memory
    step: StepTime | None
    """None: no speeds are known, or it does not fit"""
    traffic_bytes: int
    """that a rank moves in a step; 0 where it does not fit"""
    waiting_bytes: int = 0
    """of these, what an accelerator waits for: not of shards and replicas, which can be hidden"""
    crosses_nodes: bool = False
    """whether ranks that wait for each other in every layer sit in several nodes"""
    slowdown: float
    """how much longer a pipeline takes than its ranks' share of the work; 1 without one"""
    capacity: float
    """bytes of one device"""
    served: ServeTime | None = None
    """what requests see; None: it trains, does not fit, or no speeds are known"""
    room: Room | None = None
    """of a server's cache"""

    @property
    def num_devices(self) -> int:
        """Devices of the plan, busy or not."""
        return self.plan.devices.count or self.plan.layout.world_size

    @property
    def fits(self) -> bool:
        """Whether the worst rank stays within the device's memory, a server with one request."""
        return self.memory.total <= self.capacity

    @property
    def step_s(self) -> float | None:
        """Seconds of one optimizer step."""
        return None if self.step is None else self.step.total_s

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Tokens of full rows, over all devices of the plan."""
        train, step_s = self.plan.train, self.step_s
        if step_s is None:
            return None
        return train.global_batch * train.seq_len / self.num_devices / step_s

    def mfu(self, peak_flops: float | None) -> float | None:
        """Share of the devices' bf16 peak, by `timing.model_flops_per_token`."""
        tokens = self.tokens_per_s_per_device
        if tokens is None or peak_flops is None:
            return None
        return tokens * model_flops_per_token(self.plan, self.facts) / peak_flops

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
    given: Option | None = None
    """the layout that was given, where none was searched for"""
    levers: list[Option] = field(default_factory=list)
    """one device again, with cheaper settings"""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """option, and the reason why it lost"""
    ranked: list[Option] = field(default_factory=list)
    """all that fit, the chosen one first"""
    peak_flops: float | None = None
    """of one device in bf16"""
    node: int | None = None
    """devices of a node; None: they are all in one"""
    cost: Cost | None = None
    """of the chosen option"""
    notes: tuple[str, ...] = ()
    """what the user should know of the model's files"""
    load: Load | None = None
    """what is asked of a server on accelerators"""
    missed: list[Option] = field(default_factory=list)
    """servers that fit and miss a target, the best first"""


def suggest(answer: Answer) -> str:
    """What would make an impossible task possible."""
    facts = answer.facts
    least = min((answer.single, *answer.levers), key=lambda option: option.memory.total)
    same = least.plan.method == answer.single.plan.method
    how = "" if same else f" with --task {least.plan.method}"
    sizes = ", ".join(str(n) for n in legal_tp_sizes(facts))
    return (
        f"one device would need {least.memory.total / GIB:.2f} GiB at the least{how}; take more "
        f"devices or larger ones (tensor-parallel sizes that fit this model: {sizes}), or a "
        "smaller model."
    )
