"""One prefill and one decode engine, and a client that hands requests from one to the other.

The client speaks token ids, so that what a test or a demonstration replays is exactly what was
computed. Text clients go through a proxy, which is not part of this module.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from backhaul.deploy.engines import Engine, EngineSpec, StoreDaemon, pair_config
from backhaul.deploy.processes import Cluster, Progress, Service
from backhaul.protocols.options import WorkerKind

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What one engine answered.

    Attributes:
        tokens: generated token ids.
        finish_reason: as the API names it.
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that the engine did not compute, by vLLM's own count.
        backhaul: the ``kv_transfer_params["backhaul"]`` record, or None without Backhaul.
        kv_transfer_params: all of them, to be handed to the next leg.
        seconds: from the request to the whole answer.
        first_token_s: from the request to the first token; equals ``seconds`` where not streamed.
        logprobs: of every generated token: token id -> log-probability of the best ones.
    """

    tokens: tuple[int, ...]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    backhaul: Mapping[str, Any] | None
    kv_transfer_params: Mapping[str, Any] | None
    seconds: float
    first_token_s: float
    logprobs: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Both legs of one request. ``ttft_s`` is what a user waits for: prefill, then the first token
    from decode."""

    prefill: Leg
    decode: Leg

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds."""
        return self.prefill.seconds + self.decode.first_token_s


