"""Spans as token ids for a real engine, whose outputs are its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backhaul.benchmarks.reuse.trace import Span, Turn, token_ids


class Contents:
    """Token ids of every source of one run.

    A source is pseudo-random, the same in every run, until a request has generated it: from then
    on it is what the engine said. A turn's output is generated as a whole, so its spans are taken
    as parts of what was generated, in their order. Not thread-safe.
    """

    def __init__(self, vocabulary: range) -> None:
        """``vocabulary``: ids to draw prompts from; no control token among them."""
        self._vocabulary = vocabulary
        self._generated: dict[str, dict[int, int]] = {}

    def ids(self, spans: Iterable[Span]) -> list[int]:
        """Token ids of the content."""
        ids: list[int] = []
        for span in spans:
            said = self._generated.get(span.source)
            drawn = token_ids((span,), self._vocabulary)
            if said is None:
                ids += drawn
            else:
                positions = range(span.start, span.stop)
                ids += [said.get(p, d) for p, d in zip(positions, drawn, strict=True)]
        return ids

    def generated(self, turn: Turn, tokens: Sequence[int]) -> None:
        """Enter what an engine generated for ``turn``.

        Raises ``ValueError`` unless it has the length of the turn's output.
        """
        if len(tokens) != turn.output_tokens:
            raise ValueError(
                f"request {turn.request!r} generated {len(tokens)} tokens, its trace has "
                f"{turn.output_tokens}: give the engine the length to generate"
            )
        left = iter(tokens)
        for span in turn.output:
            said = self._generated.setdefault(span.source, {})
            for position in range(span.start, span.stop):
                said[position] = next(left)
