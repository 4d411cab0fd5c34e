"""The cluster that is simulated: workers, links, rates. Seconds, bytes, FLOPs."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from typing import Any

import msgspec

from backhaul.benchmarks.reuse.record import PromptEndAt
from backhaul.protocols.errors import ConfigError


class Routing(enum.StrEnum):
    """Which prefill worker a request goes to."""

    STICKY = "sticky"
    """That of the request it continues, so that P_end may still lie there."""
    FORGET = "forget"
    """The next one in turn, which has lost its cache before: what a worker would find that never
    saw the history. Taking turns alone does not make P_end absent: one of a few workers holds it.
    """

    @property
    def prompt_end(self) -> PromptEndAt:
        """What this means for the predecessor's P_end."""
        return PromptEndAt.PRESENT if self is Routing.STICKY else PromptEndAt.ABSENT


_RANGES: dict[str, tuple[float, float]] = {
    "prefill_workers": (1, 10_000),
    "decode_workers": (1, 10_000),
    "decode_slots": (1, 1e9),
    "local_bytes": (0, 2**60),
    "handed_tokens": (0, 1e9),
    "chunk_tokens": (1, 1e9),
    "step_s": (0, 1e6),
    "decode_token_s": (1e-9, 1e6),
    "call_s": (0, 1e6),
}


def range_of(name: str) -> tuple[float, float]:
    """The least and the most that a figure of a deployment may be."""
    return _RANGES.get(name, (1, 1e30))  # rates


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers and links.

    Attributes:
        prefill_workers, decode_workers: their numbers.
        decode_slots: requests that one decode worker runs at once.
        local_bytes: of each prefill worker, all its ranks together, for its own prefix cache and
            what it runs; 0: no limit.
        handed_tokens: tokens at the prompt's end that prefill leaves to decode (NIXL hands hybrid
            models over without the last one).
        prefill_flops_per_s: of one worker, sustained. Assumed.
        step_s: fixed cost of one prefill step. Assumed.
        chunk_tokens: of one prefill step at most (vLLM's max_num_batched_tokens).
        decode_token_s: from one token to the next. Assumed.
        write_bytes_per_s, read_bytes_per_s, call_s: of the store, measured: docs/figures.md,
            "Transfer", 64 MiB rows and the catalog call.
        handover_bytes_per_s: prefill to decode, measured: raw NIXL in the same table.
    """

    prefill_workers: int = 2
    decode_workers: int = 2
    decode_slots: int = 64
    routing: Routing = Routing.STICKY
    local_bytes: int = 0
    handed_tokens: int = 1
    prefill_flops_per_s: float = 200e12
    step_s: float = 0.01
    chunk_tokens: int = 8192
    decode_token_s: float = 0.02
    write_bytes_per_s: float = 2.71e9
    read_bytes_per_s: float = 2.62e9
    call_s: float = 1.8e-3
    handover_bytes_per_s: float = 3.88e9

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name == "routing":
                continue
            value = getattr(self, name)
            least, most = range_of(name)
            if not least <= value <= most:  # also refuses NaN
                raise ConfigError(f"{name} is {value}: it must be {least:g} ... {most:g}")


class Link:
    """A link that serves one transfer after the other."""

    def __init__(self, bytes_per_s: float, call_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._call_s = call_s
        self._free_at = 0.0

    def backlog_s(self, now: float) -> float:
        """How long a transfer that is handed in now waits for those before it."""
        return max(self._free_at - now, 0.0)

    def done_at(self, now: float, nbytes: float) -> float:
        """When a transfer that is handed in now will be over."""
        self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_s
        return self._free_at + self._call_s


Action = Callable[..., object]


class Clock:
    """Virtual time: calls what is due, in order of time and of being asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sequence = 0
        self._due: list[tuple[float, int, Action, tuple[Any, ...]]] = []

    def at(self, when: float, action: Action, *args: Any) -> None:
        """Call ``action`` at ``when``, or now where that is past."""
        self._sequence += 1
        heapq.heappush(self._due, (max(when, self.now), self._sequence, action, args))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, action, args = heapq.heappop(self._due)
            action(*args)
