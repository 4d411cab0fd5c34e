from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import (
    ATTENTION_BYTES,
    GRID,
    STATE_BYTES,
    Driver,
    SortedQueue,
    chain,
    keys_of,
    make_layout,
    make_record,
    manifest_of,
)

from backhaul.protocols.checkpoint import (
    CheckpointKind,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
    Reason,
)
from backhaul.protocols.errors import StoreFull, StoreRejected
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.transfer.base import Grant, GrantStatus
from backhaul.transfer.entries import Checkpoint, NotKnown
from backhaul.transfer.index import BlockIndex

DECODE = CheckpointKind.DECODE_END
INPUT = CheckpointKind.INPUT_END


def statuses(grants: list[Grant]) -> list[GrantStatus]:
    return [grant.status for grant in grants]


# -- visibility -------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_found_with_its_kind_producer_and_age() -> None:
    driver = Driver()
    assert driver.publish("abc", INPUT).visible
    driver.now = 5.0
    (match,) = driver.lookup("abcd").matches
    assert (match.boundary, match.kinds, match.consumable) == (12, (INPUT,), True)
    assert (match.producer, match.age_s, match.reason) == ("engine-1", 5.0, None)
    driver.index.check()


def test_nothing_is_visible_before_every_rank_committed() -> None:
    driver = Driver(ranks=2)
    for rank in (0, 1):
        assert driver.consumable("ab") == []
        grants = driver.reserve("p", keys_of(driver.layout, "ab", rank))
        result = driver.commit("p", grants, manifest_of("ab"), rank=rank)
        assert result.visible == (rank == 1) and result.missing == ()
        driver.index.check()
    assert driver.consumable("ab") == [2]


def test_a_commit_names_what_is_missing_and_registers_nothing() -> None:
    driver = Driver()
    keys = keys_of(driver.layout, "ab")
    grants = driver.reserve("p", keys)
    result = driver.commit("p", grants[:-1], manifest_of("ab"))
    assert result.missing == (keys[-1],) and not result.visible
    (part,) = driver.lookup("ab").matches
    assert (part.boundary, part.reason) == (2 * GRID, Reason.STATE_MISSING)
    assert (part.retained, part.hash_matched, part.kinds) == (False, False, ())
    assert driver.commit("p", grants[-1:], manifest_of("ab")).visible
    assert driver.consumable("ab") == [2]


def test_a_state_without_its_attention_is_no_checkpoint() -> None:
    driver = Driver()
    grants = driver.reserve("p", keys_of(driver.layout, "ab"))
    driver.commit("p", grants[-1:])
    (part,) = driver.lookup("abc").matches
    assert (part.boundary, part.reason) == (2 * GRID, Reason.ATTENTION_MISSING)
    assert driver.index.stats().counters["unconsumable_attention_missing"] == 1
    driver.commit("p", grants[:1])
    deeper, shallower = driver.lookup("abc").matches
    assert (deeper.boundary, deeper.reason) == (2 * GRID, Reason.ATTENTION_MISSING)
    assert (shallower.boundary, shallower.reason) == (GRID, Reason.STATE_MISSING)
    driver.commit("p", grants[1:-1])
    assert driver.lookup("abc").matches == (), "all is there and nothing was made of it"


