"""Ratios of sums with confidence intervals: a bootstrap over conversations and repeats.

Requests of one conversation depend on each other, so whole conversations are resampled, each
repeat's own. The interval is the percentile interval of the resampled ratios.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backhaul.benchmarks.reuse.record import RequestResult

RESAMPLES = 400
CONFIDENCE = 0.95
_SEED = 20_26
"""The same draws for every figure: a report of the same results is the same report."""

Cluster = tuple[int, str]
Value = Callable[[RequestResult], float]


class Estimate(NamedTuple):
    """A figure. ``value`` None: there was nothing to count. ``low`` and ``high`` None: a single
    conversation says nothing of the spread.

    ``samples``: requests (or pairs) that it is taken from; ``clusters``: conversations.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    clusters: int = 0

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out; False where there is none."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Term(NamedTuple):
    """What one request adds to a ratio."""

    cluster: Cluster
    numerator: float
    denominator: float


def ratio(terms: Iterable[Term]) -> Estimate:
    """Sum of numerators by sum of denominators."""
    sums: dict[Cluster, list[float]] = {}
    count = 0
    for term in terms:
        entry = sums.setdefault(term.cluster, [0.0, 0.0])
        entry[0] += term.numerator
        entry[1] += term.denominator
        count += 1
    table = np.array(list(sums.values()), dtype=np.float64).reshape(-1, 2)
    top, bottom = table.sum(axis=0)
    if not count or bottom == 0:
        return Estimate(samples=count, clusters=len(sums))
    value = float(top / bottom)
    if len(sums) < 2:
        return Estimate(value, None, None, count, len(sums))
    drawn = _weights(len(sums)) @ table
    usable = drawn[drawn[:, 1] > 0]
    if not len(usable):
        return Estimate(value, None, None, count, len(sums))
    resampled = usable[:, 0] / usable[:, 1]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high), count, len(sums))


def share(requests: Iterable[RequestResult], holds: Callable[[RequestResult], bool]) -> Estimate:
    """How many of the requests something holds for."""
    return ratio(Term(r.cluster, float(holds(r)), 1.0) for r in requests)


def rate(requests: Iterable[RequestResult], part: Value, whole: Value) -> Estimate:
    """Part of a whole, both summed over the requests."""
    return ratio(Term(r.cluster, part(r), whole(r)) for r in requests)


def mean(requests: Iterable[RequestResult], value: Value) -> Estimate:
    """The mean over the requests."""
    return rate(requests, value, lambda _: 1.0)


def paired(
    ours: Iterable[RequestResult],
    base: Iterable[RequestResult],
    value: Value,
    whole: Value = lambda _: 1.0,
) -> Estimate:
    """The mean difference to the same requests of another arm, by ``whole``."""
    others = {(r.arm.repeat, r.request): r for r in base}
    terms = []
    for r in ours:
        other = others.get((r.arm.repeat, r.request))
        if other is not None:
            terms.append(Term(r.cluster, value(r) - value(other), whole(r)))
    return ratio(terms)


def quantile(requests: Iterable[RequestResult], value: Value, q: float) -> Estimate:
    """The q-quantile over the requests."""
    found = sorted((value(r), r.cluster) for r in requests)
    values = np.array([one for one, _ in found], dtype=np.float64)
    numbers: dict[Cluster, int] = {}
    clusters = np.array([numbers.setdefault(c, len(numbers)) for _, c in found], dtype=np.intp)
    if not found:
        return Estimate()
    middle = float(np.quantile(values, q))
    if len(numbers) < 2:
        return Estimate(middle, None, None, len(found), len(numbers))
    resampled = []
    for weights in _weights(len(numbers)).astype(np.intp):
        drawn = np.repeat(values, weights[clusters])
        resampled.append(np.quantile(drawn, q))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(middle, float(low), float(high), len(found), len(numbers))


@functools.lru_cache(maxsize=8)
def _weights(clusters: int) -> npt.NDArray[np.float64]:
    """How often each cluster is drawn, one row per resample."""
    rng = np.random.default_rng(_SEED)
    drawn = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=RESAMPLES)
    return drawn.astype(np.float64)
