"""vLLM's front end in this process, without an engine: what a server does with a request up to its
sampling parameters."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FrontEnd:
    """The application of vLLM's render server, made as its command makes it.

    Attributes:
        app: the ASGI application.
        loop: the event loop to run it in.
        online_renderer: what it renders with, as an API server does.

    Args:
        model: the model's directory; its weights are not read.
        arguments: of ``vllm serve``.
    """

    def __init__(self, model: Path, arguments: Sequence[str] = ()) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import VllmConfig
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.render.app_state import init_render_app_state
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = _cli_args().make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(["--model", str(model), *arguments])
        config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
        self.loop = asyncio.new_event_loop()
        self.app = build_app(args, ("render",))
        self.loop.run_until_complete(init_render_app_state(config, self.app.state, args))
        self.online_renderer = self.app.state.online_renderer

    def close(self) -> None:
        """Stop the loop."""
        self.loop.close()


class HookedAndPlain:
    """A front end whose requests are rendered with the plugin's hooks or without, for what the
    hooks cost.

    Args:
        model: see ``FrontEnd``.
        policy: of the connector that the requests are for.
        arguments: see ``FrontEnd``.
    """

    def __init__(self, model: Path, policy: str, arguments: Sequence[str] = ()) -> None:
        from backhaul.connector import u_end_plugin

        if not u_end_plugin.install():
            raise RuntimeError("vLLM renders differently than expected: see the log")
        hooked = [(owner, name, getattr(owner, name)) for owner, name, _ in u_end_plugin.hooks()]
        plain = [(owner, name, function.__wrapped__) for owner, name, function in hooked]
        self._functions = {True: hooked, False: plain}
        self._end = FrontEnd(model, arguments)
        self._renderer = self._end.online_renderer.renderer
        self._renderer.config.kv_transfer_config = SimpleNamespace(
            kv_connector="BackhaulConnector", kv_connector_extra_config={"policy": policy}
        )

    def switch(self, on: bool, *, inline: bool) -> None:
        """Put the hooks in, or the functions that they are around. ``inline``: templates are
        rendered in the caller's thread and not in the renderer's."""
        from vllm.renderers import hf
        from vllm.utils.async_utils import make_async

        for owner, name, function in self._functions[on]:
            setattr(owner, name, function)
        # As the renderer's __init__ does it.
        self._renderer._apply_chat_template_async = make_async(
            hf.safe_apply_chat_template,
            executor=_Inline() if inline else self._renderer._executor,
        )

    def request(self, body: dict[str, Any]) -> Any:
        """A chat request, checked as a server checks it."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest(**body)

    def render(self, request: Any) -> None:
        """Messages to text, text to token ids, and to sampling parameters."""

        async def rendered() -> None:
            await self._end.online_renderer.render_chat(request)
            request.to_sampling_params(1, {})

        self._end.loop.run_until_complete(rendered())

    def close(self) -> None:
        """Leave the hooks in, as they were found."""
        self.switch(True, inline=False)
        self._end.close()


class _Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


def _cli_args() -> Any:
    """vLLM 0.33 moved the module."""
    names = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
    found = next(n for n in names if importlib.util.find_spec(n) is not None)
    return importlib.import_module(found)
