"""What came into a store after a logged request had looked."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.deploy.as_it_ran import ANY_TIME, moment_of
from backhaul.deploy.explanation import goes_on
from backhaul.deploy.request_lines import RequestLine, parse_line

NOW, ARRIVED = 1_000.0, 900.0
MET = {"boundary": 32, "retained": True, "hash_matched": True, "age_s": 5.0}
PARTED = {"boundary": 64, "retained": True, "hash_matched": False, "age_s": 5.0}


def request(**fields: object) -> RequestLine:
    return parse_line(msgspec.json.encode({"request_id": "r", **fields}))


@pytest.mark.parametrize(
    ("boundary", "age_s", "matched", "later"),
    [
        (32, 105.0, True, False),
        (32, 99.0, True, False),  # committed while the lookup waited for it
        (16, 105.0, True, False),  # below what the record says all of
        (48, 105.0, True, True),  # the clocks disagree: it would have been named
        (64, 105.0, False, False),
        (64, 99.0, False, True),  # others depart at the same boundary
        (80, 99.0, False, True),
    ],
)
def test_what_the_record_names_was_there(
    boundary: int, age_s: float, matched: bool, later: bool
) -> None:
    moment = moment_of(request(arrived=ARRIVED, candidates=[PARTED, MET]), NOW)
    assert moment.is_later(boundary, age_s, "", matched=matched) == later


def test_an_older_log_tells_less() -> None:
    ended = moment_of(request(time=ARRIVED), NOW)
    assert ended.is_later(32, 99.0, "", matched=True)
    assert not ended.is_later(32, 101.0, "", matched=True)
    # What it published before it ended, and no lookup is on record.
    own = {"outcome": "published", "boundary": 32}
    assert moment_of(request(time=ARRIVED, input_end=own), NOW).is_later(32, 101, "", matched=True)
    assert moment_of(request(), NOW) == ANY_TIME


@given(st.integers(1, 200), st.floats(0, 1e6), st.sampled_from(["", "d"]), st.booleans())
def test_of_a_prompt_that_is_no_request_nothing_is_later(
    boundary: int, age_s: float, domain: str, matched: bool
) -> None:
    assert not ANY_TIME.is_later(boundary, age_s, domain, matched=matched)


@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 6), st.integers(0, 60))
def test_what_goes_on_shares_all_that_can_be_compared(
    unit: int, prompt: int, shared: int, boundary: int
) -> None:
    common = shared * unit
    if goes_on(boundary, common, prompt, unit):
        assert common and boundary > prompt and prompt - common < unit
    elif boundary > prompt and common:
        assert prompt < unit or common + unit <= prompt, "a whole block departs"
