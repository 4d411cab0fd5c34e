"""Deployments without a way back: they say so, decode ends follow the option, U_end goes on.

Where the engines' kinds are known, by option or by a sibling's role, it is said before any request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from harness import BLOCK, Pair, SimEngine, new_uri
from sim_kit import eventually, kinds, tokens

from backhaul.connector import connector, presence
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import StoreDenied, StoreRejected, StoreUnavailable
from backhaul.transfer.base import Store

B = BLOCK
DECODE_END = CheckpointKind.DECODE_END
WITHHELD = "publication_failures|no_publication_path"
PATHLESS = "pathless_publications"


class Lines(logging.Handler):
    """What the connector says about the path."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "publication path" in record.getMessage():
            self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    handler, level = Lines(), presence.logger.level
    presence.logger.addHandler(handler)
    presence.logger.setLevel(logging.INFO)
    yield handler.lines
    presence.logger.setLevel(level)
    presence.logger.removeHandler(handler)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(presence, "_NUDGE_S", 0.0)
    monkeypatch.setattr(presence, "_GRACE_S", 0.0)
    one = Pair(new_uri())
    yield one
    one.close()


def knows(engine: SimEngine, state: presence.PathState) -> None:
    """Wait until the engine has heard from the store."""
    eventually(lambda: engine.backhaul._half._presence._known.state is state)


def of_decode(said: list[str]) -> list[str]:
    """Without the line in which a consumer says that it publishes nothing."""
    return [line for line in said if "kv_consumer publishes nothing" not in line]


def without_path(engine: SimEngine) -> tuple[int, int]:
    """D_ends withheld for want of a path, and those published all the same."""
    return int(engine.counters[WITHHELD]), int(engine.counters[PATHLESS])


