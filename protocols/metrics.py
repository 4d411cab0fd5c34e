"""Names, labels and meaning of every metric: engines' and the store's.

``connector/stats.py`` and ``transfer/daemon/metrics.py`` register what stands here,
``docs/metrics.md`` explains it and a test compares them; dashboards build on it.

Names follow Prometheus: base units in the name, and ``_total`` on counters, which the client
library appends. Every value that a label can take is listed and exposed from the start, so that
"never happened" reads as 0 and not as absent; only a domain's id, and what a connection uses of the
machine's devices, is not known in advance.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from backhaul.protocols.checkpoint import (
    UNKNOWN_KIND,
    CheckpointKind,
    LookupOutcome,
    NotAsked,
    PassedOver,
    ProducerAge,
    Reason,
    Reuse,
    Tag,
)
from backhaul.protocols.policy import HINT_FIELDS, Policy, Why

ENGINE_PREFIX = "backhaul:"
STORE_PREFIX = "backhaul:store_"


class MetricType(enum.Enum):
    """What a number means between two scrapes."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Label(NamedTuple):
    """One label and the values known in advance; empty where only operation shows them."""

    name: str
    values: tuple[str, ...]


class Metric(NamedTuple):
    """One metric without its prefix. ``buckets`` of a histogram are upper bounds."""

    type: MetricType
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    def exposed(self, name: str) -> str:
        """The name without prefix as Prometheus shows it."""
        return f"{name}_total" if self.type is MetricType.COUNTER else name


def known_label_values(metric: Metric) -> Iterator[tuple[str, ...]]:
    """Every combination of a metric's label values that is known in advance."""
    return itertools.product(*(label.values for label in metric.labels))


def _values(*names: str) -> tuple[str, ...]:
    return tuple(str(name) for name in names)


NONE = "none"
"""Stands for the kind of a request for which no checkpoint was selected."""

KINDS = _values(*CheckpointKind)
KIND = Label("kind", KINDS)
"""One logical end."""
PRIMARY_KIND = Label("kind", (*KINDS, UNKNOWN_KIND))
"""The end that a checkpoint is named by where it stands for several."""
SELECTED_KIND = Label("selected", (*KINDS, NONE))
CHOSEN_KIND = Label("kind", (*KINDS, NONE))
WHY = Label("why", _values(*Why))
CANDIDATE_REASON = Label(
    "reason",
    _values(
        Reason.HASH_MISMATCH,
        Reason.DOMAIN_MISMATCH,
        Reason.STATE_MISSING,
        Reason.ATTENTION_MISSING,
        Reason.EVICTED,
        Reason.UNCOMMITTED,
        Reason.UNREACHABLE,
        Reason.LOAD_FAILED,
        Reason.INTERNAL,
    ),
)
LOAD_REASON = Label(
    "reason",
    _values(
        Reason.UNREACHABLE,
        Reason.LOAD_FAILED,
        Reason.LEASE_EXPIRED,
        Reason.CORRUPT,
        Reason.TIMEOUT,
        Reason.STORE_FULL,
        Reason.DENIED,
        Reason.CACHE_RESET,
        Reason.INTERNAL,
    ),
)
PUBLICATION_REASON = Label(
    "reason",
    _values(
        Reason.STATE_MISSING,
        Reason.ATTENTION_MISSING,
        Reason.EVICTED,
        Reason.UNCOMMITTED,
        Reason.UNREACHABLE,
        Reason.NO_PUBLICATION_PATH,
        Reason.LEASE_EXPIRED,
        Reason.TIMEOUT,
        Reason.STORE_FULL,
        Reason.OVER_BUDGET,
        Reason.DENIED,
        Reason.PIN_LIMIT,
        Reason.ABORTED,
        Reason.CACHE_RESET,
        Reason.INTERNAL,
    ),
)
PASSED_OVER = Label("reason", _values(*PassedOver))
TAG = Label("tag", ("known", *_values(*Tag)))
"""The funnel: ``known`` counts every candidate, each tag those that carry it."""
LOOKUP_RESULT = Label("result", _values(*LookupOutcome))
NOT_ASKED = Label("reason", _values(*NotAsked))
SOURCE = Label("source", ("local", "loaded", "other", "recomputed"))
PRODUCER_AGE = Label("producer_age", _values(*ProducerAge))
REUSE = Label("reuse", _values(*Reuse))
PART = Label("part", ("reused", "recomputed"))
EXTENT = Label("extent", ("attention", "recurrent", "joint", "exact_hash"))
FIELD = Label("field", ("backhaul", *HINT_FIELDS))
DOMAIN = Label("domain", ())
TRANSPORT = Label("transport", ())
"""UCX's names of transport and device: as many as the machine has, and the connection uses."""
OUTCOME = Label("outcome", ())
"""Named where prompts are rendered; docs/u_end.md explains them."""

