"""Checkpoints of other domains that an engine can convert: asking for them in a lookup."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from backhaul.protocols.checkpoint import (
    NOT_RETAINED,
    CheckpointMatch,
    DomainId,
    LeaseId,
    Reason,
)
from backhaul.protocols.comparison import Verdict, compare
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import LookupUnanswered, StoreError, StoreUnavailable
from backhaul.protocols.sharding import conversion, page_bytes
from backhaul.protocols.stages import most_layers
from backhaul.transfer.base import LookupResult

logger = logging.getLogger("vllm.backhaul")

_REMEMBERED_MAX = 256
"""As many domains as a store keeps."""
_ASK_AGAIN_S = 5.0
"""How long no record is asked for after the store did not give one: each costs a lookup's time."""


class Asked(Protocol):
    """What is asked of a store; see ``Store``."""

    def lookup(
        self,
        domain: DomainId,
        boundary_hashes: Sequence[bytes],
        *,
        above_tokens: int = 0,
        lease_s: float = 0.0,
        follow_up: bool = False,
        timeout_s: float,
    ) -> LookupResult:
        """Checkpoints of a prefix."""

    def domain_record(self, domain: DomainId, *, timeout_s: float) -> DomainRecord:
        """The record of a domain that a lookup named."""


class Foreign(NamedTuple):
    """A convertible domain, and the lease on what was found in it."""

    record: DomainRecord
    lease: LeaseId


