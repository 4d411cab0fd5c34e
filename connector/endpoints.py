"""Where a request's checkpoints end: pure decisions on plain numbers.

The prompt of N tokens on a boundary grid of B tokens, with the ends of spec.md::

    0 ........ U_end ..... N = P_end ........... n = D_end
               |  generation-only suffix  |  generated, committed  |

    materialised:  floor(U_end)      floor(N - 1)            floor(n)

A prompt's replay can use at most N - 1 tokens (a state that already holds the token to be
recomputed would apply it twice), hence floor(N - 1) for P_end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from backhaul.connector.hints import RequestHints
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.options import FinishReason, Options, WorkerKind
from backhaul.protocols.policy import Choice, Matched, Policy, Why, choose
from backhaul.protocols.record import DecodeEndReason


class PromptEnds(msgspec.Struct, frozen=True, kw_only=True):
    """Boundaries inside a prompt at which this engine takes a checkpoint (0: none).

    ``junction`` is vLLM's own position of ``shared_prefix`` where that lies inside a block;
    ``extra`` are those that belong to no other end.
    """

    input_end: int = 0
    prompt_end: int = 0
    shared_prefix: int = 0
    junction: int = 0
    extra: tuple[int, ...] = ()

    def kinds_at(self, boundary: int) -> tuple[CheckpointKind, ...]:
        """Logical ends that materialise at ``boundary``."""
        ends = (
            (self.input_end, CheckpointKind.INPUT_END),
            (self.prompt_end, CheckpointKind.PROMPT_END),
            (self.shared_prefix, CheckpointKind.SHARED_PREFIX),
            *((extra, CheckpointKind.BOUNDARY) for extra in self.extra),
        )
        return tuple(kind for end, kind in ends if end and end == boundary)

    def within(self, start: int, end: int) -> set[int]:
        """Ends that a step from ``start`` to ``end`` reaches."""
        ends = (self.input_end, self.prompt_end, self.shared_prefix, *self.extra)
        return {position for position in ends if start < position <= end}

    def stops_after(self, position: int) -> list[int]:
        """Chunk ends to force above ``position``, ascending. P_end needs none: vLLM ends a chunk
        there by itself. A junction inside a block is handed on as it is: vLLM ends the chunk at
        the block's start, or right there where it can keep such a state."""
        junction = self.junction or self.shared_prefix
        ends = (self.input_end, junction, *self.extra)
        return sorted({end for end in ends if end > position})

    def kept_with(self, boundary: int) -> int:
        """What to name to vLLM so that it keeps the state at ``boundary``: that position, or the
        junction inside the block that begins there, which keeps both."""
        return self.junction or boundary if self.shared_prefix == boundary else boundary


