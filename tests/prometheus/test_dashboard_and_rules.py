"""The dashboard and the alert rules ask only for what is exposed; Prometheus accepts both."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from promql_kit import DASHBOARD, RULES, dashboard_expressions, faults, rules, uses

from backhaul.protocols.metrics import STORE, STORE_PREFIX


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.fail("promtool is missing: run scripts/setup, or as root apt-get install prometheus")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("panel", "expression"), dashboard_expressions().items())
def test_the_dashboard_asks_for_what_is_exposed(panel: str, expression: str) -> None:
    assert list(uses(expression)) and faults(expression) == []


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_is_exposed_and_says_what_to_do(rule: dict[str, object]) -> None:
    assert list(uses(str(rule["expr"]))) and faults(str(rule["expr"])) == []
    annotations = rule["annotations"]
    assert isinstance(annotations, dict) and annotations.keys() == {"summary", "action"}
    assert not re.search(r"\n", annotations["summary"] + annotations["action"])


@pytest.mark.parametrize(
    "expression",
    [
        "backhaul:nonesuch_total",
        "backhaul:lookups_total{kind='x', colour=\"red\"}",
        'backhaul:lookups_total{result="perhaps"}',
        "sum by (colour) (backhaul:lookups_total)",
        "backhaul:load_seconds",
        "backhaul:store_lookups",
    ],
)
def test_a_wrong_name_label_or_value_is_found(expression: str) -> None:
    assert faults(expression)


def test_the_dashboard_covers_the_funnel_evictions_bytes_and_latencies() -> None:
    asked = {use.metric for text in dashboard_expressions().values() for use in uses(text)}
    for name in ("candidates", "candidates_unconsumable", "requests", "publish_bytes"):
        assert f"backhaul:{name}_total" in asked
    for name in ("load_seconds", "lookup_seconds", "store_rpc_seconds"):
        assert f"backhaul:{name}_bucket" in asked
    for name in ("evictions", "evicted_checkpoints"):
        assert f"{STORE_PREFIX}{STORE[name].exposed(name)}" in asked


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= own


def test_prometheus_accepts_rules_and_expressions(tmp_path: Path) -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    records = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(dashboard_expressions().values())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Series that go wrong, and the alerts that must follow."""
    up = {"series": 'up{job="backhaul-store", instance="s"}', "values": "1x5 0x60"}
    lookups = 'backhaul:lookups_total{instance="e", engine="0", result="%s"}'
    bad = [
        {"series": lookups % "unreachable", "values": "0+30x60"},
        {"series": lookups % "hit", "values": "0+30x60"},
    ]
    good = [
        {"series": lookups.replace('"e"', '"fine"') % "unreachable", "values": "0+1x60"},
        {"series": lookups.replace('"e"', '"fine"') % "hit", "values": "0+99x60"},
    ]

    def expect(name: str, instance: str, **labels: str) -> dict[str, object]:
        rule = next(rule for rule in rules() if rule["alert"] == name)
        texts = {
            key: text.replace("{{ $labels.instance }}", instance)
            for key, text in rule["annotations"].items()
        }
        return {
            "exp_labels": {"instance": instance} | rule["labels"] | labels,
            "exp_annotations": texts,
        }

    case = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [up, *bad, *good],
                "alert_rule_test": [
                    {
                        "eval_time": "20m",
                        "alertname": "BackhaulStoreDown",
                        "exp_alerts": [expect("BackhaulStoreDown", "s", job="backhaul-store")],
                    },
                    {
                        "eval_time": "20m",
                        "alertname": "BackhaulStoreUnreachable",
                        "exp_alerts": [expect("BackhaulStoreUnreachable", "e")],
                    },
                    {"eval_time": "3m", "alertname": "BackhaulStoreDown", "exp_alerts": []},
                ],
            }
        ],
    }
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump(case))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
