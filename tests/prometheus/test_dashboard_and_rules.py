"""The dashboard and the alert rules ask only for what is exposed; Prometheus accepts both."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from promql_kit import (
    DASHBOARD,
    RULES,
    VLLM,
    dashboard_expressions,
    exposed,
    faults,
    grouping_labels,
    rules,
    uses,
)

from backhaul.protocols.metrics import ENGINE_PREFIX, STORE, STORE_PREFIX


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.fail("promtool is missing: run scripts/setup, or as root apt-get install prometheus")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=600, check=False
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


def test_the_funnel_shows_every_tag_kind_and_reason() -> None:
    """Nothing is filtered away, and what is grouped by is what the legend names."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked: dict[str, set[tuple[str, ...]]] = {}
    for panel in panels:
        for target in panel.get("targets", ()):
            expression, legend = target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"])
            metrics = [(exposed() | VLLM)[use.metric] for use in uses(expression)]
            own = {label.name for metric in metrics for label in metric.labels}
            assert set(legend) <= own | {"instance"}, (panel["title"], legend)
            groups = grouping_labels(expression) - {"le", "instance"}
            assert groups == set(legend) - {"instance"}, (panel["title"], groups, legend)
            for use in uses(expression):
                filtered = {name for name, _, _ in use.matchers} - {"instance"}
                if not filtered:
                    asked.setdefault(use.metric, set()).add(tuple(sorted(groups)))
    funnel = {
        "backhaul:candidates_total": {("tag",), ("kind", "tag")},
        "backhaul:candidates_unconsumable_total": {("kind", "reason")},
        "backhaul:candidates_passed_over_total": {("kind", "reason")},
        "backhaul:publication_failures_total": {("reason",)},
        "backhaul:requests_total": {("selected",)},
        "backhaul:store_unconsumable_total": {("reason",)},
    }
    for metric, groups in funnel.items():
        assert groups <= asked[metric], metric


def test_the_variables_are_those_that_panels_use_and_find_targets() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    text = json.dumps(dashboard["panels"])
    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == set(variables)
    sides = {"engine": ENGINE_PREFIX, "store": STORE_PREFIX}
    for name in sides:
        one = variables[name]
        query = re.fullmatch(r"label_values\((\S+), instance\)", one["definition"])
        assert query and one["query"]["query"] == one["definition"]
        assert query[1] in exposed() and faults(query[1]) == []
        assert query[1].startswith(STORE_PREFIX) == (name == "store"), "a store has its own"
        assert one["multi"] and one["includeAll"]
    for panel, expression in dashboard_expressions(raw=True).items():
        for use in uses(expression):
            side = "store" if use.metric.startswith(STORE_PREFIX) else "engine"
            assert ("instance", "=~", f"${side}") in use.matchers, f"{panel}: {use}"


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


class Firing(NamedTuple):
    """Series that make one rule fire at an instance that is ``bad`` and silent at a ``good`` one.

    ``bad``, ``good``: series name and labels -> promtool's notation of its values, one a minute.
    ``labels``: further labels of the alert.
    """

    bad: dict[str, str]
    good: dict[str, str]
    labels: dict[str, str]


def histogram(name: str, method: str, slow: int) -> dict[str, str]:
    """A hundred calls a minute, ``slow`` of which take between 0.1 and 2.5 s."""
    bounds = {"0.025": 100 - slow, "0.1": 100 - slow, "2.5": 100, "10.0": 100, "+Inf": 100}
    return {
        f'{name}_bucket{{method="{method}",le="{bound}"}}': f"0+{count}x90"
        for bound, count in bounds.items()
    }