class EngineClient:
    """Talks to one engine's completions endpoint in token ids."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._http = httpx.Client(base_url=engine.url, timeout=REQUEST_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        transfer: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        stream: bool = False,
        **sampling: Any,
    ) -> Leg:
        """Run one completion, greedy unless ``sampling`` says otherwise.

        Raises ``httpx.HTTPStatusError`` where the engine refuses or fails.
        """
        body: dict[str, Any] = {
            "model": self.engine.spec.model.name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": stream,
            **sampling,
        }
        if transfer is not None:
            body["kv_transfer_params"] = dict(transfer)
        if logprobs is not None:
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        if stream:
            body["stream_options"] = {"include_usage": True}
            return self._streamed(body)
        started = time.monotonic()
        response = self._http.post("/v1/completions", json=body)
        elapsed = time.monotonic() - started
        _raise_for_status(response)
        answer = response.json()
        choice = answer["choices"][0]
        return _leg(
            tokens=choice.get("token_ids") or (),
            finish_reason=choice["finish_reason"],
            usage=answer["usage"],
            params=answer.get("kv_transfer_params"),
            seconds=elapsed,
            first_token_s=elapsed,
            logprobs=choice.get("logprobs"),
        )

    def reset_prefix_cache(self, timeout_s: float = 20.0) -> None:
        """Make the engine forget its cached blocks; stores keep theirs. The engine needs
        ``VLLM_SERVER_DEV_MODE=1`` for it. It refuses while any block is referenced, and an idle
        engine learns of what its peers have read only when it runs a step, so it is given one.

        Raises ``httpx.HTTPStatusError``, and ``TimeoutError`` where blocks stay referenced.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            response = self._http.post("/reset_prefix_cache")
            _raise_for_status(response)
            if response.json()["success"]:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.engine.spec.name} still references cached blocks after {timeout_s:g} s"
                )
            self.complete([97], max_tokens=1)
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """The engine's ``backhaul:*`` samples, labels other than ours left out, summed over
        engines: ``name{label="value"}`` -> value."""
        return scrape(self.engine.url, prefix="backhaul:")

    def _streamed(self, body: dict[str, Any]) -> Leg:
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        params: Any = None
        finish, first = None, 0.0
        started = time.monotonic()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                response.read()
            _raise_for_status(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                params = chunk.get("kv_transfer_params") or params
                for choice in chunk.get("choices", ()):
                    if choice.get("token_ids") and not tokens:
                        first = time.monotonic() - started
                    tokens += choice.get("token_ids") or ()
                    finish = choice.get("finish_reason") or finish
        return _leg(
            tokens=tokens,
            finish_reason=finish,
            usage=usage,
            params=params,
            seconds=time.monotonic() - started,
            first_token_s=first,
        )


@dataclass
class Pair:
    """A prefill and a decode engine and, with Backhaul, a store: one ``with`` block.

    ``options`` are Backhaul's; ``store_options`` are further arguments of ``backhaul store``.
    """

    model: Path
    log_dir: Path
    with_backhaul: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Sequence[str] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)
    capacity: str = "512MiB"
    on_progress: Progress | None = None
    on_interrupt: Callable[[], None] | None = None
    cores: tuple[str, str] = ("0", "1")

    def __post_init__(self) -> None:
        self.store = StoreDaemon(self.log_dir, capacity=self.capacity)
        store = self.store.uri if self.with_backhaul else None
        self.engines = {
            name: Engine(
                EngineSpec(
                    name=name,
                    model=self.model,
                    cores=cores,
                    kv_transfer_config=pair_config(
                        store, WorkerKind(name), **(self.options if store else {})
                    ),
                    args=self.engine_args,
                    env=self.engine_env,
                ),
                self.log_dir,
            )
            for name, cores in zip(("prefill", "decode"), self.cores, strict=True)
        }
        services: list[Service] = list(self.engines.values())
        if self.with_backhaul:
            services.insert(0, self.store)
        self._cluster = Cluster(
            services, on_progress=self.on_progress, on_interrupt=self.on_interrupt
        )

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        self.prefill = EngineClient(self.engines["prefill"])
        self.decode = EngineClient(self.engines["decode"])
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.prefill.close()
            self.decode.close()
        finally:
            self._cluster.__exit__(*error)

    def naming_failures(self) -> AbstractContextManager[None]:
        """See :meth:`.processes.Cluster.naming_failures`."""
        return self._cluster.naming_failures()

    def run(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        u_end: int | None = None,
        hints: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        stream: bool = True,
        **sampling: Any,
    ) -> Turn:
        """Prefill, hand over, decode. ``hints`` go to both legs, ``u_end`` to prefill only; decode
        also learns which ends prefill chose, to do the other half of the same choice."""
        first = self.prefill_leg(prompt, u_end=u_end, hints=hints)
        transfer = first.kv_transfer_params
        ours = {**_chosen_ends(first.backhaul), **(hints or {})}
        if ours:
            transfer = {**(transfer or {}), "backhaul": {**(first.backhaul or {}), **ours}}
        second = self.decode.complete(
            prompt,
            max_tokens=max_tokens,
            transfer=transfer,
            logprobs=logprobs,
            stream=stream and logprobs is None,
            **sampling,
        )
        return Turn(prefill=first, decode=second)

    def prefill_leg(
        self,
        prompt: Sequence[int],
        *,
        u_end: Any = None,
        hints: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> Leg:
        """Prefill only: one token, and the parameters that decode needs."""
        transfer: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        ours = dict(hints or {})
        if u_end is not None:
            ours["u_end"] = u_end
        if ours:
            transfer["backhaul"] = ours
        return self.prefill.complete(prompt, max_tokens=1, transfer=transfer, logprobs=logprobs)


def _chosen_ends(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """The hint that names what prefill chose; none where its record does not say."""
    chosen = (record or {}).get("chosen") or {}
    return {"ends": chosen["ends"]} if "ends" in chosen else {}


def scrape(url: str, prefix: str) -> dict[str, float]:
    """Samples under ``<url>/metrics`` whose name starts with ``prefix``, summed over vLLM's own
    labels; the key keeps any other label: ``name{label=value}``."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=10.0, follow_redirects=True).text
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(prefix) or sample.name.endswith("_created"):
                continue
            own = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            labels = "{" + ",".join(f"{k}={v}" for k, v in sorted(own.items())) + "}" if own else ""
            key = sample.name + labels
            samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_success:
        raise httpx.HTTPStatusError(
            f"{response.request.url} answered {response.status_code}: {response.text[:500]}",
            request=response.request,
            response=response,
        )


def _leg(
    *,
    tokens: Sequence[int],
    finish_reason: str | None,
    usage: Mapping[str, Any],
    params: Any,
    seconds: float,
    first_token_s: float,
    logprobs: Mapping[str, Any] | None = None,
) -> Leg:
    details = usage.get("prompt_tokens_details") or {}
    best: tuple[Mapping[int, float], ...] = ()
    if logprobs:
        best = tuple(
            {int(token.removeprefix("token_id:")): value for token, value in top.items()}
            for top in logprobs["top_logprobs"]
        )
    return Leg(
        tokens=tuple(tokens),
        finish_reason=finish_reason,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        backhaul=(params or {}).get("backhaul"),
        kv_transfer_params=params,
        seconds=seconds,
        first_token_s=first_token_s,
        logprobs=best,
    )
