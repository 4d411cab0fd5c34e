"""docs/proxy.md names every result, outcome, metric and option."""

from __future__ import annotations

from pathlib import Path

import pytest
from proxy_kit import running
from typer.main import get_command

from backhaul.deploy.cli import app
from backhaul.proxy.legs import Handover, RenderedBy
from backhaul.proxy.metrics import LegFault, Outcome

TEXT = (Path(__file__).parents[3] / "docs" / "proxy.md").read_text()


@pytest.mark.parametrize("value", [*Handover, *Outcome, *LegFault, *RenderedBy])
def test_label_values(value: str) -> None:
    assert f"`{value}`" in TEXT


def test_metrics() -> None:
    with running() as setup:
        lines = setup.http.get("/metrics").text.splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    for name in names:
        if not name.endswith("_created"):
            assert name.removeprefix("backhaul:proxy") in TEXT


def test_options_that_are_named_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {
        option
        for name in ("proxy", "up")
        for parameter in commands[name].params
        for option in parameter.opts
    }
    engine = {
        "--allowed-origins",
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--tensor-parallel-size",
    }
    named = {word.strip("`,.();:") for word in TEXT.split() if word.startswith(("--", "`--"))}
    named = {word.split("=")[0] for word in named if len(word) > 3}
    assert named - engine - {"--output"} <= known
