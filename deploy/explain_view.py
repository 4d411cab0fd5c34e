"""What `backhaul explain` found, for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from backhaul.deploy.terminal import format_age
from backhaul.protocols.checkpoint import LookupOutcome, NotAsked

GOES_ON = "goes on past the prompt"
"""Said of a checkpoint that does not match, since it is longer."""
_TAGS = ("retained", "hash_matched", "consumable", "selected")


def print_request(record: Mapping[str, Any]) -> None:
    """A line of the request log: what was known when the request ran."""
    print(f"request {record['request_id']}, engine {record.get('engine') or '-'}: as it ran")
    for name in ("prompt", "local", "loaded", "other", "recomputed"):
        if f"{name}_tokens" in record:
            print(f"  {name + ' tokens':<18}{record[f'{name}_tokens']:>8}")
    if record.get("reason"):
        print(f"nothing was loaded: {record['reason']}")
    candidates = [one for one in record.get("candidates", ()) if isinstance(one, dict)]
    if candidates:
        print_candidates(candidates)
    else:
        print(_why_no_candidates(record))


def _why_no_candidates(record: Mapping[str, Any]) -> str:
    why, grid = record.get("not_asked"), record.get("grid_tokens")
    if why in _NOT_ASKED:
        return f"The store was not asked: {_NOT_ASKED[why].format(grid=grid)}."
    if record.get("other_tokens"):  # an older Backhaul's record
        return f"The store was not asked: {_NOT_ASKED[NotAsked.HANDED_OVER]}."
    if "lookup" in record and record["lookup"] is None:
        return "The request ended too early for anything to come of a lookup."
    if record.get("lookup") in _UNANSWERED:
        return f"What the store held is not known: it did not answer ({record['lookup']})."
    return "The store knew no checkpoint that shares a block with this prompt."


_UNANSWERED = (
    LookupOutcome.TIMEOUT,
    LookupOutcome.UNREACHABLE,
    LookupOutcome.DENIED,
    LookupOutcome.CACHE_RESET,
    LookupOutcome.INTERNAL,
)
_NOT_ASKED: dict[Any, str] = {
    NotAsked.ROLE: "this engine's kv_role is to publish only",
    NotAsked.HANDED_OVER: "another connector brings this prompt, as on the decode leg of a P/D "
    "pair.\nWhat the prompt reused is in the prefill leg's record: give that engine's "
    "--request-log and the id that the client knows",
    NotAsked.OPTED_OUT: 'the request\'s hint "load" was false',
    NotAsked.NO_CACHE_READ: "vLLM computes all of a prompt whose log-probabilities are wanted, or "
    "whose cache must not be read",
    NotAsked.BELOW_GRID: "the prompt ends before the first boundary, at {grid} tokens",
}


def print_lookup(document: Mapping[str, Any]) -> None:
    """A fresh lookup, and the closest checkpoint that does not match."""
    grid, length = document["boundary_tokens"], document["prompt_tokens"]
    print(f"{length} tokens, domain {document['domain']}, boundaries every {grid} tokens: now")
    if length <= grid:
        print("The prompt ends before the first boundary, so it can reuse nothing.")
    if document["candidates"]:
        print_candidates(document["candidates"])
    else:
        print("The store knows no checkpoint that shares a block with this prompt.")
    if any(one["later"] for one in document["candidates"]):
        print(
            "later: it came into the store after this request had looked, published by the request "
            "itself\nor by others; what follows is without it."
        )
    if document["strangers"]:
        print(f"At least {document['strangers']} more share not even the first block.")
    if document["full_match"]:
        print("Every whole block of this prompt matches: no more of it can be reused.")
    closest = document["closest_mismatch"]
    if closest is None:
        return
    first, end = closest["block"]
    shared = closest["common_tokens"]
    print(
        f"\nClosest that does not match: {','.join(closest['kinds'])} at {closest['boundary']} of "
        f"{closest['producer'] or 'an unknown producer'}, {format_age(closest['age_s'])} old.\n"
        f"Both share {f'the first {shared} tokens' if shared else 'no whole block'}."
    )
    if first >= length:
        print("The prompt ends there; the checkpoint goes on.")
        return
    # What the prompt's end cuts off has no hash, so it may be the same.
    cut = "" if closest["block_is_whole"] else ", or there is none and the checkpoint only goes on"
    print(f"The first other token is one of tokens {first} to {end - 1} of this prompt{cut}.")
    if closest["prompt_block"]:
        _print_before(closest["before"])
        print(f"  block    {closest['prompt_block']!r}")


def print_candidates(candidates: list[dict[str, Any]]) -> None:
    """A table of candidates with their tags and the one reason."""
    from rich.table import Table

    from backhaul.deploy.console import Console

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("tokens", "ends", *_TAGS, "why not", "age"):
        table.add_column(name, justify="right" if name in ("tokens", "age") else "left")
    for one in candidates:
        # Of what only goes on, hash_mismatch is the tag's reason and would mislead people.
        reason = GOES_ON if one.get("goes_on") and one.get("retained") else one.get("reason")
        why = str(reason or one.get("passed_over") or "")
        field = f" ({one['field']})" if one.get("field") else ""
        table.add_row(
            str(one.get("boundary", "-")),
            ",".join(one.get("kinds", ())) or "-",
            *("yes" if one.get(tag) else "no" for tag in _TAGS),
            ", ".join(filter(None, (why + field, "later" if one.get("later") else ""))),
            format_age(float(one.get("age_s", 0.0))),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_difference(difference: Mapping[str, Any] | None, length: int) -> None:
    """The first token that differs from another prompt or a logged request."""
    if difference is None:
        print(f"\nBoth prompts are the same {length} tokens.")
        return
    print(f"\nThe prompts part at token {difference['position']}{_whose(difference)}:")
    _print_before(difference["before"])
    for name, side in (("this", "left"), ("against", "right")):
        text, ids = difference[side], list(difference[f"{side}_ids"])
        print(f"  {name:<8} " + (f"{text!r}  {ids}" if ids else "(ends here)"))


def _print_before(text: str) -> None:
    if text:  # nothing is shared
        print(f"  before   {text!r}")


def _whose(difference: Mapping[str, Any]) -> str:
    request = difference.get("request_id")
    if not request:
        return ""
    what = (
        "which has the closest checkpoint's very tokens"
        if difference["has_the_checkpoint"]
        else "the one of the log that shares most; it need not be what the store keeps"
    )
    return f", against request {request} of engine {difference['engine'] or '-'} ({what})"


def print_how_to_name_the_token(*, asked_logs: bool, own_tokens: bool) -> None:
    """What is missing before the very token can be shown."""
    if not own_tokens:
        print(
            "The log has no token ids of this request: engines log them with "
            '"request_log_tokens": true.'
        )
    elif asked_logs:
        print(
            "No request of the log has that checkpoint's token ids: engines log them with "
            '"request_log_tokens": true, D_end is in the decode engine\'s log. Or give the other '
            "prompt with --against FILE."
        )
    else:
        print(
            "The store keeps hashes, no tokens. --against FILE with the other prompt names the "
            'very token, or --request-log FILE of engines with "request_log_tokens": true.'
        )
