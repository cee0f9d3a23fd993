"""What Prometheus scrapes at /metrics. Names are vLLM's with `stepinfer_` for `vllm:`, so dashboards carry over.

What the engine counts is read when somebody asks; only latencies and tokens are noted as they happen, in plain lists:
that costs less than a microsecond per event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stages.s09_server.messages import EngineStats

PREFIX = "stepinfer_"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)  # seconds
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Histogram:
    """Counts of seconds by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0  # the last: above all bounds

    def observe(self, seconds: float, times: int = 1) -> None:
        """The same value `times` times; a bound belongs to its bucket."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each counts all that are not above its bound."""
        totals, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            totals.append((bound, float(total)))
        return totals


class Metrics(Collector):
    """All of one server. `stats` tells what the engine counted; `model` is the label of every metric."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self.model, self.stats = model, stats
        self.first_token, self.between_tokens, self.end_to_end = Histogram(LONG), Histogram(SHORT), Histogram(LONG)
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: Counter[str] = Counter()  # answers by how they ended; "abort": the client left, or time was up
        self.responses: Counter[int] = Counter()  # by status
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Family]:
        """Everything, as it is now."""
        stats = self.stats()
        yield self.gauge("num_requests_running", "Answers in the running batch.", stats.running)
        yield self.gauge("num_requests_waiting", "Answers waiting for their turn.", stats.waiting)
        share = stats.kv_blocks_used / max(stats.kv_blocks, 1)
        yield self.gauge("kv_cache_usage_perc", "Share of the KV blocks that is in use; 1 is all.", share)
        counts = {
            "num_preemptions": ("Answers put back to wait.", stats.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache, once each.", stats.queried_tokens),
            "prefix_cache_hits": ("Prompt tokens found there.", stats.hit_tokens),
            "spec_decode_num_draft_tokens": ("Guessed tokens.", stats.drafted),
            "spec_decode_num_accepted_tokens": ("Guesses that stood.", stats.accepted),
            "engine_steps": ("Steps of the engine.", stats.steps),
            "engine_failed_steps": ("Steps that ended with an error.", stats.failed_steps),
            "prompt_tokens": ("Tokens of the prompts.", self.prompt_tokens),
            "generation_tokens": ("Tokens of the answers.", self.generation_tokens),
        }
        for name, (words, count) in counts.items():
            yield self.counter(name, words, {(): count})
        ended: dict[tuple[str, ...], int] = {(reason,): count for reason, count in self.finished.items()}
        yield self.counter("request_success", "Answers, by how they ended.", ended, "finished_reason")
        by_status: dict[tuple[str, ...], int] = {(str(status),): count for status, count in self.responses.items()}
        yield self.counter("http_responses", "Responses, by status.", by_status, "status")
        yield self.histogram("time_to_first_token_seconds", "From request to first token.", self.first_token)
        yield self.histogram("inter_token_latency_seconds", "From token to token.", self.between_tokens)
        yield self.histogram("e2e_request_latency_seconds", "From request to last token.", self.end_to_end)

    def gauge(self, name: str, words: str, value: float) -> Family:
        """One value that goes up and down."""
        family = GaugeMetricFamily(PREFIX + name, words, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def counter(self, name: str, words: str, values: dict[tuple[str, ...], int], *labels: str) -> Family:
        """Values that only grow; Prometheus sees `_total` after the name."""
        family = CounterMetricFamily(PREFIX + name, words, labels=["model_name", *labels])
        for label_values, value in values.items():
            family.add_metric([self.model, *label_values], value)
        return family

    def histogram(self, name: str, words: str, values: Histogram) -> Family:
        """A distribution."""
        family = HistogramMetricFamily(PREFIX + name, words, labels=["model_name"])
        family.add_metric([self.model], values.buckets(), values.sum)
        return family


class CountResponses:
    """ASGI middleware: every response is counted, whoever gave it."""

    def __init__(self, app: ASGIApp, responses: Counter[int]) -> None:
        self.app, self.responses = app, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the status as it goes by."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.responses[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counting if scope["type"] == "http" else send)
