"""What requests of real clients reused, from the request logs of the engines that served them.

Logs hold no text and, unless an engine was told to log them, no token ids, but the chained hash at
every boundary of prompt and output. Ends lie on boundaries, so these hashes say exactly which end
of which request a prompt still begins with. The lines are those of the experiment, judged by the
same functions.

A request *continues* the latest one before it whose input it begins with, as deep as any does.
Where no token ids are logged, "begins with" is known up to one block.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec

from backhaul.benchmarks.reuse.lines import is_whole, say, whole_lines
from backhaul.benchmarks.reuse.record import (
    Arm,
    ArmResult,
    PromptEndAt,
    RequestResult,
    Result,
    Source,
)
from backhaul.benchmarks.reuse.relations import Relations, judged
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Policy, Why
from backhaul.protocols.record import Chosen, LoggedRequest

WORKLOAD = "served"
LINE_BYTES_MAX = 256 << 20
_RANDOM_PART = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM appends to the id that the client and the other leg know."""
_ALIKE_MAX = 256
"""Requests that are kept per prefix: thousands may have nothing but a system prompt in common."""

_DECODER = msgspec.json.Decoder(LoggedRequest)


class _Tag(msgspec.Struct):
    """What tells a request log from the experiment's results."""

    request_id: str
    type: str = ""


def is_request_log(path: Path) -> bool:
    """Whether a file begins with a request of an engine's log; False where it cannot be read."""
    try:
        with path.open("rb") as file:
            first = file.readline(LINE_BYTES_MAX)
        return not msgspec.json.decode(first, type=_Tag).type
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False


def read_logs(paths: Iterable[Path]) -> Iterator[LoggedRequest]:
    """Requests of engines' logs. Lines that were not written whole are passed over, which is said
    once per file: engines go on in a file after one was killed, or a disk was full.

    Raises ``ConfigError`` that names file and line for what is no request, and where a file cannot
    be read.
    """
    for path in paths:
        torn = []
        for where, line in whole_lines(path):
            try:
                one = _logged(line, where)
            except ConfigError:
                if is_whole(line):
                    raise
                if not line.isspace():  # empty where two engines set about mending at once
                    torn.append(where)
            else:
                yield one
        if torn:
            more = f" (as are {len(torn) - 1} more)" if len(torn) > 1 else ""
            say(f"{torn[0]} was not written whole, and is passed over{more}")


def _logged(line: bytes, where: str) -> LoggedRequest:
    try:
        one = _DECODER.decode(line)
        for block_hash in one.boundary_hashes:
            bytes.fromhex(block_hash)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: no request of an engine's log: {error}") from None
    lengths = (one.prompt_tokens, one.output_tokens, one.grid_tokens, one.local_tokens)
    if min(*lengths, one.loaded_tokens, one.other_tokens, one.recomputed_tokens) < 0:
        raise ConfigError(f"{where}: no request of an engine's log: a length is negative")
    return one


class _Served(NamedTuple):
    """One request, of the legs that it had.

    Attributes:
        asked: the leg that looked for checkpoints: prefill's, or the only one.
        answered: the leg that made the reply.
    """

    asked: LoggedRequest
    answered: LoggedRequest

    @property
    def input_tokens(self) -> int:
        """U_end, or where it is not known the prompt's length."""
        given = self.asked.input_end.given
        return self.answered.prompt_tokens if given is None else given


