"""What a logged request can have met: what came into the store afterwards is told apart. No I/O."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from backhaul.protocols.record import InputEndOutcome

if TYPE_CHECKING:
    from backhaul.deploy.request_lines import RequestLine


class Moment(NamedTuple):
    """When a request looked at a store, and what it met there.

    Attributes:
        ago_s: seconds since it arrived, by the clocks of its engine and of this machine; since it
            ended where the log does not say more.
        met: (boundary, domain or "" for its own) of what its record names as matching.
        names_above: of its own tokens and domain the record names all that were retained above
            this boundary; it holds even where clocks disagree.
        published: boundary of the U_end that it published itself; 0: none.
    """

    ago_s: float = 0.0
    met: frozenset[tuple[int, str]] = frozenset()
    names_above: float = math.inf
    published: int = 0

    def is_later(self, boundary: int, age_s: float, domain: str, *, matched: bool) -> bool:
        """Whether a retained checkpoint became visible after the request had looked.

        Args:
            domain: where it lies, "" for the request's own domain.
            matched: its hash is the request's.
        """
        # By other tokens there can be many at one boundary, of which the record names one.
        if matched and (boundary, domain) in self.met:
            return False
        own = matched and not domain
        return (
            age_s < self.ago_s
            or (own and boundary > self.names_above)
            or (own and boundary == self.published)
        )


ANY_TIME = Moment()
"""Of a prompt that is no request's: whatever is there counts."""


def moment_of(line: RequestLine, now: float) -> Moment:
    """The moment at which a logged request looked; ``now`` in seconds since 1970."""
    since = line.arrived or line.time
    met = frozenset((one.boundary, one.domain) for one in line.candidates if one.hash_matched)
    # Candidates are the deepest ones, so above the last one nothing is left out.
    least = line.candidates[-1].boundary if line.candidates else math.inf
    published = line.input_end.outcome == InputEndOutcome.PUBLISHED
    return Moment(
        ago_s=now - since if since else 0.0,
        met=met,
        names_above=max((boundary for boundary, _ in met), default=least),
        published=line.input_end.boundary if published else 0,
    )
