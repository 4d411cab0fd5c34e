"""Lets an unmodified vLLM server fill ``kv_transfer_params["backhaul"]["u_end"]`` as it renders.

Hooked are the methods of vLLM's ``OnlineRenderer`` through which every request with messages goes
(chat, Responses, Anthropic messages, batches, the render server), right where the messages became
token ids and before the request becomes sampling parameters. Nothing here may fail a request: what
goes wrong is counted under its reason in ``backhaul:u_end_total``, and the request goes on.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from prometheus_client import Counter

from backhaul.connector.request_facts import (
    lost_suffix,
    message_facts,
    parsers_of,
    reasoning_kept,
    reply_reasons,
    rewrites,
    role_of,
)
from backhaul.connector.selfcheck import Surface, missing_surfaces, parameters, source_has
from backhaul.connector.u_end import (
    RecordedTemplate,
    Recorder,
    encoded_u_end,
    harmony_u_end,
    uses_templates,
)
from backhaul.render.reasons import Reason, UEnd

logger = logging.getLogger("vllm.backhaul")

SWITCH_ENV = "BACKHAUL_U_END"
"""``auto`` (default): where Backhaul is configured, and on render endpoints; ``on``: always (vLLM
warns per request where no connector is configured); ``off``: vLLM stays untouched."""

_SWITCHES = ("auto", "on", "off")
_ARGUMENT = "_backhaul_recorder"
_MODULE = "vllm.renderers.online_renderer"
_TEMPLATES = "transformers.utils.chat_template_utils"

FILLED = "filled"
SUPPLIED = "supplied"
OUTCOMES = (FILLED, SUPPLIED, *Reason)
"""Labels of the counter: U_end was filled in, the client had given one, or why there is none."""

SURFACES: tuple[Surface, ...] = (
    Surface(
        _MODULE, "OnlineRenderer.preprocess_chat", "messages to token ids",
        parameters("self", "request", "messages", "skip_mm_cache")
        & source_has("renderer.render_chat_async(", "[engine_input]"),
    ),
    Surface(
        _MODULE, "OnlineRenderer.render_chat", "chat requests",
        parameters("self", "request", "skip_mm_cache")
        & source_has("self.preprocess_chat(", "self._make_request_with_harmony("),
    ),
    Surface(
        _MODULE, "OnlineRenderer.render_responses", "Responses requests",
        parameters("self", "request", "skip_mm_cache")
        & source_has("self.preprocess_chat(", "self._render_responses_with_harmony("),
    ),
    Surface(
        _MODULE, "OnlineRenderer._make_request_with_harmony", "Harmony chat",
        parameters("self", "request") & source_has("[engine_input]"),
    ),
    Surface(
        _MODULE, "OnlineRenderer._render_responses_with_harmony", "Harmony Responses",
        parameters("self", "request") & source_has("ResponsesRenderResult("),
    ),
    Surface(
        "vllm.renderers.hf", "HfRenderer.render_messages_async", "template arguments",
        parameters("self", "messages", "params")
        & source_has("params.get_apply_chat_template_kwargs()", "_apply_chat_template_async("),
    ),
    Surface(
        "vllm.renderers.hf", "HfRenderer.__init__", "rendering thread",
        source_has("safe_apply_chat_template"),
    ),
    Surface(
        "vllm.renderers.hf", "safe_apply_chat_template", "rendering",
        parameters("model_config", "tokenizer", "conversation", "kwargs")
        & source_has("tokenizer.apply_chat_template("),
    ),
    Surface(_TEMPLATES, "_compile_jinja_template", "templates", parameters("chat_template")),
    Surface(
        _TEMPLATES, "render_jinja_template", "templates",
        source_has("_compile_jinja_template(chat_template)", "compiled_template.render("),
    ),
    Surface(
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest.to_sampling_params", "where the offset goes",
        source_has('extra_args["kv_transfer_params"] = self.kv_transfer_params'),
    ),
    Surface(
        "vllm.entrypoints.openai.responses.protocol", "ResponsesRequest.to_sampling_params",
        "where the offset goes",
        source_has('extra_args["kv_transfer_params"] = self.kv_transfer_params'),
    ),
)  # fmt: skip

_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "backhaul_recorder", default=None
)
_outbound: contextvars.ContextVar[bool] = contextvars.ContextVar("backhaul_outbound", default=False)
"""The prompt goes to the client (render endpoint), not to this process's engine."""


@functools.cache
def _switch() -> str:
    return os.environ.get(SWITCH_ENV, "auto").strip().lower() or "auto"


