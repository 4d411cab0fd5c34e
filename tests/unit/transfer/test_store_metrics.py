"""The daemon's /metrics: every name of the table, known label values at 0, counters that only
rise, and numbers that follow what the index does."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from index_kit import GRID, STATE_BYTES, Driver, keys_of, make_layout
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.metrics import STORE, STORE_PREFIX, MetricType, known_label_values
from backhaul.transfer.daemon.metrics import EvictionTimer, RpcTimer, StatsCollector

D, U, J = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.SHARED_PREFIX

Series = tuple[str, frozenset[tuple[str, str]]]


class Scraped:
    """An index and what its daemon would expose."""

    def __init__(self, **more: Any) -> None:
        self.driver = Driver(**more)
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(self.driver.index.stats))
        self.driver.index.checkpoints.on_evicted = EvictionTimer(self._registry)
        RpcTimer(self._registry)

    def families(self) -> dict[str, Any]:
        text = generate_latest(self._registry).decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name, metric in STORE.items():  # when each series began: the library's own
            if metric.type is MetricType.HISTOGRAM:
                families.pop(f"{STORE_PREFIX}{name}_created", None)
        return families

    def samples(self) -> dict[Series, float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families().values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples()[STORE_PREFIX + name, frozenset(labels.items())]


def test_every_metric_is_there_with_its_type_and_known_labels() -> None:
    store = Scraped()
    families = store.families()
    assert families.keys() == {STORE_PREFIX + name for name in STORE}
    for name, metric in STORE.items():
        family = families[STORE_PREFIX + name]
        assert (family.type, family.documentation) == (metric.type.value, metric.help)
        suffix = "_count" if metric.type is MetricType.HISTOGRAM else ""
        wanted = STORE_PREFIX + metric.exposed(name) + suffix
        found = {
            tuple(sample.labels.get(label.name) for label in metric.labels)
            for sample in family.samples
            if sample.name == wanted
        }
        assert found >= set(known_label_values(metric))
        if all(label.values for label in metric.labels):
            assert found == set(known_label_values(metric))


def test_kinds_and_shared_checkpoints_are_told_apart() -> None:
    store = Scraped()
    store.driver.publish("ab", D)
    store.driver.publish("abc", U, D)
    store.driver.publish("ab", U)
    store.driver.publish("xy", J)
    assert store("retained_checkpoints", kind="decode_end") == 2
    assert store("retained_checkpoints", kind="shared_prefix") == 1
    assert store("retained_state_bytes", kind="decode_end") == 2 * STATE_BYTES
    assert store("logical_ends_total", kind="decode_end") == 2
    assert store("logical_ends_total", kind="input_end") == 2
    assert store("duplicate_ends_total", kind="input_end") == 2
    assert store("duplicate_ends_total", kind="decode_end") == 0
    assert store("checkpoints_created_total") == 3
    assert store("checkpoints_merged_total") == 1
    assert store("domain_checkpoints", domain=store.driver.domain) == 3


def test_the_primary_kind_moves_with_a_deeper_meaning() -> None:
    """What was a U_end is named by the D_end that comes to lie on it."""
    store = Scraped()
    store.driver.publish("ab", U)
    assert store("retained_state_bytes", kind="input_end") == STATE_BYTES
    store.driver.publish("ab", D)
    assert store("retained_state_bytes", kind="input_end") == 0
    assert store("retained_state_bytes", kind="decode_end") == STATE_BYTES


def test_evictions_say_what_went_and_how_old_it_was() -> None:
    store = Scraped(capacity_bytes=3 * STATE_BYTES)
    driver = store.driver
    driver.publish("ab", D)
    driver.now = 7.0
    driver.publish("cd", U)
    driver.publish("ef", U)
    assert store("evictions_total", reason="capacity") == 1
    assert store("evicted_checkpoints_total", kind="decode_end") == 1
    assert store("evicted_state_bytes_total", kind="decode_end") == STATE_BYTES
    assert store("evicted_age_seconds_count", kind="decode_end") == 1
    assert store("evicted_age_seconds_sum", kind="decode_end") == 7.0
    driver.lookup("ab")
    assert store("unconsumable_total", reason="evicted") == 1
    assert store("candidates_total", tag="known") == 1
    assert store("candidates_total", tag="retained") == 0


def test_a_rewritten_history_is_a_mismatch_of_what_it_left() -> None:
    store = Scraped()
    store.driver.publish("ab", U)
    store.driver.publish("abcd", D)
    answer = store.driver.lookup("abxyz", lease_s=0)
    assert [(m.boundary, m.reason) for m in answer.matches] == [
        (4 * GRID, "hash_mismatch"),
        (2 * GRID, None),
    ]
    tags = {t: store("candidates_total", tag=t) for t in ("known", "retained", "hash_matched")}
    assert tags == {"known": 2, "retained": 2, "hash_matched": 1}
    assert store("candidates_total", tag="consumable") == 1
    assert store("unconsumable_total", reason="hash_mismatch") == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abcd", []),  # it extends the prompt's own tokens: they match
        ("ab", []),  # nothing of it lies inside the prompt
        ("xbcde", []),  # nothing of the history matches
        ("abxd", [4]),
    ],
)
def test_only_what_diverges_inside_the_prompt_is_a_mismatch(
    prompt: str, expected: list[int]
) -> None:
    driver = Driver()
    driver.publish("ab", U)
    driver.publish("abcd", D)
    matches = driver.lookup(prompt, lease_s=0).matches
    assert [m.boundary // GRID for m in matches if m.reason == "hash_mismatch"] == expected


def test_what_goes_on_from_a_shared_prefix_is_somebody_else_s() -> None:
    driver = Driver()
    driver.publish("ab", J)
    driver.publish("abcd", D)
    assert [m.reason for m in driver.lookup("abxyz", lease_s=0).matches] == [None]


def test_who_extends_an_evicted_checkpoint_extends_its_parent() -> None:
    driver = Driver()
    for tokens in ("a", "ab", "abc"):
        driver.publish(tokens, D)
    middle = next(c for c in driver.index.checkpoints.visible if c.boundary == 2 * GRID)
    driver.index.checkpoints.evict(middle, driver.now)
    driver.index.check()
    reasons = {m.boundary // GRID: m.reason for m in driver.lookup("axyz", lease_s=0).matches}
    assert reasons == {3: "hash_mismatch", 1: None}


def test_attention_and_state_reach_apart() -> None:
    """Streamed ahead: attention objects without a state; the extents say so."""
    driver = Driver()
    driver.publish("ab", U)
    keys = [key for key in keys_of(driver.layout, "abcd") if key.group == 0]
    driver.commit("stream", driver.reserve("stream", keys))
    answer = driver.lookup("abcdef", lease_s=0)
    assert answer.extent == (4 * GRID, 2 * GRID)
    assert driver.lookup("xyz", lease_s=0).extent == (0, 0)


def test_an_object_that_ranks_hold_alike_counts_as_there_for_all_of_them() -> None:
    """One of them stores it."""
    layout = make_layout(ranks=2)
    latent = msgspec.structs.replace(layout.groups[0], copies=2)
    layout = msgspec.structs.replace(layout, groups=(latent, layout.groups[1]))
    driver = Driver(layout=layout)
    for rank in (0, 1):
        keys = keys_of(layout, "ab", rank)
        own = [key for key in keys if layout.groups[key.group].owner(rank) == rank]
        driver.commit("p", driver.reserve("p", own), rank=rank)
    assert driver.lookup("abc", lease_s=0).extent == (2 * GRID, 2 * GRID)


@pytest.mark.parametrize("seed", range(5))
def test_counters_never_fall_and_series_stay(seed: int) -> None:
    r = random.Random(seed)
    store = Scraped(capacity_bytes=12 * STATE_BYTES)
    driver = store.driver
    driver.open("other")
    counters = {
        STORE_PREFIX + metric.exposed(name)
        for name, metric in STORE.items()
        if metric.type is MetricType.COUNTER
    }
    last = store.samples()
    for _ in range(60):
        driver.now += r.random()
        tokens = "".join(r.choice("ab") for _ in range(r.randrange(1, 5)))
        if r.random() < 0.5:
            driver.publish(tokens, *r.sample(list(CheckpointKind), r.randrange(1, 3)))
        else:
            driver.lookup(tokens, lease_s=r.choice([0, 0.1]))
        now = store.samples()
        assert now.keys() == last.keys()
        for series, value in last.items():
            name, _ = series
            if name in counters or name.endswith(("_bucket", "_count", "_sum")):
                assert now[series] >= value, series
        last = now
    driver.index.check()
    assert sum(n for (name, _), n in last.items() if name.endswith("evicted_checkpoints_total"))
