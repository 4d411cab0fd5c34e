"""Publishing, scheduler side: pin what will be needed, confirm it, turn it into jobs.

A state at boundary b sits in its group's table from the step that computes token b - 1 until the
step after next. So it is pinned in the pass that schedules that step, counts as *confirmed* once
the step's output was processed (only then is it sent: no stream ordering is needed on top), and is
given back when a deeper one is confirmed, when it was sent, or when the request ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from backhaul.connector.catalog import Catalog
from backhaul.connector.endpoints import decode_end
from backhaul.connector.events import KvEvents
from backhaul.connector.jobs import BlockHolds, Job, JobBook
from backhaul.connector.messages import BlockRef, PublishJob
from backhaul.connector.presence import Presence
from backhaul.connector.stats import StatsRecorder
from backhaul.connector.tracking import Pin, TrackedRequest
from backhaul.protocols.checkpoint import (
    UNKNOWN_WORK,
    CheckpointKind,
    CheckpointManifest,
    DomainId,
    PrefillWork,
    PublicationId,
    Reason,
    primary_kind,
)
from backhaul.protocols.layout import CacheLayout, GroupKind, block_hash_index, required_blocks
from backhaul.protocols.options import NoPath, Options
from backhaul.protocols.policy import Matched, choose
from backhaul.protocols.record import DecodeEndReason
from backhaul.transfer.base import Store

logger = logging.getLogger("vllm.backhaul")

_ANNOUNCE_TTL_S = 5.0
"""A publication that takes longer is not worth waiting for; lookups stop waiting earlier anyway."""

_KEEP_ALIVE_S = 5.0
"""Between two keep-alives of open publications; the daemon's default time-to-live is far longer."""

BlockTable = Sequence[Sequence[int]]
"""Block ids by vLLM group index, then block index."""


@dataclass
class _Sending:
    """A dispatched job and what it is for. ``ended_at``: when its end was reached, which of the
    ``is_last`` one is when its request ended."""

    job: Job
    publication: PublicationId
    kinds: tuple[CheckpointKind, ...]
    tracked: TrackedRequest | None
    upto: int
    started: float
    ended_at: float = 0.0
    is_last: bool = False
    pathless: bool = False


