"""The store in virtual time: the embedded daemon's own index, with links instead of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backhaul.benchmarks.reuse.deployment import Clock, Link
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.record import KindResult
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreFull
from backhaul.protocols.layout import (
    CacheLayout,
    GroupKind,
    GroupLayout,
    checkpoint_objects,
)
from backhaul.protocols.options import Options
from backhaul.transfer.base import Grant, GrantStatus, Written
from backhaul.transfer.index import BlockIndex, LookupAnswer
from backhaul.transfer.strategies import DEFAULT, Strategies

UNLIMITED_BYTES = 1 << 60
"""Capacity where there is to be no pressure."""
_PUBLICATION_TTL_S = 300.0
_LEASE_MAX_S = 300.0
_ANNOUNCE_TTL_S = 5.0
_BUSY_RETRY_S = 0.002
"""As the connector's worker does."""

_REFUSALS = (GrantStatus.FULL, GrantStatus.OVER_BUDGET)
_ATTENTION, _STATE = 0, 1


@dataclass
class Publication:
    """One checkpoint on its way. ``streamed_s``: how long its attention could be sent before."""

    name: PublicationId
    manifest: CheckpointManifest
    link: Link
    deadline: float
    streamed_s: float = 0.0
    todo: list[tuple[ObjectKey, int]] = field(default_factory=list)


@dataclass
class _Waiting:
    hashes: Sequence[bytes]
    deadline: float
    answer: Callable[[LookupAnswer], None]
    answered: bool = False


