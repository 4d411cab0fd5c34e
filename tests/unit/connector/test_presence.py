"""Whether there is a way back, and that it is said once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from backhaul.connector import presence
from backhaul.connector.presence import Known, PathState, Presence, has_path, judge, problem
from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreError, StoreRejected, StoreUnavailable
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.options import NoPath
from backhaul.transfer.base import Elsewhere, Member, Peers, Store

RECORD = DomainRecord(
    model="m", weights="w", hash_function="sha256", hash_probe="00", kv_dtype="bfloat16",
    layout=CacheLayout(groups=(GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=16),),
                       hash_tokens=16),
    platform="cpu", vllm="0.32",
)  # fmt: skip
ALONE, TWO = Peers(), Peers(loaders=2)
ELSEWHERE = Peers(elsewhere=(Elsewhere(DomainId("d2"), "kv_dtype", "bfloat16", "fp8", 3, 0),))
CONVERTS = Peers(elsewhere=(Elsewhere(DomainId("d3"), "", "", "", 1, 0), *ELSEWHERE.elsewhere))
DECODE = Member("decode", loads=False, publishes=True)
BOTH = Member("decode", loads=True, publishes=True)


@pytest.mark.parametrize(
    ("known", "path", "own_path"),
    [
        (Known(), True, True),
        (Known(judge(TWO), TWO), True, True),
        (Known(judge(ALONE), ALONE), False, True),
        (Known(judge(ELSEWHERE), ELSEWHERE), False, True),
        (Known(judge(CONVERTS), CONVERTS), True, True),
        (Known(judge(Peers(known=False))), True, True),
        (Known(PathState.UNREACHABLE), False, False),
        (Known(PathState.REFUSED), False, False),
    ],
)
def test_a_path_leads_to_another_loader_or_back_to_oneself(
    known: Known, path: bool, own_path: bool
) -> None:
    assert has_path(known, loads=True, own_prefill=False) == path
    assert has_path(known, loads=True, own_prefill=True) == own_path
    assert has_path(known, loads=False, own_prefill=True) == path


@pytest.mark.parametrize("no_path", list(NoPath))
@pytest.mark.parametrize(
    ("known", "parts"),
    [
        (Known(PathState.NO_LOADER, ALONE), ["no other engine that loads", "kv_role", "d1"]),
        (
            Known(PathState.NO_LOADER, ELSEWHERE),
            ["3 in domain d2", "kv_dtype is fp8 instead of bfloat16"],
        ),
        (Known(PathState.UNREACHABLE, detail="refused"), ["cannot be reached (refused)"]),
        (Known(PathState.REFUSED, detail="not allowed"), ["refuses", "not allowed"]),
    ],
)
def test_the_problem_is_one_line_with_what_follows(
    known: Known, parts: list[str], no_path: NoPath
) -> None:
    line = problem(known, domain="d1", store="backhaul://h:1", no_path=no_path)
    assert "\n" not in line and "backhaul://h:1" in line
    disabled = no_path is NoPath.DISABLE
    assert ("not kept" in line) == ("as no_publication_path" in line) == disabled
    assert ("pathless_publications" in line) != disabled
    for part in parts:
        assert part in line


def test_a_path_is_no_problem() -> None:
    for known in (Known(), Known(PathState.OPEN, TWO)):
        assert problem(known, domain="d", store="s", no_path=NoPath.REPORT) == ""


class Answers:
    """In place of a store: one answer after another, the last one again and again."""

    def __init__(self, *answers: Peers | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[Member] = []
        self._changed = threading.Condition()

    def join(self, record: DomainRecord, member: Member, *, timeout_s: float) -> Peers:
        with self._changed:
            self.asked.append(member)
            answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
            self._changed.notify_all()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= times, timeout=10)


@contextmanager
def running(
    store: Answers, member: Member = DECODE, **keywords: Any
) -> Iterator[tuple[Presence, list[str]]]:
    said: list[str] = []
    one = Presence(
        cast(Store, store), RECORD, member, address="backhaul://h:1", no_path=NoPath.REPORT,
        wants_path=keywords.pop("wants_path", True), refresh_s=keywords.pop("refresh_s", 0.005),
        say=said.append,
    )  # fmt: skip
    try:
        yield one, said
    finally:
        one.close()
        one.close()  # safe to call twice


def eventually(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (ALONE, "no other engine that loads"),
        (ELSEWHERE, "kv_dtype is fp8"),
        (StoreUnavailable("connection refused"), "connection refused"),
        (StoreRejected("PERMISSION_DENIED"), "PERMISSION_DENIED"),
    ],
)
def test_it_is_said_once_and_the_path_that_shows_up_is_found(
    answer: Peers | StoreError, part: str
) -> None:
    store = Answers(*[answer] * 5, TWO)
    with running(store) as (one, said):
        store.wait(4)
        assert not one.has_path(own_prefill=False)
        store.wait(8)
        assert one.has_path(own_prefill=False)
        eventually(lambda: len(said) == 2)
        assert part in said[0]
        assert "path found" in said[1] and said[1].endswith(": 2")


def test_an_engine_that_loads_too_says_nothing_until_a_request_shows_it() -> None:
    store = Answers(ALONE)
    with running(store, BOTH) as (one, said):
        store.wait(4)
        assert one.has_path(own_prefill=True) and not one.has_path(own_prefill=False)
        assert said == []
        one.missed()
        eventually(lambda: len(said) == 1)


def test_loaders_elsewhere_are_said_to_an_engine_that_loads_too() -> None:
    store = Answers(ELSEWHERE)
    with running(store, BOTH) as (_, said):
        eventually(lambda: len(said) == 1)


def test_a_store_that_answered_once_keeps_the_path_through_a_fault() -> None:
    store = Answers(TWO, StoreUnavailable("restarting"))
    with running(store) as (one, said):
        store.wait(5)
        assert one.has_path(own_prefill=False)
        assert said == []


def test_an_engine_without_decode_ends_has_nothing_to_say() -> None:
    store = Answers(ALONE)
    with running(store, wants_path=False) as (_, said):
        store.wait(4)
        assert said == []


def test_a_withheld_publication_brings_the_next_turn_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "_NUDGE_S", 0.0)
    store = Answers(ALONE, TWO)
    with running(store, refresh_s=3600) as (one, _):
        store.wait(1)
        assert len(store.asked) == 1
        one.missed()
        store.wait(2)
        eventually(lambda: one.has_path(own_prefill=False))


def test_a_bug_in_the_store_s_client_costs_nothing() -> None:
    store = Answers(ValueError("bug"))
    with running(store) as (one, _):
        store.wait(3)
        assert one.has_path(own_prefill=False)


def test_it_leaves_when_it_closes() -> None:
    store = Answers(TWO)
    with running(store):
        store.wait(1)
    assert store.asked[-1] == Member("decode", loads=False, publishes=False)
