"""A prompt, from a file or a logged request, looked up in a store without counting as a use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backhaul.deploy.request_lines import RequestLine, find_request
from backhaul.protocols.errors import ConfigError

if TYPE_CHECKING:
    from backhaul.deploy.prompts import PromptReader
    from backhaul.protocols.checkpoint import CheckpointKind, CheckpointMatch, DomainId
    from backhaul.transfer.backends.inspector import StoreInspector
    from backhaul.transfer.base import CheckpointInfo, DomainInfo, Visibility

_NO_HASH = b"none"
"""Matches no checkpoint, where a hash has to stand."""
_BUFFER_BYTES = 1 << 62
"""The engine's ``convert_buffer_bytes`` is not known here: large enough, then."""
LIMIT = 1_000
"""Checkpoints asked for, those that share most first."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is looked up.

    Attributes:
        prompt_tokens: its length.
        tokens: its token ids; empty where a logged request's were not logged.
        request: the request, where it comes from a log.
    """

    prompt_tokens: int
    tokens: list[int]
    request: RequestLine | None = None


def find_subject(
    prompt: str, request: str, request_logs: Sequence[str], reader: PromptReader
) -> Subject:
    """The prompt in a file, or that of a logged request. Raises ``ConfigError``."""
    if bool(request) == bool(prompt):
        raise ConfigError("give a prompt's FILE, or --request ID together with --request-log FILE")
    if not request:
        tokens = reader.read(prompt)
        return Subject(prompt_tokens=len(tokens), tokens=tokens)
    if not request_logs:
        raise ConfigError("--request ID is looked for in a log: give --request-log FILE")
    line = find_request(request_logs, request)
    return Subject(prompt_tokens=line.prompt_tokens, tokens=line.prompt, request=line)


def make_reader(tokenizer: str | None, *, special_tokens: bool) -> PromptReader:
    """A reader of prompts. Raises ``ConfigError``."""
    from backhaul.deploy.prompts import PromptReader

    return PromptReader(Path(tokenizer) if tokenizer else None, special_tokens=special_tokens)


def choose_domain(domains: list[DomainInfo], wanted: str, option: str = "--domain") -> DomainInfo:
    """The domain whose id starts with ``wanted``, or the only one. Raises ``ConfigError``."""
    fitting = [one for one in domains if one.id.startswith(wanted.lower())]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(
        f"{one.id} ({', '.join(client.name for client in one.clients[:3]) or 'no client'})"
        for one in domains
    )
    if not domains:
        raise ConfigError("no engine has opened a cache domain in this store: nothing to look up")
    raise ConfigError(f"{option} {wanted!r} fits {len(fitting)} domains, choose one of: {known}")


def domain_of(
    domains: list[DomainInfo], subject: Subject, wanted: str, option: str = "--domain"
) -> DomainInfo:
    """The target worker's domain: the one that is wanted, else that of the logged request, else
    the only one. Raises ``ConfigError``."""
    logged = subject.request.domain if subject.request else ""
    if not wanted and logged and not any(one.id == logged for one in domains):
        raise ConfigError(
            f"this store does not know domain {logged} of the request's engine: give the engine's "
            "--store"
        )
    return choose_domain(domains, wanted or logged, option)


def differing_fields(domains: list[DomainInfo], target: DomainInfo) -> dict[DomainId, str]:
    """Other domain -> the first field that keeps its bytes from a worker of ``target``; "" where
    they can be converted."""
    from backhaul.protocols.comparison import Verdict, compare

    fields = {}
    for other in domains:
        found = compare(target.record, other.record)
        if found.verdict is Verdict.CONVERTIBLE:
            fields[other.id] = ""
        elif found.verdict is Verdict.MISMATCH:
            causes = [one.path for one in found.causes if not one.conversion]
            fields[other.id] = (causes or [found.differences[0].path])[0]
    return fields


