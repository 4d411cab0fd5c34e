"""The table of docs/u_end.md is what the templates give."""

from __future__ import annotations

from pathlib import Path

import pytest
import reachability
from real_templates import FAMILIES, Family

PAGE = (Path(__file__).parents[3] / "docs" / "u_end.md").read_text()
ROWS = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.label)
def test_the_row_is_as_documented(family: Family) -> None:
    row = reachability.row(family)
    assert ROWS[row.split("|")[1].strip()] == row


def test_every_thinking_family_is_one() -> None:
    assert {f.label for f in FAMILIES} >= reachability.THINKING
