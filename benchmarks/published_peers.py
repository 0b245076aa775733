"""Memory and step times as other training software has them, so that its runs can be compared.

The planner's parts are kept where the software does the same, and replaced where it does not: how
many bytes it keeps of a parameter, whether logits exist whole, which attention it runs, and what it
hides behind what (`published_software.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from benchmarks.published_software import Software
from shardwise.config import GIB, Plan
from shardwise.models.facts import ModelFacts
from shardwise.planner.accelerator import Accelerator
from shardwise.planner.activations import selective_bytes_per_token
from shardwise.planner.memory import RankSizes, local_tokens, predict_memory, stages_of_rank
from shardwise.planner.network import Group, Op, place
from shardwise.planner.speeds import Dtype
from shardwise.planner.stages import bubble, worst_ranks
from shardwise.planner.timing import step_time
from shardwise.planner.work import HOST_OPS, layer_work

RESERVED = 1.15
"""what allocators reserve for each byte allocated: the planner's own share"""


def adapter_parameters(facts: ModelFacts, rank: int) -> int:
    """Two narrow matrices beside each matrix of the layers (arXiv 2106.09685)."""
    return sum(
        rank * (param.shape[-1] + param.shape[-2]) * math.prod(param.shape[:-2])
        for kind in facts.layers
        for param in facts.params_of(kind).values()
        if len(param.shape) > 1
    )


@dataclass(frozen=True, kw_only=True)
class PeerSpeeds:
    """A device as some software uses it."""

    device: Accelerator
    software: Software
    plan: Plan
    facts: ModelFacts

    overlaps = True

    @property
    def host_s(self) -> float:
        """An adapter starts eight operations beside each of seven matrices of a layer."""
        if self.software.adapters is None:
            return self.device.host_s
        forward, _ = HOST_OPS[self.plan.train.compile]
        return self.device.host_s * (forward + 8 * 7) / forward

    @property
    def node(self) -> int:
        return self.device.node

    @property
    def peak_flops(self) -> float:
        return self.device.peak_flops

    @property
    def evidence(self) -> str:
        return self.device.evidence

    def matmul_s(self, m: float, n: int, k: int, dtype: Dtype) -> float:
        """In FP8 or FP4 as long as fewer rows take in bf16, as many as its peak is higher; and
        both inputs are cast before it.

        A frozen weight has one product backward, not two, of those that the planner asks for; in 4
        bits it is unpacked before each. Its adapter reads what it reads and adds to what it makes.
        """
        seconds = self.device.matmul_s(m / self._faster, n, k, dtype)
        if self.software.narrow is not None:
            seconds += self.memory_s(3 * (m * k + n * k))
        if self.software.adapters is None:
            return seconds
        asked = 4 if self.plan.train.checkpointing == "full" else 3
        seconds += self.memory_s(self.software.unpack_bytes * n * k)
        moved = 3 if self.software.fused else 6
        return seconds * (asked - 1) / asked + self.memory_s(moved * m * (n + k))

    @cached_property
    def _faster(self) -> float:
        """Peak of the products' format over that of bf16."""
        peaks = {
            None: self.device.device.bf16_tflops,
            "fp8": self.device.device.fp8_tflops,
            "fp4": self.device.device.fp4_tflops,
        }
        return (peaks[self.software.narrow] or math.nan) * 1e12 / self.peak_flops

    def attention_s(self, flops: float, dtype: Dtype) -> float:
        """Without fused attention: two products, and the scores of every pair read and written."""
        if self.software.flash:
            return self.device.attention_s(flops, dtype) / self.software.attention_share
        # both halves of the square are made, by two products forward and four backward, of which
        # the planner asks 3.5 times the forward ones; softmax, dropout and its mask read and write
        # 32 bytes a score there and back
        pairs = flops / (4 * self.facts.head_dim) * 2
        products = (
            6
            / 3.5
            * self.device.matmul_s(
                pairs / self.plan.train.seq_len, self.plan.train.seq_len, self.facts.head_dim, dtype
            )
        )
        return products + self.memory_s(32 / 3.5 * pairs)

    def memory_s(self, num_bytes: float) -> float:
        return self.device.memory_s(num_bytes)

    def collective_s(self, op: Op, num_bytes: float, group: Group | None = None) -> float:
        """Copies of a token that go to the same node cross once, where the software sees to it."""
        if op == "all_to_all" and group and group.crosses and self.software.sends_once_a_node:
            nodes, chosen = group.size / group.per_node, self.facts.experts_per_token
            num_bytes *= nodes * (1 - (1 - 1 / nodes) ** chosen) / chosen
        return self.device.collective_s(op, num_bytes, group)

    def link(self, group: Group) -> str:
        return self.device.link(group)


