"""Counts reach Prometheus: every name is known, reports add up, gauges are the latest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.v1.metrics.stats import SchedulerStats

from backhaul.connector.connector import BackhaulConnector
from backhaul.connector.plugin import register
from backhaul.connector.stats import (
    BackhaulPromMetrics,
    BackhaulStats,
    StatsRecorder,
    series,
)
from backhaul.protocols.metrics import ENGINE, ENGINE_PREFIX, MetricType, known_label_values

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}


class Config:
    """As much of ``VllmConfig`` as metrics look at."""

    def __init__(self, transfer: KVTransferConfig | None = None) -> None:
        self.kv_transfer_config = transfer


def metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    return {
        kind: (lambda cls: lambda **kw: cls(**kw, registry=registry))(kind)
        for kind in (Counter, Gauge, Histogram)
    }


def metrics(registry: CollectorRegistry) -> BackhaulPromMetrics:
    return BackhaulConnector.build_prom_metrics(Config(), metric_types(registry), LABELS, ENGINES)  # type: ignore[arg-type]


def samples(registry: CollectorRegistry) -> Iterator[Sample]:
    """What a scraper reads, `_created` lines left out."""
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    wanted = {"model_name": "m", "engine": "0", **labels}
    (found,) = [s for s in samples(registry) if s.name == name and s.labels == wanted]
    return found.value


def everything(recorder: StatsRecorder) -> dict[str, int]:
    """Count every series twice and observe it once; the gauges to report."""
    gauges = {}
    for name, metric in ENGINE.items():
        for labels in known_label_values(metric) or [("x",) * len(metric.labels)]:
            if metric.type is MetricType.COUNTER:
                recorder.count(name, *labels, n=2)
            elif metric.type is MetricType.HISTOGRAM:
                recorder.observe(name, 0.5, *labels)
            else:
                gauges[series(name, *labels)] = 3
    gauges[series("info", "0123456789abcdef", "both")] = 1
    return gauges


def test_several_api_servers_show_what_one_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM hands each report of each engine to one of them, and any of them answers a scrape with
    what all have entered: nothing is lost, counted twice, told by process, or falls."""
    one = CollectorRegistry()
    alone = metrics(one)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    servers = []
    for pid in ("1", "2", "3"):
        process = values.MultiProcessValue(lambda pid=pid: pid)
        monkeypatch.setattr(values, "ValueClass", process)
        servers.append(metrics(CollectorRegistry()))
    every = CollectorRegistry()
    MultiProcessCollector(every)
    engines = {engine: StatsRecorder() for engine in ENGINES}
    before: dict[Any, float] = {}
    for step in range(8):
        for engine, recorder in engines.items():
            for name, metric in ENGINE.items():
                labels = next(known_label_values(metric), ("found", "both"))
                if metric.type is MetricType.COUNTER:
                    recorder.count(name, *labels, n=step + engine)
                elif metric.type is MetricType.HISTOGRAM:
                    recorder.observe(name, step / 2, *labels)
            report = recorder.report({"pins": step % 3, series("info", "d", "both"): 1})
            assert report is not None
            alone.observe(report.data, engine)
            servers[(step + engine) % len(servers)].observe(report.data, engine)
        seen = {(x.name, *sorted(x.labels.items())): x.value for x in samples(every)}
        assert seen == {(x.name, *sorted(x.labels.items())): x.value for x in samples(one)}
        rising = {key for key in seen if key[0].endswith(("_total", "_count", "_bucket", "_sum"))}
        assert all(seen[key] >= before.get(key, 0) for key in rising) and before.keys() <= {*seen}
        before = {key: seen[key] for key in rising}


def test_what_is_recorded_is_exposed() -> None:
    registry = CollectorRegistry()
    prom = metrics(registry)
    recorder = StatsRecorder()
    report = recorder.report(everything(recorder))
    assert report is not None
    prom.observe(report.to_dict())
    found = {
        (s.name, frozenset(s.labels.items())): s.value
        for s in samples(registry)
        if s.labels["engine"] == "0"
    }
    for name, metric in ENGINE.items():
        full = ENGINE_PREFIX + metric.exposed(name)
        for labels in known_label_values(metric):
            named = dict(zip((label.name for label in metric.labels), labels, strict=True))
            key = frozenset({"model_name": "m", "engine": "0", **named}.items())
            if metric.type is MetricType.HISTOGRAM:
                assert found[full + "_count", key] == 1
                assert found[full + "_sum", key] == 0.5
            else:
                expected = {MetricType.COUNTER: 2, MetricType.GAUGE: 3}[metric.type]
                assert found[full, key] == expected
    assert value(registry, "backhaul:info", domain="0123456789abcdef", policy="both") == 1


def test_everything_known_is_0_before_anything_happens() -> None:
    """So that a rate over it exists from the first scrape on; and an observation adds no series
    besides those of the domain."""
    registry = CollectorRegistry()
    prom = metrics(registry)
    before = {(s.name, *sorted(s.labels.items())): s.value for s in samples(registry)}
    assert set(before.values()) == {0.0}
    for name, metric in ENGINE.items():
        if known := len(list(known_label_values(metric))):
            full = ENGINE_PREFIX + metric.exposed(name)
            suffix = "_count" if metric.type is MetricType.HISTOGRAM else ""
            assert len([1 for key in before if key[0] == full + suffix]) == known * len(ENGINES)
    recorder = StatsRecorder()
    report = recorder.report(everything(recorder))
    assert report is not None
    prom.observe(report.to_dict(), 1)
    after = {(s.name, *sorted(s.labels.items())): s.value for s in samples(registry)}
    assert {key[0] for key in after.keys() - before.keys()} == {"backhaul:info"}
    other = {k for k in after if ("engine", "0") in k}
    assert all(after[key] == 0 for key in other), "the other engine's numbers stay"


