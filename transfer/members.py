"""Who uses which domain of a store: whether a publication has anybody to read it.

Part of the block index's rules (sans-I/O, ``now`` in seconds), but with books of its own: nothing
that is stored depends on it. A client says again and again that it is there; one that stopped
saying so is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from backhaul.protocols.checkpoint import DomainId
from backhaul.transfer.base import Elsewhere, Member, Peers
from backhaul.transfer.differences import DomainDifferences
from backhaul.transfer.entries import Domain

MEMBER_TTL_S = 60.0
"""How long a client counts after it last spoke; several times what clients leave between two."""
MEMBERS_MAX = 4096
"""The one that has been silent longest gives way."""
ELSEWHERE_MAX = 8
"""Other domains named in one answer: people read it."""


@dataclass(slots=True)
class _Entry:
    domain: DomainId
    member: Member
    expires_at: float


@dataclass(slots=True)
class _Count:
    """Engines of one domain, by what they do; see ``Peers`` and ``Elsewhere``."""

    loaders: int = 0
    decode_loaders: int = 0
    publishers: int = 0
    converters: int = 0

    def add(self, member: Member) -> None:
        loads = member.loads and not member.decodes_only
        self.loaders += loads
        self.converters += loads and member.converts
        self.decode_loaders += member.loads and member.decodes_only
        self.publishers += member.publishes

    @property
    def roles(self) -> int:
        return self.loaders + self.decode_loaders + self.publishers


class MemberTable:
    """The clients of all domains, by name. Not thread-safe; every call returns at once."""

    def __init__(self, differences: DomainDifferences) -> None:
        self._differences = differences
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the most silent one first

    def join(self, domain: DomainId, member: Member, now: float) -> None:
        """The client is there, with these roles; with none of them it leaves."""
        self._entries.pop(member.name, None)
        if not (member.loads or member.publishes):
            return
        self._entries[member.name] = _Entry(domain, member, now + MEMBER_TTL_S)
        if len(self._entries) > MEMBERS_MAX:
            self._entries.popitem(last=False)

    def peers(
        self, domain: DomainId, name: str, domains: Mapping[DomainId, Domain], now: float
    ) -> Peers:
        """Who else is there for the client ``name`` of ``domain``. Members of domains that are not
        in ``domains`` are left out."""
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            self._entries.popitem(last=False)
        counts: dict[DomainId, _Count] = {}
        for entry in self._entries.values():
            if entry.member.name != name:
                counts.setdefault(entry.domain, _Count()).add(entry.member)
        same = counts.pop(domain, _Count())
        others = sorted(
            (item for item in counts.items() if item[0] in domains),
            key=lambda item: (-item[1].roles, item[0]),
        )
        return Peers(
            loaders=same.loaders,
            decode_loaders=same.decode_loaders,
            publishers=same.publishers,
            elsewhere=tuple(
                Elsewhere(
                    other,
                    *self._differences.first(domains[domain], domains[other]),
                    loaders=count.loaders,
                    publishers=count.publishers,
                    converters=count.converters,
                )
                for other, count in others[:ELSEWHERE_MAX]
            ),
        )