_TOKEN_BUCKETS = (0.0, *(float(1 << n) for n in range(7, 21)))
"""0, 128 ... 1 Mi tokens: a context's length."""
_LOAD_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_LOOKUP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_AGE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 14400.0)
"""From a tool call's answer to a conversation that is taken up again hours later."""
_RPC_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
"""A call takes tenths of a millisecond; the long end is for lookups that wait."""


def _counter(text: str, *labels: Label) -> Metric:
    return Metric(MetricType.COUNTER, text, labels)


def _gauge(text: str, *labels: Label) -> Metric:
    return Metric(MetricType.GAUGE, text, labels)


def _histogram(text: str, buckets: tuple[float, ...], *labels: Label) -> Metric:
    return Metric(MetricType.HISTOGRAM, text, labels, buckets)


ENGINE: dict[str, Metric] = {
    # -- selection --
    "requests": _counter(
        "Requests whose prefill began, by the end they resumed from.", SELECTED_KIND
    ),
    "candidates": _counter("Candidates of those requests that carry a tag.", TAG, PRIMARY_KIND),
    "candidates_unconsumable": _counter(
        "Candidates that could not be loaded.", CANDIDATE_REASON, PRIMARY_KIND
    ),
    "candidates_passed_over": _counter(
        "Candidates that could be loaded and were not.", PASSED_OVER, PRIMARY_KIND
    ),
    "decode_end_missed": _counter(
        "Requests with a D_end deeper than their hit that they could not use, by what they resumed "
        "from instead.",
        SELECTED_KIND,
    ),
    "selected_boundary_tokens": _histogram(
        "Boundary of the selected checkpoint.", _TOKEN_BUCKETS, KIND
    ),
    "selected_age_seconds": _histogram(
        "Age of the selected checkpoint when it was looked up.", _AGE_BUCKETS_S, KIND
    ),
    "selections": _counter(
        "Selected checkpoints, by how many requests of the same history ago they were produced.",
        KIND,
        PRODUCER_AGE,
    ),
    "incremental_hits": _counter(
        "Selections where no checkpoint of another kind was consumable above the local hit.", KIND
    ),
    "incremental_tokens": _counter(
        "Tokens spared beyond the local hit and the deepest consumable checkpoint of another kind.",
        KIND,
    ),
    "incremental_prefill_flops": _counter("Estimated prefill work of those tokens.", KIND),
    # -- reuse --
    "avoided_prefill_flops": _counter(
        "Estimated prefill work that loads spared, from the model's shape, all ranks.", KIND
    ),
    "continuations": _counter(
        "Requests that continue a prefix known to the store, by whether its deepest checkpoint had "
        "been looked up before.",
        REUSE,
    ),
    "continuation_tokens": _counter(
        "Prompt tokens of those, reused (loaded or found locally) or computed.", REUSE, PART
    ),
    "branch_learning_misses": _counter(
        "Requests that share a prefix with an earlier one that no recurrent group had cached."
    ),
    "branch_learning_tokens": _counter(
        "Tokens of those shared prefixes that were computed for want of a state."
    ),
    "prompt_tokens": _counter(
        "Prompt tokens of requests whose prefill began, by where they came from: the engine's own "
        "prefix cache, the store, another connector, or computed.",
        SOURCE,
    ),
    "matched_tokens": _histogram(
        "How far the store matched a prompt: attention objects, recurrent states, both together, "
        "and any retained checkpoint of the same tokens.",
        _TOKEN_BUCKETS,
        EXTENT,
    ),
    "recomputed_tokens": _histogram("Prompt tokens computed after the hit.", _TOKEN_BUCKETS),
    # -- lookups and loads --
    "lookups": _counter(
        "Lookups of requests that got blocks: hit, found and not used, miss, or why the store did "
        "not answer.",
        LOOKUP_RESULT,
    ),
    "not_asked": _counter(
        "Requests whose prefill began and of which the store was never asked.", NOT_ASKED
    ),
    "lookup_seconds": _histogram(
        "Time of a lookup, a wait for a publication included.", _LOOKUP_BUCKETS_S
    ),
    "loads": _counter("Loads that filled a request's cache, by the end selected.", PRIMARY_KIND),
    "loaded_tokens": _counter(
        "Prompt tokens that loads spared, by the end selected.", PRIMARY_KIND
    ),
    "load_failures": _counter("Loads that failed and were recomputed.", LOAD_REASON),
    "failed_load_tokens": _counter(
        "Prompt tokens of loads that failed, which vLLM's own counters have as cached."
    ),
    "load_bytes": _counter("Bytes loaded from the store, all ranks."),
    "load_seconds": _histogram("Time of one load, dispatch to the last rank.", _LOAD_BUCKETS_S),
    # -- publications --
    "publications": _counter("Logical ends published.", KIND),
    "user_turns_published": _counter("U_ends of users' messages among those."),
    "checkpoints_published": _counter("Checkpoints published, by primary kind.", KIND),
    "duplicate_ends": _counter(
        "Logical ends that share a published checkpoint with the end it is named by.", KIND
    ),
    "publication_failures": _counter("Checkpoints that were not published.", PUBLICATION_REASON),
    "pathless_publications": _counter(
        "Ends of replies published while nobody who loads could reach them."
    ),
    "publish_bytes": _counter("Bytes sent to the store, all ranks."),
    "published_state_bytes": _counter(
        "Recurrent state bytes of published checkpoints, all ranks.", KIND
    ),
    "publish_seconds": _histogram(
        "Time of one publication job, dispatch to the last rank.", _LOAD_BUCKETS_S
    ),
    "finish_to_consumable_seconds": _histogram(
        "Time from a request's end to its D_end being consumable.", _LOAD_BUCKETS_S
    ),
    "materialise_seconds": _histogram(
        "Time from a logical end to its checkpoint being consumable: of what a finished request "
        "leaves from its end, of prompt ends from the scheduling of the step that reaches them.",
        _LOAD_BUCKETS_S,
        KIND,
    ),
    "forced_chunk_ends": _counter(
        "Prefill chunks that a checkpoint ended earlier than vLLM would have; each costs at most "
        "one more step.",
        KIND,
    ),
    "chosen_ends": _counter(
        "Ends that the policies of requests whose prefill began chose to publish, by what decided.",
        CHOSEN_KIND,
        WHY,
    ),
    "hints_rejected": _counter("Per-request hints ignored because malformed.", FIELD),
    "request_log_records": _counter("Records written to the request log."),
    "request_log_dropped": _counter("Records that the request log could not take."),
    # -- now --
    "held_blocks": _gauge("KV blocks on which the connector holds a reference."),
    "pins": _gauge("Checkpoint positions pinned for running requests."),
    "open_leases": _gauge("Store leases this engine holds."),
    "open_jobs": _gauge("Loads and publications that some rank has not settled."),
    "tracked_requests": _gauge("Requests with connector state."),
    "transport_ranks": _gauge(
        "Ranks whose connection to the store's pool has a lane over a transport.", TRANSPORT
    ),
    "info": _gauge(
        "1; the engine's cache domain and policy.", DOMAIN, Label("policy", tuple(Policy))
    ),
}
"""Exposed on vLLM's /metrics with ``ENGINE_PREFIX`` and vLLM's own labels. Counted on the
scheduler's side only, so that the number of ranks changes nothing but bytes."""


