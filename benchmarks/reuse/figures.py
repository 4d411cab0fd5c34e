"""The thirteen questions of the experiment, each as figures of one arm beside those it is compared
with. Pure functions on results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backhaul.benchmarks.reuse.record import (
    NO_POLICY,
    Arm,
    ArmResult,
    Budget,
    EndFate,
    KindResult,
    RequestResult,
    Result,
    Source,
)
from backhaul.benchmarks.reuse.statistics import (
    Estimate,
    Term,
    mean,
    paired,
    quantile,
    rate,
    ratio,
    share,
)
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError

BASELINES = ("main_sparse", NO_POLICY)
"""What policies are compared with; the first that was run."""

_D, _U, _P = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.PROMPT_END
_LABELS = (
    (_P, "P_end"),
    (_U, "U_end"),
    (_D, "D_end"),
    (CheckpointKind.SHARED_PREFIX, "junction"),
    (CheckpointKind.BOUNDARY, "boundary"),
)
_KEEPS_INPUT_END = ("input_end", "both", "auto")
"""Policies under which a prefill worker keeps U_end, in the store and in its own cache."""
_KEEPS_BOTH = ("both",)
_MISSED = (EndFate.REWRITTEN, EndFate.NOT_KEPT, EndFate.UNUSABLE)


class Unit:
    """How a figure is shown."""

    SHARE = "share"
    TOKENS = "tokens"
    BYTES = "bytes"
    WORK = "FLOPs"
    SECONDS = "s"
    COUNT = "count"
    RATE = "tokens/s"
    REQUEST_RATE = "requests/s"
    TOKENS_PER_MIB = "tokens/MiB"
    WORK_PER_BYTE = "FLOPs/byte"


class Figure(NamedTuple):
    """One number of one arm. ``name``: what it is, as a column is headed."""

    name: str
    estimate: Estimate
    unit: str


@dataclass
class Cell:
    """All repeats of one policy in one setting."""

    arm: Arm
    requests: list[RequestResult] = field(default_factory=list)
    arms: list[ArmResult] = field(default_factory=list)

    @property
    def keeps_input_end(self) -> bool:
        """Whether there can be a U_end to resume at."""
        return self.arm.policy in _KEEPS_INPUT_END or any(
            _loaded_input_end(r) for r in self.requests
        )

    @property
    def is_served(self) -> bool:
        """Whether these are requests of real clients: times and the store's books are not known."""
        return self.arm.source is Source.SERVED

    @property
    def continuations(self) -> list[RequestResult]:
        """Requests that continue another one."""
        return [r for r in self.requests if r.relation.continuation]

    @property
    def first_continuations(self) -> list[RequestResult]:
        """Requests that are the first to continue another one."""
        return [r for r in self.requests if r.relation.continuation == 1]

    def kinds(self) -> Mapping[CheckpointKind, KindResult]:
        """The store's books, summed over the repeats."""
        total = dict.fromkeys(CheckpointKind, KindResult())
        for arm in self.arms:
            for kind, one in arm.kinds.items():
                before = total[kind]
                total[kind] = KindResult(
                    **{
                        name: getattr(before, name) + getattr(one, name)
                        for name in KindResult.__struct_fields__
                    }
                )
        return total


Setting = tuple[str, str, str, int, str, str, str]
Book = dict[Setting, dict[str, Cell]]
"""Setting -> policy -> cell."""


def gather(results: Iterable[Result]) -> Book:
    """Group results. Arms that were cut off (without their closing line) are left out, and so is
    what was left of one that was run again: of an arm's requests those count that its closing line
    closes. Raises ``ConfigError`` where nothing is left, or an arm comes twice."""
    requests: dict[Arm, list[RequestResult]] = {}
    arms: dict[Arm, tuple[ArmResult, list[RequestResult]]] = {}
    for result in results:
        if isinstance(result, ArmResult):
            if result.arm in arms:
                raise ConfigError(f"an arm is there twice: {result.arm.title}")
            lines = requests.pop(result.arm, [])
            arms[result.arm] = result, lines[max(len(lines) - result.requests, 0) :]
        else:
            requests.setdefault(result.arm, []).append(result)
    if not arms:
        raise ConfigError("no finished arm among the results")
    book: Book = {}
    for arm, (done, lines) in arms.items():
        cell = book.setdefault(arm.setting, {}).setdefault(arm.policy, Cell(arm))
        cell.requests += lines
        cell.arms.append(done)
    return book


