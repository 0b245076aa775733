"""Peak bytes of the worst rank, by part, without torch.

Checked against counting: parameters against the model that transformers builds, activations
against the tensors that autograd really saves, totals against measured peaks
(tests/unit/test_memory.py and tests/e2e/test_planned.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import GIB, Layout, Memory, Plan
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind, packed_bytes
from shardwise.planner.activations import (
    FP32,
    activation_bytes_per_token,
    context_bytes_per_token,
    masked_bytes_per_token,
    selective_bytes_per_token,
)
from shardwise.planner.remember import per_model
from shardwise.planner.stages import StageSpec, passes_under_way, stages_of, worst_ranks

LOSS_CHUNK_TOKENS = 256
"""tokens whose logits exist at a time, which the loss obeys"""
CHECKPOINT_FILE_BYTES = 64 * 2**20
"""about so many bytes of a rank go into one file of a checkpoint"""
_WRITER_COPIES = 2
"""of a file's tensors: torch's writer makes bytes of each, and then a file of these"""
_RUNTIME_BYTES = {"cpu": int(0.36 * GIB), "accelerator": int(1.0 * GIB)}
"""What a process holds before any tensor. CPU: interpreter, torch and transformers, measured with
torch 2.13. Accelerator: context 0.5 to 2 GiB and communicator buffers 0.35 to 0.4 GiB."""
_SLACK = {"cpu": 0.03, "accelerator": 0.15}
"""Allocator overhead as a share of the tensors. CPU: measured with the settings of
launch/local.py. Accelerator: published reserved/allocated ratios are 1.07 to 1.24."""


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Parameters that one rank has of some equal layers, each."""

    count: int
    values: int
    """experts included"""
    experts: int
    """those that have a sharding of their own (ep > 1)"""
    trained: int
    """all of them, or their adapters"""
    own_adapters: int
    """what one shard keeps of the adapters: each is cut by its first dimension, rounded up"""
    packed: int
    """of the values those that rest in four bits"""
    unpacked: int
    """values of the largest matrix of these: one is made whole at a time"""
    largest: int
    """values of the largest parameter that is trained"""

    def num_bytes(self, c: int) -> int:
        """Of one layer, in a compute dtype of c bytes."""
        return (self.values - self.packed) * c + packed_bytes(self.packed)


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Parameters of one rank, after pipeline and tensor parallelism and before FSDP."""

    layers: tuple[LayerSizes, ...]
    embedding: int
    head: int
    """last norm and, unless it is the embedding of the same rank, the head"""
    trains_adapters: bool
    """and nothing else"""

    def layer_bytes(self, c: int) -> int:
        """Of the largest layer, in a compute dtype of c bytes."""
        return max((sizes.num_bytes(c) for sizes in self.layers), default=0)

    def total_bytes(self, c: int) -> int:
        """Of all of them, in a compute dtype of c bytes."""
        return sum(sizes.count * sizes.num_bytes(c) for sizes in self.layers) + self.outer * c

    @property
    def packed(self) -> int:
        """Those that rest in four bits."""
        return sum(sizes.count * sizes.packed for sizes in self.layers)

    @property
    def unpacked(self) -> int:
        """Values of the largest of these matrices."""
        return max((sizes.unpacked for sizes in self.layers), default=0)

    @property
    def outer(self) -> int:
        """Outside the layers."""
        return self.embedding + self.head

    @property
    def total(self) -> int:
        """All of them."""
        return sum(sizes.count * sizes.values for sizes in self.layers) + self.outer

    @property
    def trained_layer(self) -> int:
        """What is trained of the layer that has most of it."""
        return max((sizes.trained for sizes in self.layers), default=0)

    @property
    def trained_outer(self) -> int:
        """What is trained outside the layers."""
        return 0 if self.trains_adapters else self.outer

    @property
    def trained(self) -> int:
        """What is trained of all."""
        return sum(sizes.count * sizes.trained for sizes in self.layers) + self.trained_outer

    def own_largest(self, layout: Layout) -> int:
        """What one rank keeps of the largest parameter that is trained, at most."""
        tables = 0 if self.trains_adapters else max(self.embedding, self.head)
        shards = layout.num_shards
        if any(sizes.experts for sizes in self.layers):
            shards = min(shards, layout.num_expert_shards)
        largest = max([tables, *(sizes.largest for sizes in self.layers)])
        return -(-largest // shards)

    def own_trained(self, layout: Layout) -> int:
        """What one rank keeps of what is trained."""
        if not self.trains_adapters:
            return self.own(layout)
        return sum(sizes.count * sizes.own_adapters for sizes in self.layers)

    def own_frozen_bytes(self, layout: Layout, c: int) -> int:
        """What one rank keeps of what is not trained, in a compute dtype of c bytes."""
        numbers = self.own(layout) - self.own_trained(layout) - -(-self.packed // layout.num_shards)
        return numbers * c + -(-packed_bytes(self.packed) // layout.num_shards)

    def own(self, layout: Layout) -> int:
        """What one rank keeps of them."""
        experts = sum(sizes.count * sizes.experts for sizes in self.layers)
        dense = -(-(self.total - experts) // layout.num_shards)
        return dense + -(-experts // layout.num_expert_shards)

    @classmethod
    def of(
        cls, facts: ModelFacts, layout: Layout, stages: Sequence[StageSpec] | None = None
    ) -> RankSizes:
        """Sizes of the largest rank: uneven cuts round up.

        Args:
            stages: those of the rank; None: the whole model.
        """
        table = -(-facts.vocab_size // layout.tp) * facts.hidden_size
        has_embedding = stages is None or any(stage.is_first for stage in stages)
        has_head = stages is None or any(stage.is_last for stage in stages)
        one_stage = stages is None or len(stages) == 1
        shared = facts.tied and one_stage and has_embedding
        more = facts.num_outer_parameters - (1 if facts.tied else 2) * (
            facts.vocab_size * facts.hidden_size
        )  # last norm and learned positions
        return cls(
            layers=tuple(
                _layer_sizes(facts, layout, kind, count)
                for kind, count in layer_counts(facts, stages).items()
            ),
            trains_adapters=facts.adapters is not None,
            embedding=table if has_embedding else 0,
            head=more + (0 if shared else table) if has_head else 0,
        )


def _layer_sizes(facts: ModelFacts, layout: Layout, kind: LayerKind, count: int) -> LayerSizes:
    params = facts.params_on_rank(kind, tp=layout.tp, ep=layout.ep).values()
    return LayerSizes(
        count=count,
        values=sum(math.prod(param.shape) for param in params),
        experts=facts.num_expert_parameters(kind) // layout.ep if layout.ep > 1 else 0,
        trained=sum(math.prod(param.shape) for param in params if param.trained),
        own_adapters=0
        if facts.adapters is None
        else sum(cut(param.shape, layout.num_shards) for param in params if param.trained),
        packed=sum(param.num_packed for param in params),
        unpacked=max((param.num_packed for param in params), default=0),
        largest=max((math.prod(param.shape) for param in params if param.trained), default=0),
    )


def cut(shape: tuple[int, ...], ranks: int) -> int:
    """Values that one of so many shards has of a parameter, cut by its first dimension."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def stages_of_rank(plan: Plan, facts: ModelFacts, rank: int) -> list[StageSpec]:
    """The stages of one position on the `pp` axis."""
    return [stage for stage in stages_of(plan, facts) if stage.rank == rank]


