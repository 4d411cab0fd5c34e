"""Names for checkpoints and their objects: kinds, tags, the closed list of reasons."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple, NewType

import msgspec

DomainId = NewType("DomainId", str)
LeaseId = NewType("LeaseId", str)
PublicationId = NewType("PublicationId", str)


class CheckpointKind(enum.StrEnum):
    """The logical ends a checkpoint may stand for; one checkpoint can stand for several."""

    PROMPT_END = "prompt_end"
    INPUT_END = "input_end"
    DECODE_END = "decode_end"
    SHARED_PREFIX = "shared_prefix"
    BOUNDARY = "boundary"


class Reason(enum.StrEnum):
    """Why a checkpoint could not be used, or a publication or load did not happen."""

    HASH_MISMATCH = "hash_mismatch"
    DOMAIN_MISMATCH = "domain_mismatch"
    STATE_MISSING = "state_missing"
    ATTENTION_MISSING = "attention_missing"
    EVICTED = "evicted"
    UNCOMMITTED = "uncommitted"
    UNREACHABLE = "unreachable"
    NO_PUBLICATION_PATH = "no_publication_path"
    LOAD_FAILED = "load_failed"
    LEASE_EXPIRED = "lease_expired"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    STORE_FULL = "store_full"
    OVER_BUDGET = "over_budget"
    DENIED = "denied"
    PIN_LIMIT = "pin_limit"
    ABORTED = "aborted"
    CACHE_RESET = "cache_reset"
    INTERNAL = "internal"


class Tag(enum.StrEnum):
    """What holds of a candidate checkpoint, for one request; each tag implies the one before."""

    RETAINED = "retained"
    HASH_MATCHED = "hash_matched"
    CONSUMABLE = "consumable"
    SELECTED = "selected"


class PassedOver(enum.StrEnum):
    """Why a consumable checkpoint is not the selected one."""

    SHALLOWER = "shallower"
    """A deeper one was selected."""
    SAME_BOUNDARY = "same_boundary"
    """Another domain holds the same prefix, and its checkpoint was selected."""
    LOCAL_HIT = "local_hit"
    """The engine's own prefix cache reaches as far."""
    SMALL_GAIN = "small_gain"
    """It would spare fewer tokens than ``min_load_tokens``."""
    NO_TOKEN_LEFT = "no_token_left"
    """It covers the whole prompt: nothing would remain to be computed."""
    LOADS_OVER = "loads_over"
    """The request tries no load any more: it opted out, or an earlier one failed."""
    NOT_TAKEN = "not_taken"
    """It was offered and vLLM did not take it, e.g. another connector's offer came first."""


class LookupOutcome(enum.StrEnum):
    """What a lookup came to, once its request got blocks."""

    HIT = "hit"
    """A load was begun."""
    NOT_TAKEN = "not_taken"
    """A load was offered, and vLLM did not take it."""
    PASSED_OVER = "passed_over"
    """Something consumable was there, and not worth a load or tried before."""
    MISS = "miss"
    """Nothing consumable was there."""
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    DENIED = "denied"
    CACHE_RESET = "cache_reset"
    INTERNAL = "internal"


class NotAsked(enum.StrEnum):
    """Why the store was not asked about a request at all."""

    ROLE = "role"
    """The engine's role is to publish only."""
    HANDED_OVER = "handed_over"
    """Another connector brings the prompt's cache: the decode leg of a P/D pair."""
    OPTED_OUT = "opted_out"
    """The request's ``load`` hint says no."""
    NO_CACHE_READ = "no_cache_read"
    """vLLM computes its whole prompt, e.g. for log-probabilities of the prompt."""
    BELOW_GRID = "below_grid"
    """No boundary lies before the prompt's last token."""


class ProducerAge(enum.StrEnum):
    """How many requests of the same history ago a checkpoint was produced, as far as a store can
    know: by the order of the ends of its kind along the prefix."""

    PREVIOUS = "previous"
    TWO_EARLIER = "two_earlier"
    OLDER = "older"


class Reuse(enum.StrEnum):
    """Whether anybody had looked up the deepest known checkpoint of a request's prefix before."""

    FIRST = "first"
    STEADY = "steady"


NOT_RETAINED = frozenset(
    {Reason.EVICTED, Reason.UNCOMMITTED, Reason.STATE_MISSING, Reason.ATTENTION_MISSING}
)
"""Reasons of a candidate that no store holds (any more, or yet), or only a part of it."""


class ObjectKey(NamedTuple):
    """One block of one group of one rank, inside a domain. Attention blocks are shared by every
    checkpoint that extends them; a recurrent block (a state) belongs to one boundary.

    ``block_hash`` is vLLM's chained prefix hash of the tokens up to the end of the block.
    """

    rank: int
    group: int
    block_hash: bytes