def register() -> None:
    """Hook vLLM's renderer now, or as soon as it is imported: processes without it never pay."""
    switch = _switch()
    if switch not in _SWITCHES:
        logger.warning(
            "%s=%r is not one of %s; U_end is not recorded",
            SWITCH_ENV,
            switch,
            ", ".join(_SWITCHES),
        )
        return
    if switch == "off":
        return
    if _MODULE in sys.modules:
        _try_install()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Installs the hooks right after vLLM's renderer module was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _try_install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _try_install() -> None:
    try:
        install()
    except Exception as error:
        logger.warning("U_end is not recorded: %s: %s", type(error).__name__, error)


def install() -> bool:
    """Hook vLLM. Returns False, after one line in the log, where a surface changed; repeating it
    does nothing."""
    import vllm
    from vllm.renderers import hf
    from vllm.renderers.online_renderer import OnlineRenderer

    if getattr(OnlineRenderer, "_backhaul_u_end", False):
        return True
    problems = missing_surfaces(SURFACES)
    if problems:
        logger.warning(
            "U_end is not recorded: vLLM %s renders differently than expected: %s",
            vllm.__version__, "; ".join(problems),
        )  # fmt: skip
        return False
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = _recorded(
        chat_template_utils._compile_jinja_template
    )
    hf.safe_apply_chat_template = _applied(hf.safe_apply_chat_template)
    hf.HfRenderer.render_messages_async = _carried(hf.HfRenderer.render_messages_async)
    renderer: Any = OnlineRenderer
    renderer.preprocess_chat = _preprocessed(renderer.preprocess_chat)
    renderer.render_chat = _directed(renderer.render_chat)
    renderer.render_responses = _directed(renderer.render_responses)
    renderer._make_request_with_harmony = _harmony(
        renderer._make_request_with_harmony, _engine_input
    )
    renderer._render_responses_with_harmony = _harmony(
        renderer._render_responses_with_harmony, lambda result: result.engine_input
    )
    renderer._backhaul_u_end = True
    _counter()
    return True


# -- the hooks, from the template outwards -----------------------------------------------------


