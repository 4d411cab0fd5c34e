"""The three-valued evaluation against Jinja itself."""

from __future__ import annotations

import itertools
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from backhaul.render.ternary import UNKNOWN, evaluate, truth

ENVIRONMENT = jinja2.Environment()
VALUES: dict[str, tuple[Any, ...]] = {
    "flag": (False, True),
    "x": (False, True),
    "y": ("", "a", None),
}


def parse(text: str) -> nodes.Expr:
    output = ENVIRONMENT.parse("{{ " + text + " }}").body[0]
    assert isinstance(output, nodes.Output)
    return output.nodes[0]


def value_of(text: str, **known: Any) -> Any:
    def lookup(node: nodes.Expr) -> Any:
        return known.get(node.name, UNKNOWN) if isinstance(node, nodes.Name) else UNKNOWN

    return evaluate(parse(text), lookup)


ATOMS = st.sampled_from(["flag", "x", "y", "true", "false", "'a'", "none"])
TESTS = st.sampled_from(
    ["true", "false", "none", "defined", "undefined", "not defined", "sameas true", "eq('a')"]
)


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: f"({p[0]} and {p[1]})"),
        pairs.map(lambda p: f"({p[0]} or {p[1]})"),
        pairs.map(lambda p: f"({p[0]} == {p[1]})"),
        pairs.map(lambda p: f"({p[0]} != {p[1]})"),
        inner.map(lambda e: f"(not {e})"),
        st.tuples(inner, TESTS).map(lambda p: f"({p[0]} is {p[1]})"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|default({p[1]}))"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|default({p[1]}, true))"),
    )


@settings(deadline=None, max_examples=100)
@given(st.recursive(ATOMS, combine, max_leaves=8), st.booleans())
def test_a_known_value_holds_whatever_the_unknowns_are(text: str, flag: bool) -> None:
    found = value_of(text, flag=flag)
    if truth(found) is None:
        return
    compiled = ENVIRONMENT.compile_expression(text, undefined_to_none=False)
    for x, y in itertools.product(VALUES["x"], VALUES["y"]):
        assert bool(compiled(flag=flag, x=x, y=y)) is truth(found), text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("flag and x", False),
        ("flag or x", UNKNOWN),
        ("not flag", True),
        ("flag is defined", True),
        ("not flag is defined", False),
        ("flag is undefined", False),
        ("flag|default(true)", False),
        ("flag|default(true, true)", True),
        ("flag == true", False),
        ("flag is true and x is defined", False),
        ("x == 1", UNKNOWN),
        ("flag ~ 'a'", UNKNOWN),
        ("f(flag)", UNKNOWN),
        ("true if x else true", True),
        ("true if x else false", UNKNOWN),
        ("'a' if flag", ""),
    ],
)
def test_decided_where_the_flag_is_off(text: str, value: Any) -> None:
    found = value_of(text, flag=False)
    assert found is value or (value is not UNKNOWN and found == value)


def test_a_truth_can_be_known_without_the_value() -> None:
    assert truth(value_of("x and flag", flag=False)) is False
    assert truth(value_of("x or flag", flag=True)) is True
    assert truth(value_of("(x and flag) == false", flag=False)) is None


def test_an_unknown_cannot_be_taken_for_a_truth() -> None:
    assert truth(UNKNOWN) is None
    with pytest.raises(TypeError, match="no truth value"):
        bool(UNKNOWN)