def test_a_branch_has_the_attention_that_it_shares_and_no_state() -> None:
    driver = Driver()
    driver.publish("a")
    driver.publish("abcd")
    found = driver.lookup("abcx").matches
    assert [(match.boundary // GRID, match.reason) for match in found] == [
        (4, Reason.HASH_MISMATCH),
        (3, Reason.STATE_MISSING),
        (1, None),
    ]


def test_attention_may_be_streamed_ahead() -> None:
    driver = Driver()
    attention = [key for key in keys_of(driver.layout, "abc") if key.group == 0]
    assert driver.commit("p", driver.reserve("p", attention[:2])) == (False, ())
    assert driver.commit("p", driver.reserve("p", attention[2:])) == (False, ())
    rest = driver.reserve("p", keys_of(driver.layout, "abc"))
    assert statuses(rest) == [GrantStatus.PRESENT] * 3 + [GrantStatus.GRANTED]
    assert driver.commit("p", rest, manifest_of("abc")).visible


def test_repeating_a_commit_is_harmless() -> None:
    driver = Driver(ranks=2)
    grants = driver.reserve("p", keys_of(driver.layout, "a"))
    for _ in range(2):
        assert driver.commit("p", grants, manifest_of("a")) == (False, ())
        driver.index.check()
    assert driver.index.stats().counters["stale_commits"] == 0


def test_a_second_end_on_the_same_boundary_merges_its_kind() -> None:
    driver = Driver()
    driver.publish("ab", DECODE)
    assert driver.publish("ab", INPUT, name="other").visible
    (match,) = driver.lookup("ab").matches
    assert match.kinds == (DECODE, INPUT)
    counters = driver.index.stats().counters
    assert (counters["checkpoints_created"], counters["checkpoints_merged"]) == (1, 1)


def test_a_pending_checkpoint_ends_with_its_last_publication() -> None:
    driver = Driver(ranks=2)
    for name in ("p", "q"):
        driver.commit(name, driver.reserve(name, keys_of(driver.layout, "a")), manifest_of("a"))
    driver.abandon("p")
    assert driver.lookup("a").matches[0].reason is Reason.UNCOMMITTED
    driver.abandon("q")
    assert driver.lookup("a").matches == ()
    driver.index.check()


# -- reservations -----------------------------------------------------------------------------


def test_a_second_writer_is_told_busy_then_present() -> None:
    driver = Driver()
    keys = keys_of(driver.layout, "a")
    grants = driver.reserve("p", keys)
    assert statuses(driver.reserve("q", keys)) == [GrantStatus.BUSY] * 2
    driver.commit("p", grants)
    assert statuses(driver.reserve("q", keys)) == [GrantStatus.PRESENT] * 2
    assert driver.used_bytes == ATTENTION_BYTES + STATE_BYTES


def test_reserving_again_gives_the_same_grant() -> None:
    driver = Driver()
    keys = keys_of(driver.layout, "ab")
    first = driver.reserve("p", keys)
    assert driver.reserve("p", keys) == first
    assert driver.reserve("p", [keys[0], keys[0]]) == [first[0], first[0]]


def test_one_call_may_name_a_key_twice() -> None:
    driver = Driver()
    key = keys_of(driver.layout, "a")[0]
    first, second = driver.reserve("p", [key, key])
    assert first == second and driver.used_bytes == ATTENTION_BYTES


def test_abandoning_frees_reservations_and_is_repeatable() -> None:
    driver = Driver()
    driver.reserve("p", keys_of(driver.layout, "abc"))
    driver.abandon("p")
    driver.abandon("p")
    assert driver.used_bytes == 0
    driver.index.check()


def test_a_stale_token_is_missing_and_never_accepted() -> None:
    driver = Driver()
    (key,) = keys_of(driver.layout, "a")[:1]
    (old,) = driver.reserve("p", [key])
    driver.now = 60.0
    (new,) = driver.reserve("q", [key])
    assert new.status is GrantStatus.GRANTED and new.token != old.token
    assert driver.commit("p", [old]).missing == (key,)
    assert statuses(driver.reserve("p", [key])) == [GrantStatus.BUSY]
    assert driver.commit("q", [new]).missing == ()
    # The bytes of q count now, whatever p says about its own.
    assert driver.commit("p", [old]).missing == ()
    driver.publish("a")
    lease = driver.lookup("a").lease
    assert lease is not None
    assert driver.index.locate(lease, [key], driver.now)[0].checksum == new.token + 1000
    assert driver.index.stats().counters["stale_commits"] == 2


def test_a_token_of_another_publication_is_not_accepted() -> None:
    driver = Driver()
    grants = driver.reserve("p", keys_of(driver.layout, "a"))
    assert len(driver.commit("q", grants).missing) == 2
    assert driver.commit("p", grants).missing == ()


@pytest.mark.parametrize("sign_of_life", ["reserve", "commit", "keep_alive"])
def test_a_publication_lives_on_by_each_sign_of_its_writer(sign_of_life: str) -> None:
    driver = Driver()
    keys = keys_of(driver.layout, "a")
    grants = driver.reserve("p", keys)
    driver.now = 59.0
    if sign_of_life == "reserve":
        driver.reserve("p", [])
    elif sign_of_life == "commit":
        driver.commit("p", [])
    else:
        assert driver.index.keep_alive([PublicationId("p")], driver.now) == []
    driver.now = 118.0
    assert driver.commit("p", grants).missing == ()


def test_a_silent_publication_runs_out() -> None:
    driver = Driver()
    grants = driver.reserve("p", keys_of(driver.layout, "a"))
    driver.now = 60.0
    driver.index.expire(driver.now)
    assert driver.used_bytes == 0
    assert driver.index.keep_alive([PublicationId("p")], driver.now) == ["p"]
    assert len(driver.commit("p", grants, manifest_of("a")).missing) == 2
    assert driver.index.stats().counters["expired_publications"] == 1


def test_space_of_a_silent_publication_is_not_reused_at_once() -> None:
    driver = Driver(quarantine_s=10.0)
    (grant,) = driver.reserve("p", keys_of(driver.layout, "a")[:1])
    driver.now = 60.0
    (other,) = driver.reserve("q", keys_of(driver.layout, "a")[:1])
    assert other.offset != grant.offset
    assert driver.used_bytes == 2 * ATTENTION_BYTES
    driver.index.check()
    driver.now = 70.0
    driver.index.expire(driver.now)
    assert driver.used_bytes == ATTENTION_BYTES


def test_time_that_runs_backwards_stands_still() -> None:
    driver = Driver()
    driver.now = 100.0
    driver.publish("a")
    driver.now = 3.0
    assert driver.lookup("a").matches[0].age_s == 0.0
    driver.reserve("p", keys_of(driver.layout, "b"))
    driver.now = 159.0
    assert driver.index.keep_alive([PublicationId("p")], driver.now) == []


# -- eviction ---------------------------------------------------------------------------------

ONE = ATTENTION_BYTES + STATE_BYTES
"""A checkpoint of one block."""


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    driver = Driver(3 * ONE)
    for driver.now, tokens in enumerate("abc"):
        driver.publish(tokens)
    driver.now = 10.0
    driver.lookup("a", lease_s=0)
    assert driver.publish("d").visible
    assert [bool(driver.consumable(tokens)) for tokens in "abcd"] == [True, False, True, True]
    driver.index.check()


def test_a_hit_also_counts_for_what_the_checkpoint_extends() -> None:
    driver = Driver(4 * ONE)
    driver.publish("a")
    driver.now = 1.0
    driver.publish("x")
    driver.now = 2.0
    driver.publish("ab")
    driver.now = 3.0
    driver.publish("y")
    assert driver.visible() == {1, 2} and driver.consumable("x")
    driver.now = 4.0
    driver.lookup("abc", above=GRID, lease_s=0)
    driver.publish("z")
    assert driver.consumable("ab") == [2, 1]
    assert driver.consumable("x") == []


def test_a_read_counts_as_use() -> None:
    driver = Driver(2 * ONE)
    driver.publish("a")
    lease = driver.lookup("a", lease_s=50).lease
    driver.now = 1.0
    driver.publish("b")
    driver.now = 2.0
    assert lease is not None
    driver.index.locate(lease, keys_of(driver.layout, "a"), driver.now)
    driver.index.release([lease], driver.now)
    driver.publish("c")
    assert driver.consumable("a") and not driver.consumable("b")


def test_decode_ends_of_one_conversation_go_before_its_input_end() -> None:
    driver = Driver(3 * ONE + 2 * ATTENTION_BYTES)
    driver.publish("u", INPUT)
    driver.publish("ud", DECODE)
    driver.publish("udd", DECODE)
    driver.publish("z")
    # "ud" shares its attention with "udd", so only its state went, and that was enough with the
    # slack of two attention blocks.
    assert driver.consumable("udd") == [3, 1]


def test_shared_attention_outlives_the_checkpoints_that_go() -> None:
    driver = Driver(2 * ONE + 2 * ATTENTION_BYTES)
    driver.publish("a", DECODE)
    driver.publish("ab", DECODE)
    driver.now = 1.0
    driver.lookup("ab", lease_s=0)
    driver.publish("z")
    assert driver.consumable("ab") == [2]
    lease = driver.lookup("ab").lease
    assert lease is not None
    assert len(driver.index.locate(lease, keys_of(driver.layout, "ab"), driver.now)) == 3
    driver.index.check()


def test_nothing_leased_is_evicted() -> None:
    driver = Driver(ONE)
    driver.publish("a")
    driver.lookup("a", lease_s=10.0)
    assert GrantStatus.FULL in statuses(driver.reserve("p", keys_of(driver.layout, "b")))
    assert driver.consumable("a") == [1]
    driver.now = 10.0
    assert GrantStatus.FULL not in statuses(driver.reserve("p", keys_of(driver.layout, "b")))
    assert driver.consumable("a") == []


def test_nothing_that_an_open_publication_was_promised_is_evicted() -> None:
    driver = Driver(2 * ONE)
    driver.publish("a")
    keys = keys_of(driver.layout, "a")
    assert statuses(driver.reserve("holder", keys)) == [GrantStatus.PRESENT] * 2
    grants = driver.reserve("q", keys_of(driver.layout, "bc"))
    assert statuses(grants) == [GrantStatus.GRANTED, GrantStatus.GRANTED, GrantStatus.FULL]
    assert driver.consumable("a") == [1]


def test_present_objects_are_held_before_anything_is_evicted_for_the_absent_ones() -> None:
    driver = Driver(2 * ONE)
    driver.publish("a")
    driver.now = 1.0
    driver.publish("z")
    grants = driver.reserve("p", keys_of(driver.layout, "ab"))
    assert statuses(grants) == [GrantStatus.PRESENT] + [GrantStatus.GRANTED] * 2
    assert driver.commit("p", grants, manifest_of("ab")).visible
    driver.index.check()


def test_loose_objects_go_before_checkpoints() -> None:
    driver = Driver(3 * ONE)
    driver.publish("a")
    driver.now = 1.0
    driver.commit("p", driver.reserve("p", keys_of(driver.layout, "b")))
    driver.abandon("p")
    driver.publish("z")
    assert driver.index.stats().counters["evicted_loose_objects"] == 0
    driver.publish("y")
    assert driver.consumable("a") == [1]
    assert driver.index.stats().counters["evicted_loose_objects"] == 2
    assert driver.index.stats().counters["evictions_capacity"] == 0


def test_a_loose_object_serves_the_next_publication_that_needs_it() -> None:
    driver = Driver()
    driver.commit("p", driver.reserve("p", keys_of(driver.layout, "a")))
    driver.abandon("p")
    grants = driver.reserve("q", keys_of(driver.layout, "a"))
    assert statuses(grants) == [GrantStatus.PRESENT] * 2
    assert driver.commit("q", grants, manifest_of("a")).visible


def test_a_checkpoint_of_loose_objects_keeps_them() -> None:
    driver = Driver(2 * ONE)
    driver.commit("p", driver.reserve("p", keys_of(driver.layout, "a")))
    driver.abandon("p")
    assert driver.commit("q", [], manifest_of("a")).visible
    driver.index.check()
    driver.reserve("r", keys_of(driver.layout, "b"))
    assert driver.consumable("a") == [1]


def test_nothing_is_evicted_for_what_cannot_fit_anyway() -> None:
    driver = Driver(3 * ONE)
    driver.publish("a")
    driver.publish("b")
    driver.lookup("b", lease_s=50)
    grants = driver.reserve("p", keys_of(driver.layout, "tuvwxyz"))
    assert GrantStatus.FULL in statuses(grants)
    assert driver.consumable("a") == [1]
    assert driver.index.stats().counters["evictions_capacity"] == 0


def test_nothing_is_evicted_where_pinned_objects_leave_no_gap_wide_enough() -> None:
    driver = Driver(4 * ATTENTION_BYTES)
    keys = [keys_of(driver.layout, tokens)[0] for tokens in "abcd"]
    grants = driver.reserve("p", keys)
    driver.commit("p", grants)
    driver.abandon("p")
    driver.reserve("holder", [keys[1], keys[3]])
    wide = ObjectKey(0, 0, b"wide")
    wants = [(wide, 2 * ATTENTION_BYTES)]
    (grant,) = driver.index.reserve(driver.domain, PublicationId("q"), wants, driver.now)
    assert grant.status is GrantStatus.FULL
    assert driver.index.stats().counters["evicted_loose_objects"] == 0


def test_eviction_goes_on_until_the_freed_space_is_in_one_piece() -> None:
    driver = Driver(4 * ATTENTION_BYTES)
    keys = [keys_of(driver.layout, tokens)[0] for tokens in "abcd"]
    driver.commit("p", driver.reserve("p", keys))
    driver.abandon("p")
    driver.reserve("holder", [keys[3]])
    # Loosened in this order, the first two victims are not neighbours.
    for name, key in (("x", keys[0]), ("y", keys[2]), ("z", keys[1])):
        driver.reserve(name, [key])
        driver.abandon(name)
    wants = [(ObjectKey(0, 0, b"wide"), 2 * ATTENTION_BYTES)]
    (grant,) = driver.index.reserve(driver.domain, PublicationId("q"), wants, driver.now)
    assert grant.status is GrantStatus.GRANTED
    assert driver.index.stats().counters["evicted_loose_objects"] == 3
    driver.index.check()


def test_a_checkpoint_that_shares_all_its_objects_is_put_off() -> None:
    class Oldest:
        def order(self, checkpoints: Sequence[Checkpoint], now: float) -> list[Checkpoint]:
            return sorted(checkpoints, key=lambda one: one.serial)

    attention_only = CacheLayout(
        groups=(GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=GRID),), hash_tokens=GRID
    )
    driver = Driver(3 * ATTENTION_BYTES, layout=attention_only)
    driver.index.strategy = Oldest()
    for tokens in ("a", "z", "ab"):
        driver.publish(tokens)
    driver.reserve("p", keys_of(attention_only, "x"))
    assert driver.consumable("ab") == [2, 1] and driver.consumable("z") == []
    driver.reserve("p", keys_of(attention_only, "xyw"))
    assert driver.visible() == set()