def look_up(
    inspector: StoreInspector,
    hashes: Sequence[bytes],
    *,
    visibilities: frozenset[Visibility],
    kinds: frozenset[CheckpointKind] = frozenset(),
    domain_prefix: str = "",
    age_min_s: float = 0.0,
    age_max_s: float = float("inf"),
) -> tuple[CheckpointInfo, ...]:
    """At most ``LIMIT`` checkpoints with the tokens that each shares with a prompt, the longest
    first. ``hashes``: the prompt's, see ``prompt_hashes``."""
    from backhaul.transfer.entries import HASHES_MAX
    from backhaul.transfer.listing import ListQuery

    query = ListQuery(
        # A prompt below one block has no hash; any other makes it a listing along a prompt.
        # A log may say anything; no prompt has as many as a store takes.
        prefix_hashes=tuple(hashes[:HASHES_MAX]) or (_NO_HASH,),
        visibilities=visibilities,
        kinds=kinds,
        domain_prefix=domain_prefix,
        age_min_s=age_min_s,
        age_max_s=age_max_s,
        limit=LIMIT,
    )
    return inspector.page(query).checkpoints


def ask(
    inspector: StoreInspector, hashes: Sequence[bytes], target: DomainInfo, prompt_tokens: int
) -> tuple[CheckpointMatch, ...]:
    """The matches that a request of this prompt would be answered now by a worker of ``target``,
    deepest first, those that its engine could convert included."""
    from backhaul.transfer.entries import HASHES_MAX
    from backhaul.transfer.foreign import ConvertibleDomains

    layout = target.record.layout
    step = layout.boundary_tokens // layout.hash_tokens
    count = max(prompt_tokens - 1, 0) // layout.boundary_tokens  # one token is always computed
    # A log of an engine with longer blocks has no hash at every boundary, nor up to the last one.
    ends = range(step - 1, min(count * step, len(hashes)), step)[:HASHES_MAX]
    wanted = [hashes[end] or _NO_HASH for end in ends]
    found = inspector.lookup(target.id, wanted)
    convertible = ConvertibleDomains(inspector, target.record, _BUFFER_BYTES)
    return convertible.extend(found, wanted, lease_s=0.0, timeout_s=math.inf)[0].matches


def compared_tokens(subject: Subject, target: DomainInfo) -> int:
    """Tokens of the whole blocks by which a store compares the prompt with its checkpoints."""
    from backhaul.transfer.listing import compared_group

    layout = target.record.layout
    group = compared_group(layout)
    hashed = subject.request.grid_tokens if subject.request else 0
    return math.lcm(group.block_tokens if group else layout.boundary_tokens, hashed or 1)


def prompt_hashes(subject: Subject, target: DomainInfo, cache_salt: str = "") -> tuple[bytes, ...]:
    """Block hashes in units of the domain's ``hash_tokens``: a request's own, which its engine
    computed, adapters, images and salt included; else those that vLLM computes of the tokens here.
    Raises ``ConfigError`` where the prompt cannot be hashed as in that domain."""
    from backhaul.deploy.prompts import hash_prompt

    record = target.record
    if subject.request is not None:
        line = subject.request
        if not line.grid_tokens:
            raise ConfigError(
                f"the log has no hashes of request {line.request_id}: it was written by an older "
                "Backhaul; --no-lookup shows its record"
            )
        if line.grid_tokens % record.layout.hash_tokens:
            raise ConfigError(
                f"domain {target.id} hashes {record.layout.hash_tokens} tokens, which does not "
                f"divide the boundaries every {line.grid_tokens} tokens of the request's engine: "
                "leave out the domain"
            )
        return line.sparse_hashes(record.layout.hash_tokens)
    hashes = hash_prompt(
        subject.tokens, record.hash_function, record.layout.hash_tokens, cache_salt
    )
    if hashes.probe != record.hash_probe:
        raise ConfigError(
            f"{record.hash_function} hashes differently here than in domain {target.id}: run "
            "this with the engines' PYTHONHASHSEED and vLLM"
        )
    return hashes.hashes
