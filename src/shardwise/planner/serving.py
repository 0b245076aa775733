"""Seconds of an inference engine's passes, and what requests see of them. No torch.

Every pass of the engine takes one token of each running request, and a piece of the prompts that
have come in (continuous batching with chunked prefill: Yu et al., Orca, OSDI 2022; Agrawal et al.,
Sarathi-Serve, arXiv 2403.02310).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.models.layers import LayerKind
from shardwise.planner.formats import FORMATS
from shardwise.planner.kernels import SMALL_S, Engine
from shardwise.planner.network import Group, place
from shardwise.planner.serving_memory import CHUNK_TOKENS, Deployment, Load
from shardwise.planner.serving_work import BF16, LayerParts, messages, touched

_SAMPLING_KERNELS = 10
"""of a pass, outside the layers: embedding, last norm, logits, penalties, softmax, choice"""
_MOVED_WIDTHS = 9
"""times the hidden size: numbers that a layer's element-wise kernels read and write for a token of
a prompt (`planner.work` counts them)"""


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one pass through the whole model by where they go."""

    weights_s: float
    """products and experts: reading weights, or computing"""
    attention_s: float
    kernels_s: float
    """small kernels, and what each one takes to start"""
    collectives_s: float

    @property
    def total_s(self) -> float:
        """Of the pass."""
        return self.weights_s + self.attention_s + self.kernels_s + self.collectives_s

    def parts(self) -> dict[str, float]:
        """Name -> seconds."""
        return {
            "weights": self.weights_s,
            "attention": self.attention_s,
            "kernels": self.kernels_s,
            "collectives": self.collectives_s,
        }


@dataclass(frozen=True, kw_only=True)
class ServeTime:
    """What requests see of a server in a steady state, and what it gives."""

    load: Load
    num_devices: int
    running: int
    """requests that run at a time, on all replicas"""
    queued: int
    """those that wait for room in the cache"""
    ttft_s: float
    """from a request's arrival to its first token, waiting included"""
    queue_s: float
    """of it, waiting for room in the cache"""
    tpot_s: float
    """between two tokens of an answer"""
    decode: PassTime
    """of a pass in which nothing but answers grows"""
    prefill_s: float
    """that a prompt makes a pass longer, all its pieces together"""

    @property
    def request_s(self) -> float:
        """From arrival to the last token."""
        return self.ttft_s + (self.load.output_len - 1) * self.tpot_s

    @property
    def requests_per_s(self) -> float:
        """That the server finishes."""
        return self.running / (self.request_s - self.queue_s)

    @property
    def output_tokens_per_s(self) -> float:
        """Of the whole server."""
        return self.requests_per_s * self.load.output_len

    @property
    def output_tokens_per_s_per_device(self) -> float:
        """Of one device."""
        return self.output_tokens_per_s / self.num_devices