def test_a_checkpoint_whose_eviction_could_free_nothing_stays() -> None:
    driver = Driver(3 * ONE)
    driver.publish("a")
    driver.now = 1.0
    driver.publish("z")
    driver.reserve("holder", keys_of(driver.layout, "a"))
    grants = driver.reserve("p", keys_of(driver.layout, "xy"))
    assert GrantStatus.FULL not in statuses(grants)
    assert driver.consumable("a") == [1] and driver.consumable("z") == []


def test_a_window_that_two_checkpoints_share_can_still_be_evicted() -> None:
    driver = Driver(16 * ONE, window_tokens=2 * GRID + 1)
    for end in range(1, 6):
        driver.publish("abcde"[:end])
    driver.reserve("p", [ObjectKey(0, 1, bytes([n])) for n in range(20)])
    driver.index.check()
    assert driver.visible() == set()


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.booleans())
def test_the_end_of_the_last_users_message_outlives_the_tool_loop_after_it(
    steps: list[int], looked_up: bool
) -> None:
    """The next user message rewrites the loop: of all its ends only that one still matches."""

    def converse(driver: Driver) -> None:
        history = "ab"
        driver.publish(history, INPUT, user_turn=True)
        for number, length in enumerate(steps):  # a call, then the tool's result
            for kind in (DECODE, INPUT):
                driver.now += 1
                history += chr(ord("c") + number) * length
                driver.publish(history, kind)
                if looked_up:
                    driver.consumable(history)

    roomy = Driver()
    converse(roomy)
    driver = Driver(roomy.used_bytes)
    converse(driver)
    kept = driver.index.domains[driver.domain].checkpoints
    for number in range(100):
        if chain("ab")[-1] not in kept:
            break
        assert driver.index.stats().counters["evicted_user_turns"] == 0
        driver.now += 1
        driver.publish(f"z{number}")
    assert chain("ab")[-1] not in kept and not [
        one for one in kept.values() if one.boundary > 2 * GRID
    ], "the loop went before it"
    assert driver.index.stats().counters["evicted_user_turns"] == 1