def _recorded(compile_template: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.lru_cache(maxsize=64)
    def compiled(chat_template: str) -> RecordedTemplate:
        return RecordedTemplate(compile_template(chat_template), chat_template)

    functools.update_wrapper(compiled, compile_template)
    return compiled


def _applied(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def applied(model_config: Any, tokenizer: Any, conversation: Any, **kwargs: Any) -> Any:
        recorder = kwargs.pop(_ARGUMENT, None)
        if recorder is None:
            return apply(model_config, tokenizer, conversation, **kwargs)
        with recorder:
            result = apply(model_config, tokenizer, conversation, **kwargs)
        try:
            recorder.finish(tokenizer, result)
        except Exception as error:
            recorder.reason = Reason.ERROR
            logger.debug("U_end of a prompt is unknown", exc_info=error)
        return result

    return applied


def _carried(render: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(render)
    async def carried(self: Any, messages: Any, params: Any) -> Any:
        recorder = _recorder.get()
        if recorder is not None:
            params = _with_recorder(params, recorder)
        return await render(self, messages, params)

    return carried


def _with_recorder(params: Any, recorder: Recorder) -> Any:
    """``params`` whose template arguments carry the recorder; unchanged where that fails."""
    try:
        arguments = {**params.chat_template_kwargs, _ARGUMENT: recorder}
        return replace(params, chat_template_kwargs=arguments)
    except Exception as error:
        recorder.reason = Reason.ERROR
        logger.debug("U_end of a prompt is unknown", exc_info=error)
        return params


def _preprocessed(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(preprocess)
    async def preprocessed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        outbound = bool(kwargs.get("skip_mm_cache")) or _outbound.get()
        if not _wanted(self, request, outbound):
            return await preprocess(self, request, *args, **kwargs)
        recorder = Recorder()
        token = _recorder.set(recorder)
        try:
            result = await preprocess(self, request, *args, **kwargs)
        finally:
            _recorder.reset(token)
        _fill(
            request,
            lambda: _found(self.renderer, recorder, _engine_input(result), _said(args, kwargs)),
            lambda u_end: _facts(request, _token_ids(_engine_input(result)), u_end, recorder, self),
        )
        return result

    return preprocessed


def _directed(render: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(render)
    async def directed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        token = _outbound.set(bool(kwargs.get("skip_mm_cache")))
        try:
            return await render(self, request, *args, **kwargs)
        finally:
            _outbound.reset(token)

    return directed


def _harmony(render: Callable[..., Any], engine_input: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(render)
    def rendered(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = getattr(request, "kv_transfer_params", None)
        given = isinstance(params, dict) and params.get("prompt_token_ids") is not None
        result = render(self, request, *args, **kwargs)
        if not hasattr(result, "error") and _wanted(self, request, _outbound.get()):
            opaque = UEnd(None, Reason.OPAQUE_PROMPT)
            _fill(
                request,
                lambda: opaque if given else harmony_u_end(_token_ids(engine_input(result))),
                lambda u_end: message_facts(request),
            )
        return result

    return rendered


# -- deciding ------------------------------------------------------------------------------------


def _wanted(online_renderer: Any, request: Any, outbound: bool) -> bool:
    """Whether the request can carry an offset, and somebody may read it."""
    try:
        if not hasattr(request, "kv_transfer_params"):
            return False
        if outbound or _switch() == "on":
            return True
        config = getattr(online_renderer.renderer.config, "kv_transfer_config", None)
        return config is not None and _connects.of(config)
    except Exception:
        return False


class _Connects:
    """Whether the connector is Backhaul's, alone or among those of a MultiConnector. Found once
    for the configuration that a process has."""

    def __init__(self) -> None:
        self._config: Any = None
        self._found = False

    def of(self, config: Any) -> bool:
        if config is not self._config:
            fields = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
            texts = [str(getattr(config, field, "")).lower() for field in fields]
            self._config, self._found = config, any("backhaul" in text for text in texts)
        return self._found


_connects = _Connects()


def _engine_input(result: Any) -> Any:
    """The prompt of one request, of what rendering its messages gave."""
    return result[1][0]


def _token_ids(engine_input: Any) -> Sequence[int]:
    ids = engine_input.get("prompt_token_ids")
    return () if ids is None else ids


def _said(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The messages that ``preprocess_chat`` was given, a Responses request's instructions among
    them."""
    messages: Sequence[Any] = kwargs["messages"] if "messages" in kwargs else args[0]
    return messages


def _found(renderer: Any, recorder: Recorder, engine_input: Any, messages: Sequence[Any]) -> UEnd:
    prompt = _token_ids(engine_input)
    if not prompt:
        return UEnd(None, Reason.OPAQUE_PROMPT)
    if uses_templates(type(renderer)):  # type: ignore[arg-type]
        return recorder.u_end(prompt)
    has_system = any(role_of(message) in ("system", "developer") for message in messages)
    return encoded_u_end(renderer, prompt, engine_input.get("prompt"), has_system=has_system)


def _fill(
    request: Any, find: Callable[[], UEnd], facts: Callable[[int | None], dict[str, Any]]
) -> None:
    """Put the offset, and ``facts`` of a request with that offset, into the request's own copy of
    its parameters; count what became of the offset. What the client says stays."""
    try:
        outcome = _filled(request, find, facts)
    except Exception as error:
        outcome = Reason.ERROR
        logger.debug("U_end of a prompt is unknown", exc_info=error)
    _counted(outcome).inc()


def _filled(
    request: Any, find: Callable[[], UEnd], facts: Callable[[int | None], dict[str, Any]]
) -> str:
    params = {} if request.kv_transfer_params is None else request.kv_transfer_params
    hints = params.get("backhaul") if isinstance(params, dict) else params
    hints = {} if hints is None else hints
    if not isinstance(params, dict) or not isinstance(hints, dict):
        return Reason.MALFORMED_PARAMS
    supplied = "u_end" in hints
    found = UEnd(None) if supplied else find()
    own = {} if found.tokens is None else {"u_end": found.tokens}
    try:
        own = {**facts(found.tokens), **own}
    except Exception as error:
        logger.debug("Nothing else is known of a request", exc_info=error)
    # Not in place: the requests of a batch share one object.
    request.kv_transfer_params = {**params, "backhaul": {**own, **hints}}
    if supplied:
        return SUPPLIED
    return FILLED if found.tokens is not None else found.reason or Reason.ERROR


def _facts(
    request: Any, prompt: Sequence[int], u_end: int | None, recorder: Recorder, renderer: Any
) -> dict[str, Any]:
    """What is known of a request besides; what cannot be found out is left out."""
    parsers = parsers_of(renderer)
    tokenizer = renderer.renderer.get_tokenizer()
    suffix = prompt[u_end:] if u_end is not None else recorder.suffix
    findings: dict[str, Callable[[], Any]] = {
        "template": lambda: recorder.template or None,
        "reasoning": lambda: reply_reasons(parsers, tokenizer, suffix) if suffix else None,
        "reasoning_kept": lambda: reasoning_kept(recorder.reasoning_use, request),
        "suffix_start": lambda: None if u_end is None else lost_suffix(prompt, u_end, request),
        "rewrites": lambda: rewrites(parsers, tokenizer, request),
    }
    found = message_facts(request)
    for name, find in findings.items():
        try:
            found[name] = find()
        except Exception as error:
            logger.debug("%s of a request is unknown", name, exc_info=error)
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def _counter() -> Counter:
    counter = Counter("backhaul:u_end", "Requests with messages, by U_end's outcome.", ["outcome"])
    for outcome in OUTCOMES:
        counter.labels(outcome)
    return counter


@functools.cache
def _counted(outcome: str) -> Any:
    return _counter().labels(outcome)