class PrefillWork(NamedTuple):
    """FLOPs of a prefill: ``per_token`` for every token (weights, recurrent states) and
    ``per_pair`` for every pair of a token and one that it attends to. All 0: not known."""

    per_token: float = 0.0
    per_pair: float = 0.0

    def saved_work(self, boundary_from: int, boundary_to: int) -> float:
        """FLOPs of prefilling the tokens from one position to another, after those before them;
        the number of tokens where the model's work is not known."""
        tokens = boundary_to - boundary_from
        if self.per_token <= 0 and self.per_pair <= 0:
            return float(tokens)
        # Token t (from 1) attends to t tokens.
        pairs = (boundary_to * (boundary_to + 1) - boundary_from * (boundary_from + 1)) / 2
        return self.per_token * tokens + self.per_pair * pairs


UNKNOWN_WORK = PrefillWork()


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank commits once all its objects are written.

    Attributes:
        boundary: tokens of the prefix; a multiple of the domain's boundary grid.
        hashes: the prefix's block hashes in units of the domain's ``hash_tokens``, from the first
            to the one that ends at ``boundary``.
        kinds: logical ends that materialised here.
        producer: who made it (engine id), for people.
        user_turn: it is the U_end of a user's message. Once a tool loop is over, the next user
            message rewrites the loop, and this is the deepest end that still matches.
        work: what prefilling costs the model, for eviction by saved work.
    """

    boundary: int
    hashes: tuple[bytes, ...]
    kinds: tuple[CheckpointKind, ...]
    producer: str = ""
    user_turn: bool = False
    work: PrefillWork = UNKNOWN_WORK


class CheckpointMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate that a lookup answers, with its tags.

    Attributes:
        retained: a store holds it, whole and committed.
        hash_matched: its chained prefix hash is the request's at ``boundary``. False also for
            what is not retained, since each tag implies the one before.
        consumable: the asking worker can load it now. False with exactly one ``reason``.
        age_s: seconds since it was committed; since it was evicted where it is not retained.
        hits: earlier lookups whose deepest consumable candidate it was.
        domain: where it lies, if that is another domain than the asking worker's.
        field: with ``DOMAIN_MISMATCH``, path of the first field in which that domain differs (see
            ``comparison``). A store answers "" where its bytes can be converted: whether the
            worker does so is for the worker to say.
        also_in: further domains that hold it and whose bytes can be converted.
        leased: the lookup's lease keeps what is consumable, so that it may be loaded. False of
            another domain's that is passed over for a better one.

    Raises ``ValueError`` where the tags contradict each other.
    """

    boundary: int
    kinds: tuple[CheckpointKind, ...]
    consumable: bool
    reason: Reason | None = None
    retained: bool = True
    hash_matched: bool = True
    age_s: float = 0.0
    producer: str = ""
    field: str = ""
    domain: DomainId = DomainId("")
    hits: int = 0
    also_in: tuple[DomainId, ...] = ()
    leased: bool = True

    def __post_init__(self) -> None:
        check_tags(self.retained, self.hash_matched, self.consumable, False, self.reason)

    @property
    def convertible(self) -> bool:
        """The store's word: it lies in another domain whose bytes can be converted."""
        return self.reason is Reason.DOMAIN_MISMATCH and bool(self.domain) and not self.field


def check_tags(
    retained: bool, hash_matched: bool, consumable: bool, selected: bool, reason: Reason | None
) -> None:
    """Raise ``ValueError`` unless each tag implies the one before and exactly what is not
    consumable has a reason."""
    tags = (retained, hash_matched, consumable, selected)
    if list(tags) != sorted(tags, reverse=True):
        raise ValueError(f"tags {dict(zip(Tag, tags, strict=True))}: each implies the one before")
    if consumable == (reason is not None):
        raise ValueError(f"consumable is {consumable} with reason {reason}")


_PRECEDENCE = (
    CheckpointKind.DECODE_END,
    CheckpointKind.INPUT_END,
    CheckpointKind.BOUNDARY,
    CheckpointKind.SHARED_PREFIX,
    CheckpointKind.PROMPT_END,
)

UNKNOWN_KIND = "unknown"
"""Stands for the kind of what was only announced."""


def primary_kind(kinds: Iterable[CheckpointKind]) -> str:
    """The end to name where several share one checkpoint: the fallback order of a lookup."""
    known = set(kinds)
    return next((str(kind) for kind in _PRECEDENCE if kind in known), UNKNOWN_KIND)
