"""The results of the reuse experiment: one JSON line per request and arm, one per finished arm.

Real engines and the simulator write the same lines, so that one report reads both. What depends on
the content of the turns (which ends a prompt can still reach) is added by ``relations``, the same
for both.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated

import msgspec

from backhaul.benchmarks.reuse.lines import whole_lines
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import format_bytes

RECORD_VERSION = 1
"""Version of the lines' meaning. 1: first version."""

RESULTS = "results.jsonl"
"""Name of the file in a folder of results."""

NO_POLICY = "none"
"""Stands for engines that neither publish nor load."""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
"""Seconds, FLOPs, means: sums of very many stay finite."""


class Source(enum.StrEnum):
    """Where a result comes from."""

    REAL = "real"
    SIMULATED = "simulated"
    SERVED = "served"
    """Requests of real clients, from the engines' request logs: no times, and no store's books."""


class Budget(enum.StrEnum):
    """What is equal between the policies that are compared."""

    UNLIMITED = "unlimited"
    """No pressure: nothing is evicted or refused."""
    CAPACITY = "capacity"
    """Equal total capacity of the store."""
    ADMITTED = "admitted"
    """Equal admitted checkpoint bytes per unit of traffic."""


class PromptEndAt(enum.StrEnum):
    """Whether the next turn finds the worker that computed its history's prompt."""

    PRESENT = "present"
    """Sticky routing: P_end lies in that worker's own prefix cache."""
    ABSENT = "absent"
    """Another prefill worker, or one that has evicted it."""
    MIXED = "mixed"
    """Requests of real clients: the one or the other."""


RUN_WITH = (PromptEndAt.PRESENT, PromptEndAt.ABSENT)
"""What experiments are run with."""


