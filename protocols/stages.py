"""Which layers of a group lie on which pipeline stage, when the number of stages changes.

A stage is a range of the model's layers, so its share of a group is a run of the group's layers.
Nine layers in stages of 4 and 5, a group of the layers 1, 3, 5, 7::

    stage        0            1
    layers     1   3        5   7
    object    [1 | 3]      [5 | 7]      of the one stage: [1 | 3 | 5 | 7]

The scheduler half sees the first stage only, and writes down the numbers of its layers; so the
cut is known where one of the two sides has a single stage, or both have the same ones.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import GroupLayout

_DRAFT_BY_NO_MODEL = ("", "ngram", "ngram_gpu", "suffix")
"""Values of ``draft_model`` where no layer belongs to a model that drafts."""


class Portion(NamedTuple):
    """Consecutive layers of one of our objects, and where they lie in another's.

    Attributes:
        stage: whose object it is.
        of: layers of that object.
        first: the first of them that is ours.
        layers: how many are.
    """

    stage: int
    of: int
    first: int
    layers: int


def stages_fit(ours: DomainRecord, theirs: DomainRecord) -> bool:
    """Whether it is known which layers lie on which stage of both. Not where a model drafts: its
    layers have no place among the target's."""
    if _same(ours, theirs):
        return True
    one, other = (ours, theirs) if ours.pipeline_parallel == 1 else (theirs, ours)
    drafts = one.draft_model not in _DRAFT_BY_NO_MODEL
    if one.pipeline_parallel != 1 or drafts or not _cut(other):
        return False
    if len(one.layout.groups) != len(other.layout.groups):
        return False
    return all(
        _is_cut(whole, part, _cut(other))
        for whole, part in zip(one.layout.groups, other.layout.groups, strict=True)
    )


def portions(
    ours: DomainRecord, theirs: DomainRecord, group: int, stage: int, layers: int
) -> list[Portion]:
    """What the object of ``stage`` with ``layers`` layers of a group is made of, in order.

    Raises ``ValueError`` where the layers are not those that the records tell of.
    """
    if _same(ours, theirs):
        return [Portion(stage, layers, 0, layers)]
    if ours.pipeline_parallel == 1:
        shares = _shares(_group(ours, group), _cut(theirs))
        found = [Portion(index, len(own), 0, len(own)) for index, own in enumerate(shares)]
    else:
        whole = _group(theirs, group)
        own = _shares(whole, _cut(ours))[stage]
        found = [Portion(0, whole.layers, whole.numbers.index(own[0]), len(own))]
    if sum(portion.layers for portion in found) != layers:
        raise ValueError(f"group {group} has {layers} layers here, not those of {found}")
    return found


def most_layers(ours: DomainRecord, theirs: DomainRecord, group: int) -> int:
    """Layers of a group in all objects of one rank each that one of our objects is made of, at
    most: a stage that nobody has seen may have the group's in all of its layers."""
    layers = max(_group(ours, group).layers, _group(theirs, group).layers)
    unseen = _cut(ours)[1:] if _same(ours, theirs) else ()
    return max((layers, *unseen))


def _same(ours: DomainRecord, theirs: DomainRecord) -> bool:
    one, other = ((r.pipeline_parallel, r.pipeline_layers) for r in (ours, theirs))
    return one == other


def _cut(record: DomainRecord) -> tuple[int, ...]:
    """Layers of each stage; () for a single one, or where they are not told."""
    if record.pipeline_parallel == 1:
        return ()
    try:
        cut = tuple(map(int, record.pipeline_layers.split(",")))
    except ValueError:
        return ()
    usable = len(cut) == record.pipeline_parallel and min(cut) > 0
    return cut if usable else ()


def _is_cut(whole: GroupLayout, part: GroupLayout, cut: tuple[int, ...]) -> bool:
    """Whether ``part`` is the first stage's share of ``whole``, and every stage has one."""
    numbers = whole.numbers
    if not numbers or len(numbers) != whole.layers or numbers[-1] >= sum(cut):
        return False
    if whole.draft or any(a >= b for a, b in pairwise(numbers)):
        return False
    shares = _shares(whole, cut)
    return all(shares) and shares[0] == part.numbers and len(shares[0]) == part.layers


def _shares(whole: GroupLayout, cut: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The numbers of a group's layers on each stage."""
    ends = list(accumulate(cut))
    return [
        tuple(n for n in whole.numbers if start <= n < end)
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _group(record: DomainRecord, index: int) -> GroupLayout:
    return next(one for one in record.layout.groups if one.index == index)
