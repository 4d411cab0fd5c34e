"""Two cache domains, field by field: equal, convertible, or which fields forbid it.

A difference is named by its path in the record, e.g. ``layout.groups[2].block_tokens``. Some fields
follow from others (more ranks make smaller pages); such a difference says which other one explains
it, so that the *causes* remain: what somebody has to change.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.sharding import divides, page_bytes
from backhaul.protocols.stages import stages_fit


class Verdict(enum.StrEnum):
    """Whether one domain's bytes can be used in the other."""

    EQUAL = "equal"
    CONVERTIBLE = "convertible"
    MISMATCH = "mismatch"


class Conversion(NamedTuple):
    """One way to use bytes of a domain that differs in one field.

    Attributes:
        path: the field, without group indices: ``layout.groups.block_tokens``.
        name: how, for people.
        covers: fields that may differ along with it.
        fits: whether it can be done between two domains.
    """

    path: str
    name: str
    covers: frozenset[str] = frozenset()
    fits: Callable[[DomainRecord, DomainRecord], bool] = lambda ours, theirs: True


def shares_are_known(ours: DomainRecord, theirs: DomainRecord) -> bool:
    """Whether it is known of every group of both how its pages are cut over ranks, to the byte,
    and which layers lie on which stage."""
    return stages_fit(ours, theirs) and all(
        group.page
        and divides(group.page, record.tensor_parallel)
        and page_bytes(group.page, record.tensor_parallel) == group.page_bytes
        for record in (ours, theirs)
        for group in record.layout.groups
    )


CONVERSIONS: tuple[Conversion, ...] = (
    Conversion(
        "tensor_parallel",
        "taking heads together or apart",
        frozenset(
            {
                "layout.ranks",
                "layout.groups.interior",
                "layout.groups.page_bytes",
                "layout.groups.copies",
            }
        ),
        shares_are_known,
    ),
    Conversion(
        "pipeline_parallel",
        "taking stages' layers together or apart",
        frozenset(
            {
                "layout.ranks",
                "layout.groups.layers",
                "layout.groups.members",
                "layout.groups.numbers",
                "pipeline_layers",
            }
        ),
        shares_are_known,
    ),
)
"""Every field that may differ and still be convertible."""

FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "weights": ("model", "revision", "quantization"),
    "length_scaling": ("model", "draft_model"),
    "draft_model": ("model", "speculative_tokens"),
    "kv_dtype": ("compute_dtype",),
    "state_dtypes": ("compute_dtype", "cpu_isa", "platform"),
    "cpu_isa": ("platform",),
    "attention_backend": ("platform", "kv_dtype", "cpu_isa"),
    "kv_layout": ("platform", "attention_backend"),
    "hash_probe": ("hash_function",),
    "layout.ranks": ("tensor_parallel", "pipeline_parallel"),
    "layout.groups": ("model", "draft_model", "speculative_tokens", "pipeline_parallel"),
    "layout.groups.interior": (
        "model", "kv_dtype", "state_dtypes", "compute_dtype", "tensor_parallel",
        "speculative_tokens", "attention_backend", "cpu_isa", "platform", "conv_layout",
        "layout.groups",
    ),
    # vLLM raises attention blocks until their pages are as large as a recurrent state.
    "layout.groups.block_tokens": (
        "model", "kv_dtype", "state_dtypes", "compute_dtype", "tensor_parallel",
        "speculative_tokens", "platform", "layout.groups",
    ),
    "layout.groups.page_bytes": (
        "model", "kv_dtype", "state_dtypes", "compute_dtype", "tensor_parallel",
        "speculative_tokens", "layout.groups.block_tokens", "layout.groups.interior",
        "layout.groups",
    ),
    "layout.groups.copies": ("model", "tensor_parallel", "layout.groups"),
    "layout.groups.page": (
        "model", "kv_dtype", "state_dtypes", "compute_dtype", "kv_layout", "conv_layout",
        "speculative_tokens", "layout.groups.block_tokens", "tensor_parallel", "layout.groups",
    ),
    "pipeline_layers": ("pipeline_parallel", "model"),
    "layout.groups.kind": ("model", "layout.groups"),
    "layout.groups.index": ("layout.groups",),
    "layout.groups.window_tokens": ("model", "layout.groups"),
    "layout.groups.draft": ("draft_model", "speculative_tokens", "layout.groups"),
    "layout.groups.layers": (
        "model", "draft_model", "speculative_tokens", "pipeline_parallel", "pipeline_layers",
        "layout.groups",
    ),
    "layout.groups.members": (
        "model", "draft_model", "speculative_tokens", "pipeline_parallel", "pipeline_layers",
        "layout.groups.layers", "layout.groups",
    ),
    "layout.groups.numbers": (
        "model", "draft_model", "speculative_tokens", "pipeline_parallel", "pipeline_layers",
        "layout.groups.layers", "layout.groups.members", "layout.groups",
    ),
    "layout.hash_tokens": ("layout.groups.block_tokens", "layout.groups"),
    "scheduler_block_tokens": ("layout.groups.block_tokens", "layout.groups"),
}  # fmt: skip
"""Field -> the fields that explain a difference in it, the most telling one first."""