def test_the_order_of_eviction_can_be_exchanged() -> None:
    class Newest:
        def order(self, checkpoints: Sequence[Checkpoint], now: float) -> list[Checkpoint]:
            return sorted(checkpoints, key=lambda one: -one.created_at)

        def queue(self) -> SortedQueue:
            return SortedQueue(self)

    driver = Driver(2 * ONE, strategy=Newest())
    for driver.now, tokens in enumerate("abc"):
        driver.publish(tokens)
    assert driver.consumable("a") and driver.consumable("c") and not driver.consumable("b")


# -- lookup -----------------------------------------------------------------------------------


def test_matches_come_deepest_first_and_above_what_the_caller_has() -> None:
    driver = Driver()
    for tokens in ("a", "abcd", "ab"):
        driver.publish(tokens)
    assert driver.consumable("abcde") == [4, 2, 1]
    matches = driver.lookup("abcde", above=GRID).matches
    assert [match.boundary for match in matches] == [4 * GRID, 2 * GRID]
    assert driver.lookup("abcde", above=4 * GRID).lease is None


def test_another_prefix_matches_only_up_to_where_it_differs() -> None:
    driver = Driver()
    driver.publish("a")
    driver.publish("abc")
    assert driver.consumable("abx") == [1]
    assert driver.consumable("xbc") == []


