"""Workers' health and load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.protocols.errors import ConfigError
from backhaul.proxy.pool import FAILURES_UNTIL_UNHEALTHY, Health, Pool
from backhaul.proxy.settings import Policy, ProxySettings, parse_urls


@given(st.lists(st.booleans()))
def test_health_follows_the_last_checks(checks: list[bool]) -> None:
    health = Health()
    for ok in checks:
        health = health.observed(ok=ok)
    last = checks[-FAILURES_UNTIL_UNHEALTHY:]
    down = len(last) == FAILURES_UNTIL_UNHEALTHY and not any(last)
    assert health.healthy is not down


def test_a_refused_connection_counts_in_full_until_a_check_succeeds() -> None:
    health = Health().refused()
    assert not health.healthy
    assert health.known_healthy is False, "also where it was refused from the start"
    assert not health.observed(ok=False).healthy
    assert health.observed(ok=True) == Health(told=True)


def test_load_is_given_back_however_a_request_ends() -> None:
    pool = Pool("decode", ["http://a", "http://b"], Policy.LEAST_LOADED)
    first = pool.choose(b"")
    assert first is not None
    with pytest.raises(RuntimeError), first.busy():
        assert pool.choose(b"") is not first
        raise RuntimeError
    assert first.in_flight == 0


def test_no_worker_is_chosen_twice_for_one_request() -> None:
    pool = Pool("decode", ["http://a", "http://b"], Policy.PREFIX_STICKY)
    tried = []
    while (worker := pool.choose(b"k", tried)) is not None:
        tried.append(worker)
    assert len(tried) == len(set(tried)) == 2


def test_addresses() -> None:
    assert parse_urls(["http://a:1/, https://b/x", "http://[::1]:2"]) == (
        "http://a:1", "https://b/x", "http://[::1]:2",
    )  # fmt: skip


@pytest.mark.parametrize("text", ["a:1", "ftp://a", "http://", "http://a:x", "http://a?b", ""])
def test_an_unreadable_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        parse_urls([text])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefill": ()}, "--prefill"),
        ({"decode": ("http://d", "http://d")}, "twice"),
        ({"retries": -1}, "retries is -1"),
        ({"prefill_timeout_s": 0.0}, "prefill timeout is 0"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, object], words: str) -> None:
    settings: dict[str, object] = {"prefill": ("http://p",), "decode": ("http://d",)}
    with pytest.raises(ConfigError, match=words):
        ProxySettings(**(settings | change))  # type: ignore[arg-type]


def test_nobody_is_told_to_be_healthy_before_a_check() -> None:
    health = Health()
    assert health.healthy and health.known_healthy is None
    assert health.observed(ok=True).known_healthy is True
    assert health.observed(ok=False).known_healthy is None  # it may have been a busy engine
    assert health.observed(ok=False).observed(ok=False).known_healthy is False
    assert health.refused().known_healthy is False  # also where nothing ever listened there
    assert health.observed(ok=True).observed(ok=False).known_healthy is True


@pytest.mark.parametrize("policy", Policy)
def test_asking_whether_another_is_left_takes_no_turn(policy: Policy) -> None:
    asked, plain = (Pool("decode", ["http://a", "http://b"], policy) for _ in range(2))
    for _ in range(4):
        worker, other = asked.choose(b""), plain.choose(b"")
        assert worker is not None and other is not None and worker.url == other.url
        assert asked.has_other({worker})
        assert not asked.has_other(set(asked.workers))


def test_by_default_a_second_prefill_worker_has_time_after_a_silent_one() -> None:
    two = ProxySettings(prefill=("http://p", "http://q"), decode=("http://d",))
    assert two.prefill_timeout_s >= (two.retries + 1) * two.first_token_timeout_s
    assert not two.remarks()
    short = replace(two, prefill_timeout_s=two.first_token_timeout_s)
    assert "no other prefill worker" in short.remarks()[0]
    assert not replace(short, retries=0).remarks()
    assert not replace(short, prefill=("http://p",)).remarks()
