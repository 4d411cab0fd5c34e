"""From messages to requests: each assistant message of a dialogue is one request's output, and its
prompt is everything before it, rendered by a stated rule.

The rule is ChatML's, in tokens: a message is a header (3: start, role, line end), its text, an end
token (1) and a line end (1). The generation prefix is an assistant header, so that U_end lies 3
tokens before the prompt's end. Reasoning comes first in a reply, between ``<think>`` and
``</think>``; tool calls come last, as JSON between ``<tool_call>`` and ``</tool_call>``.

Roles say what an application would name as positions to keep: the end of what its conversations
begin with (tools and leading system messages), and of the last user's message, after which the next
one may rewrite the reply or the tool loop. A reply's text comes back as it was; its tool calls are
parsed and written again.

The arguments of a tool call are generated as they stand in the log. In later prompts they are
parsed and written again with a space after colons and commas, as chat templates do: where that
changes the text, the next prompt departs from the output there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from backhaul.benchmarks.reuse.trace import Span, Turn, length, merged
from backhaul.benchmarks.traces.faults import LineFault, Reason
from backhaul.benchmarks.traces.text import Pieces, TokenCount
from backhaul.protocols.policy import EXTRA_MAX

HEADER_TOKENS = 3
MESSAGES_MAX = 4096
"""Of one dialogue: prompts grow with each reply, so work and output grow with the square."""

TEMPLATE = "chatml rule"

_OPENING = ("system", "developer")

_END = Span("end of message", 0, 1)
_LINE_END = Span("line end", 0, 1)

Role = Annotated[str, Meta(min_length=1, max_length=64)]


class Function(msgspec.Struct):
    """The function of a tool call. ``arguments``: a string with the JSON that was generated, or, in
    logs that parsed it, an object; kept as it stands in the file."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b'""')


