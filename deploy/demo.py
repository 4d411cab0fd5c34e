"""The main job: one multi-turn conversation through a real prefill/decode pair, with and without
Backhaul, and a table of what each turn reused."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from backhaul.deploy.arguments import writing
from backhaul.deploy.console import Console, plain_table
from backhaul.deploy.conversation import Conversation, filler, load_encoder
from backhaul.deploy.logs import log_folder
from backhaul.deploy.pair import Pair, Turn
from backhaul.deploy.progress import StartProgress, say_stopping
from backhaul.deploy.terminal import format_age
from backhaul.deploy.tiny_model import TOKEN_IDS, build_tiny_model

END_TOKEN = TOKEN_IDS["<|im_end|>"]

KIND_NAMES = {
    "decode_end": "D_end",
    "input_end": "U_end",
    "shared_prefix": "junction",
    "prompt_end": "P_end",
}


@dataclass(frozen=True)
class Plan:
    """One turn: who speaks, and how long the text and the reply are (tokens)."""

    label: str
    role: str
    tokens: int
    reply: int
    rewrites_previous: bool = False
    other_worker: bool = False


PLAN = (
    Plan("user asks", "user", 1800, 260),
    Plan("tool result", "tool", 400, 260),
    Plan("user follows up", "user", 300, 260),
    Plan("user, other worker", "user", 300, 260, other_worker=True),
    Plan("user, reply rewritten", "user", 300, 120, rewrites_previous=True, other_worker=True),
)
"""The last turn shows the fallback: the client stored another reply than the one generated, so
D_end cannot match and U_end of the turn before is the deepest end left. ``other_worker``: the turn
meets a prefill worker that never saw the conversation, as a router that balances load would have
it; the pair's only prefill worker forgets its own cache for that, in both arms."""

PAUSE_S = 1.0
"""Between a reply and the next turn, where a tool runs or a person types. In both arms."""


@dataclass(frozen=True)
class TurnReport:
    """One row of the table. Lengths in tokens, times in seconds."""

    turn: int
    label: str
    prompt_tokens: int
    found_locally: int
    loaded: int
    loaded_from: str
    recomputed: int
    prefill_s: float
    ttft_s: float
    reply_tokens: int


Script = tuple[tuple[int, ...], ...]
"""The prompts of the first arm, so that the second one replays the very same."""


def run_demo(
    console: Console, *, cache_dir: Path, output: Path | None = None, keep_logs: bool = False
) -> None:
    """Run both arms and print the tables. Raises ``ServiceError`` where a service fails."""
    started = time.monotonic()
    model = build_tiny_model(cache_dir / "tiny-hybrid")
    with log_folder("backhaul-demo-", keep=keep_logs) as logs:
        console.print(f"Model {model}, logs in {logs}", soft_wrap=True)
        console.rule("with Backhaul")
        script, with_backhaul = _arm(console, model, logs / "with", None)
        console.rule("without Backhaul: the same prompts, NIXL only")
        _, without = _arm(console, model, logs / "without", script)
    console.print(turn_table("With Backhaul", with_backhaul))
    console.print(turn_table("Without Backhaul", without))
    console.print(ratio_table(with_backhaul, without))
    if output is not None:
        result = {
            "with": [asdict(r) for r in with_backhaul],
            "without": [asdict(r) for r in without],
        }
        with writing("--output", output):
            output.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"Wrote {output}")
    console.print(f"Both arms took {format_age(time.monotonic() - started)}")


def _arm(
    console: Console, model: Path, logs: Path, script: Script | None
) -> tuple[Script, list[TurnReport]]:
    progress = StartProgress()
    pair = Pair(
        model,
        logs,
        with_backhaul=script is None,
        on_progress=progress.update,
        on_interrupt=say_stopping,
        engine_env={"VLLM_SERVER_DEV_MODE": "1"},  # for EngineClient.reset_prefix_cache
    )
    with contextlib.ExitStack() as stack:
        with progress.shown(console):
            stack.enter_context(pair)
        stack.enter_context(pair.naming_failures())
        console.print(f"engines healthy after {time.monotonic() - progress.started:.0f} s")
        _warm_up(pair)
        if script is None:
            return play(console, pair, model)
        return script, _replay(console, pair, script)


def _warm_up(pair: Pair) -> None:
    """First requests pay for connections and kernels on either arm."""
    prompt = [97 + i % 26 for i in range(300)]
    pair.run(prompt, max_tokens=4)
    pair.run(prompt[::-1], max_tokens=4)