def test_engines_one_after_another_in_one_process() -> None:
    """vLLM clears the process's registry of its own metrics only; ours begin anew as well."""
    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    for _ in range(2):
        one = BackhaulPromMetrics(Config(), types, LABELS, ENGINES)
        one.observe({"counters": {series("requests", "decode_end"): 3}}, 1)
        labels = {"model_name": "m", "engine": "1", "selected": "decode_end"}
        assert REGISTRY.get_sample_value(f"{ENGINE_PREFIX}requests_total", labels) == 3
    for metric in one._metrics.values():
        REGISTRY.unregister(metric)


def test_names_follow_the_convention() -> None:
    for name, metric in ENGINE.items():
        assert not name.endswith(("_total", "_ms", "_count", "_sum", "_bucket"))
        if metric.type is MetricType.HISTOGRAM:
            assert name.endswith(("_seconds", "_tokens", "_bytes"))
            assert list(metric.buckets) == sorted(set(metric.buckets))


def test_a_series_of_another_version_is_left_out() -> None:
    prom = metrics(CollectorRegistry())
    prom.observe({"counters": {"invented": 1, "loads": 1, "loads|a|b": 1}, "gauges": {"x|y": 1}})


def test_nothing_new_is_no_report() -> None:
    recorder = StatsRecorder()
    assert recorder.report({"pins": 1}) is not None
    assert recorder.report({"pins": 1}) is None
    changed = recorder.report({"pins": 0})
    assert changed is not None and changed.data["gauges"] == {"pins": 0}


def test_every_report_has_every_gauge() -> None:
    """What an API server enters late is put right by the next report, whoever gets that one."""
    recorder = StatsRecorder()
    reports = [recorder.report({"pins": n, "open_jobs": 0}) for n in (3, 0)]
    recorder.count("loads", "decode_end")
    last = recorder.report({"pins": 0, "open_jobs": 0})
    assert last is not None and all(reports)
    registry = CollectorRegistry()
    prom = metrics(registry)
    for report in (*reversed(reports), last):
        prom.observe(report.data, 1)  # type: ignore[union-attr]
    labels = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value(f"{ENGINE_PREFIX}pins", labels) == 0


def two_reports() -> tuple[BackhaulStats, BackhaulStats]:
    first, second = StatsRecorder(), StatsRecorder()
    first.count("loads", "decode_end")
    first.observe("load_seconds", 0.1)
    second.count("loads", "decode_end", n=2)
    second.observe("load_seconds", 0.3)
    a, b = first.report({"pins": 4}), second.report({"pins": 1})
    assert a is not None and b is not None
    return a, b


def test_reports_of_two_steps_add_up() -> None:
    a, b = two_reports()
    a.aggregate(b)
    assert a.data["counters"] == {"loads|decode_end": 3}
    assert a.data["gauges"] == {"pins": 1}
    assert a.reduce() == {"loads.decode_end": 3, "mean load_seconds": 0.2}
    assert b.data["observations"] == {"load_seconds": [0.3]}, "the second one is unchanged"
    assert BackhaulStats().is_empty() and not a.is_empty()


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in MultiConnector"])
def test_the_way_from_the_engine_core_to_the_front_end(multi: bool) -> None:
    """msgpack between the processes, then the log line and /metrics of the front end."""
    register()
    a, b = two_reports()
    stats: Any = MultiKVConnectorStats(data={"BackhaulConnector": a}) if multi else a
    more: Any = MultiKVConnectorStats(data={"BackhaulConnector": b}) if multi else b
    sent = SchedulerStats(kv_connector_stats=stats.aggregate(more).to_dict())
    packed = msgspec.msgpack.Encoder().encode(sent)
    received = msgspec.msgpack.Decoder(SchedulerStats).decode(packed)
    assert received.kv_connector_stats is not None
    connector = MultiConnector if multi else BackhaulConnector
    rebuilt = connector.build_kv_connector_stats(received.kv_connector_stats)
    assert rebuilt is not None and not rebuilt.is_empty()
    reduced: Any = rebuilt.reduce()
    reduced = reduced["BackhaulConnector"] if multi else reduced
    assert reduced == {"loads.decode_end": 3, "mean load_seconds": 0.2}

    child = {"kv_connector": "BackhaulConnector", "kv_role": "kv_both"}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector" if multi else "BackhaulConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child]} if multi else {},
    )
    registry = CollectorRegistry()
    prom = connector.build_prom_metrics(Config(transfer), metric_types(registry), LABELS, ENGINES)  # type: ignore[arg-type]
    assert prom is not None
    prom.observe(received.kv_connector_stats)
    assert value(registry, "backhaul:loads_total", kind="decode_end") == 3
    assert value(registry, "backhaul:load_seconds_count") == 2
    assert value(registry, "backhaul:pins") == 1
