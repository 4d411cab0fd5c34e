"""A real arm begins with a store that its engines know and that holds nothing of theirs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backhaul.benchmarks.reuse import real
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.real import RealArms
from backhaul.benchmarks.reuse.record import Arm, ArmResult, RequestResult, Source
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.connector.hints import parse_hints
from backhaul.deploy.pair import Pair
from backhaul.protocols import store_pb2
from backhaul.protocols.errors import StoreUnavailable
from backhaul.transfer.backends.session import SessionKeeper
from backhaul.transfer.nixl_agent import NixlAgent

SHAPE = preset("tiny-hybrid")


class FakePair:
    """Engines whose workers and schedulers each know one life of the store."""

    def __init__(self) -> None:
        self.up = True
        self.published = self.lookups = self.failed = 0
        self.stale_workers = {"prefill", "decode"}
        self.prefill, self.decode = (self._engine(name) for name in ("prefill", "decode"))
        self.store = SimpleNamespace(
            stop=self._stop,
            start=self._start,
            configure=lambda **_: None,
            wait_healthy=lambda _: None,
            http_url="store",
        )

    def _engine(self, name: str) -> Any:
        engine = SimpleNamespace(spec=SimpleNamespace(name=name))
        return SimpleNamespace(
            engine=engine,
            reset_prefix_cache=lambda: None,
            complete=self._complete,
            metrics=lambda: {
                "backhaul:publication_failures_total{reason=unreachable}": float(self.failed)
            },
        )

    def _stop(self) -> None:
        self.up = False

    def _start(self) -> None:
        self.up, self.published, self.lookups = True, 0, 0

    def _complete(self, prompt: list[int], *, max_tokens: int, transfer: Any) -> None:
        assert len(prompt) > SHAPE.grid, "a prompt below one block is looked up nowhere"
        self.published += transfer["backhaul"].get("publish", True)
        self.lookups += 1

    def run(self, prompt: list[int], *, u_end: int, hints: Any, **sampling: Any) -> None:
        assert SHAPE.grid <= u_end < len(prompt) and hints["policy"] == "both"
        assert sampling["min_tokens"] > SHAPE.grid, "decode passes a boundary"
        if self.up:
            self.published += 2
        else:
            self.failed += 1
            self.stale_workers.clear()


def test_greetings_leave_nothing_in_the_arm_s_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = FakePair()
    monkeypatch.setattr(real.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        real, "scrape", lambda *_: {"backhaul:store_lookups_total": float(pair.lookups)}
    )
    RealArms(cast(Pair, pair), SHAPE)._fresh(Arm(source=Source.REAL, workload="w", policy="both"))
    assert pair.up and pair.published == 0
    assert pair.lookups == 2, "both engines have asked the new store"
    assert not pair.stale_workers, "neither worker takes the new store for the old one"


class FakeChannel:
    """A daemon with a name for each life."""

    def __init__(self) -> None:
        self.life = 1
        self.up = True
        self.called: list[str] = []

    def call(self, method: str, request: Any, timeout_s: float, **_: Any) -> Any:
        if not self.up:
            raise StoreUnavailable("connection refused")
        self.called.append(method)
        return store_pb2.HelloReply(instance_id=f"{self.life}", agent_name=f"{self.life}")


def test_a_client_that_missed_the_store_reads_from_the_next_one_s_memory() -> None:
    """What the greetings rely on: without the failed call a lease of the new store would be read
    from the old one's memory."""
    channel = FakeChannel()
    keeper = SessionKeeper(cast(Any, channel), "worker")
    agent = SimpleNamespace(add_peer=lambda *_: None, remove_peer=lambda _: None)
    keeper.attach(cast(NixlAgent, agent))
    deadline = time.monotonic() + 60
    assert keeper.peer(keeper.current(deadline), deadline) == "1"
    channel.up = False
    with pytest.raises(StoreUnavailable):
        keeper.call("Reserve", store_pb2.ReserveRequest(), deadline)
    channel.up, channel.life = True, 2
    assert keeper.peer(keeper.current(deadline), deadline) == "2"


@pytest.mark.parametrize(("kept", "said"), [(None, False), (0, False), (3, False), (5, True)])
def test_a_real_engine_is_told_of_rewriting_only_what_holds_for_its_own_reply(
    kept: int | None, said: bool
) -> None:
    turn = Turn(
        request="a", prompt=(Span("p", 0, 9),), output=(Span("o", 0, 5),), verbatim_tokens=kept
    )
    told = real.hints(Arm(source=Source.REAL, workload="w", policy="boundaries"), turn, "c")
    assert ("rewrites" in told) is said
    assert told.get("rewrites", []) == []


def test_no_run_of_an_arm_inherits_what_another_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines outlive arms, and keep by client which ends matched; the second attempt at an arm is
    a run of its own."""
    arm = Arm(source=Source.REAL, workload="w" * 200, policy="auto")
    turns = [Turn(request=n, prompt=(Span(n, 0, 9),), output=(Span("o", 0, 5),)) for n in "ab"]
    arms = RealArms(cast(Pair, FakePair()), SHAPE)
    told: list[Mapping[str, Any]] = []

    def ask(hints: Mapping[str, Any], turn: Turn, *_: Any) -> tuple[Any, float, float]:
        told.append(hints)
        tokens = [97] * turn.output_tokens
        return SimpleNamespace(decode=SimpleNamespace(tokens=tokens)), 0.0, 1.0

    line = RequestResult(arm=arm, request="r", prompt_tokens=9)
    unanswered = iter([1.0, 0.0, 0.0])
    monkeypatch.setattr(arms, "_fresh", lambda _: None)
    monkeypatch.setattr(arms, "_ask", ask)
    monkeypatch.setattr(real, "scrape", lambda *_: defaultdict(float))
    monkeypatch.setattr(real, "request_result", lambda *_: line)
    monkeypatch.setattr(real, "_unanswered", lambda _: next(unanswered))
    arms.run(arm, turns)
    arms.run(arm, turns)
    read = [parse_hints(dict(hints), 9) for hints in told]
    assert not any(hints.rejected for hints in read)
    assert len(read) == 3 * len(turns)
    runs = [{hints.client for hints in read[start : start + 2]} for start in (0, 2, 4)]
    assert all(len(run) == 1 for run in runs), "requests of one run teach each other"
    assert len(set.union(*runs)) == 3 and "" not in set.union(*runs)


def test_an_arm_in_which_the_store_did_not_answer_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm = Arm(source=Source.REAL, workload="w", policy="both")
    said = iter([([], 2.0), ([], 1.0), ([ArmResult(arm=arm, seconds=1.0, requests=0)], 0.0)])
    arms = RealArms(cast(Pair, FakePair()), SHAPE)
    monkeypatch.setattr(arms, "_once", lambda *_: next(said))
    (only,) = arms.run(arm, ())
    assert isinstance(only, ArmResult)
    monkeypatch.setattr(arms, "_once", lambda *_: ([], 4.0))
    with pytest.raises(TimeoutError, match="left 4 publications of arm w both unanswered, 3 times"):
        arms.run(arm, ())