class ToolCall(msgspec.Struct):
    """A tool call of an assistant message."""

    function: Function


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str = "text"
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message of the chat completions API. ``reasoning`` has two names in the wild."""

    role: Role
    content: str | list[Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thoughts(self) -> str:
        """The reasoning, empty for none."""
        return self.reasoning or self.reasoning_content or ""


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """How text becomes prompts.

    Attributes:
        tokens: counts tokens.
        reasoning_kept: whether later prompts still hold a reply's reasoning. If not, it goes when
            the next user message comes, as reasoning models' templates have it.
        observations: of an agent's observations the latest so many are shown in full; None: what
            the trajectory says, else all.
    """

    tokens: TokenCount
    reasoning_kept: bool = True
    observations: int | None = None


class Form(NamedTuple):
    """A message as prompts hold it: with its reasoning, and after that was dropped."""

    role: str
    full: tuple[Span, ...]
    without_reasoning: tuple[Span, ...]


class Output(NamedTuple):
    """A message as it is generated, end token included. ``reasoning`` and ``verbatim``: leading
    tokens that are reasoning, and that come back as they are."""

    spans: tuple[Span, ...]
    reasoning: int
    verbatim: int


def message_text(message: Message, field: str) -> str:
    """The text of a message. Raises ``LineFault``, naming ``field``, for content that is no text
    and for tool calls whose arguments are no JSON object or string."""
    for i, call in enumerate(message.tool_calls or ()):
        raw = bytes(call.function.arguments)
        if raw[:1] not in (b'"', b"{") and raw != b"null":
            where = f"{field}.tool_calls[{i}].function.arguments"
            raise LineFault(Reason.WRONG_TYPE, where, raw[:40], "expected str or object")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for i, part in enumerate(message.content):
        if part.text is None:
            problem = "only text can be counted in tokens"
            raise LineFault(Reason.WRONG_TYPE, f"{field}.content[{i}].type", part.type, problem)
    return "".join(part.text or "" for part in message.content)


class Renderer:
    """Renders messages by the rule. Keeps what texts it saw, so that later ones share spans."""

    def __init__(self, rules: TextRules) -> None:
        self.rules = rules
        self.pieces = Pieces(rules.tokens)

    def tools(self, tools: Sequence[msgspec.Raw]) -> tuple[Span, ...]:
        """The tools that a request offers, before its first message."""
        if not tools:
            return ()
        text = "# Tools\n" + "\n".join(bytes(tool).decode() for tool in tools)
        return (*_header("system"), *self.pieces.spans(text), _END, _LINE_END)

    def form(self, message: Message, text: str) -> Form:
        """A message in the prompts after it."""
        thoughts = self.pieces.spans(_reasoning(message.thoughts))
        head = _header(message.role)
        rest = (*self._said(message, text, again=True), _END, _LINE_END)
        return Form(message.role, (*head, *thoughts, *rest), (*head, *rest))

    def output(self, message: Message, text: str) -> Output:
        """A message as it is generated."""
        thoughts = self.pieces.spans(_reasoning(message.thoughts))
        said = self._said(message, text, again=False)
        spans = merged((*thoughts, *said, _END))
        verbatim = length(thoughts) + length(self.pieces.spans(text))
        return Output(spans, length(thoughts), verbatim if message.tool_calls else length(spans))

    def history(self, forms: Sequence[Form]) -> tuple[Span, ...]:
        """Everything before the generation prefix, tools apart."""
        users = [i for i, form in enumerate(forms) if form.role == "user"]
        # A tool loop keeps its reasoning in any case: templates cut it at the next user message.
        kept_from = 0 if self.rules.reasoning_kept or not users else users[-1]
        spans: list[Span] = []
        for i, form in enumerate(forms):
            spans += form.full if i >= kept_from else form.without_reasoning
        return tuple(spans)

    def stable(self, preamble: tuple[Span, ...], forms: Sequence[Form]) -> tuple[int, ...]:
        """Positions that an application would want kept, in tokens of the history."""
        roles = [form.role for form in forms]
        opening = next((i for i, role in enumerate(roles) if role not in _OPENING), len(roles))
        asked = max((i + 1 for i, role in enumerate(roles) if role == "user"), default=0)
        history = [length(preamble) + length(self.history(forms[:n])) for n in (opening, asked)]
        return tuple(sorted(set(history) - {0}))

    def _said(self, message: Message, text: str, *, again: bool) -> tuple[Span, ...]:
        spans = list(self.pieces.spans(text))
        for call in message.tool_calls or ():
            spans += self.pieces.spans(_call_text(call.function, again=again))
        return tuple(spans)


def generation_prefix() -> tuple[Span, ...]:
    """What ends every prompt."""
    return _header("assistant")


def dialogue_turns(
    renderer: Renderer,
    messages: Sequence[Message],
    *,
    conversation: str,
    tools: Sequence[msgspec.Raw] = (),
    field: str = "messages",
) -> Iterator[Turn]:
    """One request per assistant message, each after the one before.

    Raises ``LineFault`` before the first turn for messages that cannot be rendered.
    """
    if len(messages) > MESSAGES_MAX:
        problem = f"give at most {MESSAGES_MAX} messages in one dialogue"
        raise LineFault(Reason.OUT_OF_RANGE, field, messages, problem)
    texts = [message_text(message, f"{field}[{i}]") for i, message in enumerate(messages)]
    return _turns(renderer, messages, texts, conversation, tools)


def _turns(
    renderer: Renderer,
    messages: Sequence[Message],
    texts: Sequence[str],
    conversation: str,
    tools: Sequence[msgspec.Raw],
) -> Iterator[Turn]:
    offers = bool(tools) or any(message.tool_calls for message in messages)
    preamble = renderer.tools(tools)
    forms: list[Form] = []
    before = ""
    for i, (message, text) in enumerate(zip(messages, texts, strict=True)):
        if message.role == "assistant":
            turn = make_turn(
                renderer,
                (*preamble, *renderer.history(forms)),
                message,
                text,
                request=f"{conversation}.{i}",
                conversation=conversation,
                after=before,
                last=messages[i - 1].role if i else "",
                following=messages[i + 1].role if i + 1 < len(messages) else "",
                tools=offers,
                boundaries=renderer.stable(preamble, forms),
            )
            before = turn.request
            yield turn
        forms.append(renderer.form(message, text))


def make_turn(
    renderer: Renderer,
    history: tuple[Span, ...],
    message: Message,
    text: str,
    *,
    request: str,
    conversation: str,
    after: str,
    last: str,
    following: str,
    tools: bool,
    boundaries: tuple[int, ...],
) -> Turn:
    """The request that ``message`` answers. ``last`` and ``following``: roles of the messages
    before and after it; "" for none."""
    output = renderer.output(message, text)
    # Until the next user's message a tool loop keeps its reasoning in any case.
    goes_on = following != "user" if following else bool(message.tool_calls)
    kept = renderer.rules.reasoning_kept or goes_on
    gone = bool(output.reasoning) and not kept
    return Turn(
        request=request,
        conversation=conversation,
        after=after,
        prompt=merged((*history, *generation_prefix())),
        output=output.spans,
        u_end=length(history),
        user_turn=last == "user",
        tools=tools,
        tool_continuation=last in ("tool", "function"),
        calls_tool=bool(message.tool_calls),
        reasoning_tokens=output.reasoning,
        reasoning_kept=kept if output.reasoning else None,
        template=TEMPLATE,
        boundaries=boundaries[-EXTRA_MAX:],
        verbatim_tokens=0 if gone else output.verbatim,
    )


def _header(role: str) -> tuple[Span, ...]:
    return (Span(f"header {role}", 0, HEADER_TOKENS),)


def _reasoning(thoughts: str) -> str:
    return f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""


def _call_text(function: Function, *, again: bool) -> str:
    raw = bytes(function.arguments)
    arguments = raw.decode()
    if raw[:1] == b'"':
        arguments = _STRING.decode(raw)
        if again:
            arguments = _rewritten(arguments)
    name = json.dumps(function.name, ensure_ascii=False)
    return f'\n<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


_STRING = msgspec.json.Decoder(str)


def _rewritten(arguments: str) -> str:
    """Arguments as a template writes them; what is no JSON, or no text then, stays as it is."""
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):
        return arguments
    return text
