"""Chat templates as vendors publish them, with their real tokenizers where a package has them.

Templates come from the installed ``trl`` and vLLM, and from what ``scripts/fetch_templates`` took
out of archives; tokenizers from ``tml_renderers``. Nothing of them is in this repository.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from backhaul.render.template import MarkedTemplate

FETCHED = Path(sys.prefix) / "share" / "backhaul-templates"


_FOLDERS = {"trl": "chat_templates", "vllm": "transformers_utils/chat_templates"}


def template_path(name: str) -> Path:
    """``trl/x``, ``vllm/x``, ``llama_cpp/x`` or ``xinference/x`` -> the template's file."""
    package, _, stem = name.partition("/")
    if package in _FOLDERS:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        return Path(spec.origin).parent / _FOLDERS[package] / f"{stem}.jinja"
    path = FETCHED / package / f"{stem}.jinja"
    assert path.exists(), f"{path} is missing; run scripts/fetch_templates {sys.executable}"
    return path


def template_source(name: str) -> str:
    """The template's text."""
    source = template_path(name).read_text()
    if name == DEEPSEEK_V31:
        # Its line breaks became blanks here, which would be written out between the tags.
        source = re.sub(r"(?<=[%}]\}) +(?=\{[%{])", "", source)
    return source


@functools.cache
def load(name: str) -> tuple[jinja2.Template, MarkedTemplate]:
    """The plain template, compiled as transformers does it, and the marked one."""
    from transformers.utils import chat_template_utils

    source = template_source(name)
    plain: jinja2.Template = chat_template_utils._compile_jinja_template(source)
    return plain, MarkedTemplate(source, plain.environment)


