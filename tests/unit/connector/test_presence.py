"""Whether there is a way back, and that it is said once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from backhaul.connector import presence
from backhaul.connector.presence import (
    Known,
    PathState,
    Presence,
    has_path,
    judge,
    loading_problem,
    problem,
    published_elsewhere,
)
from backhaul.connector.worker_kind import ObservedKind, known_kind
from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreError, StoreRejected, StoreUnavailable
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.options import NoPath, WorkerKind
from backhaul.transfer.base import Elsewhere, Member, Peers, Store

RECORD = DomainRecord(
    model="m", weights="w", hash_function="sha256", hash_probe="00", kv_dtype="bfloat16",
    layout=CacheLayout(groups=(GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=16),),
                       hash_tokens=16),
    platform="cpu", vllm="0.32",
)  # fmt: skip
ALONE, TWO = Peers(), Peers(loaders=2)
ELSEWHERE = Peers(elsewhere=(Elsewhere(DomainId("d2"), "kv_dtype", "bfloat16", "fp8", 3, 0),))
CONVERTS = Peers(elsewhere=(Elsewhere(DomainId("d3"), "", "", "", 1, 0, 1), *ELSEWHERE.elsewhere))
WOULD_CONVERT = Peers(elsewhere=(Elsewhere(DomainId("d3"), "", "", "", 1, 0),))
"""It could, and has no buffer for it."""
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
        (Known(judge(WOULD_CONVERT), WOULD_CONVERT), False, True),
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
            assert self._changed.wait_for(lambda: len(self.asked) >= times, timeout=300)


@contextmanager
def running(
    store: Answers, member: Member = DECODE, **keywords: Any
) -> Iterator[tuple[Presence, list[str]]]:
    said: list[str] = []
    one = Presence(
        cast(Store, store), RECORD, member, address="backhaul://h:1", no_path=NoPath.REPORT,
        wants_path=keywords.pop("wants_path", True), kind=keywords.pop("kind", WorkerKind.BOTH),
        refresh_s=keywords.pop("refresh_s", 0.005),
        say=said.append,
    )  # fmt: skip
    try:
        yield one, said
    finally:
        one.close()
        one.close()  # safe to call twice


def eventually(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
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


@pytest.mark.parametrize("kind", [WorkerKind.DECODE, None])
def test_an_engine_that_is_known_to_decode_only_says_it_without_a_miss(
    kind: WorkerKind | None,
) -> None:
    """By its kind, or by its requests."""
    store = Answers(Peers(decode_loaders=3))
    with running(store, BOTH, kind=kind) as (one, said):
        store.wait(3)
        assert kind is not None or said == []
        if kind is None:
            one.saw_request(handed_over=True)
        eventually(lambda: len(said) == 1)
        assert "3 that load from there only decode" in said[0]
        assert store.asked[-1] == BOTH._replace(decodes_only=True)
        if kind is None:
            one.saw_request(handed_over=False)
            eventually(lambda: store.asked[-1] == BOTH)


def test_an_engine_that_turns_out_to_be_unable_to_convert_tells_the_store() -> None:
    able = BOTH._replace(converts=True)
    store = Answers(TWO)
    with running(store, able) as (one, _):
        store.wait(1)
        assert store.asked[0] == able
        one.stop_converting()
        eventually(lambda: store.asked[-1] == BOTH)


def test_engines_that_start_together_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer finds nobody, the second, some seconds later, does."""
    store = Answers(ALONE, TWO)
    monkeypatch.setattr(presence, "_GRACE_S", 0.001)
    with running(store, refresh_s=3600) as (one, said):
        store.wait(2)
        eventually(lambda: one.has_path(own_prefill=False))
        assert said == []


@pytest.mark.parametrize("error", [StoreRejected("not yours"), StoreUnavailable("refused")])
def test_who_only_loads_says_that_the_store_is_out_of_reach(error: StoreError) -> None:
    loader = Member("prefill", loads=True, publishes=False)
    with running(Answers(error, error, ALONE), loader, wants_path=False) as (_, said):
        eventually(lambda: len(said) == 2)
        assert "path to here" in said[0] and str(error) in said[0] and "\n" not in said[0]
        assert "is reached" in said[1]


def test_a_loader_that_would_convert_is_told_apart_from_one_that_cannot() -> None:
    said = problem(
        Known(judge(WOULD_CONVERT), WOULD_CONVERT), domain="d", store="s", no_path=NoPath.DISABLE
    )
    assert "1 in domain d3, which could convert" in said and "convert_buffer_bytes" in said


