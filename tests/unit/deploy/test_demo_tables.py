"""`backhaul demo`: its tables fit a terminal of 80 columns."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from backhaul.deploy.console import Console
from backhaul.deploy.demo import KIND_NAMES, PLAN, TurnReport, ratio_table, turn_table

LENGTHS = st.integers(1, 999_999)
SECONDS = st.floats(0.01, 9_999)
REPORT = st.builds(
    TurnReport,
    turn=st.integers(1, 9),
    label=st.sampled_from([plan.label for plan in PLAN]),
    prompt_tokens=LENGTHS,
    found_locally=LENGTHS,
    loaded=LENGTHS,
    loaded_from=st.sampled_from([*KIND_NAMES.values(), ""]),
    recomputed=LENGTHS,
    prefill_s=SECONDS,
    ttft_s=SECONDS,
    reply_tokens=LENGTHS,
)


@given(st.lists(REPORT, min_size=2, max_size=4))
def test_no_figure_and_no_heading_is_cut(reports: list[TurnReport]) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80)
    console.print(turn_table("With Backhaul", reports))
    console.print(ratio_table(reports, reports))
    out = text.getvalue()
    assert all(len(line) <= 80 for line in out.splitlines()) and "\u2026" not in out
    words = set(out.split())
    for heading in ("turn", "prompt", "locally", "loaded", "from", "recomputed", "TTFT", "1.00x"):
        assert heading in words
    for r in reports:
        for length in (r.prompt_tokens, r.found_locally, r.loaded, r.recomputed):
            assert f"{length:,}" in words
        assert {r.loaded_from or "-", f"{r.prefill_s:.2f}", f"{r.ttft_s:.2f}"} <= words
        assert set(r.label.split()) <= words
