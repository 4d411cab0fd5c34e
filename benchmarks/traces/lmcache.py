"""LMCache's agent traces: JSON lines of ``session_id``, ``timestamp`` (µs), ``input``, ``output``.

Format: github.com/LMCache/lmcache-agent-trace. A session is one run; several agents may take turns
in it, and lines do not stand in the order of time. ``input`` is a prompt's text; what of it is an
earlier reply is inferred:

- A request *continues* the request of its session, among the latest ``EARLIER_MAX`` before it, that
  was sent the longest input with which its own, longer input begins; of equals the latest.
- What follows there may begin with that request's output, after a blank line and a role label at
  most. If so, the reply was replayed. If not, and inputs have no role labels at all, they leave
  replies out (mini-swe-agent's and tau-bench's do): the reply is put in. Otherwise it came back
  in other words, or not at all, and the prompt departs from it there.
- An input that continues none shares with the earlier one most like it what its text shares.

An input ends where generation-only content begins, which is not in it: that is U_end. Nothing says
whose its last message is.

Tokens are counted by the rule for text, per stretch. Every reply ends with one end token; an output
of no text (a tool call that was not recorded) is that token alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from backhaul.benchmarks.reuse.trace import Span, Turn, length, merged
from backhaul.benchmarks.traces.dialogue import TextRules, generation_prefix
from backhaul.benchmarks.traces.faults import LineFault, Skips
from backhaul.benchmarks.traces.records import decode, read_lines
from backhaul.benchmarks.traces.text import Pieces

EARLIER_MAX = 256

_LABEL = re.compile(r"(system|user|assistant|tool): ")
_REPLY_LABEL = re.compile(r"\s*(assistant: )?")
_END = Span("end of message", 0, 1)


class _Line(msgspec.Struct):
    session_id: Annotated[str, Meta(max_length=128)]
    timestamp: Annotated[float, Meta(ge=0, le=1e18)]
    input: str
    output: str


_DECODER = msgspec.json.Decoder(_Line)


class _Request(NamedTuple):
    """One request with the content of its prompt up to the generation prefix."""

    name: str
    conversation: str
    input: str
    output_text: str
    history: tuple[Span, ...]
    output: tuple[Span, ...]


def read_lmcache(path: Path, skips: Skips, rules: TextRules) -> Iterator[Turn]:
    """Turns, session by session in the order of their first line. The file is held whole: any line
    may belong before one that was read. Times count from the file's earliest."""
    sessions: dict[str, list[tuple[int, _Line]]] = {}
    for record in read_lines(path, skips):
        try:
            line = decode(_DECODER, record)
        except LineFault as fault:
            skips.take(record.line, fault)
            continue
        sessions.setdefault(line.session_id, []).append((record.line, line))
    start = min((line.timestamp for rows in sessions.values() for _, line in rows), default=0.0)
    pieces = Pieces(rules.tokens)
    for rows in sessions.values():
        rows.sort(key=lambda row: row[1].timestamp)
        yield from _session(pieces, rows, start)


def _session(pieces: Pieces, rows: Sequence[tuple[int, _Line]], start: float) -> Iterator[Turn]:
    labelled = any(_LABEL.match(line.input) for _, line in rows)
    earlier: deque[_Request] = deque(maxlen=EARLIER_MAX)
    for number, line in rows:
        parent = _continued(earlier, line.input)
        if parent is None:
            history = pieces.spans(line.input)
            conversation = f"s{rows[0][0]}.{number}"
        else:
            history = _continuation(pieces, parent, line.input, labelled=labelled)
            conversation = parent.conversation
        request = _Request(
            name=f"r{number}",
            conversation=conversation,
            input=line.input,
            output_text=line.output,
            history=history,
            output=(*pieces.spans(line.output), _END),
        )
        earlier.append(request)
        yield Turn(
            request=request.name,
            conversation=conversation,
            arrival_s=(line.timestamp - start) / 1e6,
            after="" if parent is None else parent.name,
            prompt=merged((*history, *generation_prefix())),
            output=request.output,
            u_end=length(history),
        )


def _continued(earlier: Sequence[_Request], text: str) -> _Request | None:
    best: _Request | None = None
    for request in earlier:
        if (
            request.input
            and len(request.input) < len(text)
            and len(request.input) >= (len(best.input) if best else 0)
            and text.startswith(request.input)
        ):
            best = request
    return best


def _continuation(
    pieces: Pieces, parent: _Request, text: str, *, labelled: bool
) -> tuple[Span, ...]:
    """Content of a prompt whose text goes on after the parent's."""
    rest = text[len(parent.input) :]
    label = _REPLY_LABEL.match(rest)
    reply_at = label.end() if label else 0
    reply = parent.output_text
    replayed = bool(reply) and rest.startswith(reply, reply_at)
    if not replayed and labelled:
        return merged((*parent.history, *pieces.spans(rest)))
    tail = rest[reply_at + len(reply) :] if replayed else rest
    return merged((*parent.history, *generation_prefix(), *parent.output, *pieces.spans(tail)))
