"""Every metric by name, through the OpenTelemetry SDK to GET /metrics. The only module that imports opentelemetry.

Counters and gauges are observed when somebody asks. The SDK has no observed histogram, so the reader adds ours, as data
points in the SDK's own form, to what it collects.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
)
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from cache.store import Store
from gateway.accounting import Accounting
from gateway.metrics import Buckets, Labels, RequestCounts
from plugins.interfaces import Provider, UsageRecord

log = logging.getLogger("tidegate")
MAX_PROVIDER_GAUGES = 200


class Telemetry:
    """The metrics of one gateway process, with a registry of their own. `models` are the names that labels may show."""

    def __init__(self, models: Iterable[str]) -> None:
        self.counts = RequestCounts(models)
        self._refused: Counter[Labels] = Counter()
        self._registry = CollectorRegistry()
        reader = _Reader(self._registry, self.counts)
        self._provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        self._meter = self._provider.get_meter("tidegate")
        self._providers: Mapping[str, Provider] = {}
        self._provider_gauges: dict[str, list[Observation]] = {}
        self._count("tidegate_requests", "Finished requests", self.counts.requests)
        self._count(
            "tidegate_tokens",
            "Tokens; cached ones are among prompt, reasoning among completion",
            self.counts.tokens,
        )

    def set_models(self, models: Iterable[str]) -> None:
        """After a reload."""
        self.counts.models = frozenset(models)

    def record(self, row: UsageRecord) -> None:
        """Count a finished request."""
        self.counts.add(row)

    def refuse(self, dialect: str, status: int) -> None:
        """Count a request that had no usage row: its key or its body was refused."""
        self._refused[(("dialect", dialect), ("status", str(status)))] += 1

    def observe(
        self,
        providers: Mapping[str, Provider],
        store: Store,
        accounting: Accounting,
        open_breakers: Callable[[], list[str]],
    ) -> None:
        """Show the state of these parts too. Called once, while the gateway is built."""
        self._providers = providers
        self._count(
            "tidegate_requests_refused",
            "Requests refused for their key or body, before any usage row",
            lambda: self._refused,
        )
        self._meter.create_observable_gauge(
            "tidegate_target_open",
            [lambda options: [Observation(1, {"target": name}) for name in open_breakers()]],
            description="1 while a target is passed over because of its failures",
        )
        self._gauge(
            "tidegate_requests_in_flight",
            "Requests under way",
            lambda: accounting.requests_in_flight,
        )
        self._gauge("tidegate_store_up", "1 while the store answers", lambda: int(store.healthy))
        self._count(
            "tidegate_usage_rows_dropped",
            "Usage rows that the store will never have",
            lambda: {(): accounting.rows_dropped},
        )
        self._count(
            "tidegate_observer_records_dropped",
            "Records that slow observers have missed",
            lambda: {(): accounting.observer_records_dropped},
        )

    def render(self) -> tuple[bytes, str]:
        """The answer of GET /metrics: body and content type."""
        self._ask_providers()
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _count(self, name: str, description: str, read: Callable[[], Mapping[Labels, int]]) -> None:
        """A counter; the exporter adds `_total` to its name."""

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, dict(labels)) for labels, value in read().items()]

        self._meter.create_observable_counter(name, [observe], description=description)

    def _gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        self._meter.create_observable_gauge(
            name, [lambda options: [Observation(read())]], description=description
        )

    def _ask_providers(self) -> None:
        """Read every provider's gauges. A name seen for the first time becomes an instrument."""
        for observations in self._provider_gauges.values():
            observations.clear()
        for provider_name, provider in self._providers.items():
            for gauge, value in _gauges_of(provider):
                name = f"tidegate_provider_{_NOT_IN_NAMES.sub('_', gauge)}"
                if name not in self._provider_gauges:
                    if len(self._provider_gauges) >= MAX_PROVIDER_GAUGES:
                        continue
                    self._add_provider_gauge(name)
                self._provider_gauges[name].append(Observation(value, {"provider": provider_name}))

    def _add_provider_gauge(self, name: str) -> None:
        observations: list[Observation] = []
        self._provider_gauges[name] = observations
        self._meter.create_observable_gauge(
            name, [lambda options: observations], description="As the provider tells it"
        )


_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def _gauges_of(provider: Provider) -> list[tuple[str, float]]:
    """`ready` and what the provider has to tell. One that fails here must not hide the others."""
    try:
        return [("ready", float(provider.ready())), *provider.stats().items()]
    except Exception as exc:
        log.warning("provider %s: stats failed: %s: %s", provider.name, type(exc).__name__, exc)
        return []


class _Reader(PrometheusMetricReader):
    """Adds the histograms to whatever the SDK collects for the Prometheus exporter."""

    def __init__(self, registry: CollectorRegistry, counts: RequestCounts) -> None:
        super().__init__(disable_target_info=True, scope_info_enabled=False, registry=registry)
        self._counts = counts
        self._start_ns = time.time_ns()

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> None:
        scope = metrics_data.resource_metrics[0].scope_metrics[0]
        ours = [
            self._histogram(
                "tidegate_request_duration_seconds",
                "From the last byte of the request to the end of the answer",
                self._counts.durations_s(),
            ),
            self._histogram(
                "tidegate_ttft_seconds",
                "From the last byte of the request to the first content",
                self._counts.ttfts_s(),
            ),
        ]
        scope = replace(scope, metrics=[*scope.metrics, *ours])
        resource = replace(metrics_data.resource_metrics[0], scope_metrics=[scope])
        cast(Any, super())._receive_metrics(MetricsData([resource]), timeout_millis, **kwargs)

    def _histogram(
        self, name: str, description: str, histograms: Mapping[Labels, Buckets]
    ) -> Metric:
        now_ns = time.time_ns()
        points = [
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._start_ns,
                time_unix_nano=now_ns,
                count=sum(buckets.counts),
                sum=buckets.sum,
                bucket_counts=buckets.counts,
                explicit_bounds=buckets.bounds,
                min=0.0,
                max=0.0,
            )
            for labels, buckets in histograms.items()
        ]
        return Metric(name, description, "", Histogram(points, AggregationTemporality.CUMULATIVE))