@dataclass(frozen=True, kw_only=True)
class Server(Deployment):
    """A model on an engine: how long its passes take with one layout."""

    engine: Engine

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.engine.speeds.node or self.layout.world_size

    @property
    def sharing(self) -> int:
        """Replicas of attention whose tokens meet in the same experts."""
        return max(1, self.layout.ep // self.layout.tp)

    def group(self, axis: str) -> Group:
        """The ranks of an axis: those that share experts are neighbours."""
        if axis != "ep":
            return place(self.layout, axis, self.node)
        ranks = self.layout.ep
        inside = ranks <= self.node or self.layout.world_size <= self.node
        return Group(size=ranks, per_node=ranks if inside else self.node)

    def time(self, load: Load) -> ServeTime | None:
        """What requests see; None: not one of them fits."""
        replicas, per_replica = self.layout.dp, -(-load.concurrency // self.layout.dp)
        most = self.room(load).requests(load.length)
        if most < 1:
            return None
        running = min(per_replica, most)
        return self._time(load, running, min(load.concurrency, running * replicas))

    def _time(self, load: Load, running: int, total: int) -> ServeTime:
        # a pipeline has a part of the requests in each of its stages
        batch = max(1.0, running / self.layout.pp)
        decode = self.pass_time(batch, load.mean_context, 0, 0)
        prefill_s = self.prefill_s(load, batch)
        # while a request answers, each of the others has its prompt read once
        tpot_s = decode.total_s + (running - 1) * prefill_s / load.output_len / self.layout.pp
        alone = prefill_s + 1.5 * decode.total_s  # half a pass is under way when it arrives
        busy = min(0.95, running * prefill_s / (alone + load.output_len * tpot_s))
        own = alone + prefill_s * busy / (2 * (1 - busy))  # M/D/1: prompts that came before
        rate = total / (own + (load.output_len - 1) * tpot_s)
        queue_s = (load.concurrency - total) / rate
        return ServeTime(
            load=load,
            num_devices=self.layout.world_size,
            running=total,
            queued=load.concurrency - total,
            ttft_s=own + queue_s,
            queue_s=queue_s,
            tpot_s=tpot_s,
            decode=decode,
            prefill_s=prefill_s,
        )

    def prefill_s(self, load: Load, batch: float) -> float:
        """Seconds that a prompt adds to passes in which others answer."""
        pieces = -(-load.prompt_len // CHUNK_TOKENS)
        tokens = load.prompt_len / pieces
        without = self.pass_time(batch, load.mean_context, 0, 0).total_s
        added = sum(
            self.pass_time(batch, load.mean_context, tokens, (piece + 0.5) * tokens).total_s
            - without
            for piece in range(pieces)
        )
        return max(0.0, added)

    def pass_time(self, batch: float, context: float, tokens: float, seen: float) -> PassTime:
        """One pass through all layers.

        Args:
            batch: requests that answer, on a replica.
            context: tokens that each of them has in the cache.
            tokens: of prompts.
            seen: tokens that each of these attends to, on average.
        """
        weights = attention = kernels = collectives = 0.0
        for kind, count in self.kinds.items():
            parts = self.parts(kind)
            products, starts = self._products(parts, batch + tokens)
            weights += count * products
            attention += count * self._attention(kind, parts, batch, context, tokens, seen)
            moved = _MOVED_WIDTHS * self.facts.hidden_size * BF16 * tokens
            small = parts.small_kernels * SMALL_S + self.engine.speeds.memory_s(moved)
            kernels += count * (starts + small)
            collectives += count * self._messages(kind, batch + tokens)
        head, gathered = self._head(batch + (1 if tokens else 0))
        send = 0.0
        if self.layout.pp > 1:
            size = (batch + tokens) * self.facts.hidden_size * BF16
            one = self.engine.collective_s("send", size, self.group("pp"))
            send = (self.layout.pp - 1) * one
        return PassTime(
            weights_s=weights + head,
            attention_s=attention,
            kernels_s=kernels + _SAMPLING_KERNELS * SMALL_S,
            collectives_s=collectives + gathered + send,
        )

    def _products(self, parts: LayerParts, tokens: float) -> tuple[float, float]:
        """Seconds of products and experts, and of them those that their starts take."""
        seconds = starts = 0.0
        for m in parts.matrices:
            one = m.columns * m.fmt.input_bytes + BF16 * m.rows
            moved = m.values * m.fmt.num_bytes + tokens * one
            start = self.engine.seconds("product", m.fmt, 0, 0)
            seconds += self.engine.seconds("product", m.fmt, moved, 2 * tokens * m.values) - start
            starts += start
        if parts.num_experts:
            facts, fmt = self.facts, parts.expert_format
            everyone = tokens * self.sharing
            share = facts.experts_per_token / facts.num_experts
            read = touched(parts.num_experts, share, everyone) * parts.expert_values * fmt.num_bytes
            chosen = everyone * share * parts.num_experts
            h, width = facts.hidden_size, parts.expert_values / (3 * facts.hidden_size)
            passed = chosen * (h * (6 + 2 * fmt.input_bytes) + width * (8 + 2 * fmt.input_bytes))
            start = self.engine.seconds("experts", fmt, 0, 0)
            flops = 2 * chosen * parts.expert_values
            seconds += self.engine.seconds("experts", fmt, read + passed, flops) - start
            starts += start
        return seconds, starts

    def _attention(
        self,
        kind: LayerKind,
        parts: LayerParts,
        batch: float,
        context: float,
        tokens: float,
        seen: float,
    ) -> float:
        """Answers over their cache, and prompts over themselves."""
        facts, tp, bf16 = self.facts, self.layout.tp, FORMATS["bf16"]
        if kind.is_linear:  # a state is read and written; a prompt is a few products a token
            flops = 4 * tokens * parts.state_bytes / 4
            moved = 2 * batch * parts.state_bytes
            return self.engine.seconds("cached attention", bf16, moved, flops)
        here = min(context, kind.window or context)
        heads = max(1.0, facts.num_heads / tp)
        moved = batch * here * parts.cache_bytes
        if facts.latent is not None:
            width = 2 * facts.latent.kv_rank + facts.latent.rope_dim
            kernel = "latent attention"
        else:
            width, kernel = 2 * facts.head_dim, "cached attention"
        seconds = 0.0
        if batch:
            seconds += self.engine.seconds(kernel, bf16, moved, 2 * batch * here * heads * width)
        if tokens:
            here = min(seen, kind.window or seen)
            flops = 2 * tokens * here * (facts.q_size + facts.attention_size) / tp
            seconds += self.engine.seconds("prompt attention", bf16, 0, flops)
        return seconds

    def _messages(self, kind: LayerKind, tokens: float) -> float:
        """Collectives of a layer."""
        seconds = 0.0
        for message in messages(self.facts, kind, self.layout, self.fmt):
            group = self.group(message.axis)
            size = tokens * message.values * message.value_bytes
            seconds += self.engine.collective_s(message.op, size, group)
        return seconds

    def _head(self, batch: float) -> tuple[float, float]:
        """The product that gives logits, and gathering them."""
        facts, tp, bf16 = self.facts, self.layout.tp, FORMATS["bf16"]
        values = facts.vocab_size * facts.hidden_size / tp
        moved = values * BF16 + batch * facts.vocab_size / tp * 8
        seconds = self.engine.seconds("product", bf16, moved, 2 * batch * values)
        if tp == 1:
            return seconds, 0.0
        size = batch * facts.vocab_size * BF16
        return seconds, self.engine.collective_s("all_gather", size, self.group("tp"))
