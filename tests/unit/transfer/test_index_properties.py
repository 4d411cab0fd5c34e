"""Random histories of the block index against what must always hold."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from index_kit import (
    GRID,
    STATE_BYTES,
    chain,
    keys_of,
    make_layout,
    make_record,
    manifest_of,
    size_of,
)

from backhaul.protocols.checkpoint import (
    NOT_RETAINED,
    CheckpointKind,
    CheckpointMatch,
    DomainId,
    LeaseId,
    ObjectKey,
    PrefillWork,
    PublicationId,
    Reason,
)
from backhaul.protocols.errors import StoreRejected
from backhaul.transfer.admission import AdmittedBytesBudget
from backhaul.transfer.base import Grant, GrantStatus, Written
from backhaul.transfer.index import BlockIndex, LookupAnswer
from backhaul.transfer.leases import Location
from backhaul.transfer.strategies import Admission, Eviction, Strategies

PUBLICATIONS = st.sampled_from([PublicationId(name) for name in "pqrs"])
ALL_PREFIXES = ["".join(p) for n in range(1, 5) for p in itertools.product("ab", repeat=n)]
PREFIXES = st.sampled_from(ALL_PREFIXES)
KINDS = st.sampled_from(list(CheckpointKind))
PARTS = (Reason.STATE_MISSING, Reason.ATTENTION_MISSING)
TTL_S = 20.0
LEASE_MAX_S = 30.0
STRATEGIES = st.builds(
    Strategies,
    eviction=st.sampled_from(list(Eviction)),
    marconi_alpha=st.sampled_from([0.0, 1.0, 4.0]),
    admission=st.sampled_from(list(Admission)),
    admit_bytes_per_token=st.sampled_from([1.0, 300.0]),
    admit_burst_bytes=st.sampled_from([1, 2 * STATE_BYTES, 50 * STATE_BYTES]),
)
WORK = st.sampled_from([PrefillWork(), PrefillWork(2.0, 0.5), PrefillWork(0.0, 3.0)])


class Ledger:
    """What passed through an admission strategy."""

    def __init__(self, strategies: Strategies) -> None:
        self.inner = strategies.make_admission()
        self.credited = self.charged = self.refunded = 0

    def credit(self, prompt_tokens: int) -> None:
        self.credited += prompt_tokens
        self.inner.credit(prompt_tokens)

    def admits(self, nbytes: int) -> bool:
        return self.inner.admits(nbytes)

    def charge(self, nbytes: int) -> None:
        self.charged += nbytes
        self.inner.charge(nbytes)

    def refund(self, nbytes: int) -> None:
        self.refunded += nbytes
        self.inner.refund(nbytes)


class IndexMachine(RuleBasedStateMachine):
    """Two domains of two ranks with three kinds of groups, in a pool that holds a few checkpoints.

    It remembers every lease with its end and where its objects lay: as long as it is valid, the
    same objects must lie at the same places with the same checksums.
    """

    grants = Bundle("grants")

    @initialize(
        slots=st.integers(4, 24), quarantine_s=st.sampled_from([0.0, 5.0]), strategies=STRATEGIES
    )
    def start(self, slots: int, quarantine_s: float, strategies: Strategies) -> None:
        """A pool of ``slots`` states; every history its own size and strategies."""
        self.ledger = Ledger(strategies)
        self.capacity_bytes = slots * STATE_BYTES
        self.index = BlockIndex(
            self.capacity_bytes,
            publication_ttl_s=TTL_S,
            lease_max_s=LEASE_MAX_S,
            quarantine_s=quarantine_s,
            strategy=strategies.make_eviction(),
            admission=self.ledger,
        )
        self.now = 0.0
        self.layout = make_layout(ranks=2, window_tokens=GRID + 2)
        self.domains = [
            self.index.open_domain(make_record(model, self.layout), 0.0) for model in "xy"
        ]
        self.prefix_of = {chain(prefix)[-1]: prefix for prefix in ALL_PREFIXES}
        self.readable: dict[LeaseId, dict[ObjectKey, Location]] = {}
        self.lease_ends: dict[LeaseId, float] = {}
        self.counters = dict(self.index.counters)

    # -- what clients do ----------------------------------------------------------------------

    @rule(
        target=grants,
        domain=st.integers(0, 1),
        name=PUBLICATIONS,
        prefix=PREFIXES,
        rank=st.integers(0, 1),
        attention_only=st.booleans(),
    )
    def reserve(
        self, domain: int, name: PublicationId, prefix: str, rank: int, attention_only: bool
    ) -> Any:
        """Ask for the objects of a checkpoint, or ahead of it for its attention only."""
        keys = keys_of(self.layout, prefix, rank)
        if attention_only:
            keys = [key for key in keys if key.group == 0]
        wants = [(key, size_of(self.layout, key)) for key in keys]
        try:
            answers = self.index.reserve(self.domains[domain], name, wants, self.now)
        except StoreRejected:  # the publication belongs to the other domain
            return multiple()
        assert [answer.key for answer in answers] == keys
        return multiple((self.domains[domain], name, rank, prefix, answers))

    @rule(given=grants, kind=KINDS, with_manifest=st.booleans(), skip=st.integers(0, 3))
    def commit(
        self,
        given: tuple[DomainId, PublicationId, int, str, list[Grant]],
        kind: CheckpointKind,
        with_manifest: bool,
        skip: int,
    ) -> None:
        """Commit grants, fresh or long stale, all of them or not all."""
        domain, name, rank, prefix, answers = given
        written = [
            Written(answer.key, answer.token, answer.token)
            for number, answer in enumerate(answers)
            if answer.status is GrantStatus.GRANTED and (skip == 0 or number != skip)
        ]
        manifest = manifest_of(prefix, kind) if with_manifest else None
        try:
            result = self.index.commit(domain, name, rank, written, manifest, self.now)
        except StoreRejected:
            return
        assert not (result.visible and result.missing)
        for key in result.missing:
            entry = self.index.domains[domain].objects.get(key)
            assert entry is None or not entry.committed

    @rule(
        domain=st.integers(0, 1),
        name=PUBLICATIONS,
        prefix=PREFIXES,
        kind=KINDS,
        end=st.booleans(),
        user_turn=st.booleans(),
        work=WORK,
    )
    def publish(
        self,
        domain: int,
        name: PublicationId,
        prefix: str,
        kind: CheckpointKind,
        end: bool,
        user_turn: bool,
        work: PrefillWork,
    ) -> None:
        """A whole publication without an accident: visible unless the pool or others hinder it."""
        hindered = False
        visible = False
        for rank in range(self.layout.ranks):
            wants = [(key, size_of(self.layout, key)) for key in keys_of(self.layout, prefix, rank)]
            try:
                answers = self.index.reserve(self.domains[domain], name, wants, self.now)
                hindered |= any(
                    answer.status not in (GrantStatus.GRANTED, GrantStatus.PRESENT)
                    for answer in answers
                )
                written = [
                    Written(answer.key, answer.token, answer.token)
                    for answer in answers
                    if answer.status is GrantStatus.GRANTED
                ]
                manifest = manifest_of(prefix, kind, user_turn=user_turn, work=work)
                visible = self.index.commit(
                    self.domains[domain], name, rank, written, manifest, self.now
                ).visible
            except StoreRejected:
                return
        assert visible or hindered
        if end:
            self.index.abandon(name, self.now)

    @rule(name=PUBLICATIONS)
    def abandon(self, name: PublicationId) -> None:
        """End a publication, open or not."""
        self.index.abandon(name, self.now)

    @rule(name=PUBLICATIONS)
    def abandon_while_written(self, name: PublicationId) -> None:
        """End a publication that somebody may be writing: no byte of its space is given away, and
        what still comes under its name is refused."""
        self.index.expire(self.now)  # what rests since an earlier end may be due
        used = self.index.stats().used_bytes
        name = PublicationId(f"{name} for good") if not self.index.is_open(name) else name
        self.index.abandon(name, self.now, still_written=True)
        assert not self.index.is_open(name) and self.index.stats().used_bytes == used
        with pytest.raises(StoreRejected, match="ended for good"):
            self.index.reserve(self.domains[0], name, [], self.now)
        self.index.publications._refused.clear()  # the other rules go on using the few names

    @rule(name=PUBLICATIONS)
    def disown(self, name: PublicationId) -> None:
        """Its writer is gone without a word, and may still be writing."""
        known = self.index.is_open(name)
        before = self.index.counters["expired_publications"]
        self.index.disown(name, self.now)
        assert not self.index.is_open(name)
        assert self.index.counters["expired_publications"] - before >= known

    @rule(name=PUBLICATIONS)
    def keep_alive(self, name: PublicationId) -> None:
        """A sign of life."""
        known = name in self.index.publications.open
        unknown = self.index.keep_alive([name], self.now)
        assert known or unknown == [name]

    @rule(domain=st.integers(0, 1), prefix=PREFIXES, ttl_s=st.floats(0, 30))
    def announce(self, domain: int, prefix: str, ttl_s: float) -> None:
        """Say that a checkpoint will come, whether it does or not."""
        self.index.announce(
            self.domains[domain], len(prefix) * GRID, chain(prefix)[-1], ttl_s, self.now
        )

    @rule(
        domain=st.integers(0, 1),
        prefix=PREFIXES,
        above=st.integers(0, 3),
        lease_s=st.sampled_from([0.0, 1.0, 15.0, 1000.0]),
        name=st.sampled_from(["", "1", "mine"]),
    )
    def lookup(self, domain: int, prefix: str, above: int, lease_s: float, name: str = "") -> None:
        """Look a prefix up and read, at once, everything that the lease covers. Who only looks is
        told the same, and leaves no trace; nor does who takes another one's name for the lease."""
        self.index.expire(self.now)
        before = self.traces()
        seen = self.index.peek(self.domains[domain], chain(prefix), above * GRID, self.now)
        assert self.traces() == before and seen.lease is None
        ask = partial(
            self.index.lookup, self.domains[domain], chain(prefix), above * GRID, lease_s, self.now
        )
        if lease_s and name and LeaseId(f"index.{name}") in self.index.leases.valid:
            with pytest.raises(StoreRejected, match="choose unique names"):
                ask(lease_name=name)
            assert self.traces() == before
            return
        answer = ask(lease_name=name)
        assert not (answer.lease and name) or answer.lease == f"index.{name}"
        assert (seen.matches, seen.extent) == (answer.matches, answer.extent)
        boundaries = [match.boundary for match in answer.matches]
        assert boundaries == sorted(set(boundaries), reverse=True)
        assert all(boundary > above * GRID for boundary in boundaries)
        consumable = [match for match in answer.matches if match.consumable]
        for match in answer.matches:
            self.check_tags(self.domains[domain], prefix, match)
        self.check_extent(self.domains[domain], prefix, answer)
        self.check_incomplete(self.domains[domain], prefix, above * GRID, answer)
        assert (answer.lease is not None) == bool(consumable and lease_s)
        deepest = consumable[0].boundary if consumable else above * GRID
        assert answer.awaited is None or answer.awaited.boundary > deepest
        if answer.lease is None:
            return
        places: dict[ObjectKey, Location] = {}
        for match in consumable:
            for rank in range(self.layout.ranks):
                keys = keys_of(self.layout, prefix[: match.boundary // GRID], rank)
                places |= dict(
                    zip(keys, self.index.locate(answer.lease, keys, self.now), strict=True)
                )
        self.readable[answer.lease] = places
        self.lease_ends[answer.lease] = self.now + min(lease_s, LEASE_MAX_S)

    def traces(self) -> object:
        """What a lookup may change."""
        index = self.index
        return (
            dict(index.counters),
            {one: (one.used_at, one.hits, one.leases) for one in index.checkpoints.visible},
            {name: domain.used_at for name, domain in index.domains.items()},
            set(index.leases.valid),
            index.checkpoints.recent.newest_first(),
            self.ledger.credited,
        )

    def check_tags(self, domain: DomainId, prefix: str, match: CheckpointMatch) -> None:
        """Each tag implies the one before, and each says what the listings say."""
        assert (match.reason is None) == match.consumable
        assert match.consumable <= match.hash_matched <= match.retained
        assert match.boundary <= len(prefix) * GRID
        homes = {
            info.domain
            for info in self.index.list_checkpoints(None, 0, self.now)
            if info.block_hash == chain(prefix)[match.boundary // GRID - 1]
        }
        assert match.consumable == (domain in homes)
        assert match.hash_matched == bool(homes)
        if match.reason is Reason.DOMAIN_MISMATCH:
            assert match.hash_matched and domain not in homes
        elif match.reason is Reason.HASH_MISMATCH:
            assert match.retained and not match.hash_matched
            known = self.index.domains[domain].checkpoints
            others = [h for h, p in self.prefix_of.items() if len(p) * GRID == match.boundary]
            assert any(h in known and known[h].visible for h in others)
        elif match.reason in NOT_RETAINED:
            assert not match.retained and not homes
        else:
            assert match.consumable

    def check_incomplete(
        self, domain: DomainId, prefix: str, above: int, answer: LookupAnswer
    ) -> None:
        """What is said to be missing is, the rest of it is there, and each is said once."""
        objects = self.index.domains[domain].objects
        hashes = chain(prefix)

        def whole(group: int, boundary: int) -> bool:
            keys = [ObjectKey(r, group, hashes[boundary // GRID - 1]) for r in range(2)]
            return all(key in objects and objects[key].committed for key in keys)

        attention = 0
        while attention < len(prefix) * GRID and whole(0, attention + GRID):
            attention += GRID
        states = [b for b in range(GRID, len(prefix) * GRID + 1, GRID) if whole(1, b)]
        joint = max((m.boundary for m in answer.matches if m.consumable), default=0)
        expected = set()
        if attention > max(joint, above) and attention not in states:
            expected.add((attention, Reason.STATE_MISSING))
        if states and states[-1] > max(joint, above, attention):
            expected.add((states[-1], Reason.ATTENTION_MISSING))
        said = {(m.boundary, m.reason) for m in answer.matches if m.reason in PARTS}
        others = {m.boundary for m in answer.matches if m.reason not in PARTS}
        assert said == {one for one in expected if one[0] not in others}
        assert all(not m.kinds for m in answer.matches if m.reason in PARTS)

    def check_extent(self, domain: DomainId, prefix: str, answer: LookupAnswer) -> None:
        """Attention and state reach at least as far as both together, and no further than their
        objects do."""
        joint = max((m.boundary for m in answer.matches if m.consumable), default=0)
        assert answer.extent.attention >= joint and answer.extent.recurrent >= joint
        there = self.index.domains[domain].objects
        for group, tokens in ((0, answer.extent.attention), (1, answer.extent.recurrent)):
            assert tokens <= len(prefix) * GRID
            for rank in range(self.layout.ranks):
                block_hash = chain(prefix)[tokens // GRID - 1]
                assert not tokens or there[ObjectKey(rank, group, block_hash)].committed

    @precondition(lambda self: self.index.checkpoints.visible)
    @rule(data=st.data(), lease_s=st.sampled_from([1.0, 10.0]), new_turn=st.booleans())
    def resume(self, data: st.DataObject, lease_s: float, new_turn: bool) -> None:
        """A lookup that must hit: of a visible checkpoint, or of a prompt that extends it."""
        found = data.draw(st.sampled_from(list(self.index.checkpoints.visible)))
        prefix = self.prefix_of[found.block_hash] + ("a" if new_turn else "")
        hits = self.index.counters["hits"]
        self.lookup(self.domains.index(found.domain.id), prefix, 0, lease_s)
        assert self.index.counters["hits"] == hits + 1

    @precondition(lambda self: self.readable)
    @rule(data=st.data(), lease_s=st.sampled_from([1.0, 10.0]))
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        """Renew a lease: possible exactly until it ends."""
        lease = data.draw(st.sampled_from(sorted(self.readable)))
        if self.lease_ends[lease] > self.now:
            self.index.renew(lease, lease_s, self.now)
            self.lease_ends[lease] = self.now + lease_s
        else:
            with pytest.raises(StoreRejected):
                self.index.renew(lease, lease_s, self.now)

    @precondition(lambda self: self.readable)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give a lease back, valid or not."""
        lease = data.draw(st.sampled_from(sorted(self.readable)))
        self.index.release([lease], self.now)
        self._forget(lease)

    @rule(domain=st.integers(0, 1), nbytes=st.sampled_from([1, 300, STATE_BYTES, 10**9]))
    def flood(self, domain: int, nbytes: int) -> None:
        """Somebody wants more than there is; it is all free again afterwards."""
        wants = [(ObjectKey(0, 0, b"flood %d" % n), nbytes) for n in range(8)]
        name = PublicationId("flood")
        answers = self.index.reserve(self.domains[domain], name, wants, self.now)
        granted = [answer for answer in answers if answer.status is GrantStatus.GRANTED]
        assert not granted or nbytes <= self.capacity_bytes
        self.index.abandon(name, self.now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 12.0, 25.0, -5.0]))
    def pass_time(self, seconds: float) -> None:
        """The clock jumps; backwards counts as standing still."""
        self.index.expire(self.now + seconds)
        self.now += max(seconds, 0.0)

    # -- what must always hold ----------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        """See ``check``, which also knows that visible checkpoints are whole."""
        self.index.check()

    @invariant()
    def bytes_come_from_the_writer_that_was_let_in(self) -> None:
        """Clients here send their token as checksum: a stale one must never have been taken."""
        for domain in self.index.domains.values():
            for entry in domain.objects.values():
                assert entry.checksum == (entry.token if entry.committed else 0)

    @invariant()
    def budget_is_kept(self) -> None:
        """Never more than the pool, and no two objects in one place."""
        assert self.index.stats().used_bytes <= self.capacity_bytes
        extents = sorted(
            (entry.offset, entry.nbytes)
            for domain in self.index.domains.values()
            for entry in domain.objects.values()
        )
        for (offset, nbytes), (following, _) in itertools.pairwise(extents):
            assert offset + nbytes <= following
        assert not extents or sum(extents[-1]) <= self.capacity_bytes

    @invariant()
    def admission_is_kept(self) -> None:
        """What was admitted was paid for by traffic, or is debt; what is there was charged."""
        admitted = self.ledger.charged - self.ledger.refunded
        there = sum(domain.object_bytes for domain in self.index.domains.values())
        assert 0 <= there <= admitted
        assert self.ledger.charged == self.index.counters["granted_bytes"]
        budget = self.ledger.inner
        if isinstance(budget, AdmittedBytesBudget):
            assert budget.balance <= budget.burst_bytes
            earned = self.ledger.credited * budget.bytes_per_prompt_token
            assert admitted <= budget.burst_bytes + earned + max(-budget.balance, 0)

    @invariant()
    def the_queue_keeps_to_the_rule(self) -> None:
        """Without sorting, and in whatever way things came about, the strategy's order."""
        visible = self.index.checkpoints.visible
        leased = {one for one in visible if one.leases}
        expected = self.index.strategy.order([one for one in visible if not one.leases], self.now)
        assert list(self.index.checkpoints.queue.candidates(self.now, leased)) == list(expected)

    @invariant()
    def leased_objects_stay_where_they_are(self) -> None:
        """A valid lease reads the same bytes as when it was granted; an ended one nothing."""
        for lease, places in list(self.readable.items()):
            if self.lease_ends[lease] > self.now:
                assert self.index.locate(lease, list(places), self.now) == list(places.values())
            else:
                with pytest.raises(StoreRejected):
                    self.index.locate(lease, list(places), self.now)
                self._forget(lease)

    @invariant()
    def counters_never_fall(self) -> None:
        """And none appears that was not there from the start."""
        now = dict(self.index.counters)
        assert now.keys() == self.counters.keys()
        assert all(now[name] >= before for name, before in self.counters.items())
        self.counters = now

    def teardown(self) -> None:
        """When all has ended, the whole pool can be had, and then all of it is free."""
        if not hasattr(self, "index"):
            return
        for later in (1000.0, 2000.0):
            self.index.expire(self.now + later)
        assert self.index.stats().leases == self.index.stats().publications == 0
        self.ledger.inner.refund(10**12)
        name = PublicationId("everything")
        wants = [(ObjectKey(0, 0, b"everything"), self.capacity_bytes)]
        (answer,) = self.index.reserve(self.domains[0], name, wants, self.now)
        assert answer.status is GrantStatus.GRANTED
        assert self.index.stats().checkpoints == 0
        self.index.abandon(name, self.now)
        assert self.index.stats().used_bytes == self.index.stats().objects == 0
        self.index.check()

    def _forget(self, lease: LeaseId) -> None:
        del self.readable[lease]
        del self.lease_ends[lease]


TestRandomHistories = IndexMachine.TestCase
TestRandomHistories.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
