"""Workloads of the reuse experiment: generators of turns, the same ones for both kinds of arms.

A conversation's history is a list of spans. What the next prompt keeps of a reply makes the
workloads differ::

    full_replay        the whole reply, reasoning included, token for token
    reasoning_dropped  the reply without its reasoning: rewritten from the reply's first token on
    tool_loop          rounds of tool calls with reasoning; the next user message drops the rounds'
                       reasoning, as templates of reasoning models do
    branching          several continuations of one history (retries, samples, edits of the reply)
    shared_system      many short conversations under one system prompt
    mixed              all of the above at once, arriving at random

Sizes are drawn around the given means, so that ends fall on and beside boundaries alike. Equal
parameters and seed give equal turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from backhaul.benchmarks.reuse.trace import Span, Turn, first, length, merged
from backhaul.protocols.errors import ConfigError

SIZE_MAX = 10_000_000
"""Of each size: more turns, tokens or seconds are a slip of the keyboard."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of every workload. Lengths in tokens, means of uniform draws of +-50 %.

    Attributes:
        conversations: how many of them.
        turns: requests of one conversation; of a tool loop: user messages.
        system: system prompt and tools; one for all conversations in ``shared_system`` and
            ``mixed``, else one of its own for each.
        user: a user's message, with role tokens.
        reasoning: of each reply.
        reply: of each reply after its reasoning, end token included.
        tool_result: a tool's answer, with role tokens.
        tool_rounds: tool calls per user message.
        branches: continuations of each history.
        generation_prefix: tokens after ``u_end`` (assistant header, reasoning control token).
        arrival_s: mean time between the beginnings of conversations; 0: all at once.
        reply_s: nominal time from a request to the end of its reply; the pauses come on top.
        think_s: mean time between a reply and the next user message.
        tool_s: mean time that a tool takes.
    """

    conversations: int = 8
    turns: int = 5
    system: int = 1000
    user: int = 200
    reasoning: int = 400
    reply: int = 200
    tool_result: int = 300
    tool_rounds: int = 3
    branches: int = 3
    generation_prefix: int = 5
    arrival_s: float = 0.0
    reply_s: float = 5.0
    think_s: float = 5.0
    tool_s: float = 0.5

    def __post_init__(self) -> None:
        needed = ("conversations", "turns", "user", "reply", "generation_prefix")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = int(name in needed)
            if not least <= value <= SIZE_MAX:  # also refuses NaN
                raise ConfigError(f"{name} is {value}: it must be {least} ... {SIZE_MAX:,}")

    def scaled(self, factor: float) -> Sizes:
        """The same with all lengths multiplied, for small test models and large real ones."""
        lengths = ("system", "user", "reasoning", "reply", "tool_result")
        changed = {name: max(round(getattr(self, name) * factor), 1) for name in lengths}
        return msgspec.structs.replace(self, **changed)


class _Conversation:
    """Builds one conversation's turns. The history is what a prompt begins with."""

    def __init__(self, name: str, sizes: Sizes, rng: random.Random, *, shared_system: str = ""):
        self.name = name
        self.sizes = sizes
        self._rng = rng
        self._requests = 0
        self.after = ""
        self.start_s = 0.0
        self.history: list[Span] = []
        self._shared = sizes.system if shared_system else 0
        if sizes.system:
            source = shared_system or f"{name}/system"
            # One system prompt for all must not depend on what was drawn before.
            tokens = sizes.system if shared_system else self._draw(sizes.system)
            self.history.append(Span(source, 0, tokens))

    def _draw(self, mean: float) -> int:
        return max(self._rng.randint(round(mean * 0.5), round(mean * 1.5)), 1)

    def _pause(self, mean: float) -> float:
        return self._rng.expovariate(1 / mean) if mean > 0 else 0.0

    def say(self, kind: str, mean: int) -> None:
        """Append a message of others to the history."""
        self.history.append(Span(f"{self.name}/{kind}{self._requests}", 0, self._draw(mean)))

    def request(
        self,
        *,
        tool_continuation: bool = False,
        calls_tool: bool = False,
        tools: bool = False,
        reasoning_kept: bool = True,
        boundaries: tuple[int, ...] = (),
        after: str | None = None,
    ) -> Turn:
        """One request on the history; ``after`` None: after the latest one. Where the reasoning
        is dropped the generation prefix goes with it. The application knows the end of the system
        prompt that its conversations share, and ``boundaries``."""
        sizes = self.sizes
        name = f"{self.name}/{self._requests}"
        u_end = sum(span.tokens for span in self.history)
        reasoning = self._draw(sizes.reasoning) if sizes.reasoning else 0
        output = reasoning + self._draw(sizes.reply)
        pause = self._pause(sizes.tool_s if tool_continuation else sizes.think_s)
        previous = self.after if after is None else after
        turn = Turn(
            request=name,
            conversation=self.name,
            arrival_s=self.start_s + (sizes.reply_s + pause if previous else 0.0),
            after=previous,
            prompt=merged([*self.history, Span("generation-prefix", 0, sizes.generation_prefix)]),
            output=(Span(f"{name}/output", 0, output),),
            u_end=u_end,
            user_turn=not tool_continuation,
            tools=tools,
            tool_continuation=tool_continuation,
            calls_tool=calls_tool,
            reasoning_tokens=reasoning,
            reasoning_kept=reasoning_kept,
            template="generated",
            boundaries=tuple(sorted({self._shared, *boundaries} - {0})),
            suffix_start=None if reasoning_kept else u_end,
            verbatim_tokens=output if reasoning_kept else 0,
        )
        self._requests += 1
        self.after = name
        self.start_s = turn.arrival_s
        return turn

    def keep(self, turn: Turn, *, reasoning: bool = True, changed: bool = False) -> None:
        """Append a reply to the history, as the next prompt has it. Without its reasoning the
        generation prefix is another one too, so the history departs from ``u_end`` on."""
        if reasoning:
            self.history = [*turn.prompt, *turn.output]
            if changed:  # an edited reply: its second half is someone else's
                kept = turn.prompt_tokens + turn.output_tokens // 2
                self.history = [*first(self.history, kept)]
                self.history.append(Span(f"{turn.request}/edit{self._requests}", 0, 20))
            return
        said = Span(turn.output[0].source, turn.reasoning_tokens, turn.output_tokens)
        self.history = [*first(turn.prompt, turn.u_end or 0), Span("assistant-header", 0, 3), said]