def test_the_number_of_candidates_is_bounded_from_the_deep_end() -> None:
    driver = Driver()
    tokens = "abcdefghijklmnopqrst"
    for end in range(1, len(tokens) + 1):
        driver.publish(tokens[:end])
    assert driver.consumable(tokens) == list(range(20, 4, -1))


def test_an_evicted_checkpoint_is_remembered() -> None:
    driver = Driver(ONE)
    driver.publish("a", INPUT)
    driver.publish("b")
    (match,) = driver.lookup("a").matches
    assert (match.consumable, match.reason, match.kinds) == (False, Reason.EVICTED, (INPUT,))
    assert driver.lookup("a").lease is None
    driver.publish("a")
    assert driver.lookup("a").matches[0].consumable


def test_a_checkpoint_of_another_domain_is_named_as_such() -> None:
    driver = Driver()
    other = driver.open("other model")
    driver.publish("a", domain=other)
    answer = driver.lookup("a")
    (match,) = answer.matches
    assert (match.reason, match.field, match.domain) == (Reason.DOMAIN_MISMATCH, "model", other)
    assert answer.lease is None and not match.convertible
    assert driver.index.counters["candidates_consumable"] == 0
    assert driver.index.counters["unconsumable_domain_mismatch"] == 1
    assert driver.lookup("a", domain=other).matches[0].consumable


