"""`backhaul explain`: what a prompt could have reused, and where it departs from what is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backhaul.deploy.arguments import (
    domain_prefix,
    each,
    file_or_folder,
    file_to_read,
    one_line,
    prompt_file,
    seconds,
    store_uri,
)
from backhaul.deploy.checkpoints_command import DEFAULT_STORE
from backhaul.deploy.terminal import format_age, print_json
from backhaul.protocols.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backhaul.deploy.explanation import Divergence, Explanation
    from backhaul.deploy.prompts import PromptReader
    from backhaul.transfer.base import DomainInfo

_LIMIT = 1_000
"""Checkpoints asked for, those that share most first."""
_TAGS = ("retained", "hash_matched", "consumable", "selected")


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
    store: Annotated[
        str,
        typer.Option(
            metavar="URI",
            help="The store's address, backhaul://HOST:PORT.",
            callback=each(store_uri),
        ),
    ] = DEFAULT_STORE,
    lookup: Annotated[
        bool, typer.Option(help="Ask the store; --no-lookup only compares with --against.")
    ] = True,
    domain: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="The engine's cache domain; the id's start is enough.",
            callback=each(domain_prefix),
        ),
    ] = "",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The model's folder, for text.", callback=each(file_or_folder)
        ),
    ] = None,
    special_tokens: Annotated[
        bool, typer.Option(help="Let the tokenizer add its own; chat templates bring theirs.")
    ] = False,
    cache_salt: Annotated[
        str, typer.Option(metavar="TEXT", help="The request's cache_salt, where it had one.")
    ] = "",
    request: Annotated[
        str,
        typer.Option(
            metavar="ID", help="Instead of a prompt: a request of the log.", callback=each(one_line)
        ),
    ] = "",
    request_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The engine's request log (JSON lines).",
            callback=each(file_to_read),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest wait for the store.", callback=each(seconds)),
    ] = 10.0,
) -> None:
    """Explain a prompt's reuse. Takes no lease and counts as no use of any checkpoint."""
    if bool(request) == bool(prompt) or bool(request) != bool(request_log):
        raise ConfigError("give a prompt's FILE, or --request ID together with --request-log FILE")
    if request_log:
        record = find_request(Path(request_log), request)
        print_json(record) if as_json else _print_record(record)
        return
    if not (lookup or against):
        raise ConfigError("--no-lookup leaves nothing to do: give --against FILE")

    from backhaul.deploy.explanation import first_difference
    from backhaul.deploy.prompts import PromptReader

    reader = PromptReader(Path(tokenizer) if tokenizer else None, special_tokens=special_tokens)
    tokens = reader.read(prompt)
    document: dict[str, Any] = {"prompt_tokens": len(tokens)}
    if lookup:
        info, explanation = _look_up(store, domain, tokens, cache_salt, timeout)
        document |= as_document(info, explanation, tokens, reader)
    if against:
        difference = first_difference(tokens, reader.read(against), reader.decode)
        document["difference"] = difference._asdict() if difference else None
    if as_json:
        print_json(document)
        return
    if lookup:
        _print_lookup(document)
    if against:
        _print_difference(difference, len(tokens))


def _look_up(
    store: str, domain: str, tokens: list[int], cache_salt: str, timeout_s: float
) -> tuple[DomainInfo, Explanation]:
    from backhaul.deploy.explanation import explain as explain_prompt
    from backhaul.deploy.prompts import hash_prompt
    from backhaul.transfer.backends.inspector import StoreInspector
    from backhaul.transfer.base import Visibility
    from backhaul.transfer.listing import ListQuery

    with StoreInspector(store, timeout_s=timeout_s) as inspector:
        info = choose_domain(inspector.domains(), domain)
        record = info.record
        hashes = hash_prompt(tokens, record.hash_function, record.layout.hash_tokens, cache_salt)
        if hashes.probe != record.hash_probe:
            raise ConfigError(
                f"{record.hash_function} hashes differently here than in domain {info.id}: run "
                "this with the engines' PYTHONHASHSEED and vLLM"
            )
        query = ListQuery(
            # A prompt below one block has no hash; any other makes it a listing along a prompt.
            prefix_hashes=hashes.hashes or (b"none",),
            visibilities=frozenset(Visibility),
            limit=_LIMIT,
        )
        found = inspector.page(query).checkpoints
    return info, explain_prompt(found, info.id, len(tokens))


def choose_domain(domains: list[DomainInfo], wanted: str) -> DomainInfo:
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
    raise ConfigError(f"--domain {wanted!r} fits {len(fitting)} domains, choose one of: {known}")


