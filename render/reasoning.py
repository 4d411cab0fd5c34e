"""What a chat template does with the reasoning of earlier replies, from its syntax tree.

Only where reasoning goes is followed: a message's ``reasoning_content`` and its like, the names set
from it, and the branches around what is written of them. Nothing is rendered.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import meta, nodes

from backhaul.render.syntax import on_position
from backhaul.render.ternary import UNKNOWN, evaluate, truth

FIELDS = frozenset({"reasoning_content", "reasoning"})
"""Under which vLLM hands a message's reasoning to the template."""


_USES_MAX = 64
"""Sets of arguments remembered per template: clients use a few."""


class ReasoningUse(enum.StrEnum):
    """What becomes of the reasoning in an earlier reply."""

    NEVER = "never"
    """No message's reasoning is read."""
    BY_POSITION = "by_position"
    """It depends on how far from the end the message is: kept within a tool loop, say, and gone
    once the next user message follows."""
    ALWAYS = "always"
    """It is written wherever it is found."""


class ReasoningRules:
    """One template, examined once; asked with each request's arguments.

    Attributes:
        settings: names that the caller gives or leaves undefined.
        constants: names that are set once, at top level.
    """

    def __init__(self, tree: nodes.Template) -> None:
        stores = Counter(name for node in _walk(tree) if (name := _assigned(node)) is not None)
        self._tree = tree
        self.settings = meta.find_undeclared_variables(tree) - stores.keys()
        self.constants = {
            node.target.name: node.node
            for node in tree.body
            if isinstance(node, nodes.Assign)
            and isinstance(node.target, nodes.Name)
            and stores[node.target.name] == 1
        }
        self._carriers = _carriers(tree)
        self._parts = _parts(tree)
        self._asked = self.settings | self.constants.keys()
        self._uses: dict[tuple[tuple[str, Any], ...], ReasoningUse] = {}
        self._reads = any(_reads(node, self._carriers) for node in _walk(tree))

    def use(self, variables: Mapping[str, Any]) -> ReasoningUse:
        """What the template does, called with these variables; others are undefined."""
        if not self._reads:
            return ReasoningUse.NEVER
        given = {name: _plain(value) for name, value in variables.items() if name in self._asked}
        key = tuple(sorted(given.items(), key=lambda item: item[0]))
        if (known := self._uses.get(key)) is None:
            if len(self._uses) >= _USES_MAX:
                self._uses.clear()
            known = self._uses[key] = self._use(given)
        return known

    def _use(self, variables: Mapping[str, Any]) -> ReasoningUse:
        branches = self._by_position(self._tree, _Known(self, variables))
        touched = any(_touches(branch, self._carriers) for branch in branches)
        return ReasoningUse.BY_POSITION if touched else ReasoningUse.ALWAYS

    def _by_position(self, node: nodes.Node, known: _Known) -> Iterator[list[nodes.Node]]:
        """Bodies that run for some messages and not for others, by where these stand."""
        for child in node.iter_child_nodes():
            if isinstance(child, nodes.If):
                yield from self._arms(child, known)
            elif isinstance(child, nodes.For) and _list_name(child) in self._parts:
                yield child.body
            else:
                yield from self._by_position(child, known)

    def _arms(self, node: nodes.If, known: _Known) -> Iterator[list[nodes.Node]]:
        depends = False
        for test, body in [*((n.test, n.body) for n in (node, *node.elif_)), (None, node.else_)]:
            # The test with every question of position answered "no", then "yes".
            near, far = (True, True) if test is None else (known(test, p) for p in (False, True))
            depends = depends or near is not far
            if near is False and far is False:
                continue
            if depends:
                yield body
            else:
                yield from self._by_position(nodes.Scope(body), known)
            if near is True and far is True:
                return


