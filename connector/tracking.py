"""What the scheduler half remembers of one request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backhaul.connector.endpoints import PromptEnds, RequestHints
from backhaul.connector.jobs import Job
from backhaul.protocols.checkpoint import CheckpointKind, LeaseId, PublicationId, Reason


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
    """

    boundary: int
    blocks: dict[int, tuple[tuple[int, int], ...]]
    kinds: tuple[CheckpointKind, ...] = ()
    confirmed: bool = False
    passable: bool = False

    @property
    def block_ids(self) -> list[int]:
        """Every held block id."""
        return [block for pairs in self.blocks.values() for _, block in pairs]


@dataclass
class Load:
    """A load that was offered to vLLM; from ``lease`` on, set once vLLM took it."""

    boundary: int
    local_tokens: int
    kinds: tuple[CheckpointKind, ...]
    age_s: float = 0.0
    lease: LeaseId = field(default=LeaseId(""))
    block_ids: tuple[int, ...] = ()
    job: Job = field(default_factory=lambda: Job(0, 1, ""))
    started: float = 0.0


@dataclass
class TrackedRequest:
    """Connector state of one request; ``request`` is vLLM's own object."""

    request: Any
    hints: RequestHints
    carries_prompt: bool
    ends: PromptEnds = field(default_factory=PromptEnds)
    stops: list[int] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)
    decode_pin: int = 0
    sent: set[int] = field(default_factory=set)  # boundaries whose prompt ends were published
    preemptions: int = 0
    denied: set[int] = field(default_factory=set)
    loads_over: bool = False
    offered: Load | None = None
    loading: Load | None = None
    loaded: Load | None = None
    miss: Reason | None = None
    local_tokens: int = 0
    publication: PublicationId | None = None
    streamed: int = 0
    stream_job: int = 0

    @property
    def request_id(self) -> str:
        """vLLM's id."""
        return str(self.request.request_id)

    def result(self) -> dict[str, Any]:
        """What the response's ``kv_transfer_params["backhaul"]`` says."""
        load = self.loaded
        answer: dict[str, Any] = {
            "local_tokens": self.local_tokens,
            "loaded_tokens": load.boundary - load.local_tokens if load else 0,
            "selected": None,
        }
        if load:
            answer["selected"] = {
                "boundary": load.boundary,
                "kind": primary_kind(load.kinds),
                "kinds": list(load.kinds),
                "age_s": round(load.age_s, 3),
            }
        elif self.miss is not None:
            answer["reason"] = str(self.miss)
        return answer


_PRECEDENCE = (
    CheckpointKind.DECODE_END,
    CheckpointKind.INPUT_END,
    CheckpointKind.SHARED_PREFIX,
    CheckpointKind.PROMPT_END,
)


def primary_kind(kinds: tuple[CheckpointKind, ...]) -> str:
    """The end to name where several share one checkpoint: the fallback order of spec.md."""
    return next((str(kind) for kind in _PRECEDENCE if kind in kinds), "unknown")