def test_of_several_other_domains_a_convertible_one_is_named() -> None:
    """Which has no field that forbids it; whatever order they were opened and filled in."""
    for first in (True, False):
        two, one = (make_record(layout=make_layout(ranks, pages=True)) for ranks in (2, 1))
        two = msgspec.structs.replace(two, tensor_parallel=2)
        driver = Driver()
        ours, convertible = (driver.index.open_domain(r, driver.now) for r in (two, one))
        strange = driver.open("other model")
        for domain in (convertible, strange) if first else (strange, convertible):
            driver.publish("a", domain=domain)
        (match,) = driver.lookup("a", domain=ours).matches
        assert (match.reason, match.field) == (Reason.DOMAIN_MISMATCH, "")
        assert match.domain == convertible and match.convertible
        # Consumable is what lies in an equal or a convertible domain.
        counters = driver.index.counters
        assert counters["candidates_consumable"] == 1
        assert counters["unconsumable_domain_mismatch"] == 0
        assert driver.index.domain_record(convertible) == one
    with pytest.raises(NotKnown):
        driver.index.domain_record(DomainId("nobody's"))


def test_an_announced_checkpoint_is_uncommitted_until_it_comes_or_time_is_up() -> None:
    driver = Driver()
    driver.publish("a")
    driver.index.announce(driver.domain, 3 * GRID, chain("abc")[-1], 5.0, driver.now)
    answer = driver.lookup("abcd")
    assert answer.awaited == (3 * GRID, 5.0)
    assert [(m.boundary // GRID, m.reason) for m in answer.matches] == [
        (3, Reason.UNCOMMITTED),
        (1, None),
    ]
    assert driver.lookup("abcd", above=3 * GRID).awaited is None
    driver.publish("abc")
    assert driver.lookup("abcd").awaited is None
    driver.index.announce(driver.domain, 4 * GRID, chain("abcd")[-1], 5.0, driver.now)
    driver.now = 5.0
    assert driver.lookup("abcd").awaited is None
    driver.index.check()


def test_announcing_again_moves_the_end_both_ways() -> None:
    driver = Driver()
    for ttl_s in (5.0, 20.0, 2.0):
        driver.index.announce(driver.domain, GRID, chain("a")[-1], ttl_s, driver.now)
        assert driver.lookup("a").awaited == (GRID, ttl_s)
    driver.now = 2.0
    assert driver.lookup("a").awaited is None


def test_a_checkpoint_half_committed_is_awaited() -> None:
    driver = Driver(ranks=2)
    driver.commit("p", driver.reserve("p", keys_of(driver.layout, "a")), manifest_of("a"))
    assert driver.lookup("a").awaited == (GRID, math.inf)


# -- leases -----------------------------------------------------------------------------------


def test_locate_answers_only_what_the_lease_covers() -> None:
    driver = Driver()
    driver.publish("ab")
    driver.publish("xy")
    answer = driver.lookup("ab")
    assert answer.lease is not None
    places = driver.index.locate(answer.lease, keys_of(driver.layout, "ab"), driver.now)
    assert [place.nbytes for place in places] == [ATTENTION_BYTES, ATTENTION_BYTES, STATE_BYTES]
    assert len({place.offset for place in places}) == 3
    with pytest.raises(NotKnown, match="in no checkpoint under lease"):
        driver.index.locate(answer.lease, keys_of(driver.layout, "xy"), driver.now)
    with pytest.raises(NotKnown):
        driver.index.locate(answer.lease, [ObjectKey(0, 0, b"never seen")], driver.now)


@pytest.mark.parametrize("end", ["time", "release"])
def test_a_lease_that_ended_reads_nothing(end: str) -> None:
    driver = Driver()
    driver.publish("a")
    lease = driver.lookup("a", lease_s=10.0).lease
    assert lease is not None
    if end == "time":
        driver.now = 10.0
    else:
        driver.index.release([lease, lease, LeaseId("never granted")], driver.now)
    for call in (
        lambda: driver.index.locate(lease, keys_of(driver.layout, "a"), driver.now),
        lambda: driver.index.renew(lease, 10.0, driver.now),
    ):
        with pytest.raises(NotKnown, match="ran out or was released"):
            call()
    driver.index.check()


def test_a_renewed_lease_lasts_from_now_up_to_the_maximum() -> None:
    driver = Driver()
    driver.publish("a")
    lease = driver.lookup("a", lease_s=10.0).lease
    assert lease is not None
    driver.now = 9.0
    driver.index.renew(lease, 1000.0, driver.now)
    driver.now = 108.0
    driver.index.renew(lease, 1.0, driver.now)
    driver.now = 109.0
    with pytest.raises(NotKnown):
        driver.index.renew(lease, 1.0, driver.now)


def test_a_lease_has_the_name_that_its_caller_chose() -> None:
    driver = Driver()
    driver.publish("a")

    def lookup(name: str) -> LeaseId | None:
        return driver.index.lookup(
            driver.domain, chain("a"), 0, 5.0, driver.now, lease_name=name
        ).lease

    assert [lookup("2"), lookup("mine"), lookup(""), lookup("")] == [
        "index.2", "index.mine", "index.1", "index.3",
    ]  # fmt: skip
    before = dict(driver.index.counters)
    for name, words in (("mine", "a lease named 'mine' is valid"), ("n" * 257, "1 to 256 bytes")):
        with pytest.raises(StoreRejected, match=words):
            lookup(name)
    assert driver.index.counters == before and driver.index.stats().leases == 4
    driver.index.release([LeaseId("index.mine")], driver.now)
    assert lookup("mine") == "index.mine"


def test_a_lookup_that_asks_for_no_lease_gets_none() -> None:
    driver = Driver()
    driver.publish("a")
    assert driver.lookup("a", lease_s=0).lease is None
    assert driver.index.stats().leases == 0


# -- refusals and limits ----------------------------------------------------------------------

HASH = b"h" * 32


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ([(ObjectKey(1, 0, HASH), 8)], "rank 1 is not below the 1"),
        ([(ObjectKey(0, 7, HASH), 8)], "group 7 is none of"),
        ([(ObjectKey(0, 0, b""), 8)], "block hash of 0 bytes"),
        ([(ObjectKey(0, 0, HASH * 3), 8)], "block hash of 96 bytes"),
        ([(ObjectKey(0, 0, HASH), 0)], "of 0 bytes"),
        ([(ObjectKey(0, 0, HASH), 8), (ObjectKey(0, 0, HASH), 9)], "8 bytes here, 9 were asked"),
    ],
)
def test_malformed_wants_change_nothing(wants: list[tuple[ObjectKey, int]], message: str) -> None:
    driver = Driver()
    good = (ObjectKey(0, 0, b"good"), 8)
    with pytest.raises(StoreRejected, match=message):
        driver.index.reserve(driver.domain, PublicationId("p"), [good, *wants], 0.0)
    assert driver.index.stats().objects == driver.index.stats().publications == 0


