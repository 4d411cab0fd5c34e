"""Finds one request's U_end while vLLM renders it.

A ``Recorder`` travels from the request's coroutine into the thread that renders: as one more chat
template argument, which is taken out again before the template sees it. In that thread, and only
while vLLM applies a chat template for a recorded request, templates compiled by transformers are
rendered with marks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, Self

import jinja2

from backhaul.render import encoders
from backhaul.render.reasoning import ReasoningRules, ReasoningUse
from backhaul.render.reasons import Reason, UEnd
from backhaul.render.template import MarkedTemplate, Rendering
from backhaul.render.tokens import u_end_tokens

_SUFFIX_CHARS_CACHED_MAX = 1024
"""A generation-only suffix is a header of some ten tokens; longer ones are not worth keeping."""


class _Active(threading.local):
    """What this thread renders for at the moment."""

    recorder: Recorder | None = None


_active = _Active()


class Recorder:
    """What was seen of one request's render. Used by one thread at a time.

    Args:
        reasoning: find out ``reasoning_use``.

    Attributes:
        template: names the template that was rendered; "" where none was.
        reasoning_use: what that template does with the reasoning of earlier replies.
    """

    __slots__ = ("_reasoning", "_rendering", "reason", "reasoning_use", "suffix", "template")

    def __init__(self, *, reasoning: bool = False) -> None:
        self.reason: Reason | None = Reason.OPAQUE_PROMPT
        self.suffix: Sequence[int] = ()
        self.template = ""
        self.reasoning_use: ReasoningUse | None = None
        self._reasoning = reasoning
        self._rendering: Rendering | None = None

    def __enter__(self) -> Self:
        """Templates that this thread renders inside are rendered with marks."""
        _active.recorder = self
        return self

    def __exit__(self, *error: object) -> None:
        _active.recorder = None

    def render(self, template: RecordedTemplate, variables: dict[str, Any]) -> str:
        """Render once, with marks where the template allows it."""
        self._rendering, self.reason = None, Reason.ERROR
        self.template = template.digest
        if self._reasoning and template.rules is not None:
            with contextlib.suppress(Exception):
                self.reasoning_use = template.rules.use(variables)
        if template.marked is not None:
            self.reason = template.marked.reason
            try:
                self._rendering = template.marked.render(**variables)
            except Exception:
                # The template refuses its input, and does so again below; or the fault is ours.
                self.reason = Reason.ERROR
        if self._rendering is None:
            return template.plain.render(**variables)
        self.reason = self._rendering.reason
        return self._rendering.text

    def finish(self, tokenizer: Any, result: object) -> None:
        """Tokenise the suffix.

        Args:
            tokenizer: the one that tokenises the prompt.
            result: what vLLM got from applying the chat template, text or token ids.
        """
        rendering = self._rendering
        if rendering is None or rendering.u_end is None:
            return
        suffix = rendering.text[rendering.u_end :]
        if result is not rendering.text and isinstance(result, str) and result != rendering.text:
            # With continue_final_message the end of the last message was cut off.
            cut = not suffix and rendering.text.startswith(result)
            if not cut and not (suffix and result.endswith(suffix)):
                self.reason = Reason.REWRITTEN
                return
        self.suffix = encode(tokenizer, suffix)

    def u_end(self, prompt: Sequence[int]) -> UEnd:
        """U_end in tokens of the prompt as the engine gets it."""
        if self.reason is not None:
            return UEnd(None, self.reason)
        return u_end_tokens(prompt, self.suffix)


class RecordedTemplate:
    """Stands for a template compiled by transformers: renders as it does, and records if asked."""

    def __init__(self, plain: jinja2.Template, source: str) -> None:
        self.plain = plain
        self.marked: MarkedTemplate | None = None
        self.rules: ReasoningRules | None = None
        self.digest = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()[:16]
        with contextlib.suppress(Exception):
            self.marked = MarkedTemplate(source, plain.environment)
        with contextlib.suppress(Exception):
            self.rules = ReasoningRules(plain.environment.parse(source))

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # Asked for before __init__ ran, by copy or pickle.
            raise AttributeError(name)
        return getattr(self.plain, name)

    def render(self, *args: Any, **variables: Any) -> str:
        """As ``jinja2.Template.render``."""
        recorder = _active.recorder
        if recorder is None or args:
            return self.plain.render(*args, **variables)
        return recorder.render(self, variables)


def encode(tokenizer: Any, text: str) -> Sequence[int]:
    """Token ids of generation-only text, without special tokens added around it."""
    if not text:
        return ()
    if len(text) > _SUFFIX_CHARS_CACHED_MAX:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    return _encode(tokenizer, text)


@functools.lru_cache(maxsize=256)
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@functools.cache
def uses_templates(renderer: Any) -> bool:
    """Whether a renderer of vLLM of this class applies chat templates."""
    return any(cls.__name__ == "HfRenderer" for cls in renderer.__mro__)


def encoded_u_end(
    renderer: Any, prompt: Sequence[int], text: str | None, *, has_system: bool = False
) -> UEnd:
    """U_end of a prompt from a renderer of vLLM that uses no template.

    Args:
        renderer: vLLM's renderer.
        prompt: token ids.
        text: the prompt's text where the renderer made one.
        has_system: the conversation has a system message.
    """
    names = {cls.__name__ for cls in type(renderer).__mro__}
    tokenizer = renderer.get_tokenizer()
    if names & {"DeepseekV32Renderer", "DeepseekV4Renderer"}:
        if text is None:
            return UEnd(None, Reason.OPAQUE_PROMPT)
        suffix = encoders.deepseek_suffix(text)
        if suffix is None:
            return UEnd(None, Reason.TAIL_MISMATCH)
        return u_end_tokens(prompt, encode(tokenizer, suffix))
    if "KimiK3Renderer" in names:
        return _kimi_k3(tokenizer, prompt)
    if "MistralRenderer" in names:
        old = getattr(tokenizer, "version", 0) < encoders.MISTRAL_SYSTEM_STAYS
        tools = tokenizer.get_vocab().get(encoders.MISTRAL_TOOLS)
        return encoders.mistral_u_end(prompt, tools, moves_system=has_system and old)
    return UEnd(None, Reason.UNKNOWN_RENDERER)


def _kimi_k3(tokenizer: Any, prompt: Sequence[int]) -> UEnd:
    end = tokenizer.convert_tokens_to_ids(encoders.KIMI_K3_END_OF_MESSAGE)
    headers = [list(encode(tokenizer, text)) for text in encoders.KIMI_K3_HEADERS]
    found = encoders.kimi_k3_u_end(prompt, end, headers)
    if found.tokens is None:
        return found
    start = found.tokens - 1
    while start > 0 and prompt[start - 1] != end:
        start -= 1
    opening = tokenizer.decode(list(prompt[start : start + encoders.KIMI_K3_OPENING_TOKENS_MAX]))
    return encoders.kimi_k3_after_control_text(found, opening)


def harmony_u_end(prompt: Sequence[int]) -> UEnd:
    """U_end of a prompt that vLLM rendered with the Harmony library."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    header = get_encoding().encode(encoders.HARMONY_HEADER, allowed_special="all")
    return u_end_tokens(prompt, header)