def baseline(cells: Mapping[str, Cell]) -> Cell | None:
    """What a setting's policies are compared with."""
    return next((cells[name] for name in BASELINES if name in cells), None)


class Context(NamedTuple):
    """A cell and what it is compared with.

    ``roomy``: the same setting's cells without a budget; empty where that was not run.
    """

    cell: Cell
    cells: Mapping[str, Cell]
    roomy: Mapping[str, Cell]


def contexts(book: Book) -> list[Context]:
    """Every cell with its company, in a stable order."""
    found = []
    for setting in sorted(book):
        cells = book[setting]
        arm = next(iter(cells.values())).arm
        roomy = next(
            (
                others
                for other, others in book.items()
                if other[:3] == setting[:3]
                and other[-1] == setting[-1]
                and next(iter(others.values())).arm.budget is Budget.UNLIMITED
            ),
            {},
        )
        if arm.budget is Budget.UNLIMITED:
            roomy = cells
        found += [Context(cells[name], cells, roomy) for name in sorted(cells, key=_policy_order)]
    return found


def _policy_order(name: str) -> tuple[int, str]:
    order = (NO_POLICY, "main_sparse", "input_end", "decode_end", "both", "auto", "boundaries")
    return (order.index(name) if name in order else len(order), name)


# -- the questions --------------------------------------------------------------------------------


def first_continuation(context: Context) -> list[Figure]:
    """1: effective joint hit of first continuations."""
    first = context.cell.first_continuations
    return [
        Figure("first_continuation_effective_hit_rate", hit_rate(first), Unit.SHARE),
        Figure("hit tokens", mean(first, lambda r: r.hit_tokens), Unit.TOKENS),
    ]


def decode_end_reuse(context: Context) -> list[Figure]:
    """2: how often the next request reuses D_end."""
    following = context.cell.continuations
    return [
        Figure("decode_end_hit_rate", share(following, _took_decode_end), Unit.SHARE),
        Figure(
            "D_end could match",
            share(following, lambda r: r.relation.decode_end > 0),
            Unit.SHARE,
        ),
    ]


def tool_share(context: Context) -> list[Figure]:
    """3: how much of that comes from tool-call continuation."""
    reused = [r for r in context.cell.continuations if _took_decode_end(r)]
    loops = [r for r in context.cell.continuations if r.relation.tool_continuation]
    if context.cell.is_served:  # Logs do not say what a request continues.
        return []
    return [
        Figure("of D_end hits", share(reused, lambda r: r.relation.tool_continuation), Unit.SHARE),
        Figure("D_end hits of tool continuations", share(loops, _took_decode_end), Unit.SHARE),
    ]


def input_end_fallback(context: Context) -> list[Figure]:
    """4: when D_end does not match, how often U_end does."""
    missed = [r for r in context.cell.continuations if r.decode_end in _MISSED]
    rewritten = list(filter(_was_rewritten, missed))
    return [
        Figure("input_end_fallback_rate", _resumed_at_input_end(context, missed), Unit.SHARE),
        Figure("where rewritten", _resumed_at_input_end(context, rewritten), Unit.SHARE),
        Figure("D_end missed", share(context.cell.continuations, _missed), Unit.SHARE),
        Figure("of which rewritten", share(missed, _was_rewritten), Unit.SHARE),
    ]


def unreachable_prompt_end(context: Context) -> list[Figure]:
    """5: how often U_end avoids a first miss caused by an unreachable P_end."""
    first = context.cell.first_continuations
    unreachable = [r for r in first if _P in r.relation.rewritten]
    return [
        Figure("avoided by U_end", _resumed_at_input_end(context, unreachable), Unit.SHARE),
        Figure("P_end unreachable", share(first, lambda r: _P in r.relation.rewritten), Unit.SHARE),
        Figure("hit there", hit_rate(unreachable), Unit.SHARE),
    ]


