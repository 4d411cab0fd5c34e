"""What a workload is made of: requests over spans of token content.

A prompt is a sequence of spans. A span names a stretch of some *source* (a system prompt, a user
message, one request's output), so two prompts share a prefix exactly as far as their spans agree,
and a prompt of 100,000 tokens costs a few tuples. For real engines ``token_ids`` turns spans into
ids; the simulator hashes the spans themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``[start, stop)`` of a source. Equal source, start and stop mean equal tokens."""

    source: str
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace.

    Attributes:
        request: its name, unique in the trace.
        conversation: the conversation that it belongs to; "" where the trace does not say.
        arrival_s: seconds since the trace's beginning at which it is sent, at the earliest.
        after: name of the request that must have ended before it is sent; "" for none.
        prompt: content of the prompt, generation prefix included.
        output: content of what is generated, end token included.
        u_end: tokens of the prompt before generation-only content; None where not known.
        user_turn: whether the last message before ``u_end`` is a user's.
        tools: whether the request offers tools.
        tool_continuation: whether the last message is a tool's result.
        calls_tool: whether the output ends with a tool call, so that the next turn continues it.
        reasoning_tokens: leading tokens of the output that are reasoning.
        reasoning_kept: whether the next turn's prompt still has that reasoning; None: not known.
        template: names what rendered it, for statistics by template and client; "" if unknown.
        boundaries: positions in the prompt that the application wants kept, in tokens, at most
            ``EXTRA_MAX`` of ``protocols.policy``.
        suffix_start: prompt tokens before control text that the next turn's prompt will not have;
            None: there is none, or that is not known.
        verbatim_tokens: leading tokens of the output that the parser gives back as they are; None:
            not known.
    """

    request: str
    conversation: str = ""
    arrival_s: float = 0.0
    after: str = ""
    prompt: tuple[Span, ...]
    output: tuple[Span, ...]
    u_end: int | None = None
    user_turn: bool = False
    tools: bool = False
    tool_continuation: bool = False
    calls_tool: bool = False
    reasoning_tokens: int = 0
    reasoning_kept: bool | None = None
    template: str = ""
    boundaries: tuple[int, ...] = ()
    suffix_start: int | None = None
    verbatim_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return length(self.prompt)

    @property
    def output_tokens(self) -> int:
        """Length of the output in tokens."""
        return length(self.output)


def length(spans: Iterable[Span]) -> int:
    """Tokens of a sequence of spans."""
    return sum(span.stop - span.start for span in spans)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same content with adjoining spans of one source joined and empty ones dropped, so that
    equal content cut differently compares equal."""
    done: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if done and done[-1].source == span.source and done[-1].stop == span.start:
            done[-1] = Span(span.source, done[-1].start, span.stop)
        else:
            done.append(span)
    return tuple(done)


def first(spans: Iterable[Span], tokens: int) -> tuple[Span, ...]:
    """The first ``tokens`` tokens of the content (all of it where there are fewer)."""
    done: list[Span] = []
    left = tokens
    for span in spans:
        if left <= 0:
            break
        taken = min(span.tokens, left)
        done.append(Span(span.source, span.start, span.start + taken))
        left -= taken
    return merged(done)


def shared_prefix(one: Iterable[Span], other: Iterable[Span]) -> int:
    """Tokens that two contents have in common from the start."""
    total = 0
    for a, b in zip(merged(one), merged(other), strict=False):
        if a.source != b.source or a.start != b.start:
            break
        total += min(a.tokens, b.tokens)
        if a.stop != b.stop:
            break
    return total


def token_ids(spans: Iterable[Span], vocabulary: range) -> list[int]:
    """Pseudo-random token ids of the content, the same for the same source everywhere.

    ``vocabulary``: the ids to draw from. Two sources agree on a token by chance only.
    """
    ids: list[int] = []
    for span in spans:
        ids += _source_ids(span.source, vocabulary, span.start, span.stop)
    return ids


def _source_ids(source: str, vocabulary: range, start: int, stop: int) -> Iterator[int]:
    draw = random.Random(source)
    for position in range(stop):
        token = draw.choice(vocabulary)
        if position >= start:
            yield token
