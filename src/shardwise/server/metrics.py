"""What the server tells Prometheus, under names near vLLM's, so that dashboards need one change."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardwise.server.engine import Engine
from shardwise.server.messages import Event
from shardwise.server.reply import Reply

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _OfEngine(Collector):
    """The engine's own counts, read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load
        gauges = {
            "num_requests_running": ("requests with room in the cache", load.running),
            "num_requests_waiting": ("requests without", load.waiting),
            "kv_cache_usage_perc": ("share of the cache in use, 0 to 1", load.cache_used),
        }
        counters = {
            "num_preemptions": ("times that a request gave its room up", load.preempted),
            "prompt_tokens": ("tokens of prompts", load.prompt_tokens),
            "prefix_cache_queries": ("tokens looked for in the cache", load.prompt_tokens),
            "prefix_cache_hits": ("of those, tokens that it had", load.cached_tokens),
            "generation_tokens": ("tokens of answers", load.generated_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"shardwise:{name}", text, value=value)
        for name, (text, count) in counters.items():
            yield CounterMetricFamily(f"shardwise:{name}", text, value=count)


class Metrics:
    """The counts and times of one server."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_OfEngine(engine))

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"shardwise:{name}", text, registry=registry, buckets=_SECONDS)

        self._first = seconds("time_to_first_token_seconds", "from the call to its first token")
        self._next = seconds("inter_token_latency_seconds", "from one token to the next")
        self._whole = seconds("e2e_request_latency_seconds", "from the call to its last token")
        self._ended = Counter(
            "shardwise:request_success", "answers", ["finished_reason"], registry=registry
        )

    def watch(self, reply: Reply) -> None:
        """Count what happens to a reply."""

        def ended(event: Event) -> None:
            self._whole.observe(reply.seconds)
            self._ended.labels(event.finish or "").inc()

        def token(waited: float, is_first: bool) -> None:
            (self._first if is_first else self._next).observe(waited)

        reply.on_end, reply.on_token = ended, token

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)
