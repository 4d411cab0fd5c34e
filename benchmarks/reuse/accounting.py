"""Honest accounting: what a policy brings where P_end is present on prefill and where it is absent,
and saying so where that is little."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from backhaul.benchmarks.reuse.figures import Book, Cell, Context, baseline, contexts
from backhaul.benchmarks.reuse.record import NO_POLICY, RUN_WITH, Arm, PromptEndAt
from backhaul.benchmarks.reuse.statistics import Estimate, paired
from backhaul.protocols.checkpoint import CheckpointKind

LITTLE = 0.02
"""Below this share of the prompt's tokens a gain is called little."""

_OWN_ENDS = {
    "input_end": (CheckpointKind.INPUT_END,),
    "decode_end": (CheckpointKind.DECODE_END,),
    "both": (CheckpointKind.INPUT_END, CheckpointKind.DECODE_END),
    "auto": (CheckpointKind.INPUT_END, CheckpointKind.DECODE_END),
    "boundaries": (CheckpointKind.BOUNDARY,),
}
"""Ends without which a policy does what engines do anyway."""


class Verdict(NamedTuple):
    """One policy in one setting against engines without it.

    Attributes:
        extra: extra share of prompt tokens reused.
        ttft_s: difference of the time to first token; negative is faster.
        against: the policy that it is compared with.
        idle: the policy had none of its ends to keep, so that nothing can be said of it.
    """

    arm: Arm
    against: str
    extra: Estimate
    ttft_s: Estimate
    idle: bool = False

    @property
    def text(self) -> str:
        """One sentence."""
        extra, ttft = self.extra, self.ttft_s
        where = f"P_end {self.arm.prompt_end}"
        if extra.value is None:
            return f"{where}: no request in common with {self.against}: nothing can be said."
        if self.idle:
            return f"{where}: {self.arm.policy} had none of its ends to keep: nothing can be said."
        said = f"{where}: {extra.value:+.1%} of the prompt's tokens"
        if not extra.is_clear:
            said += ", which is within the noise" if extra.low is not None else ", from one sample"
        elif extra.value < 0:
            said += ", which is a loss"
        if abs(extra.value) < LITTLE:
            said += f": {self.arm.policy} adds little here"
        if ttft.value is not None and ttft.is_clear:
            how = "later" if ttft.value > 0 else "sooner"
            said += f"; the first token comes {abs(ttft.value) * 1000:,.0f} ms {how}"
        elif ttft.value is not None:
            said += "; no clear effect on the first token"
        return said + "."


def verdicts(book: Book) -> list[Verdict]:
    """Every policy but the baselines, P_end present and absent side by side."""
    found = []
    for context in contexts(book):
        base = _without(context)
        if base is None or base is context.cell or context.cell.is_served:
            continue
        found.append(
            Verdict(
                context.cell.arm,
                base.arm.policy,
                paired(
                    context.cell.requests,
                    base.requests,
                    lambda r: r.hit_tokens,
                    lambda r: r.prompt_tokens,
                ),
                paired(context.cell.requests, base.requests, lambda r: r.ttft_s),
                _idle(context.cell),
            )
        )
    return sorted(found, key=lambda v: _order(v.arm))


def missing_counterparts(verdict_list: Iterable[Verdict]) -> list[Arm]:
    """Arms that were run with P_end present or absent only: half of the account is missing."""
    by_rest: dict[tuple[object, ...], set[PromptEndAt]] = {}
    arms: dict[tuple[object, ...], Arm] = {}
    for verdict in verdict_list:
        key = (verdict.arm.policy, *verdict.arm.setting[:-1])
        by_rest.setdefault(key, set()).add(verdict.arm.prompt_end)
        arms[key] = verdict.arm
    return [arms[key] for key, seen in by_rest.items() if seen < set(RUN_WITH)]


def _without(context: Context) -> Cell | None:
    return context.cells.get(NO_POLICY) or baseline(context.cells)


def _idle(cell: Cell) -> bool:
    """No end of the policy's own ever arrived at the store, nor was one refused."""
    own = _OWN_ENDS.get(cell.arm.policy, ())
    kinds = cell.kinds()
    refused = sum(arm.refused for arm in cell.arms)
    return bool(own) and not refused and not any(kinds[kind].logical for kind in own)


def _order(arm: Arm) -> tuple[object, ...]:
    return (*arm.setting[:-1], arm.policy, arm.prompt_end is PromptEndAt.ABSENT)
