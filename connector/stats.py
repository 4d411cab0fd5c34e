"""What the connector counts, and its way through vLLM's stats to Prometheus.

Only the scheduler half counts: what ranks have to say reaches it in their reports, once per job,
so that the number of workers never multiplies a count. The names stand in
``backhaul.protocols.metrics``.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from backhaul.protocols.metrics import (
    ENGINE,
    ENGINE_PREFIX,
    Metric,
    MetricType,
    known_label_values,
)

_SEPARATOR = "|"


def series(name: str, *labels: str) -> str:
    """The key of one metric's one combination of label values: ``name|value|...``."""
    return _SEPARATOR.join((name, *labels))


@dataclass
class BackhaulStats(KVConnectorStats):
    """Increments since the last report, gauges, and observations; plain data for msgpack.

    ``data``: ``{"counters": {series: n}, "gauges": {series: n}, "observations": {series: [x]}}``.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "gauges": {}, "observations": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another report to this one; its gauges are the newer ones."""
        counters = Tally(self.data["counters"])
        counters.update(other.data["counters"])
        self.data["counters"] = dict(counters)
        self.data["gauges"] = {**self.data["gauges"], **other.data["gauges"]}
        for key, values in other.data["observations"].items():
            # A new list: the other report stays as it is.
            self.data["observations"][key] = [*self.data["observations"].get(key, ()), *values]
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number per series, for vLLM's log line."""
        reduced: dict[str, int | float] = {}
        for key, value in self.data["counters"].items():
            reduced[key.replace(_SEPARATOR, ".")] = value
        for key, values in self.data["observations"].items():
            if values:
                name = key.replace(_SEPARATOR, ".")
                reduced[f"mean {name}"] = round(sum(values) / len(values), 4)
        return reduced

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())


class StatsRecorder:
    """Collects on the scheduler's thread between two reports."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, float] = defaultdict(int)
        self._observations: dict[str, list[float]] = {}
        self._gauges: dict[str, int] = {}

    def count(self, name: str, *labels: str, n: float = 1) -> None:
        """Add to a counter; its labels in the order of the table."""
        if n:
            self._counters[series(name, *labels)] += n

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self._observations.setdefault(series(name, *labels), []).append(value)

    def report(self, gauges: dict[str, int]) -> BackhaulStats | None:
        """What happened since the last report, and every gauge; None where nothing did or changed.

        A gauge that did not change is reported all the same: of several API servers each enters
        the reports that it is sent, and one that is late would otherwise leave an old value."""
        if not (self._counters or self._observations or gauges != self._gauges):
            return None
        self._gauges = dict(gauges)
        stats = BackhaulStats(
            data={
                "counters": dict(self._counters),
                "gauges": dict(gauges),
                "observations": self._observations,
            }
        )
        self._counters, self._observations = defaultdict(int), {}
        return stats


class TransportRanks:
    """How many ranks' connections have each transport; one that they had before stays at 0."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[str, ...]] = {}
        self._gauges: dict[str, int] = {}

    def update(self, by_rank: Mapping[int, tuple[str, ...]]) -> None:
        """Take ranks' news."""
        if not by_rank:
            return
        self._by_rank.update(by_rank)
        now = Tally(name for names in self._by_rank.values() for name in names)
        known = [series("transport_ranks", name) for name in now]
        self._gauges = dict.fromkeys([*self._gauges, *known], 0)
        self._gauges.update(zip(known, now.values(), strict=True))

    def gauges(self) -> dict[str, int]:
        """By series."""
        return self._gauges


class BackhaulPromMetrics(KVConnectorPromMetrics):
    """Registers the engine's metrics with vLLM's labels; ``BackhaulStats.data`` feeds them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        _unregister()
        for name, metric in ENGINE.items():
            self._metrics[name] = _make(name, metric, metric_types, labelnames)
        _registered.extend(self._metrics.values())
        # Present from the start, so that "never happened" reads as 0 and not as absent.
        for values in per_engine_labelvalues.values():
            for name, metric in ENGINE.items():
                for known in known_label_values(metric):
                    child = self._child(name, values, known)
                    if metric.type is MetricType.GAUGE:
                        # Of several API servers' gauges only those that were set are shown.
                        child.set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Enter one report. A series that this version does not know is left out."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, n in transfer_stats_data.get("counters", {}).items():
            for child in self._children(key, values):
                child.inc(n)
        for key, n in transfer_stats_data.get("gauges", {}).items():
            for child in self._children(key, values):
                child.set(n)
        for key, observations in transfer_stats_data.get("observations", {}).items():
            for child in self._children(key, values):
                for value in observations:
                    child.observe(value)

    def _children(self, key: str, values: list[object]) -> Iterator[Any]:
        name, *labels = key.split(_SEPARATOR)
        if name in ENGINE and len(labels) == len(ENGINE[name].labels):
            yield self._child(name, values, tuple(labels))

    def _child(self, name: str, values: list[object], labels: tuple[str, ...]) -> Any:
        return self._metrics[name].labels(*values, *labels)


_registered: list[Any] = []


def _unregister() -> None:
    """Take an earlier engine's metrics out of the process's registry, which refuses a name's second
    use: vLLM does so with its own ones, those that begin with "vllm:"."""
    for collector in _registered:
        with suppress(KeyError):  # another registry's
            REGISTRY.unregister(collector)
    _registered.clear()


def _make(name: str, metric: Metric, types: dict[Any, Any], labelnames: list[str]) -> Any:
    common = {
        "name": f"{ENGINE_PREFIX}{name}",
        "documentation": metric.help,
        "labelnames": [*labelnames, *(label.name for label in metric.labels)],
    }
    if metric.type is MetricType.COUNTER:
        return types[Counter](**common)
    if metric.type is MetricType.GAUGE:
        # With several API server processes each would otherwise be shown by its process id.
        return types[Gauge](**common, multiprocess_mode="mostrecent")
    return types[Histogram](**common, buckets=metric.buckets)