def peer_memory_gib(plan: Plan, facts: ModelFacts, software: Software, interleave: int) -> float:
    """GiB of the number that was published: reserved, allocated, states, or the first stage.

    The larger of two moments: the loss, with all activations, and the end of the backward pass,
    with all gradients. Gradients are there at the loss only where a pass before has made some.
    """
    weights, gradients, optimizer = _states(plan, facts, software)
    if software.measures == "states":
        return (weights + gradients + optimizer) / GIB
    if software.name == "megatron" and not software.flash:
        kept = korthikanti_bytes(plan, facts, software, interleave)
        return (weights + gradients + optimizer + kept) / GIB
    ours = predict_memory(_kept_plan(plan, software), facts)
    activations = ours.activations - _made_again_bytes(plan, facts, software)
    logits = ours.logits
    if software.logit_bytes is not None:
        vocab = -(-facts.vocab_size // plan.layout.tp)
        logits = max(logits, vocab * local_tokens(plan) * software.logit_bytes)
    # Megatron works on the weights that it holds; others gather them, as Shardwise does
    gathers = plan.layout.num_shards > 1 and software.name != "megatron"
    buffers: float = ours.buffers if gathers else 0
    if gathers and software.adapters is not None:  # frozen weights are gathered, not reduced
        sizes = RankSizes.of(facts, plan.layout)
        buffers = 2 * (sizes.layer_bytes(2) + sizes.embedding)
    sums = software.name == "megatron" or plan.train.num_micro_batches(plan.layout) > 1
    at_loss = activations + logits + (gradients if sums else 0)
    at_end = gradients + logits // 4
    total = weights + optimizer + buffers + max(at_loss, at_end)
    if software.measures != "reserved":
        return total / GIB
    return total * RESERVED / GIB


def _kept_plan(plan: Plan, software: Software) -> Plan:
    """Compiled layers keep the results of products and make the rest again, as selective
    recomputation does (torch's min-cut partitioner)."""
    if not software.fused or plan.train.checkpointing != "none":
        return plan
    train = plan.train.model_copy(update={"checkpointing": "selective"})
    return plan.model_copy(update={"train": train})


def _made_again_bytes(plan: Plan, facts: ModelFacts, software: Software) -> float:
    """What selective recomputation does not keep where it makes some products again."""
    c = plan.precision.compute_bytes
    return sum(
        software.products_again
        * local_tokens(plan)
        * (selective_bytes_per_token(facts, kind, plan.layout, c) - facts.attention_size * c)
        for kind in facts.layers
    )


def _states(plan: Plan, facts: ModelFacts, software: Software) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer of the rank that has most of them."""
    layout = plan.layout
    ranks = [
        RankSizes.of(facts, layout, stages_of_rank(plan, facts, rank)).total
        for rank in worst_ranks(plan, facts)
    ]
    held = max(ranks) if software.measures != "first stage" else ranks[0]
    n = layout.num_shards if layout.num_shards > 1 else 1
    if software.adapters is not None:
        return _adapted_states(facts, software, n if layout.zero == 3 else 1, held)
    if software.states is None:  # as Shardwise: fp32 shards of all of them
        return 4 * held / n, 4 * held / n, 8 * held / n
    weights, gradients, optimizer = software.states
    shared = {1: (1, 1, n), 2: (1, n, n), 3: (n, n, n)}[layout.zero]
    return (
        held * weights / shared[0],
        held * gradients / shared[1],
        held * optimizer / shared[2],
    )


def _adapted_states(
    facts: ModelFacts, software: Software, shards: int, held: int
) -> tuple[float, float, float]:
    """Frozen weights, and fp32 adapters (and tables) with gradients and two moments."""
    share = held / facts.num_parameters  # of the whole model, on this rank
    tables = facts.num_outer_parameters
    base = software.base_bytes * (facts.num_parameters - tables) + software.table_bytes * tables
    trained = adapter_parameters(facts, software.adapters or 0)
    weights, gradients, moments = base + 4 * trained, 4.0 * trained, 8.0 * trained
    if software.trains_tables:
        weights, gradients, moments = (
            weights + 2 * tables,
            gradients + 2 * tables,
            moments + 8 * tables,
        )
    return weights * share / shards, gradients * share / shards, moments * share / shards


def korthikanti_bytes(plan: Plan, facts: ModelFacts, software: Software, interleave: int) -> float:
    """Activations of the first stage (arXiv 2205.05198, equations 1 to 6), 16 bit, with dropout."""
    layout, train = plan.layout, plan.train
    s, b, h, t = train.seq_len, train.micro_batch, facts.hidden_size, layout.tp
    scores = 5 * facts.num_heads * s / h
    if software.attention_again:
        scores = 0.0
    if layout.sequence_parallel:
        layer = s * b * h / t * (34 + scores)
    else:
        layer = s * b * h * (10 + 24 / t + scores / t)
    if train.checkpointing == "full":
        layer = 2 * s * b * h
    p = layout.pp
    in_flight = p if interleave == 1 else p * (1 + (p - 1) / (p * interleave))
    in_flight = min(in_flight, train.num_micro_batches(layout)) if p > 1 else 1
    per_stage = facts.num_layers / p
    embedding = s * b * h * p / t if p > 1 else s * b * h / t
    return layer * per_stage * in_flight + embedding


def idle_share(plan: Plan, interleave: int) -> float:
    """The bubble of a pipeline with so many stages a rank (arXiv 2104.04473, section 2.2)."""
    micro = plan.train.num_micro_batches(plan.layout)
    return (plan.layout.pp - 1) / (max(1, interleave) * micro)


def tokens_per_s(plan: Plan, step_s: float) -> float:
    """Tokens a second of one device."""
    return plan.train.global_batch * plan.train.seq_len / plan.layout.world_size / step_s


def step_seconds(plan: Plan, facts: ModelFacts, speeds: PeerSpeeds, interleave: int) -> float:
    """Seconds of a step of some software: the planner's, with what it does otherwise."""
    software, layout = speeds.software, plan.layout
    num_micro = plan.train.num_micro_batches(layout)
    time = step_time(plan, facts, speeds)
    total = time.total_s
    busy = time.compute_s + time.memory_s
    shown = {axis: s for axis, s in time.exposed_by_axis().items() if s > 0}
    shards = sum(shown.get(axis, 0.0) for axis in ("fsdp", "efsdp", "dp"))
    if software.gathers_parameters:
        total += _parameter_gathers(plan, facts, speeds)
    elif software.overlaps_pipeline and layout.pp > 1:  # behind the last of many passes
        total -= min(shards, busy / num_micro)
    if software.products_again:
        total += software.products_again * num_micro * _products_s(plan, facts, speeds)
    if software.overlaps_tensor:
        total -= min(shown.get("tp", 0.0), time.compute_s) * (1 - 1 / layout.tp)
    if layout.pp > 1:
        total += time.idle_s * (idle_share(plan, interleave) / bubble(plan) - 1)
    if software.logit_bytes is not None:  # cast, softmax and their gradients, each read and written
        vocab = facts.vocab_size // layout.tp
        total += num_micro * speeds.memory_s(12 * vocab * local_tokens(plan))
    return total


def _parameter_gathers(plan: Plan, facts: ModelFacts, speeds: PeerSpeeds) -> float:
    """Seconds to gather each parameter of each layer by itself, with nothing else meanwhile."""
    group = place(plan.layout, "fsdp", speeds.node)
    passes = 3 if plan.train.checkpointing == "full" else 2
    return sum(
        passes * speeds.collective_s("all_gather", 2 * math.prod(param.shape), group)
        for kind in facts.layers
        for param in facts.params_of(kind).values()
    ) + sum(
        speeds.collective_s("reduce_scatter", 2 * math.prod(param.shape), group)
        for kind in facts.layers
        for param in facts.params_of(kind).values()
    )


def _products_s(plan: Plan, facts: ModelFacts, speeds: PeerSpeeds) -> float:
    """Seconds of the products of a forward pass of a stage."""
    return sum(
        p.num * speeds.matmul_s(p.m, p.n, p.k, plan.precision.compute) / plan.layout.pp
        for kind in facts.layers
        for p in layer_work(plan, facts, kind).products
    )