def play(console: Console, pair: Pair, model: Path) -> tuple[Script, list[TurnReport]]:
    """Run ``PLAN`` on a pair whose engines run with ``VLLM_SERVER_DEV_MODE=1``."""
    conversation = Conversation(load_encoder(model), filler(7, 200))
    prompts, reports = [], []
    before_reply: list[int] = []
    for number, plan in enumerate(PLAN, 1):
        if plan.rewrites_previous:
            conversation.history = before_reply
            conversation.add_rewritten_reply(filler(99, 80))
        text = filler(number, plan.tokens)
        if plan.role == "tool":
            conversation.add_tool_result(text)
        else:
            conversation.add_user(text)
        prompt, u_end = conversation.prompt(), conversation.u_end
        prompts.append(tuple(prompt))
        turn = _ask(pair, plan, prompt, u_end)
        reports.append(_report(number, plan, turn))
        console.print(f"  turn {number} ({plan.label}): {turn.ttft_s:.2f} s to the first token")
        before_reply = list(conversation.history)
        conversation.add_reply(prompt, turn.decode.tokens)
    return tuple(prompts), reports


def _replay(console: Console, pair: Pair, script: Script) -> list[TurnReport]:
    reports = []
    for number, (plan, prompt) in enumerate(zip(PLAN, script, strict=True), 1):
        turn = _ask(pair, plan, prompt, None)
        reports.append(_report(number, plan, turn))
        console.print(f"  turn {number} ({plan.label}): {turn.ttft_s:.2f} s to the first token")
    return reports


def _ask(pair: Pair, plan: Plan, prompt: Sequence[int], u_end: int | None) -> Turn:
    """One turn whose reply ends by itself after ``plan.reply`` tokens: the end token is forbidden
    before and all but certain after."""
    time.sleep(PAUSE_S)
    if plan.other_worker:
        pair.prefill.reset_prefix_cache()
    return pair.run(
        prompt,
        max_tokens=plan.reply + 8,
        u_end=u_end,
        min_tokens=plan.reply,
        logit_bias={str(END_TOKEN): 100.0},
    )


def _report(number: int, plan: Plan, turn: Turn) -> TurnReport:
    leg = turn.prefill
    record = leg.backhaul or {}
    loaded = int(record.get("loaded_tokens", 0))
    selected = record.get("selected")
    return TurnReport(
        turn=number,
        label=plan.label,
        prompt_tokens=leg.prompt_tokens,
        found_locally=leg.cached_tokens - loaded,
        loaded=loaded,
        loaded_from=KIND_NAMES.get(selected["kind"], "?") if selected else "",
        recomputed=leg.prompt_tokens - leg.cached_tokens,
        prefill_s=leg.seconds,
        ttft_s=turn.ttft_s,
        reply_tokens=len(turn.decode.tokens),
    )


def turn_table(title: str, reports: Sequence[TurnReport]) -> Table:
    """One row per turn."""
    table = plain_table(title)
    table.add_column("turn", overflow="fold")
    for name in ("prompt", "found\nlocally", "loaded", "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("loaded\nfrom", no_wrap=True)
    for name in ("prefill s", "TTFT s"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in reports:
        table.add_row(
            f"{r.turn} {r.label}",
            *(f"{n:,}" for n in (r.prompt_tokens, r.found_locally, r.loaded, r.recomputed)),
            r.loaded_from or "-",
            f"{r.prefill_s:.2f}",
            f"{r.ttft_s:.2f}",
        )
    return table


def ratio_table(with_backhaul: Sequence[TurnReport], without: Sequence[TurnReport]) -> Table:
    """Without over with: how many times longer each turn takes without Backhaul."""
    table = plain_table("Without / with")
    table.add_column("turn", overflow="fold")
    for name in ("recomputed\ntokens", "prefill\ntime", "time to\nfirst token"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = []
    for a, b in zip(with_backhaul, without, strict=True):
        row = (
            b.recomputed / max(a.recomputed, 1), b.prefill_s / a.prefill_s, b.ttft_s / a.ttft_s,
        )  # fmt: skip
        rows.append(row)
        table.add_row(f"{a.turn} {a.label}", *(f"{x:.2f}x" for x in row))
    later = rows[1:]
    table.add_section()
    medians = [statistics.median(column) for column in zip(*later, strict=True)]
    table.add_row("median of later turns", *(f"{x:.2f}x" for x in medians))
    return table
