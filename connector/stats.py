"""What the connector counts, and its way through vLLM's stats to Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

COUNTERS: dict[str, tuple[str, str | None]] = {
    "lookups": ("Lookups by result: hit, miss, or why the store could not be asked.", "result"),
    "loads": ("Loads that filled a request's cache, by the end that was selected.", "kind"),
    "loaded_tokens": ("Prompt tokens that loads spared, by the end that was selected.", "kind"),
    "load_failures": ("Loads that failed and were recomputed, by reason.", "reason"),
    "load_bytes": ("Bytes loaded from the store, all ranks.", None),
    "publications": ("Checkpoints published, by kind.", "kind"),
    "publication_failures": ("Checkpoints that were not published, by reason.", "reason"),
    "publish_bytes": ("Bytes sent to the store, all ranks.", None),
    "hints_rejected": ("Per-request hints that were ignored because malformed.", "field"),
    "forced_chunk_ends": ("Prefill chunks that were ended early for a checkpoint.", "kind"),
}
"""Name without prefix and suffix -> (help, label or None). Exposed as backhaul:<name>_total."""

GAUGES: dict[str, str] = {
    "held_blocks": "KV blocks on which the connector holds a reference.",
    "pins": "Checkpoint positions pinned for running requests.",
    "open_leases": "Store leases this engine holds.",
    "open_jobs": "Loads and publications that some rank has not settled.",
    "tracked_requests": "Requests with connector state.",
}

HISTOGRAMS: dict[str, str] = {
    "load_seconds": "Time of one load, from dispatch to the last rank.",
    "publish_seconds": "Time of one publication job, from dispatch to the last rank.",
    "finish_to_consumable_seconds": "Time from a request's end to its D_end being consumable.",
}


@dataclass
class BackhaulStats(KVConnectorStats):
    """Increments since the last report, current gauges, and observations; plain data for msgpack.

    ``data``: ``{"counters": {"name|label": n}, "gauges": {name: n}, "seconds": {name: [s]}}``.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "gauges": {}, "seconds": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another report to this one; its gauges are the newer ones."""
        counters = Tally(self.data["counters"])
        counters.update(other.data["counters"])
        self.data["counters"] = dict(counters)
        self.data["gauges"] = {**self.data["gauges"], **other.data["gauges"]}
        for name, values in other.data["seconds"].items():
            self.data["seconds"].setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number per name, for vLLM's log line."""
        reduced: dict[str, int | float] = {}
        for key, value in self.data["counters"].items():
            reduced[key.rstrip("|").replace("|", ".")] = value
        for name, values in self.data["seconds"].items():
            if values:
                reduced[f"mean {name}"] = round(sum(values) / len(values), 4)
        return reduced

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())


class StatsRecorder:
    """Collects on the scheduler's thread between two reports."""

    def __init__(self) -> None:
        self._counters: Tally[str] = Tally()
        self._seconds: dict[str, list[float]] = {}
        self._gauges: dict[str, int] = {}

    def count(self, name: str, label: str = "", n: int = 1) -> None:
        """Add to a counter of ``COUNTERS``."""
        self._counters[f"{name}|{label}"] += n

    def observe(self, name: str, seconds: float) -> None:
        """Add one observation to a histogram of ``HISTOGRAMS``."""
        self._seconds.setdefault(name, []).append(seconds)

    def report(self, gauges: dict[str, int]) -> BackhaulStats | None:
        """What changed since the last report; None where nothing did."""
        changed = {k: v for k, v in gauges.items() if self._gauges.get(k) != v}
        if not (self._counters or self._seconds or changed):
            return None
        self._gauges.update(changed)
        stats = BackhaulStats(
            data={"counters": dict(self._counters), "gauges": changed, "seconds": self._seconds}
        )
        self._counters, self._seconds = Tally(), {}
        return stats


class BackhaulPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics above with vLLM's labels and feeds them from ``BackhaulStats.data``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = (metric_types[t] for t in (Counter, Gauge, Histogram))
        self._counters = {
            name: counter(
                name=f"backhaul:{name}",
                documentation=text,
                labelnames=[*labelnames, label] if label else labelnames,
            )
            for name, (text, label) in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(name=f"backhaul:{name}", documentation=text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: histogram(
                name=f"backhaul:{name}",
                documentation=text,
                labelnames=labelnames,
                buckets=_SECONDS_BUCKETS,
            )
            for name, text in HISTOGRAMS.items()
        }
        # Present from the start, so that "never happened" reads as 0 and not as absent.
        for values in per_engine_labelvalues.values():
            for name, (_, label) in COUNTERS.items():
                if label is None:
                    self._counters[name].labels(*values)
            for metric in (*self._gauges.values(), *self._histograms.values()):
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Enter one report."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, n in transfer_stats_data.get("counters", {}).items():
            name, _, label = key.partition("|")
            labels = [*values, label] if COUNTERS[name][1] else values
            self._counters[name].labels(*labels).inc(n)
        for name, n in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*values).set(n)
        for name, seconds in transfer_stats_data.get("seconds", {}).items():
            for s in seconds:
                self._histograms[name].labels(*values).observe(s)
