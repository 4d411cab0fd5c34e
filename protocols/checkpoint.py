"""Names for checkpoints and their objects: kinds, tags, the closed list of reasons."""

from __future__ import annotations

import enum
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


class Reason(enum.StrEnum):
    """Why a checkpoint could not be used, or a publication or load did not happen."""

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
    DENIED = "denied"
    PIN_LIMIT = "pin_limit"
    ABORTED = "aborted"
    INTERNAL = "internal"


class ObjectKey(NamedTuple):
    """One block of one group of one rank, inside a domain. Attention blocks are shared by every
    checkpoint that extends them; a recurrent block (a state) belongs to one boundary.

    ``block_hash`` is vLLM's chained prefix hash of the tokens up to the end of the block.
    """

    rank: int
    group: int
    block_hash: bytes


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank commits once all its objects are written.

    Attributes:
        boundary: tokens of the prefix; a multiple of the domain's boundary grid.
        hashes: the prefix's block hashes in units of the domain's ``hash_tokens``, from the first
            to the one that ends at ``boundary``.
        kinds: logical ends that materialised here.
        producer: who made it (engine id), for people.
    """

    boundary: int
    hashes: tuple[bytes, ...]
    kinds: tuple[CheckpointKind, ...]
    producer: str = ""


class CheckpointMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate that a lookup answers: retained and hash-matched by construction.

    ``consumable`` is False with exactly one ``reason``; ``age_s``: seconds since it
    was committed. With ``DOMAIN_MISMATCH``, ``domain`` is where it lies and ``field`` the path of
    the first field in which that domain differs (see ``comparison``).
    """

    boundary: int
    kinds: tuple[CheckpointKind, ...]
    consumable: bool
    reason: Reason | None = None
    age_s: float = 0.0
    producer: str = ""
    field: str = ""
    domain: DomainId = DomainId("")
