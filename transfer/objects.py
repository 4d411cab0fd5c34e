"""The objects of all domains and the space they occupy: who uses which, what may be freed.

Of a committed object, exactly one is true: a checkpoint or an open publication uses it
(``refs`` or ``holds`` above zero), or it is *loose* and may be freed at any time.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from backhaul.protocols.checkpoint import ObjectKey, PublicationId
from backhaul.transfer.arena import Arena
from backhaul.transfer.entries import Domain, Entry


class ObjectTable:
    """Places, completes, counts and frees objects. Not thread-safe."""

    def __init__(self, capacity_bytes: int, first_token: int) -> None:
        self.arena = Arena(capacity_bytes)
        self.loose: OrderedDict[Entry, None] = OrderedDict()  # longest loose first
        self.quarantine: deque[tuple[float, int]] = deque()  # (free at, offset), soonest first
        self.count = 0
        self._next_token = first_token

    def place(
        self, domain: Domain, key: ObjectKey, nbytes: int, writer: PublicationId
    ) -> Entry | None:
        """Reserve space for an absent object; None where no free extent is long enough."""
        offset = self.arena.allocate(nbytes)
        if offset is None:
            return None
        entry = Entry(domain, key, nbytes, offset, self._next_token, writer)
        self._next_token += 1
        domain.objects[key] = entry
        domain.object_bytes += nbytes
        self.count += 1
        return entry

    def hold(self, entry: Entry) -> None:
        """Count one more open publication."""
        entry.holds += 1
        self.loose.pop(entry, None)

    def unhold(self, entry: Entry) -> None:
        """Count one open publication less."""
        entry.holds -= 1
        self._loosen(entry)

    def ref(self, entry: Entry) -> None:
        """Count one more checkpoint."""
        entry.refs += 1
        self.loose.pop(entry, None)

    def unref(self, entry: Entry) -> None:
        """Count one checkpoint less; the object stays, loose if nothing else uses it."""
        entry.refs -= 1
        self._loosen(entry)

    def drop(self, entry: Entry) -> None:
        """Free an unused object."""
        self._forget(entry)
        self.arena.free(entry.offset)

    def drop_later(self, entry: Entry, when: float) -> None:
        """Forget a reservation but keep its space until ``when`` (seconds, never falling): its
        writer was given up without a word and may have a transfer in flight."""
        self._forget(entry)
        self.quarantine.append((when, entry.offset))

    def release_quarantine(self, now: float) -> None:
        """Free the space whose time has come."""
        while self.quarantine and self.quarantine[0][0] <= now:
            self.arena.free(self.quarantine.popleft()[1])

    def _loosen(self, entry: Entry) -> None:
        if entry.refs == 0 and entry.holds == 0:
            self.loose[entry] = None

    def _forget(self, entry: Entry) -> None:
        assert entry.refs == 0 and entry.holds == 0, f"{entry.key} is still in use"
        self.loose.pop(entry, None)
        del entry.domain.objects[entry.key]
        entry.domain.object_bytes -= entry.nbytes
        self.count -= 1
