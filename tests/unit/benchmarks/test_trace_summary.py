"""The upper bound of reuse, compared with what comparing token by token gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.traces.summary import Seen, Spread, Summarizer

_CONTENT = st.lists(
    st.builds(
        lambda source, start, more: Span(source, start, start + more),
        st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 4),
    ), max_size=4,
)  # fmt: skip


def _tokens(content: list[Span]) -> list[tuple[str, int]]:
    return [(span.source, i) for span in content for i in range(span.start, span.stop)]


@given(st.lists(_CONTENT, max_size=8))
def test_what_was_seen_is_found_to_the_token(contents: list[list[Span]]) -> None:
    seen, earlier = Seen(), []
    for content in contents:
        tokens = _tokens(content)
        best = max(
            (next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
                  min(len(tokens), len(other))) for other in earlier), default=0,
        )  # fmt: skip
        assert seen.add(content) == best
        earlier.append(tokens)


def test_a_summary() -> None:
    """Turn 2 has all 12 tokens of turn 1; turn 3's prompt is a part of turn 1's."""
    summarizer = Summarizer()
    one = [Span("a", 0, 10)]
    reply = Span("b", 0, 2)
    for request, prompt, output, conversation in (
        ("1", one, reply, "c"),
        ("2", [*one, reply, Span("d", 0, 8)], Span("e", 0, 5), "c"),
        ("3", [Span("a", 0, 4)], Span("a", 4, 5), ""),
    ):
        summarizer.add(
            Turn(request=request, conversation=conversation, prompt=tuple(prompt), output=(output,))
        )
    summary = summarizer.summary()
    assert (summary.turns, summary.conversations) == (3, 2)
    assert summary.prompt == Spread(4, 10, 20)
    assert summary.output == Spread(1, 2, 5)
    assert summary.reusable_tokens == 12 + 4
    assert summary.reusable_share == 16 / 34
    assert Summarizer().summary().reusable_share == 0.0
