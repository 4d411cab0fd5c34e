"""What must hold of a request's record and of an engine's counters, beside vLLM's own numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from backhaul.protocols.checkpoint import LookupOutcome, Tag, primary_kind
from backhaul.protocols.record import CANDIDATES_MAX, DecodeEndReason, RequestRecord

if TYPE_CHECKING:
    from harness import Finished, SimEngine

_LADDER = ("known", *Tag)


def check_tags(params: Any) -> RequestRecord:
    """A record as a client gets it, checked for itself: selected is consumable is hash-matched is
    retained (checked by its type), at most one is selected, and what is selected is what the
    request resumed from."""
    record = msgspec.convert(params, RequestRecord)
    parts = (
        record.local_tokens,
        record.loaded_tokens,
        record.other_tokens,
        record.recomputed_tokens,
    )
    assert min(parts) >= 0 and sum(parts) == record.prompt_tokens, record
    boundaries = [candidate.boundary for candidate in record.candidates]
    assert boundaries == sorted(set(boundaries), reverse=True)
    assert len(boundaries) <= CANDIDATES_MAX
    chosen = [candidate for candidate in record.candidates if candidate.selected]
    assert len(chosen) == (record.selected is not None), "at most one, and it is listed"
    assert (record.loaded_tokens > 0) == bool(chosen)
    assert record.lookup is None or record.not_asked is None, record
    assert (record.lookup == LookupOutcome.HIT) == bool(chosen), record
    assert not record.candidates or record.lookup is not None, record
    for candidate, selected in zip(chosen, [record.selected], strict=False):
        assert selected is not None
        assert selected.boundary == candidate.boundary == record.local_tokens + record.loaded_tokens
        assert selected.kind == primary_kind(candidate.kinds)
        assert not record.other_tokens and record.reason is None
        assert record.matched.joint >= selected.boundary
    return record


def check_record(engine: SimEngine, done: Finished) -> RequestRecord:
    """The record of a finished request, checked beside vLLM's own numbers."""
    record = check_tags(done.params["backhaul"])
    matched = record.matched
    assert matched.joint <= min(matched.attention, matched.recurrent or matched.attention)
    assert matched.exact_hash >= max(matched.attention, matched.recurrent)
    # After a preemption the prefill may begin lower than at first, and covers the output too.
    ends = record.forced_chunk_ends
    assert len(set(ends)) == len(ends), f"forced chunk ends {ends}"
    assert all(0 < end <= len(done.history) for end in ends), f"forced chunk ends {ends}"
    reasons = {None, DecodeEndReason.NO_PUBLICATION_PATH}
    if record.publishing_decode_end:
        assert record.decode_end_reason in reasons
    else:
        assert record.decode_end_reason is not None
    prefill = done.prefill
    if prefill is not None:
        assert record.prompt_tokens == prefill.num_prompt_tokens
        assert record.local_tokens == prefill.num_local_cached_tokens
        assert record.lookup or record.not_asked, "nobody is left guessing why"
        external = record.loaded_tokens + record.other_tokens
        assert external == prefill.num_external_cached_tokens
        assert record.prompt_tokens - record.recomputed_tokens == prefill.num_cached_tokens
    return record


def check_counters(engine: SimEngine) -> None:
    """Sums that must agree: the funnel narrows, and every request has one end and four sources."""
    counters = engine.counters

    def total(name: str, *labels: str) -> int:
        prefix = "|".join((name, *labels))
        return sum(n for k, n in counters.items() if k == prefix or k.startswith(f"{prefix}|"))

    def by_kind(name: str, label: str) -> Counter[str]:
        return Counter(
            {k.split("|")[2]: n for k, n in counters.items() if k.startswith(f"{name}|{label}|")}
        )

    funnel = [by_kind("candidates", tag) for tag in _LADDER]
    for wider, narrower in itertools.pairwise(funnel):
        assert narrower <= wider, f"{narrower} of {wider}"
    known, consumable, selected = funnel[0], funnel[3], funnel[4]
    assert total("candidates_unconsumable") == (known - consumable).total()
    assert total("candidates_passed_over") == (consumable - selected).total()
    ends = {k.split("|")[1]: n for k, n in counters.items() if k.startswith("requests|")}
    none = ends.pop("none", 0)
    assert ends == {k: n for k, n in selected.items() if n}
    # One that loaded in vain was looked up more than once.
    assert total("lookups") + total("not_asked") >= sum(ends.values()) + none
    assert total("incremental_hits") <= sum(ends.values())
    assert total("decode_end_missed") <= sum(ends.values()) + none
    assert total("incremental_tokens") <= counters["prompt_tokens|loaded"]
    assert total("loads") >= sum(ends.values())
    assert total("loaded_tokens") >= counters["prompt_tokens|loaded"]
    assert total("publications") == total("checkpoints_published") + total("duplicate_ends")