def store_counters() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Key of ``StoreStats.counters`` -> (metric, label values): ``evictions_capacity`` is
    ``evictions{reason="capacity"}``."""
    return {
        "_".join((name, *values)): (name, values)
        for name, metric in STORE.items()
        if metric.type is MetricType.COUNTER
        for values in known_label_values(metric)
    }


API_SERVER: dict[str, Metric] = {
    "u_end": _counter("Requests with messages, by U_end's outcome.", OUTCOME),
}
"""Of the process that renders, beside an engine's: without vLLM's labels of engine and model."""

STORE: dict[str, Metric] = {
    # -- now --
    "capacity_bytes": _gauge("Size of the pool."),
    "used_bytes": _gauge("Bytes of the pool that are allocated."),
    "objects": _gauge("Objects, reserved ones included."),
    "checkpoints": _gauge("Visible checkpoints."),
    "retained_checkpoints": _gauge("Visible checkpoints, by primary kind.", PRIMARY_KIND),
    "retained_state_bytes": _gauge(
        "Recurrent state bytes of visible checkpoints, by primary kind.", PRIMARY_KIND
    ),
    "domain_checkpoints": _gauge("Checkpoints of a cache domain, pending ones included.", DOMAIN),
    "leases": _gauge("Valid leases."),
    "publications": _gauge("Open publications."),
    "domains": _gauge("Known cache domains."),
    # -- lookups --
    "lookups": _counter("Lookups."),
    "lookups_matched": _counter("Lookups that met something retained and hash-matched."),
    "hits": _counter("Lookups that found something consumable."),
    "leases_read": _counter("Leases under which objects were located: the load began."),
    "candidates": _counter(
        "Candidates that lookups answered, by tag.", Label("tag", TAG.values[:-1])
    ),
    "unconsumable": _counter(
        "Candidates that lookups could not offer.",
        Label(
            "reason",
            _values(
                Reason.UNCOMMITTED,
                Reason.EVICTED,
                Reason.DOMAIN_MISMATCH,
                Reason.HASH_MISMATCH,
                Reason.STATE_MISSING,
                Reason.ATTENTION_MISSING,
            ),
        ),
    ),
    # -- publications --
    "reservations": _counter("Calls that asked for space."),
    "granted_objects": _counter("Objects for which space was given."),
    "granted_bytes": _counter("Bytes of those."),
    "present_objects": _counter("Wanted objects that were there already."),
    "busy_objects": _counter("Wanted objects that another publication was writing."),
    "full_objects": _counter("Wanted objects for which no space could be freed."),
    "over_budget_objects": _counter("Wanted objects that the admission budget kept out."),
    "commits": _counter("Commit calls."),
    "committed_objects": _counter("Objects committed."),
    "stale_commits": _counter("Objects refused because their reservation had ended."),
    "checkpoints_created": _counter("Checkpoints that became visible."),
    "checkpoints_merged": _counter("Publications of a checkpoint that was visible already."),
    "checkpoints_hit": _counter("Checkpoints that were the deepest of a hit, once each."),
    "logical_ends": _counter("Logical ends that came to stand on a checkpoint.", KIND),
    "duplicate_ends": _counter("Those whose checkpoint stood for another end already.", KIND),
    # -- eviction --
    "evictions": _counter("Checkpoints evicted.", Label("reason", ("capacity",))),
    "evicted_checkpoints": _counter("Checkpoints evicted, by primary kind.", PRIMARY_KIND),
    "evicted_bytes": _counter("Bytes freed by evicting checkpoints."),
    "evicted_state_bytes": _counter("Recurrent state bytes among those.", PRIMARY_KIND),
    "evicted_unused_checkpoints": _counter("Evicted checkpoints that no lookup ever hit."),
    "evicted_user_turns": _counter("Evicted U_ends of users' messages."),
    "evicted_loose_objects": _counter("Objects of no checkpoint that were evicted."),
    "evicted_age_seconds": _histogram(
        "Life of evicted checkpoints, from visible to evicted.", _AGE_BUCKETS_S, PRIMARY_KIND
    ),
    # -- what ran out --
    "expired_publications": _counter("Publications that ran out."),
    "expired_leases": _counter("Leases that ran out."),
    "expired_announcements": _counter("Announcements that ran out."),
    # -- calls --
    "rpc_seconds": _histogram(
        "Seconds per call, waiting included.", _RPC_BUCKETS_S, Label("method", ())
    ),
}
"""Exposed on the daemon's /metrics with ``STORE_PREFIX``."""
