"""Backhaul's own trace format: JSON lines, a ``Turn`` per line. See docs/traces.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.traces.faults import LineFault, Reason, Skips
from backhaul.benchmarks.traces.records import decode, read_lines
from backhaul.protocols.policy import EXTRA_MAX

NAME_CHARACTERS_MAX = 256
TOKENS_MAX = 1 << 31
ARRIVAL_S_MAX = 1e12

_DECODER = msgspec.json.Decoder(Turn)
_ENCODER = msgspec.json.Encoder()


def encode_turn(turn: Turn) -> bytes:
    """The turn's line, line end included."""
    return _ENCODER.encode(turn) + b"\n"


def read_native(path: Path, skips: Skips) -> Iterator[Turn]:
    """Turns of a file in our own format. Keeps the names of all requests read."""
    names: set[str] = set()
    for record in read_lines(path, skips):
        try:
            turn = decode(_DECODER, record)
            _check(turn)
            _check_names(turn, names)
        except LineFault as fault:
            skips.take(record.line, fault)
            continue
        names.add(turn.request)
        yield turn


def _check(turn: Turn) -> None:
    """Raises ``LineFault`` for values that the types allow and a trace cannot have."""
    for field in ("request", "conversation", "after", "template"):
        if len(getattr(turn, field)) > NAME_CHARACTERS_MAX:
            problem = f"give at most {NAME_CHARACTERS_MAX} characters"
            raise LineFault(Reason.OUT_OF_RANGE, field, getattr(turn, field), problem)
    if not turn.request:
        raise LineFault(Reason.OUT_OF_RANGE, "request", "", "give every request a name")
    if not (math.isfinite(turn.arrival_s) and 0 <= turn.arrival_s <= ARRIVAL_S_MAX):
        problem = f"give seconds in 0 ... {ARRIVAL_S_MAX:.0e}"
        raise LineFault(Reason.OUT_OF_RANGE, "arrival_s", turn.arrival_s, problem)
    _check_spans("prompt", turn.prompt)
    _check_spans("output", turn.output)
    if not turn.prompt_tokens:
        raise LineFault(Reason.OUT_OF_RANGE, "prompt", [], "a prompt has at least one token")
    for field, limit, what in (
        ("u_end", turn.prompt_tokens, "prompt"),
        ("suffix_start", turn.prompt_tokens, "prompt"),
        ("reasoning_tokens", turn.output_tokens, "output"),
        ("verbatim_tokens", turn.output_tokens, "output"),
    ):
        value = getattr(turn, field)
        if value is not None and not 0 <= value <= limit:
            problem = f"must lie in 0 ... {limit}, the {what}'s length"
            raise LineFault(Reason.INCONSISTENT, field, value, problem)
    if len(turn.boundaries) > EXTRA_MAX:
        problem = f"give at most {EXTRA_MAX} positions"
        raise LineFault(Reason.OUT_OF_RANGE, "boundaries", len(turn.boundaries), problem)
    for boundary in turn.boundaries:
        if not 1 <= boundary <= turn.prompt_tokens:
            problem = f"must lie in 1 ... {turn.prompt_tokens}, the prompt's length"
            raise LineFault(Reason.INCONSISTENT, "boundaries", boundary, problem)


def _check_spans(field: str, spans: tuple[Span, ...]) -> None:
    total = 0
    for i, span in enumerate(spans):
        if not 0 <= span.start <= span.stop:
            problem = "start must be 0 or more and stop not below it"
            raise LineFault(Reason.OUT_OF_RANGE, f"{field}[{i}]", (span.start, span.stop), problem)
        total += span.stop - span.start
        if span.stop > TOKENS_MAX or total > TOKENS_MAX:
            problem = f"give at most {TOKENS_MAX:,} tokens"
            raise LineFault(Reason.OUT_OF_RANGE, f"{field}[{i}]", span.stop, problem)


def _check_names(turn: Turn, names: set[str]) -> None:
    if turn.request in names:
        problem = "an earlier line has this name: give every request its own"
        raise LineFault(Reason.INCONSISTENT, "request", turn.request, problem)
    if turn.after and turn.after not in names:
        problem = "no earlier line has this name: a request follows those it waits for"
        raise LineFault(Reason.UNKNOWN_REQUEST, "after", turn.after, problem)
