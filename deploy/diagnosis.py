"""What is wrong with a deployment, decided from what was read. No I/O.

Each check says ``ok``, ``warning`` or ``problem``, and for the latter two the one thing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backhaul.deploy.domain_rows import differences
from backhaul.deploy.findings import Finding, Level
from backhaul.deploy.retention import THINNED, check_published, check_retention
from backhaul.deploy.terminal import format_age
from backhaul.deploy.transports import check_engine_transports
from backhaul.protocols.comparison import Verdict, compare
from backhaul.protocols.domain import DomainRecord
from backhaul.transfer.base import DomainInfo, StoreStats
from backhaul.transfer.daemon.settings import format_bytes

SEEDLESS_HASHES = ("sha256", "sha256_cbor")
"""Prefix hashes of vLLM that are the same everywhere where PYTHONHASHSEED is not set."""
SHORT_SHARE_MAX = 0.5
"""Above this share of prompts that end before the first boundary most requests cannot reuse
anything."""
LIVE_S = 600.0
"""A domain whose last call is so much older than its model's newest is of the past."""


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What an engine says of itself over HTTP.

    Attributes:
        cache: labels of ``vllm:cache_config_info``; empty where /metrics has none.
        prompts: upper bound in tokens -> prompts at most so long, cumulated; with ``inf``.
        short_prompts: prompts that ended before the first boundary, as Backhaul counted them.
        domain: id of its cache domain, where its metrics name it.
        policy: what Backhaul publishes there, where its metrics say it.
        has_connector: ``backhaul:`` metrics are there.
        transports: what its connections to the pool have -> ranks of which this holds.
        failure_policy: ``kv_load_failure_policy``; "" where it cannot be seen.
        error: why it could not be read; the rest is empty then.
    """

    url: str
    version: str = ""
    models: tuple[str, ...] = ()
    cache: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[float, float] = field(default_factory=dict)
    short_prompts: float = 0.0
    domain: str = ""
    policy: str = ""
    has_connector: bool = False
    transports: Mapping[str, int] = field(default_factory=dict)
    failure_policy: str = ""
    error: str = ""


def check_store(stats: StoreStats) -> Finding:
    """Whether the pool has room to work with."""
    says = (
        f"answers; {stats.checkpoints} checkpoints, {format_bytes(stats.used_bytes)} of "
        f"{format_bytes(stats.capacity_bytes)} used"
    )
    if stats.counters.get("full_objects", 0):
        return Finding(
            "store catalog",
            Level.WARNING,
            f"{says}; {stats.counters['full_objects']} objects found no space",
            "start `backhaul store` with a larger --capacity",
        )
    return Finding("store catalog", Level.OK, says)


def check_domains(domains: Sequence[DomainInfo]) -> list[Finding]:
    """Whether engines of one model really share a domain, and hash alike."""
    if not domains:
        return [
            Finding(
                "cache domains",
                Level.WARNING,
                "no engine has opened a cache domain here",
                'give the engines this store: "store" in kv_connector_extra_config',
            )
        ]
    findings = []
    families: dict[str, list[DomainInfo]] = {}
    for info in domains:
        families.setdefault(info.record.model, []).append(info)
    for family in families.values():
        findings += _check_family(family)
    return findings


def _check_family(family: Sequence[DomainInfo]) -> list[Finding]:
    """Domains of one model, the one used last first."""
    newest, others = family[0], family[1:]
    findings = []
    if not others:
        names = sorted({engine_of(client.name) for client in newest.clients})
        says = f"{newest.id}: {', '.join(names) or 'nobody'} of one mind"
        if len(names) == 1:
            findings.append(
                Finding(
                    "cache domains",
                    Level.WARNING,
                    f"{newest.id} has been opened by {names[0]} only",
                    "start the other engine with the same store, or look at its log",
                )
            )
        else:
            findings.append(Finding("cache domains", Level.OK, says))
    for other in others:
        found = compare(newest.record, other.record)
        if found.verdict is Verdict.CONVERTIBLE:
            says = f"{newest.id} and {other.id}: {found.line()}"
            findings.append(Finding("cache domains", Level.OK, says))
            continue
        rows = differences(newest.record, other.record)
        fields = ", ".join(row.path for row in rows if row.differs)
        says = (
            f"{newest.id} and {other.id} (last call {format_age(other.idle_s)} ago) hold one model "
            f"but differ in {fields}: nothing is shared between them"
        )
        live = _is_live(other, newest)
        findings.append(
            Finding(
                "cache domains",
                Level.PROBLEM if live else Level.WARNING,
                says,
                f"make {fields} equal on both engines"
                if live
                else "nothing, if the older one belongs to an engine of the past",
            )
        )
    return [*findings, _check_hashes([one for one in family if _is_live(one, newest)])]


def _is_live(info: DomainInfo, newest: DomainInfo) -> bool:
    return info.idle_s <= newest.idle_s + LIVE_S


def _check_hashes(family: Sequence[DomainInfo]) -> Finding:
    """Of domains of one model that are in use: what an engine of the past hashed with is told by
    the comparison of domains, and nobody can change it any more."""
    functions = {info.record.hash_function for info in family}
    probes = {info.record.hash_probe for info in family}
    if len(functions) > 1:
        return Finding(
            "prefix hash",
            Level.PROBLEM,
            f"engines of one model hash with {' and '.join(sorted(functions))}",
            "give every engine the same --prefix-caching-hash-algo, best sha256",
        )
    (function,) = functions
    if len(probes) > 1:
        return Finding(
            "prefix hash",
            Level.PROBLEM,
            f"{function} gives different hashes of the same tokens on different engines",
            "give all engines one PYTHONHASHSEED, or none"
            if function in SEEDLESS_HASHES
            else "use --prefix-caching-hash-algo sha256, or one PYTHONHASHSEED for all engines",
        )
    if function not in SEEDLESS_HASHES:
        return Finding(
            "prefix hash",
            Level.WARNING,
            f"{function} depends on PYTHONHASHSEED; a restart without it loses every match",
            "use --prefix-caching-hash-algo sha256",
        )
    return Finding("prefix hash", Level.OK, f"{function}, the same on every engine")


def check_engine(
    engine: EngineView, record: DomainRecord | None, elsewhere: str = ""
) -> list[Finding]:
    """One engine; ``record``: its cache domain, where a store knows it; ``elsewhere``: that
    store's address, where it is not the one examined."""
    name = f"engine {engine.url}"
    if engine.error:
        return [
            Finding(name, Level.PROBLEM, engine.error, "is vLLM running there, with this --port?")
        ]
    models = ", ".join(engine.models) or "no model"
    findings = [Finding(name, Level.OK, f"vLLM {engine.version}, {models}")]
    if not engine.has_connector:
        findings.append(
            Finding(
                f"{name}: connector",
                Level.PROBLEM,
                "its /metrics has no backhaul: metric, so the connector is not loaded",
                "start it with BackhaulConnector in --kv-transfer-config",
            )
        )
    elif not engine.domain:
        findings.append(
            Finding(
                f"{name}: connector",
                Level.WARNING,
                "it shows no cache domain yet, so nothing of it could be compared",
                "send it a request and run this again; start it without --disable-log-stats",
            )
        )
    elif elsewhere:
        findings.append(
            Finding(
                f"{name}: connector",
                Level.PROBLEM,
                f"its cache domain {engine.domain} is in {elsewhere}, not in the store examined: "
                "what it publishes is not found there",
                'give every engine one "store" in kv_connector_extra_config',
            )
        )
    elif record is None:
        findings.append(
            Finding(
                f"{name}: connector",
                Level.PROBLEM,
                f"this store does not know its cache domain {engine.domain}",
                "give the engine this store, or name the engine's with --other-store",
            )
        )
    if engine.has_connector:
        findings.append(check_engine_transports(name, engine.transports))
    findings += _check_cache(name, engine, record)
    boundary = record.layout.boundary_tokens if record else _boundary(engine.cache)
    if boundary:
        lengths = f"{name}: prompt lengths"
        findings.append(check_prompts(lengths, engine.prompts, boundary, engine.short_prompts))
    kept = check_retention(
        name,
        engine.cache,
        record,
        hybrid=_is_hybrid(engine.cache, record),
        boundary=boundary,
        has_connector=engine.has_connector,
    )
    findings += [one for one in (kept, check_published(name, engine.policy)) if one is not None]
    findings.append(_check_policy(name, engine.failure_policy))
    return findings


