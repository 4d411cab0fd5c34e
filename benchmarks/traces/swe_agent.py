"""SWE-agent trajectories (``.traj``): one JSON document per run.

``history`` holds every message in full. What the model was sent may be less: SWE-agent can show
only the last n observations and replace older ones by a line that counts theirs. That happens to
one more observation at each step, so each prompt departs from the one before where it happens. n
is taken from the rules, else from the run's recorded configuration. Runs that recorded the prompt
of each step (``query``) are taken at that word instead. Where an observation will be replaced at
the next step, the position before it is one that an application would want kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backhaul.benchmarks.reuse.trace import Turn, length
from backhaul.benchmarks.traces.dialogue import (
    MESSAGES_MAX,
    Message,
    Renderer,
    TextRules,
    make_turn,
    message_text,
)
from backhaul.benchmarks.traces.faults import LineFault, Reason, Skips
from backhaul.benchmarks.traces.records import decode, document_elements

OBSERVATIONS_MAX = 1 << 31

_OMITTED = "Old environment output: ({lines} lines omitted)"


class _Entry(Message, kw_only=True):
    agent: str = ""
    message_type: str = ""
    is_demo: bool = False


class _Step(msgspec.Struct):
    query: list[Message] | None = None


class _Run(msgspec.Struct):
    history: list[_Entry]
    trajectory: list[_Step] = []
    replay_config: str | dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Run)


def read_swe_agent(path: Path, skips: Skips, rules: TextRules) -> Iterator[Turn]:
    """Turns of one or several runs. Agents that share a history each have their conversation."""
    renderer = Renderer(rules)
    for number, record in enumerate(document_elements(path), 1):
        try:
            run = decode(_DECODER, record)
            if len(run.history) > MESSAGES_MAX:
                problem = f"give at most {MESSAGES_MAX} messages in one run"
                raise LineFault(Reason.OUT_OF_RANGE, "history", run.history, problem)
            texts = [message_text(e, f"history[{i}]") for i, e in enumerate(run.history)]
            queries = _queries(run)
        except LineFault as fault:
            skips.take(record.line, fault)
            continue
        kept = rules.observations or _configured(run.replay_config)
        for agent in dict.fromkeys(entry.agent for entry in run.history):
            own = [i for i, entry in enumerate(run.history) if entry.agent == agent]
            yield from _turns(
                renderer,
                [run.history[i] for i in own],
                [texts[i] for i in own],
                conversation=f"{path.stem[:64]}.{number}" + (f".{agent[:64]}" if agent else ""),
                kept=kept,
                queries=queries,
            )


def _turns(
    renderer: Renderer,
    entries: Sequence[_Entry],
    texts: Sequence[str],
    *,
    conversation: str,
    kept: int | None,
    queries: Sequence[tuple[Sequence[Message], Sequence[str]]],
) -> Iterator[Turn]:
    replies = [i for i, entry in enumerate(entries) if entry.role == "assistant"]
    recorded = len(queries) == len(replies)
    tools = any(entry.tool_calls for entry in entries)
    full = [renderer.form(entry, text) for entry, text in zip(entries, texts, strict=True)]
    short = [
        renderer.form(entry, _OMITTED.format(lines=len(text.splitlines())))
        for entry, text in zip(entries, texts, strict=True)
    ]
    before = ""
    for step, i in enumerate(replies):
        replaced = 0
        if recorded:
            forms = [renderer.form(*one) for one in zip(*queries[step], strict=True)]
        else:
            omitted = _omitted(entries[:i], kept)
            forms = [short[k] if k in omitted else full[k] for k in range(i)]
            soon = min(_omitted(entries[: i + 2], kept) - omitted, default=0)
            replaced = length(renderer.history(forms[:soon]))
        stable = {*renderer.stable((), forms), replaced} - {0}
        turn = make_turn(
            renderer,
            renderer.history(forms),
            entries[i],
            texts[i],
            request=f"{conversation}.{i}",
            conversation=conversation,
            after=before,
            last=forms[-1].role if forms else "",
            following=entries[i + 1].role if i + 1 < len(entries) else "",
            tools=tools,
            boundaries=tuple(sorted(stable)),
        )
        before = turn.request
        yield turn


def _omitted(entries: Sequence[_Entry], kept: int | None) -> set[int]:
    """Observations that are not shown: all but the first, which states the task, and the last."""
    if kept is None:
        return set()
    typed = any(entry.message_type for entry in entries)
    observations = [
        i
        for i, entry in enumerate(entries)
        if not entry.is_demo
        and (entry.message_type == "observation" if typed else entry.role in ("user", "tool"))
    ]
    return set(observations[1 : max(0, len(observations) - kept)])


def _queries(run: _Run) -> list[tuple[list[Message], list[str]]]:
    """The recorded prompts, or none unless every step has one. Raises ``LineFault``."""
    queries = []
    for i, step in enumerate(run.trajectory):
        if not step.query:
            return []
        where = f"trajectory[{i}].query"
        if len(step.query) > MESSAGES_MAX:
            problem = f"give at most {MESSAGES_MAX} messages"
            raise LineFault(Reason.OUT_OF_RANGE, where, step.query, problem)
        texts = [message_text(m, f"{where}[{k}]") for k, m in enumerate(step.query)]
        queries.append((step.query, texts))
    return queries


def _configured(config: str | dict[str, Any] | None) -> int | None:
    """n of the history processor that keeps the last n observations; None where there is none."""
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return None
    agent = (config or {}).get("agent")
    processors = agent.get("history_processors") if isinstance(agent, dict) else None
    for processor in processors if isinstance(processors, list) else ():
        if isinstance(processor, dict) and processor.get("type") == "last_n_observations":
            n = processor.get("n")
            if isinstance(n, int) and 0 < n < OBSERVATIONS_MAX:
                return n
    return None
