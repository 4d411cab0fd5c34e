"""What the daemon measures: occupancy and counters of the index, seconds per call.

The names stand in ``backhaul.protocols.metrics``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backhaul.protocols.metrics import (
    STORE,
    STORE_PREFIX,
    MetricType,
    known_label_values,
    store_counters,
)
from backhaul.transfer.base import StoreStats

_COUNTERS = store_counters()


class StatsCollector(Collector):
    """Reads the index when it is scraped."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Names come from the first scrape; registering must not run one."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        stats = self._stats()
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, metric in STORE.items():
            kind = {
                MetricType.GAUGE: GaugeMetricFamily,
                MetricType.COUNTER: CounterMetricFamily,
            }.get(metric.type)
            if kind is not None:
                labels = [label.name for label in metric.labels]
                families[name] = kind(f"{STORE_PREFIX}{name}", metric.help, labels=labels)
        for name, metric in STORE.items():
            if metric.type is MetricType.GAUGE and not metric.labels:
                families[name].add_metric([], getattr(stats, name))
        for key, value in stats.gauges.items():
            name, _, label = key.partition("|")
            families[name].add_metric([label], value)
        for key, (name, values) in _COUNTERS.items():
            families[name].add_metric(values, stats.counters.get(key, 0))
        yield from families.values()


class EvictionTimer:
    """Observes the life of evicted checkpoints."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = _histogram("evicted_age_seconds", registry)

    def __call__(self, kind: str, age_s: float) -> None:
        """One checkpoint of that primary kind was evicted."""
        self._seconds.labels(kind).observe(age_s)


class RpcTimer(grpc.aio.ServerInterceptor):  # type: ignore[type-arg, unused-ignore]
    """Measures every unary call of our own services."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = _histogram("rpc_seconds", registry)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        # Anything may stand there; of our services there is a handler for real methods only.
        service, _, method = handler_call_details.method.removeprefix("/").rpartition("/")
        if handler is None or handler.unary_unary is None or not service.startswith("backhaul."):
            return handler
        seconds = self._seconds.labels(method)

        async def timed(request: Any, context: Any) -> Any:
            started = time.perf_counter()
            try:
                return await handler.unary_unary(request, context)
            finally:
                seconds.observe(time.perf_counter() - started)

        return grpc.unary_unary_rpc_method_handler(
            timed, handler.request_deserializer, handler.response_serializer
        )


def _histogram(name: str, registry: CollectorRegistry) -> Histogram:
    metric = STORE[name]
    made = Histogram(
        f"{STORE_PREFIX}{name}",
        metric.help,
        [label.name for label in metric.labels],
        buckets=metric.buckets,
        registry=registry,
    )
    for values in known_label_values(metric):
        made.labels(*values)
    return made
