"""Where a request's checkpoints end: pure decisions on plain numbers.

The prompt of N tokens on a boundary grid of B tokens, with the ends of spec.md::

    0 ........ U_end ..... N = P_end ........... n = D_end
               |  generation-only suffix  |  generated, committed  |

    materialised:  floor(U_end)      floor(N - 1)            floor(n)

A prompt's replay can use at most N - 1 tokens (a state that already holds the token to be
recomputed would apply it twice), hence floor(N - 1) for P_end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.options import FinishReason, Options, Policy


class RequestHints(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_transfer_params["backhaul"]`` of one request, checked.

    Attributes:
        u_end: the U_end token position, or None where the renderer gave none.
        user_turn: whether the last message before it is a user's.
        publish: whether this request's checkpoints may be published.
        load: whether this request may load from the store.
        rejected: names of fields whose value was ignored, to be counted.
    """

    u_end: int | None = None
    user_turn: bool = False
    publish: bool = True
    load: bool = True
    rejected: tuple[str, ...] = ()


def parse_hints(params: object, prompt_tokens: int) -> RequestHints:
    """Read a request's hints. Never raises: what is malformed is named in ``rejected``.

    ``u_end`` must be an int (no bool) in 1 ... ``prompt_tokens``, the others bools.
    Unknown fields are left alone, since a proxy may hand one leg's answer to the other.
    """
    if params is None:
        return RequestHints()
    if not isinstance(params, dict):
        return RequestHints(rejected=("backhaul",))
    rejected: list[str] = []
    u_end: Any = params.get("u_end")
    if u_end is not None and (type(u_end) is not int or not 1 <= u_end <= prompt_tokens):
        rejected.append("u_end")
        u_end = None
    switches = {name: params.get(name) for name in ("publish", "load", "user_turn")}
    rejected += [n for n, value in switches.items() if not isinstance(value, bool | None)]
    return RequestHints(
        u_end=u_end,
        publish=switches["publish"] is not False,
        load=switches["load"] is not False,
        user_turn=switches["user_turn"] is True,
        rejected=tuple(rejected),
    )


class PromptEnds(msgspec.Struct, frozen=True, kw_only=True):
    """Boundaries inside a prompt at which this engine takes a checkpoint (0: none).

    ``junction`` is vLLM's own position of ``shared_prefix`` where that lies inside a block.
    """

    input_end: int = 0
    prompt_end: int = 0
    shared_prefix: int = 0
    junction: int = 0

    def kinds_at(self, boundary: int) -> tuple[CheckpointKind, ...]:
        """Logical ends that materialise at ``boundary``."""
        ends = (
            (self.input_end, CheckpointKind.INPUT_END),
            (self.prompt_end, CheckpointKind.PROMPT_END),
            (self.shared_prefix, CheckpointKind.SHARED_PREFIX),
        )
        return tuple(kind for end, kind in ends if end and end == boundary)

    def stops_after(self, position: int) -> list[int]:
        """Chunk ends to force above ``position``, ascending. P_end needs none: vLLM ends a chunk
        there by itself. A junction inside a block is handed on as it is: vLLM ends the chunk at
        the block's start, or right there where it can keep such a state."""
        junction = self.junction or self.shared_prefix
        return sorted({end for end in (self.input_end, junction) if end > position})

    def kept_with(self, boundary: int) -> int:
        """What to name to vLLM so that it keeps the state at ``boundary``: that position, or the
        junction inside the block that begins there, which keeps both."""
        return self.junction or boundary if self.shared_prefix == boundary else boundary


def prompt_ends(
    *,
    options: Options,
    u_end: int | None,
    prompt_tokens: int,
    junction: int,
    grid: int,
    carries_prompt: bool,
    drops_block: bool = False,
) -> PromptEnds:
    """Ends of one prompt under a policy.

    Args:
        u_end: the renderer's offset in tokens, or None.
        junction: vLLM's shared-prefix boundary in tokens; 0 where it saw none.
        grid: the boundary grid B in tokens.
        carries_prompt: no other connector hands this prompt's cache over.
        drops_block: an EAGLE group gives up its last matched block, so vLLM ends the chunk one
            block below the last full one.
    """
    policy = options.policy
    wants_input = wants_input_end(policy) and u_end is not None
    wants_prompt = options.publish_prompt_end
    if wants_prompt is None:
        wants_prompt = carries_prompt or policy is Policy.MAIN_SPARSE
    return PromptEnds(
        input_end=(u_end or 0) // grid * grid if wants_input else 0,
        prompt_end=_prompt_end(prompt_tokens, grid, drops_block) if wants_prompt else 0,
        shared_prefix=junction // grid * grid,
        junction=junction if junction % grid else 0,
    )


def wants_input_end(policy: Policy) -> bool:
    """Whether a policy publishes U_end."""
    return policy in (Policy.INPUT_END, Policy.BOTH)


def _prompt_end(tokens: int, grid: int, drops_block: bool) -> int:
    """Where vLLM keeps a prompt's last recurrent state."""
    if drops_block:
        return max(tokens // grid - 1, 0) * grid
    return max(tokens - 1, 0) // grid * grid


def wants_decode_end(policy: Policy) -> bool:
    """Whether a policy publishes D_end."""
    return policy in (Policy.DECODE_END, Policy.BOTH)


def decode_end(*, committed: int, total_tokens: int, grid: int) -> int:
    """Boundary of D_end in tokens.

    ``committed`` tokens have been computed and accepted; of ``total_tokens`` (prompt + output) the
    last one was sampled but is no part of the computed prefix.
    """
    return max(min(committed, total_tokens - 1), 0) // grid * grid


def publishes_decode_end(reason: FinishReason | None, publish_on: Iterable[FinishReason]) -> bool:
    """Whether a request that ended for ``reason`` (None: preempted, error) publishes its D_end."""
    return reason is not None and reason in publish_on


def deepest_usable(
    boundaries: Iterable[int], *, local_tokens: int, limit_tokens: int, denied: Collection[int]
) -> int:
    """The boundary to load, or 0: the deepest one above the local hit, at most ``limit_tokens``
    (one token must remain to be computed) and not denied after a failed load."""
    usable = (b for b in boundaries if local_tokens < b <= limit_tokens and b not in denied)
    return max(usable, default=0)
