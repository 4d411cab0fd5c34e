"""Whether what an engine keeps and publishes leaves something to resume from. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from backhaul.deploy.findings import Finding, Level
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import GroupKind
from backhaul.protocols.policy import Policy

INTERVAL = "prefix_cache_retention_interval"
THINNED = (GroupKind.WINDOW, GroupKind.RECURRENT)
"""Groups that vLLM does not keep at every boundary; the others it does."""
_OPTION = "--prefix-cache-retention-interval"

_SAYS = {
    Policy.INPUT_END: "U_end and junctions; every reply is computed again at the next turn",
    Policy.DECODE_END: "D_end and junctions; where a reply is rewritten, nothing older is left",
    Policy.BOTH: "U_end, D_end and junctions",
    Policy.AUTO: "U_end or D_end, chosen per request, and junctions",
    Policy.BOUNDARIES: "the positions that the application names, and junctions",
}


def check_retention(
    name: str,
    cache: Mapping[str, str],
    record: DomainRecord | None,
    *,
    hybrid: bool,
    boundary: int,
    has_connector: bool,
) -> Finding | None:
    """vLLM's own retention (labels of ``vllm:cache_config_info``): 0 keeps the prompt's end and
    junctions, N a state every N tokens besides, None one at every boundary. None where the engine
    does not say."""
    kept = cache.get(INTERVAL)
    if kept is None:
        return None
    name = f"{name}: retention"
    if not hybrid:
        return Finding(name, Level.OK, f"{kept}; attention alone is kept whole")
    if kept == "0":
        if has_connector:
            says = "0: vLLM keeps the prompt's end and junctions, Backhaul the ends of its policy"
            return Finding(name, Level.OK, says)
        return Finding(
            name,
            Level.WARNING,
            "0, and no connector: no state of a generated token is kept, so that every next turn "
            "computes the reply before it again",
            f"load BackhaulConnector, or give {_OPTION} a multiple of {boundary or 'the block'}",
        )
    if kept != "None" and (not kept.isdigit() or not boundary or int(kept) > boundary):
        return Finding(name, Level.OK, f"{kept}: a state every {kept} tokens besides")
    return Finding(
        name,
        Level.WARNING,
        f"{kept} keeps a state at every boundary: {_cost(record)}, and what would be resumed from "
        "is evicted for what would not",
        f"{_OPTION} 0" + ("" if has_connector else " with BackhaulConnector"),
    )


def _cost(record: DomainRecord | None) -> str:
    """Groups share one pool of equally large blocks, so what a boundary takes of it in each group
    says how many fewer tokens fit."""
    groups = record.layout.groups if record else ()
    whole = sum(1 / group.block_tokens for group in groups if group.kind not in THINNED)
    if not whole:
        return "they fill the engine's own cache"
    share = whole / sum(1 / group.block_tokens for group in groups)
    return f"the engine's own cache holds {share:.0%} of the tokens that fit without them"


def check_published(name: str, policy: str) -> Finding | None:
    """Backhaul's policy (label of ``backhaul:info``); None where the engine does not say."""
    if not policy:
        return None
    name = f"{name}: policy"
    if policy == Policy.MAIN_SPARSE:
        return Finding(
            name,
            Level.WARNING,
            "main_sparse publishes neither U_end nor D_end: a next turn finds at most the prompt "
            "before it, and nothing where that one's end was generation-only",
            'set "policy": "both" in kv_connector_extra_config, unless this is the baseline of a '
            "comparison",
        )
    known = policy in list(Policy)
    says = f"{policy} publishes {_SAYS[Policy(policy)]}" if known else policy
    return Finding(name, Level.OK, says)
