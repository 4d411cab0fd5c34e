"""What the scheduler half remembers of one request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backhaul.connector.endpoints import PromptEnds, VerbatimEnd, chosen_kinds
from backhaul.connector.hints import RequestHints
from backhaul.connector.jobs import Job
from backhaul.connector.outcome import Answered, Outcome, shown
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    LeaseId,
    LookupOutcome,
    NotAsked,
    ProducerAge,
    PublicationId,
    Reason,
    Reuse,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.policy import Choice, Policy
from backhaul.protocols.record import (
    Chosen,
    DecodeEndReason,
    InputEnd,
    InputEndOutcome,
    RequestRecord,
)


@dataclass
class Pin:
    """Blocks held for a checkpoint that may be published.

    Attributes:
        boundary: tokens of the prefix whose state the blocks hold.
        blocks: group index -> (block index, block id) pairs of every group whose blocks vLLM
            would drop: states and windows. Full attention stays in the request's own table.
        kinds: prompt ends that materialise here; empty for a decode position.
        confirmed: the step that writes the blocks has been processed: the bytes are final.
        passable: a step of many draft tokens may go past the boundary and leave no state there.
        reached_at: when the step that computes the boundary was scheduled.
    """

    boundary: int
    blocks: dict[int, tuple[tuple[int, int], ...]]
    kinds: tuple[CheckpointKind, ...] = ()
    confirmed: bool = False
    passable: bool = False
    reached_at: float = 0.0

    @property
    def block_ids(self) -> list[int]:
        """Every held block id."""
        return [block for pairs in self.blocks.values() for _, block in pairs]


@dataclass
class Load:
    """A load that was offered to vLLM; from ``lease`` on, set once vLLM took it. ``source`` is the
    checkpoint's domain where it is another than the engine's own."""

    boundary: int
    local_tokens: int
    kinds: tuple[CheckpointKind, ...]
    age_s: float = 0.0
    producer: str = ""
    producer_age: ProducerAge = ProducerAge.PREVIOUS
    source: DomainRecord | None = None
    lease: LeaseId = field(default=LeaseId(""))
    block_ids: tuple[int, ...] = ()
    job: Job = field(default_factory=lambda: Job(0, 1, ""))
    started: float = 0.0


@dataclass
class TrackedRequest:
    """Connector state of one request; ``request`` is vLLM's own object.

    ``answered`` is the store's last answer; ``reuse`` comes from the first one, since asking counts
    as a use; ``junction`` is vLLM's own, in whole boundaries; ``denied``: boundary -> why its load
    failed; ``replies`` is false of a prefill leg, whose one token is no reply;
    ``outcome`` is set once, when the prefill begins;
    ``lookup`` is what its last lookup before that came to, ``not_asked`` why there was none;
    ``forced`` are the chunk ends that were forced so far; ``takes_input_end`` says whether policy,
    role and hints allow a U_end to be published. ``choice`` is what its ``policy`` chose when it
    arrived; ``verbatim`` finds the end of what the parser keeps, where the policy asks for it;
    ``decode_end_reason`` says why nobody can load the end of the reply, published or not.
    """

    request: Any
    hints: RequestHints
    carries_prompt: bool
    replies: bool = True
    policy: Policy = Policy.BOTH
    choice: Choice = field(default_factory=Choice)
    verbatim: VerbatimEnd | None = None
    ends: PromptEnds = field(default_factory=PromptEnds)
    stops: list[int] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)
    decode_pin: int = 0
    pathless: bool = False  # a decode position was not pinned, for want of a publication path
    sent: set[int] = field(default_factory=set)  # boundaries whose prompt ends were published
    preemptions: int = 0
    denied: dict[int, Reason] = field(default_factory=dict)
    loads_over: bool = False
    offered: Load | None = None
    loading: Load | None = None
    loaded: Load | None = None
    miss: Reason | None = None
    lookup: LookupOutcome | None = None
    not_asked: NotAsked | None = None
    asked: bool = False
    local_tokens: int = 0
    publication: PublicationId | None = None
    streamed: int = 0
    stream_job: int = 0
    answered: Answered | None = None
    reuse: Reuse | None = None
    junction: int = 0
    outcome: Outcome | None = None
    forced: list[int] = field(default_factory=list)
    takes_input_end: bool = False
    decode_end_reason: DecodeEndReason | None = None
    cut_off: bool = False  # the connector's cache was reset before it ended
    announced: int = 0  # tokens whose attention blocks stand in KV events already

    @property
    def takes_decode(self) -> bool:
        """Whether a position in the reply may be published."""
        return self.replies and (self.choice.decode_end or self.verbatim is not None)

    @property
    def request_id(self) -> str:
        """vLLM's id."""
        return str(self.request.request_id)

    def record(self, *, publishing_decode_end: bool = False) -> RequestRecord:
        """What is said of the request when it has ended."""
        outcome = self.outcome
        if outcome is None:  # it ended before its prefill began
            return RequestRecord(
                prompt_tokens=self.request.num_prompt_tokens,
                lookup=self.lookup,
                reason=self.miss,
                input_end=self._input_end(0),
                chosen=self._chosen(),
                decode_end_reason=self.decode_end_reason,
            )
        return RequestRecord(
            prompt_tokens=outcome.prompt_tokens,
            local_tokens=outcome.local_tokens,
            loaded_tokens=outcome.loaded_tokens,
            other_tokens=outcome.other_tokens,
            recomputed_tokens=outcome.recomputed_tokens,
            selected=outcome.selected,
            lookup=self.lookup,
            not_asked=self.not_asked,
            reason=None if outcome.selected else self.miss,
            matched=outcome.matched,
            reuse=outcome.reuse,
            junction=outcome.missed_junction,
            candidates=shown(outcome.candidates),
            forced_chunk_ends=tuple(self.forced),
            input_end=self._input_end(outcome.resumed_tokens),
            chosen=self._chosen(),
            publishing_decode_end=publishing_decode_end,
            decode_end_reason=self.decode_end_reason,
        )

    def _chosen(self) -> Chosen:
        return Chosen(ends=chosen_kinds(self.choice), why=self.choice.why)

    def _input_end(self, resumed: int) -> InputEnd:
        given, boundary = self.hints.u_end, self.ends.input_end
        if given is None:
            rejected = "u_end" in self.hints.rejected
            return InputEnd(
                outcome=InputEndOutcome.REJECTED if rejected else InputEndOutcome.ABSENT
            )
        if boundary:
            if boundary in self.sent:
                outcome = InputEndOutcome.PUBLISHED
            elif boundary < resumed:
                outcome = InputEndOutcome.RESUMED_PAST
            elif self.cut_off:
                outcome = InputEndOutcome.CACHE_RESET
            else:
                outcome = InputEndOutcome.NOT_REACHED
        elif self.takes_input_end:
            outcome = InputEndOutcome.BELOW_GRID
        elif self.cut_off and self.choice.input_end:
            outcome = InputEndOutcome.CACHE_RESET
        else:
            outcome = InputEndOutcome.NOT_WANTED
        return InputEnd(outcome=outcome, given=given, boundary=boundary)
