"""OpenAI-style message logs: dialogues of the chat completions API.

Read are JSON lines and JSON documents. A line or document is one dialogue or an array of them. A
dialogue is an array of messages, or an object with them under ``messages`` or, as tau-bench writes
it, ``traj``; ``tools`` beside them is what was offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.traces.dialogue import Message, Renderer, TextRules, dialogue_turns
from backhaul.benchmarks.traces.faults import LineFault, Reason, Skips
from backhaul.benchmarks.traces.records import (
    Record,
    decode,
    document_elements,
    elements,
    is_document,
    members,
    read_document,
    read_lines,
)


class _Dialogue(msgspec.Struct):
    messages: list[Message] | None = None
    traj: list[Message] | None = None
    tools: list[msgspec.Raw] | None = None


_OBJECT = msgspec.json.Decoder(_Dialogue)
_ARRAY = msgspec.json.Decoder(list[Message])


def read_messages(path: Path, skips: Skips, rules: TextRules) -> Iterator[Turn]:
    """Turns of every dialogue, in the file's order. Nothing says when a request was sent: all
    dialogues begin at 0, and each request follows the one before."""
    renderer = Renderer(rules)
    for number, record in enumerate(_dialogues(path, skips), 1):
        try:
            messages, tools, field = _messages(record)
            turns = dialogue_turns(
                renderer, messages, conversation=f"d{number}", tools=tools, field=field
            )
        except LineFault as fault:
            skips.take(record.line, fault)
            continue
        yield from turns


def _dialogues(path: Path, skips: Skips) -> Iterator[Record]:
    if is_document(path):
        parts = document_elements(path)
        first = next(parts, None)
        if first is not None and "role" in members(first):
            yield Record(1, read_document(path))
        elif first is not None:
            yield first
            yield from parts
        return
    for record in read_lines(path, skips):
        try:
            found = elements(record)
        except LineFault as fault:
            skips.take(record.line, fault)
            continue
        yield from [record] if found and "role" in members(found[0]) else found


def _messages(record: Record) -> tuple[list[Message], list[msgspec.Raw], str]:
    """Messages, tools, and where the messages stand. Raises ``LineFault``."""
    if record.data.lstrip()[:1] == b"[":
        return decode(_ARRAY, record), [], ""
    dialogue = decode(_OBJECT, record)
    for field in ("messages", "traj"):
        messages = getattr(dialogue, field)
        if messages is not None:
            return messages, dialogue.tools or [], field
    raise LineFault(Reason.MISSING, "messages", None, "the field is missing")
