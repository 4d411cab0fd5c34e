"""docs/u_end.md names every reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from backhaul.render.reasons import Reason

PAGE = (Path(__file__).parents[3] / "docs" / "u_end.md").read_text()


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_explained(reason: Reason) -> None:
    assert f"\n| `{reason}` | " in PAGE
