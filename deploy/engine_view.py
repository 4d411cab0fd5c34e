"""Reads what a running vLLM server says of itself: /version, /v1/models, /metrics, /server_info."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from backhaul.deploy.diagnosis import EngineView
from backhaul.protocols.checkpoint import NotAsked

_NONSENSE = (ValueError, AttributeError, TypeError, LookupError, OverflowError)
"""What reading an answer of another form than expected raises."""


def read_engine(url: str, timeout_s: float) -> EngineView:
    """Never raises for an engine that is down or answers nonsense: that is in ``error``."""
    url = url.rstrip("/")
    try:
        with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
            version = _json(client, "/version").get("version", "")
            models = [dict(one) for one in _json(client, "/v1/models").get("data", [])]
            reply = client.get("/metrics")
            reply.raise_for_status()
            facts = parse_metrics(reply.text)
            failure_policy = _failure_policy(client)
    except (httpx.HTTPError, httpx.InvalidURL, *_NONSENSE) as error:
        return EngineView(url=url, error=f"cannot be read: {error or type(error).__name__}")
    return EngineView(
        url=url,
        version=str(version),
        models=tuple(str(one.get("id", "")) for one in models),
        failure_policy=failure_policy,
        **facts,
    )


def parse_metrics(text: str) -> dict[str, Any]:
    """The fields of ``EngineView`` that /metrics tells; sums over data-parallel engines."""
    cache: dict[str, str] = {}
    prompts: dict[float, float] = {}
    transports: dict[str, int] = {}
    domain, policy, has_connector, short = "", "", False, 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            has_connector |= sample.name.startswith("backhaul:")
            if sample.name == "vllm:cache_config_info":
                cache = dict(sample.labels)
            elif sample.name == "vllm:request_prompt_tokens_bucket":
                bound = float(sample.labels["le"])
                prompts[bound] = prompts.get(bound, 0.0) + sample.value
            elif sample.name == "backhaul:not_asked_total":
                below = sample.labels.get("reason") == NotAsked.BELOW_GRID
                short += sample.value if below else 0.0
            elif sample.name == "backhaul:info":
                domain = sample.labels.get("domain", "")
                policy = sample.labels.get("policy", "")
            elif sample.name == "backhaul:transport_ranks":
                name = sample.labels.get("transport", "")
                transports[name] = transports.get(name, 0) + int(sample.value)
    return {
        "cache": cache,
        "prompts": prompts,
        "short_prompts": short,
        "domain": domain,
        "policy": policy,
        "has_connector": has_connector,
        "transports": transports,
    }


def _failure_policy(client: httpx.Client) -> str:
    """The policy of vLLM's outermost connector, which is the one that counts; "" where the server
    does not show it. Its plain-text form lacks the connector's settings, and its first answer may
    take seconds, as vLLM looks at the whole machine for it."""
    try:
        config = _json(client, "/server_info?config_format=json")["vllm_config"]
        return str(config["kv_transfer_config"]["kv_load_failure_policy"])
    except (httpx.HTTPError, *_NONSENSE):
        return ""


def _json(client: httpx.Client, path: str) -> dict[str, Any]:
    reply = client.get(path)
    reply.raise_for_status()
    body = reply.json()
    if not isinstance(body, dict):
        raise ValueError(f"{path} answers no JSON object")
    return body
