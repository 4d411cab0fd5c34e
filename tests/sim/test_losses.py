"""What a reply loses on its way through a client and a vendor's template: U_end takes over, no
answer changes, and the report says so.

Prompts and replies are the vendors' templates' and tokenizers' own. The reply is what the model
said; the next prompt is what the template makes of what the client sends back. Each kind of loss
runs with a reply that comes back as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import BLOCK as B
from harness import Pair, new_uri
from sim_kit import eventually

sys.path.append(str(Path(__file__).parents[1] / "unit" / "render"))

from reachability import STOPS, THINKING, text_of
from real_templates import (
    BY_LABEL,
    RESULT,
    Family,
    answer,
    call,
    load,
    user,
    variables,
)
from typer.testing import CliRunner

from backhaul.benchmarks.reuse.record import EndFate, RequestResult
from backhaul.benchmarks.reuse.served import read_logs, served_results
from backhaul.deploy.cli import app
from backhaul.render.tokens import u_end_tokens


def asked(kind: str, *, lossy: bool) -> list[dict[str, Any]]:
    """A beginning that no other dialogue has, or one would resume at what another left."""
    how = "exact" if lossy else "brief"
    return [{"role": "system", "content": f"{kind}: be {how}."}, user("Weather in Oslo, please?")]


LONG = " Then look out of the window, once more at noon, and tell all who ask what you saw there."


def called(label: str, call_id: str | None = None, **arguments: Any) -> dict[str, Any]:
    """A tool call. What is lost comes before a long argument, so that D_end lies behind it."""
    message = call("Look it up." if label in THINKING else None)
    (made,) = message["tool_calls"]
    made["function"]["arguments"] = {"city": "Oslo", **arguments, "note": LONG.strip()}
    made["id"] = call_id or made["id"]
    return message


@dataclass(frozen=True)
class Loss:
    """A reply that comes back otherwise than it was said.

    Attributes:
        label: the family.
        output: what the client got, as it comes back.
        model: what the model wrote where the template writes ``template``.
        returned: what the client sends back, if not ``output``.
        cut: the reply ended at its limit.
        seam: it was sampled in other tokens than those that its text has.
    """

    label: str
    output: dict[str, Any]
    model: str = ""
    template: str = ""
    returned: Mapping[str, Any] | None = None
    cut: bool = False
    seam: str = ""
    following: dict[str, Any] = field(default_factory=lambda: user("Thank you."))


NEAR = {"near": {"place": "sea"}}
PLAIN = answer("Rain." + LONG)
KINDS = {
    "booleans": Loss(
        "Qwen3.5", called("Qwen3.5", exact=True), "true", "True", following=RESULT
    ),
    "JSON spacing": Loss(
        "Qwen3-Next-Instruct", called("Qwen3-Next-Instruct", **NEAR),
        '{"place":"sea"}', '{"place": "sea"}', following=RESULT,
    ),
    "trimmed white space": Loss("Qwen3.8 thinking off", PLAIN, "  Rain.", "Rain."),
    "renamed call ids": Loss(
        "Kimi-K2.5", called("Kimi-K2.5"), returned=called("Kimi-K2.5", "call_7"),
        following=RESULT | {"tool_call_id": "call_7"},
    ),
    "byte-pair seams": Loss("Qwen3-Next-Instruct", PLAIN, seam="window"),
    "no end token": Loss("Qwen3.8 thinking off", PLAIN, cut=True),
}  # fmt: skip


def prompt_of(family: Family, messages: Sequence[Any], *, tools: bool) -> tuple[list[int], int]:
    """Token ids, and U_end by the render that is served."""
    plain, marked = load(family.template)
    values = variables(family, list(messages), tools=tools) | {"add_generation_prompt": True}
    rendering = marked.render(**values)
    assert rendering is not None and rendering.u_end is not None
    assert rendering.text == plain.render(**values)
    prompt = family.encode(rendering.text)
    found = u_end_tokens(prompt, family.encode(rendering.text[rendering.u_end :]))
    assert found.tokens is not None
    return prompt, found.tokens


def reply_of(loss: Loss, history: list[Any], *, lossy: bool, tools: bool) -> list[int]:
    """Tokens that the model sampled, its end token left out."""
    family = BY_LABEL[loss.label]
    before, _ = text_of(family, history, tools=tools, generate=True)
    whole, _ = text_of(family, [*history, loss.output], tools=tools, generate=False)
    assert whole.startswith(before)
    text = whole[len(before) :].rstrip("\n")
    for stop in STOPS:
        text = text.removesuffix(stop)
    if lossy and loss.model:
        assert text.count(loss.template) == 1
        text = text.replace(loss.template, loss.model)
    if not lossy or not loss.seam:
        return family.encode(text)
    start = text.index(loss.seam)
    return next(
        pieces
        for cut in range(start + 1, start + len(loss.seam))
        if (pieces := [*family.encode(text[:cut]), *family.encode(text[cut:])])
        != family.encode(text)
    )


def shifted(ids: Sequence[int]) -> list[int]:
    """The simulated model has a stop token of its own."""
    return [token + 10 for token in ids]


@dataclass(frozen=True)
class Cluster:
    """A prefill and a decode engine, and a prefill engine that sees second turns only."""

    pair: Pair
    prefill: Any
    decode: Any
    other: Any

    def dialogue(self, kind: str, *, lossy: bool) -> tuple[Any, int, int]:
        """Two turns; the second one on the other prefill worker. What it finished with, and the
        boundaries of the first turn's U_end and D_end."""
        loss = KINDS[kind]
        family, tools = BY_LABEL[loss.label], loss.following["role"] == "tool"
        name, history = f"{kind} {lossy}", asked(kind, lossy=lossy)
        prompt, u_end = prompt_of(family, history, tools=tools)
        says = shifted(reply_of(loss, history, lossy=lossy, tools=tools))
        cut = loss.cut and lossy
        self.legs(self.prefill, shifted(prompt), u_end, f"{name} a", says, cut=cut)
        back = loss.returned if lossy and loss.returned else loss.output
        following = loss.following if lossy or not loss.returned else RESULT
        again, next_u_end = prompt_of(family, [*history, back, following], tools=tools)
        done = self.legs(self.other, shifted(again), next_u_end, f"{name} b", [])
        return done, u_end // B * B, (len(prompt) + len(says)) // B * B

    def legs(
        self, prefill: Any, prompt: list[int], u_end: int, name: str,
        says: Sequence[int], *, cut: bool = False,
    ) -> Any:  # fmt: skip
        """Both legs of a request, as the proxy makes them; prefill's end."""
        first = prefill.submit(
            prompt[:-1], 1, stops=False, u_end=u_end, name=f"{name}-0000000a",
            params={"do_remote_decode": True}, handed_over=prompt[-1],
        )  # fmt: skip
        prefill.drain()
        prefill.check_idle()
        self.decode.run(
            prompt, len(says) + (not cut), stops=not cut, says=says, name=f"{name}-0000000b",
            params={"do_remote_prefill": True},
        )  # fmt: skip
        self.decode.check_idle()
        return prefill.finished[first]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "requests.jsonl"


