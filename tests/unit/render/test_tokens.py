"""Characters to tokens by the suffix's count."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.render.reasons import Reason, UEnd
from backhaul.render.tokens import u_end_tokens

IDS = st.lists(st.integers(0, 5), max_size=8)


@settings(deadline=None, max_examples=100)
@given(IDS, IDS)
def test_the_boundary_is_before_the_suffix(history: list[int], suffix: list[int]) -> None:
    found = u_end_tokens([7, *history, *suffix], suffix)
    assert found == UEnd(1 + len(history))


@settings(deadline=None, max_examples=100)
@given(IDS, IDS)
def test_a_tail_that_differs_is_unknown(prompt: list[int], suffix: list[int]) -> None:
    found = u_end_tokens(prompt, suffix)
    fits = len(prompt) > len(suffix) and prompt[len(prompt) - len(suffix) :] == suffix
    assert (found.tokens is not None) is fits
    assert (found.reason is Reason.TAIL_MISMATCH) is not fits


def test_a_prompt_of_nothing_but_suffix_has_no_history() -> None:
    assert u_end_tokens([1, 2], [1, 2]).reason is Reason.TAIL_MISMATCH
