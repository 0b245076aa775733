"""What one layer computes for a micro-batch: products, attention, bytes moved. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.config import Layout, Plan
from shardwise.models.facts import ModelFacts
from shardwise.models.layers import LayerKind
from shardwise.planner.activations import activation_bytes_per_token
from shardwise.planner.memory import local_tokens

TRAFFIC_PER_KEPT_BYTE = 10
"""Bytes that a layer's element-wise operations read and write, forward and backward, for each byte
it keeps. Counted by dispatch over the families: 8.4 to 11.5 in fp32, 10.8 to 15 in bf16."""
UNPACKING_BYTES = 20.5
"""read and written for each number of four bits that is made whole, besides the result: codes 0.5
and 2 + 2 as integers, the numbers in fp32 written, scaled (read and written), and read (16), by
models/nf4.py"""
FORWARD_SHARE = 1 / 3
"""of that traffic"""
HOST_OPS = {False: (36, 72), True: (16, 32)}
"""Operations that a layer starts forward and backward: counted in the eager code of the families
(norms of six, rotary embedding of ten); compiled, products, attention and one kernel between each
two. Whether compiled -> their number"""


class Product(NamedTuple):
    """Equal products of (m, k) and (k, n). Backward each has one for the gradient of its input and,
    if that is trained, one for that of its weight."""

    num: int
    m: float
    n: int
    k: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The forward pass of one layer on one rank, for one micro-batch."""

    products: tuple[Product, ...]
    attention_flops: float
    forward_bytes: float
    backward_bytes: float
    """read and written in element-wise operations"""
    host_ops: tuple[int, int]
    """operations started forward, backward"""


def layer_work(plan: Plan, facts: ModelFacts, kind: LayerKind) -> LayerWork:
    """What a layer of a kind does. Element-wise bytes are those of a tensor-parallel rank."""
    layout, tokens = plan.layout, local_tokens(plan)
    moved = _moved_bytes_per_token(plan, facts, kind) * tokens
    params = facts.params_on_rank(kind, tp=layout.tp, ep=layout.ep).values()
    packed = sum(param.num_packed for param in params)
    unpacking = packed * (UNPACKING_BYTES + plan.precision.compute_bytes)
    return LayerWork(
        products=tuple(_products(facts, kind, layout, tokens)),
        attention_flops=2 * tokens * _seen(plan, kind) * _attention_width(facts) / layout.tp,
        forward_bytes=FORWARD_SHARE * moved + unpacking,
        backward_bytes=(1 - FORWARD_SHARE) * moved + unpacking,
        host_ops=HOST_OPS[plan.train.compile],
    )


def head_product(plan: Plan, facts: ModelFacts) -> Product:
    """Of the head, on the rank's part of the vocabulary."""
    vocab = -(-facts.vocab_size // plan.layout.tp)
    return Product(
        num=1,
        m=local_tokens(plan),
        n=vocab,
        k=facts.hidden_size,
        trained=facts.adapters is None,
    )


def _products(facts: ModelFacts, kind: LayerKind, layout: Layout, tokens: int) -> list[Product]:
    found = []
    outside = tokens / layout.sequence_parts
    for param in facts.params_on_rank(kind, tp=layout.tp, ep=layout.ep).values():
        if param.cut == "experts":
            if len(param.shape) != 3:
                continue  # a bias of each expert
            here, rows, columns = param.shape
            # used evenly, each expert of a rank has its share of what the rank's part sends
            each = outside * facts.experts_per_token / here
            found.append(Product(here, each, rows, columns, param.trained))
        elif len(param.shape) == 2:
            whole = param.cut == "whole"
            rows, columns = param.shape
            found.append(Product(1, outside if whole else tokens, rows, columns, param.trained))
    trained = facts.adapters is None
    if facts.latent is not None and layout.cp > 1:  # each rank expands the latent of the others
        expanded = facts.num_heads * (facts.latent.nope_dim + facts.latent.v_dim) // layout.tp
        found.append(Product(1, tokens * (layout.cp - 1), expanded, facts.latent.kv_rank, trained))
    return found


def _attention_width(facts: ModelFacts) -> int:
    return facts.q_size + facts.attention_size


def _seen(plan: Plan, kind: LayerKind) -> float:
    """Tokens that a token attends to, on average (causal)."""
    length = plan.train.seq_len
    window = min(kind.window or length, length)
    return window - window * window / (2 * length)


def _moved_bytes_per_token(plan: Plan, facts: ModelFacts, kind: LayerKind) -> float:
    c = plan.precision.compute_bytes
    if plan.train.compile:
        return _fused_bytes_per_token(facts, kind, plan.layout, c)
    kept = activation_bytes_per_token(facts, kind, plan.layout, compute_bytes=c)
    return TRAFFIC_PER_KEPT_BYTE * kept


def _fused_bytes_per_token(facts: ModelFacts, kind: LayerKind, layout: Layout, c: int) -> float:
    """One kernel a chain of element-wise operations, each input read and each result written once.

    Forward: the first norm 2h, rotary embedding 2(q + k), a sum and the second norm 4h, the
    activation's product 3f, the last sum 3h. Backward: norms 4h each, the activation 5f, rotary
    embedding 2(q + k). Of each expert that a token chooses, also the way there and back, each way
    2h forward and 2h backward: sorted and put back; where tokens travel also sent and received,
    and sorted again by the experts of the rank.
    """
    h, sequence = facts.hidden_size, layout.sequence_parts
    widths = facts.intermediate_size / layout.tp
    travelled = 0.0
    if kind.has_experts:
        chosen = facts.experts_per_token
        widths = chosen * facts.expert_width / sequence + facts.shared_width / layout.tp
        travelled = (24 if layout.ep > 1 else 8) * chosen * h / sequence
    rotated = (facts.q_size + facts.k_size) / layout.tp
    return c * ((9 + 8) * h / sequence + 8 * widths + 4 * rotated + travelled)