def test_nothing_is_said_of_loading_where_the_store_answers() -> None:
    for peers in (ALONE, TWO, ELSEWHERE):
        assert loading_problem(Known(judge(peers), peers), store="s") == ""


@pytest.mark.parametrize(
    ("told", "siblings", "kind"),
    [
        (None, (), None),
        (None, ("kv_both",), None),
        (None, ("kv_producer", "kv_both"), WorkerKind.PREFILL),
        (None, ("kv_consumer",), WorkerKind.DECODE),
        (None, ("kv_consumer", "kv_producer"), None),
        (WorkerKind.BOTH, ("kv_consumer",), WorkerKind.BOTH),
        (WorkerKind.DECODE, (), WorkerKind.DECODE),
    ],
)
def test_what_is_known_of_an_engine_at_start(
    told: WorkerKind | None, siblings: tuple[str, ...], kind: WorkerKind | None
) -> None:
    assert known_kind(told, siblings) is kind


@pytest.mark.parametrize(
    ("own", "handed_over", "decodes_only"),
    [(1, 0, False), (0, 1, True), (1, 5, False), (1, 9, True), (10, 80, False)],
)
def test_a_few_own_prompts_do_not_make_a_prefill_engine(
    own: int, handed_over: int, decodes_only: bool
) -> None:
    seen = ObservedKind()
    found = [seen.saw(handed_over=False) for _ in range(own)]
    found += [seen.saw(handed_over=True) for _ in range(handed_over)]
    assert found[-1] is decodes_only


def test_loaders_elsewhere_are_said_to_an_engine_that_loads_too() -> None:
    store = Answers(ELSEWHERE)
    with running(store, BOTH) as (_, said):
        eventually(lambda: len(said) == 1)


OTHERS_PUBLISH = Peers(elsewhere=(Elsewhere(DomainId("d2"), "vllm", "0.32", "0.33", 0, 3),))
THE_SAME_HERE = Peers(publishers=1, elsewhere=OTHERS_PUBLISH.elsewhere)
CONVERTIBLE = Peers(elsewhere=(Elsewhere(DomainId("d3"), "", "", "", 0, 1),))


@pytest.mark.parametrize(
    ("peers", "converts", "part"),
    [
        (OTHERS_PUBLISH, True, "3 use domain d2, where vllm is 0.33 instead of 0.32"),
        (CONVERTIBLE, False, "if convert_buffer_bytes were not 0"),
        (CONVERTIBLE, True, ""),
        (THE_SAME_HERE, False, ""),
        (ELSEWHERE, False, ""),  # who is there only loads
        (ALONE, False, ""),
        (Peers(known=False, elsewhere=OTHERS_PUBLISH.elsewhere), False, ""),
    ],
)
def test_publishers_that_are_all_elsewhere_are_named_with_the_field(
    peers: Peers, converts: bool, part: str
) -> None:
    line = published_elsewhere(peers, converts=converts)
    assert part in line and "\n" not in line and bool(line) == bool(part)


LOADER = Member("prefill", loads=True, publishes=False)


@pytest.mark.parametrize(
    ("member", "kind", "wants_path", "told"),
    [
        (LOADER, WorkerKind.PREFILL, False, 1),
        (BOTH, WorkerKind.BOTH, True, 1),
        (BOTH, WorkerKind.DECODE, False, 0),
        (DECODE, WorkerKind.BOTH, False, 0),
    ],
)
def test_who_loads_says_once_that_all_publish_elsewhere(
    member: Member, kind: WorkerKind, wants_path: bool, told: int
) -> None:
    store = Answers(OTHERS_PUBLISH)
    with running(store, member, kind=kind, wants_path=wants_path) as (_, said):
        store.wait(6)
        eventually(lambda: len(said) >= told)
    assert [line for line in said if "path to here" in line] == said and len(said) == told


def test_publishers_that_come_a_moment_later_are_waited_for() -> None:
    store = Answers(OTHERS_PUBLISH, THE_SAME_HERE)
    with running(store, LOADER, wants_path=False) as (_, said):
        store.wait(6)
    assert said == []


def test_an_engine_that_takes_no_part_any_more_leaves_and_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "_NUDGE_S", 0.0)
    store = Answers(TWO, ELSEWHERE)
    with running(store, BOTH, kind=None, refresh_s=3600) as (one, said):
        store.wait(1)
        one.leave()
        store.wait(2)
        one.saw_request(handed_over=True)
        one.missed()
        store.wait(3)
    left = Member("decode", loads=False, publishes=False)
    assert store.asked[1:] == [left] * len(store.asked[1:]) and said == []


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
