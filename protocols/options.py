"""The connector's options: ``kv_connector_extra_config``, checked once at start."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Policy as Policy

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_BYTES_MAX = 1 << 40
"""More is a slip of the keyboard, which the allocator would find in a worse place."""
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class FinishReason(enum.StrEnum):
    """How a request ended, as vLLM's scheduler sees it. A stop *string* is found by the front end,
    which then aborts the request, so it counts as ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class NoPath(enum.StrEnum):
    """What becomes of a D_end that nobody can load."""

    DISABLE = "disable"
    """It is neither pinned nor sent."""
    REPORT = "report"
    """It is published, for whoever comes later, and reported."""


class WorkerKind(enum.StrEnum):
    """Which part of requests an engine serves."""

    PREFILL = "prefill"
    """A conversation's next prompt begins here."""
    DECODE = "decode"
    """Prompts arrive computed by a prefill worker, so the next one does not begin here."""
    BOTH = "both"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one engine. Defaults are right for a P/D pair on a local network.

    Attributes:
        store: where the store is, e.g. ``backhaul://127.0.0.1:7400``.
        policy: which ends this engine publishes.
        publish_on: finish reasons whose D_end is published.
        no_path: what becomes of D_end while no engine that loads is known to the store, or the
            store cannot be reached: not kept, or published and reported.
        worker_kind: what this engine serves; who only decodes is no way back for others. Unset: by
            the role of a connector beside this one in ``MultiConnector`` that hands prompts over,
            else by what the requests show.
        publish_prompt_end: also publish P_end. Unset: only where the store has to carry
            prefill -> decode (no other connector does) or the policy is ``main_sparse``.
        stream_ahead: send finished attention blocks while the request still decodes.
        stream_min_bytes: shortest piece worth sending ahead, bytes per rank.
        max_pinned_fraction: share of the KV blocks that pins may hold at most.
        min_load_tokens: shortest gain over the local hit that is worth a load.
        lookup_timeout_s: longest a request waits for the catalog before it goes on without.
        publication_wait_s: longest a lookup waits for a publication that was announced.
        load_timeout_s: longest a load may take before the request is recomputed.
        publish_timeout_s: longest one publication job may take before it is given up.
        lease_s: how long a lookup's answer keeps its checkpoints from being evicted.
        verify_loads: compare every loaded object with its checksum.
        transfer_threads: threads per worker for loads, and as many for publications.
        convert_buffer_bytes: host memory per worker through which checkpoints of engines with
            another tensor-parallel size or other pipeline stages are converted; 0: they are not
            used.
        request_log: file to which every request's record is appended as a JSON line; "" for none.
        request_log_tokens: also the token ids of prompt and output, which are what users wrote;
            ``backhaul explain`` then names the token at which two histories part.
    """

    store: str
    policy: Policy = Policy.BOTH
    publish_on: tuple[FinishReason, ...] = (FinishReason.STOP,)
    no_path: NoPath = NoPath.REPORT
    worker_kind: WorkerKind | None = None
    publish_prompt_end: bool | None = None
    stream_ahead: bool = True
    stream_min_bytes: Annotated[int, msgspec.Meta(ge=1, le=_BYTES_MAX)] = 1 << 20
    max_pinned_fraction: _Fraction = 0.5
    min_load_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1
    lookup_timeout_s: _Seconds = 0.25
    publication_wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.1
    load_timeout_s: _Seconds = 10.0
    publish_timeout_s: _Seconds = 30.0
    lease_s: _Seconds = 30.0
    verify_loads: bool = True
    transfer_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    convert_buffer_bytes: Annotated[int, msgspec.Meta(ge=0, le=_BYTES_MAX)] = 64 << 20
    request_log: str = ""
    request_log_tokens: bool = False


def parse_options(raw: Mapping[str, Any]) -> Options:
    """Check ``kv_connector_extra_config``. Raises ``ConfigError`` with one line that names the
    option, its value and what is valid."""
    known = Options.__struct_fields__
    for name in raw:
        if name not in known:
            raise ConfigError(
                f"unknown option {_shown(name)} in kv_connector_extra_config; valid options: "
                + ", ".join(sorted(known))
            )
    if not raw.get("store"):
        raise ConfigError(
            "option 'store' is missing in kv_connector_extra_config; "
            'give the store\'s address, e.g. "store": "backhaul://127.0.0.1:7400"'
        )
    for name, value in raw.items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and not _is_text(text):
                raise ConfigError(
                    f"option {name!r}: {_shown(text)} holds a part of a character, as no "
                    "name does: write it in UTF-8"
                )
    try:
        return msgspec.convert(dict(raw), Options)
    except msgspec.ValidationError as error:
        message = str(error)
        name = message.rpartition("$.")[2].rstrip("`").split("[")[0] if "$." in message else ""
        value = f" (got {_shown(raw[name])})" if name in raw else ""
        valid = {
            "policy": ", ".join(Policy),
            "no_path": ", ".join(NoPath),
            "worker_kind": ", ".join(WorkerKind),
            "publish_on": "a list of " + ", ".join(FinishReason),
        }.get(name)
        hint = f"; valid: {valid}" if valid else ""
        raise ConfigError(
            f"option {name!r}: {_shortened(message.partition(' - at')[0])}{value}{hint}"
        ) from None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_SHOWN_MAX = 120


def _shown(value: object) -> str:
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
