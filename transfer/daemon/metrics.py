"""What the daemon measures: occupancy and counters of the index, seconds per call."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backhaul.transfer.base import StoreStats

PREFIX = "backhaul:store"

_GAUGES = {
    "capacity_bytes": "Size of the pool.",
    "used_bytes": "Bytes of the pool that are allocated.",
    "objects": "Objects, reserved ones included.",
    "checkpoints": "Visible checkpoints.",
    "leases": "Valid leases.",
    "publications": "Open publications.",
    "domains": "Known cache domains.",
}

_LABELLED = {
    "evictions_": ("evictions", "reason", "Checkpoints evicted."),
    "unconsumable_": ("unconsumable", "reason", "Candidates that lookups could not offer."),
}
"""Prefix of a counter -> (metric, label): what follows the prefix is the label's value."""

_RPC_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
"""A call takes tenths of a millisecond; the long end is for lookups that wait."""


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
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=getattr(stats, name))
        families: dict[str, CounterMetricFamily] = {}
        for name, value in stats.counters.items():
            prefix = next((prefix for prefix in _LABELLED if name.startswith(prefix)), None)
            if prefix is None:
                yield CounterMetricFamily(f"{PREFIX}_{name}", f"Counter {name}.", value=value)
                continue
            metric, label, text = _LABELLED[prefix]
            family = families.setdefault(
                metric, CounterMetricFamily(f"{PREFIX}_{metric}", text, labels=[label])
            )
            family.add_metric([name.removeprefix(prefix)], value)
        yield from families.values()


class RpcTimer(grpc.aio.ServerInterceptor):  # type: ignore[type-arg, unused-ignore]
    """Measures every unary call of our own services."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            f"{PREFIX}_rpc_seconds",
            "Seconds per call, waiting included.",
            ["method"],
            buckets=_RPC_BUCKETS_S,
            registry=registry,
        )

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        _, service, method = handler_call_details.method.split("/")
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
