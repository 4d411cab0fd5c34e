"""What the status page shows: one JSON document about the daemon, made on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backhaul
from backhaul.protocols.checkpoint import Reason
from backhaul.protocols.metrics import KINDS
from backhaul.transfer.base import DomainInfo
from backhaul.transfer.index import BlockIndex

FRESH_S = 0.5
"""However many pages are open, the document is made at most this often: it walks over all
checkpoints, in the loop that also answers lookups."""
CLIENTS_SHOWN = 8
ADVICE: dict[str, str] = {
    Reason.EVICTED: "gone before they were asked for again. Give the store a larger --capacity, or "
    "publish fewer ends (policy).",
    Reason.UNCOMMITTED: "asked for before every rank had committed. Raise publication_wait_s, or "
    "look for a slow or dead rank.",
    Reason.DOMAIN_MISMATCH: "the same prefix lies in another cache domain. backhaul doctor names "
    "the field that differs.",
    Reason.HASH_MISMATCH: "the history came back with other tokens. backhaul explain shows where "
    "it departs.",
    Reason.STATE_MISSING: "prompts branch off where no state was kept, or publications were "
    "abandoned. Policies that publish more ends keep states at more places.",
    Reason.ATTENTION_MISSING: "publications stopped after their states. Look for engines that were "
    "killed, and for a full store.",
}
"""What to do about each reason of a candidate that is not consumable."""


class StatusReport:
    """Makes the document. Belongs to the daemon's event loop."""

    def __init__(self, index: BlockIndex, store_uri: str, clock: Callable[[], float]) -> None:
        """``store_uri``: what engines write to reach this store."""
        self._index = index
        self._store_uri = store_uri
        self._clock = clock
        self._started_at = clock()
        self._made_at = 0.0
        self._document: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """The current one. Times in seconds, sizes in bytes, counters since the start."""
        now = self._clock()
        if self._document is None or now - self._made_at >= FRESH_S:
            self._document = self._make(now)
            self._made_at = now
        return self._document

    def _make(self, now: float) -> dict[str, Any]:
        domains = self._index.list_domains(now)
        stats = self._index.stats()
        counters = stats.counters
        evictions = _labelled(counters, "evictions_")
        evicted = sum(evictions.values())
        return {
            "version": backhaul.__version__,
            "store_uri": self._store_uri,
            "instance_id": stats.instance_id,
            "uptime_s": now - self._started_at,
            "capacity_bytes": stats.capacity_bytes,
            "used_bytes": stats.used_bytes,
            "objects": stats.objects,
            "checkpoints": stats.checkpoints,
            "leases": stats.leases,
            "publications": stats.publications,
            "funnel": {
                "lookups": counters["lookups"],
                "matched": counters["lookups_matched"],
                "consumable": counters["hits"],
                "read": counters["leases_read"],
            },
            "candidates": _labelled(counters, "candidates_"),
            "not_consumable": _labelled(counters, "unconsumable_"),
            "advice": ADVICE,
            "kinds": KINDS,
            "checkpoints_created": counters["checkpoints_created"],
            "evictions": evicted,
            "evicted_unused": counters["evicted_unused_checkpoints"],
            "evicted_bytes": counters["evicted_bytes"],
            "evicted_lifetime_s": counters["evicted_lifetime_ms"] / 1000 / max(evicted, 1),
            "refused_objects": counters["full_objects"],
            "domains": [_domain(info) for info in domains],
            "recent": [
                {
                    "age_s": now - event.at,
                    "what": event.what,
                    "reason": event.reason,
                    "domain": event.domain,
                    "boundary": event.boundary,
                    "kinds": [kind.value for kind in event.kinds],
                    "times": event.times,
                }
                for event in self._index.checkpoints.recent.newest_first()
            ],
        }


def _labelled(counters: dict[str, int], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): value
        for name, value in counters.items()
        if name.startswith(prefix)
    }


def _domain(info: DomainInfo) -> dict[str, Any]:
    record = info.record
    return {
        "id": info.id,
        "summary": (
            f"model {record.model}, {record.kv_dtype}, {record.hash_function}, "
            f"boundaries every {record.layout.boundary_tokens} tokens, "
            f"{record.layout.ranks} ranks, vLLM {record.vllm}, {record.platform}"
        ),
        "clients": [
            {"name": client.name, "opened_s": client.opened_s}
            for client in info.clients[:CLIENTS_SHOWN]
        ],
        "idle_s": info.idle_s,
        "checkpoints": info.checkpoints,
        "kinds": {kind.value: count for kind, count in info.kinds.items()},
        "objects": info.objects,
        "object_bytes": info.object_bytes,
    }
