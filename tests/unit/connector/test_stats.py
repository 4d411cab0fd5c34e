"""Counts reach Prometheus: every name is known, reports add up, gauges are the latest."""

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from backhaul.connector.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    BackhaulPromMetrics,
    BackhaulStats,
    StatsRecorder,
)


def metrics(registry: CollectorRegistry) -> BackhaulPromMetrics:
    class Config:
        kv_transfer_config = None

    kinds = {
        kind: (lambda cls: lambda **kw: cls(**kw, registry=registry))(kind)
        for kind in (Counter, Gauge, Histogram)
    }
    return BackhaulPromMetrics(Config(), kinds, ["model_name", "engine"], {0: ["m", "0"]})


def test_what_is_recorded_is_exposed() -> None:
    registry = CollectorRegistry()
    prom = metrics(registry)
    recorder = StatsRecorder()
    for name, (_, label) in COUNTERS.items():
        recorder.count(name, "x" if label else "", 2)
    for name in HISTOGRAMS:
        recorder.observe(name, 0.5)
    report = recorder.report(dict.fromkeys(GAUGES, 3))
    assert report is not None
    prom.observe(report.to_dict())
    text = generate_latest(registry).decode()
    for name, (_, label) in COUNTERS.items():
        extra = f',{label}="x"' if label else ""
        assert f'backhaul:{name}_total{{engine="0"{extra},model_name="m"}} 2.0' in text.replace(
            f'engine="0",model_name="m",{label}="x"', f'engine="0"{extra},model_name="m"'
        )
    for name in GAUGES:
        assert f'backhaul:{name}{{engine="0",model_name="m"}} 3.0' in text
    for name in HISTOGRAMS:
        assert f'backhaul:{name}_count{{engine="0",model_name="m"}} 1.0' in text


def test_nothing_new_is_no_report() -> None:
    recorder = StatsRecorder()
    assert recorder.report({"pins": 1}) is not None
    assert recorder.report({"pins": 1}) is None
    changed = recorder.report({"pins": 0})
    assert changed is not None and changed.data["gauges"] == {"pins": 0}


def test_reports_of_two_steps_add_up() -> None:
    first, second = StatsRecorder(), StatsRecorder()
    first.count("loads", "decode_end")
    first.observe("load_seconds", 0.1)
    second.count("loads", "decode_end", 2)
    second.observe("load_seconds", 0.3)
    a, b = first.report({"pins": 4}), second.report({"pins": 1})
    assert a is not None and b is not None
    a.aggregate(b)
    assert a.data["counters"] == {"loads|decode_end": 3}
    assert a.data["gauges"] == {"pins": 1}
    assert a.reduce() == {"loads.decode_end": 3, "mean load_seconds": 0.2}
    assert BackhaulStats().is_empty() and not a.is_empty()