class Vocabulary:
    """A tokenizer of ``tml_renderers`` in which special tokens are recognised in text, as serving
    does; ``extra`` names special tokens that it lacks."""

    def __init__(self, name: str, extra: Sequence[str] = ()) -> None:
        import tml_renderers.tokenizers as available

        self._tokenizer = getattr(available, name)()
        ids = (self._tokenizer.encode_special(s) for s in self._tokenizer.special_tokens())
        self.special = {self._tokenizer.decode([i]): i for i in ids}
        for token in extra:
            self.special.setdefault(token, 10_000_000 + len(self.special))
        longest = sorted(self.special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.special:
                ids.append(self.special[piece])
            elif piece:
                ids += self._tokenizer.encode_ordinary(piece)
        return ids


_TOKEN_LIKE = re.compile(r"<[|\uff5c]?/?[\w:]+[|\uff5c]?>|\]<\]\w+\[>\[|\]~!?b?\[|\[e~\[|\]~b\]")
"""What looks like a special token in a template."""


@functools.cache
def vocabulary(name: str, template: str | None = None) -> Vocabulary:
    """A vocabulary; with ``template`` a stand-in that knows the template's own special tokens."""
    if template is None:
        return Vocabulary(name)
    source = template_source(template)
    found = set(_TOKEN_LIKE.findall(source))
    # Hy3 puts its special tokens together from pieces.
    found |= {
        token.replace("{}", ":opensource") for token in re.findall(r"<[^<>\s]+\{\}[^<>]?>", source)
    }
    return Vocabulary(name, sorted(found))


class Family(NamedTuple):
    """One template in one reasoning mode.

    ``vocabulary`` is a class of tml_renderers; with ``stand_in`` it is not the model's own, but has
    its special tokens.
    """

    label: str
    template: str
    vocabulary: str
    stand_in: bool = False
    kwargs: Mapping[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        return vocabulary(self.vocabulary, self.template if self.stand_in else None).encode(text)


QWEN35, QWEN3, GLM, NEMOTRON = (
    "Qwen35Tokenizer",
    "Qwen3Tokenizer",
    "GlmTokenizer",
    "Nemotron3Tokenizer",
)
DEEPSEEK_V31 = "xinference/Deepseek-V3.1"
DEEPSEEK_V4 = "llama_cpp/deepseek-ai-DeepSeek-V4"
ON = {"thinking": True}
OFF = {"enable_thinking": False}
SINGLE = {"bos_token": "", "eos_token": "<|endoftext|>"}

FAMILIES = (
    Family("Qwen3-Next-Instruct", "xinference/Qwen3-Next-Instruct", QWEN3),
    Family("Qwen3-Next-Thinking", "xinference/Qwen3-Next-Thinking", QWEN3),
    Family("Qwen3.5", "trl/qwen3_5_think", QWEN35),
    Family("Qwen3.5 thinking off", "trl/qwen3_5_think", QWEN35, kwargs=OFF),
    Family("Qwen3.6", "trl/qwen3_6", QWEN35),
    Family("Qwen3.6 thinking off", "trl/qwen3_6", QWEN35, kwargs=OFF),
    Family("Qwen3.6 preserve_thinking", "trl/qwen3_6", QWEN35, kwargs={"preserve_thinking": True}),
    Family("Qwen3.8", "trl/qwen3_8", QWEN35),
    Family("Qwen3.8 thinking off", "trl/qwen3_8", QWEN35, kwargs=OFF),
    Family("Nemotron-3-Nano", "trl/nemotron_3_nano", NEMOTRON),
    Family("Nemotron-3-Nano thinking off", "trl/nemotron_3_nano", NEMOTRON, kwargs=OFF),
    Family("Nemotron-3-Super", "trl/nemotron_3_super", NEMOTRON),
    Family("Nemotron-3-Ultra", "trl/nemotron_3_ultra", NEMOTRON),
    Family("Nemotron-3.5-Lightning", "trl/nemotron_3_5_lightning", NEMOTRON),
    Family("Kimi-K2", "llama_cpp/moonshotai-Kimi-K2", "KimiK2InstructTokenizer"),
    Family("Kimi-K2.5", "xinference/Kimi-K2.5", "KimiK25Tokenizer"),
    Family("Kimi-K3 (port)", "llama_cpp/Kimi-K3", QWEN3, True),
    Family("GLM-4.7", "xinference/GLM-4.7", GLM),
    Family("GLM-5", "xinference/glm-5", GLM),
    Family("GLM-5.2", "xinference/glm-5.2", GLM),
    Family("GLM-5.3", "xinference/glm-5.3", GLM),
    Family("MiniMax-M2", "xinference/MiniMax-M2", QWEN3, True),
    Family("MiniMax-M3", "xinference/MiniMax-M3", QWEN3, True),
    Family("DeepSeek-V3.1", DEEPSEEK_V31, "DeepSeekV31Tokenizer"),
    Family("DeepSeek-V3.1 thinking", DEEPSEEK_V31, "DeepSeekV31Tokenizer", kwargs=ON),
    Family("DeepSeek-V4 (port)", DEEPSEEK_V4, "DeepSeekV4Tokenizer"),
    Family("DeepSeek-V4 (port) thinking", DEEPSEEK_V4, "DeepSeekV4Tokenizer", kwargs=ON),
    Family("gpt-oss", "trl/gptoss", "HarmonyTokenizer"),
    Family("Granite-4.0", "llama_cpp/ibm-granite-granite-4.0", QWEN3, True),
    Family("Granite-4.1", "llama_cpp/ibm-granite-granite-4.1", QWEN3, True),
    Family("LFM2", "trl/lfm2", QWEN3, True),
    Family("LFM2.5", "trl/lfm2_2_5", QWEN3, True),
    Family("Hy3 high effort", "llama_cpp/tencent-Hy3", QWEN3, True, {"reasoning_effort": "high"}),
    Family("Ling-3.0-flash", "xinference/Ling-3.0-flash", QWEN3, True),
    Family("Seed-OSS", "xinference/seed-oss", QWEN3, True),
)
BY_LABEL = {family.label: family for family in FAMILIES}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "You are a careful assistant."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    """As vLLM hands it to a template, reasoning under both of its names; and as ``thinking``, which
    is what trl's template of gpt-oss reads."""
    names = () if reasoning is None else ("reasoning_content", "reasoning", "thinking")
    thought = dict.fromkeys(names, reasoning)
    return {"role": "assistant", "content": text, **thought}


def call(reasoning: str | None = None) -> dict[str, Any]:
    """A tool call, its arguments parsed, as vLLM hands it to a template."""
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    calls = [{"id": "functions.get_weather:0", "type": "function", "function": function}]
    return {**answer("", reasoning), "tool_calls": calls}


RESULT = {
    "role": "tool",
    "content": "7 degrees, rain",
    "name": "get_weather",
    "tool_call_id": "functions.get_weather:0",
}


def variables(family: Family, messages: list[dict[str, Any]], *, tools: bool) -> dict[str, Any]:
    return {
        "messages": messages,
        "tools": TOOLS if tools else None,
        "documents": None,
        **SINGLE,
        **family.kwargs,
    }
