"""What Prometheus is told: requests, tokens, acceptance, seconds, queue, memory. Read from the engine when asked."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics(Collector):
    """One server's figures.

    Attributes:
        first_token_s, gap_s: histograms of the wait for a text's first tokens, and between two pieces of it.
    """

    def __init__(self, engine: Engine):
        self._engine, self._registry = engine, CollectorRegistry()
        self._registry.register(self)
        self.first_token_s = self._histogram("time_to_first_token", "From a request to its first tokens")
        self.gap_s = self._histogram("time_between_pieces", "Between two pieces of one text")

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"eagle31_{name}_seconds", what, buckets=SECONDS, registry=self._registry)

    def render(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        scheduler, batch = self._engine.scheduler, self._engine.batch
        totals, stats = scheduler.totals, batch.stats
        drafts = {kind: totals[kind] for kind in ("drafted", "accepted")}
        tokens = {kind: totals[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")}
        for name, what, label, values in (
            ("requests", "Texts that have ended, by how", "finish", dict(scheduler.requests)),
            ("tokens", "Tokens of texts that have ended, by kind", "kind", tokens),
            ("draft_tokens", "Draft tokens verified, and accepted", "kind", drafts),
            ("seconds", "Host seconds of the engine, by phase", "phase", batch.seconds),
        ):
            family = CounterMetricFamily(f"eagle31_{name}", what, labels=[label])
            for kind, count in values.items():
                family.add_metric([kind], count)
            yield family
        for kind_of, name, what, value in (
            (CounterMetricFamily, "rounds", "Verification passes", stats.passes),
            (CounterMetricFamily, "rounds_without_drafts", "Passes at rest: drafts cost more", stats.skipped_rounds),
            (CounterMetricFamily, "text_rounds", "Passes of texts that have ended, each text's own", totals["rounds"]),
            (GaugeMetricFamily, "acceptance_length", "Mean tokens a text gets per pass", stats.acceptance_length),
            (GaugeMetricFamily, "texts_running", "Texts being read or written", scheduler.running),
            (GaugeMetricFamily, "requests_waiting", "Requests in the queue", len(scheduler.waiting)),
            (GaugeMetricFamily, "cache_bytes", "Bytes of all caches", batch.num_bytes),
            (GaugeMetricFamily, "process_bytes", "Resident memory", psutil.Process().memory_info().rss),
        ):
            yield kind_of(f"eagle31_{name}", what, value=value)
