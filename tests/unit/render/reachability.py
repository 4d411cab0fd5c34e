"""Which end of a turn is still a token prefix of the next turn's prompt, per template and mode.

The conversation: A = user, answer; B = user, tool call; C = tool result, answer; D = user, answer.
The model's output is what the template writes for the last message, with the reasoning where the
template leaves it out; it is tokenised apart from the prompt, as sampled tokens are. Prints the
table of docs/u_end.md when run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from real_templates import FAMILIES, RESULT, SYSTEM, Family, answer, call, load, user, variables

STOPS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|end|>",
    "<|end_of_msg|>", "[e~[", "<seed:eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip

THINKING = {
    "Qwen3-Next-Thinking", "Qwen3.5", "Qwen3.6", "Qwen3.6 preserve_thinking", "Qwen3.8",
    "Nemotron-3-Nano", "Nemotron-3-Super", "Nemotron-3-Ultra", "Nemotron-3.5-Lightning",
    "Kimi-K2.5", "Kimi-K3 (port)", "GLM-4.7", "GLM-5", "GLM-5.2", "GLM-5.3", "MiniMax-M2",
    "MiniMax-M3", "DeepSeek-V3.1 thinking", "DeepSeek-V4 (port) thinking", "gpt-oss",
    "Hy3 high effort", "Ling-3.0-flash", "Seed-OSS",
}  # fmt: skip
"""Families whose output begins with reasoning."""


class Turn(NamedTuple):
    """Tokens of one turn's prompt, its U_end, and prompt plus output without the stop token."""

    prompt: list[int]
    u_end: int
    decode: list[int] | None
    opens_with_user: bool


def text_of(
    family: Family, messages: list[dict[str, Any]], *, tools: bool, generate: bool
) -> tuple[str, int]:
    """Rendered text and U_end in characters, by vendors' code alone: the table is about templates,
    and U_end is where the render without the flag ends."""
    values = variables(family, messages, tools=tools)
    plain, _ = load(family.template)
    text = plain.render(**values, add_generation_prompt=generate)
    without = plain.render(**values, add_generation_prompt=False)
    assert text.startswith(without)
    return text, len(without)


def take_turn(
    family: Family, messages: list[dict[str, Any]], output: dict[str, Any], *, tools: bool
) -> Turn:
    text, u_end = text_of(family, messages, tools=tools, generate=True)
    prompt = family.encode(text)
    whole, _ = text_of(family, [*messages, output], tools=tools, generate=False)
    decode = None
    if whole.startswith(text):
        said = whole[len(text) :].rstrip("\n")
        for stop in STOPS:
            said = said.removesuffix(stop)
        thought = output.get("reasoning")
        if thought is not None and thought not in said:
            said = written_out(text, thought, said)
        decode = [*prompt, *family.encode(said)]
    # Otherwise the template writes even the last answer differently than the prompt began it.
    before = len(prompt) - len(family.encode(text[u_end:]))
    return Turn(prompt, before, decode, messages[-1]["role"] == "user")


def written_out(prompt: str, thought: str, said: str) -> str:
    """The output where the template leaves the reasoning of the last answer out."""
    if prompt.endswith("<|start|>assistant"):
        header = "<|channel|>analysis<|message|>"
        return f"{header}{thought}<|end|><|start|>assistant{said}"
    return f"{thought}</think>{said.removeprefix('</think>')}"


def best(turn: Turn, last_user: Turn, following: list[int]) -> str:
    """D, P or U of the turn; UB or PB: only that of the last user turn; or none."""

    def kept(prefix: list[int]) -> bool:
        return following[: len(prefix)] == prefix

    if turn.decode is not None and kept(turn.decode):
        return "D"
    for name, candidate in (("", turn), ("B", last_user)):
        if kept(candidate.prompt):
            return f"P{name}"
        if kept(candidate.prompt[: candidate.u_end]):
            return f"U{name}"
    return "none"


def letters(family: Family, *, tools: bool, keep: bool) -> str:
    """One letter per turn, for reasoning that the client returns (``keep``) or drops."""
    thinks = family.label in THINKING
    thought = "First this.\nThen that." if thinks else None
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (user("Good morning."), answer("Good morning! How can I help?", thought)),
    ]
    if tools:
        turns += [
            (user("Weather in Oslo?"), call(thought)),
            (RESULT, answer("7 degrees and rain.", thought)),
        ]
    turns.append((user("Thank you. And Bergen?"), answer("I do not know.", thought)))
    history: list[dict[str, Any]] = [SYSTEM]
    taken: list[Turn] = []
    found = []
    for i, (given, output) in enumerate(turns):
        history.append(given)
        taken.append(take_turn(family, history, output, tools=tools))
        last_user = next(t for t in reversed(taken) if t.opens_with_user)
        dropped = ("reasoning", "reasoning_content", "thinking")
        history.append(output if keep else {k: v for k, v in output.items() if k not in dropped})
        following = turns[i + 1][0] if i + 1 < len(turns) else user("Good night.")
        text, _ = text_of(family, [*history, following], tools=tools, generate=True)
        found.append(best(taken[-1], last_user, family.encode(text)))
    return " ".join(found)


def row(family: Family) -> str:
    """The family's row of the table."""
    thinks = family.label in THINKING
    cells = [
        letters(family, tools=tools, keep=keep) if thinks or not keep else "-"
        for tools in (False, True)
        for keep in (True, False)
    ]
    name = family.label + (" *" if family.stand_in else "")
    return f"| {' | '.join([name, *cells])} |"


if __name__ == "__main__":
    for each in FAMILIES:
        print(row(each))