UNCONSUMABLE = 'backhaul:candidates_unconsumable_total{reason="%s",kind="decode_end"}'
SELECTED = 'backhaul:requests_total{selected="decode_end"}'
LOOKUPS = 'backhaul:lookups_total{result="%s"}'
FIRINGS: dict[str, Firing] = {
    "BackhaulStoreDown": Firing(
        {'up{job="backhaul-store"}': "1x5 0x85"},
        {'up{job="backhaul-store"}': "1x90"},
        {"job": "backhaul-store"},
    ),
    "BackhaulStoreRefusesObjects": Firing(
        {"backhaul:store_full_objects_total": "0+5x90"},
        {"backhaul:store_full_objects_total": "7x90"},
        {},
    ),
    "BackhaulStoreThrashes": Firing(
        {
            "backhaul:store_evicted_unused_checkpoints_total": "0+6x90",
            "backhaul:store_checkpoints_created_total": "0+10x90",
        },
        {
            "backhaul:store_evicted_unused_checkpoints_total": "0+4x90",
            "backhaul:store_checkpoints_created_total": "0+10x90",
        },
        {},
    ),
    "BackhaulPublicationsRunOut": Firing(
        {"backhaul:store_expired_publications_total": "0+1x90"},
        {"backhaul:store_expired_publications_total": "3x90"},
        {},
    ),
    "BackhaulStoreSlow": Firing(
        histogram("backhaul:store_rpc_seconds", "Reserve", 5),
        # Lookups may wait for a publication: that is no slowness.
        histogram("backhaul:store_rpc_seconds", "Reserve", 0)
        | histogram("backhaul:store_rpc_seconds", "Lookup", 50),
        {},
    ),
    "BackhaulStoreUnreachable": Firing(
        {
            LOOKUPS % "unreachable": "0+3x90",
            LOOKUPS % "timeout": "0+3x90",
            LOOKUPS % "hit": "0+90x90",
        },
        {LOOKUPS % "unreachable": "0+4x90", LOOKUPS % "miss": "0+96x90"},
        {},
    ),
    "BackhaulLoadsFail": Firing(
        {
            'backhaul:load_failures_total{reason="corrupt"}': "0+2x90",
            'backhaul:loads_total{kind="decode_end"}': "0+50x90",
        },
        {
            'backhaul:load_failures_total{reason="corrupt"}': "0+2x90",
            'backhaul:loads_total{kind="decode_end"}': "0+300x90",
        },
        {"reason": "corrupt"},
    ),
    "BackhaulDomainMismatch": Firing(
        {UNCONSUMABLE % "domain_mismatch": "0+1x90"},
        {UNCONSUMABLE % "evicted": "0+9x90"},
        {},
    ),
    "BackhaulHistoriesRewritten": Firing(
        {UNCONSUMABLE % "hash_mismatch": "0+9x90", SELECTED: "0+4x90"},
        {UNCONSUMABLE % "hash_mismatch": "0+7x90", SELECTED: "0+4x90"},
        {},
    ),
    "BackhaulPublicationsFail": Firing(
        {'backhaul:publication_failures_total{reason="pin_limit"}': "0+12x90"},
        # Clients that hang up are no fault.
        {'backhaul:publication_failures_total{reason="aborted"}': "0+99x90"},
        {"reason": "pin_limit"},
    ),
    "BackhaulCacheReset": Firing(
        {LOOKUPS % "cache_reset": "0+1x90"},
        {LOOKUPS % "miss": "0+9x90"},
        {},
    ),
    "BackhaulNobodyLoads": Firing(
        {"backhaul:pathless_publications_total": "0+60x90"},
        {"backhaul:pathless_publications_total": "0+3x90"},
        {},
    ),
}


def series(of: dict[str, str], instance: str) -> list[dict[str, str]]:
    """In promtool's form, at one instance."""
    listed = []
    for name, values in of.items():
        metric, _, labels = name.rstrip("}").partition("{")
        labels = ",".join(part for part in (labels, f'instance="{instance}"') if part)
        listed.append({"series": f"{metric}{{{labels}}}", "values": values})
    return listed


def alert(rule: dict[str, Any], labels: dict[str, str], instance: str) -> dict[str, object]:
    """What promtool expects to see fire at ``instance``."""
    labels = {"instance": instance} | labels
    texts = {
        key: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
        for key, text in rule["annotations"].items()
    }
    return {"exp_labels": labels | rule["labels"], "exp_annotations": texts}


@pytest.mark.parametrize(("bad", "good"), [(1, 5), (5, 1)])
def test_every_rule_fires_when_it_should_and_only_then(tmp_path: Path, bad: int, good: int) -> None:
    """Each at the instances that go wrong, once ``for`` is over, and at none that does not,
    whatever the rest of the fleet does."""
    ill = [f"bad-{number}" for number in range(bad)]
    well = [f"good-{number}" for number in range(good)]
    assert {rule["alert"] for rule in rules()} == set(FIRINGS)
    tests = []
    for rule in rules():
        firing = FIRINGS[rule["alert"]]
        for name in (*firing.bad, *firing.good):
            assert faults(name) == [], "a series that nothing exposes proves nothing"
        expected = [alert(rule, firing.labels, instance) for instance in ill]
        checks = [
            {"eval_time": "85m", "alertname": rule["alert"], "exp_alerts": expected},
            {"eval_time": "1m", "alertname": rule["alert"], "exp_alerts": []},
        ]
        fleet = [one for instance in ill for one in series(firing.bad, instance)]
        fleet += [one for instance in well for one in series(firing.good, instance)]
        tests.append({"interval": "1m", "input_series": fleet, "alert_rule_test": checks})
    case = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump(case))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
