"""A P/D cluster in virtual time: the engines are modelled, the decisions are the connector's own.

Taken from the product as they are: which ends a prompt has and where its chunks end
(``connector.endpoints``), which checkpoint a request loads (``deepest_usable``) and what becomes of
the others (``connector.outcome``), the block index with its eviction and leases
(``transfer.index``). Modelled: when things happen, and vLLM's own prefix cache (``local_cache``).

One request::

    sent -> lookup -> queue -> [load] -> queue -> prefill -> hand-over -> decode -> ended
                                            publishes U_end, junction         publishes D_end

A prefill worker computes one request at a time and begins the loads of those that wait; a decode
worker runs as many as it has slots. Every reply ends by itself (FINISHED_STOPPED).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from backhaul.benchmarks.reuse.deployment import Clock, Deployment, Link, Routing
from backhaul.benchmarks.reuse.local_cache import LocalCache, LocalHit
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.prefix import BoundaryHashes
from backhaul.benchmarks.reuse.record import (
    NO_POLICY,
    Arm,
    ArmResult,
    Budget,
    Relation,
    RequestResult,
    Source,
)
from backhaul.benchmarks.reuse.relations import Relations, fate, hits_without
from backhaul.benchmarks.reuse.simulated_store import SimulatedStore
from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.reuse.turn_hints import ReplyTokens, hints_of
from backhaul.connector.endpoints import (
    PromptEnds,
    VerbatimEnd,
    choose_ends,
    decode_end,
    prompt_ends,
    publishes_decode_end,
    verbatim_end,
)
from backhaul.connector.hints import RequestHints, parse_hints
from backhaul.protocols.candidates import Limits, deepest_usable, tag_candidates
from backhaul.protocols.checkpoint import CheckpointKind, LeaseId, primary_kind
from backhaul.protocols.match_history import MatchHistory, observe
from backhaul.protocols.options import FinishReason, Options
from backhaul.protocols.policy import Choice, Matched, Policy, choose
from backhaul.protocols.record import Candidate
from backhaul.transfer.index import LookupAnswer
from backhaul.transfer.strategies import DEFAULT, Admission, Strategies

_NO_ANSWER = LookupAnswer((), None, None)


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """One arm to simulate.

    Attributes:
        policy: of the engines; None: they run without Backhaul.
        capacity_bytes: of the store; 0: no limit.
        strategies: how the store evicts and admits.
        min_load_tokens: see ``Options``.
    """

    workload: str
    shape: ModelShape
    deployment: Deployment = Deployment()
    policy: Policy | None = Policy.BOTH
    capacity_bytes: int = 0
    strategies: Strategies = DEFAULT
    min_load_tokens: int = 1
    repeat: int = 0

    @property
    def arm(self) -> Arm:
        """How its results are labelled. With both limits it is named by the admitted bytes."""
        budget, budget_bytes = Budget.UNLIMITED, 0
        if self.capacity_bytes:
            budget, budget_bytes = Budget.CAPACITY, self.capacity_bytes
        if self.strategies.admission is Admission.BUDGET:
            per_token = self.strategies.admit_bytes_per_token
            budget, budget_bytes = Budget.ADMITTED, round(per_token * 1000)
        return Arm(
            source=Source.SIMULATED,
            workload=self.workload,
            policy=self.policy or NO_POLICY,
            budget=budget,
            budget_bytes=budget_bytes,
            eviction=self.strategies.eviction,
            prompt_end=self.deployment.routing.prompt_end,
            model=self.shape.name,
            repeat=self.repeat,
        )


@dataclass(eq=False)
class _Job:
    """One request on its way."""

    turn: Turn
    hints: RequestHints
    hashes: Sequence[bytes]  # of prompt and output
    prompt: Sequence[bytes]  # of the prompt that prefill was given
    tokens: int  # of that prompt
    sent_at: float
    worker: _PrefillWorker
    answer: LookupAnswer = _NO_ANSWER
    answered_at: float = 0.0
    choice: Choice = field(default_factory=Choice)
    verbatim: VerbatimEnd | None = None
    ends: PromptEnds = field(default_factory=PromptEnds)
    stops: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    local_tokens: int = 0
    selected: int = 0
    pages: int = 0
    first_token_at: float = 0.0

    @property
    def resume(self) -> int:
        return max(self.local_tokens, self.selected)


class _PrefillWorker:
    def __init__(self, name: str, cache: LocalCache, deployment: Deployment) -> None:
        self.name = name
        self.cache = cache
        self.queue: deque[_Job] = deque()
        self.ready: deque[_Job] = deque()  # loaded, to be computed first
        self.busy = False
        self.holding = 0  # requests that hold pages
        self.waiting = 0  # requests that were sent here and are not prefilled
        self.reads = Link(deployment.read_bytes_per_s, deployment.call_s)
        self.writes = Link(deployment.write_bytes_per_s, deployment.call_s)


class _DecodeWorker:
    def __init__(self, name: str, deployment: Deployment) -> None:
        self.name = name
        self.queue: deque[_Job] = deque()
        self.running = 0
        self.writes = Link(deployment.write_bytes_per_s, deployment.call_s)
        self.arrivals = Link(deployment.handover_bytes_per_s, deployment.call_s)


Progress = Callable[[int], None]
"""Told how many requests have ended so far."""


class Simulator:
    """Runs one arm over a trace once."""

    def __init__(self, experiment: Experiment, *, on_progress: Progress | None = None) -> None:
        self._experiment = experiment
        self._shape = shape = experiment.shape
        self._deployment = deployment = experiment.deployment
        self._on_progress = on_progress
        self._options = Options(
            store="simulated://",
            policy=experiment.policy or Policy.BOTH,
            min_load_tokens=experiment.min_load_tokens,
        )
        self.clock = Clock()
        self._history = MatchHistory()
        self.store: SimulatedStore | None = None
        if experiment.policy is not None:
            self.store = SimulatedStore(
                shape,
                self.clock,
                self._options,
                capacity_bytes=experiment.capacity_bytes,
                strategies=experiment.strategies,
                write_bytes_per_s=deployment.write_bytes_per_s,
            )
        pages = deployment.local_bytes // shape.page_bytes
        self.prefill = [
            _PrefillWorker(
                f"prefill-{i}",
                LocalCache(shape.grid, pages=pages, state_pages=shape.state_pages),
                deployment,
            )
            for i in range(deployment.prefill_workers)
        ]
        self.decode = [
            _DecodeWorker(f"decode-{i}", deployment) for i in range(deployment.decode_workers)
        ]
        self._hashes = BoundaryHashes(shape.grid)
        self._relations = Relations(shape.grid, handed_tokens=deployment.handed_tokens)
        self._related: dict[str, Relation] = {}
        self._followers: dict[str, list[Turn]] = {}
        self._homes: dict[str, _PrefillWorker] = {}
        self._next_worker = 0
        self._arm = experiment.arm
        self._results: list[RequestResult] = []
        self._loaded_bytes = 0
        self._last_end = 0.0

    # -- the whole run ------------------------------------------------------------------------

    def run(self, turns: Iterable[Turn]) -> tuple[list[RequestResult], ArmResult]:
        """Simulate the turns, each sent at its arrival and after its predecessor has ended."""
        known: set[str] = set()
        begin: float | None = None
        for turn in turns:
            begin = turn.arrival_s if begin is None else min(begin, turn.arrival_s)
            known.add(turn.request)
            # In the trace's order: that of the ends differs from policy to policy.
            self._related[turn.request] = self._relations.add(turn)
            if turn.after and turn.after in known and turn.after != turn.request:
                self._followers.setdefault(turn.after, []).append(turn)
            else:
                self.clock.at(turn.arrival_s, self._send, turn)
        self.clock.run()
        return self._results, self._arm_result(begin or 0.0)

    def check(self) -> None:
        """Nothing is left over, and the books of store and caches agree; ``AssertionError``."""
        if self.store is not None:
            self.store.index.check()
            assert not self.store.index.leases.valid, "a lease was not given back"
            assert not self.store.index.publications.open, "a publication was not ended"
        for worker in self.prefill:
            worker.cache.check()
            assert not worker.waiting and not worker.cache.running_pages
        assert not any(worker.running or worker.queue for worker in self.decode)

    # -- prefill ------------------------------------------------------------------------------

    def _send(self, turn: Turn) -> None:
        content = (*turn.prompt, *turn.output)
        hashes = self._hashes.of(content, turn.conversation)
        tokens = max(turn.prompt_tokens - self._deployment.handed_tokens, 1)
        hints = parse_hints(hints_of(turn), turn.prompt_tokens)
        worker = self._route(turn)
        worker.waiting += 1
        prompt = hashes[: tokens // self._shape.grid]
        job = _Job(turn, hints, hashes, prompt, tokens, self.clock.now, worker)
        history = self._history.of(hints.template, hints.client)
        job.choice = choose_ends(self._options.policy, hints, history)
        job.verbatim = verbatim_end(self._options.policy, hints, turn.prompt_tokens)
        if self.store is None:
            self._answered(job, _NO_ANSWER)
            return
        usable = hashes[: (tokens - 1) // self._shape.grid]
        store = self.store
        self.clock.at(
            self.clock.now + self._deployment.call_s,
            lambda: store.lookup(usable, lambda answer: self._answered(job, answer)),
        )

    def _route(self, turn: Turn) -> _PrefillWorker:
        if self._deployment.routing is Routing.STICKY:
            home = self._homes.get(turn.after) or min(self.prefill, key=lambda w: w.waiting)
        else:
            home = self.prefill[self._next_worker % len(self.prefill)]
            self._next_worker += 1
        self._homes[turn.request] = home
        return home

    def _answered(self, job: _Job, answer: LookupAnswer) -> None:
        job.answer = answer
        job.answered_at = self.clock.now
        job.worker.queue.append(job)
        self._advance(job.worker)

    def _advance(self, worker: _PrefillWorker) -> None:
        """Compute what is loaded; else take the next of the queue, which may begin a load."""
        while not worker.busy:
            if worker.ready:
                self._compute(worker.ready.popleft())
            elif worker.queue and self._begin(worker.queue[0]):
                worker.queue.popleft()
            else:
                return

    def _begin(self, job: _Job) -> bool:
        """The scheduler takes the request: local hit, choice of a checkpoint, chunk ends. False
        where running requests leave no room for it yet."""
        if self.store is not None and self.clock.now >= job.answered_at + self._options.lease_s:
            self.store.release(job.answer.lease)  # waited too long: the lease has run out
            job.answer = self.store.lookup_again(job.hashes[: (job.tokens - 1) // self._shape.grid])
            job.answered_at = self.clock.now
        hit = self._local_hit(job)
        usable = {m.boundary: m for m in job.answer.matches if m.consumable}
        selected = deepest_usable(
            usable,
            local_tokens=hit.joint + self._options.min_load_tokens - 1,
            limit_tokens=job.tokens - 1,
            denied=frozenset(),
        )
        pages = -(-job.tokens // self._shape.grid) + 2 * self._shape.state_pages
        pages = max(pages - hit.joint // self._shape.grid, 1)
        limit = self._deployment.local_bytes // self._shape.page_bytes
        if limit and not job.worker.holding:
            pages = min(pages, limit)  # a prompt too long for the worker runs alone
            if not job.worker.cache.begin(job.prompt, hit.joint, pages):
                job.worker.cache.clear()
                hit = self._local_hit(job)
                job.worker.cache.begin(job.prompt, hit.joint, pages)
        elif not job.worker.cache.begin(job.prompt, hit.joint, pages):
            return False
        job.worker.holding += 1
        job.local_tokens, job.selected, job.pages = hit.joint, selected, pages
        self._plan(job, hit.attention if hit.attention > hit.joint else 0)
        if not selected:
            self._release(job)
            self._compute(job)
            return True
        assert self.store is not None
        nbytes = self.store.load_bytes(hit.joint, selected)
        self._loaded_bytes += nbytes
        done = job.worker.reads.done_at(self.clock.now, nbytes)
        self.clock.at(done, self._loaded, job)
        return True

    def _local_hit(self, job: _Job) -> LocalHit:
        cache = job.worker.cache
        if self._deployment.routing is Routing.FORGET:
            cache.clear()
            return LocalHit(0, 0)
        return cache.hit(job.prompt, job.tokens - 1)

    def _plan(self, job: _Job, junction: int) -> None:
        """The prompt's ends and chunk ends; which states stay in the worker's own cache."""
        grid = self._shape.grid
        last = (job.tokens - 1) // grid * grid
        job.ends = self._ends(job, junction)
        job.stops = [s for s in job.ends.stops_after(job.resume) if s <= job.tokens]
        kept = {*job.stops, last} if last > job.resume else {*job.stops}
        if job.selected and (not job.ends.stops_after(job.resume) or job.selected == last):
            kept.add(job.selected)  # the connector names a loaded state to vLLM
        if job.local_tokens:
            kept.add(job.local_tokens)
        job.states = sorted(kept)

    def _ends(self, job: _Job, junction: int) -> PromptEnds:
        grid = self._shape.grid
        if self.store is None:
            return PromptEnds(shared_prefix=junction)
        return prompt_ends(
            options=self._options,
            choice=job.choice,
            u_end=job.hints.u_end,
            prompt_tokens=job.tokens,
            junction=junction,
            grid=grid,
            carries_prompt=False,
        )

    def _loaded(self, job: _Job) -> None:
        self._release(job)
        job.worker.ready.append(job)
        self._advance(job.worker)

    def _release(self, job: _Job) -> None:
        lease: LeaseId | None = job.answer.lease
        if self.store is not None:
            self.store.release(lease)

    def _compute(self, job: _Job) -> None:
        deployment = self._deployment
        job.worker.busy = True
        position, when = job.resume, self.clock.now
        cuts = sorted({*job.stops, (job.tokens - 1) // self._shape.grid * self._shape.grid})
        for end in (*(cut for cut in cuts if cut > job.resume), job.tokens):
            if self.store is not None and position and job.ends.kinds_at(position):
                self.clock.at(when, self._publish_prompt_end, job, position)
            steps = -(-(end - position) // deployment.chunk_tokens)
            work = self._shape.prefill_flops(position, end)
            when += work / deployment.prefill_flops_per_s + steps * deployment.step_s
            position = end
        if self.store is not None and job.ends.kinds_at(position):
            self.clock.at(when, self._publish_prompt_end, job, position)
        self.clock.at(when, self._prefilled, job)

    def _publish_prompt_end(self, job: _Job, boundary: int) -> None:
        assert self.store is not None
        kinds = job.ends.kinds_at(boundary)
        self.store.publish(
            boundary,
            job.hashes,
            kinds,
            producer=job.worker.name,
            link=job.worker.writes,
            user_turn=CheckpointKind.INPUT_END in kinds and job.hints.user_turn,
        )

    def _prefilled(self, job: _Job) -> None:
        worker = job.worker
        worker.cache.end(
            job.prompt,
            job.local_tokens,
            job.pages,
            computed_tokens=job.tokens,
            states=job.states,
        )
        worker.holding -= 1
        worker.waiting -= 1
        worker.busy = False
        target = min(self.decode, key=lambda w: w.running + len(w.queue))
        nbytes = job.tokens * self._shape.kv_bytes + self._shape.state_bytes
        self.clock.at(target.arrivals.done_at(self.clock.now, nbytes), self._arrived, target, job)
        self._advance(worker)

    # -- decode -------------------------------------------------------------------------------

    def _arrived(self, worker: _DecodeWorker, job: _Job) -> None:
        worker.queue.append(job)
        self._fill(worker)

    def _fill(self, worker: _DecodeWorker) -> None:
        while worker.queue and worker.running < self._deployment.decode_slots:
            job = worker.queue.popleft()
            worker.running += 1
            self._publish_start(worker, job)
            job.first_token_at = self.clock.now + self._deployment.decode_token_s
            tokens = max(job.turn.output_tokens, 1)
            end = self.clock.now + tokens * self._deployment.decode_token_s
            self.clock.at(end, self._ended_decode, worker, job)

    def _publish_start(self, worker: _DecodeWorker, job: _Job) -> None:
        """Decode starts from a state that was handed over: where that is one of the prompt's
        ends, it is published as such."""
        start = job.turn.prompt_tokens - self._deployment.handed_tokens
        if self.store is None or not start or start % self._shape.grid:
            return
        ends = prompt_ends(
            options=self._options,
            choice=job.choice,
            u_end=None,
            prompt_tokens=job.turn.prompt_tokens,
            junction=0,
            grid=self._shape.grid,
            carries_prompt=False,
        )
        if kinds := ends.kinds_at(start):
            self.store.publish(start, job.hashes, kinds, producer=worker.name, link=worker.writes)

    def _ended_decode(self, worker: _DecodeWorker, job: _Job) -> None:
        turn, now = job.turn, self.clock.now
        worker.running -= 1
        if self.store is not None:
            self._publish_decode_end(worker, job)
        self._last_end = max(self._last_end, now)
        self._record(job, now)
        for follower in self._followers.pop(turn.request, ()):
            self.clock.at(follower.arrival_s, self._send, follower)
        if self._on_progress is not None:
            self._on_progress(len(self._results))
        self._fill(worker)

    def _publish_decode_end(self, worker: _DecodeWorker, job: _Job) -> None:
        turn = job.turn
        takes_decode = job.choice.decode_end or job.verbatim is not None
        if not takes_decode or not publishes_decode_end(
            FinishReason.STOP, self._options.publish_on
        ):
            return
        total = turn.prompt_tokens + turn.output_tokens
        kind = CheckpointKind.DECODE_END
        end = decode_end(committed=total - 1, total_tokens=total, grid=self._shape.grid)
        if job.verbatim is not None:
            kind = CheckpointKind.BOUNDARY
            end = self._verbatim_boundary(job, job.verbatim, total - 1)
        # No state lies below the position where decode began.
        if not end or end < turn.prompt_tokens - min(self._deployment.handed_tokens, 1):
            return
        assert self.store is not None
        self.store.publish(
            end,
            job.hashes,
            (kind,),
            producer=worker.name,
            link=worker.writes,
            streamed_s=(
                turn.output_tokens * self._deployment.decode_token_s
                if self._options.stream_ahead
                else 0.0
            ),
        )

    def _verbatim_boundary(self, job: _Job, verbatim: VerbatimEnd, committed: int) -> int:
        """As the connector's publisher does: of what the parser keeps; 0 where the policy leaves
        it out."""
        kept = verbatim.end(ReplyTokens(job.turn), committed)
        choice = choose(self._options.policy, job.hints.known(Matched(), verbatim_end=kept))
        return kept // self._shape.grid * self._shape.grid if kept in choice.extra else 0

    # -- results ------------------------------------------------------------------------------

    def _record(self, job: _Job, now: float) -> None:
        turn = job.turn
        relation = self._related[turn.request]
        limits = Limits(
            local_tokens=job.local_tokens,
            limit_tokens=job.tokens - 1,
            min_gain_tokens=self._options.min_load_tokens,
        )
        candidates = tag_candidates(job.answer.matches, job.selected, limits)
        self._learn(job, candidates)
        chosen = next((c for c in candidates if c.selected), None)
        kind = primary_kind(chosen.kinds) if chosen else ""
        hit = job.resume
        without = hits_without(
            candidates,
            local_tokens=job.local_tokens,
            selected=job.selected,
            min_gain_tokens=self._options.min_load_tokens,
        )
        reasons = (c.reason for c in candidates if c.reason is not None)
        self._results.append(
            RequestResult(
                arm=self._arm,
                request=turn.request,
                conversation=turn.conversation,
                relation=relation,
                prompt_tokens=job.tokens,
                output_tokens=turn.output_tokens,
                local_tokens=job.local_tokens,
                loaded_tokens=hit - job.local_tokens,
                selected=kind,
                selected_kinds=chosen.kinds if chosen else (),
                selected_boundary=job.selected,
                producer_age=self._relations.producer_age(turn, kind, job.selected) if kind else 0,
                decode_end=fate(CheckpointKind.DECODE_END, relation, candidates, job.selected),
                input_end=fate(CheckpointKind.INPUT_END, relation, candidates, job.selected),
                prompt_end=fate(CheckpointKind.PROMPT_END, relation, candidates, job.selected),
                without=without,
                added_flops={
                    kind: self._shape.prefill_flops(less, hit) for kind, less in without.items()
                },
                junction_known=any(
                    c.consumable and CheckpointKind.SHARED_PREFIX in c.kinds for c in candidates
                ),
                reason="" if chosen else str(next(reasons, "")),
                forced_splits=len(job.stops),
                saved_flops=self._shape.prefill_flops(0, hit),
                loaded_flops=self._shape.prefill_flops(job.local_tokens, hit),
                prefill_flops=self._shape.prefill_flops(0, job.tokens),
                arrival_s=job.sent_at,
                ttft_s=job.first_token_at - job.sent_at,
                residency_s=now - job.sent_at,
            )
        )

    def _learn(self, job: _Job, candidates: Sequence[Candidate]) -> None:
        """As the connector does."""
        if self._options.policy is not Policy.AUTO:
            return
        hints, prompt = job.hints, job.prompt
        continues = self._history.continued(reversed(prompt), job.turn.prompt_tokens)
        self._history.add(hints.template, hints.client, observe(candidates, continues))
        blocks = (hints.u_end or 0) // self._shape.grid
        if job.choice.decode_end and 0 < blocks <= len(prompt):
            boundary = blocks * self._shape.grid
            self._history.expect(prompt[blocks - 1], boundary, job.turn.prompt_tokens)

    def _arm_result(self, begin: float) -> ArmResult:
        seconds = max(self._last_end - begin, 0.0)
        resident = sum(result.residency_s for result in self._results)
        done = ArmResult(
            arm=self._arm,
            seconds=seconds,
            requests=len(self._results),
            residents=resident / seconds if seconds else 0.0,
            loaded_bytes=self._loaded_bytes,
        )
        if self.store is None:
            return done
        counters = self.store.index.counters
        evicted = counters["evictions_capacity"]
        return msgspec.structs.replace(
            done,
            kinds=self.store.kinds(),
            checkpoints_hit=counters["checkpoints_hit"],
            evicted_unused=counters["evicted_unused_checkpoints"],
            refused=self.store.refused,
            published_bytes=self.store.published_bytes,
            peak_used_bytes=self.store.peak_used_bytes,
            lifetime_s=counters["evicted_lifetime_ms"] / 1000 / evicted if evicted else 0.0,
        )


def simulate(
    experiment: Experiment, turns: Iterable[Turn], *, on_progress: Progress | None = None
) -> tuple[list[RequestResult], ArmResult]:
    """Run one arm. Equal arguments give equal results."""
    return Simulator(experiment, on_progress=on_progress).run(turns)
