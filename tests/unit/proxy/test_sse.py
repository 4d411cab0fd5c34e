"""Events come out as they went in, however the network cuts them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.proxy.sse import EventSplitter, data_of, with_data

LINES = st.lists(
    st.sampled_from([b"data: {}", b"data:x", b"event: e", b": ping", b"data: \xc3\xa9"]),
    min_size=1,
    max_size=3,
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    return [end.join(lines) + end + end for lines in draw(st.lists(LINES, max_size=6))]


@given(streams(), st.lists(st.integers(0, 200)), st.sampled_from([b"", b"data: cut of"]))
def test_any_cut_gives_the_same_events(events: list[bytes], cuts: list[int], tail: bytes) -> None:
    stream = b"".join(events) + tail
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = EventSplitter()
    found = [
        event
        for start, end in itertools.pairwise(places)
        for event in splitter.feed(stream[start:end])
    ]
    assert found == events
    assert splitter.rest() == tail
    assert splitter.rest() == b""


@given(streams())
def test_events_are_out_as_soon_as_they_are_complete(events: list[bytes]) -> None:
    splitter = EventSplitter()
    for event in events:
        found = splitter.feed(event)
        assert found == [event]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"event: a\r\ndata:x\r\n\r\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b": ping\n\n", b""),
    ],
)
def test_data(event: bytes, data: bytes) -> None:
    assert data_of(event) == data


def test_other_fields_survive_new_data() -> None:
    assert with_data(b"event: e\nid: 1\ndata: old\n\n", b"new") == (
        b"event: e\nid: 1\ndata: new\n\n"
    )
