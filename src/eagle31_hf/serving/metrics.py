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
        engine, totals, stats = self._engine, self._engine.totals, self._engine.batch.stats
        yield _counts("requests", "Texts that have ended, by how", "finish", engine.requests)
        tokens = {kind: totals[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")}
        yield _counts("tokens", "Tokens of texts that have ended, by kind", "kind", tokens)
        drafts = {kind: totals[kind] for kind in ("drafted", "accepted")}
        yield _counts("draft_tokens", "Draft tokens verified, and accepted", "kind", drafts)
        for name, what, value in (
            ("rounds", "Verification passes", stats.passes),
            ("rounds_without_drafts", "Passes at rest: drafts would cost more", stats.skipped_rounds),
            ("text_rounds", "Passes of texts that have ended, each text's own", totals["rounds"]),
        ):
            yield CounterMetricFamily(f"eagle31_{name}", what, value=value)
        seconds = {phase: getattr(stats, f"{phase}_s") for phase in ("prefill", "draft", "verify")}
        yield _counts("seconds", "Host seconds of the engine, by phase", "phase", seconds)
        for name, what, reading in (
            ("acceptance_length", "Mean tokens a text gets per pass", stats.acceptance_length),
            ("texts_running", "Texts being read or written", engine.running),
            ("requests_waiting", "Requests in the queue", engine.waiting),
            ("cache_bytes", "Bytes of all caches", engine.batch.num_bytes),
            ("process_bytes", "Resident memory", psutil.Process().memory_info().rss),
        ):
            yield GaugeMetricFamily(f"eagle31_{name}", what, value=reading)


def _counts(name: str, what: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = CounterMetricFamily(f"eagle31_{name}", what, labels=[label])
    for kind, value in list(values.items()):
        family.add_metric([kind], value)
    return family
