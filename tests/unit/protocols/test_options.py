"""A wrong option ends the start with one line that names it and what is valid."""

from pathlib import Path
from typing import Any

import pytest

from backhaul.protocols.errors import ConfigError
from backhaul.protocols.options import FinishReason, Options, Policy, parse_options

STORE = {"store": "backhaul://127.0.0.1:7400"}


def test_defaults() -> None:
    options = parse_options(STORE)
    assert options.policy is Policy.BOTH
    assert options.publish_on == (FinishReason.STOP,)
    assert options.verify_loads


def test_values_are_converted() -> None:
    options = parse_options({**STORE, "policy": "input_end", "publish_on": ["stop", "length"]})
    assert options.policy is Policy.INPUT_END
    assert options.publish_on == (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({}, ["'store'", "missing", "backhaul://"]),
        ({"store": ""}, ["'store'", "missing"]),
        ({**STORE, "polcy": "both"}, ["'polcy'", "valid options", "policy"]),
        ({**STORE, "policy": "sometimes"}, ["'policy'", "'sometimes'", "main_sparse", "both"]),
        ({**STORE, "worker_kind": "router"}, ["'worker_kind'", "'router'", "prefill, decode"]),
        ({**STORE, "publish_on": ["stop", "crash"]}, ["'publish_on'", "stop, length, abort"]),
        ({**STORE, "lease_s": -1}, ["'lease_s'", "-1"]),
        ({**STORE, "lease_s": "long"}, ["'lease_s'", "'long'"]),
        ({**STORE, "max_pinned_fraction": 2}, ["'max_pinned_fraction'", "2"]),
        ({"store": 7}, ["'store'", "7"]),
    ],
)
def test_bad_options_are_named(raw: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(raw)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_option_is_documented() -> None:
    root = Path(__file__).parents[3]
    for text in (Options.__doc__ or "", (root / "docs" / "configuration.md").read_text()):
        for name in Options.__struct_fields__:
            assert name in text, f"option {name} is not documented"
