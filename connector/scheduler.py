"""The scheduler half: turns vLLM's scheduler hooks into events for Publisher and Consumer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.request import RequestStatus

from backhaul.connector.catalog import Catalog
from backhaul.connector.consumer import Consumer
from backhaul.connector.endpoints import (
    choose_ends,
    chosen_kinds,
    decode_end,
    is_prefill_leg,
    may_publish_decode,
    prompt_ends,
    publishes_decode_end,
    verbatim_end,
    why_no_decode_end,
)
from backhaul.connector.engine import EngineFacts
from backhaul.connector.events import KvEvents
from backhaul.connector.hints import parse_hints, whole_prompt
from backhaul.connector.jobs import BlockHolds, JobBook
from backhaul.connector.junction import bind_junction_bound
from backhaul.connector.messages import StepMetadata, WorkerReport
from backhaul.connector.outcome import (
    Answered,
    Outcome,
    count_outcome,
    matched_tokens,
)
from backhaul.connector.presence import Presence
from backhaul.connector.publisher import Publisher
from backhaul.connector.request_log import RequestLog
from backhaul.connector.stats import BackhaulStats, StatsRecorder, TransportRanks, series
from backhaul.connector.tracking import Load, TrackedRequest
from backhaul.protocols.candidates import tag_candidates
from backhaul.protocols.checkpoint import UNKNOWN_WORK, NotAsked, Reason, primary_kind
from backhaul.protocols.match_history import MatchHistory, observe
from backhaul.protocols.metrics import NONE
from backhaul.protocols.options import FinishReason, Options, WorkerKind
from backhaul.protocols.policy import Policy
from backhaul.protocols.record import (
    Candidate,
    DecodeEndReason,
    InputEndOutcome,
    LoggedRequest,
    RequestRecord,
    Selected,
    to_params,
)
from backhaul.transfer.base import Member, Store

logger = logging.getLogger("vllm.backhaul")

_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
}

_CUT_BY_NIXL = "_p_side_truncated"
"""Among a request's parameters once NIXL's prefill side has dropped the prompt's last token, which
it does before this connector sees the request."""

_SETTLE_STEPPING_S = 30.0
"""How long an otherwise idle engine keeps stepping for jobs that are over but not settled. Past
this (a hung peer) they settle with the next traffic instead of burning a core."""


class SchedulerHalf:
    """One per engine; every method runs on the scheduler's thread and returns at once."""

    def __init__(
        self,
        facts: EngineFacts,
        options: Options,
        store: Store,
        *,
        loads: bool,
        publishes: bool,
        kind: WorkerKind | None = None,
        kv_events: bool = False,
    ) -> None:
        """
        Args:
            kind: which part of requests the engine serves; None: they will show.
            kv_events: the user enabled vLLM's KV events.
        """
        self._facts = facts
        self._chunks = facts.chunks
        self._options = options
        self._store = store
        self._publishes = publishes
        self._kind = kind
        self._requests: dict[str, TrackedRequest] = {}
        self._aborted_loads: dict[str, TrackedRequest] = {}
        self._pinned: dict[str, TrackedRequest] = {}
        self._manager: Any = None
        self._domain_sent = False
        self._keeps_inside_blocks = False
        self._cut_off = False  # the cache was reset: nothing is loaded or published any more
        self._idle_since: float | None = None
        self._stats = StatsRecorder()
        self._info = series("info", facts.domain.domain_id, options.policy)
        self._transports = TransportRanks()
        self._events = KvEvents(facts.layout, enabled=kv_events)
        self._history = MatchHistory()
        self._log = RequestLog(options.request_log) if options.request_log else None
        self._book = JobBook(facts.layout.ranks)
        self._holds = BlockHolds(int(facts.num_blocks * options.max_pinned_fraction))
        self._catalog = Catalog(store, facts.domain, options)
        self._presence = Presence(
            store,
            facts.domain,
            Member(
                facts.engine_id,
                loads=loads,
                publishes=publishes,
                converts=loads and options.convert_buffer_bytes > 0,
            ),
            address=options.store,
            no_path=options.no_path,
            wants_path=publishes
            and may_publish_decode(options.policy)
            and kind is not WorkerKind.PREFILL,
            kind=kind,
        )
        self._publisher = Publisher(
            options=options,
            layout=facts.layout,
            domain=facts.domain.domain_id,
            engine_id=facts.engine_id,
            object_bytes=facts.object_bytes,
            store=store,
            catalog=self._catalog,
            holds=self._holds,
            book=self._book,
            stats=self._stats,
            presence=self._presence,
            events=self._events,
            work=facts.work.coarse() if facts.work else UNKNOWN_WORK,
        )
        self._consumer = (
            Consumer(
                options=options,
                layout=facts.layout,
                catalog=self._catalog,
                holds=self._holds,
                book=self._book,
                stats=self._stats,
            )
            if loads
            else None
        )

    # -- vLLM's hooks, in the order of a request's life ---------------------------------------

    def bind(self, manager: Any) -> None:
        """vLLM made its KVCacheManager: bound its junctions, follow its cache resets.

        A reset of the prefix cache fails while any block is referenced, and vLLM tells the
        connector only afterwards; so the pins are given back when the reset begins.
        """
        self._manager = manager
        self._holds.bind(manager.block_pool)
        if not manager.coordinator.enable_partial_hash_hits:
            self._chunks = replace(self._chunks, kept=self._chunks.grid)
        self._keeps_inside_blocks = bool(manager.mamba_shared_prefix_checkpoint)
        if self._events.enabled:
            self._events.bind(manager)
        reset = manager.reset_prefix_cache

        def reset_prefix_cache() -> Any:
            self._give_pins_back()
            return reset()

        manager.reset_prefix_cache = reset_prefix_cache
        bind_junction_bound(manager)

    def on_new_request(self, request: Any) -> None:
        """A request arrived; its lookup begins now, before a slot is free for it."""
        params = request.kv_transfer_params
        params = params if isinstance(params, dict) else {}
        dropped = 1 if params.get(_CUT_BY_NIXL) else 0
        hints = parse_hints(params.get("backhaul"), request.num_prompt_tokens + dropped)
        for name in hints.rejected:
            self._stats.count("hints_rejected", name)
        handed_over = bool(params.get("do_remote_prefill"))
        self._presence.saw_request(handed_over=handed_over)
        carried = params.get("do_remote_decode") or handed_over
        policy = hints.policy or self._options.policy
        tracked = TrackedRequest(
            request,
            hints,
            carries_prompt=not carried,
            replies=not is_prefill_leg(params, self._kind, request.max_tokens),
            policy=policy,
            verbatim=verbatim_end(policy, hints, request.num_prompt_tokens),
            cut_off=self._cut_off,
        )
        if self._publishes and hints.publish:
            history = self._history.of(hints.template, hints.client)
            tracked.choice = choose_ends(policy, hints, history)
        self._requests[tracked.request_id] = tracked
        if self._consumer is not None:
            self._consumer.prefetch(tracked)

    def get_num_new_matched_tokens(
        self, request: Any, local_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that a load would add to the local hit; None while that is not known."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        load: Load | None = None
        if self._consumer is not None:
            offer = self._consumer.offer(tracked, local_tokens)
            if not offer.known:
                return None, False
            load = offer.load
        self._plan_prompt(tracked, local_tokens, load.boundary if load else 0)
        return (load.boundary - local_tokens, True) if load else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Blocks were allocated: a load that vLLM took from us starts with the next step."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and self._consumer is not None:
            self._consumer.accept(tracked, blocks.get_block_ids(), external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """One pass is scheduled: pin, confirm, and hand jobs to the workers."""
        for tracked in [t for t in self._pinned.values() if self._was_preempted(t)]:
            self._publisher.on_preempted(tracked)
            self._pinned.pop(tracked.request_id, None)
        state = scheduler_output.kv_connector_block_state
        taken = 0
        # In the order in which vLLM gave them their share of the pass.
        for i, (request_id, tokens) in enumerate(scheduler_output.num_scheduled_tokens.items()):
            if request_id in self._requests:
                room = self._chunks.room(taken, i, len(self._requests))
                self._on_scheduled(self._requests[request_id], tokens, room, state)
            taken += tokens
        self._publisher.keep_alive()
        meta = StepMetadata(publishes=self._publisher.take_jobs(), cut_off=self._cut_off)
        if self._consumer is not None:
            meta.loads = self._consumer.take_jobs()
        if not self._domain_sent:
            meta.domain = self._facts.domain
            self._domain_sent = True
        return meta

    def update_connector_output(self, output: Any) -> None:
        """Workers reported: settle jobs, and repair requests whose load failed."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._transports.update(report.transports)
            if report.cannot_convert:
                self._catalog.stop_converting()
                self._presence.stop_converting()
            for entry in report.reports:
                job, finished, settled = self._book.apply(entry)
                if job is None:
                    continue
                loads = self._consumer
                owner = loads if loads and loads.owns(job.job_id) else self._publisher
                owner.on_job(job, finished=finished, settled=settled)
        for request_id in output.finished_recving or ():
            self._on_received(request_id)

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its blocks are free as soon as this returns."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._pinned.pop(tracked.request_id, None)
        if self._consumer is not None:
            self._consumer.drop(tracked)
        if tracked.loading is not None:
            # Aborted while loading: vLLM keeps the blocks until the load is reported, and
            # num_computed_tokens counts tokens that never arrived.
            self._aborted_loads[tracked.request_id] = tracked
            self._publisher.discard(tracked)
            tracked.decode_end_reason = self._why_no_decode_end(tracked, committed=0)
            self._write_log(tracked, tracked.record())
            return False, None
        reason = _FINISH_REASONS.get(request.status)
        wanted = publishes_decode_end(reason, self._options.publish_on)
        ended = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if tracked.decode_pin and not (ended or wanted):
            self._stats.count("publication_failures", Reason.ABORTED)
        committed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        published = self._publisher.on_finished(
            tracked,
            block_ids,
            committed=committed,
            publish=self._publishes_of(tracked) and wanted,
        )
        if not published and tracked.decode_end_reason is None:
            tracked.decode_end_reason = self._why_no_decode_end(tracked, committed=committed)
        record = tracked.record(publishing_decode_end=published)
        withheld = (
            record.decode_end_reason is DecodeEndReason.CACHE_RESET,
            record.input_end.outcome is InputEndOutcome.CACHE_RESET,
        )
        self._stats.count("publication_failures", Reason.CACHE_RESET, n=sum(withheld))
        self._write_log(tracked, record)
        told = to_params(record)
        if tracked.hints.return_prompt_token_ids:
            # Not in the record: the request log does not keep what people say.
            params = request.kv_transfer_params or {}
            cut = bool(params.get(_CUT_BY_NIXL))
            ids = whole_prompt(request.prompt_token_ids or (), tracked.hints, cut=cut)
            if ids is not None:
                told["prompt_token_ids"] = ids
        return False, {"backhaul": told}

    # -- the engine's other questions ---------------------------------------------------------

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should keep stepping."""
        if not self._domain_sent:
            # Numbers leave an engine with a step only. This first one, of no tokens, shows
            # ``info`` before the first request, so that fresh engines can be compared.
            return True
        if self._publisher.busy or (self._consumer is not None and self._consumer.busy):
            self._idle_since = None
            return True
        if not self._book.jobs:
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since < _SETTLE_STEPPING_S

    def take_stats(self) -> BackhaulStats | None:
        """What happened since the last call."""
        if self._log is not None:
            written, dropped = self._log.take_counts()
            self._stats.count("request_log_records", n=written)
            self._stats.count("request_log_dropped", n=dropped)
        return self._stats.report({**self.gauges(), **self._transports.gauges(), self._info: 1})

    def take_events(self) -> Sequence[Any]:
        """KV events since the last call."""
        return self._events.take()

    def gauges(self) -> dict[str, int]:
        """State that must return to zero when the engine is idle."""
        return {
            "held_blocks": self._holds.held,
            "pins": self._publisher.pins,
            "open_leases": self._catalog.open_leases,
            "open_jobs": len(self._book.jobs),
            "tracked_requests": len(self._requests) + len(self._aborted_loads),
        }

    def reset_cache(self) -> None:
        """Whoever resets the connector's cache may be about to change the weights, or has done so,
        and the cache domain names those of the start: so nothing that others share is loaded or
        published from here on, nor becomes visible of what is under way. Waits a moment at most for
        the store's word on that."""
        self._give_pins_back()
        if self._cut_off:
            return
        logger.warning(
            "backhaul: vLLM reset the connector's cache, so this engine's weights may be others "
            "than domain %s names: it loads and publishes nothing more until it is restarted",
            self._facts.domain.domain_id,
        )
        self._cut_off = True
        for tracked in self._requests.values():
            tracked.cut_off = True
        self._publisher.cut_off()
        if self._consumer is not None:
            self._consumer.cut_off(self._requests.values(), self._manager)
        self._presence.leave()

    def shutdown(self) -> None:
        """Stop the catalog threads and close the store."""
        self._catalog.close()
        self._presence.close()
        self._store.close()
        if self._log is not None:
            self._log.close()

    # -- helpers ------------------------------------------------------------------------------

    def _give_pins_back(self) -> None:
        for tracked in self._pinned.values():
            self._publisher.unpin_all(tracked)
        self._pinned.clear()

    def _plan_prompt(self, tracked: TrackedRequest, local_tokens: int, boundary: int) -> None:
        """Decide the prompt's ends, and where vLLM must end a chunk for them.

        vLLM has just assigned ``shared_prefix_boundary`` (the junction, or 0) and reads it next
        when it cuts the chunk and when it decides what stays cached.
        """
        request = tracked.request
        resume = max(local_tokens, boundary)
        junction = request.shared_prefix_boundary
        grid = self._facts.layout.boundary_tokens
        tracked.junction = (junction or 0) // grid * grid
        publishes = self._publishes_of(tracked)
        tracked.takes_input_end = publishes and tracked.choice.input_end
        tracked.ends = prompt_ends(
            options=self._options,
            choice=tracked.choice,
            u_end=tracked.hints.u_end if publishes else None,
            prompt_tokens=request.num_prompt_tokens,
            junction=junction,
            grid=grid,
            carries_prompt=tracked.carries_prompt and publishes,
            drops_block=self._facts.drops_block,
        )
        if not self._facts.layout.has_recurrent:
            tracked.stops = []
            return
        tracked.stops = self._stops_left(request, tracked.ends.stops_after(resume), resume)
        if tracked.stops:
            request.shared_prefix_boundary = tracked.stops[0]
        elif boundary:
            # Makes vLLM keep the loaded state in its own prefix cache.
            request.shared_prefix_boundary = tracked.ends.kept_with(boundary)

    def _on_scheduled(self, tracked: TrackedRequest, tokens: int, room: int, state: Any) -> None:
        """``room``: what the pass had left for the request, of which it was given ``tokens``."""
        request = tracked.request
        if tracked.outcome is None:
            self._settle(tracked)
        end = request.num_computed_tokens + tokens
        grid = self._facts.layout.boundary_tokens
        if tracked.stops and end >= (floor := tracked.stops[0] // grid * grid):
            if end in (floor, tracked.stops[0]) and end < self._chunks.end(
                start=request.num_computed_tokens,
                room=room,
                prompt_tokens=request.num_prompt_tokens,
                tokens=request.num_tokens,
            ):
                if floor not in tracked.forced:  # again after a preemption
                    tracked.forced.append(floor)
                kind = primary_kind(tracked.ends.kinds_at(floor))
                self._stats.count("forced_chunk_ends", kind)
            tracked.stops = self._stops_left(request, tracked.stops, end)
            if tracked.stops:
                request.shared_prefix_boundary = tracked.stops[0]
        if not self._publishes_of(tracked):
            return
        start = request.num_computed_tokens
        if tracked.pins or end // grid > start // grid or (start and start % grid == 0):
            self._publisher.on_scheduled(tracked, tokens, state.get_block_ids(tracked.request_id))
            if tracked.pins:
                tracked.preemptions = request.num_preemptions
                self._pinned[tracked.request_id] = tracked
            else:
                self._pinned.pop(tracked.request_id, None)

    def _stops_left(self, request: Any, stops: list[int], position: int) -> list[int]:
        """Those at which a chunk from ``position`` can still end. For a junction inside a block
        vLLM ends it at the block's start, unless it can keep a state in there; once that was
        passed, the junction would only hide the stops behind it."""
        grid = self._facts.layout.boundary_tokens
        inside = request.num_prompt_tokens if self._keeps_inside_blocks else 0
        return [s for s in stops if (s if s <= inside else s // grid * grid) > position]

    def _settle(self, tracked: TrackedRequest) -> None:
        """The prefill begins now: from where, and what became of every candidate."""
        request, load, work = tracked.request, tracked.loaded, self._facts.work
        resumed = request.num_computed_tokens
        loaded = load.boundary - load.local_tokens if load else 0
        # vLLM's own split; it is gone once the first token was reported.
        prefill = request.prefill_stats
        external = prefill.num_external_cached_tokens if prefill is not None else loaded
        answered = tracked.answered or Answered()
        selected = load.boundary if load else 0
        candidates: tuple[Candidate, ...] = ()
        if self._consumer is not None:
            limits = self._consumer.limits(tracked)
            candidates = tag_candidates(answered.matches, selected, limits)
        tracked.outcome = outcome = Outcome(
            prompt_tokens=request.num_prompt_tokens,
            local_tokens=resumed - external,
            loaded_tokens=loaded,
            other_tokens=external - loaded,
            selected=Selected(
                boundary=load.boundary,
                kind=primary_kind(load.kinds),
                kinds=load.kinds,
                age_s=round(load.age_s, 3),
                producer=load.producer,
                producer_age=load.producer_age,
                avoided_flops=work.flops(load.local_tokens, load.boundary) if work else None,
            )
            if load
            else None,
            candidates=candidates,
            matched=matched_tokens(answered, has_recurrent=self._facts.layout.has_recurrent),
            reuse=tracked.reuse,
            junction=tracked.junction,
            work=work,
        )
        loads = self._consumer
        tracked.not_asked = loads.why_not_asked(tracked) if loads else NotAsked.ROLE
        if tracked.not_asked is not None:
            self._stats.count("not_asked", tracked.not_asked)
        asked = tracked.answered is not None and answered.reason is None
        count_outcome(outcome, self._stats, asked=asked)
        self._learn(tracked, candidates)
        if self._publishes_of(tracked):
            for kind in chosen_kinds(tracked.choice) or (NONE,):
                self._stats.count("chosen_ends", kind, tracked.choice.why)
        for candidate in candidates:
            if candidate.reason is Reason.EVICTED:
                self._events.removed(request, candidate.boundary)

    def _learn(self, tracked: TrackedRequest, candidates: tuple[Candidate, ...]) -> None:
        """Remember what matched, for requests of the same template and client. Only ``auto`` reads
        it, so under other policies nothing is counted."""
        if tracked.policy is not Policy.AUTO:
            return
        grid, unit = self._facts.layout.boundary_tokens, self._facts.layout.hash_tokens
        request, hints = tracked.request, tracked.hints
        known = len(request.block_hashes) * unit
        deepest = min(request.num_prompt_tokens, known) // grid * grid
        names = (bytes(request.block_hashes[b // unit - 1]) for b in range(deepest, 0, -grid))
        if tracked.answered is not None and tracked.answered.reason is None:
            continues = self._history.continued(names, request.num_prompt_tokens)
            self._history.add(hints.template, hints.client, observe(candidates, continues))
        input_end = (hints.u_end or 0) // grid * grid
        if tracked.choice.decode_end and 0 < input_end <= deepest:
            name = bytes(request.block_hashes[input_end // unit - 1])
            self._history.expect(name, input_end, request.num_prompt_tokens)

    def _write_log(self, tracked: TrackedRequest, record: RequestRecord) -> None:
        if self._log is None:
            return
        request, grid = tracked.request, self._facts.layout.boundary_tokens
        step = grid // self._facts.layout.hash_tokens
        hashes = request.block_hashes
        self._log.write(
            LoggedRequest(
                **{name: getattr(record, name) for name in record.__struct_fields__},
                time=time.time(),
                engine=self._facts.engine_id,
                request_id=tracked.request_id,
                finish=request.status.name,
                arrived=request.arrival_time,
                domain=self._facts.domain.domain_id,
                output_tokens=request.num_output_tokens,
                grid_tokens=grid,
                boundary_hashes=tuple(
                    bytes(hashes[i]).hex() for i in range(step - 1, len(hashes), step)
                ),
                token_ids=tuple(request.all_token_ids) if self._options.request_log_tokens else (),
            )
        )

    def _why_no_decode_end(self, tracked: TrackedRequest, *, committed: int) -> DecodeEndReason:
        request = tracked.request
        reason = _FINISH_REASONS.get(request.status)
        why = why_no_decode_end(
            wanted=self._publishes and tracked.hints.publish and tracked.choice.decode_end,
            replies=tracked.replies,
            finish_included=publishes_decode_end(reason, self._options.publish_on),
            boundary=decode_end(
                committed=committed,
                total_tokens=request.num_tokens,
                grid=self._facts.layout.boundary_tokens,
            ),
            prompt_tokens=request.num_prompt_tokens,
        )
        lost = why is DecodeEndReason.NOT_KEPT and tracked.cut_off
        return DecodeEndReason.CACHE_RESET if lost else why

    def _publishes_of(self, tracked: TrackedRequest) -> bool:
        return self._publishes and tracked.hints.publish and not self._cut_off

    @staticmethod
    def _was_preempted(tracked: TrackedRequest) -> bool:
        return bool(tracked.request.num_preemptions != tracked.preemptions)

    def _on_received(self, request_id: str) -> None:
        """vLLM is about to learn that a load ended, ours or another connector's."""
        aborted = self._aborted_loads.pop(request_id, None)
        tracked = aborted or self._requests.get(request_id)
        if tracked is None or tracked.loading is None or self._consumer is None:
            return
        self._consumer.on_received(tracked, self._manager, waiting=aborted is None)
