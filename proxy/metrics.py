"""What the proxy measures. Label values come from closed lists and from the command line."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backhaul.proxy.legs import Endpoint, Handover, RenderedBy
from backhaul.proxy.pool import Pool

PREFIX = "backhaul:proxy"

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Outcome(enum.StrEnum):
    """How a request ended."""

    OK = "ok"
    REJECTED = "rejected"  # the worker, or the proxy itself, found fault with the request (4xx)
    FAILED = "failed"  # the worker answered with an error of its own (5xx, also inside a stream)
    UNREACHABLE = "unreachable"  # no decode worker could be asked
    DEADLINE = "deadline"
    BROKEN = "broken"  # a stream that had begun broke off
    CLIENT_GONE = "client_gone"
    INTERNAL = "internal"  # a fault of the proxy


class LegFault(enum.StrEnum):
    """Why a leg was tried again on another worker, or given up."""

    CONNECT = "connect"  # the request did not reach the worker
    LOST = "lost"  # the connection broke before an answer
    STATUS = "status"  # the worker answered with an error that another may not have
    TIMEOUT = "timeout"


class Metrics:
    """Recorded by the exchange; one per proxy."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            f"{PREFIX}_requests",
            "Requests by how they ended.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.handovers = Counter(
            f"{PREFIX}_handovers",
            "Whether prefill's cache was handed over, or why decode computed the prompt.",
            ["result"],
            registry=registry,
        )
        self.renders = Counter(
            f"{PREFIX}_renders",
            "Hand-overs by whose render decode's prompt was: prefill's, or decode's own once more.",
            ["endpoint", "by"],
            registry=registry,
        )
        self.retries = Counter(
            f"{PREFIX}_retries",
            "Legs tried again on another worker.",
            ["leg", "reason"],
            registry=registry,
        )
        self.leg_seconds = Histogram(
            f"{PREFIX}_leg_seconds",
            "Seconds per leg that ended well: prefill to its answer, decode to its last byte.",
            ["leg"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            f"{PREFIX}_ttft_seconds",
            "Seconds from a request's arrival to its first token (streams) or its answer.",
            ["endpoint", "stream"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens",
            "Prompt tokens of hand-overs, by whether prefill had to compute them.",
            ["source"],
            registry=registry,
        )
        # Every series exists from the start, so that rates are right from the first event on.
        for endpoint in Endpoint:
            for outcome in Outcome:
                self.requests.labels(endpoint, outcome)
            for by in RenderedBy:
                self.renders.labels(endpoint, by)
        for result in Handover:
            self.handovers.labels(result)
        for leg in ("prefill", "decode"):
            for fault in LegFault:
                self.retries.labels(leg, fault)
        for source in ("cached", "computed"):
            self.prompt_tokens.labels(source)

    def watch(self, *pools: Pool) -> None:
        """Also report the workers of ``pools``."""
        self.registry.register(_Workers(pools))


class _Workers(Collector):
    """Reads the pools when it is scraped."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self._pools = pools

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "worker"]
        healthy = GaugeMetricFamily(
            f"{PREFIX}_worker_healthy", "1 where health checks succeed.", labels=labels
        )
        busy = GaugeMetricFamily(
            f"{PREFIX}_worker_in_flight", "Requests that a worker is answering.", labels=labels
        )
        for pool in self._pools:
            for worker in pool.workers:
                values: Any = [pool.role, worker.url]
                healthy.add_metric(values, float(worker.health.healthy))
                busy.add_metric(values, worker.in_flight)
        yield healthy
        yield busy
