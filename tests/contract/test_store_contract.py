"""Every guarantee in the docstring of transfer/base.py, for each backend."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from store_contract import (
    ATTENTION,
    BOUNDARY,
    CAPACITY_BYTES,
    SHORT_TTL_S,
    STATE,
    TIMEOUT_S,
    ClientMaker,
    Worker,
    WorkerMaker,
    at_boundaries,
    eventually,
    hash_chain,
    make_domain,
    new_publication,
    object_size,
    undisturbed,
)

from backhaul.protocols.checkpoint import CheckpointKind, DomainId, LeaseId, Reason
from backhaul.protocols.errors import StoreError, StoreFull, StoreRejected
from backhaul.transfer.backends.embedded import WAIT_SHARE_MAX
from backhaul.transfer.base import GrantStatus, WriteItem

CHECKPOINT_BYTES = 2 * object_size(ATTENTION) + object_size(STATE)
"""One checkpoint at the first boundary."""


def fill(worker: Worker, count: int, seed: str = "fill") -> list[tuple[bytes, ...]]:
    """Publish ``count`` unrelated checkpoints, one after another."""
    chains = [hash_chain(f"{seed}-{index}", BOUNDARY) for index in range(count)]
    for chain in chains:
        assert worker.publish(chain, BOUNDARY).visible
    return chains


class TestTags:
    """What a lookup says of each candidate; the tags' order is checked by their type."""

    def test_a_visible_checkpoint_carries_every_tag(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", 3 * BOUNDARY)
        assert worker.publish(chain, 2 * BOUNDARY).visible
        answer = worker.store.lookup(worker.domain_id, at_boundaries(chain), timeout_s=TIMEOUT_S)
        (match,) = answer.matches
        assert match.retained and match.hash_matched and match.consumable and match.reason is None
        # 0 says that the backend does not know.
        assert answer.attention_tokens in (0, 2 * BOUNDARY)
        assert answer.recurrent_tokens in (0, 2 * BOUNDARY)

    def test_an_announced_checkpoint_is_not_retained(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", BOUNDARY)
        worker.store.announce(worker.domain_id, BOUNDARY, chain[-1], ttl_s=60, timeout_s=TIMEOUT_S)
        answer = worker.store.lookup(worker.domain_id, at_boundaries(chain), timeout_s=TIMEOUT_S)
        assert answer.lease is None
        for match in answer.matches:  # a backend may also say nothing
            assert not match.retained and match.reason is Reason.UNCOMMITTED

    def test_a_rewritten_history_matches_up_to_where_it_was_rewritten(
        self, new_worker: WorkerMaker
    ) -> None:
        worker = new_worker()
        kept = hash_chain("kept", BOUNDARY)
        first = hash_chain("first", 2 * BOUNDARY, kept)
        second = hash_chain("second", 2 * BOUNDARY, kept)
        assert worker.publish(first, BOUNDARY).visible
        assert worker.publish(first, 2 * BOUNDARY).visible
        answer = worker.store.lookup(worker.domain_id, at_boundaries(second), timeout_s=TIMEOUT_S)
        assert [m.boundary for m in answer.matches if m.hash_matched] == [BOUNDARY]
        for match in answer.matches:  # a backend may also say nothing of what is left behind
            if not match.hash_matched:
                assert match.retained and match.reason is Reason.HASH_MISMATCH


class TestBytes:
    @pytest.mark.parametrize("verify", [True, False])
    def test_round_trip_is_bit_equal(self, new_worker: WorkerMaker, verify: bool) -> None:
        writer, reader = new_worker(), new_worker()
        chain = hash_chain("a", 4 * BOUNDARY)
        assert writer.publish(chain, 4 * BOUNDARY).visible
        boundaries, lease = reader.lookup(chain)
        assert boundaries == [4 * BOUNDARY] and lease
        result = reader.read(lease, chain, 4 * BOUNDARY, verify=verify)
        assert result.ok and result.reason is None and result.unsettled is None, result
        assert result.nbytes == 8 * object_size(ATTENTION) + object_size(STATE)
        assert reader.holds(chain, 4 * BOUNDARY)

    def test_present_objects_are_not_written_again(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", 2 * BOUNDARY)
        worker.publish(chain, BOUNDARY)
        grants = worker.reserve(new_publication(), worker.keys(chain, 2 * BOUNDARY))
        by_group = [(grant.key.group, grant.status) for grant in grants]
        assert by_group == [
            *[(ATTENTION, GrantStatus.PRESENT)] * 2,
            *[(ATTENTION, GrantStatus.GRANTED)] * 2,
            (STATE, GrantStatus.GRANTED),
        ]

    def test_corrupted_bytes_are_never_ok(self, new_worker: WorkerMaker) -> None:
        """A late write of a writer that was given up lands in a committed object."""
        writer, reader = new_worker(), new_worker()
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        grants = writer.reserve(publication, writer.keys(chain, BOUNDARY))
        assert writer.commit(publication, writer.write(grants).written, chain, BOUNDARY).visible
        writer.pages.put(STATE, 0, np.full(object_size(STATE), 7, dtype=np.uint8))
        late = WriteItem(grants[-1], writer.pages.segments(STATE, 0))
        assert writer.store.write([late], timeout_s=TIMEOUT_S).ok
        _, lease = reader.lookup(chain)
        assert lease
        result = reader.read(lease, chain, BOUNDARY)
        assert not result.ok and result.reason is Reason.CORRUPT

    def test_an_object_of_another_size_is_refused(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", BOUNDARY)
        publication = new_publication()
        keys = worker.keys(chain, BOUNDARY)
        wants = [(key, object_size(STATE)) for key in keys]  # attention too: other pages
        grants = worker.store.reserve(worker.domain_id, publication, wants, timeout_s=TIMEOUT_S)
        items = [
            WriteItem(grant, worker.pages.segments(STATE, slot))
            for slot, grant in enumerate(grants)
        ]
        written = worker.store.write(items, timeout_s=TIMEOUT_S).written
        assert worker.commit(publication, written, chain, BOUNDARY).visible
        _, lease = worker.lookup(chain)
        assert lease
        result = worker.read(lease, chain, BOUNDARY)
        assert not result.ok and result.reason is Reason.CORRUPT

    def test_nothing_to_do_is_done(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        assert worker.store.write([], timeout_s=TIMEOUT_S).ok


class TestVisibility:
    def test_state_and_attention_are_both_needed(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        *attention, state = worker.keys(chain, BOUNDARY)
        written = worker.write(worker.reserve(publication, attention)).written
        commit = worker.commit(publication, written, chain, BOUNDARY)
        assert not commit.visible and commit.missing == (state,)
        assert worker.lookup(chain) == ([], None)
        written = worker.write(worker.reserve(publication, [state])).written
        assert worker.commit(publication, written, chain, BOUNDARY).visible
        assert worker.lookup(chain)[0] == [BOUNDARY]

    def test_every_rank_is_needed(self, new_worker: WorkerMaker) -> None:
        domain = make_domain(ranks=2)
        ranks = [new_worker(domain, rank) for rank in (0, 1)]
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        assert not ranks[0].publish(chain, BOUNDARY, publication).visible
        assert ranks[1].lookup(chain) == ([], None)
        assert ranks[1].publish(chain, BOUNDARY, publication).visible
        _, lease = ranks[0].lookup(chain)
        assert lease
        for worker in ranks:
            assert worker.read(lease, chain, BOUNDARY).ok
            assert worker.holds(chain, BOUNDARY)

    @pytest.mark.parametrize("first", [0, 1])
    def test_what_all_ranks_hold_alike_is_stored_once(
        self, new_worker: WorkerMaker, first: int
    ) -> None:
        domain = make_domain(ranks=2, shared_attention=True)
        ranks = [new_worker(domain, rank) for rank in (0, 1)]
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        assert not ranks[first].publish(chain, BOUNDARY, publication).visible
        assert ranks[0].lookup(chain) == ([], None)
        assert ranks[1 - first].publish(chain, BOUNDARY, publication).visible
        (info,) = ranks[0].store.list_checkpoints(timeout_s=TIMEOUT_S, domain=domain.domain_id)
        assert info.attention_bytes == 2 * object_size(ATTENTION), "one rank's"
        assert info.state_bytes == 2 * object_size(STATE), "both ranks'"
        for worker in ranks:
            _, lease = worker.lookup(chain)
            assert lease
            assert worker.read(lease, chain, BOUNDARY).ok
            assert worker.holds(chain, BOUNDARY)
            worker.store.release([lease], timeout_s=TIMEOUT_S)
        ranks[0].store.abandon(publication, timeout_s=TIMEOUT_S)

    def test_streamed_attention_counts_at_the_end(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain, publication = hash_chain("a", 2 * BOUNDARY), new_publication()
        *attention, state = worker.keys(chain, 2 * BOUNDARY)
        for key in attention:
            written = worker.write(worker.reserve(publication, [key])).written
            commit = worker.commit(publication, written)
            assert not commit.visible and not commit.missing
        written = worker.write(worker.reserve(publication, [state])).written
        assert worker.commit(publication, written, chain, 2 * BOUNDARY).visible

    def test_other_prefixes_and_domains_find_nothing(self, new_worker: WorkerMaker) -> None:
        worker, stranger = new_worker(), new_worker(make_domain())
        chain = hash_chain("a", BOUNDARY)
        worker.publish(chain, BOUNDARY)
        assert worker.lookup(hash_chain("b", 4 * BOUNDARY)) == ([], None)
        assert stranger.lookup(chain) == ([], None)
        with pytest.raises(StoreRejected):
            worker.store.lookup(DomainId("feedfeedfeedfeed"), [], timeout_s=TIMEOUT_S)

    def test_deepest_first_and_only_above(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", 4 * BOUNDARY)
        for boundary in (3, 1):
            worker.publish(chain, boundary * BOUNDARY)
        longer = hash_chain("other", 6 * BOUNDARY, chain)
        assert worker.lookup(longer)[0] == [3 * BOUNDARY, BOUNDARY]
        answer = worker.store.lookup(
            worker.domain_id,
            at_boundaries(longer),
            above_tokens=BOUNDARY,
            lease_s=1,
            timeout_s=TIMEOUT_S,
        )
        assert [m.boundary for m in answer.matches if m.consumable] == [3 * BOUNDARY]

    def test_kinds_of_one_boundary_merge(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        worker.publish(chain, BOUNDARY)
        worker.reserve(publication, worker.keys(chain, BOUNDARY))
        again = worker.commit(publication, [], chain, BOUNDARY, CheckpointKind.INPUT_END)
        assert again.visible
        answer = worker.store.lookup(worker.domain_id, at_boundaries(chain), timeout_s=TIMEOUT_S)
        assert set(answer.matches[0].kinds) == {
            CheckpointKind.DECODE_END,
            CheckpointKind.INPUT_END,
        }
        assert answer.lease is None  # none was asked for
        infos = worker.store.list_checkpoints(worker.domain_id, timeout_s=TIMEOUT_S)
        assert [(i.boundary, i.block_hash) for i in infos] == [(BOUNDARY, chain[1])]


class TestPublications:
    def test_busy_while_another_writes(self, new_worker: WorkerMaker) -> None:
        first, second = new_worker(), new_worker()
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        keys = first.keys(chain, BOUNDARY)
        grants = first.reserve(publication, keys)
        late = second.reserve(new_publication(), keys)
        assert {grant.status for grant in late} == {GrantStatus.BUSY}
        first.commit(publication, first.write(grants).written)
        late = second.reserve(new_publication(), keys)
        assert {grant.status for grant in late} == {GrantStatus.PRESENT}

    def test_a_stale_token_commits_nothing(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        keys = worker.keys(chain, BOUNDARY)
        written = worker.write(worker.reserve(publication, keys)).written
        worker.store.abandon(publication, timeout_s=TIMEOUT_S)
        later = new_publication()
        worker.reserve(later, keys)
        assert set(worker.commit(later, written).missing) == set(keys)
        assert not worker.commit(later, [], chain, BOUNDARY).visible
        assert worker.lookup(chain) == ([], None)

    def test_what_is_ended_while_it_is_written_never_becomes_visible(
        self, new_worker: WorkerMaker
    ) -> None:
        domain = make_domain(ranks=2)
        ranks = [new_worker(domain, rank) for rank in (0, 1)]
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        assert not ranks[0].publish(chain, BOUNDARY, publication).visible
        grants = ranks[1].reserve(publication, ranks[1].keys(chain, BOUNDARY))
        unopened = new_publication()
        for name in (publication, unopened):
            ranks[0].store.abandon(name, still_written=True, timeout_s=TIMEOUT_S)
        written = ranks[1].write(grants).written
        for name in (publication, unopened):
            with pytest.raises(StoreRejected, match="ended for good"):
                ranks[1].commit(name, written, chain, BOUNDARY)
            with pytest.raises(StoreRejected, match="ended for good"):
                ranks[1].reserve(name, ranks[1].keys(chain, BOUNDARY))
        assert ranks[0].lookup(chain) == ([], None)
        # Others may publish the same.
        again = new_publication()
        assert not ranks[0].publish(chain, BOUNDARY, again).visible
        assert ranks[1].publish(chain, BOUNDARY, again).visible
        ranks[0].store.abandon(again, timeout_s=TIMEOUT_S)

    def test_abandon_frees_and_may_be_repeated(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        before = worker.store.stats(timeout_s=TIMEOUT_S)
        publication = new_publication()
        worker.reserve(publication, worker.keys(hash_chain("a", BOUNDARY), BOUNDARY))
        # In a full store something was evicted for it, maybe more than it needed.
        during = worker.store.stats(timeout_s=TIMEOUT_S)
        for _ in range(2):
            worker.store.abandon(publication, timeout_s=TIMEOUT_S)
        after = worker.store.stats(timeout_s=TIMEOUT_S)
        assert after.used_bytes <= during.used_bytes - CHECKPOINT_BYTES
        assert after.publications <= before.publications

    def test_announced_publication_is_waited_for(self, new_worker: WorkerMaker) -> None:
        writer, reader = new_worker(), new_worker()
        chain, publication = hash_chain("a", BOUNDARY), new_publication()
        written = writer.write(writer.reserve(publication, writer.keys(chain, BOUNDARY))).written
        writer.store.announce(writer.domain_id, BOUNDARY, chain[1], ttl_s=60, timeout_s=TIMEOUT_S)
        timer = threading.Timer(0.2, lambda: writer.commit(publication, written, chain, BOUNDARY))
        timer.start()
        assert reader.lookup(chain, wait_s=60)[0] == [BOUNDARY]
        timer.join()

    def test_the_wait_is_bounded(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", BOUNDARY)
        assert worker.lookup(chain, wait_s=300) == ([], None)  # nothing was announced
        worker.store.announce(worker.domain_id, BOUNDARY, chain[1], ttl_s=600, timeout_s=TIMEOUT_S)
        started = time.monotonic()
        assert worker.lookup(chain, wait_s=0.3) == ([], None)
        assert 0.3 <= time.monotonic() - started < WAIT_SHARE_MAX * TIMEOUT_S


class TestPublicationsThatRunOut:
    @pytest.fixture
    def publication_ttl_s(self) -> float:
        """Short enough to wait for."""
        return SHORT_TTL_S

    def test_a_rank_that_dies_midway_leaves_nothing_visible(self, new_worker: WorkerMaker) -> None:
        domain = make_domain(ranks=2)
        ranks = [new_worker(domain, rank) for rank in (0, 1)]

        def half() -> tuple[bytes, ...]:
            publication = new_publication()
            chain = hash_chain(publication, BOUNDARY)
            assert not ranks[0].publish(chain, BOUNDARY, publication).visible
            ranks[1].write(ranks[1].reserve(publication, ranks[1].keys(chain, BOUNDARY)))
            return chain

        chain = undisturbed(half, SHORT_TTL_S)  # and rank 1 is gone
        assert ranks[0].lookup(chain) == ([], None)
        assert eventually(lambda: ranks[0].store.stats(timeout_s=TIMEOUT_S).publications == 0)
        assert ranks[0].lookup(chain) == ([], None)

        # Another engine starts over; the first rank's objects do not stand in for its own part.
        def whole() -> None:
            again = new_publication()
            assert not ranks[0].publish(chain, BOUNDARY, again).visible
            assert ranks[1].publish(chain, BOUNDARY, again).visible

        undisturbed(whole, SHORT_TTL_S)
        assert ranks[0].lookup(chain)[0] == [BOUNDARY]

    def test_an_abandoned_writer_costs_its_time_out(self, new_worker: WorkerMaker) -> None:
        gone, other = new_worker(), new_worker()
        keys = gone.keys(hash_chain("a", BOUNDARY), BOUNDARY)
        started = time.monotonic()
        gone.reserve(new_publication(), keys)

        def free() -> bool:
            grants = other.reserve(new_publication(), keys)
            return all(grant.status is GrantStatus.GRANTED for grant in grants)

        assert eventually(free)
        assert time.monotonic() - started >= SHORT_TTL_S

    def test_keep_alive_prolongs(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()

        def long_decode() -> tuple[bool, float]:
            """Whether it became visible, and the longest time (s) without a word from it."""
            publication = new_publication()
            chain = hash_chain(publication, BOUNDARY)
            last = time.monotonic()
            grants = worker.reserve(publication, worker.keys(chain, BOUNDARY))
            end, silence = last + 1.5 * SHORT_TTL_S, 0.0
            written = worker.write(grants).written
            while last < end:
                begun = time.monotonic()
                worker.store.keep_alive([publication], timeout_s=TIMEOUT_S)
                silence, last = max(silence, time.monotonic() - last), begun
                time.sleep(SHORT_TTL_S / 8)
            visible = worker.commit(publication, written, chain, BOUNDARY).visible
            return visible, max(silence, time.monotonic() - last)

        visible, silence = long_decode()
        while not visible and silence >= SHORT_TTL_S:  # a busy machine: it did run out
            visible, silence = long_decode()
        assert visible


class TestLeasesAndEviction:
    def test_the_byte_budget_holds(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chains = fill(worker, 2 * CAPACITY_BYTES // CHECKPOINT_BYTES)
        stats = worker.store.stats(timeout_s=TIMEOUT_S)
        assert stats.used_bytes <= stats.capacity_bytes == CAPACITY_BYTES
        assert worker.lookup(chains[-1])[0] == [BOUNDARY]
        assert worker.lookup(chains[0]) == ([], None)

    def test_a_lease_keeps_from_eviction(self, new_worker: WorkerMaker) -> None:
        worker, reader = new_worker(), new_worker()
        (kept,) = fill(worker, 1, "kept")
        _, lease = reader.lookup(kept, lease_s=60)
        assert lease
        fill(worker, 2 * CAPACITY_BYTES // CHECKPOINT_BYTES)
        assert reader.read(lease, kept, BOUNDARY).ok
        assert reader.holds(kept, BOUNDARY)
        reader.store.release([lease, LeaseId("never-heard-of")], timeout_s=TIMEOUT_S)
        fill(worker, 2 * CAPACITY_BYTES // CHECKPOINT_BYTES, "more")
        assert reader.lookup(kept) == ([], None)
        assert not reader.read(lease, kept, BOUNDARY).ok

    @pytest.mark.parametrize("verify", [True, False])
    def test_an_expired_lease_fails_the_read(self, new_worker: WorkerMaker, verify: bool) -> None:
        worker = new_worker()
        chain = hash_chain("a", BOUNDARY)
        worker.publish(chain, BOUNDARY)
        _, lease = worker.lookup(chain, lease_s=0.2)
        assert lease
        time.sleep(0.4)
        result = worker.read(lease, chain, BOUNDARY, verify=verify)
        assert not result.ok and result.reason is Reason.LEASE_EXPIRED
        with pytest.raises(StoreRejected):
            worker.store.renew(lease, 5, timeout_s=TIMEOUT_S)

    def test_a_renewed_lease_lasts(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chain = hash_chain("a", BOUNDARY)
        worker.publish(chain, BOUNDARY)

        def renewed() -> LeaseId:
            _, lease = worker.lookup(chain, lease_s=1.0)
            assert lease
            worker.store.renew(lease, 60, timeout_s=TIMEOUT_S)
            return lease

        lease = undisturbed(renewed, 1.0)
        time.sleep(1.2)
        assert worker.read(lease, chain, BOUNDARY).ok

    def test_eviction_keeps_checkpoints_whole(self, new_worker: WorkerMaker) -> None:
        """Conversations that share a prefix, under pressure: whatever is visible can be read."""
        worker = new_worker()
        trunk = hash_chain("trunk", 2 * BOUNDARY)
        worker.publish(trunk, 2 * BOUNDARY)
        chains = [hash_chain(f"branch-{i}", 4 * BOUNDARY, trunk) for i in range(12)]
        seen = 0
        for count, chain in enumerate(chains, start=1):
            for boundary in (3 * BOUNDARY, 4 * BOUNDARY):
                assert worker.publish(chain, boundary).visible
            for one in chains[:count]:
                boundaries, lease = worker.lookup(one)
                for boundary in boundaries:
                    assert lease and worker.read(lease, one, boundary).ok
                    assert worker.holds(one, boundary)
                    seen += 1
                worker.store.release([lease] if lease else [], timeout_s=TIMEOUT_S)
        assert seen > len(chains)
        stats = worker.store.stats(timeout_s=TIMEOUT_S)
        assert stats.used_bytes <= stats.capacity_bytes

    def test_full_where_everything_is_leased(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        leases = []
        try:
            for index in itertools.count():
                chain = hash_chain(f"leased-{index}", BOUNDARY)
                publication = new_publication()
                try:
                    grants = worker.reserve(publication, worker.keys(chain, BOUNDARY))
                except StoreFull:
                    break
                if any(grant.status is GrantStatus.FULL for grant in grants):
                    break
                worker.commit(publication, worker.write(grants).written, chain, BOUNDARY)
                worker.store.abandon(publication, timeout_s=TIMEOUT_S)
                leases.append(worker.lookup(chain, lease_s=60)[1])
                assert index <= CAPACITY_BYTES // CHECKPOINT_BYTES
            worker.store.abandon(publication, timeout_s=TIMEOUT_S)
            assert leases
        finally:
            worker.store.release([x for x in leases if x], timeout_s=TIMEOUT_S)
        assert worker.publish(hash_chain("after", BOUNDARY), BOUNDARY).visible


class TestThreads:
    def test_clients_side_by_side(self, new_worker: WorkerMaker) -> None:
        """Threads publish and load their own and each other's conversations."""
        workers = [new_worker() for _ in range(3)]
        chains = [hash_chain(f"thread-{index}", 2 * BOUNDARY) for index in range(3)]
        loaded: list[int] = []
        errors: list[BaseException | str] = []

        def run(worker: Worker, own: int) -> None:
            try:
                for turn in range(6):
                    worker.publish(chains[own], (1 + turn % 2) * BOUNDARY)
                    for chain in chains:
                        boundaries, lease = worker.lookup(chain)
                        if lease is None:
                            continue
                        result = worker.read(lease, chain, boundaries[0])
                        if not (result.ok and worker.holds(chain, boundaries[0])):
                            errors.append(f"{result}")
                        loaded.append(own)
                        worker.store.release([lease], timeout_s=TIMEOUT_S)
            except (StoreError, AssertionError) as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(worker, index))
            for index, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert set(loaded) == {0, 1, 2}

    def test_one_client_from_several_threads(self, new_worker: WorkerMaker) -> None:
        worker = new_worker()
        chains = [hash_chain(f"shared-{index}", BOUNDARY) for index in range(4)]
        for chain in chains:
            worker.publish(chain, BOUNDARY)
        lookups = [worker.lookup(chain) for chain in chains]
        slots = [index * 4 for index in range(4)]
        outcomes = []

        def run(index: int) -> None:
            lease = lookups[index][1]
            assert lease
            for _ in range(10):
                result = worker.read(lease, chains[index], BOUNDARY, first_slot=slots[index])
                good = worker.holds(chains[index], BOUNDARY, slots[index])
                outcomes.append(result.ok and good)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == [True] * 40


def test_transfers_need_attached_memory(new_client: ClientMaker) -> None:
    """A mistake of the caller, not a fault: it is loud."""
    with pytest.raises(ValueError, match="attach"):
        new_client().read(LeaseId("x"), [], verify=True, timeout_s=1)