def test_a_committed_object_has_one_size() -> None:
    driver = Driver()
    driver.publish("a")
    (key, *_) = keys_of(driver.layout, "a")
    with pytest.raises(StoreRejected, match="256 bytes here, 257 were asked for"):
        driver.index.reserve(driver.domain, PublicationId("p"), [(key, 257)], 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundary": 6}, "boundary 6 is not a positive multiple of 4"),
        ({"boundary": 0}, "boundary 0"),
        ({"boundary": 12}, "2 hashes of 4 tokens do not end at boundary 12"),
        ({"hashes": (b"x", b"")}, "block hash of 0 bytes"),
        ({"kinds": ()}, "names no kind"),
        ({"producer": "x" * 257}, "producer"),
    ],
)
def test_malformed_manifests_change_nothing(change: dict[str, object], message: str) -> None:
    driver = Driver()
    grants = driver.reserve("p", keys_of(driver.layout, "ab"))
    fields = {
        name: getattr(manifest_of("ab"), name) for name in manifest_of("ab").__struct_fields__
    }
    manifest = type(manifest_of("ab"))(**(fields | change))
    with pytest.raises(StoreRejected, match=message):
        driver.commit("p", grants, manifest)
    assert driver.index.stats().counters["committed_objects"] == 0
    assert driver.commit("p", grants, manifest_of("ab")).visible


def test_one_hash_cannot_end_at_two_boundaries() -> None:
    driver = Driver()
    driver.publish("ab")
    (first, second) = chain("ab")
    wrong = type(manifest_of("ab"))(boundary=GRID, hashes=(second,), kinds=(DECODE,))
    with pytest.raises(StoreRejected, match="ends at 8 tokens, not at 4"):
        driver.commit("p", [], wrong)
    swapped = driver.index.lookup(driver.domain, [second, first], 0, 1.0, 0.0)
    assert not any(match.retained for match in swapped.matches) and swapped.lease is None


def test_a_rank_commits_only_its_own_objects() -> None:
    driver = Driver(ranks=2)
    grants = driver.reserve("p", keys_of(driver.layout, "a", rank=1))
    with pytest.raises(StoreRejected, match="rank 0 cannot commit object 1/0/"):
        driver.commit("p", grants, rank=0)
    with pytest.raises(StoreRejected, match="rank 2 is not below the 2"):
        driver.index.commit(driver.domain, PublicationId("p"), 2, [], None, 0.0)


def test_a_publication_stays_in_its_domain() -> None:
    driver = Driver()
    other = driver.open("other")
    driver.reserve("p", [])
    with pytest.raises(StoreRejected, match="belongs to domain"):
        driver.reserve("p", [], domain=other)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_durations_must_be_finite(value: float) -> None:
    driver = Driver()
    driver.publish("a")
    with pytest.raises(StoreRejected, match="lease_s"):
        driver.lookup("a", lease_s=value)
    with pytest.raises(StoreRejected, match="ttl_s"):
        driver.index.announce(driver.domain, GRID, HASH, value, 0.0)