def after_junction(context: Context) -> list[Figure]:
    """6: what U_end still adds once a junction was learnt."""
    known = [r for r in context.cell.requests if r.junction_known]
    return [
        Figure("U_end decisive", share(known, lambda r: _U in r.without), Unit.SHARE),
        Figure("tokens added", mean(known, lambda r: _added(r, _U)), Unit.TOKENS),
        Figure(
            "junction known", share(context.cell.requests, lambda r: r.junction_known), Unit.SHARE
        ),
    ]


def extra_tokens(context: Context) -> list[Figure]:
    """7: extra prompt tokens reused, against the baseline."""
    requests = context.cell.requests
    figures = [Figure("reused", hit_rate(requests), Unit.SHARE)]
    base = baseline(context.cells)
    if base is not None:
        figures += [
            Figure(
                f"extra against {base.arm.policy}",
                paired(requests, base.requests, _hit, _prompt),
                Unit.SHARE,
            ),
            Figure("extra per request", paired(requests, base.requests, _hit), Unit.TOKENS),
        ]
    return figures


def avoided_work(context: Context) -> list[Figure]:
    """8: prefill work avoided (estimated from the model's shape)."""
    requests = context.cell.requests
    figures = [
        Figure(
            "avoided",
            rate(requests, lambda r: r.saved_flops, lambda r: r.prefill_flops),
            Unit.SHARE,
        )
    ]
    base = baseline(context.cells)
    if base is not None:
        figures.append(
            Figure(
                f"extra per request against {base.arm.policy}",
                paired(requests, base.requests, lambda r: r.saved_flops),
                Unit.WORK,
            )
        )
    return figures


def recurrent_bytes(context: Context) -> list[Figure]:
    """9: recurrent bytes per endpoint, and what they bring."""
    kinds = context.cell.kinds()
    figures = []
    for kind, label in _LABELS:
        one = kinds[kind]
        figures.append(Figure(f"{label} bytes", _exact(one.state_bytes, one.created), Unit.BYTES))
        each = one.state_bytes / one.created if one.created else None
        figures.append(Figure(f"per {label}", _exact(each, one.created), Unit.BYTES))
    if context.cell.is_served:
        return []
    total = sum(one.state_bytes for one in kinds.values())
    requests = context.cell.requests
    per_request = total / len(requests) if requests else 0.0
    figures.append(
        Figure(
            "saved_prompt_tokens_per_retained_state_byte",
            rate(requests, lambda r: r.loaded_tokens * 2**20, lambda _: per_request),
            Unit.TOKENS_PER_MIB,
        )
    )
    figures.append(
        Figure(
            "saved_prefill_work_per_retained_state_byte",
            rate(requests, lambda r: r.loaded_flops, lambda _: per_request),
            Unit.WORK_PER_BYTE,
        )
    )
    return figures


def second_endpoint(context: Context) -> list[Figure]:
    """10: whether the second endpoint's evictions eat its benefit."""
    requests = context.cell.requests if context.cell.arm.policy in _KEEPS_BOTH else []
    figures = [
        Figure(
            "incremental_hit_rate_of_second_checkpoint",
            share(requests, lambda r: _U in r.without),
            Unit.SHARE,
        ),
        Figure("U_end's tokens", mean(requests, lambda r: _added(r, _U)), Unit.TOKENS),
        Figure(
            "incremental_saved_work_of_second_checkpoint",
            _added_work(requests),
            Unit.WORK,
        ),
    ]
    singles = ("decode_end", "input_end")
    for name, cells in (("here", context.cells), ("without budget", context.roomy)):
        both = cells.get("both")
        rivals = [cells[one] for one in singles if one in cells]
        if context.cell.arm.policy != "both" or both is None or not rivals:
            continue
        best = max(rivals, key=lambda cell: sum(r.hit_tokens for r in cell.requests))
        figures.append(
            Figure(
                f"against the better single end, {name}",
                paired(both.requests, best.requests, _hit, _prompt),
                Unit.SHARE,
            )
        )
    if context.cell.is_served:
        return figures
    evicted = sum(one.evicted for one in context.cell.kinds().values())
    unused = sum(arm.evicted_unused for arm in context.cell.arms)
    refused = sum(arm.refused for arm in context.cell.arms)
    figures.append(Figure("evicted", _exact(evicted, evicted), Unit.COUNT))
    figures.append(Figure("evicted unused", _exact(unused, evicted), Unit.COUNT))
    figures.append(Figure("refused", _exact(refused, refused), Unit.COUNT))
    return figures