class Publisher:
    """Scheduler half of publishing. Called from the scheduler's thread only; never blocks."""

    def __init__(
        self,
        *,
        options: Options,
        layout: CacheLayout,
        domain: DomainId,
        engine_id: str,
        object_bytes: dict[int, int],
        store: Store,
        catalog: Catalog,
        holds: BlockHolds,
        book: JobBook,
        stats: StatsRecorder,
        presence: Presence | None = None,
        events: KvEvents,
        work: PrefillWork = UNKNOWN_WORK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._layout = layout
        self._grid = layout.boundary_tokens
        self._domain = domain
        self._engine_id = engine_id
        self._object_bytes = object_bytes
        self._store = store
        self._catalog = catalog
        self._holds = holds
        self._book = book
        self._stats = stats
        self._presence = presence
        self._events = events
        self._work = work
        self._clock = clock
        self._outbox: list[PublishJob] = []
        self._sending: dict[int, _Sending] = {}
        # Requests with a decode position to give up, by id; the one reached longest ago first.
        self._decode_pins: dict[str, TrackedRequest] = {}
        self._open: dict[PublicationId, int] = {}  # jobs of it that some rank has not settled
        self._ending: set[PublicationId] = set()
        self._unsettled: dict[int, PublicationId] = {}  # by job
        self._kept_alive = clock()
        self._pins = 0
        self._sequence = 0
        self._ended_for_good: set[PublicationId] = set()

    # -- state for people and tests -----------------------------------------------------------

    @property
    def pins(self) -> int:
        """Pinned positions of all requests."""
        return self._pins

    @property
    def busy(self) -> bool:
        """A job waits to be dispatched or to be reported."""
        return bool(self._outbox or self._sending)

    def take_jobs(self) -> list[PublishJob]:
        """Jobs for the next step's metadata."""
        jobs, self._outbox = self._outbox, []
        return jobs

    # -- events -------------------------------------------------------------------------------

    def on_scheduled(self, tracked: TrackedRequest, tokens: int, table: BlockTable) -> None:
        """A step computes ``tokens`` more tokens of the request; ``table`` already covers them."""
        request = tracked.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + tokens
        if tracked.pins:
            self.confirm(tracked, start - request.num_in_flight_tokens, table)
        # Attention leaves every position behind, recurrent layers only some of them.
        recurrent = self._layout.has_recurrent
        passes = recurrent and tokens > self._grid
        for pin in tracked.pins.values() if passes else ():
            pin.passable |= not pin.confirmed and start < pin.boundary < end
        # The position that this step starts from is one too: decode begins with a state that was
        # handed over, and a local hit may lie on an end that the store lacks.
        reached = {start, end // self._grid * self._grid}
        if not recurrent:
            reached |= tracked.ends.within(start, end)
            if not self._is_prefill(request):  # drafts may be accepted up to any of them
                first = (start // self._grid + 1) * self._grid
                reached.update(range(first, end + 1, self._grid))
        for boundary in sorted(reached):
            if boundary % self._grid or boundary < max(start, 1):
                continue
            inside = start < boundary < end
            if inside and self._is_prefill(request) and not self._is_kept(boundary, table):
                continue  # a chunk leaves its state at its own end only
            kinds = () if boundary in tracked.sent else tracked.ends.kinds_at(boundary)
            if kinds or self._may_be_decode_end(tracked, boundary):
                self._pin(tracked, boundary, kinds, table, passable=inside and passes)

    def confirm(
        self,
        tracked: TrackedRequest,
        committed: int,
        table: BlockTable,
        *,
        limit: int | None = None,
    ) -> None:
        """``committed`` tokens are final: publish prompt ends, keep the deepest decode position.

        Pins above ``limit`` stay as they are: a speculative step that ends the request may have
        accepted tokens beyond its end.
        """
        limit = committed if limit is None else limit
        ready = sorted(b for b, p in tracked.pins.items() if not p.confirmed and b <= limit)
        for boundary in ready:
            pin = tracked.pins[boundary]
            if pin.passable and boundary != committed // self._grid * self._grid:
                self._unpin(tracked, boundary)
                continue
            pin.confirmed = True
            if pin.kinds:
                tracked.sent.add(boundary)
                self._publish(tracked, pin, pin.kinds, table, self._new_publication(tracked))
            if not self._may_be_decode_end(tracked, boundary) or (
                tracked.verbatim is not None
                and boundary > tracked.verbatim.end(tracked.request.all_token_ids, limit)
            ):
                self._unpin(tracked, boundary)
                continue
            if tracked.decode_pin:
                self._unpin(tracked, tracked.decode_pin)
            tracked.decode_pin = boundary
            self._decode_pins[tracked.request_id] = tracked
            if self._options.stream_ahead:
                self._stream(tracked, pin, table)

    def on_preempted(self, tracked: TrackedRequest) -> None:
        """The request lost its blocks: its decode positions are discarded."""
        self.unpin_all(tracked)

    def on_finished(
        self, tracked: TrackedRequest, table: BlockTable, *, committed: int, publish: bool
    ) -> bool:
        """The request ended with ``committed`` computed tokens. Sends D_end, or the end
        of what the parser keeps of it, if ``publish``. Returns whether D_end was dispatched."""
        limit = min(committed, max(tracked.request.num_tokens - 1, 0))
        self.confirm(tracked, committed, table, limit=limit)
        sent = False
        kind = CheckpointKind.DECODE_END if tracked.verbatim is None else CheckpointKind.BOUNDARY
        if publish and tracked.takes_decode:
            end = decode_end(
                committed=committed, total_tokens=tracked.request.num_tokens, grid=self._grid
            )
            if tracked.verbatim is not None:
                end = self._verbatim_boundary(tracked, limit)
            pin = tracked.pins.get(tracked.decode_pin)
            withheld = pin is None and tracked.pathless
            pathless = withheld or not self._has_path(tracked)
            if withheld or (pathless and self._options.no_path is NoPath.DISABLE):
                if end and end >= tracked.request.num_prompt_tokens - 1:
                    tracked.decode_end_reason = DecodeEndReason.NO_PUBLICATION_PATH
                    self._stats.count("publication_failures", Reason.NO_PUBLICATION_PATH)
            elif pin is not None and pin.boundary <= end:
                publication = tracked.publication or self._new_publication(tracked)
                sent = self._publish(tracked, pin, (kind,), table, publication, last=True)
                if sent and pathless:
                    tracked.decode_end_reason = DecodeEndReason.NO_PUBLICATION_PATH
                    next(reversed(self._sending.values())).pathless = True
            elif end >= tracked.request.num_prompt_tokens:
                self._stats.count("publication_failures", Reason.STATE_MISSING)
        if not sent:
            self.discard(tracked)
        self.unpin_all(tracked)
        return sent and kind is CheckpointKind.DECODE_END

    def discard(self, tracked: TrackedRequest) -> None:
        """The request ended without a D_end: give back its pins and what was sent ahead."""
        if tracked.publication is not None:
            self._end_publication(tracked.publication)
        self.unpin_all(tracked)

    def on_job(self, job: Job, *, finished: bool, settled: bool) -> None:
        """A rank reported one of this half's jobs."""
        sending = self._sending.get(job.job_id)
        if finished and sending is not None:
            del self._sending[job.job_id]
            self._complete(sending)
        if settled:
            self._settle(job)

    def keep_alive(self) -> None:
        """Keep streamed objects of running requests; called every pass, acts every few seconds."""
        now = self._clock()
        if self._open and now - self._kept_alive > _KEEP_ALIVE_S:
            self._kept_alive = now
            publications = list(self._open)
            self._catalog.send(lambda: self._store.keep_alive(publications, timeout_s=2.0))

    def unpin_all(self, tracked: TrackedRequest) -> None:
        """Give every pin of a request back."""
        for boundary in list(tracked.pins):
            self._unpin(tracked, boundary)

    def cut_off(self) -> None:
        """Let nothing that is under way become visible. Pins are the caller's to give back; from
        now on it reports no steps, and asks for no publication."""
        for publish in self.take_jobs():  # no rank knows of them
            sending = self._sending.pop(publish.job_id)
            del self._book.jobs[publish.job_id]
            if sending.tracked is not None and not sending.kinds:
                sending.tracked.stream_job = 0
            if sending.kinds:
                self._stats.count("publication_failures", Reason.CACHE_RESET)
                self._ending.add(sending.publication)
            self._settle(sending.job)
        self._ended_for_good.update(self._open)
        self._catalog.end_for_good(list(self._open))

    # -- pins ---------------------------------------------------------------------------------

    def _may_be_decode_end(self, tracked: TrackedRequest, boundary: int) -> bool:
        """A reply of one token ends at n = prompt length, and a handed-over state at one less."""
        reached = boundary >= tracked.request.num_prompt_tokens - 1
        if not (reached and tracked.takes_decode):
            return False
        if self._options.no_path is NoPath.DISABLE and not self._has_path(tracked):
            tracked.pathless = True
            return False
        return True

    def _verbatim_boundary(self, tracked: TrackedRequest, final_tokens: int) -> int:
        """Boundary of what the parser keeps of the finished request; 0 where the policy, which
        bounds how many positions a request may have, leaves it out."""
        assert tracked.verbatim is not None
        kept = tracked.verbatim.end(tracked.request.all_token_ids, final_tokens)
        choice = choose(tracked.policy, tracked.hints.known(Matched(), verbatim_end=kept))
        return kept // self._grid * self._grid if kept in choice.extra else 0

    def _has_path(self, tracked: TrackedRequest) -> bool:
        """Whether anybody can load this request's D_end; asks again soon where nobody can."""
        if self._presence is None or self._presence.has_path(own_prefill=tracked.carries_prompt):
            return True
        self._presence.missed()
        return False

    @staticmethod
    def _is_prefill(request: Any) -> bool:
        """The step recomputes known tokens: a prompt, or the output of a preempted request."""
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        return bool(request.num_computed_tokens < known)

    def _is_kept(self, boundary: int, table: BlockTable) -> bool:
        """A prefill chunk that goes past ``boundary`` leaves the state there all the same: some
        kernels export it, and vLLM then caches the block under that very prefix."""
        return all(
            (block := next(iter(table[group.index][boundary // group.block_tokens - 1 :]), 0))
            and self._holds.cached_tokens(block) == boundary
            for group in self._layout.groups
            if group.kind is GroupKind.RECURRENT
        )

    def _pin(
        self,
        tracked: TrackedRequest,
        boundary: int,
        kinds: tuple[CheckpointKind, ...],
        table: BlockTable,
        *,
        passable: bool = False,
    ) -> None:
        blocks: dict[int, tuple[tuple[int, int], ...]] = {}
        for group in self._layout.groups:
            if group.kind is GroupKind.FULL:
                continue
            ids = table[group.index]
            pairs = tuple(
                (i, ids[i]) for i in required_blocks(group, boundary) if i < len(ids) and ids[i]
            )
            if len(pairs) != len(required_blocks(group, boundary)):
                self._stats.count("publication_failures", Reason.STATE_MISSING)
                return
            blocks[group.index] = pairs
        pin = Pin(boundary, blocks, kinds, passable=passable, reached_at=self._clock())
        if (old := tracked.pins.get(boundary)) is not None:
            if old.blocks == blocks:
                return
            self._unpin(tracked, boundary)  # rolled back and crossed again in another block
        for_user = _ends_user_turn(tracked, kinds)
        rest = self._attention(tracked, boundary, table) if for_user else []
        if not self._take(pin.block_ids, for_user=for_user, later=[b.block_id for b in rest]):
            return
        tracked.pins[boundary] = pin
        self._pins += 1

    def _unpin(self, tracked: TrackedRequest, boundary: int) -> None:
        pin = tracked.pins.pop(boundary)
        self._pins -= 1
        if tracked.decode_pin == boundary:
            tracked.decode_pin = 0
            del self._decode_pins[tracked.request_id]
        self._holds.give_back(pin.block_ids)

    def _take(self, blocks: list[int], *, for_user: bool, later: Iterable[int] = ()) -> bool:
        """Hold blocks; False, and counted, where the pin limit forbids it.

        The end of a user's message outlives all that is said after it, so for it the positions of
        running replies give way: the oldest first, as it is replaced soonest. None does where
        ``later``, what the same end will need besides, has no room even so.
        """
        if for_user:
            pins = [(one, one.pins[one.decode_pin]) for one in self._decode_pins.values()]
            given_up = [block for _, pin in pins for block in pin.block_ids]
            enough = self._holds.has_room([*blocks, *later], without=given_up)
            for tracked, pin in pins if enough else ():
                if self._holds.has_room(blocks):
                    break
                self._unpin(tracked, pin.boundary)
                self._stats.count("publication_failures", Reason.PIN_LIMIT)
        if self._holds.take(blocks):
            return True
        self._stats.count("publication_failures", Reason.PIN_LIMIT)
        return False

    # -- jobs ---------------------------------------------------------------------------------

    def _new_publication(self, tracked: TrackedRequest) -> PublicationId:
        self._sequence += 1
        return PublicationId(f"{self._engine_id}/{tracked.request_id}/{self._sequence}")

    def _attention(
        self, tracked: TrackedRequest, boundary: int, table: BlockTable, *, above: int = 0
    ) -> list[BlockRef]:
        """Full-attention blocks below ``boundary`` and not below ``above`` (tokens)."""
        hashes = tracked.request.block_hashes
        unit = self._layout.hash_tokens
        return [
            BlockRef(g.index, table[g.index][i], bytes(hashes[block_hash_index(g, i, unit)]))
            for g in self._layout.groups
            if g.kind is GroupKind.FULL
            for i in range(above // g.block_tokens, boundary // g.block_tokens)
        ]

    def _pinned(self, tracked: TrackedRequest, pin: Pin) -> list[BlockRef]:
        hashes = tracked.request.block_hashes
        unit = self._layout.hash_tokens
        return [
            BlockRef(g.index, block, bytes(hashes[block_hash_index(g, i, unit)]))
            for g in self._layout.groups
            for i, block in pin.blocks.get(g.index, ())
        ]

    def _publish(
        self,
        tracked: TrackedRequest,
        pin: Pin,
        kinds: tuple[CheckpointKind, ...],
        table: BlockTable,
        publication: PublicationId,
        *,
        last: bool = False,
    ) -> bool:
        hashes = tracked.request.block_hashes
        count = pin.boundary // self._layout.hash_tokens
        above = tracked.streamed if publication == tracked.publication else 0
        blocks = self._attention(tracked, pin.boundary, table, above=above)
        blocks += self._pinned(tracked, pin)
        manifest = CheckpointManifest(
            boundary=pin.boundary,
            hashes=tuple(bytes(h) for h in hashes[:count]),
            kinds=kinds,
            producer=self._engine_id,
            user_turn=_ends_user_turn(tracked, kinds),
            work=self._work,
        )
        job = self._dispatch(tracked, publication, blocks, manifest, kinds, pin.boundary)
        if job is None:
            self._end_publication(publication)
            return False
        sending = self._sending[job.job_id]
        sending.is_last, sending.ended_at = last, self._clock() if last else pin.reached_at
        boundary, name = pin.boundary, manifest.hashes[-1]
        self._catalog.send(
            lambda: self._store.announce(
                self._domain, boundary, name, ttl_s=_ANNOUNCE_TTL_S, timeout_s=1.0
            )
        )
        return True

    def _stream(self, tracked: TrackedRequest, pin: Pin, table: BlockTable) -> None:
        """Send the attention blocks of a confirmed decode position ahead, one job at a time."""
        if tracked.stream_job:
            return
        blocks = self._attention(tracked, pin.boundary, table, above=tracked.streamed)
        if sum(self._object_bytes[b.group] for b in blocks) < self._options.stream_min_bytes:
            return
        if tracked.publication is None:
            tracked.publication = self._new_publication(tracked)
        job = self._dispatch(tracked, tracked.publication, blocks, None, (), pin.boundary)
        if job is not None:
            tracked.stream_job = job.job_id

    def _dispatch(
        self,
        tracked: TrackedRequest,
        publication: PublicationId,
        blocks: list[BlockRef],
        manifest: CheckpointManifest | None,
        kinds: tuple[CheckpointKind, ...],
        upto: int,
    ) -> Job | None:
        """Hold the blocks and put the job into the outbox. None where the pin limit forbids it."""
        ids = [block.block_id for block in blocks]
        if 0 in ids:  # a block that vLLM has dropped already
            self._stats.count("publication_failures", Reason.ATTENTION_MISSING)
            return None
        if not self._take(ids, for_user=_ends_user_turn(tracked, kinds)):
            return None
        job = self._book.open(tracked.request_id, ids)
        self._sending[job.job_id] = _Sending(job, publication, kinds, tracked, upto, self._clock())
        self._unsettled[job.job_id] = publication
        self._open[publication] = self._open.get(publication, 0) + 1
        self._outbox.append(
            PublishJob(job.job_id, publication, self._domain, tuple(blocks), manifest)
        )
        return job

    def _settle(self, job: Job) -> None:
        self._holds.give_back(job.blocks)
        publication = self._unsettled.pop(job.job_id)
        self._open[publication] -= 1
        self._abandon_if_over(publication)

    def _complete(self, sending: _Sending) -> None:
        job, tracked = sending.job, sending.tracked
        self._stats.count("publish_bytes", n=job.nbytes)
        if not sending.kinds:  # streamed ahead
            if tracked is not None:
                tracked.stream_job = 0
                if job.reason is None:
                    tracked.streamed = max(tracked.streamed, sending.upto)
            return
        now = self._clock()
        if job.reason is None:
            self._stats.count("pathless_publications", n=sending.pathless)
            self._count_published(sending.kinds, job.state_bytes)
            if tracked is not None and CheckpointKind.INPUT_END in sending.kinds:
                self._stats.count("user_turns_published", n=tracked.hints.user_turn)
            if tracked is not None:
                loaded = tracked.loaded.boundary if tracked.loaded else 0
                above = max(loaded, tracked.announced)
                self._events.stored(tracked.request, sending.upto, above=above)
                tracked.announced = max(above, sending.upto)
            self._stats.observe("publish_seconds", now - sending.started)
            for kind in sending.kinds:
                self._stats.observe("materialise_seconds", now - sending.ended_at, kind)
            if sending.is_last:
                self._stats.observe("finish_to_consumable_seconds", now - sending.ended_at)
        else:
            ended = sending.publication in self._ended_for_good
            reason = Reason.CACHE_RESET if ended else job.reason
            self._stats.count("publication_failures", reason)
        self._end_publication(sending.publication)

    def _count_published(self, kinds: tuple[CheckpointKind, ...], state_bytes: int) -> None:
        primary = primary_kind(kinds)
        self._stats.count("checkpoints_published", primary)
        self._stats.count("published_state_bytes", primary, n=state_bytes)
        for kind in kinds:
            self._stats.count("publications", kind)
            self._stats.count("duplicate_ends", kind, n=kind != primary)

    def _end_publication(self, publication: PublicationId) -> None:
        self._ending.add(publication)
        self._abandon_if_over(publication)

    def _abandon_if_over(self, publication: PublicationId) -> None:
        """Abandoning frees space that a transfer may still write into, and a job that runs on
        would only open the publication again: so wait until every job of it has settled."""
        if publication in self._ending and not self._open.get(publication):
            self._ending.discard(publication)
            self._open.pop(publication, None)
            self._catalog.give_back(lambda: self._store.abandon(publication, timeout_s=2.0))


def _ends_user_turn(tracked: TrackedRequest, kinds: tuple[CheckpointKind, ...]) -> bool:
    return CheckpointKind.INPUT_END in kinds and tracked.hints.user_turn
