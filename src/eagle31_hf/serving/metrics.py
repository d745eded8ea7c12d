"""What Prometheus is told: requests, tokens, acceptance, seconds, queue, memory. Read from the engine when asked."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """One server's figures.

    Attributes:
        first_token_s, gap_s: histograms of the wait for a text's first tokens, and between two pieces of it.
    """

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.first_token_s = Histogram(
            "eagle31_time_to_first_token_seconds", "From a request to its first tokens", buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self.gap_s = Histogram(
            "eagle31_time_between_pieces_seconds", "Between two pieces of one text", buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, totals, stats = self._engine, self._engine.totals, self._engine.batch.stats
        requests = CounterMetricFamily("eagle31_requests", "Texts that have ended, by how", labels=["finish"])
        for finish, count in list(totals.requests.items()):
            requests.add_metric([finish], count)
        yield requests
        tokens = CounterMetricFamily("eagle31_tokens", "Tokens of texts that have ended, by kind", labels=["kind"])
        for kind in ("prompt", "cached", "completion"):
            tokens.add_metric([kind], getattr(totals, f"{kind}_tokens"))
        yield tokens
        drafts = CounterMetricFamily("eagle31_draft_tokens", "Draft tokens verified, and accepted", labels=["kind"])
        drafts.add_metric(["drafted"], totals.drafted)
        drafts.add_metric(["accepted"], totals.accepted)
        yield drafts
        yield CounterMetricFamily("eagle31_rounds", "Verification passes", value=stats.passes)
        yield CounterMetricFamily(
            "eagle31_rounds_without_drafts", "Passes at rest: drafts would cost more", value=stats.skipped_rounds
        )  # fmt: skip
        yield CounterMetricFamily(
            "eagle31_text_rounds", "Passes of texts that have ended, each text's own", value=totals.text_rounds
        )  # fmt: skip
        seconds = CounterMetricFamily("eagle31_seconds", "Host seconds of the engine, by phase", labels=["phase"])
        for phase in ("prefill", "draft", "verify"):
            seconds.add_metric([phase], getattr(stats, f"{phase}_s"))
        yield seconds
        yield GaugeMetricFamily(
            "eagle31_acceptance_length", "Mean tokens a text gets per pass", value=stats.acceptance_length
        )
        yield GaugeMetricFamily("eagle31_texts_running", "Texts being read or written", value=engine.running)
        yield GaugeMetricFamily("eagle31_requests_waiting", "Requests in the queue", value=engine.waiting)
        yield GaugeMetricFamily("eagle31_cache_bytes", "Bytes of all caches", value=engine.batch.num_bytes)
        yield GaugeMetricFamily("eagle31_process_bytes", "Resident memory", value=psutil.Process().memory_info().rss)