class ConvertibleDomains:
    """Which other domains' bytes this engine can use. Thread-safe: answers are only remembered."""

    def __init__(
        self,
        store: Asked,
        record: DomainRecord,
        buffer_bytes: int,
        give_back: Callable[[LeaseId], None] = lambda lease: None,
    ) -> None:
        """``buffer_bytes``: what a worker converts in; see the option ``convert_buffer_bytes``.
        ``give_back``: releases, later, what a lookup without an answer may have been granted."""
        self._store = store
        self._give_back = give_back
        self._ours = record
        self._buffer_bytes = buffer_bytes
        self._known: dict[DomainId, tuple[DomainRecord | None, str]] = {}
        self._closed = False
        self._ask_again = 0.0

    def close(self) -> None:
        """Use no other domain from now on."""
        self._closed = True

    def extend(
        self,
        found: LookupResult,
        boundary_hashes: Sequence[bytes],
        *,
        lease_s: float,
        timeout_s: float,
    ) -> tuple[LookupResult, Foreign | None]:
        """Add what a convertible domain holds beyond the deepest checkpoint of one's own: the one
        that reaches furthest, and the next one where that cannot be asked or has lost it.

        What a convertible domain holds beside it is consumable, but not leased, since nothing of it
        is to be loaded. What cannot be converted keeps ``DOMAIN_MISMATCH`` and gets the field that
        differs. Never raises: without an answer the lookup stays as it was. With ``lease_s`` 0, of
        whoever only looks, the matches come without a lease.
        """
        until = time.monotonic() + timeout_s
        deepest = max((m.boundary for m in found.matches if m.consumable), default=0)
        reach: dict[DomainId, int] = {}  # domain -> its deepest checkpoint, the deepest first
        for match in found.matches:
            for domain in (match.domain, *match.also_in) if match.convertible else ():
                reach.setdefault(domain, match.boundary)
        known = {domain: self._ask(domain, _left(until)) for domain in reach}
        usable = {domain for domain, (record, _) in known.items() if record and not self._closed}
        added: dict[int, CheckpointMatch] = {}
        foreign: Foreign | None = None
        failed: dict[DomainId, Reason] = {}
        for domain, boundary in reach.items():
            record, _ = known[domain]
            if record is None or domain not in usable or boundary <= deepest or added:
                continue
            try:
                foreign, added = self._lookup(
                    record, boundary_hashes, deepest, lease_s=lease_s, timeout_s=_left(until)
                )
                failed[domain] = Reason.EVICTED  # what it does not have any more
            except StoreError as error:
                logger.debug("backhaul: lookup in domain %s failed: %s", domain, error)
                if isinstance(error, LookupUnanswered):
                    self._give_back(LeaseId(error.lease))
                failed[domain] = Reason.UNREACHABLE

        def tagged(match: CheckpointMatch) -> CheckpointMatch:
            if match.boundary in added:
                return added[match.boundary]
            if not match.convertible:
                return match
            homes = [home for home in (match.domain, *match.also_in) if home in usable]
            if not homes:
                return msgspec.structs.replace(match, field=known[match.domain][1])
            left = [home for home in homes if match.boundary <= deepest or home not in failed]
            return _passed_over(match, left[0]) if left else _gone(match, failed[homes[-1]])

        return dataclasses.replace(found, matches=tuple(map(tagged, found.matches))), foreign

    def _lookup(
        self,
        record: DomainRecord,
        boundary_hashes: Sequence[bytes],
        above: int,
        *,
        lease_s: float,
        timeout_s: float,
    ) -> tuple[Foreign | None, dict[int, CheckpointMatch]]:
        """Raises ``StoreError`` where the store does not answer."""
        domain = record.domain_id
        result = self._store.lookup(
            domain,
            boundary_hashes,
            above_tokens=above,
            lease_s=lease_s,
            follow_up=True,
            timeout_s=timeout_s,
        )
        if result.lease is None and lease_s:
            return None, {}
        usable = {
            one.boundary: msgspec.structs.replace(one, domain=domain)
            for one in result.matches
            if one.consumable
        }
        return Foreign(record, result.lease) if result.lease else None, usable

    def _ask(self, domain: DomainId, timeout_s: float) -> tuple[DomainRecord | None, str]:
        """The domain's record if its bytes can be converted here, and else what differs."""
        if (known := self._known.get(domain)) is not None:
            return known
        if time.monotonic() < self._ask_again:
            return None, "(unknown)"
        try:
            record = self._store.domain_record(domain, timeout_s=timeout_s)
        except StoreError as error:
            logger.debug("backhaul: domain %s: %s", domain, error)
            if isinstance(error, StoreUnavailable):
                self._ask_again = time.monotonic() + _ASK_AGAIN_S
            return None, "(unknown)"
        answer = self._judge(record)
        if len(self._known) < _REMEMBERED_MAX:
            self._known[domain] = answer
        return answer

    def _judge(self, record: DomainRecord) -> tuple[DomainRecord | None, str]:
        found = compare(self._ours, record)
        if found.verdict is not Verdict.CONVERTIBLE:
            return None, found.field
        cause = found.causes[0].path
        needed = largest_sources(self._ours, record)
        if needed > self._buffer_bytes:
            logger.warning(
                "backhaul: checkpoints of domain %s (%s) are not used: converting one block takes "
                "%d bytes; raise convert_buffer_bytes (now %d)",
                record.domain_id, found.line(), needed, self._buffer_bytes,
            )  # fmt: skip
            return None, cause
        logger.info(
            "backhaul: checkpoints of domain %s are converted: %s", record.domain_id, found.line()
        )
        return record, cause


def largest_sources(ours: DomainRecord, theirs: DomainRecord) -> int:
    """Bytes of the objects of ``theirs`` that one block of one of our ranks is made of, at most."""
    ranks, sources = ours.tensor_parallel, theirs.tensor_parallel
    return max(
        len({run.source for run in conversion(group.page, sources, ranks, rank)})
        * most_layers(ours, theirs, group.index)
        * page_bytes(group.page, sources)
        for group in ours.layout.groups
        for rank in range(ranks)
    )


def _left(until: float) -> float:
    """Seconds; at least a millisecond, so that a call that is late fails by its own deadline."""
    return max(until - time.monotonic(), 0.001)


def _passed_over(match: CheckpointMatch, home: DomainId) -> CheckpointMatch:
    """One that could be loaded from ``home``, and is not asked for."""
    return msgspec.structs.replace(
        match, consumable=True, reason=None, domain=home, also_in=(), leased=False
    )


def _gone(match: CheckpointMatch, reason: Reason) -> CheckpointMatch:
    """One that nobody could give for ``reason``."""
    held = reason not in NOT_RETAINED
    return msgspec.structs.replace(match, reason=reason, retained=held, hash_matched=held)