@pytest.fixture(scope="module")
def cluster(log: Path) -> Iterator[Cluster]:
    pair = Pair(new_uri())
    engines = (
        pair.engine(
            name=name, sibling=kind, options={"request_log": str(log)}, max_tokens=4096,
            num_blocks=1024, budget=512,
        )
        for name, kind in (
            ("prefill", "kv_producer"), ("decode", "kv_consumer"), ("other", "kv_producer")
        )
    )  # fmt: skip
    yield Cluster(pair, *engines)
    pair.check_idle()  # every answer was that of a cold run, every byte its prefix's own
    pair.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_falls_back_to_the_input_and_is_in_the_report(
    cluster: Cluster, log: Path, kind: str, tmp_path: Path
) -> None:
    lost, u_end, d_end = cluster.dialogue(kind, lossy=True)
    kept, kept_u_end, kept_d_end = cluster.dialogue(kind, lossy=False)
    assert 0 < u_end < d_end and 0 < kept_u_end < kept_d_end
    selected = [one.params["backhaul"]["selected"] for one in (lost, kept)]
    assert [(one["kind"], one["boundary"]) for one in selected] == [
        ("input_end", u_end),
        ("decode_end", kept_d_end),
    ]
    mine = tmp_path / "requests.jsonl"

    def logged() -> int:
        lines = [line for line in log.read_bytes().splitlines(True) if kind.encode() in line]
        mine.write_bytes(b"".join(lines))
        return len(lines)

    eventually(lambda: logged() == 8)
    of_lost, of_kept = (
        line
        for line in served_results(read_logs([mine]))
        if isinstance(line, RequestResult) and line.relation.continuation
    )
    cut = KINDS[kind].cut
    gone = EndFate.NOT_KEPT if cut else EndFate.REWRITTEN
    assert (of_lost.decode_end, of_lost.input_end) == (gone, EndFate.SELECTED)
    assert (of_kept.decode_end, of_kept.selected_boundary) == (EndFate.SELECTED, kept_d_end)
    report = tmp_path / "report"
    said = CliRunner().invoke(app, ["report", str(mine), "--output", str(report)])
    assert said.exit_code == 0, said.output
    answers = row_of((report / "report.md").read_text(), "input_end_fallback_rate")
    assert answers["input_end_fallback_rate"] == "100.0%"
    assert answers["D_end missed"].startswith("50.0%")
    assert answers["of which rewritten"] == ("0.0%" if cut else "100.0%")


def row_of(page: str, column: str) -> dict[str, str]:
    """The only row of the table that has this column."""
    lines = page.splitlines()
    at = next(i for i, line in enumerate(lines) if f"| {column} |" in line)
    heads, row = ([cell.strip() for cell in lines[i].split("|")] for i in (at, at + 2))
    return dict(zip(heads, row, strict=True))
