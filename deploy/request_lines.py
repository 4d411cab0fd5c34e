"""Request logs of engines, read line by line: a request, who produced a checkpoint, who came
closest to a prompt. Lines that are cut short or of another make are passed over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec

from backhaul.deploy.arguments import shown
from backhaul.protocols.errors import ConfigError

LINE_BYTES_MAX = 256 << 20
"""More than a prompt of millions of token ids takes."""
TOKENS_MAX = 1 << 24
"""Longer prompts are none that were served."""
SECONDS_MAX = 1e12

_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]


class LoggedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of ``protocols.record.Candidate``, with any words: a newer engine may have
    others."""

    boundary: _Count = 0
    kinds: tuple[str, ...] = ()
    hash_matched: bool = False
    reason: str | None = None
    passed_over: str | None = None
    field: str = ""
    domain: str = ""
    age_s: _Seconds = 0.0


class LoggedInputEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of ``protocols.record.InputEnd``."""

    outcome: str = ""
    boundary: _Count = 0


class _Line(msgspec.Struct, kw_only=True):
    """What is read of ``protocols.record.LoggedRequest``; what an older log lacks has a default."""

    request_id: _Name
    engine: str = ""
    domain: str = ""
    time: _Seconds = 0.0
    arrived: _Seconds = 0.0
    reason: str | None = None
    lookup: str | None = None
    not_asked: str | None = None
    prompt_tokens: _Count = 0
    local_tokens: _Count = 0
    loaded_tokens: _Count = 0
    other_tokens: _Count = 0
    recomputed_tokens: _Count = 0
    grid_tokens: _Count = 0
    boundary_hashes: tuple[str, ...] = ()
    token_ids: tuple[_TokenId, ...] = ()
    candidates: tuple[LoggedCandidate, ...] = ()
    input_end: LoggedInputEnd = LoggedInputEnd()


@dataclass(frozen=True, kw_only=True)
class RequestLine:
    """One request of a log; ``LoggedRequest`` says what the fields mean. What an older log lacks
    is empty here.

    Attributes:
        raw: the whole line, as data; what ``_Line`` names has the type that it says.
        tokens: prompt and output.
    """

    raw: dict[str, Any]
    request_id: str
    engine: str = ""
    domain: str = ""
    time: float = 0.0
    arrived: float = 0.0
    prompt_tokens: int = 0
    grid_tokens: int = 0
    boundary_hashes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = field(default=(), repr=False)
    candidates: tuple[LoggedCandidate, ...] = ()
    input_end: LoggedInputEnd = field(default_factory=LoggedInputEnd)

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt; empty where they were not logged."""
        return list(self.tokens[: self.prompt_tokens])

    @property
    def has_asked(self) -> int:
        """How sure it is that it looked for checkpoints: 2, it met some; 0, it did not, as on the
        decode leg of a P/D pair, whose prompt another connector brings."""
        if self.raw.get("candidates"):
            return 2
        return int(not (self.raw.get("other_tokens") or self.raw.get("not_asked")))

    def sparse_hashes(self, hash_tokens: int) -> tuple[bytes, ...]:
        """The prompt's hashes in units of ``hash_tokens``, empty where no boundary lies."""
        step = self.grid_tokens // hash_tokens
        count = self.prompt_tokens // self.grid_tokens if self.grid_tokens else 0
        sparse: list[bytes] = []
        for one in self.boundary_hashes[:count]:
            sparse += [b""] * (step - 1) + [bytes.fromhex(one)]
        return tuple(sparse)

    def reaches(self, boundary: int, block_hash: str) -> bool:
        """Whether its tokens are those that a checkpoint stands for."""
        if not self.grid_tokens or boundary % self.grid_tokens:
            return False
        index = boundary // self.grid_tokens - 1
        return self.boundary_hashes[index : index + 1] == (block_hash,)


def read_lines(
    paths: Sequence[str], containing: str = "", malformed: list[str] | None = None
) -> Iterator[RequestLine]:
    """Every request of these logs whose line contains a text. ``malformed`` gets a message for
    every such line that is no request. Raises ``ConfigError`` where a file cannot be read."""
    needle = containing.encode()
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                for number in count(1):
                    line = file.readline(LINE_BYTES_MAX)
                    if not line:
                        break
                    if needle not in line:
                        continue
                    try:
                        yield parse_line(line)
                    except ValueError as error:
                        if malformed is not None:
                            malformed.append(f"{path}:{number}: {error}")
        except OSError as error:
            raise ConfigError(f"request log {shown(path)} cannot be read: {error}") from None


def parse_line(line: bytes) -> RequestLine:
    """A line as a request. Raises ``ValueError``, saying why it is none; it may be one that is
    still being written."""
    try:
        raw = msgspec.json.decode(line)
        told = msgspec.convert(raw, _Line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return RequestLine(
        raw=raw,
        request_id=told.request_id,
        engine=told.engine,
        domain=told.domain,
        time=told.time,
        arrived=told.arrived,
        prompt_tokens=told.prompt_tokens,
        grid_tokens=told.grid_tokens,
        boundary_hashes=tuple(bytes.fromhex(one).hex() for one in told.boundary_hashes),
        tokens=told.token_ids,
        candidates=told.candidates,
        input_end=told.input_end,
    )


def find_request(paths: Sequence[str], request_id: str) -> RequestLine:
    """The request of this id, or of an id that goes on behind a dash: vLLM appends to the id that
    a client knows. Of several, the last one that looked for checkpoints: in a P/D pair both legs
    have the client's id. Raises ``ConfigError``."""
    found: RequestLine | None = None
    malformed: list[str] = []
    for one in read_lines(paths, request_id, malformed):
        if one.request_id != request_id and not one.request_id.startswith(f"{request_id}-"):
            continue
        if found is None or one.has_asked >= found.has_asked:
            found = one
    if found is None:
        unread = ""
        if malformed:
            unread = f"; {len(malformed)} of its lines that hold it are malformed, {malformed[0]}"
        raise ConfigError(
            f"request {shown(request_id)} is not in {', '.join(paths)}: is it this engine's log?"
            f"{unread}"
        )
    return found


def find_producer(paths: Sequence[str], boundary: int, block_hash: str) -> RequestLine | None:
    """A logged request whose tokens up to ``boundary`` have this hash (hex), and were logged."""
    return next(
        (
            one
            for one in read_lines(paths, block_hash)
            if one.reaches(boundary, block_hash) and len(one.tokens) >= boundary
        ),
        None,
    )


def find_closest(
    paths: Sequence[str], prompt: Sequence[int], without: str = "", before: float = math.inf
) -> RequestLine | None:
    """The logged request, other than ``without``, that shares most tokens with a prompt and yet
    departs from it; None where none shares any. Only those that ended ``before`` a time, in
    seconds since 1970: what came later cannot have been this prompt's history."""
    best, shared_most = None, 0
    for one in read_lines(paths, '"token_ids":'):
        if one.request_id == without or one.time > before or shared_most >= len(one.tokens):
            continue
        if list(one.tokens[:shared_most]) != list(prompt[:shared_most]):
            continue
        pairs = zip(one.tokens, prompt, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:  # one is the other's beginning
            shared = min(len(one.tokens), len(prompt))
        if shared_most < shared < len(prompt):
            best, shared_most = one, shared
    return best