def pinned(engine: SimEngine) -> int:
    return engine.backhaul._half.gauges()["pins"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("no_path", ["disable", "report"])
def test_a_producer_without_loaders(
    pair: Pair, said: list[str], no_path: str, asynchronous: bool
) -> None:
    decode = pair.engine(
        name="decode", role="kv_producer", asynchronous=asynchronous, options={"no_path": no_path}
    )
    knows(decode, presence.PathState.NO_LOADER)
    name = decode.submit(tokens(3 * B + 2, 1), 2 * B, u_end=2 * B)
    most = 0
    while decode.step():
        most = max(most, pinned(decode)) if len(decode.requests[name].output_token_ids) else most
    decode.check_idle()
    # One D_end is counted once: as a failure, or as a publication that nobody can load.
    reported = no_path == "report"
    assert without_path(decode) == (not reported, reported)
    published = [f"{name}|decode_end" for name in ("publications", "checkpoints_published")]
    assert [decode.counters[name] for name in published] == [reported] * 2
    record = decode.finished[name].params["backhaul"]
    assert record["decode_end_reason"] == "no_publication_path"
    assert record["publishing_decode_end"] == reported
    found = {kind for _, each in kinds(pair) for kind in each}
    assert CheckpointKind.INPUT_END in found, "U_end needs no way back"
    assert (DECODE_END in found) == (no_path == "report")
    assert (most > 0) == (no_path == "report"), "a disabled D_end pins nothing"
    eventually(lambda: bool(said))
    assert len(said) == 1 and "no other engine that loads" in said[0]
    pair.check_idle()


def test_engines_of_two_stores_have_no_path(pair: Pair, said: list[str]) -> None:
    """Each store works, and neither engine can know of the other."""
    elsewhere = Pair(new_uri())
    prefill = elsewhere.engine(name="prefill", role="kv_consumer")
    decode = pair.engine(name="decode", role="kv_producer")
    knows(decode, presence.PathState.NO_LOADER)
    first = decode.run(tokens(3 * B + 2, 1), 2 * B, u_end=2 * B)
    decode.check_idle()
    assert without_path(decode) == (0, 1)
    eventually(lambda: bool(of_decode(said)))
    assert len(of_decode(said)) == 1 and "and this store" in of_decode(said)[0]
    resumed = prefill.run(first.history + tokens(5, 4), 3)
    assert resumed.loaded == 0 and resumed.params["backhaul"]["candidates"] == []
    elsewhere.close()


@pytest.mark.parametrize("no_path", ["disable", "report"])
def test_a_decode_engine_that_starts_first_does_not_give_up(
    pair: Pair, said: list[str], no_path: str
) -> None:
    decode = pair.engine(name="decode", role="kv_producer", options={"no_path": no_path})
    knows(decode, presence.PathState.NO_LOADER)
    first = decode.run(tokens(3 * B + 2, 1), 2 * B)
    reported = no_path == "report"
    assert without_path(decode) == (not reported, reported)
    prefill = pair.engine(name="prefill", role="kv_consumer")
    knows(prefill, presence.PathState.NO_LOADER)
    # The next request is withheld as well, or not: but it makes the engine ask.
    decode.run(tokens(3 * B + 2, 2), 2 * B)
    knows(decode, presence.PathState.OPEN)
    decode.check_idle()
    before = without_path(decode)
    second = decode.run(tokens(3 * B + 2, 3), 2 * B)
    decode.check_idle()
    assert without_path(decode) == before and before[reported] > 0
    assert second.params["backhaul"]["decode_end_reason"] is None
    resumed = prefill.run(second.history + tokens(5, 4), 3)
    assert resumed.loaded == (len(second.history) - 1) // B * B
    lines = of_decode(said)
    assert len(lines) == 2 and "path found" in lines[1]
    # The first one's D_end was published for whoever comes later; withheld, its P_end is left.
    deep = (len(first.history) - 1) // B * B
    assert prefill.run(first.history + tokens(5, 4), 3).loaded == (deep if reported else 3 * B)
    pair.check_idle()


@pytest.mark.parametrize(
    ("sibling", "options", "advised"),
    [
        ("kv_both", {}, True),
        ("kv_both", {"worker_kind": "prefill"}, False),
        ("kv_producer", {}, False),
        (False, {}, False),
    ],
)
def test_siblings_that_say_nothing_of_the_engine_s_kind_lead_to_advice(
    pair: Pair,
    caplog: pytest.LogCaptureFixture,
    sibling: bool | str,
    options: dict[str, Any],
    advised: bool,
) -> None:
    caplog.set_level(logging.INFO, presence.logger.name)
    presence.logger.addHandler(caplog.handler)
    try:
        pair.engine(sibling=sibling, options=options)
    finally:
        presence.logger.removeHandler(caplog.handler)
    lines = [r.getMessage() for r in caplog.records if "set worker_kind" in r.getMessage()]
    assert bool(lines) == advised
    assert not lines or ("kv_both" in lines[0] and "\n" not in lines[0])


@pytest.mark.parametrize("no_path", ["disable", "report"])
def test_an_engine_that_prefills_itself_is_its_own_way_back(
    pair: Pair, said: list[str], no_path: str
) -> None:
    alone = pair.engine(options={"no_path": no_path})
    knows(alone, presence.PathState.NO_LOADER)
    alone.run(tokens(3 * B + 2, 1), 2 * B)
    alone.check_idle()
    assert DECODE_END in {kind for _, each in kinds(pair) for kind in each}
    assert without_path(alone) == (0, 0)
    assert said == []


def test_a_prompt_that_was_handed_over_needs_another_loader(pair: Pair, said: list[str]) -> None:
    decode = pair.engine(name="decode", sibling=True, options={"no_path": "disable"})
    prefill = pair.engine(name="prefill", sibling=True, role="kv_producer")
    knows(decode, presence.PathState.NO_LOADER)
    history = tokens(3 * B + 2, 1)
    prefill.submit(history[:-1], 1, stops=False, u_end=2 * B, params={"do_remote_decode": True},
                   handed_over=history[-1])  # fmt: skip
    prefill.drain()
    decode.run(history, 2 * B, params={"do_remote_prefill": True})
    decode.check_idle()
    assert without_path(decode) == (1, 0)
    found = {kind for _, each in kinds(pair) for kind in each}
    assert DECODE_END not in found
    assert CheckpointKind.INPUT_END in found, "U_end of the prefill domain goes on"
    eventually(lambda: any("decode ends are not kept" in line for line in said))
    pair.check_idle()


def test_loaders_of_another_domain_are_named_with_the_field(
    pair: Pair, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pair.engine(name="prefill", role="kv_consumer")
    knows(other, presence.PathState.NO_LOADER)
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    decode = SimEngine(pair.uri, name="decode", role="kv_producer", options={"no_path": "disable"})
    knows(decode, presence.PathState.NO_LOADER)
    first = decode.run(tokens(3 * B + 2, 1), 2 * B)
    decode.check_idle()
    monkeypatch.delenv("PYTHONHASHSEED")
    assert without_path(decode) == (1, 0)
    assert other.run(first.history, 2).loaded == 0
    (line,) = of_decode(said)
    assert "1 in domain" in line and "hash_probe is" in line
    decode.close()


class _Refusing:
    """A store that does not let an engine join."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def __call__(self, store: Store) -> Store:
        join = store.join

        def refuse(*args: Any, **keywords: Any) -> Any:
            if self.error is not None:
                raise self.error
            return join(*args, **keywords)

        store.join = refuse  # type: ignore[method-assign]
        return store


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (StoreUnavailable("connection refused"), presence.PathState.UNREACHABLE),
        (StoreRejected("PERMISSION_DENIED: tenant"), presence.PathState.REFUSED),
    ],
)
def test_a_store_that_is_out_of_reach_at_start(
    pair: Pair, said: list[str], error: Exception, state: presence.PathState
) -> None:
    gate = _Refusing(error)
    decode = pair.engine(name="decode", options={"no_path": "disable"}, wrap=gate)
    knows(decode, state)
    decode.run(tokens(3 * B + 2, 1), 2 * B)
    decode.check_idle()
    assert without_path(decode) == (1, 0)
    assert len(said) == 1 and str(error) in said[0]
    gate.error = None
    decode.backhaul._half._presence.missed()
    knows(decode, presence.PathState.NO_LOADER)
    decode.run(tokens(3 * B + 2, 2), 2 * B)
    decode.check_idle()
    assert without_path(decode) == (1, 0), "its own prefill is a way back again"


def test_the_policy_without_decode_ends_says_and_counts_nothing(
    pair: Pair, said: list[str]
) -> None:
    decode = pair.engine(name="decode", role="kv_producer", options={"policy": "input_end"})
    knows(decode, presence.PathState.NO_LOADER)
    decode.run(tokens(3 * B + 2, 1), 2 * B, u_end=2 * B)
    decode.check_idle()
    assert (without_path(decode), said) == ((0, 0), [])


def test_hashes_that_nobody_can_match_are_said_at_start(
    pair: Pair, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "hashes_are_private", lambda algorithm: True)
    pair.engine(role="kv_both")
    assert len(said) == 1 and "PYTHONHASHSEED" in said[0]


def test_a_consumer_says_that_it_publishes_nothing(pair: Pair, said: list[str]) -> None:
    decode = pair.engine(name="decode", role="kv_consumer")
    knows(decode, presence.PathState.NO_LOADER)
    decode.run(tokens(3 * B + 2, 1), 2 * B, u_end=2 * B)
    decode.check_idle()
    assert (kinds(pair), without_path(decode)) == ([], (0, 0))
    assert len(said) == 1 and "kv_consumer publishes nothing" in said[0]


# -- kv_both everywhere: which engines prefill decides ------------------------------------------

PREFILL = {"name": "prefill", "sibling": "kv_producer"}
DECODE = {"name": "decode", "sibling": "kv_consumer"}


def no_way_back(said: list[str]) -> list[str]:
    return [line for line in said if "no publication path: " in line]


def decodes(engine: SimEngine, prompt: list[int]) -> None:
    """A decode leg: the prompt arrives computed."""
    engine.run(prompt, 2 * B, params={"do_remote_prefill": True})
    engine.check_idle()


@pytest.mark.parametrize("told", ["by a sibling's role", "by the option"])
def test_decode_engines_are_no_way_back_for_each_other(
    pair: Pair, said: list[str], told: str
) -> None:
    """Cause: role. Both decode engines load as well; the prefill engine does not."""
    kind: dict[str, Any] = {"sibling": "kv_consumer"}
    if told == "by the option":
        kind = {"sibling": True, "options": {"worker_kind": "decode"}}
    one, two = pair.engine(name="one", **kind), pair.engine(name="two", **kind)
    prefill = pair.engine(**PREFILL, role="kv_producer")
    for engine in (one, two):
        knows(engine, presence.PathState.NO_LOADER)
    eventually(lambda: len(no_way_back(said)) == 2)
    assert "1 that load from there only decode" in no_way_back(said)[-1]
    (line,) = [line for line in said if "no publication path to here" in line]
    assert "kv_producer loads nothing" in line
    decodes(one, tokens(3 * B + 2, 1))
    assert without_path(one) == (0, 1)
    u_end = prefill.submit(tokens(3 * B + 1, 2), 1, stops=False, u_end=2 * B,
                           params={"do_remote_decode": True}, handed_over=5)  # fmt: skip
    prefill.drain()
    assert prefill.finished[u_end].params["backhaul"]["input_end"]["outcome"] == "published"
    assert len(no_way_back(said)) == 2, "once per engine"
    pair.check_idle()


def test_one_prefill_engine_that_loads_is_a_way_back(pair: Pair, said: list[str]) -> None:
    engines = [pair.engine(**{**DECODE, "name": f"decode{n}"}) for n in range(2)]
    pair.engine(**PREFILL)
    for engine in engines:
        engine.backhaul._half._presence.missed()
        knows(engine, presence.PathState.OPEN)
    decodes(engines[0], tokens(3 * B + 2, 1))
    assert without_path(engines[0]) == (0, 0)


def test_decode_engines_of_another_store_say_so_at_start(pair: Pair, said: list[str]) -> None:
    """Cause: store URI."""
    elsewhere = Pair(new_uri())
    prefill = elsewhere.engine(**PREFILL)
    decode = pair.engine(**DECODE, options={"no_path": "disable"})
    pair.engine(**{**DECODE, "name": "other"})
    knows(decode, presence.PathState.NO_LOADER)
    eventually(lambda: len(no_way_back(said)) == 2)
    assert all(pair.uri in line and "this store" in line for line in no_way_back(said))
    decodes(decode, tokens(3 * B + 2, 1))
    assert without_path(decode) == (1, 0)
    assert prefill.backhaul._half._presence._known.state is presence.PathState.NO_LOADER
    elsewhere.close()


def test_prefill_engines_of_another_domain_are_named_although_decode_peers_fit(
    pair: Pair, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cause: domain."""
    prefill = pair.engine(**PREFILL)
    knows(prefill, presence.PathState.NO_LOADER)
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    decode = SimEngine(pair.uri, **DECODE)
    peer = SimEngine(pair.uri, **{**DECODE, "name": "peer"})
    monkeypatch.delenv("PYTHONHASHSEED")
    eventually(lambda: len(no_way_back(said)) == 2)
    assert all("1 in domain" in x and "hash_probe is" in x for x in no_way_back(said))
    decodes(decode, tokens(3 * B + 2, 1))
    assert without_path(decode) == (0, 1)
    decode.close()
    peer.close()


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_a_store_that_refuses_either_side(pair: Pair, said: list[str], refused: str) -> None:
    """Cause: ACL. Whoever is refused says so, and decode says that there is no way."""
    wall = {"wrap": _Refusing(StoreDenied("PERMISSION_DENIED: tenant"))}
    prefill = pair.engine(**PREFILL, **(wall if refused == "prefill" else {}))
    decode = pair.engine(**DECODE, **(wall if refused == "decode" else {}))
    eventually(lambda: len(no_way_back(said)) == 1)
    (line,) = no_way_back(said)
    if refused == "decode":
        knows(decode, presence.PathState.REFUSED)
        assert "refuses this engine (PERMISSION_DENIED" in line
    else:
        knows(prefill, presence.PathState.REFUSED)
        assert "no other engine that loads" in line
        eventually(lambda: any("to here" in x and "PERMISSION_DENIED" in x for x in said))
    decodes(decode, tokens(3 * B + 2, 1))
    assert without_path(decode) == (0, 1)


def test_where_nobody_said_it_the_first_requests_do(pair: Pair, said: list[str]) -> None:
    """``kv_both`` on every connector and no option."""
    one, two = pair.engine(name="one", sibling=True), pair.engine(name="two", sibling=True)
    knows(two, presence.PathState.OPEN)
    one.backhaul._half._presence.missed()
    knows(one, presence.PathState.OPEN)
    assert no_way_back(said) == []
    for n, engine in enumerate((one, two)):
        decodes(engine, tokens(3 * B + 2, n))
    one.backhaul._half._presence.missed()
    knows(one, presence.PathState.NO_LOADER)
    knows(two, presence.PathState.NO_LOADER)
    eventually(lambda: len(no_way_back(said)) == 2)
    # One that prefills opens the way.
    pair.engine(name="three", sibling=True)
    one.backhaul._half._presence.missed()
    knows(one, presence.PathState.OPEN)
