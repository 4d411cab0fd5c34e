"""Plain questions about the syntax tree of a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jinja2 import nodes

FLAG = "add_generation_prompt"

_POSITION_ATTRIBUTES = frozenset({"last", "revindex", "revindex0", "nextitem"})
_COUNTERS = frozenset({"index", "index0", "length"})


class Branch(NamedTuple):
    """Body of an ``if``/``elif``/``else``. ``body`` is the list in the tree itself."""

    line: int
    condition: str
    body: list[nodes.Node]


class InlineBranch(NamedTuple):
    """``expr1`` or ``expr2`` (``field``) of a conditional expression that is output directly."""

    line: int
    condition: str
    expression: nodes.CondExpr
    field: str


class Finding(NamedTuple):
    """Something to tell about a line of the template."""

    line: int
    message: str


def names_in(node: nodes.Node) -> set[str]:
    """All names in it, read or assigned."""
    return {n.name for n in walk(node) if isinstance(n, nodes.Name)}


def assigned(node: nodes.Node) -> str | None:
    """Name that the node assigns to: ``x`` or ``ns.x``."""
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Name) and node.ctx in ("store", "param"):
        return str(node.name)
    return None


def read(node: nodes.Node) -> str | None:
    """Name that the node reads: ``x`` or ``ns.x``."""
    if isinstance(node, nodes.Name) and node.ctx == "load":
        return str(node.name)
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return None


def is_loop_last(node: nodes.Node) -> bool:
    """Whether it asks for the loop's last pass: ``loop.last``."""
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="last"):
            return True
    return False


def walk(node: nodes.Node) -> Iterator[nodes.Node]:
    """The node and all below it, in document order."""
    yield node
    for child in node.iter_child_nodes():
        yield from walk(child)


def begins(body: list[nodes.Node], beginning: list[nodes.Node]) -> bool:
    """Whether what ``body`` writes surely begins with all that ``beginning`` writes, wherever in
    their loop both are."""
    whole, first = _pieces(body), _pieces(beginning)
    if whole is None or not first or len(whole) < len(first):
        return False
    if any(isinstance(piece, nodes.Node) and reads_loop_end(piece) for piece in first):
        return False
    *same, last = first
    end = whole[len(same)]
    if isinstance(last, str) and isinstance(end, str):
        return whole[: len(same)] == same and end.startswith(last)
    return whole[: len(first)] == first


def _pieces(body: list[nodes.Node]) -> list[str | nodes.Node] | None:
    """What is written, as texts and expressions, no two texts side by side; None where it is more
    than that."""
    found: list[str | nodes.Node] = []
    for node in body:
        if not isinstance(node, nodes.Output):
            return None
        for child in node.nodes:
            for piece in _operands(child):
                text = _text(piece)
                if text is not None and found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(piece if text is None else text)
    return found


def _operands(expression: nodes.Node) -> list[nodes.Node]:
    """Of a sum of strings, which it is if one of them is known to be one; else the expression."""
    left, right = expression, list[nodes.Node]()
    while isinstance(left, nodes.Add):
        right.insert(0, left.right)
        left = left.left
    operands = [left, *right]
    return operands if any(_text(one) is not None for one in operands) else [expression]


def _text(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.TemplateData):
        return str(node.data)
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return node.value
    return None


def outputs(body: list[nodes.Node], *, conditional: bool = True) -> bool:
    """Whether this level itself writes something other than white space. Without ``conditional``,
    whatever conditions of expressions decide."""
    return any(
        is_text(child) and (conditional or not isinstance(child, nodes.CondExpr))
        for node in body
        if isinstance(node, nodes.Output)
        for child in node.nodes
    )


def is_text(node: nodes.Node) -> bool:
    """Whether an expression that is output writes something other than white space."""
    if isinstance(node, nodes.TemplateData):
        return bool(node.data.strip())
    if isinstance(node, nodes.Const):
        return not isinstance(node.value, str) or bool(node.value.strip())
    return not raises(node)


def writes(body: list[nodes.Node]) -> bool:
    """Whether the body can write anything at any depth (macros it calls included)."""
    for item in body:
        for node in walk(item):
            if isinstance(node, nodes.Output) and any(
                not (isinstance(c, nodes.TemplateData) and not c.data) and not raises(c)
                for c in node.nodes
            ):
                return True
            if isinstance(node, nodes.CallBlock | nodes.FilterBlock):
                return True
    return False


def raises(node: nodes.Node) -> bool:
    """Whether it is a call that ends the render."""
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "raise_exception"
    )


def on_position(test: nodes.Node) -> bool:
    """Whether a test asks how far from the end of the conversation the message is."""
    ends = (nodes.Getitem, nodes.Filter)
    return reads_loop_end(test) or any(
        isinstance(node, ends) and _takes_last(node) for node in walk(test)
    )


def _takes_last(node: nodes.Getitem | nodes.Filter) -> bool:
    if isinstance(node, nodes.Filter):
        return node.name == "last"
    return isinstance(node.arg, nodes.Neg)


def reads_loop_end(expression: nodes.Node) -> bool:
    """Whether an expression reads how many passes of its loop are still to come."""
    for node in walk(expression):
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute):
                if attribute in _POSITION_ATTRIBUTES:
                    return True
            case nodes.Compare():
                sides = [node.expr, *(operand.expr for operand in node.ops)]
                counts = [s for s in sides if _is_counter(s)]
                if counts and any(not _is_counter(s) and not _is_constant(s) for s in sides):
                    return True
    return False


def _is_counter(node: nodes.Expr) -> bool:
    return any(
        isinstance(n, nodes.Getattr)
        and isinstance(n.node, nodes.Name)
        and n.node.name == "loop"
        and n.attr in _COUNTERS
        for n in walk(node)
    )


def _is_constant(node: nodes.Expr) -> bool:
    return all(isinstance(n, nodes.Const) for n in walk(node))


def describe(node: nodes.Node | None) -> str:
    """An expression roughly as it was written; ``else`` for None."""
    match node:
        case None:
            return "else"
        case nodes.Name():
            return str(node.name)
        case nodes.Const():
            return repr(node.value)
        case nodes.Not():
            return f"not {describe(node.node)}"
        case nodes.And():
            return f"{describe(node.left)} and {describe(node.right)}"
        case nodes.Or():
            return f"({describe(node.left)} or {describe(node.right)})"
        case nodes.Getattr():
            return f"{describe(node.node)}.{node.attr}"
        case nodes.Getitem():
            return f"{describe(node.node)}[{describe(node.arg)}]"
        case nodes.Test():
            return f"{describe(node.node)} is {node.name}"
        case nodes.Filter():
            return f"{describe(node.node)}|{node.name}"
        case nodes.Compare():
            signs = {"eq": "==", "ne": "!=", "lt": "<", "lteq": "<=", "gt": ">", "gteq": ">="}
            rest = (f"{signs.get(o.op, o.op)} {describe(o.expr)}" for o in node.ops)
            return " ".join([describe(node.expr), *rest])
    return "..."
