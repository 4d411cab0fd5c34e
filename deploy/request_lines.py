"""Request logs of engines, read line by line: a request, who produced a checkpoint, who came
closest to a prompt. Lines that are cut short or of another make are passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backhaul.deploy.arguments import shown
from backhaul.protocols.errors import ConfigError

LINE_BYTES_MAX = 256 << 20
"""More than a prompt of millions of token ids takes."""


@dataclass(frozen=True, kw_only=True)
class RequestLine:
    """One request of a log; ``LoggedRequest`` says what the fields mean. What an older log lacks
    is empty here.

    Attributes:
        raw: the whole line, as data.
        tokens: prompt and output.
    """

    raw: dict[str, Any]
    request_id: str
    engine: str = ""
    domain: str = ""
    prompt_tokens: int = 0
    grid_tokens: int = 0
    boundary_hashes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = field(default=(), repr=False)

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt; empty where they were not logged."""
        return list(self.tokens[: self.prompt_tokens])

    @property
    def has_asked(self) -> int:
        """How sure it is that it looked for checkpoints: 2, it met some; 0, another connector
        brought its prompt, as on the decode leg of a P/D pair, which does not ask."""
        return 2 if self.raw.get("candidates") else int(not self.raw.get("other_tokens"))

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


def read_lines(paths: Sequence[str], containing: str = "") -> Iterator[RequestLine]:
    """Every request of these logs whose line contains a text. Raises ``ConfigError`` where a file
    cannot be read."""
    needle = containing.encode()
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                while line := file.readline(LINE_BYTES_MAX):
                    if needle in line and (one := parse_line(line)) is not None:
                        yield one
        except OSError as error:
            raise ConfigError(f"request log {shown(path)} cannot be read: {error}") from None


def parse_line(line: bytes) -> RequestLine | None:
    """A line as a request; None where it is none, or still being written."""
    try:
        raw = json.loads(line)
        if not isinstance(raw, dict) or not raw.get("request_id"):
            return None
        return RequestLine(
            raw=raw,
            request_id=str(raw["request_id"]),
            engine=str(raw.get("engine", "")),
            domain=str(raw.get("domain", "")),
            prompt_tokens=int(raw.get("prompt_tokens", 0)),
            grid_tokens=int(raw.get("grid_tokens", 0)),
            boundary_hashes=tuple(
                bytes.fromhex(one).hex() for one in raw.get("boundary_hashes", ())
            ),
            tokens=tuple(map(int, raw.get("token_ids", ()))),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def find_request(paths: Sequence[str], request_id: str) -> RequestLine:
    """The request of this id, or of an id that goes on behind a dash: vLLM appends to the id that
    a client knows. Of several, the last one that looked for checkpoints: in a P/D pair both legs
    have the client's id. Raises ``ConfigError``."""
    found: RequestLine | None = None
    for one in read_lines(paths, request_id):
        if one.request_id != request_id and not one.request_id.startswith(f"{request_id}-"):
            continue
        if found is None or one.has_asked >= found.has_asked:
            found = one
    if found is None:
        raise ConfigError(
            f"request {shown(request_id)} is not in {', '.join(paths)}: is it this engine's log?"
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
    paths: Sequence[str], prompt: Sequence[int], without: str = ""
) -> RequestLine | None:
    """The logged request, other than ``without``, that shares most tokens with a prompt and yet
    departs from it; None where none shares any."""
    best, shared_most = None, 0
    for one in read_lines(paths, '"token_ids":'):
        if one.request_id == without or shared_most >= len(one.tokens):
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
