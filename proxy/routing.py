"""Which worker gets a request: plain functions from candidates to an order of preference.

The first of the order gets the request, the others are what a retry tries. Healthy workers always
come before unhealthy ones; those are kept at the end, because a health check can be out of date
and trying costs only a refused connection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from backhaul.proxy.legs import encode_body
from backhaul.proxy.settings import Policy

BOUND = 1.25
"""Prefix-sticky: a worker with more than this many times the mean load is passed over, so that one
popular prefix cannot bury one worker. 1.25 is the usual choice for bounded-load hashing."""

PREFIX_CHARS = 1024
"""How much of a plain prompt identifies it: longer than common preambles are short, shorter than
most histories, which only grow at their end."""
PREFIX_TOKENS = 256
"""The same for prompts in token ids, at about four characters a token."""


@dataclass(frozen=True)
class Candidate:
    """One worker as the choice sees it. ``in_flight``: requests that it is answering."""

    name: str
    in_flight: int = 0
    healthy: bool = True


def preference(
    policy: Policy, candidates: Sequence[Candidate], *, key: bytes, turn: int
) -> list[str]:
    """Names of all ``candidates``, the best first.

    Args:
        key: what prefix-sticky keeps together.
        turn: a counter that grows by one per request; breaks ties and drives round-robin.
    """
    if policy is Policy.PREFIX_STICKY:
        ranked = _sticky(candidates, key)
    elif policy is Policy.LEAST_LOADED:
        ranked = _in_turns(candidates, turn, lambda candidate: candidate.in_flight)
    else:
        ranked = _in_turns(candidates, turn, lambda candidate: 0)
    return [candidate.name for candidate in sorted(ranked, key=_unhealthy)]


def _unhealthy(candidate: Candidate) -> bool:
    return not candidate.healthy


def _in_turns(
    candidates: Sequence[Candidate], turn: int, rank: Callable[[Candidate], int]
) -> list[Candidate]:
    """By rank. Equals take turns, healthy and unhealthy ones apart: rotating over all of them would
    give the neighbour of an unhealthy worker its share as well."""

    def place(candidate: Candidate) -> tuple[bool, int]:
        return _unhealthy(candidate), rank(candidate)

    ranked: list[Candidate] = []
    for _, equals in itertools.groupby(sorted(candidates, key=place), key=place):
        group = list(equals)
        start = turn % len(group)
        ranked += group[start:] + group[:start]
    return ranked


def _sticky(candidates: Sequence[Candidate], key: bytes) -> list[Candidate]:
    ranked = sorted(candidates, key=lambda candidate: _score(key, candidate.name), reverse=True)
    healthy = [candidate for candidate in ranked if candidate.healthy]
    if not healthy:
        return ranked
    total = sum(candidate.in_flight for candidate in healthy) + 1
    limit = math.ceil(BOUND * total / len(healthy))
    return sorted(ranked, key=lambda candidate: candidate.in_flight >= limit)


def _score(key: bytes, name: str) -> int:
    """Rendezvous hashing: each worker scores each key independently of the other workers, so a
    worker that is added takes over exactly the keys on which it scores highest."""
    return xxhash.xxh3_64_intdigest(key + b"\0" + name.encode())


def sticky_key(body: Mapping[str, Any], session: str | None = None) -> bytes:
    """What stays the same over the turns of a conversation.

    A session id where there is one. Else of a chat everything up to and including the first
    message of the user; of a plain prompt its beginning. Never raises, whatever the body holds.
    """
    session = session or body.get("session_id")
    if isinstance(session, str) and session:
        return b"session\0" + session.encode(errors="surrogatepass")
    head: list[Any] = [body.get("model")]
    if isinstance(messages := body.get("messages"), list):
        head += [*filter(None, [body.get("system")]), *_first_turn(messages)]
    elif isinstance(items := body.get("input"), list):
        head += [body.get("instructions"), *_first_turn(items)]
    elif isinstance(items, str):
        head += [body.get("instructions"), items[:PREFIX_CHARS]]
    else:
        head.append(_prompt_head(body.get("prompt")))
    return encode_body(head)


def _first_turn(messages: list[Any]) -> list[Any]:
    first: list[Any] = []
    for message in messages:
        if not isinstance(message, dict):
            break
        first.append([message.get("role"), message.get("content")])
        if message.get("role") == "user":
            break
    return first


def _prompt_head(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return prompt[:PREFIX_TOKENS]
        return _prompt_head(prompt[0])
    return None