def test_unknown_domains_are_named() -> None:
    index = BlockIndex(1 << 20, publication_ttl_s=1.0, lease_max_s=1.0)
    domain = make_record().domain_id
    for call in (
        lambda: index.reserve(domain, PublicationId("p"), [], 0.0),
        lambda: index.commit(domain, PublicationId("p"), 0, [], None, 0.0),
        lambda: index.lookup(domain, [], 0, 0.0, 0.0),
        lambda: index.announce(domain, GRID, HASH, 1.0, 0.0),
        lambda: index.list_checkpoints(domain, 0, 0.0),
    ):
        with pytest.raises(NotKnown, match=domain):
            call()


def test_publications_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.transfer.publications.PUBLICATIONS_MAX", 2)
    driver = Driver()
    driver.reserve("p", [])
    driver.reserve("q", [])
    with pytest.raises(StoreFull, match="2 publications are open at once"):
        driver.reserve("r", [])
    driver.reserve("q", [])
    driver.abandon("p")
    driver.reserve("r", [])


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.transfer.leases.LEASES_MAX", 1)
    driver = Driver()
    driver.publish("a")
    lease = driver.lookup("a").lease
    with pytest.raises(StoreFull, match="1 leases are valid at once"):
        driver.lookup("a")
    assert driver.lookup("a", lease_s=0).matches
    assert lease is not None
    driver.index.release([lease], driver.now)
    assert driver.lookup("a").lease


def test_the_oldest_announcement_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.transfer.index.ANNOUNCEMENTS_MAX", 2)
    driver = Driver()
    for tokens in "abc":
        driver.index.announce(driver.domain, GRID, chain(tokens)[-1], 5.0, driver.now)
    assert [driver.lookup(tokens).awaited is None for tokens in "abc"] == [True, False, False]


def test_the_oldest_tombstone_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.transfer.checkpoints.TOMBSTONES_MAX", 1)
    driver = Driver(ONE)
    for tokens in "abc":
        driver.publish(tokens)
    assert [len(driver.lookup(tokens, lease_s=0).matches) for tokens in "abc"] == [0, 1, 1]


def test_an_empty_domain_is_forgotten_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.transfer.index.DOMAINS_MAX", 2)
    driver = Driver()
    driver.publish("a")
    second = driver.open("second")
    third = driver.open("third")
    assert driver.consumable("a") == [1]
    with pytest.raises(NotKnown):
        driver.lookup("a", domain=second)
    driver.publish("a", domain=third)
    with pytest.raises(StoreFull, match="2 domains have content"):
        driver.open("fourth")


# -- people -----------------------------------------------------------------------------------


def test_the_list_shows_the_newest_first_with_sizes_and_times() -> None:
    driver = Driver()
    driver.publish("ab")
    driver.now = 2.0
    driver.publish("x")
    driver.lookup("ab")
    driver.now = 5.0
    newest, oldest = driver.index.list_checkpoints(None, 0, driver.now)
    assert (newest.boundary, newest.age_s) == (GRID, 3.0)
    assert (oldest.attention_bytes, oldest.state_bytes) == (2 * ATTENTION_BYTES, STATE_BYTES)
    assert (oldest.age_s, oldest.idle_s, oldest.leases) == (5.0, 3.0, 1)
    assert driver.index.list_checkpoints(None, 1, driver.now) == [newest]


def test_counters_say_what_eviction_threw_away() -> None:
    driver = Driver(2 * ONE)
    driver.publish("a")
    driver.publish("b")
    driver.lookup("a", lease_s=0)
    driver.now = 2.5
    driver.publish("cd")
    counters = driver.index.stats().counters
    assert counters["evictions_capacity"] == 2
    assert counters["evicted_unused_checkpoints"] == 1
    assert counters["evicted_lifetime_ms"] == 5000
    assert counters["evicted_bytes"] == 2 * ONE
    assert (counters["lookups"], counters["hits"], counters["checkpoints_hit"]) == (1, 1, 1)


def test_check_finds_a_wrong_book() -> None:
    for corrupt in (
        lambda index, entry: setattr(entry, "refs", 2),
        lambda index, entry: setattr(entry, "holds", 1),
        lambda index, entry: setattr(entry, "writer", "somebody"),
        lambda index, entry: index.objects.arena.free(entry.offset),
        lambda index, entry: entry.domain.objects.pop(entry.key),
        lambda index, entry: index.checkpoints.domains_of.clear(),
    ):
        driver = Driver()
        driver.publish("ab")
        driver.index.check()
        corrupt(driver.index, next(iter(driver.index.domains[driver.domain].objects.values())))
        with pytest.raises((AssertionError, KeyError)):
            driver.index.check()
