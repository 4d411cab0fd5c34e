"""Which ends of a request are worth publishing: pure decisions on what is known at the time.

Engines and the simulator call ``choose``; it looks at no text and no token. Junctions are kept in
every policy and are no part of the choice.
"""

from __future__ import annotations

import enum

import msgspec

EXTRA_MAX = 8
"""Boundaries beyond the usual ends per request: each may cost a prefill step and a state."""

HINT_FIELDS = (
    *("u_end", "user_turn", "publish", "load", "policy", "boundaries", "template", "client"),
    *("tool_continuation", "tools", "reasoning", "reasoning_kept", "suffix_start", "rewrites"),
    *("return_prompt_token_ids", "prompt_length", "prompt_tail", "ends"),
)
"""What ``kv_transfer_params["backhaul"]`` of a request may say."""

HISTORY_MIN = 3
"""Outcomes that say something: a single miss may be a client that edited one message."""


class Policy(enum.StrEnum):
    """Which ends are published proactively; junctions always are."""

    MAIN_SPARSE = "main_sparse"
    INPUT_END = "input_end"
    DECODE_END = "decode_end"
    BOTH = "both"
    AUTO = "auto"
    BOUNDARIES = "boundaries"


class Why(enum.StrEnum):
    """What decided a choice; values of a metric's label."""

    FIXED = "fixed"
    """The policy names its ends."""
    NO_INPUT_END = "no_input_end"
    """U_end is not known, which leaves D_end."""
    HISTORY_MATCHES = "history_matches"
    """Earlier D_ends of this template and client matched more often than not."""
    HISTORY_MISSES = "history_misses"
    """They did not."""
    REASONING_DROPPED = "reasoning_dropped"
    """The reply reasons, and the next prompt will not contain the reasoning."""
    SUFFIX_DROPPED = "suffix_dropped"
    """The prompt ends in control text that the next prompt will not contain."""
    TOOL_CONTINUATION = "tool_continuation"
    """A tool's result was answered: the loop goes on from the reply."""
    REASONING_KEPT = "reasoning_kept"
    """The reply reasons, and the next prompt will contain the reasoning."""
    NO_REASONING = "no_reasoning"
    """The reply holds nothing that could be dropped."""
    TOOLS = "tools"
    """Tools are offered, so the reply may begin a loop that goes on from it."""
    UNKNOWN = "unknown"
    """Nothing says that the reply will come back as it was: U_end does not depend on it."""
    HANDED_OVER = "handed_over"
    """Another leg of the same request chose."""
    SUPPLIED = "supplied"
    """``boundaries``: positions were supplied or derived."""
    NOTHING_SUPPLIED = "nothing_supplied"
    """``boundaries``: there are none."""


class Matched(msgspec.Struct, frozen=True, kw_only=True):
    """What became of earlier checkpoints of one template and client, in requests that followed.

    Attributes:
        decode_end_matched: requests that matched a D_end deepest.
        decode_end_missed: requests that went on differently before a D_end of their history.
        input_end_matched: requests that matched a U_end deepest. It does not count against D_end,
            of which there may have been none.
    """

    decode_end_matched: int = 0
    decode_end_missed: int = 0
    input_end_matched: int = 0


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request; None where nothing is. Positions are tokens from the prompt's
    start.

    "At the next turn" means: in the prompt that continues this request. After a tool's result that
    is the loop's next step, otherwise the next user message.

    Attributes:
        tool_continuation: the last message is a tool's result.
        tools: tools are offered.
        reasoning: the reply begins with reasoning, or may.
        reasoning_kept: template and client give the reasoning back at the next turn.
        user_turn: the last message is a user's. Eviction spares such a U_end; no rule here needs
            more than ``tool_continuation``.
        history: what matched so far for this template and client.
        u_end: the renderer's offset.
        offsets: supplied by the application.
        verbatim_end: end of the longest generated prefix that the parser keeps verbatim. Known
            only at the request's end.
        suffix_start: position before control text that will be gone at the next turn; None also
            where there is no such text.
    """

    tool_continuation: bool = False
    tools: bool | None = None
    reasoning: bool | None = None
    reasoning_kept: bool | None = None
    user_turn: bool = False
    history: Matched = Matched()
    u_end: int | None = None
    offsets: tuple[int, ...] = ()
    verbatim_end: int | None = None
    suffix_start: int | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The ends to publish proactively.

    ``extra``: further positions, ascending, in tokens, at most ``EXTRA_MAX``; each materialises at
    the deepest boundary at or before it.
    """

    prompt_end: bool = False
    input_end: bool = False
    decode_end: bool = False
    extra: tuple[int, ...] = ()
    why: Why = Why.FIXED