class Arm(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One cell of the matrix and one repeat of it.

    Attributes:
        policy: value of ``protocols.options.Policy``, or ``NO_POLICY``.
        budget_bytes: the capacity, or the admitted bytes per 1,000 prompt tokens; 0: unlimited.
        eviction: name of the store's eviction strategy.
        model: name of the model's shape.
        repeat: 0, 1, ...; repeats of one cell differ in nothing but seed and time.
    """

    source: Source
    workload: str
    policy: str
    budget: Budget = Budget.UNLIMITED
    budget_bytes: Count = 0
    eviction: str = "lru"
    prompt_end: PromptEndAt = PromptEndAt.ABSENT
    model: str = ""
    repeat: Count = 0

    @property
    def setting(self) -> tuple[str, str, str, int, str, str, str]:
        """All but policy and repeat: arms of one setting are compared with each other."""
        return (
            self.source,
            self.model,
            self.workload,
            self.budget_bytes,
            self.budget,
            self.eviction,
            self.prompt_end,
        )

    @property
    def limit(self) -> str:
        """The budget with its size and unit, as people read it."""
        if not self.budget_bytes:
            return str(self.budget)
        per = " per 1,000 tokens" if self.budget is Budget.ADMITTED else ""
        return f"{self.budget} {format_bytes(self.budget_bytes)}{per}"

    @property
    def title(self) -> str:
        """What tells it from others of a model, as people read it."""
        return (
            f"{self.workload}, {self.policy}, {self.limit}, {self.eviction}, "
            f"P_end {self.prompt_end}"
        )


class EndFate(enum.StrEnum):
    """What became, for one request, of an end of its predecessor: the first that holds."""

    NO_PREDECESSOR = "no_predecessor"
    REWRITTEN = "rewritten"
    """The prompt differs from the predecessor's tokens before that end: it can never match."""
    NOT_KEPT = "not_kept"
    """The policy does not publish it, or no boundary lies there: nobody has heard of it."""
    UNUSABLE = "unusable"
    """Known and not consumable: evicted, uncommitted, ..."""
    PASSED_OVER = "passed_over"
    """Consumable, but something at least as deep was used, or loading did not pay."""
    SELECTED = "selected"


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """How a request relates to those before it; from the turns' content alone.

    Attributes:
        continuation: 0 where it continues nobody, 1 for the first request that continues its
            predecessor, 2 for the second (a branch), and so on.
        reuse: how many requests so far could reuse the history of this conversation, this one
            included: 0 where there is nothing to reuse, 1 at the first reuse (the second turn),
            2 at the next one, whether it goes on or branches off. For a request without
            predecessor, the history is what opens its prompt (a system prompt).
        tool_continuation: see ``Turn``.
        decode_end, input_end, prompt_end: tokens of the predecessor's ends that this prompt still
            begins with, materialised on the grid; 0 where the history was rewritten before them.
        input_ends: U_ends of the predecessor and those before it that this prompt still begins
            with, ascending.
        rewritten: names of the predecessor's ends that the prompt no longer begins with.
    """

    continuation: Count = 0
    reuse: Count = 0
    tool_continuation: bool = False
    decode_end: Count = 0
    input_end: Count = 0
    prompt_end: Count = 0
    input_ends: tuple[Count, ...] = ()
    rewritten: tuple[CheckpointKind, ...] = ()


class RequestResult(msgspec.Struct, frozen=True, kw_only=True, tag="request", tag_field="type"):
    """One request of one arm. Lengths in tokens, times in seconds, work in FLOPs.

    ``prompt_tokens`` is what the prefill worker was given: ``local`` + ``loaded`` + ``other`` +
    ``recomputed``. Where the hand-over drops the last token, that one is not among them.

    Attributes:
        local_tokens: found in the prefill worker's own cache.
        loaded_tokens: loaded from the store on top of that.
        other_tokens: brought by another connector.
        selected: kind of the checkpoint that was loaded; "" for none.
        selected_kinds: all logical ends that share it.
        selected_boundary: its boundary; 0 for none.
        producer_age: 1 where the previous request of the conversation made the selected
            checkpoint, 2 for the one before, ...; 0 where unknown or nothing was selected.
        without: kind -> local and loaded tokens there would have been had no checkpoint stood for
            that kind alone; only kinds for which it is less.
        added_flops: the same kinds -> estimated work of the tokens from there to the hit.
        junction_known: a consumable candidate was a junction.
        reason: why nothing was loaded, where there is one.
        forced_splits: prefill chunks that were ended for a checkpoint.
        saved_flops, loaded_flops, prefill_flops: estimated work of the reused tokens, of the
            loaded ones among them, and of the whole prompt.
        arrival_s: when it was sent, since the arm's beginning.
        ttft_s: from there to the first token for the user.
        residency_s: from there to the end of its output.
    """

    version: int = RECORD_VERSION
    arm: Arm
    request: str
    conversation: str = ""
    relation: Relation = Relation()
    prompt_tokens: Count
    output_tokens: Count = 0
    local_tokens: Count = 0
    loaded_tokens: Count = 0
    other_tokens: Count = 0
    selected: str = ""
    selected_kinds: tuple[CheckpointKind, ...] = ()
    selected_boundary: Count = 0
    producer_age: Count = 0
    decode_end: EndFate = EndFate.NO_PREDECESSOR
    input_end: EndFate = EndFate.NO_PREDECESSOR
    prompt_end: EndFate = EndFate.NO_PREDECESSOR
    without: dict[CheckpointKind, Count] = {}
    added_flops: dict[CheckpointKind, Amount] = {}
    junction_known: bool = False
    reason: str = ""
    forced_splits: Count = 0
    saved_flops: Amount = 0.0
    loaded_flops: Amount = 0.0
    prefill_flops: Amount = 0.0
    arrival_s: Amount = 0.0
    ttft_s: Amount = 0.0
    residency_s: Amount = 0.0

    @property
    def hit_tokens(self) -> int:
        """The effective joint hit: where the prefill began, without another connector's tokens."""
        return self.local_tokens + self.loaded_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.hit_tokens - self.other_tokens

    @property
    def cluster(self) -> tuple[int, str]:
        """What is resampled: requests of one conversation (or alone) of one repeat."""
        return (self.arm.repeat, self.conversation or self.request)


class KindResult(msgspec.Struct, frozen=True, kw_only=True):
    """The store's books of one kind of end, over one arm.

    Attributes:
        logical, duplicates: ends that arrived, and those of them that shared a checkpoint which
            is named by another end (or published already).
        created: checkpoints by the end that names them.
        state_bytes: recurrent bytes that were kept for them.
        evicted, evicted_state_bytes: of these, what had to go.
    """

    logical: Count = 0
    duplicates: Count = 0
    created: Count = 0
    state_bytes: Count = 0
    evicted: Count = 0
    evicted_state_bytes: Count = 0


class ArmResult(msgspec.Struct, frozen=True, kw_only=True, tag="arm", tag_field="type"):
    """A finished arm: what belongs to no single request. An arm without this line was cut off.

    Attributes:
        seconds: from the first request's arrival to the last one's end (virtual or real).
        kinds: the store's books by kind of end.
        checkpoints_hit: checkpoints that were found consumable at least once.
        evicted_unused: evicted ones that never were.
        refused: publications for which there was no room or no budget.
        published_bytes, loaded_bytes: moved into and out of the store.
        peak_used_bytes: highest occupancy seen.
        lifetime_s: mean age of evicted checkpoints; 0 where none was.
        residents: requests in the system, mean over time.
    """

    version: int = RECORD_VERSION
    arm: Arm
    seconds: Amount
    requests: Count
    kinds: dict[CheckpointKind, KindResult] = {}
    checkpoints_hit: Count = 0
    evicted_unused: Count = 0
    refused: Count = 0
    published_bytes: Count = 0
    loaded_bytes: Count = 0
    peak_used_bytes: Count = 0
    lifetime_s: Amount = 0.0
    residents: Amount = 0.0


Result = RequestResult | ArmResult

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Result] = msgspec.json.Decoder(Result)


def write_results(results: Iterable[Result], file: IO[bytes]) -> None:
    """Append lines, to a file that ``lines.appending`` opened."""
    for result in results:
        file.write(_ENCODER.encode(result) + b"\n")
    file.flush()


def read_results(path: Path, *, say_torn: bool = True) -> Iterator[Result]:
    """The lines of a file. A torn last line, as a killed run leaves it, is passed over.

    Raises ``ConfigError`` that names file, line and field for anything else that is malformed,
    numbers that cannot be any included, and where the file cannot be read.
    """
    for where, line in whole_lines(path, say_torn=say_torn):
        yield _result(line, where)


def read_files(paths: Iterable[Path]) -> Iterator[Result]:
    """The lines of several files. Raises ``ConfigError`` as ``read_results`` does, and where an
    arm was finished twice: the names of the files, and what to do."""
    seen: dict[Arm, Path] = {}
    for path in paths:
        for result in read_results(path):
            if isinstance(result, ArmResult):
                arm = result.arm
                if arm in seen:
                    name = f"({arm.title}, repeat {arm.repeat})"
                    if seen[arm] != path:
                        raise ConfigError(
                            f"{path} holds an arm that {seen[arm]} holds too {name}: give only one "
                            "of these files"
                        )
                    raise ConfigError(
                        f"{path} holds an arm twice {name}: a command was repeated into this file; "
                        "remove it and run the command once"
                    )
                seen[arm] = path
            yield result


def _result(line: bytes, where: str) -> Result:
    try:
        result = _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where}: no result of this experiment: {error}") from None
    if result.version != RECORD_VERSION:
        raise ConfigError(f"{where}: version {result.version}, this report reads {RECORD_VERSION}")
    return result
