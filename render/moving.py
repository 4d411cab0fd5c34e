"""Text that the next turn will not have at its place, although no guard decides on it.

*Moving* text depends on how far from the end of the conversation its message is (an effort level
put into the last user message only), or follows the last message and depends on what the request
sets (a tool choice, a response format). Where it is written, the prompt's end is no prefix of the
next prompt. What else may be such text is told as *remarks*: a value set at the last message, a
macro that is told which one is the last. *Trailing* text follows the messages always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jinja2 import meta, nodes

from backhaul.render.syntax import (
    FLAG,
    Branch,
    Finding,
    InlineBranch,
    assigned,
    begins,
    describe,
    is_loop_last,
    is_text,
    names_in,
    on_position,
    outputs,
    read,
    reads_loop_end,
    walk,
    writes,
)
from backhaul.render.ternary import UNKNOWN, Lookup, both, evaluate, negate, truth


class MovingText(NamedTuple):
    """``branches`` and ``inline`` write moving text wherever they run."""

    branches: list[Branch]
    inline: list[InlineBranch]
    remarks: list[Finding]
    trailing: list[Finding]


NO_MOVING_TEXT = MovingText([], [], [], [])

_BLOCKS = (
    nodes.With,
    nodes.Scope,
    nodes.ScopedEvalContextModifier,
    nodes.FilterBlock,
    nodes.CallBlock,
)


def find_moving(tree: nodes.Template, settings: set[str], exclusive: set[int]) -> MovingText:
    """Examine a parsed template; reads it only.

    Args:
        settings: names that the request decides on, but not whether a reply is to be generated.
        exclusive: ids of nodes that run only with the flag, or only without.
    """
    found = MovingText([], [], [], [])
    _Messages(tree, exclusive, found).search(tree.body, _Place())
    _Tail(tree, settings, exclusive, found).search(tree.body)
    return found


class _Place(NamedTuple):
    """Where the search stands.

    Attributes:
        user: in a branch for users' messages.
        loop: directly in a loop over messages.
        last: line and condition of the branch that only the last message reaches.
        maybe: the same for a branch that asks for the position in some other way.
    """

    user: bool = False
    loop: bool = False
    last: tuple[int, str] | None = None
    maybe: tuple[int, str] | None = None


class _Messages:
    """Text inside the loop over messages, of those that a user's message can write."""

    def __init__(self, tree: nodes.Template, exclusive: set[int], found: MovingText) -> None:
        self._exclusive = exclusive
        self._found = found
        self._macros = {macro.name for macro in tree.find_all(nodes.Macro)}
        written = (node for output in tree.find_all(nodes.Output) for node in walk(output))
        self._written = {name for node in written if (name := read(node)) is not None}

    def search(self, body: list[nodes.Node], where: _Place) -> None:
        """Look through the nodes of one level."""
        if any(id(item) in self._exclusive for item in body):
            return
        if where.last is not None and outputs(body, conditional=False):
            self._found.branches.append(Branch(*where.last, body))
            return
        for node in body:
            if isinstance(node, nodes.For):
                self.search(node.body, where._replace(loop=_over_messages(node)))
            elif isinstance(node, nodes.If):
                self._if(node, where)
            elif isinstance(node, nodes.Output):
                for child in node.nodes:
                    if isinstance(child, nodes.CondExpr):
                        self._inline(child, where)
                    else:
                        self._look_at(child, where)
            elif isinstance(node, nodes.Assign | nodes.AssignBlock):
                self._set(node, where)
            elif isinstance(node, _BLOCKS):
                if isinstance(node, nodes.CallBlock):
                    self._look_at(node.call, where)
                self.search(node.body, where)

    def _if(self, node: nodes.If, where: _Place) -> None:
        arms = [(arm.test, arm.body) for arm in (node, *node.elif_)]
        bodies = [body for _, body in arms] + [node.else_]
        outcomes = list(zip(_arms([test for test, _ in arms], where), bodies, strict=True))
        for arm, body in outcomes:
            if arm.reached:
                line = arm.test.lineno if arm.test else (body[0].lineno if body else 0)
                inside = arm.place(line)
                if not arm.only_last and not outputs(body):
                    inside = inside._replace(last=where.last)
                others = [b for a, b in outcomes if a.reached and not a.only_last and b is not body]
                if where.last is None and others and all(begins(b, body) for b in others):
                    continue  # the next prompt goes on from it at the same place
                self.search(body, inside)

    def _inline(self, node: nodes.CondExpr, where: _Place) -> None:
        for arm, field in zip(_arms([node.test], where), ("expr1", "expr2"), strict=True):
            value = getattr(node, field)
            if value is None or not arm.reached or id(value) in self._exclusive:
                continue
            inside = arm.place(node.lineno)
            if isinstance(value, nodes.CondExpr):
                self._inline(value, inside)
            elif inside.last is None:
                self._look_at(value, where)
            elif is_text(value):
                self._found.inline.append(InlineBranch(*inside.last, node, field))

    def _set(self, node: nodes.Assign | nodes.AssignBlock, where: _Place) -> None:
        name = assigned(node.target)
        if name is None:
            return
        if where.maybe is not None and name in self._written:
            self._remark(node, f"{name} is set where {where.maybe[1]}, and written")
        elif where.loop and isinstance(node, nodes.Assign) and reads_loop_end(node.node):
            self._remark(node, f"{name} is set from how far the message is from the end")

    def _look_at(self, expression: nodes.Node, where: _Place) -> None:
        if not where.loop or not reads_loop_end(expression):
            return
        for call in (n for n in walk(expression) if isinstance(n, nodes.Call)):
            if isinstance(call.node, nodes.Name) and call.node.name in self._macros:
                self._remark(call, f"macro {call.node.name} is told which message is the last")
                return
        self._remark(expression, "an expression depends on how far the message is from the end")

    def _remark(self, node: nodes.Node, message: str) -> None:
        self._found.remarks.append(Finding(node.lineno, message))