_FIXED = {
    Policy.MAIN_SPARSE: Choice(prompt_end=True),
    Policy.INPUT_END: Choice(input_end=True),
    Policy.DECODE_END: Choice(decode_end=True),
    Policy.BOTH: Choice(input_end=True, decode_end=True),
}


def choose(policy: Policy, known: Known) -> Choice:
    """The proactive endpoints of a request under a policy.

    ``auto`` takes exactly one. The first rule that applies decides:

    ==== ================================================================== ===== =================
    rule what is known                                                      end   ``why``
    ==== ================================================================== ===== =================
    1    no U_end                                                           D_end no_input_end
    2    >= 3 D_ends matched, and more than missed                          D_end history_matches
    3    >= 3 D_ends missed, and no fewer than matched                      U_end history_misses
    4    the reply may reason and the reasoning will be gone                U_end reasoning_dropped
    5    control text before the reply will be gone                         U_end suffix_dropped
    6    a tool's result was answered                                       D_end tool_continuation
    7    the reply may reason and the reasoning will be there               D_end reasoning_kept
    8    the reply does not reason                                          D_end no_reasoning
    9    tools are offered, and nothing is known of reasoning               D_end tools
    10   nothing of all this                                                U_end unknown
    ==== ================================================================== ===== =================

    What was measured (2, 3) overrules what follows from structure, since parsers and clients also
    rewrite what a template keeps. Matches never turn D_end into U_end, nor misses U_end into D_end.
    Rules 4 and 5 come before 6: what is dropped within a loop keeps the loop from matching, too.

    ``boundaries`` takes the positions supplied by the application, the end of what the parser keeps
    verbatim once that is known, and the one before control text that will be gone. Of more than
    ``EXTRA_MAX`` the application's shallowest give way.
    """
    if policy is Policy.AUTO:
        return _auto(known)
    if policy is Policy.BOUNDARIES:
        return _boundaries(known)
    return _FIXED[policy]


def _auto(known: Known) -> Choice:
    why, decode_end = _auto_rule(known)
    return Choice(input_end=not decode_end, decode_end=decode_end, why=why)


def _auto_rule(known: Known) -> tuple[Why, bool]:
    """The rule that decides, and whether it takes D_end."""
    matched, missed = known.history.decode_end_matched, known.history.decode_end_missed
    may_reason = known.reasoning is not False
    rules = (
        (known.u_end is None, Why.NO_INPUT_END, True),
        (matched >= HISTORY_MIN and matched > missed, Why.HISTORY_MATCHES, True),
        (missed >= HISTORY_MIN and missed >= matched, Why.HISTORY_MISSES, False),
        (may_reason and known.reasoning_kept is False, Why.REASONING_DROPPED, False),
        (known.suffix_start is not None, Why.SUFFIX_DROPPED, False),
        (known.tool_continuation, Why.TOOL_CONTINUATION, True),
        (may_reason and known.reasoning_kept is True, Why.REASONING_KEPT, True),
        (known.reasoning is False, Why.NO_REASONING, True),
        (known.tools is True and known.reasoning is None, Why.TOOLS, True),
    )
    return next(((why, decode) for holds, why, decode in rules if holds), (Why.UNKNOWN, False))


def _boundaries(known: Known) -> Choice:
    derived = {p for p in (known.suffix_start, known.verbatim_end) if p is not None and p > 0}
    supplied = sorted({p for p in known.offsets if p > 0} - derived, reverse=True)
    extra = (*derived, *supplied[: EXTRA_MAX - len(derived)])
    why = Why.SUPPLIED if extra else Why.NOTHING_SUPPLIED
    return Choice(extra=tuple(sorted(extra)), why=why)