def check_side_by_side(engines: Sequence[tuple[EngineView, DomainInfo | None]]) -> list[Finding]:
    """Whether engines that run now can use each other's bytes: every two of them. None: its cache
    domain is not known, so that of several engines it is said that this one was not compared."""
    findings = []
    unknown = [one.url for one, info in engines if info is None]
    if unknown and len(engines) > 1:
        findings.append(
            Finding(
                "engines side by side",
                Level.WARNING,
                f"{', '.join(unknown)}: compared with nothing, as the cache domain is not known",
                "do what is said of it above, and run this again",
            )
        )
    known = [(one, info) for one, info in engines if info is not None]
    for index, (one, mine) in enumerate(known):
        for other, theirs in known[index + 1 :]:
            found = compare(mine.record, theirs.record)
            pair = f"{one.url} and {other.url}"
            if found.verdict is Verdict.EQUAL:
                says = f"{pair} are in one cache domain, {mine.id}"
                findings.append(Finding("engines side by side", Level.OK, says))
                continue
            if found.verdict is Verdict.CONVERTIBLE:
                says = f"{pair}: {found.line()}"
                findings.append(Finding("engines side by side", Level.OK, says))
                continue
            fields = ", ".join(cause.path for cause in found.causes)
            findings.append(
                Finding(
                    "engines side by side",
                    Level.PROBLEM,
                    f"{pair} are in {mine.id} and {theirs.id} and differ in {fields}: nothing is "
                    "shared between them",
                    f"make {fields} equal on both engines",
                )
            )
    return findings


