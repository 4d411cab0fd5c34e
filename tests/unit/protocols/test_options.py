"""A wrong option ends the start with one line that names it and what is valid."""

import math
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


ODD: list[Any] = [
    None, True, 0, -1, 2**70, -(2**70), 0.5, math.nan, math.inf, -math.inf, 1e308, "", "x", "10",
    "\ud800", "a\nb\x1b[31m", "x" * 100_000, [], ["stop"], ["\udfff"], [["stop"]], ["stop"] * 5000,
    {}, {"a": 1}, b"x", (1,), object(),
]  # fmt: skip


@pytest.mark.parametrize("name", Options.__struct_fields__)
def test_any_value_is_taken_or_named_in_one_line(name: str) -> None:
    refused = 0
    for value in ODD:
        try:
            taken = getattr(parse_options(STORE | {name: value}), name)
        except ConfigError as error:
            refused += 1
            message = str(error)
            assert f"'{name}'" in message
            assert message.isprintable() and len(message) < 500, message
        else:
            assert taken == taken, f"{value} was taken"  # NaN is not
    assert refused > len(ODD) // 2
    assert parse_options(STORE | {name: getattr(parse_options(STORE), name)})


@pytest.mark.parametrize("name", ["polcy", "x" * 100_000, "a\nb", "\ud800", 5, None, ("store",)])
def test_any_other_key_is_named_in_one_line(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown option .* valid options: .*store") as error:
        parse_options({**STORE, name: 1})
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_every_option_is_documented() -> None:
    root = Path(__file__).parents[3]
    for text in (Options.__doc__ or "", (root / "docs" / "configuration.md").read_text()):
        for name in Options.__struct_fields__:
            assert name in text, f"option {name} is not documented"