def prompt_ends(
    *,
    options: Options,
    choice: Choice,
    u_end: int | None,
    prompt_tokens: int,
    junction: int,
    grid: int,
    carries_prompt: bool,
    drops_block: bool = False,
) -> PromptEnds:
    """Ends of one prompt.

    Args:
        choice: what the request's policy chose.
        u_end: the renderer's offset in tokens, or None.
        junction: vLLM's shared-prefix boundary in tokens; 0 where it saw none.
        grid: the boundary grid B in tokens.
        carries_prompt: no other connector hands this prompt's cache over.
        drops_block: an EAGLE group gives up its last matched block, so vLLM ends the chunk one
            block below the last full one.
    """
    wants_prompt = options.publish_prompt_end
    if wants_prompt is None:
        wants_prompt = carries_prompt or choice.prompt_end
    extra = {end // grid * grid for end in choice.extra if end <= prompt_tokens}
    return PromptEnds(
        input_end=(u_end or 0) // grid * grid if choice.input_end else 0,
        prompt_end=_prompt_end(prompt_tokens, grid, drops_block) if wants_prompt else 0,
        shared_prefix=junction // grid * grid,
        junction=junction if junction % grid else 0,
        extra=tuple(sorted(extra - {0})),
    )


def choose_ends(policy: Policy, hints: RequestHints, history: Matched) -> Choice:
    """The proactive ends of a request as it arrives. Of one that comes in two legs, the second
    takes the first one's choice under ``auto``: it may know less, and two halves of one choice must
    fit."""
    if policy is Policy.AUTO and hints.ends is not None:
        return Choice(
            prompt_end=CheckpointKind.PROMPT_END in hints.ends,
            input_end=CheckpointKind.INPUT_END in hints.ends,
            decode_end=CheckpointKind.DECODE_END in hints.ends,
            why=Why.HANDED_OVER,
        )
    return choose(policy, hints.known(history))


def chosen_kinds(choice: Choice) -> tuple[CheckpointKind, ...]:
    """The logical ends of a choice."""
    wanted = (
        (choice.prompt_end, CheckpointKind.PROMPT_END),
        (choice.input_end, CheckpointKind.INPUT_END),
        (choice.decode_end, CheckpointKind.DECODE_END),
        (bool(choice.extra), CheckpointKind.BOUNDARY),
    )
    return tuple(kind for holds, kind in wanted if holds)


class VerbatimEnd:
    """Finds where the parser begins to rewrite a reply, as its tokens become known."""

    def __init__(self, prompt_tokens: int, rewrites: Iterable[int]) -> None:
        self._rewrites = frozenset(rewrites)
        self._read = prompt_tokens
        self._found = False

    def end(self, token_ids: Sequence[int], committed: int) -> int:
        """End in tokens of what is kept as it is, of the first ``committed`` tokens of prompt and
        reply, which are final."""
        while not self._found and self._read < committed:
            if token_ids[self._read] in self._rewrites:
                self._found = True
            else:
                self._read += 1
        return min(self._read, committed)


def verbatim_end(policy: Policy, hints: RequestHints, prompt_tokens: int) -> VerbatimEnd | None:
    """What finds the end of the verbatim part; None where the policy does not ask for it, the
    parser is not known, or the reply begins with reasoning that will be gone."""
    dropped = hints.reasoning is not False and hints.reasoning_kept is False
    if policy is not Policy.BOUNDARIES or hints.rewrites is None or dropped:
        return None
    return VerbatimEnd(prompt_tokens, hints.rewrites)


def _prompt_end(tokens: int, grid: int, drops_block: bool) -> int:
    """Where vLLM keeps a prompt's last recurrent state."""
    if drops_block:
        return max(tokens // grid - 1, 0) * grid
    return max(tokens - 1, 0) // grid * grid


def may_publish_decode(policy: Policy) -> bool:
    """Whether a policy may publish a position in the reply."""
    return policy not in (Policy.MAIN_SPARSE, Policy.INPUT_END)


def decode_end(*, committed: int, total_tokens: int, grid: int) -> int:
    """Boundary of D_end in tokens.

    ``committed`` tokens have been computed and accepted; of ``total_tokens`` (prompt + output) the
    last one was sampled but is no part of the computed prefix.
    """
    return max(min(committed, total_tokens - 1), 0) // grid * grid


def is_prefill_leg(params: Mapping[str, Any], kind: WorkerKind | None, max_tokens: int) -> bool:
    """Whether a request only prefills, for a decode worker to go on: its one token is no reply.

    Args:
        params: its ``kv_transfer_params``, by which vLLM's own P/D connectors tell.
        kind: what the engine is known to serve; a prefill engine that is asked for one token hands
            over, in whatever words.
    """
    one_token = kind is WorkerKind.PREFILL and max_tokens == 1
    return one_token or bool(params.get("do_remote_decode"))


def why_no_decode_end(
    *, wanted: bool, replies: bool, finish_included: bool, boundary: int, prompt_tokens: int
) -> DecodeEndReason:
    """Of a request whose D_end was not sent: why. ``boundary`` is D_end's, 0 where the request
    never ran."""
    if not wanted:
        return DecodeEndReason.NOT_WANTED
    if not replies:
        return DecodeEndReason.NO_REPLY
    if not finish_included:
        return DecodeEndReason.FINISH_EXCLUDED
    # A handed-over state lies one token before the prompt's end.
    below = boundary < max(prompt_tokens - 1, 1)
    return DecodeEndReason.BELOW_GRID if below else DecodeEndReason.NOT_KEPT


def publishes_decode_end(reason: FinishReason | None, publish_on: Iterable[FinishReason]) -> bool:
    """Whether a request that ended for ``reason`` (None: preempted, error) publishes its D_end."""
    return reason is not None and reason in publish_on
