"""Spans stand for token content: what holds of the spans holds of the ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.trace import (
    Span,
    first,
    length,
    merged,
    shared_prefix,
    token_ids,
)

VOCABULARY = range(100, 60_000)


@st.composite
def _spans(draw: st.DrawFn) -> tuple[Span, ...]:
    pieces = draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)), max_size=6)
    )
    return tuple(Span(source, start, start + more) for source, start, more in pieces)


@given(_spans())
def test_length_and_merging_keep_the_content(spans: tuple[Span, ...]) -> None:
    ids = token_ids(spans, VOCABULARY)
    assert len(ids) == length(spans) == length(merged(spans))
    assert token_ids(merged(spans), VOCABULARY) == ids


@given(_spans(), st.integers(0, 60))
def test_first_cuts_the_content(spans: tuple[Span, ...], tokens: int) -> None:
    ids = token_ids(spans, VOCABULARY)
    assert token_ids(first(spans, tokens), VOCABULARY) == ids[:tokens]


@given(_spans(), _spans())
def test_shared_prefix_is_the_ids_shared_prefix(
    one: tuple[Span, ...], other: tuple[Span, ...]
) -> None:
    a, b = token_ids(one, VOCABULARY), token_ids(other, VOCABULARY)
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    assert shared_prefix(one, other) == count
