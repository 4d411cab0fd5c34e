"""Runs one arm of the matrix on a real pair."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from backhaul.benchmarks.reuse.contents import Contents
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.record import (
    NO_POLICY,
    Arm,
    ArmResult,
    Budget,
    KindResult,
    PromptEndAt,
    Relation,
    RequestResult,
    Result,
)
from backhaul.benchmarks.reuse.relations import Relations, judged
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.reuse.turn_hints import hints_of
from backhaul.benchmarks.reuse.waves import waves
from backhaul.deploy.pair import Leg, Pair, scrape
from backhaul.deploy.pair import Turn as Answer
from backhaul.deploy.tiny_model import TOKEN_IDS
from backhaul.protocols.checkpoint import CheckpointKind, Reason
from backhaul.protocols.errors import StoreError
from backhaul.protocols.options import Policy
from backhaul.protocols.record import RequestRecord
from backhaul.transfer.backends.rpc import RECONNECT_MS

LETTERS = range(97, 123)
"""What prompts are made of: text that tokenises as it is."""
END = TOKEN_IDS["<|im_end|>"]
HANDED_TOKENS = 1
"""NIXL's hand-over leaves a hybrid prompt's last token to decode."""
SETTLE_S = 60.0
RECONNECT_S = 1.5 * RECONNECT_MS[1] / 1000
"""After a refused connection a client may wait so long before it tries again."""
ATTEMPTS = 3
"""Of one arm, where the store did not answer."""
UNLIMITED = "1GiB"
BURST_KILOTOKENS = 2
"""What an admission budget lets in at once: what so many thousand prompt tokens earn."""

_STORE = "backhaul:store_"
_ENGINE = "backhaul:"
_FAILED = f"{_ENGINE}publication_failures_total"
_REFUSED = (Reason.STORE_FULL, Reason.OVER_BUDGET)
_NO_ANSWER = (Reason.UNREACHABLE, Reason.TIMEOUT)


class RealArms:
    """One pair, arm after arm. Use from one thread."""

    def __init__(self, pair: Pair, shape: ModelShape, *, concurrency: int = 4) -> None:
        """``shape``: of the model that the engines run. They need ``VLLM_SERVER_DEV_MODE=1``, to
        be made to forget."""
        self._pair = pair
        self._shape = shape
        self._grid = shape.grid
        self._concurrency = concurrency
        self._greetings = 0
        self._runs = 0

    def run(self, arm: Arm, turns: Sequence[Turn]) -> list[Result]:
        """All turns of one arm; the last line is the arm's own. One in which the store did not
        answer a publication (a busy machine) says nothing of the policy and is run again.

        Raises ``httpx.HTTPError``, ``TimeoutError`` and ``ServiceError`` where an engine or the
        store does not do its part.
        """
        for _ in range(ATTEMPTS):
            results, unanswered = self._once(arm, turns)
            if not unanswered:
                return results
        raise TimeoutError(
            f"the store left {unanswered:g} publications of arm {arm.workload} {arm.policy} "
            f"unanswered, {ATTEMPTS} times: run it on quiet cores"
        )

    def _once(self, arm: Arm, turns: Sequence[Turn]) -> tuple[list[Result], float]:
        """The arm's lines, and how many publications the store did not answer."""
        self._fresh(arm)
        client = self._new_client()
        contents = Contents(LETTERS)
        relations = Relations(self._grid, handed_tokens=HANDED_TOKENS)
        before = self._books()
        peak = 0.0
        busy: list[float] = []
        results: list[Result] = []
        started = time.monotonic()
        active_s = 0.0
        for wave in waves(turns):
            if arm.prompt_end is PromptEndAt.ABSENT:
                self._pair.prefill.reset_prefix_cache()
            wave_started = time.monotonic()
            with ThreadPoolExecutor(self._concurrency) as pool:
                jobs = [
                    pool.submit(self._ask, hints(arm, turn, client), turn, contents, started)
                    for turn in wave
                ]
                answers = [job.result() for job in jobs]
            active_s += time.monotonic() - wave_started
            for turn, (answer, arrival_s, end_s) in zip(wave, answers, strict=True):
                contents.generated(turn, answer.decode.tokens)
                relation = relations.add(turn)
                busy.append(end_s - arrival_s)
                results.append(
                    request_result(
                        arm, turn, relation, relations, self._shape, answer, arrival_s, end_s
                    )
                )
            self._settle()
            peak = max(peak, scrape(self._pair.store.http_url, _STORE)[f"{_STORE}used_bytes"])
        books = _difference(self._books(), before)
        results.append(
            arm_result(
                arm,
                requests=len(busy),
                seconds=active_s,
                residents=sum(busy) / active_s if active_s else 0.0,
                peak_used_bytes=int(peak),
                books=books,
            )
        )
        return results, _unanswered(books)

    def _new_client(self) -> str:
        """A name that no run of an arm has had: engines outlive arms, and what ``auto`` learns they
        keep by client."""
        self._runs += 1
        return f"arm {self._runs} {time.monotonic_ns()}"

    def _ask(
        self, told: Mapping[str, Any], turn: Turn, contents: Contents, started: float
    ) -> tuple[Answer, float, float]:
        prompt = contents.ids(turn.prompt)
        arrival = time.monotonic() - started
        answer = self._pair.run(
            prompt,
            hints=told,
            max_tokens=turn.output_tokens + 4,
            min_tokens=turn.output_tokens - 1,
            logit_bias={str(END): 100.0},
        )
        return answer, arrival, time.monotonic() - started

    def _fresh(self, arm: Arm) -> None:
        """An empty store with the arm's budget, and engines that remember nothing."""
        store = self._pair.store
        store.stop()
        self._miss_store()
        store.configure(**store_settings(arm))
        store.start()
        store.wait_healthy(SETTLE_S)
        self._meet_store()
        for client in (self._pair.prefill, self._pair.decode):
            client.reset_prefix_cache()

    def _miss_store(self) -> None:
        """Both engines' workers have failed to publish while there is no store: each asks the next
        one who it is before anything else, so that its first transfer goes to the new memory. In
        the new store itself a greeting would leave a checkpoint, at the arm's expense."""
        clients = (self._pair.prefill, self._pair.decode)
        before = [_unanswered(client.metrics()) for client in clients]
        deadline = time.monotonic() + SETTLE_S
        while True:
            self._pair.run(
                self._greeting(),
                u_end=2 * self._grid,
                hints={"policy": Policy.BOTH, "load": False},
                max_tokens=self._grid + 8,
                min_tokens=self._grid + 3,
                logit_bias={str(END): 100.0},
            )
            self._settle()
            after = [_unanswered(client.metrics()) for client in clients]
            if all(now > then for now, then in zip(after, before, strict=True)):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"engines did not miss the stopped store in {SETTLE_S:g} s")

    def _meet_store(self) -> None:
        """Both engines' lookups have reached the new store, and nothing was left there."""
        time.sleep(RECONNECT_S)
        deadline = time.monotonic() + SETTLE_S
        for client in (self._pair.prefill, self._pair.decode):
            while True:
                before = self._lookups()
                client.complete(
                    self._greeting(), max_tokens=1, transfer={"backhaul": {"publish": False}}
                )
                if self._lookups() > before:
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{client.engine.spec.name} did not meet the restarted store in "
                        f"{SETTLE_S:g} s"
                    )
                time.sleep(0.5)
        self._settle()

    def _greeting(self) -> list[int]:
        """A prompt of three blocks that no request has begun with before."""
        self._greetings += 1
        name = f"greeting {self._greetings} {time.monotonic_ns()}"
        return Contents(LETTERS).ids((Span(name, 0, 3 * self._grid),))

    def _lookups(self) -> float:
        return scrape(self._pair.store.http_url, _STORE).get(f"{_STORE}lookups_total", 0.0)

    def _settle(self) -> None:
        """Wait until nothing is under way, as between a reply and the next message."""
        deadline = time.monotonic() + SETTLE_S
        time.sleep(0.1)  # the front end enters a step's gauges just after it answered
        for client in (self._pair.prefill, self._pair.decode):
            while client.metrics().get("backhaul:open_jobs", 0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{client.engine.name} still has jobs after {SETTLE_S:g} s")
                time.sleep(0.02)

    def _books(self) -> dict[str, float]:
        """The store's counters and both engines' added up."""
        books = scrape(self._pair.store.http_url, _STORE)
        for client in (self._pair.prefill, self._pair.decode):
            for name, value in client.metrics().items():
                books[name] = books.get(name, 0.0) + value
        return books


def _unanswered(books: Mapping[str, float]) -> float:
    """Publications that failed since the store did not answer."""
    return sum(books.get(f"{_FAILED}{{reason={reason.value}}}", 0.0) for reason in _NO_ANSWER)


def hints(arm: Arm, turn: Turn, client: str) -> dict[str, Any]:
    """``kv_transfer_params["backhaul"]`` of a request: the arm's policy, what a renderer and a
    proxy know of the turn, and ``client``, who sends it."""
    if arm.policy == NO_POLICY:
        return {"publish": False, "load": False}
    known = {"policy": arm.policy, "client": client, **hints_of(turn)}
    if known["rewrites"]:
        # The engine's reply is its own: the trace cannot say with which token rewriting begins.
        known["rewrites"] = None
    return {name: value for name, value in known.items() if value is not None and value != ""}


def store_settings(arm: Arm) -> dict[str, Any]:
    """Arguments of ``StoreDaemon.configure`` for an arm's budget."""
    args = [f"--eviction={arm.eviction}"]
    capacity = UNLIMITED
    if arm.budget is Budget.CAPACITY:
        capacity = str(arm.budget_bytes)
    if arm.budget is Budget.ADMITTED:
        args += [
            "--admission=budget",
            f"--admit-per-token={arm.budget_bytes // 1000}.{arm.budget_bytes % 1000:03}",
            f"--admit-burst={arm.budget_bytes * BURST_KILOTOKENS}",
        ]
    return {"capacity": capacity, "args": args}


def request_result(
    arm: Arm,
    turn: Turn,
    relation: Relation,
    relations: Relations,
    shape: ModelShape,
    answer: Answer,
    arrival_s: float,
    end_s: float,
) -> RequestResult:
    """One request's line, from what the prefill leg said of itself and of the store."""
    leg = answer.prefill
    said = _record(leg)
    tokens = said.prompt_tokens or leg.prompt_tokens
    hit = said.local_tokens + said.loaded_tokens
    fields = judged(turn, relation, relations, said) | {"prompt_tokens": tokens}
    return RequestResult(
        arm=arm,
        output_tokens=len(answer.decode.tokens),
        added_flops={kind: shape.prefill_flops(n, hit) for kind, n in fields["without"].items()},
        saved_flops=shape.prefill_flops(0, hit),
        loaded_flops=shape.prefill_flops(said.local_tokens, hit),
        prefill_flops=shape.prefill_flops(0, tokens),
        arrival_s=arrival_s,
        ttft_s=answer.ttft_s,
        residency_s=end_s - arrival_s,
        **fields,
    )


def _record(leg: Leg) -> RequestRecord:
    """The prefill leg's record. Raises ``StoreError`` where it is none that this version knows."""
    try:
        return msgspec.convert(dict(leg.backhaul or {}), RequestRecord)
    except msgspec.ValidationError as error:
        raise StoreError(f"the engine answered with a record of another version: {error}") from None


def arm_result(
    arm: Arm,
    *,
    requests: int,
    seconds: float,
    residents: float,
    peak_used_bytes: int,
    books: Mapping[str, float],
) -> ArmResult:
    """The arm's own line. ``books``: what store and engines counted meanwhile, by sample."""

    def count(sample: str, **labels: str) -> int:
        inside = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
        return round(books.get(sample + (f"{{{inside}}}" if inside else ""), 0.0))

    kinds = {}
    for kind in CheckpointKind:
        evicted = count(f"{_STORE}evicted_checkpoints_total", kind=kind.value)
        evicted_bytes = count(f"{_STORE}evicted_state_bytes_total", kind=kind.value)
        retained = count(f"{_STORE}retained_checkpoints", kind=kind.value)
        retained_bytes = count(f"{_STORE}retained_state_bytes", kind=kind.value)
        # What engines published counts a checkpoint anew each time, and two ends that share one
        # twice; the arm's store began empty.
        result = KindResult(
            logical=count(f"{_STORE}logical_ends_total", kind=kind.value),
            duplicates=count(f"{_STORE}duplicate_ends_total", kind=kind.value),
            created=max(retained + evicted, 0),
            state_bytes=max(retained_bytes + evicted_bytes, 0),
            evicted=evicted,
            evicted_state_bytes=evicted_bytes,
        )
        if result != KindResult():
            kinds[kind] = result
    evictions = count(f"{_STORE}evictions_total", reason="capacity")
    lifetimes = f"{_STORE}evicted_age_seconds_sum"
    return ArmResult(
        arm=arm,
        seconds=seconds,
        requests=requests,
        kinds=kinds,
        checkpoints_hit=count(f"{_STORE}checkpoints_hit_total"),
        evicted_unused=count(f"{_STORE}evicted_unused_checkpoints_total"),
        refused=sum(count(_FAILED, reason=reason.value) for reason in _REFUSED),
        published_bytes=count(f"{_ENGINE}publish_bytes_total"),
        loaded_bytes=count(f"{_ENGINE}load_bytes_total"),
        peak_used_bytes=peak_used_bytes,
        lifetime_s=sum(n for name, n in books.items() if name.startswith(lifetimes)) / evictions
        if evictions
        else 0.0,
        residents=residents,
    )


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
