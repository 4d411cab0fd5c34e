"""vLLM's render server in this process: its real application and renderers, no engine."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

from backhaul.connector.front_end import FrontEnd

T = TypeVar("T")

NAME = "tiny"


class RenderApp:
    """Made once per template; ``template`` is text, None for the model's own."""

    def __init__(self, model: Path, template: Path | None, *arguments: str) -> None:
        given = ["--served-model-name", NAME, "--max-model-len", "8192"]
        if template is not None:
            given += ["--chat-template", str(template)]
        self._end = FrontEnd(model, [*given, *arguments])
        self.app, self.loop = self._end.app, self._end.loop
        self.online_renderer = self._end.online_renderer
        self.tokenizer = self.online_renderer.renderer.get_tokenizer()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """POST to the application; the answer's JSON."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(path, json={"model": NAME, **body})

        response = self.run(ask())
        answer: dict[str, Any] = response.json()
        assert response.status_code == 200, answer
        return answer

    def close(self) -> None:
        self._end.close()


def params_of(answer: dict[str, Any]) -> dict[str, Any]:
    """kv_transfer_params of a rendered request; vLLM 0.33 has them at top level only."""
    extra = answer["sampling_params"].get("extra_args") or {}
    params: dict[str, Any] = (
        extra.get("kv_transfer_params") or answer.get("kv_transfer_params") or {}
    )
    return params


def u_end_of(answer: dict[str, Any]) -> Any:
    """The offset in a rendered request."""
    return (params_of(answer).get("backhaul") or {}).get("u_end")