class _Known:
    """The truth of a test under one call's variables."""

    def __init__(self, rules: ReasoningRules, variables: Mapping[str, Any]) -> None:
        self._settings = set(rules.settings)
        self._constants = dict(rules.constants)
        self._variables = variables
        self._found: dict[str, Any] = {}  # each once: a chain of them may mention each other

    def __call__(self, test: nodes.Node, position: bool) -> bool | None:
        return truth(evaluate(self._settled(test, position), self._lookup))

    def _lookup(self, node: nodes.Expr) -> Any:
        if not isinstance(node, nodes.Name):
            return UNKNOWN
        if node.name in self._settings:
            return self._variables.get(node.name)  # undefined is falsy, as None is
        if node.name in self._found:
            return self._found[node.name]
        if node.name in self._constants:
            value = self._constants.pop(node.name)
            self._settings.add(node.name)  # what it reads of itself is the caller's
            found = evaluate(self._settled(value, False), self._lookup)
            self._settings.remove(node.name)
            self._found[node.name] = found
            return found
        return UNKNOWN

    def _settled(self, test: nodes.Node, position: bool) -> nodes.Node:
        """The test with questions of position, and of undefined settings, answered."""
        match test:
            case nodes.Not():
                return nodes.Not(self._settled(test.node, position))
            case nodes.And() | nodes.Or():
                sides = (self._settled(side, position) for side in (test.left, test.right))
                return type(test)(*sides)
            case nodes.CondExpr(expr2=nodes.Expr() as other):
                parts = (test.test, test.expr1, other)
                return nodes.CondExpr(*(self._settled(part, position) for part in parts))
            case nodes.Filter(name="default" | "d", node=nodes.Name(name=name), args=[value, *_]):
                if name in self._settings and name not in self._variables:
                    return value
            case nodes.Test(name="defined" | "undefined", node=nodes.Name(name=name)):
                if name in self._settings:
                    return nodes.Const((name in self._variables) is (test.name == "defined"))
            case _ if on_position(test):
                return nodes.Const(position)
        return test


def _plain(value: Any) -> Any:
    """What tests ask of a variable: of a list or the like only whether there is anything."""
    return value if isinstance(value, bool | int | str | None) else bool(value)


def _carriers(tree: nodes.Template) -> frozenset[str]:
    """Names that may hold reasoning: set from a message's field, or from such a name."""
    assigns = [
        (name, assign.node)
        for assign in tree.find_all(nodes.Assign)
        for target in _walk(assign.target)
        if (name := _assigned(target)) is not None
    ]
    found: set[str] = set()
    while more := {n for n, value in assigns if n not in found and _mentions(value, found)}:
        found |= more
    return frozenset(found)


def _assigned(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.NSRef):
        return str(node.attr)
    return str(node.name) if isinstance(node, nodes.Name) and node.ctx == "store" else None


def _mentions(node: nodes.Node, names: frozenset[str] | set[str]) -> bool:
    return any(_reads(item, names) for item in _walk(node))


def _reads(node: nodes.Node, carriers: frozenset[str] | set[str]) -> bool:
    """Whether the node reads reasoning: a message's field, or a name (``x``, ``ns.x``) that may
    hold it."""
    match node:
        case nodes.Name(ctx="load"):
            return node.name in carriers
        case nodes.Getattr():
            return node.attr in FIELDS or node.attr in carriers
        case nodes.Getitem(arg=nodes.Const(value=str() as key)):
            return key in FIELDS
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=str() as key), *_]):
            return key in FIELDS
    return False


def _touches(body: list[nodes.Node], names: frozenset[str]) -> bool:
    """Whether the body writes reasoning, or sets a name that may hold it."""
    for item in body:
        for node in _walk(item):
            if isinstance(node, nodes.Output) and _mentions(node, names):
                return True
            if isinstance(node, nodes.Assign) and any(
                _assigned(target) in names for target in _walk(node.target)
            ):
                return True
    return False


def _parts(tree: nodes.Template) -> frozenset[str]:
    """Lists that hold a part of the messages each, where a template has split them."""
    lists = {name for loop in tree.find_all(nodes.For) if (name := _list_name(loop))}
    return frozenset(lists) if len(lists) > 1 else frozenset()


def _list_name(loop: nodes.For) -> str:
    """Name of the list of messages that a loop writes; "" where it is another kind of loop."""
    over = loop.iter
    name = over.attr if isinstance(over, nodes.Getattr) else getattr(over, "name", "")
    writes = any(True for _ in loop.find_all(nodes.Output))
    named = isinstance(name, str) and name.endswith(("messages", "msgs"))
    return str(name) if named and writes else ""


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)