def find_request(path: Path, request_id: str) -> dict[str, Any]:
    """The last record of a request in a JSON-lines log. Raises ``ConfigError``."""
    found: dict[str, Any] | None = None
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if request_id not in line:
                    continue
                try:
                    record = json.loads(line)
                except ValueError:  # a line that is just being written
                    continue
                if isinstance(record, dict) and str(record.get("request_id", "")) == request_id:
                    found = record
    except OSError as error:
        raise ConfigError(f"request log {str(path)!r} cannot be read: {error}") from None
    if found is None:
        raise ConfigError(f"request {request_id!r} is not in {path}: is it this engine's log?")
    return found


def as_document(
    info: DomainInfo, explanation: Explanation, tokens: list[int], reader: PromptReader
) -> dict[str, Any]:
    """What a lookup adds to the document that ``--json`` prints."""
    import msgspec

    closest = explanation.closest
    document: dict[str, Any] = {
        "domain": info.id,
        "boundary_tokens": info.record.layout.boundary_tokens,
        "candidates": [
            {**msgspec.to_builtins(candidate), "common_tokens": common}
            for candidate, common in zip(explanation.candidates, explanation.common, strict=True)
        ],
        "strangers": explanation.strangers,
        "closest_mismatch": None,
    }
    if closest is not None:
        start = closest.common_tokens
        # Hashes tell blocks apart: the first other token is one of these.
        block = min((g.block_tokens for g in info.record.layout.groups), default=1)
        document["closest_mismatch"] = {
            "boundary": closest.boundary,
            "kinds": [kind.value for kind in closest.kinds],
            "producer": closest.producer,
            "age_s": round(closest.age_s, 3),
            "common_tokens": start,
            "block": [start, min(start + block, len(tokens))],
            "before": reader.decode(tokens[max(start - 12, 0) : start]),
            "prompt_block": reader.decode(tokens[start : start + block]),
        }
    return document


def _print_lookup(document: Mapping[str, Any]) -> None:
    grid, length = document["boundary_tokens"], document["prompt_tokens"]
    print(f"{length} tokens, domain {document['domain']}, boundaries every {grid} tokens")
    if length <= grid:
        print("The prompt ends before the first boundary, so it can reuse nothing.")
    _print_candidates(document["candidates"])
    if document["strangers"]:
        print(f"At least {document['strangers']} more share not even the first block.")
    closest = document["closest_mismatch"]
    if closest is None:
        return
    first, end = closest["block"]
    print(
        f"\nClosest that does not match: {','.join(closest['kinds'])} at {closest['boundary']} of "
        f"{closest['producer'] or 'an unknown producer'}, {format_age(closest['age_s'])} old.\n"
        f"Both share the first {closest['common_tokens']} tokens."
    )
    if first >= length:
        print("The prompt ends there; the checkpoint goes on.")
        return
    print(
        f"The first other token is one of tokens {first} to {end - 1} of this prompt:\n"
        f"  before  {closest['before']!r}\n"
        f"  block   {closest['prompt_block']!r}\n"
        "The store keeps hashes, no tokens. With the other prompt in a file, --against FILE names "
        "the very token."
    )


def _print_candidates(candidates: list[dict[str, Any]]) -> None:
    if not candidates:
        print("The store knows no checkpoint that shares a block with this prompt.")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("tokens", "ends", *_TAGS, "why not", "age"):
        table.add_column(name, justify="right" if name in ("tokens", "age") else "left")
    for one in candidates:
        table.add_row(
            str(one.get("boundary", "-")),
            ",".join(one.get("kinds", ())) or "-",
            *("yes" if one.get(tag) else "no" for tag in _TAGS),
            str(one.get("reason") or one.get("passed_over") or ""),
            format_age(float(one.get("age_s", 0.0))),
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def _print_record(record: dict[str, Any]) -> None:
    print(f"request {record['request_id']}, engine {record.get('engine', '-')}")
    for name in ("prompt", "local", "loaded", "other", "recomputed"):
        if f"{name}_tokens" in record:
            print(f"  {name + ' tokens':<18}{record[f'{name}_tokens']:>8}")
    if record.get("reason"):
        print(f"nothing was loaded: {record['reason']}")
    _print_candidates([one for one in record.get("candidates", ()) if isinstance(one, dict)])


def _print_difference(difference: Divergence | None, length: int) -> None:
    if difference is None:
        print(f"\nBoth prompts are the same {length} tokens.")
        return
    print(f"\nThe prompts part at token {difference.position}:")
    print(f"  before   {difference.before!r}")
    for name, text, ids in (
        ("this", difference.left, difference.left_ids),
        ("against", difference.right, difference.right_ids),
    ):
        shown = f"{text!r}  {list(ids)}" if ids else "(ends here)"
        print(f"  {name:<8} {shown}")