def under_concurrency(context: Context) -> list[Figure]:
    """11: time to first token, throughput, residency."""
    requests = context.cell.requests
    arms = context.cell.arms
    timed = [] if context.cell.is_served else requests
    tokens: dict[int, int] = {arm.arm.repeat: 0 for arm in arms}
    for r in requests:
        tokens[r.arm.repeat] += r.prompt_tokens
    figures = [
        Figure("TTFT", mean(timed, _ttft), Unit.SECONDS),
        Figure("TTFT p50", quantile(timed, _ttft, 0.5), Unit.SECONDS),
        Figure("TTFT p95", quantile(timed, _ttft, 0.95), Unit.SECONDS),
        Figure("request throughput", _by_time(arms, lambda a: a.requests), Unit.REQUEST_RATE),
        Figure("input throughput", _by_time(arms, lambda a: tokens[a.arm.repeat]), Unit.RATE),
        Figure("residency", mean(timed, lambda r: r.residency_s), Unit.SECONDS),
        Figure("residents", _by_repeat(arms if timed else (), lambda a: a.residents), Unit.COUNT),
    ]
    base = baseline(context.cells)
    if base is not None:
        figures.append(
            Figure(
                f"TTFT against {base.arm.policy}",
                paired(timed, base.requests, _ttft),
                Unit.SECONDS,
            )
        )
    return figures


def first_and_steady(context: Context) -> list[Figure]:
    """12: first reuse of a history against later ones."""
    first = [r for r in context.cell.requests if r.relation.reuse == 1]
    later = [r for r in context.cell.requests if r.relation.reuse > 1]
    return [
        Figure("first reuse", hit_rate(first), Unit.SHARE),
        Figure("steady state", hit_rate(later), Unit.SHARE),
        Figure("first reuse that found nothing", share(first, lambda r: not _hit(r)), Unit.SHARE),
        Figure("later ones that found nothing", share(later, lambda r: not _hit(r)), Unit.SHARE),
    ]


def shared_checkpoints(context: Context) -> list[Figure]:
    """13: how often logical ends share one physical checkpoint."""
    kinds = context.cell.kinds()
    if context.cell.is_served:
        return []
    total = KindResult(
        logical=sum(one.logical for one in kinds.values()),
        duplicates=sum(one.duplicates for one in kinds.values()),
    )
    figures = [Figure("shared", _part(total.duplicates, total.logical), Unit.SHARE)]
    for kind, label in _LABELS:
        one = kinds[kind]
        figures.append(Figure(label, _part(one.duplicates, one.logical), Unit.SHARE))
    figures.append(Figure("logical ends", _exact(total.logical), Unit.COUNT))
    return figures


class Question(NamedTuple):
    """One question and how it is answered. ``empty``: what a row without any value means."""

    number: int
    text: str
    figures: Callable[[Context], list[Figure]]
    note: str = ""


