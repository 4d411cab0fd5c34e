"""What is said of one request: in its response, and as one line of the request log."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from backhaul.protocols.checkpoint import (
    CheckpointKind,
    LookupOutcome,
    NotAsked,
    PassedOver,
    ProducerAge,
    Reason,
    Reuse,
    check_tags,
)
from backhaul.protocols.policy import Why

RECORD_VERSION = 1
"""Version of the record's meaning. 1: first version."""
CANDIDATES_MAX = 8
"""Candidates in a record, the deepest ones (and the selected one): a response stays small."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint at one of the request's boundaries, with its tags.

    ``reason`` says why it is not consumable, ``passed_over`` why it is consumable and not selected;
    exactly one of them is set unless it is selected. ``domain`` is where it lies, if not in the
    engine's own; with ``DOMAIN_MISMATCH``, ``field`` is the first field of that domain that
    differs. Raises ``ValueError`` otherwise.
    """

    boundary: int
    kinds: tuple[CheckpointKind, ...]
    retained: bool
    hash_matched: bool
    consumable: bool
    selected: bool
    reason: Reason | None = None
    passed_over: PassedOver | None = None
    age_s: float = 0.0
    field: str = ""
    domain: str = ""

    def __post_init__(self) -> None:
        check_tags(self.retained, self.hash_matched, self.consumable, self.selected, self.reason)
        if (self.passed_over is not None) != (self.consumable and not self.selected):
            raise ValueError(f"selected is {self.selected}, passed_over {self.passed_over}")


class Selected(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the request resumed from. ``kind`` is the end it is named by, ``kinds``
    all that share it; ``age_s`` seconds from its commit to the lookup; ``producer_age`` the same in
    requests; ``avoided_flops`` the estimated work of the loaded tokens, None where the model's
    shape is not understood."""

    boundary: int
    kind: str
    kinds: tuple[CheckpointKind, ...]
    age_s: float
    producer: str = ""
    producer_age: ProducerAge = ProducerAge.PREVIOUS
    avoided_flops: int | None = None


class MatchedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How far the store matched the request, in tokens; 0 also where the model has no such group.

    Attributes:
        attention: attention objects, without a gap.
        recurrent: deepest boundary with every recurrent group's state.
        joint: deepest consumable checkpoint.
        exact_hash: deepest retained object or checkpoint, in any domain, of the same tokens.
    """

    attention: int = 0
    recurrent: int = 0
    joint: int = 0
    exact_hash: int = 0


class InputEndOutcome(enum.StrEnum):
    """What became of the U_end that a request carried."""

    ABSENT = "absent"
    REJECTED = "rejected"
    NOT_WANTED = "not_wanted"
    """The policy, the engine's role or the request's ``publish`` hint excludes it."""
    BELOW_GRID = "below_grid"
    """No boundary lies at or before it."""
    RESUMED_PAST = "resumed_past"
    """The request resumed from a deeper position, so its state was never computed here."""
    PUBLISHED = "published"
    """Handed to the workers; whether it arrived is counted, not recorded."""
    CACHE_RESET = "cache_reset"
    """vLLM had the connector's cache reset: the engine publishes nothing any more."""
    NOT_REACHED = "not_reached"
    """The request ended first, or its blocks could not be pinned."""


class InputEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The request's U_end: as given, the boundary it materialises on (0: none), and its outcome."""

    outcome: InputEndOutcome
    given: int | None = None
    boundary: int = 0


class DecodeEndReason(enum.StrEnum):
    """Why a request's D_end is not on its way to the store, or nobody can load it: the first that
    holds."""

    NO_PUBLICATION_PATH = "no_publication_path"
    """Nobody who loads could reach it; withheld, or on its way all the same."""
    NOT_WANTED = "not_wanted"
    """The policy, the engine's role or the request's ``publish`` hint excludes it."""
    NO_REPLY = "no_reply"
    """It is the prefill leg of a P/D pair: its one token is computed again by decode."""
    FINISH_EXCLUDED = "finish_excluded"
    """The reply did not end in a way that ``publish_on`` names: cut at its limit, aborted, ..."""
    BELOW_GRID = "below_grid"
    """No boundary lies in the reply."""
    CACHE_RESET = "cache_reset"
    """vLLM had the connector's cache reset: the engine publishes nothing any more."""
    NOT_KEPT = "not_kept"
    """A boundary lies there, and its state was lost or could not be sent;
    ``publication_failures`` counts why."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The ends that the request's policy chose to publish, and why."""

    ends: tuple[CheckpointKind, ...] = ()
    why: Why = Why.FIXED


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_transfer_params["backhaul"]`` of a response.

    No field is named like a hint: proxies hand one leg's answer to the next one.

    Attributes:
        prompt_tokens: sum of the next four.
        local_tokens: found in the engine's own prefix cache.
        loaded_tokens: loaded from the store on top of them.
        other_tokens: brought by another connector.
        recomputed_tokens: computed.
        selected: the checkpoint used; None where nothing was loaded.
        lookup: what its lookup came to, the last one before its prefill began; None where the
            store was not asked, or the request ended first.
        not_asked: why the store was not asked; None where it was, or the request ended first.
        reason: why nothing was loaded above the local hit, where there is a reason.
        reuse: whether the deepest checkpoint known of this prefix had been looked up before; None
            where the store knew none.
        junction: end of a prefix shared with an earlier request at which no recurrent group had a
            state; 0: none, or one was loaded.
        candidates: deepest first.
        forced_chunk_ends: positions at which a checkpoint ended a prefill chunk that would
            have gone on.
        chosen: what its policy chose.
        publishing_decode_end: whether this request's D_end is on its way to the store.
        decode_end_reason: why its D_end is not on its way, or nobody could load it; None where it
            is on its way to somebody.
    """

    version: int = RECORD_VERSION
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    other_tokens: int = 0
    recomputed_tokens: int = 0
    selected: Selected | None = None
    lookup: LookupOutcome | None = None
    not_asked: NotAsked | None = None
    reason: Reason | None = None
    matched: MatchedTokens = MatchedTokens()
    reuse: Reuse | None = None
    junction: int = 0
    candidates: tuple[Candidate, ...] = ()
    forced_chunk_ends: tuple[int, ...] = ()
    input_end: InputEnd = InputEnd(outcome=InputEndOutcome.ABSENT)
    chosen: Chosen = Chosen()
    publishing_decode_end: bool = False
    decode_end_reason: DecodeEndReason | None = None


class LoggedRequest(RequestRecord, frozen=True, kw_only=True):
    """One line of the request log: the record, whose it is, and what it takes to ask again.

    Attributes:
        time: seconds since 1970, when the request ended.
        arrived: the same, when it arrived; 0: not known.
        finish: vLLM's status.
        domain: id of the engine's cache domain.
        output_tokens: length of its output.
        grid_tokens: distance of its boundaries, tokens.
        boundary_hashes: hex of the chained hash at every boundary of prompt and output, the first
            at ``grid_tokens``; what a checkpoint there is named by.
        token_ids: prompt and output; empty unless the engine was told to log them.
    """

    time: float
    engine: str
    request_id: str
    finish: str
    arrived: float = 0.0
    domain: str = ""
    output_tokens: int = 0
    grid_tokens: int = 0
    boundary_hashes: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def to_params(record: RequestRecord) -> dict[str, Any]:
    """A record as plain data, the way it arrives at a client."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return plain