OPTIONS: Mapping[str, str] = {
    "revision": "--revision",
    "quantization": "--quantization",
    "compute_dtype": "--dtype",
    "length_scaling": "--max-model-len",
    "draft_model": "--speculative-config",
    "speculative_tokens": "--speculative-config",
    "kv_dtype": "--kv-cache-dtype",
    "state_dtypes": "--mamba-cache-dtype, --mamba-ssm-cache-dtype",
    "conv_layout": "VLLM_SSM_CONV_STATE_LAYOUT",
    "kv_layout": "VLLM_KV_CACHE_LAYOUT",
    "attention_backend": "--attention-backend",
    "hash_function": "--prefix-caching-hash-algo",
    "hash_probe": "PYTHONHASHSEED",
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "pipeline_layers": "VLLM_PP_LAYER_PARTITION",
    "layout.groups.block_tokens": "--block-size, --mamba-block-size",
    "layout.hash_tokens": "--prefix-match-unit",
}
"""Field -> what decides it in vLLM, for people."""


class Difference(NamedTuple):
    """One field with another value.

    ``follows``: the field that explains it; "" for a cause. ``conversion``: how bytes can be used
    all the same; "" where they cannot.
    """

    path: str
    ours: str
    theirs: str
    follows: str = ""
    conversion: str = ""

    @property
    def option(self) -> str:
        """What decides the field in vLLM, or ""."""
        return OPTIONS.get(_general(self.path), "")


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found: causes first, in the order of the record."""

    verdict: Verdict
    differences: tuple[Difference, ...] = ()

    @property
    def causes(self) -> tuple[Difference, ...]:
        """The differences that no other one explains."""
        return tuple(one for one in self.differences if not one.follows)

    @property
    def field(self) -> str:
        """Path of the first cause that forbids use; "" where none does."""
        return next((one.path for one in self.causes if not one.conversion), "")

    def line(self) -> str:
        """One line for a log."""
        if self.verdict is Verdict.EQUAL:
            return "the cache domains are equal"
        named = ", ".join(_sentence(one) for one in self.causes)
        others = len(self.differences) - len(self.causes)
        tail = f", and {others} that follow from it" if others else ""
        word = "are convertible" if self.verdict is Verdict.CONVERTIBLE else "differ"
        return f"the cache domains {word}: {named}{tail}"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(path, ours, theirs, note) of every difference, for a table."""
        return [(one.path, one.ours, one.theirs, _note(one)) for one in self.differences]


def compare(
    ours: DomainRecord,
    theirs: DomainRecord,
    conversions: Iterable[Conversion] = CONVERSIONS,
) -> Comparison:
    """Whether ``theirs`` bytes can be used in ``ours``, and what differs."""
    a, b = flatten(ours), flatten(theirs)
    paths = [path for path in (*a, *(p for p in b if p not in a)) if a.get(path) != b.get(path)]
    changed = dict.fromkeys(_general(path) for path in paths)
    by_path = {one.path: one.name for one in conversions if _applies(one, changed, ours, theirs)}
    found = [
        Difference(
            path,
            a.get(path, _ABSENT),
            b.get(path, _ABSENT),
            _explanation(_general(path), changed),
            by_path.get(_general(path), ""),
        )
        for path in paths
    ]
    found.sort(key=lambda one: bool(one.follows))
    if not found:
        return Comparison(Verdict.EQUAL)
    usable = all(one.conversion for one in found if not one.follows)
    return Comparison(Verdict.CONVERTIBLE if usable else Verdict.MISMATCH, tuple(found))


def _applies(
    conversion: Conversion, changed: Mapping[str, None], ours: DomainRecord, theirs: DomainRecord
) -> bool:
    """Whether a conversion bridges a difference together with all that follows from it."""
    followers = {path for path in changed if conversion.path in FOLLOWS.get(path, ())}
    return followers <= conversion.covers and conversion.fits(ours, theirs)


def flatten(record: DomainRecord) -> dict[str, str]:
    """Path -> value as text of every field, in the record's order; ``layout.groups`` holds the
    number of groups, and a page is one value."""
    flat: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                add(f"{path}.{name}" if path else name, inner)
        elif path.endswith("].page"):
            flat[path] = msgspec.json.encode(value).decode() if value else ""
        elif isinstance(value, (list, tuple)) and any(isinstance(inner, dict) for inner in value):
            flat[path] = str(len(value))
            for index, inner in enumerate(value):
                add(f"{path}[{index}]", inner)
        elif isinstance(value, (list, tuple)):
            flat[path] = ", ".join(map(str, value))
        else:
            flat[path] = str(value)

    add("", msgspec.to_builtins(record))
    return flat


_ABSENT = "(absent)"


def _general(path: str) -> str:
    return re.sub(r"\[\d+\]", "", path)


def _explanation(path: str, changed: Mapping[str, None]) -> str:
    return next((cause for cause in FOLLOWS.get(path, ()) if cause in changed), "")


def _shown(value: str) -> str:
    return value or '""'


def _sentence(one: Difference) -> str:
    how = f" (by {one.conversion})" if one.conversion else ""
    option = f" [{one.option}]" if one.option else ""
    return f"{one.path} {_shown(one.ours)} here, {_shown(one.theirs)} there{option}{how}"


def _note(one: Difference) -> str:
    if one.follows:
        return f"follows from {one.follows}"
    return one.conversion or one.option
