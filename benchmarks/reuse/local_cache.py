"""A prefill worker's own prefix cache, as vLLM keeps it with sparse retention.

One pool of equal pages holds attention blocks and recurrent states. What no running request uses
is evicted in the order in which it was given back; a request gives its attention back from the end,
so that a chain is shortened and not broken. States exist only where a prompt was cut for them.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Kind(enum.IntEnum):
    ATTENTION = 0
    STATE = 1


_Key = tuple[_Kind, bytes]


class LocalHit(NamedTuple):
    """Tokens. ``attention``: how far the attention blocks alone reach."""

    joint: int
    attention: int


class LocalCache:
    """Not thread-safe. ``pages`` 0: nothing is ever evicted."""

    def __init__(self, grid: int, *, pages: int = 0, state_pages: int = 1) -> None:
        self._grid = grid
        self._pages = pages
        self._cost = {_Kind.ATTENTION: 1, _Kind.STATE: state_pages}
        self._idle: OrderedDict[_Key, None] = OrderedDict()  # the first to go first
        self._used: Counter[_Key] = Counter()
        self.cached_pages = 0
        """Pages that can be found, held by running requests or idle."""
        self.idle_pages = 0
        self.running_pages = 0
        """Pages of running requests that hold nothing to be found yet."""
        self.evicted_pages = 0

    def hit(self, hashes: Sequence[bytes], limit_tokens: int) -> LocalHit:
        """What the cache holds of a prefix, at most ``limit_tokens``."""
        joint = attention = 0
        for index in range(min(limit_tokens // self._grid, len(hashes))):
            if not self._has((_Kind.ATTENTION, hashes[index])):
                break
            attention = (index + 1) * self._grid
            if self._has((_Kind.STATE, hashes[index])):
                joint = attention
        return LocalHit(joint, attention)

    def begin(self, hashes: Sequence[bytes], hit_tokens: int, pages: int) -> bool:
        """A request starts: hold its local hit and take ``pages`` for the rest. False, and nothing
        changed, where running requests hold too much."""
        held = self._of_hit(hashes, hit_tokens)
        resumed = sum(self._cost[key[0]] for key in held if key in self._idle)
        if self._pages and self._free() + self.idle_pages - resumed < pages:
            return False
        for key in held:
            if key in self._idle:
                del self._idle[key]
                self.idle_pages -= self._cost[key[0]]
            self._used[key] += 1
        self._make_room(pages)
        self.running_pages += pages
        return True

    def end(
        self,
        hashes: Sequence[bytes],
        hit_tokens: int,
        pages: int,
        *,
        computed_tokens: int,
        states: Iterable[int],
    ) -> None:
        """A request that began with these arguments is over: it leaves the attention of
        ``computed_tokens`` and the states at boundaries ``states`` (tokens, in the order in which
        it passed them)."""
        self.running_pages -= pages
        for key in self._of_hit(hashes, hit_tokens):
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
                self._idle[key] = None
                self.idle_pages += self._cost[key[0]]
        grid = self._grid
        blocks = hashes[: computed_tokens // grid]
        kept = [(_Kind.STATE, hashes[b // grid - 1]) for b in states if b <= computed_tokens]
        early, last = kept[:-1], kept[-1:]
        for key in (*early, *((_Kind.ATTENTION, h) for h in reversed(blocks)), *last):
            self._leave(key)

    def clear(self) -> None:
        """Forget everything that no running request holds."""
        self.cached_pages -= self.idle_pages
        self.idle_pages = 0
        self._idle.clear()

    def check(self) -> None:
        """Recompute the books; ``AssertionError`` where they disagree."""
        keys = [*self._idle, *self._used]
        assert len(set(keys)) == len(keys), "a page is idle and used"
        assert sum(self._cost[key[0]] for key in keys) == self.cached_pages
        assert sum(self._cost[key[0]] for key in self._idle) == self.idle_pages
        assert self.running_pages >= 0
        if self._pages:
            assert self.cached_pages + self.running_pages <= self._pages

    def _has(self, key: _Key) -> bool:
        return key in self._idle or key in self._used

    def _of_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> list[_Key]:
        count = hit_tokens // self._grid
        keys: list[_Key] = [(_Kind.ATTENTION, h) for h in hashes[:count]]
        if count:
            keys.append((_Kind.STATE, hashes[count - 1]))
        return keys

    def _free(self) -> int:
        return self._pages - self.cached_pages - self.running_pages

    def _leave(self, key: _Key) -> None:
        if key in self._used:
            return
        if key in self._idle:
            self._idle.move_to_end(key)
            return
        cost = self._cost[key[0]]
        if self._pages and not self._make_room(cost):
            return
        self._idle[key] = None
        self.idle_pages += cost
        self.cached_pages += cost

    def _make_room(self, pages: int) -> bool:
        if not self._pages:
            return True
        while self._free() < pages and self._idle:
            key, _ = self._idle.popitem(last=False)
            self.idle_pages -= self._cost[key[0]]
            self.cached_pages -= self._cost[key[0]]
            self.evicted_pages += self._cost[key[0]]
        return self._free() >= pages