def _replay(conversation: _Conversation, *, kept: bool) -> Iterator[Turn]:
    for _ in range(conversation.sizes.turns):
        conversation.say("user", conversation.sizes.user)
        turn = conversation.request(reasoning_kept=kept)
        yield turn
        conversation.keep(turn, reasoning=kept)


def _full_replay(conversation: _Conversation) -> Iterator[Turn]:
    return _replay(conversation, kept=True)


def _reasoning_dropped(conversation: _Conversation) -> Iterator[Turn]:
    return _replay(conversation, kept=False)


def _tool_loop(conversation: _Conversation) -> Iterator[Turn]:
    """Within a loop the reasoning stays; the next user message drops that of the whole loop."""
    sizes = conversation.sizes
    for _ in range(sizes.turns):
        conversation.say("user", sizes.user)
        cleaned = [*conversation.history]
        asked = length(cleaned)  # what the next user message leaves of the loop's prompts
        for step in range(sizes.tool_rounds + 1):
            last = step == sizes.tool_rounds
            turn = conversation.request(
                tool_continuation=step > 0,
                calls_tool=not last,
                tools=True,
                reasoning_kept=not last,
                boundaries=(asked,),
            )
            yield turn
            said = Span(turn.output[0].source, turn.reasoning_tokens, turn.output_tokens)
            cleaned += [Span("assistant-header", 0, 3), said]
            conversation.keep(turn)
            if not last:
                conversation.say("tool", sizes.tool_result)
                cleaned.append(conversation.history[-1])
        conversation.history = cleaned


def _branching(conversation: _Conversation) -> Iterator[Turn]:
    """Every history is continued ``branches`` times: by other user messages, the last one after
    an edited reply. The conversation goes on from the first branch."""
    sizes = conversation.sizes
    conversation.say("user", sizes.user)
    trunk = conversation.request()
    yield trunk
    for _ in range(max(sizes.turns - 1, 0)):
        branches: list[Turn] = []
        for branch in range(max(sizes.branches, 1)):
            edited = branch > 0 and branch == sizes.branches - 1
            conversation.start_s = trunk.arrival_s
            conversation.keep(trunk, changed=edited)
            conversation.say("user", sizes.user)
            branches.append(conversation.request(after=trunk.request))
            yield branches[-1]
        trunk = branches[0]


_Generator = Callable[[_Conversation], Iterator[Turn]]

_GENERATORS: dict[str, _Generator] = {
    "full_replay": _full_replay,
    "reasoning_dropped": _reasoning_dropped,
    "tool_loop": _tool_loop,
    "branching": _branching,
    "shared_system": _full_replay,
}

WORKLOADS = (*_GENERATORS, "mixed")
"""Names of all workloads."""


def workload(name: str, sizes: Sizes | None = None, *, seed: int = 0) -> list[Turn]:
    """The turns of a workload, in the order in which they may be sent at the earliest.

    ``arrival_s`` counts from the workload's beginning as if replies took ``reply_s``; who replays
    it waits for ``after`` besides. Raises ``ConfigError`` for an unknown name.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    sizes = sizes or Sizes()
    rng = random.Random(f"{name}/{seed}")
    kinds = list(_GENERATORS)
    turns: list[Turn] = []
    start = 0.0
    for number in range(sizes.conversations):
        kind = kinds[number % len(kinds)] if name == "mixed" else name
        shares = name == "mixed" or kind == "shared_system"
        conversation = _Conversation(
            f"{kind}-{seed}-{number}",
            sizes,
            rng,
            shared_system=f"{name}-{seed}/system" if shares else "",
        )
        conversation.start_s = start
        turns += _GENERATORS[kind](conversation)
        start += rng.expovariate(1 / sizes.arrival_s) if sizes.arrival_s > 0 else 0.0
    return sorted(turns, key=lambda turn: turn.arrival_s)  # stable: a predecessor comes first