def layer_counts(
    facts: ModelFacts, stages: Sequence[StageSpec] | None = None
) -> Counter[LayerKind]:
    """How many layers of each kind some stages have; None: the whole model."""
    if stages is None:
        return Counter(facts.layers)
    return _layer_counts(facts, *(stage.layers for stage in stages))


@per_model
def _layer_counts(facts: ModelFacts, *layers: range) -> Counter[LayerKind]:
    return Counter(facts.layers[number] for numbers in layers for number in numbers)


def recomputed_layers(
    plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]
) -> Counter[LayerKind]:
    """How many layers of each kind some stages compute again in the backward pass."""
    if plan.train.checkpointing == "none":
        return Counter()
    every = plan.train.checkpoint_every
    return _layer_counts(facts, *(stage.layers[::every] for stage in stages))


def _masks(plan: Plan, facts: ModelFacts, passes: int) -> int:
    """Masks of a rank's two chunks, for all layers alike; again for those with a window.

    Packed rows have masks where they are longer than a window or cut between ranks, others in each
    sequence: at most as large as that of one row that fills it.
    """
    layout, train = plan.layout, plan.train
    windows = {kind.window for kind in facts.layers}
    if layout.cp > 1:
        chunk = train.seq_len / (2 * layout.cp)
        one = chunk * chunk * (2 * layout.cp + 1) * len(windows)
    elif train.packing and any(window and train.seq_len > window for window in windows):
        one = float(train.seq_len**2)
    else:
        return 0
    num = train.micro_batch * passes if train.packing else 1
    return int(one * plan.precision.compute_bytes * num)


