"""`backhaul explain`: what a prompt could have reused, and where it departs from what is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backhaul.deploy.arguments import (
    domain_prefix,
    each,
    file_to_read,
    one_line,
    prompt_file,
)
from backhaul.deploy.store_options import (
    DEFAULT_STORE,
    AsJson,
    CacheSalt,
    StoreTimeout,
    StoreUri,
    TokenizerFolder,
)
from backhaul.deploy.terminal import print_json
from backhaul.protocols.errors import ConfigError

if TYPE_CHECKING:
    from backhaul.deploy.explanation import Explanation
    from backhaul.deploy.prompt_lookup import Subject
    from backhaul.deploy.prompts import PromptReader
    from backhaul.transfer.base import DomainInfo


def explain(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]",
            help="Text or JSON token ids; - for standard input.",
            callback=each(prompt_file),
        ),
    ] = "",
    against: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Show where this second prompt departs.",
            callback=each(prompt_file),
        ),
    ] = "",
    store: StoreUri = DEFAULT_STORE,
    lookup: Annotated[
        bool,
        typer.Option(help="Ask the store; --no-lookup shows only the log's record and --against."),
    ] = True,
    domain: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="The engine's cache domain; the id's start is enough.",
            callback=each(domain_prefix),
        ),
    ] = "",
    tokenizer: TokenizerFolder = None,
    special_tokens: Annotated[
        bool, typer.Option(help="Let the tokenizer add its own; chat templates bring theirs.")
    ] = False,
    cache_salt: CacheSalt = "",
    request: Annotated[
        str,
        typer.Option(
            metavar="ID", help="Instead of a prompt: a request of the log.", callback=each(one_line)
        ),
    ] = "",
    request_log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="An engine's request log (JSON lines); repeat for more engines. Also names the "
            "token at which histories part, where the engines log token ids.",
            callback=each(file_to_read),
        ),
    ] = None,
    as_json: AsJson = False,
    timeout: StoreTimeout = 10.0,
) -> None:
    """Explain a prompt's reuse: each candidate, its tags, the one reason, and the first token at
    which histories part. Takes no lease and counts as no use of any checkpoint.

    Example: backhaul explain --request cmpl-1234 --request-log requests.jsonl

    Exit code 0: explained; 1: the store does not answer; 2: wrong usage.
    """
    from backhaul.deploy import explain_view as view
    from backhaul.deploy.explanation import first_difference
    from backhaul.deploy.prompt_lookup import find_subject, make_reader

    if not (lookup or against or request):
        raise ConfigError("--no-lookup leaves nothing to do: give --against FILE or --request ID")
    logs = request_log or []
    reader = make_reader(tokenizer, special_tokens=special_tokens)
    subject = find_subject(prompt, request, logs, reader)
    if against and not subject.tokens:
        raise ConfigError(
            f"the log has no token ids of request {request!r}, so there is nothing to compare "
            'with --against: set "request_log_tokens" of the engine, or give the prompt\'s FILE'
        )
    document: dict[str, Any] = {"prompt_tokens": subject.prompt_tokens}
    if subject.request is not None:
        document["request"] = subject.request.raw
        if not as_json:
            view.print_request(subject.request.raw)
    if lookup and _has_hashes(subject):
        info, explanation = _look_up(store, domain, subject, cache_salt, timeout)
        document |= as_document(info, explanation, subject, reader)
        if not as_json:
            if subject.request is not None:
                print()
            view.print_lookup(document)
    elif lookup and not as_json:
        print("The log has no hashes of this request (an older Backhaul), so no fresh lookup.")
    if against:
        found = first_difference(subject.tokens, reader.read(against), reader.decode)
        document["difference"] = found._asdict() if found else None
    elif (difference := _against_logs(logs, subject, document, reader)) is not None:
        document["difference"] = difference
    if as_json:
        print_json(document)
    elif "difference" in document:
        view.print_difference(document["difference"], subject.prompt_tokens)
    elif document.get("closest_mismatch"):
        view.print_how_to_name_the_token(asked_logs=bool(logs), own_tokens=bool(subject.tokens))


def _has_hashes(subject: Subject) -> bool:
    return subject.request is None or bool(subject.request.grid_tokens)


def _look_up(
    store: str, domain: str, subject: Subject, cache_salt: str, timeout_s: float
) -> tuple[DomainInfo, Explanation]:
    import time

    from backhaul.deploy.as_it_ran import ANY_TIME, moment_of
    from backhaul.deploy.explanation import explain as explain_prompt
    from backhaul.deploy.prompt_lookup import (
        ask,
        differing_fields,
        domain_of,
        look_up,
        prompt_hashes,
    )
    from backhaul.transfer.backends.inspector import StoreInspector
    from backhaul.transfer.base import Visibility

    with StoreInspector(store, timeout_s=timeout_s) as inspector:
        domains = inspector.domains()
        info = domain_of(domains, subject, domain)
        hashes = prompt_hashes(subject, info, cache_salt)
        now = time.time()  # before the store says ages: what is as old as the request was there
        matches = ask(inspector, hashes, info, subject.prompt_tokens)
        found = look_up(inspector, hashes, visibilities=frozenset(Visibility))
    fields = differing_fields(domains, info)
    line = subject.request
    # For a worker of another domain than its own, nothing is as it ran.
    moment = moment_of(line, now) if line and line.domain == info.id else ANY_TIME
    return info, explain_prompt(found, matches, info.id, subject.prompt_tokens, fields, moment)


def _against_logs(
    logs: Sequence[str], subject: Subject, document: dict[str, Any], reader: PromptReader
) -> dict[str, Any] | None:
    """The first token at which the prompt departs from the closest checkpoint, by the token ids
    of a logged request that has it; else from the logged request that shares most. None where no
    tokens are known, or nothing departs."""
    from backhaul.deploy.explanation import first_difference
    from backhaul.deploy.request_lines import find_closest, find_producer

    if not (logs and subject.tokens) or document.get("full_match"):
        return None
    closest = document.get("closest_mismatch")
    other = find_producer(logs, closest["boundary"], closest["block_hash"]) if closest else None
    produced = other is not None
    if other is None:
        line = subject.request
        own, before = (line.request_id, line.arrived or line.time) if line else ("", 0.0)
        other = find_closest(logs, subject.tokens, own, before or math.inf)
    if other is None:
        return None
    found = first_difference(subject.tokens, other.tokens, reader.decode)
    if found is None:
        return None
    return found._asdict() | {
        "request_id": other.request_id,
        "engine": other.engine,
        "has_the_checkpoint": produced,
    }


def differing_block(block_tokens: int, grid_tokens: int, common: int, boundary: int) -> int:
    """How many tokens after the ``common`` ones hold the first in which a prompt differs from a
    checkpoint at ``boundary``: as far as the next hash by which the store compared them.

    Args:
        block_tokens: of the blocks by which it compares (``compared_group``); 0: it compares whole
            checkpoints only.
        grid_tokens: the prompt has hashes at multiples of it only.
    """
    rest = boundary - common
    return min(math.lcm(block_tokens, grid_tokens), rest) if block_tokens else rest


def as_document(
    info: DomainInfo, explanation: Explanation, subject: Subject, reader: PromptReader
) -> dict[str, Any]:
    """What a lookup adds to the document that ``--json`` prints."""
    import msgspec

    from backhaul.deploy.explanation import goes_on
    from backhaul.deploy.prompt_lookup import compared_tokens
    from backhaul.transfer.listing import compared_group

    grid = info.record.layout.boundary_tokens
    deepest = (subject.prompt_tokens - 1) // grid * grid  # one token is always computed
    full = deepest > 0 and any(
        one.consumable and deepest <= one.boundary < subject.prompt_tokens and not later
        for one, later in zip(explanation.candidates, explanation.later, strict=True)
    )
    closest = None if full else explanation.closest
    compared = compared_tokens(subject, info)
    document: dict[str, Any] = {
        "domain": info.id,
        "boundary_tokens": grid,
        "full_match": full,
        "candidates": [
            {
                **msgspec.to_builtins(candidate),
                "common_tokens": common,
                "looked_up": place < explanation.looked_up,
                "later": later,
                "goes_on": goes_on(candidate.boundary, common, subject.prompt_tokens, compared),
            }
            for place, (candidate, common, later) in enumerate(
                zip(explanation.candidates, explanation.common, explanation.later, strict=True)
            )
        ],
        "strangers": explanation.strangers,
        "closest_mismatch": None,
    }
    if closest is not None:
        start, tokens = closest.common_tokens, subject.tokens
        # Hashes tell blocks apart: the first other token is one of these.
        grid_tokens = subject.request.grid_tokens if subject.request is not None else 1
        group = compared_group(info.record.layout)
        block_tokens = group.block_tokens if group is not None else 0
        block = differing_block(block_tokens, grid_tokens, start, closest.boundary)
        document["closest_mismatch"] = {
            "boundary": closest.boundary,
            "block_hash": closest.block_hash.hex(),
            "kinds": [kind.value for kind in closest.kinds],
            "producer": closest.producer,
            "age_s": round(closest.age_s, 3),
            "common_tokens": start,
            "block": [start, min(start + block, subject.prompt_tokens)],
            "block_is_whole": start + block <= subject.prompt_tokens
            and not (start + block) % grid_tokens,
            "before": reader.decode(tokens[max(start - 12, 0) : start]),
            "prompt_block": reader.decode(tokens[start : start + block]),
        }
    return document
