"""docs/metrics.md names what is exposed, no more and no less."""

import re
from pathlib import Path

import pytest

from backhaul.protocols.metrics import (
    API_SERVER,
    ENGINE,
    ENGINE_PREFIX,
    STORE,
    STORE_PREFIX,
    Metric,
)

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "prefix", "table"),
    [
        ("Engine", ENGINE_PREFIX, ENGINE),
        ("API server", ENGINE_PREFIX, API_SERVER),
        ("Store", STORE_PREFIX, STORE),
    ],
)
def test_the_page_lists_every_metric_with_its_labels(
    title: str, prefix: str, table: dict[str, Metric]
) -> None:
    rows = re.findall(r"^\| `(backhaul:\S+)` \| (\w+) \| (.*?) \|", section(title), re.MULTILINE)
    listed = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert listed == {
        prefix + metric.exposed(name): (metric.type.value, [label.name for label in metric.labels])
        for name, metric in table.items()
    }


def test_every_metric_that_the_page_uses_exists() -> None:
    """In the queries too."""
    known = {
        prefix + metric.exposed(name)
        for prefix, table in ((ENGINE_PREFIX, ENGINE | API_SERVER), (STORE_PREFIX, STORE))
        for name, metric in table.items()
    }
    used = {re.sub(r"_(sum|count|bucket)$", "", n) for n in re.findall(r"backhaul:\w+", PAGE)}
    assert used - {STORE_PREFIX} <= known


def test_every_label_value_is_explained() -> None:
    for metric in (*ENGINE.values(), *STORE.values()):
        for label in metric.labels:
            for value in label.values:
                if label.name not in ("reason", "policy"):
                    assert f"`{value}`" in PAGE, f"{label.name}={value}"