class _Arm(NamedTuple):
    """One outcome of a test, as a user's message meets it.

    Attributes:
        test: None for what is left when no test holds.
        reached: whether a message may get there.
        only_last: whether no message but the last one gets there.
        always: whether every message does, wherever it stands.
        where: the place around it.
    """

    test: nodes.Node | None
    reached: bool
    only_last: bool
    always: bool
    where: _Place

    def place(self, line: int) -> _Place:
        """The place inside."""
        where = self.where
        by_role = False
        if self.test is not None:
            where = where._replace(user=where.user or _asks_for_user(self.test))
            by_role = where.user and where.loop and on_position(self.test) and not self.always
        if not self.only_last and not by_role:
            return where
        branch = (line, describe(self.test))
        return where._replace(last=where.last or branch, maybe=where.maybe or branch)


_WORLDS = (None, True, False)
"""What ``loop.last`` is in the world of an evaluation; None: unknown."""


def _arms(tests: Sequence[nodes.Node], where: _Place) -> Iterator[_Arm]:
    """The outcomes of tests that are asked in turn, and the one in which none holds."""
    before: dict[bool | None, bool | None] = dict.fromkeys(_WORLDS, True)
    for test in (*tests, None):
        reached: dict[bool | None, bool | None] = {}
        for last in _WORLDS:
            value = True if test is None else truth(evaluate(test, _message(last)))
            reached[last] = both(before[last], value)
            before[last] = both(before[last], negate(value))
        only_last = where.loop and reached[False] is False and reached[True] is not False
        always = reached[False] is True and reached[True] is True
        yield _Arm(test, reached[None] is not False, only_last, always, where)


def _message(last: bool | None) -> Lookup:
    """The world in which the message at hand is a user's, and the last one or not, of a prompt
    that is to be answered."""

    def lookup(node: nodes.Expr) -> Any:
        if is_loop_last(node):
            return UNKNOWN if last is None else last
        match node:
            case nodes.Name(name=name) if name == FLAG:
                return True
            case nodes.Getattr(attr="role") | nodes.Name(name="role"):
                return "user"
            case nodes.Getitem(arg=nodes.Const(value="role")):
                return "user"
        return UNKNOWN

    return lookup


def _asks_for_user(test: nodes.Node) -> bool:
    """Whether a test compares something with the role "user"."""
    compared = (c for c in walk(test) if isinstance(c, nodes.Compare))
    return any(isinstance(n, nodes.Const) and n.value == "user" for c in compared for n in walk(c))