class SimulatedStore:
    """Runs one ``BlockIndex``. Everything it does takes virtual time."""

    def __init__(
        self,
        shape: ModelShape,
        clock: Clock,
        options: Options,
        *,
        capacity_bytes: int = 0,
        strategies: Strategies = DEFAULT,
        write_bytes_per_s: float,
    ) -> None:
        """``capacity_bytes`` 0: no limit."""
        self._clock = clock
        self._options = options
        self._write_bytes_per_s = write_bytes_per_s
        layout = CacheLayout(
            groups=(
                GroupLayout(index=_ATTENTION, kind=GroupKind.FULL, block_tokens=shape.grid),
                GroupLayout(index=_STATE, kind=GroupKind.RECURRENT, block_tokens=shape.grid),
            ),
            hash_tokens=shape.grid,
        )
        self._layout = layout
        self._work = shape.work
        self._bytes = {_ATTENTION: shape.block_bytes, _STATE: shape.state_bytes}
        self.index = BlockIndex(
            capacity_bytes or UNLIMITED_BYTES,
            publication_ttl_s=_PUBLICATION_TTL_S,
            lease_max_s=_LEASE_MAX_S,
            strategy=strategies.make_eviction(),
            admission=strategies.make_admission(),
        )
        record = DomainRecord(
            model=shape.name,
            weights="",
            layout=layout,
            hash_function="spans",
            hash_probe="",
            kv_dtype="",
            platform="simulated",
            vllm="",
        )
        self._domain: DomainId = self.index.open_domain(record, clock.now)
        self._waiting: list[_Waiting] = []
        self._sequence = 0
        self.published_bytes = 0
        self.peak_used_bytes = 0
        self.refused = 0

    # -- loads --------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes], answer: Callable[[LookupAnswer], None]) -> None:
        """Ask for a prefix; ``answer`` is called once, after the bounded wait for what is about
        to come."""
        waiting = _Waiting(hashes, self._clock.now + self._options.publication_wait_s, answer)
        if not self._try_answer(waiting):
            self._waiting.append(waiting)

    def lookup_again(self, hashes: Sequence[bytes]) -> LookupAnswer:
        """Ask once more for the same request, without waiting."""
        return self._lookup(hashes, repeat=True)

    def _lookup(self, hashes: Sequence[bytes], *, repeat: bool) -> LookupAnswer:
        now, lease_s = self._clock.now, self._options.lease_s
        return self.index.lookup(self._domain, hashes, 0, lease_s, now, repeat=repeat)

    def release(self, lease: LeaseId | None) -> None:
        """Give a lease back."""
        if lease is not None:
            self.index.release([lease], self._clock.now)

    def load_bytes(self, local_tokens: int, boundary: int) -> int:
        """What a load moves: attention above the local hit and one state."""
        blocks = (boundary - local_tokens) // self._layout.boundary_tokens
        return blocks * self._bytes[_ATTENTION] + self._bytes[_STATE]

    # -- publications -------------------------------------------------------------------------

    def publish(
        self,
        boundary: int,
        hashes: Sequence[bytes],
        kinds: tuple[CheckpointKind, ...],
        *,
        producer: str,
        link: Link,
        user_turn: bool = False,
        streamed_s: float = 0.0,
    ) -> None:
        """Send the checkpoint at ``boundary`` of a prefix: reserve, write, commit."""
        now = self._clock.now
        count = boundary // self._layout.hash_tokens
        manifest = CheckpointManifest(
            boundary=boundary,
            hashes=tuple(hashes[:count]),
            kinds=kinds,
            producer=producer,
            user_turn=user_turn,
            work=self._work,
        )
        self.index.announce(self._domain, boundary, hashes[count - 1], _ANNOUNCE_TTL_S, now)
        self._sequence += 1
        publication = Publication(
            PublicationId(f"{self._sequence}"),
            manifest,
            link,
            now + self._options.publish_timeout_s,
            streamed_s,
            [
                (ObjectKey(0, group, name), self._bytes[group])
                for group, name in checkpoint_objects(self._layout, boundary, manifest.hashes)
            ],
        )
        self._send(publication)

    def _send(self, publication: Publication) -> None:
        now = self._clock.now
        if now + publication.link.backlog_s(now) >= publication.deadline:
            self.refused += 1
            self.index.abandon(publication.name, now)
            return
        try:
            grants = self.index.reserve(self._domain, publication.name, publication.todo, now)
        except StoreFull:
            self.refused += 1
            return
        if any(grant.status in _REFUSALS for grant in grants):
            self.refused += 1
            self.index.abandon(publication.name, now)
            return
        granted = [grant for grant in grants if grant.status is GrantStatus.GRANTED]
        busy = any(grant.status is GrantStatus.BUSY for grant in grants)
        nbytes = sum(grant.nbytes for grant in granted)
        self.published_bytes += nbytes
        self.peak_used_bytes = max(self.peak_used_bytes, self.index.objects.arena.used_bytes)
        attention = [g.nbytes for g in granted if g.key.group == _ATTENTION]
        # All but the last block had time to be sent while the request decoded.
        ahead = min(
            max(sum(attention) - self._bytes[_ATTENTION], 0),
            publication.streamed_s * self._write_bytes_per_s,
        )
        done = publication.link.done_at(now, nbytes - ahead)
        self._clock.at(done, self._commit, publication, granted, busy)

    def _commit(self, publication: Publication, granted: list[Grant], busy: bool) -> None:
        now = self._clock.now
        written = [Written(grant.key, grant.token, 0) for grant in granted]
        manifest = None if busy else publication.manifest
        result = self.index.commit(self._domain, publication.name, 0, written, manifest, now)
        again = busy or bool(result.missing)
        if again and now < publication.deadline:
            publication.streamed_s = 0.0
            self._clock.at(now + _BUSY_RETRY_S, self._send, publication)
            return
        self.refused += again
        self.index.abandon(publication.name, now)
        self._changed()

    def _changed(self) -> None:
        self._waiting = [one for one in self._waiting if not one.answered]
        self._waiting = [one for one in self._waiting if not self._try_answer(one)]

    def _try_answer(self, waiting: _Waiting) -> bool:
        now = self._clock.now
        if waiting.answered:
            return True
        if now < waiting.deadline:
            awaited = self.index.awaited(self._domain, waiting.hashes, 0, now)
            if awaited is not None:
                self._clock.at(min(waiting.deadline, awaited.until), self._try_answer, waiting)
                return False
        waiting.answered = True
        waiting.answer(self._lookup(waiting.hashes, repeat=False))
        return True

    # -- results ------------------------------------------------------------------------------

    def kinds(self) -> dict[CheckpointKind, KindResult]:
        """The index's books by kind of end."""
        counters = self.index.counters
        gauges = self.index.stats().gauges
        results: dict[CheckpointKind, KindResult] = {}
        for kind in CheckpointKind:
            evicted = counters[f"evicted_checkpoints_{kind}"]
            evicted_bytes = counters[f"evicted_state_bytes_{kind}"]
            results[kind] = KindResult(
                logical=counters[f"logical_ends_{kind}"],
                duplicates=counters[f"duplicate_ends_{kind}"],
                created=gauges[f"retained_checkpoints|{kind}"] + evicted,
                state_bytes=gauges[f"retained_state_bytes|{kind}"] + evicted_bytes,
                evicted=evicted,
                evicted_state_bytes=evicted_bytes,
            )
        return results