def _is_hybrid(cache: Mapping[str, str], record: DomainRecord | None) -> bool:
    """Whether the model has states that vLLM thins out; its labels say it less exactly."""
    if record is not None:
        return any(group.kind in THINNED for group in record.layout.groups)
    return cache.get("mamba_block_size", "None") != "None"


def _check_cache(name: str, engine: EngineView, record: DomainRecord | None) -> list[Finding]:
    cache = engine.cache
    if not cache:
        return [
            Finding(
                f"{name}: cache",
                Level.WARNING,
                "its /metrics has no vllm:cache_config_info",
                "start it without --disable-log-stats",
            )
        ]
    caching, mode = f"{name}: prefix caching", f"{name}: mamba-cache-mode"
    findings = []
    if cache.get("enable_prefix_caching") == "True":
        findings.append(Finding(caching, Level.OK, "on"))
    else:
        findings.append(
            Finding(caching, Level.PROBLEM, "off: no block has a hash", "--enable-prefix-caching")
        )
    hybrid = record.layout.has_recurrent if record else cache.get("mamba_block_size") != "None"
    found = cache.get("mamba_cache_mode", "none")
    if hybrid and found != "align":
        findings.append(
            Finding(
                mode,
                Level.PROBLEM if record else Level.WARNING,
                f"{found}: recurrent states do not exist on block boundaries",
                "start it with --mamba-cache-mode align",
            )
        )
    else:
        findings.append(Finding(mode, Level.OK, found if hybrid else "no recurrent state"))
    return findings


def check_prompts(
    name: str, prompts: Mapping[float, float], boundary: int, counted: float = 0.0
) -> Finding:
    """Whether prompts are long enough for a grid of ``boundary`` tokens. A histogram tells only
    how many prompts are at most as long as a bucket's bound, and Backhaul ``counted`` only those
    of which it would have asked the store, so the share is a lower limit."""
    total = max(prompts.values(), default=0.0)
    if not total:
        return Finding(name, Level.OK, f"boundaries every {boundary} tokens; no prompt so far")
    short = max((count for bound, count in prompts.items() if bound <= boundary), default=0.0)
    short = max(short, min(counted, total))  # one that still runs is in no histogram
    share = short / total
    says = f"none of {total:.0f} prompts is known to end before the first boundary ({boundary})"
    if short:
        many = f"at least {short:.0f} of {total:.0f}"
        says = f"{many} prompts end before the first boundary ({boundary})"
    if share <= SHORT_SHARE_MAX:
        return Finding(name, Level.OK, says)
    return Finding(
        name,
        Level.WARNING,
        f"{says} and can never reuse anything",
        "use a smaller --block-size or --mamba-block-size",
    )


def _boundary(cache: Mapping[str, str]) -> int:
    sizes = [cache.get("mamba_block_size", ""), cache.get("block_size", "")]
    return max((int(size) for size in sizes if size.isdigit()), default=0)


def _check_policy(name: str, policy: str) -> Finding:
    name = f"{name}: kv_load_failure_policy"
    if not policy:
        # A warning would be given of every server in production, which shows no settings.
        return Finding(
            name,
            Level.OK,
            "not visible from outside (VLLM_SERVER_DEV_MODE=1 shows it); Backhaul's own loads are "
            "recomputed under either policy",
        )
    if policy == "fail":
        return Finding(
            name,
            Level.WARNING,
            "fail: another connector's failed load ends the request (Backhaul's is recomputed)",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    return Finding(name, Level.OK, policy)


def engine_of(client: str) -> str:
    """The engine's name in a client's, which is `engine:half`."""
    engine, colon, half = client.rpartition(":")
    return engine if colon and half else client
