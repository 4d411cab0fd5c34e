"""What a trace holds, and how much of its prompts could be reused at the very best."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from backhaul.benchmarks.reuse.trace import Span, Turn, merged


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some lengths (tokens); zeros for none."""

    min: int
    median: float
    max: int


@dataclass(frozen=True)
class Summary:
    """Lengths in tokens.

    Attributes:
        conversations: those that the trace names; a turn without one counts as one.
        reusable_tokens: prompt tokens that begin an earlier request's prompt and output too, taken
            over all requests: what a cache reuses that forgets nothing, has every token position
            as a boundary, and every output at once. No deployment reaches it.
    """

    turns: int
    conversations: int
    prompt: Spread
    output: Spread
    prompt_tokens: int
    output_tokens: int
    reusable_tokens: int

    @property
    def reusable_share(self) -> float:
        """Upper bound of the share of prompt tokens that can be reused."""
        return self.reusable_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Seen:
    """Contents seen so far as a prefix tree over spans.

    An edge is one span's beginning, keyed by source and start; edges are split where a content
    ends or turns off inside one. Cost of a call: the number of the content's spans.
    """

    def __init__(self) -> None:
        self._edges: dict[tuple[int, str, int], tuple[int, int]] = {}  # -> stop, node behind it
        self._nodes = 1

    def add(self, content: Iterable[Span]) -> int:
        """Add a content; answers how many of its first tokens were there before."""
        node, known, new = 0, 0, False
        for span in merged(content):
            start = span.start
            while start < span.stop:
                key = (node, span.source, start)
                stop, child = self._edges.get(key, (0, 0))
                if not child:
                    new = True
                    stop, child = span.stop, self._node()
                    self._edges[key] = (stop, child)
                elif stop > span.stop:
                    middle = self._node()
                    self._edges[(middle, span.source, span.stop)] = (stop, child)
                    stop, child = span.stop, middle
                    self._edges[key] = (stop, child)
                if not new:
                    known += stop - start
                node, start = child, stop
        return known

    def _node(self) -> int:
        self._nodes += 1
        return self._nodes


class Summarizer:
    """Takes turns one by one."""

    def __init__(self) -> None:
        self._prompts, self._outputs = array("q"), array("q")
        self._conversations: set[str] = set()
        self._alone = 0
        self._reusable = 0
        self._seen = Seen()

    def add(self, turn: Turn) -> None:
        """Count a turn; earlier requests are those that were added before."""
        self._prompts.append(turn.prompt_tokens)
        self._outputs.append(turn.output_tokens)
        if turn.conversation:
            self._conversations.add(turn.conversation)
        else:
            self._alone += 1
        self._reusable += min(self._seen.add((*turn.prompt, *turn.output)), turn.prompt_tokens)

    def summary(self) -> Summary:
        """Of the turns so far."""
        return Summary(
            turns=len(self._prompts),
            conversations=len(self._conversations) + self._alone,
            prompt=_spread(self._prompts),
            output=_spread(self._outputs),
            prompt_tokens=sum(self._prompts),
            output_tokens=sum(self._outputs),
            reusable_tokens=self._reusable,
        )


def _spread(lengths: array[int]) -> Spread:
    if not lengths:
        return Spread(0, 0.0, 0)
    return Spread(min(lengths), statistics.median(lengths), max(lengths))