def _over_messages(loop: nodes.For) -> bool:
    return any(
        (isinstance(n, nodes.Name) and "messages" in n.name)
        or (isinstance(n, nodes.Getattr) and "messages" in n.attr)
        for n in walk(loop.iter)
    )


class _Tail:
    """Text after the last message, outside every guard."""

    def __init__(
        self, tree: nodes.Template, settings: set[str], exclusive: set[int], found: MovingText
    ) -> None:
        self._settings = settings
        self._exclusive = exclusive
        self._found = found
        # The loop that writes the messages; others only look for something in them.
        kinds: list[Callable[[nodes.For], bool]] = [
            lambda loop: _over_messages(loop) and writes(loop.body),
            lambda loop: True,
        ]
        loops = list(_loops(tree.body))
        self._is_loop = next((kind for kind in kinds if any(map(kind, loops))), kinds[-1])

    def search(self, body: list[nodes.Node]) -> None:
        """Find the last loop over messages, at this level or in a branch, and what follows it."""
        holding = [i for i, node in enumerate(body) if any(map(self._is_loop, _loops([node])))]
        if holding:
            last = holding[-1]
            for inner in _bodies(body[last]):
                self.search(inner)
            self._after(body[last + 1 :])

    def _after(self, body: list[nodes.Node]) -> None:
        for node in body:
            if id(node) in self._exclusive:
                continue
            if isinstance(node, nodes.If):
                for arm in (node, *node.elif_):
                    if any(id(item) in self._exclusive for item in arm.body):
                        continue
                    if outputs(arm.body) and self._is_set(arm.test):
                        self._found.branches.append(
                            Branch(arm.test.lineno, describe(arm.test), arm.body)
                        )
                    else:
                        self._after(arm.body)
                self._after(node.else_)
            elif isinstance(node, nodes.For):
                self._loop_after(node)
            elif isinstance(node, nodes.Output):
                for child in node.nodes:
                    if isinstance(child, nodes.CondExpr):
                        self._inline_after(child)
                    elif is_text(child):
                        self._trailing(node)
            elif isinstance(node, _BLOCKS):
                self._after(node.body)

    def _loop_after(self, node: nodes.For) -> None:
        if not outputs(node.body):
            self._after(node.body)
        elif self._is_set(node.iter):
            condition = f"for each of {describe(node.iter)}"
            self._found.branches.append(Branch(node.lineno, condition, node.body))
        else:
            self._trailing(node)

    def _inline_after(self, node: nodes.CondExpr) -> None:
        for field, decides in (("expr1", self._is_set(node.test)), ("expr2", False)):
            value = getattr(node, field)
            if value is None or id(value) in self._exclusive or not is_text(value):
                continue
            if decides:
                condition = describe(node.test)
                self._found.inline.append(InlineBranch(node.lineno, condition, node, field))
            elif isinstance(value, nodes.CondExpr):
                self._inline_after(value)
            else:
                self._trailing(node)

    def _is_set(self, test: nodes.Node) -> bool:
        """Whether a request's settings decide on it."""
        return bool(names_in(test) & self._settings)

    def _trailing(self, node: nodes.Node) -> None:
        self._found.trailing.append(Finding(node.lineno, "text after the message loop"))


def _bodies(node: nodes.Node) -> list[list[nodes.Node]]:
    """What a branch or block holds, arm by arm; of a loop, nothing."""
    if isinstance(node, nodes.If):
        return [*(arm.body for arm in (node, *node.elif_)), node.else_]
    return [node.body] if isinstance(node, _BLOCKS) else []


def _loops(body: list[nodes.Node]) -> Iterator[nodes.For]:
    """Loops at this level and in its branches, in document order."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        for inner in _bodies(node):
            yield from _loops(inner)


_GIVEN = frozenset({"messages", "bos_token", "eos_token", "raise_exception", "namespace"})


def settings_in(tree: nodes.Template) -> set[str]:
    """Template variables that a request may set, and names assigned from them.

    To be asked first: jinja2 folds constants in the tree to find them.
    """
    found = meta.find_undeclared_variables(tree) - _GIVEN
    assigns = [(assigned(a.target), names_in(a.node)) for a in tree.find_all(nodes.Assign)]
    while more := {name for name, used in assigns if name and used & found} - found:
        found |= more
    return found
