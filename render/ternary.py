"""The value of a Jinja expression when only some names are known: a value, or ``UNKNOWN``.

Only what decides branches is modelled (boolean connectives, comparisons, ``is`` tests, ``default``,
conditional expressions); everything else is unknown, which callers must treat as "either way".
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from jinja2 import nodes


class _Unknown:
    __slots__ = ()

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise TypeError("an unknown value has no truth value; use truth()")


UNKNOWN: Final = _Unknown()


class _OnlyTruth(_Unknown):
    """An unknown value whose truth is known all the same, as that of ``x and false``."""

    __slots__ = ("truth",)

    def __init__(self, value: bool) -> None:
        self.truth = value


_FALSY: Final = _OnlyTruth(False)
_TRUTHY: Final = _OnlyTruth(True)

Lookup = Callable[[nodes.Expr], Any]
"""Gives the value of a name, attribute or item, or UNKNOWN."""

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}

_TESTS: dict[str, Callable[..., bool]] = {
    "true": lambda v: v is True,
    "false": lambda v: v is False,
    "none": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "defined": lambda v: True,
    "undefined": lambda v: False,
    "sameas": lambda v, other: v is other,
    "eq": operator.eq,
    "equalto": operator.eq,
    "==": operator.eq,
    "ne": operator.ne,
    "!=": operator.ne,
    "string": lambda v: isinstance(v, str),
}


def truth(value: Any) -> bool | None:
    """True, False, or None where the value is unknown."""
    if isinstance(value, _OnlyTruth):
        return value.truth
    return None if value is UNKNOWN else bool(value)


def is_known(value: Any) -> bool:
    """Whether the value itself is known, and not just its truth."""
    return not isinstance(value, _Unknown)


def negate(value: bool | None) -> bool | None:
    """Three-valued not."""
    return None if value is None else not value


def both(first: bool | None, second: bool | None) -> bool | None:
    """Three-valued and."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def evaluate(node: nodes.Node | None, lookup: Lookup) -> Any:
    """The expression's value, or an unknown: ask ``truth`` or ``is_known``. Never raises for a
    well-formed expression."""
    match node:
        case nodes.Const():
            return node.value
        case nodes.Not():
            value = truth(evaluate(node.node, lookup))
            return UNKNOWN if value is None else not value
        case nodes.And() | nodes.Or():
            return _connective(node, lookup)
        case nodes.CondExpr():
            return _conditional(node, lookup)
        case nodes.Compare():
            return _compare(node, lookup)
        case nodes.Test():
            return _test(node, lookup)
        case nodes.Filter(name="default" | "d"):
            return _default(node, lookup)
        case nodes.Name() | nodes.Getattr() | nodes.Getitem():
            return lookup(node)
    return UNKNOWN


def _connective(node: nodes.And | nodes.Or, lookup: Lookup) -> Any:
    decisive = isinstance(node, nodes.Or)
    left, right = evaluate(node.left, lookup), evaluate(node.right, lookup)
    if truth(left) is None:
        # `x and false` is falsy whatever x is (if x raises, so does the render).
        if truth(right) is not decisive:
            return UNKNOWN
        return _TRUTHY if decisive else _FALSY
    return left if truth(left) is decisive else right


def _conditional(node: nodes.CondExpr, lookup: Lookup) -> Any:
    test = truth(evaluate(node.test, lookup))
    if test is not None:
        return evaluate(node.expr1 if test else node.expr2, lookup) if test or node.expr2 else ""
    first = evaluate(node.expr1, lookup)
    second = evaluate(node.expr2, lookup) if node.expr2 else ""
    if is_known(first) and is_known(second) and type(first) is type(second) and first == second:
        return first
    if truth(first) is None or truth(first) is not truth(second):
        return UNKNOWN
    return _TRUTHY if truth(first) else _FALSY


def _compare(node: nodes.Compare, lookup: Lookup) -> Any:
    left = evaluate(node.expr, lookup)
    result: bool | None = True
    for operand in node.ops:
        right = evaluate(operand.expr, lookup)
        step: bool | None = None
        if is_known(left) and is_known(right):
            try:
                step = bool(_COMPARE[operand.op](left, right))
            except TypeError:
                step = None
        result = both(result, step)
        left = right
    return UNKNOWN if result is None else result


def _test(node: nodes.Test, lookup: Lookup) -> Any:
    value = evaluate(node.node, lookup)
    arguments = [evaluate(a, lookup) for a in node.args or ()]
    test = _TESTS.get(node.name)
    if test is None or not all(map(is_known, (value, *arguments))):
        return UNKNOWN
    try:
        return test(value, *arguments)
    except TypeError:
        return UNKNOWN


def _default(node: nodes.Filter, lookup: Lookup) -> Any:
    value = evaluate(node.node, lookup)
    arguments = [evaluate(a, lookup) for a in node.args or ()]
    if node.kwargs or not all(map(is_known, (value, *arguments))):
        return UNKNOWN
    replaces_falsy = len(arguments) > 1 and bool(arguments[1])
    if replaces_falsy and not value:
        return arguments[0]
    return value