def served_results(requests: Iterable[LoggedRequest]) -> Iterator[Result]:
    """One line per request, and one for each policy that they were served under.

    Legs of one request are put together, so give the logs of prefill and decode engines.
    """
    served = sorted(_pairs(requests), key=lambda one: one.asked.time)
    handed = any(one.asked is not one.answered for one in served)
    by_grid: dict[int, _Known] = {}
    lines: dict[str, list[RequestResult]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for one in served:
        grid = one.answered.grid_tokens or 1
        known = by_grid.setdefault(grid, _Known(grid, handed_tokens=int(handed)))
        turn = known.turn(one)
        policy = _policy(one.asked.chosen)
        lines[policy].append(
            RequestResult(
                arm=_arm(policy),
                output_tokens=one.answered.output_tokens,
                **judged(turn, known.relations.add(turn), known.relations, one.asked),
            )
        )
        times[policy] += [one.asked.time, one.answered.time]
    for policy, some in lines.items():
        yield from some
        seconds = max(times[policy]) - min(times[policy])
        yield ArmResult(arm=_arm(policy), seconds=max(seconds, 0.0), requests=len(some))


def _arm(policy: str) -> Arm:
    return Arm(source=Source.SERVED, workload=WORKLOAD, policy=policy, prompt_end=PromptEndAt.MIXED)


def _policy(chosen: Chosen) -> str:
    """The policy that chooses so."""
    if chosen.why not in (Why.FIXED, Why.HANDED_OVER):
        return Policy.AUTO
    if CheckpointKind.BOUNDARY in chosen.ends:
        return Policy.BOUNDARIES
    ends = {CheckpointKind.INPUT_END, CheckpointKind.DECODE_END} & set(chosen.ends)
    if len(ends) == 1:
        return Policy(next(iter(ends)).value)
    return Policy.BOTH if ends else Policy.MAIN_SPARSE


def _pairs(requests: Iterable[LoggedRequest]) -> Iterator[_Served]:
    """Legs put together by the id that they share; of several tries the last one that asked."""
    legs: dict[str, list[LoggedRequest]] = defaultdict(list)
    for one in requests:
        legs[_RANDOM_PART.sub("", one.request_id)].append(one)
    for some in legs.values():
        asked = max(reversed(some), key=_has_asked)
        if asked.prompt_tokens:  # else it ended before it ran
            yield _Served(asked, max(some, key=lambda one: (one.output_tokens, one.time)))


def _has_asked(one: LoggedRequest) -> int:
    return 2 if one.candidates else int(not one.other_tokens)


def _cut(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    cut, position = [], 0
    for span in spans:
        low, high = max(start - position, 0), min(stop - position, span.tokens)
        if low < high:
            cut.append(Span(span.source, low, high))
        position += span.tokens
    return tuple(cut)


class _Known:
    """Requests that were served before, of engines with one boundary grid."""

    def __init__(self, grid: int, *, handed_tokens: int) -> None:
        self.relations = Relations(grid, handed_tokens=handed_tokens)
        self._grid = grid
        self._conversations: dict[str, str] = {}
        self._with: dict[str, deque[_Served]] = {}

    def turn(self, one: _Served) -> Turn:
        """The request as a turn after those before it. Requests come in the order in which they
        asked.

        A block of its content is named by its hash, which stands for all before it too.
        """
        leg, grid = one.answered, self._grid
        name, total = leg.request_id, leg.prompt_tokens + leg.output_tokens
        hashes = leg.boundary_hashes[: total // grid]
        after = self._predecessor(one)
        root = self._conversations[name] = self._conversations.get(after, name)
        # A prefix that does not reach the end of the input is no beginning of a conversation.
        for block_hash in hashes[max(one.input_tokens // grid - 1, 0) :]:
            self._with.setdefault(block_hash, deque(maxlen=_ALIKE_MAX)).append(one)
        spans = [Span(block_hash, 0, grid) for block_hash in hashes]
        spans.append(Span(f"rest of {name}", 0, total - len(hashes) * grid))
        return Turn(
            request=name,
            conversation=root,
            after=after,
            prompt=_cut(spans, 0, leg.prompt_tokens),
            output=_cut(spans, leg.prompt_tokens, total),
            u_end=one.asked.input_end.given,
        )

    def _predecessor(self, one: _Served) -> str:
        """Name of the request that this one continues; "" for none."""
        prompt = one.answered.prompt_tokens
        blocks = one.answered.boundary_hashes[: prompt // self._grid]
        for index in range(len(blocks) - 1, -1, -1):
            found = [
                other
                for other in self._with.get(blocks[index], ())
                if other.answered.time <= one.asked.time
                and other.answered.prompt_tokens < prompt
                and _shared(other, one, (index + 1) * self._grid) >= other.input_tokens
            ]
            if found:
                return max(found, key=lambda other: other.answered.time).answered.request_id
        return ""


def _shared(one: _Served, other: _Served, known: int) -> int:
    """Tokens that both have in common, of which ``known`` are known to be: exactly, where both were
    logged with token ids, else the most that it may be."""
    ours, theirs = one.answered.token_ids, other.answered.token_ids
    if not ours or not theirs:
        return known + one.answered.grid_tokens - 1
    pairs = zip(ours[known:], theirs[known : other.answered.prompt_tokens], strict=False)
    return known + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
