"""What the dashboard and the alert rules ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from backhaul.protocols.metrics import (
    API_SERVER,
    ENGINE,
    ENGINE_PREFIX,
    STORE,
    STORE_PREFIX,
    Label,
    Metric,
    MetricType,
)

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "backhaul.json"
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
VLLM = {
    "vllm:prompt_tokens_cached_by_source_total": Metric(
        MetricType.COUNTER, "", (Label("source", ("device", "host")),)
    )
}
"""Of vLLM's own, what the dashboard asks for."""
TARGET_LABELS = {"instance", "job"}
"""Prometheus adds them to every series."""

_SELECTOR = re.compile(r"((?:backhaul|vllm):\w+|\bup\b)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


class Use(NamedTuple):
    """One selector in an expression: metric as exposed, and its matchers."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def exposed() -> dict[str, Metric]:
    """Every series name that Backhaul exposes -> its metric."""
    names: dict[str, Metric] = {}
    for prefix, table in ((ENGINE_PREFIX, ENGINE | API_SERVER), (STORE_PREFIX, STORE)):
        for name, metric in table.items():
            base = prefix + metric.exposed(name)
            suffixes = (
                ("_bucket", "_sum", "_count") if metric.type is MetricType.HISTOGRAM else ("",)
            )
            names |= {base + suffix: metric for suffix in suffixes}
    return names


def dashboard_expressions(*, raw: bool = False) -> dict[str, str]:
    """Panel's title and letter -> expression, Grafana's variables filled in unless ``raw``."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        if raw
        else re.sub(r"\$(engine|store)", ".*", re.sub(r"\$__\w+", "5m", target["expr"]))
        for panel in panels
        for target in panel.get("targets", ())
    }


def rules() -> list[dict[str, Any]]:
    """Every alert rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def uses(expression: str) -> Iterator[Use]:
    """The selectors of an expression."""
    for name, matchers in _SELECTOR.findall(expression):
        yield Use(name, tuple(_MATCHER.findall(matchers or "")))


def grouping_labels(expression: str) -> set[str]:
    """Labels that the expression groups by."""
    groups = _GROUPING.findall(expression)
    return {label.strip() for group in groups for label in group.split(",") if label.strip()}


def faults(expression: str) -> list[str]:
    """Names, labels and label values that no metric has."""
    known = exposed() | VLLM
    found: list[str] = []
    labels: set[str] = set(TARGET_LABELS)
    for use in uses(expression):
        if use.metric == "up":
            continue
        if use.metric not in known:
            found.append(f"no metric {use.metric}")
            continue
        metric = known[use.metric]
        own = {label.name: label.values for label in metric.labels}
        own |= {"le": ()} if use.metric.endswith("_bucket") else {}
        labels |= own.keys()
        for name, _, pattern in use.matchers:
            if name in TARGET_LABELS:
                continue
            if name not in own:
                found.append(f"{use.metric} has no label {name}")
            elif own[name]:
                found += [
                    f"{use.metric}: {name} is never {value!r}"
                    for value in pattern.split("|")
                    if value not in own[name]
                ]
    found += [f"grouped by {name}" for name in sorted(grouping_labels(expression) - labels)]
    return found
