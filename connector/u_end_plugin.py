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
from collections.abc import Awaitable, Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from prometheus_client import Counter

from backhaul.connector.hints import PROMPT_TAIL
from backhaul.connector.request_facts import (
    lost_suffix,
    message_facts,
    parsers_of,
    reasoning_kept,
    reply_reasons,
    rewrites,
    role_of,
    turn_fact,
)
from backhaul.connector.selfcheck import Surface, missing_surfaces, parameters, source_has
from backhaul.connector.u_end import (
    RecordedTemplate,
    Recorder,
    encoded_u_end,
    harmony_u_end,
    uses_templates,
)
from backhaul.protocols.metrics import API_SERVER, ENGINE_PREFIX
from backhaul.protocols.policy import Policy
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
        "vllm.entrypoints.openai.parser.harmony_utils", "get_encoding", "Harmony's tokens",
        parameters() & source_has("load_harmony_encoding("),
    ),
    Surface(
        "vllm.renderers.hf", "HfRenderer.render_messages_async", "template arguments",
        parameters("self", "messages", "params")
        & source_has("params.get_apply_chat_template_kwargs()", "_apply_chat_template_async("),
    ),
    Surface(
        "vllm.renderers.params", "ChatParams.get_apply_chat_template_kwargs", "template arguments",
        parameters("self") & source_has("return merge_kwargs("),
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
    for owner, name, hook in hooks():
        setattr(owner, name, hook(getattr(owner, name)))
    OnlineRenderer._backhaul_u_end = True
    _counter()
    return True


def hooks() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What is hooked: where it is, its name, and what to put around it. The original is the
    hooked one's ``__wrapped__``."""
    from transformers.utils import chat_template_utils
    from vllm.renderers import hf, params
    from vllm.renderers.online_renderer import OnlineRenderer as Online

    in_responses = functools.partial(_harmony, engine_input=lambda result: result.engine_input)
    return [
        (chat_template_utils, "_compile_jinja_template", _recorded),
        (hf, "safe_apply_chat_template", _applied),
        (params.ChatParams, "get_apply_chat_template_kwargs", _carried),
        (Online, "preprocess_chat", _preprocessed),
        (Online, "render_chat", _directed),
        (Online, "render_responses", _directed),
        (
            Online,
            "_make_request_with_harmony",
            functools.partial(_harmony, engine_input=_engine_input),
        ),
        (Online, "_render_responses_with_harmony", in_responses),
    ]


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
        recorder: Recorder | None = kwargs.pop(_ARGUMENT, None)
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


def _carried(arguments: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(arguments)
    def carried(self: Any) -> dict[str, Any]:
        found = arguments(self)  # A dictionary of this call's own.
        recorder = _recorder.get()
        if recorder is not None:
            found[_ARGUMENT] = recorder
        return found

    return carried


def _preprocessed(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(preprocess)
    async def preprocessed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = _wanted(self, request, bool(kwargs.get("skip_mm_cache")) or _outbound.get())
        if wanted is None:
            return await preprocess(self, request, *args, **kwargs)
        recorder = Recorder(reasoning=wanted.decides)
        # Other renderers would hand the recorder to their encoders.
        applies = uses_templates(type(self.renderer))  # type: ignore[arg-type]
        token = _recorder.set(recorder if applies else None)
        try:
            result = await preprocess(self, request, *args, **kwargs)
        finally:
            _recorder.reset(token)
        _fill(_Chat(self, request, wanted.decides, result, recorder, args, kwargs))
        return result

    return preprocessed


def _directed(render: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(render)
    def directed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Not a coroutine of its own: most requests go to this process's engine.
        made = render(self, request, *args, **kwargs)
        return _outwards(made) if kwargs.get("skip_mm_cache") else made

    return directed


async def _outwards(render: Awaitable[Any]) -> Any:
    token = _outbound.set(True)
    try:
        return await render
    finally:
        _outbound.reset(token)


def _harmony(render: Callable[..., Any], engine_input: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(render)
    def rendered(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = getattr(request, "kv_transfer_params", None)
        given = isinstance(params, dict) and params.get("prompt_token_ids") is not None
        result = render(self, request, *args, **kwargs)
        wanted = _wanted(self, request, _outbound.get())
        if wanted is not None and not hasattr(result, "error"):
            _fill(_Harmony(request, wanted.decides, engine_input, result, given))
        return result

    return rendered


# -- deciding ------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """Somebody may read an offset.

    ``decides``: under a policy that chooses by what else is known of the request, or may.
    """

    decides: bool


_WANTED, _DECIDES = _Wanted(decides=False), _Wanted(decides=True)
_DECIDING = (Policy.AUTO, Policy.BOUNDARIES)


def _wanted(online_renderer: Any, request: Any, outbound: bool) -> _Wanted | None:
    """Whether the request can carry an offset, and somebody may read it; None: neither."""
    try:
        params = request.kv_transfer_params
        if outbound:
            return _DECIDES  # Whose engine gets it is not known, nor its policy.
        wanted = _readers.of(getattr(online_renderer.renderer.config, "kv_transfer_config", None))
    except Exception:
        return None
    if wanted is None:
        return _DECIDES if _switch() == "on" else None
    hints = params.get("backhaul") if isinstance(params, dict) else None
    own = hints.get("policy") if isinstance(hints, dict) else None
    return _DECIDES if own in _DECIDING else wanted


class _Readers:
    """What Backhaul's connector in vLLM's configuration wants, alone or among those of a
    MultiConnector. Found once for the configuration that a process has."""

    def __init__(self) -> None:
        self._config: Any = None
        self._found: _Wanted | None = None

    def of(self, config: Any) -> _Wanted | None:
        if config is not self._config:
            fields = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
            texts = [str(getattr(config, field, "")).lower() for field in fields]
            self._config = config
            self._found = _WANTED if any("backhaul" in text for text in texts) else None
            if self._found and _policies(getattr(config, fields[-1], None)) & {*_DECIDING}:
                self._found = _DECIDES
        return self._found


_readers = _Readers()


def _policies(options: Any) -> set[str]:
    """Policies named anywhere in a connector's options."""
    if isinstance(options, list):
        return set().union(*map(_policies, options))
    if not isinstance(options, dict):
        return set()
    named = options.get("policy")
    own = {named} if isinstance(named, str) else set()
    return own.union(*map(_policies, options.values()))


def _engine_input(result: Any) -> Any:
    """The prompt of one request, of what rendering its messages gave."""
    return result[1][0]


def _token_ids(engine_input: Any) -> Sequence[int]:
    ids = engine_input.get("prompt_token_ids")
    return () if ids is None else ids


class _Rendered(Protocol):
    """A request whose messages vLLM has rendered."""

    request: Any

    def u_end(self) -> UEnd:
        """Find U_end; the client gave none."""

    def facts(self, u_end: int | None) -> dict[str, Any]:
        """What is known of the request with that U_end besides."""

    def ids(self) -> Sequence[int]:
        """The prompt."""


class _Chat:
    """Of ``preprocess_chat``, which was called with ``args`` and ``kwargs``."""

    __slots__ = ("_args", "_decides", "_kwargs", "_online", "_recorder", "_result", "request")

    def __init__(
        self,
        online: Any,
        request: Any,
        decides: bool,
        result: Any,
        recorder: Recorder,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.request = request
        self._online, self._decides, self._result = online, decides, result
        self._recorder, self._args, self._kwargs = recorder, args, kwargs

    def u_end(self) -> UEnd:
        prompt = self.ids()
        if not prompt:
            return UEnd(None, Reason.OPAQUE_PROMPT)
        renderer = self._online.renderer
        if uses_templates(type(renderer)):  # type: ignore[arg-type]
            return self._recorder.u_end(prompt)
        # A Responses request's instructions are among them.
        messages = self._kwargs["messages"] if "messages" in self._kwargs else self._args[0]
        has_system = any(role_of(message) in ("system", "developer") for message in messages)
        text = _engine_input(self._result).get("prompt")
        return encoded_u_end(renderer, prompt, text, has_system=has_system)

    def facts(self, u_end: int | None) -> dict[str, Any]:
        if not self._decides:
            return turn_fact(self.request)
        return _facts(self.request, self.ids(), u_end, self._recorder, self._online)

    def ids(self) -> Sequence[int]:
        return _token_ids(_engine_input(self._result))


class _Harmony:
    """Of the Harmony library. ``given``: its token ids came with the request."""

    def __init__(
        self,
        request: Any,
        decides: bool,
        engine_input: Callable[[Any], Any],
        result: Any,
        given: bool,
    ) -> None:
        self.request = request
        self._decides, self._given = decides, given
        self._engine_input, self._result = engine_input, result

    def u_end(self) -> UEnd:
        return UEnd(None, Reason.OPAQUE_PROMPT) if self._given else harmony_u_end(self.ids())

    def facts(self, u_end: int | None) -> dict[str, Any]:
        return message_facts(self.request) if self._decides else turn_fact(self.request)

    def ids(self) -> Sequence[int]:
        return _token_ids(self._engine_input(self._result))


def _fill(rendered: _Rendered) -> None:
    """Put the offset, and what else is known, into the request's own copy of its parameters; count
    what became of the offset. What the client says stays."""
    try:
        outcome = _filled(rendered)
    except Exception as error:
        outcome = Reason.ERROR
        logger.debug("U_end of a prompt is unknown", exc_info=error)
    _counted(outcome).inc()


def _filled(rendered: _Rendered) -> str:
    request = rendered.request
    params = request.kv_transfer_params
    hints = None if params is None else params
    if isinstance(params, dict):
        hints = params.get("backhaul")
    if hints is not None and not isinstance(hints, dict):
        return Reason.MALFORMED_PARAMS
    supplied = hints is not None and "u_end" in hints
    found = _NOT_ASKED if supplied else rendered.u_end()
    try:
        own = rendered.facts(found.tokens)
    except Exception as error:
        own = {}
        logger.debug("Nothing else is known of a request", exc_info=error)
    if found.tokens is not None:
        own["u_end"] = found.tokens
    if hints:
        own |= hints | _asked(hints, rendered.ids)
    # Not in place: the requests of a batch share one object.
    request.kv_transfer_params = {**params, "backhaul": own} if params else {"backhaul": own}
    if supplied:
        return SUPPLIED
    return FILLED if found.tokens is not None else found.reason or Reason.ERROR


_NOT_ASKED = UEnd(None)


def _asked(hints: dict[str, Any], prompt: Callable[[], Sequence[int]]) -> dict[str, Any]:
    """What the connector needs to tell the prompt's ids: another one may drop the last of them
    before it sees the request."""
    if hints.get("return_prompt_token_ids") is not True:
        return {}
    ids = prompt()
    return {"prompt_length": len(ids), "prompt_tail": list(ids[-PROMPT_TAIL:])}


def _facts(
    request: Any, prompt: Sequence[int], u_end: int | None, recorder: Recorder, renderer: Any
) -> dict[str, Any]:
    """What is known of a request besides; what cannot be found out is left out."""
    parsers = functools.partial(parsers_of, renderer, request)
    tokenizer = renderer.renderer.get_tokenizer()
    suffix = prompt[u_end:] if u_end is not None else recorder.suffix
    findings: dict[str, Callable[[], Any]] = {
        "template": lambda: recorder.template or None,
        "reasoning": lambda: reply_reasons(parsers(), tokenizer, suffix) if suffix else None,
        "reasoning_kept": lambda: reasoning_kept(recorder.reasoning_use, request),
        "suffix_start": lambda: None if u_end is None else lost_suffix(prompt, u_end, request),
        "rewrites": lambda: rewrites(parsers(), tokenizer, request),
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
    metric = API_SERVER["u_end"]
    labels = [label.name for label in metric.labels]
    counter = Counter(f"{ENGINE_PREFIX}u_end", metric.help, labels)
    for outcome in OUTCOMES:
        counter.labels(outcome)
    return counter


@functools.cache
def _counted(outcome: str) -> Any:
    return _counter().labels(outcome)