QUESTIONS: Sequence[Question] = (
    Question(
        1,
        "Effective joint hit on the first continuation after a checkpoint is produced",
        first_continuation,
        "Share of the prompt's tokens that were not computed, over requests that are the first to "
        "continue another one.",
    ),
    Question(
        2,
        "How often the next request reuses D_end",
        decode_end_reuse,
        "Of all requests that continue another one. A D_end that prefill's own cache outreaches is "
        "not used.",
    ),
    Question(3, "How much of that comes from tool-call continuation", tool_share),
    Question(
        4,
        "When D_end does not match, how often U_end does",
        input_end_fallback,
        "Resumed exactly at the U_end of the predecessor or of a request before it, loaded or, "
        'where the policy keeps U_end, from prefill\'s own cache; "-" where it keeps none. D_end '
        "does not match where the history was rewritten, nothing was kept, or what was kept is "
        "gone.",
    ),
    Question(
        5,
        "How often U_end avoids a first miss caused by an unreachable P_end",
        unreachable_prompt_end,
        "Of first continuations whose prompt departs from the predecessor's before its P_end; "
        '"-" where the policy keeps no U_end.',
    ),
    Question(
        6,
        "What U_end still adds once a junction was learnt",
        after_junction,
        "Over requests for which a junction's checkpoint could be loaded: tokens beyond what the "
        "other checkpoints would have given. A junction is learnt where prefill's own cache has "
        "the attention of a prefix without its state. Where forgetting clears the attention too, "
        'none is learnt and this cannot be answered ("-"): see the rows with P_end present.',
    ),
    Question(7, "Extra prompt tokens reused", extra_tokens, "Paired by request."),
    Question(
        8, "Prefill work avoided", avoided_work, "Estimated from the model's shape, not measured."
    ),
    Question(
        9,
        "Recurrent bytes per endpoint",
        recurrent_bytes,
        "Kept in the store over the whole run, by the end that names the checkpoint. A few large "
        "states may be replaced by many small ones: compare per byte.",
    ),
    Question(
        10,
        "Whether the second endpoint's evictions eat its benefit",
        second_endpoint,
        "U_end counts as the second one: what would have been lost without the checkpoints that "
        'stand for it alone; "-" under policies that keep one end or none. Below 0 against the '
        "better single end: the second one costs more "
        "than it brings.",
    ),
    Question(
        11,
        "Effect on TTFT, throughput and residency under concurrency",
        under_concurrency,
        "Residency: from sending a request to the end of its output; residents: requests in the "
        "system, mean over time. Intervals of throughput and residents are over repeats. Negative "
        "against the baseline is faster.",
    ),
    Question(
        12,
        "First reuse against steady state",
        first_and_steady,
        "First reuse: the first request that continues a conversation (or opens with the same "
        "system prompt as one before); steady state: the later ones, further turns included.",
    ),
    Question(
        13,
        "How often logical candidates share one physical checkpoint",
        shared_checkpoints,
        "Ends that arrived at a checkpoint which another end names or that was there already.",
    ),
)


def hit_rate(requests: Iterable[RequestResult]) -> Estimate:
    """Share of prompt tokens that were not computed."""
    return rate(requests, _hit, _prompt)


def _hit(r: RequestResult) -> float:
    return r.hit_tokens


def _prompt(r: RequestResult) -> float:
    return r.prompt_tokens


def _ttft(r: RequestResult) -> float:
    return r.ttft_s


def _took_decode_end(r: RequestResult) -> bool:
    return r.decode_end is EndFate.SELECTED


def _missed(r: RequestResult) -> bool:
    return r.decode_end in _MISSED


def _was_rewritten(r: RequestResult) -> bool:
    return r.decode_end is EndFate.REWRITTEN


def _resumed_at_input_end(context: Context, requests: Iterable[RequestResult]) -> Estimate:
    return share(requests if context.cell.keeps_input_end else (), _at_input_end)


def _at_input_end(r: RequestResult) -> bool:
    """Of a policy that keeps U_end."""
    if r.loaded_tokens:
        return _loaded_input_end(r)
    return r.hit_tokens in {r.relation.input_end, *r.relation.input_ends} - {0}


def _loaded_input_end(r: RequestResult) -> bool:
    return _U in r.selected_kinds or r.input_end is EndFate.SELECTED


def _added(r: RequestResult, kind: CheckpointKind) -> float:
    return r.hit_tokens - r.without.get(kind, r.hit_tokens)


def _added_work(requests: Sequence[RequestResult]) -> Estimate:
    """Work of U_end's own tokens per request; none where the results do not say it."""
    if any(_U in r.without and _U not in r.added_flops for r in requests):
        return Estimate(samples=len(requests))
    return mean(requests, lambda r: r.added_flops.get(_U, 0.0))


def _by_time(arms: Iterable[ArmResult], count: Callable[[ArmResult], float]) -> Estimate:
    return ratio(Term((arm.arm.repeat, ""), count(arm), arm.seconds) for arm in arms)


def _by_repeat(arms: Iterable[ArmResult], value: Callable[[ArmResult], float]) -> Estimate:
    return ratio(Term((arm.arm.repeat, ""), value(arm), 1.0) for arm in arms)


def _exact(value: float | None, count: int = 0) -> Estimate:
    return Estimate(None if value is None else float(value), samples=count)


def _part(part: int, whole: int) -> Estimate:
    return Estimate(part / whole if whole else None, samples=whole)