def local_tokens(plan: Plan) -> int:
    """Tokens of a micro-batch of full rows on one rank, with the padding that its axes need."""
    layout, train = plan.layout, plan.train
    padded = -(-train.seq_len // layout.sequence_multiple) * layout.sequence_multiple
    return train.micro_batch * padded // layout.cp


def predict_memory(plan: Plan, facts: ModelFacts) -> Memory:
    """The memory of a plan's worst rank at its peak."""
    if plan.task == "serve":
        return _with_reserve(plan, _serving(plan, facts))
    ranks = (_training(plan, facts, rank) for rank in worst_ranks(plan, facts))
    return _with_reserve(plan, max(ranks, key=lambda parts: sum(parts.values())))


def stage_bytes(plan: Plan, facts: ModelFacts) -> list[int] | None:
    """Peak bytes of each position on the `pp` axis; None without a pipeline."""
    if plan.task == "serve" or plan.layout.pp == 1:
        return None
    ranks = range(plan.layout.pp)
    return [_with_reserve(plan, _training(plan, facts, rank)).total for rank in ranks]


def _with_reserve(plan: Plan, parts: dict[str, int]) -> Memory:
    where = "cpu" if plan.devices.kind == "cpu" else "accelerator"
    reserve = _RUNTIME_BYTES[where] + math.ceil(_SLACK[where] * sum(parts.values()))
    return Memory(**parts, reserve=reserve)


def state_bytes(plan: Plan, facts: ModelFacts) -> int:
    """Weights, gradients and the two moments of AdamW, all fp32: 16 bytes a parameter; and what
    adapters leave frozen, in the compute dtype or in four bits."""
    trained, packed = facts.num_trained_parameters, facts.num_packed_parameters
    frozen = facts.num_parameters - trained - packed
    return 4 * FP32 * trained + plan.precision.compute_bytes * frozen + packed_bytes(packed)


def _training(plan: Plan, facts: ModelFacts, rank: int) -> dict[str, int]:
    """The larger of the two peaks of a step, on one position of the `pp` axis.

    The first is where the loss meets the last layer: every activation is there, and the gradient
    of the head. The second is the end of the backward pass: the activations are gone, but the
    outer group's gradients are whole and on their way into the reduce-scatter. A pipeline reduces
    all groups there, one after the other, and has its receive buffers besides.
    """
    layout, train = plan.layout, plan.train
    stages = stages_of_rank(plan, facts, rank)
    sizes = RankSizes.of(facts, layout, stages)
    c = plan.precision.compute_bytes
    trained, unpacked = sizes.own_trained(layout), sizes.unpacked * c
    tokens = local_tokens(plan)
    received = _received_bytes(plan, facts, stages)
    gathered = sizes.total_bytes(c) if layout.keeps_gathered else sizes.outer * c
    r = plan.precision.reduce_bytes
    # of the micro-batches before this one
    summed = sizes.trained * r if layout.reduces_once else trained * FP32
    passes = passes_under_way(plan, rank)
    moments = [(passes, summed)]
    if passes == train.num_micro_batches(layout) * len(stages):
        # all at once: gradients begin when the first pass has let go of its activations
        moments = [(passes, 0), (passes - 1, summed)]
    at_loss = [
        {
            "gradients": gradients,
            "activations": _activations(plan, facts, passes, stages),
            # the last layer unpacks a matrix where the logits have been
            "logits": max(_logits(plan, facts, tokens) if sizes.head else 0, unpacked),
            "buffers": gathered + 2 * sizes.layer_bytes(c) + received + _masks(plan, facts, passes),
        }
        for passes, gradients in moments
        if passes
    ]
    at_end = {
        "gradients": trained * FP32,
        "activations": max(_kept(plan, facts, kind) for kind in layer_counts(facts, stages)),
        "logits": 0,
        "buffers": sizes.outer * c
        + sizes.trained_outer * (c + r)
        + 2 * (sizes.layer_bytes(c) + sizes.trained_layer * r)
        + unpacked,
    }
    if layout.pp > 1:
        at_end["activations"] = 0
        at_end["gradients"] += sizes.trained * r
        largest = max(sizes.trained_layer, sizes.trained_outer)
        at_end["buffers"] = sizes.total_bytes(c) + largest * r + received
    peak = max(*at_loss, at_end, key=lambda parts: sum(parts.values()))
    states = {
        "weights": trained * FP32 + sizes.own_frozen_bytes(layout, c),
        "optimizer": 2 * trained * FP32,
        "saving": saving_bytes(plan, sizes) if plan.devices.kind == "cpu" else 0,
    }
    return {**states, **peak, "kv_cache": 0}


def host_bytes_for_saves(plan: Plan, facts: ModelFacts) -> int:
    """Host memory of the worst rank for checkpoints, where devices have a memory of their own."""
    if plan.devices.kind == "cpu" or not plan.saves_behind:
        return 0
    ranks = (stages_of_rank(plan, facts, rank) for rank in worst_ranks(plan, facts))
    sizes = (RankSizes.of(facts, plan.layout, stages) for stages in ranks)
    return max(saving_bytes(plan, one) for one in sizes)


def saving_bytes(plan: Plan, sizes: RankSizes) -> int:
    """Host memory for checkpoints that are written while training goes on: a copy of weights and
    moments, and a file on its way to the disk, which holds one tensor at least."""
    if not plan.saves_behind:
        return 0
    trained = sizes.own_trained(plan.layout) * FP32
    file_bytes = max(CHECKPOINT_FILE_BYTES, sizes.own_largest(plan.layout) * FP32)
    return 3 * trained + _WRITER_COPIES * min(2 * trained, file_bytes)


def _kept(plan: Plan, facts: ModelFacts, kind: LayerKind) -> int:
    """Bytes that one layer keeps of one micro-batch, its mask left out."""
    c = plan.precision.compute_bytes
    per_token = activation_bytes_per_token(facts, kind, plan.layout, compute_bytes=c)
    per_token += context_bytes_per_token(facts, plan.layout, c, packed=plan.train.packing)
    return per_token * local_tokens(plan)


def _activations(plan: Plan, facts: ModelFacts, passes: int, stages: Sequence[StageSpec]) -> int:
    """What so many forward passes of a stage have kept."""
    layout, train, c = plan.layout, plan.train, plan.precision.compute_bytes
    tokens = local_tokens(plan)
    outside = tokens // layout.sequence_parts  # of the sequence, between the split regions
    inputs = facts.hidden_size * c * outside
    # the last norm's input and output; the head's input, its trained part and their gradient
    last = facts.hidden_size * ((FP32 + c) * outside + 3 * c * tokens)
    recomputed = recomputed_layers(plan, facts, stages)
    kept, one = 0, 0  # of those that are computed again, one is at a time
    for kind, count in layer_counts(facts, stages).items():
        masked = masked_bytes_per_token(
            facts, kind, layout, c, seq_len=train.seq_len, packed=train.packing
        )
        whole = _kept(plan, facts, kind) + tokens * masked
        again = recomputed[kind]
        if again:
            one = max(one, int(whole))
        few = inputs
        if train.checkpointing == "selective":
            few += tokens * selective_bytes_per_token(facts, kind, layout, c)
        kept += (count - again) * whole + again * few
    activations = passes * kept / len(stages) + one
    return int(activations) + (last if any(stage.is_last for stage in stages) else 0)


def _received_bytes(plan: Plan, facts: ModelFacts, stages: Sequence[StageSpec]) -> int:
    """Buffers for what neighbours send: of every micro-batch, for the whole step."""
    layout, train = plan.layout, plan.train
    tokens = local_tokens(plan) // layout.sequence_parts
    ways = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    one = tokens * facts.hidden_size * plan.precision.compute_bytes
    one += tally_bytes(plan, facts)
    return ways * train.num_micro_batches(layout) * one if layout.pp > 1 else 0


def tally_bytes(plan: Plan, facts: ModelFacts) -> int:
    """What a stage sends on of the routers' choices in a micro-batch, for the balance loss."""
    return (
        tally_rows(plan) * 2 * facts.num_experts * FP32 if facts.balance_weight is not None else 0
    )


def tally_rows(plan: Plan) -> int:
    """Rows of a micro-batch that are counted apart: packed ones may begin at any token."""
    return local_tokens(plan) * plan.layout.cp if plan.train.packing else plan.train.micro_batch


def _logits(plan: Plan, facts: ModelFacts, tokens: int) -> int:
    """One chunk of logits, which become their own gradient (in bf16 also a copy of the chunk), and
    the gradient of the head's weight: of several chunks, it is summed in fp32 and cast after."""
    vocab, c = -(-facts.vocab_size // plan.layout.tp), plan.precision.compute_bytes
    chunk = vocab * min(tokens, LOSS_CHUNK_TOKENS) * (FP32 if c == FP32 else FP32 + c)
    weight = vocab * facts.hidden_size
    if facts.adapters is not None:
        return chunk
    if c == FP32 or tokens <= LOSS_CHUNK_TOKENS:
        return chunk + weight * c
    return weight * FP32 + max(chunk, weight * c)


def _serving(plan: Plan, facts: ModelFacts) -> dict[str, int]:
    """Weights, keys and values of one whole context, and one pass at its end."""
    tp, c = plan.layout.tp, plan.precision.compute_bytes
    sizes = RankSizes.of(facts, plan.layout)
    context = plan.serve.context or facts.max_positions
    tokens = min(context, plan.serve.max_batch_tokens)
    width = max(facts.intermediate_size, facts.expert_width * facts.experts_per_token)
    layer = (2 * facts.hidden_size + 4 * width // tp + 2 * facts.q_size // tp) * c
    # a sequence in several runs of blocks is copied for attention, a latent one expanded
    read = facts.cache_size if facts.latent is None else facts.q_size + facts.attention_size
    masks = tokens * context * c * len({kind.window for kind in facts.layers})
    return {
        "weights": sizes.total_bytes(c),
        "gradients": 0,
        "optimizer": 0,
        "activations": layer * tokens + 2 * read * context * c // tp + masks + sizes.unpacked * c,
        "logits": 2 * facts.vocab_size * FP32,
        "buffers": 0,
        "saving": 0,
        "kv_cache": kv_bytes_per_token(plan, facts) * (plan.serve.kv_tokens or context)
        + facts.state_size * FP32,
    }


def kv_bytes_per_token(plan: Plan, facts: ModelFacts) -> int:
    """Bytes of a token's keys and values on one rank, of all layers together.

    A KV head that several ranks need is held by each; a latent is held whole by all.
    """
    held = 1 if facts.latent else min(plan.layout.tp, facts.num_kv_heads)
    return facts.num_layers_with_cache * (facts.cache_size // held) * plan.precision.compute_bytes
