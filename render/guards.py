"""Which branches of a chat template are generation-only, and where that cannot be known.

A branch is generation-only if, in three-valued logic with everything else unknown, its condition is
False when ``add_generation_prompt`` is False. A branch that runs in every pass of its loop while
generating, and without the flag in all but the last one, is *history*: what it writes there, the
next prompt has as well. The flag may appear nowhere else: every mention that is not the test of
such branches, inside a generation-only one, an alias for one, or dead code is a *refusal*, so a
template whose output depends on the flag in some other way is never guessed at.

Separately found: *moving* text (see ``moving``) and *clocks* (``strftime_now``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import nodes

from backhaul.render.moving import NO_MOVING_TEXT, MovingText, find_moving, settings_in
from backhaul.render.syntax import (
    FLAG,
    Branch,
    Finding,
    InlineBranch,
    assigned,
    describe,
    is_loop_last,
    names_in,
    read,
    walk,
    writes,
)
from backhaul.render.ternary import UNKNOWN, Lookup, both, evaluate, negate, truth

_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
"""Their output is collected first and written later, so an offset inside means nothing."""

_OPAQUE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class Guards(NamedTuple):
    """What ``analyse`` found; ``branches`` and ``inline`` are generation-only."""

    branches: list[Branch]
    inline: list[InlineBranch]
    refusals: list[Finding]
    clocks: list[Finding]
    moving: MovingText

    @property
    def guarded(self) -> bool:
        """Whether there is at least one generation-only branch that can write something."""
        return bool(self.branches or self.inline)


def analyse(tree: nodes.Template) -> Guards:
    """Examine a parsed template. Changes nothing in the tree but constants, which are folded."""
    return _Analysis(tree).run()


class _World(NamedTuple):
    """What is known at an evaluation: the flag, and ``loop.last`` where it is not None."""

    flag: bool
    last: bool | None = None


_OFF, _ON = _World(False), _World(True)
_PASSES = (_World(True, True), _World(True, False), _World(False, False))
"""Of a loop while generating, and before its last one without the flag."""

_Reached = dict[_World, bool | None]


class _Analysis:
    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.settings = settings_in(tree)
        self.aliases = _aliases(tree)
        self.flags = {FLAG, *self.aliases}
        self.guards = Guards([], [], [], [], NO_MOVING_TEXT)
        self.accepted: set[int] = set()
        self.exclusive: set[int] = set()
        self.tainted: list[nodes.Node] = []
        self.places = _Places(tree)

    def run(self) -> Guards:
        for alias in self.aliases.values():
            self._accept(alias)
        for assign in self.tree.find_all(nodes.Assign):
            if assigned(assign.target) == FLAG and self._keeps_the_flag(assign.node):
                self._accept(assign)
        for found in self.tree.find_all(_OPAQUE):
            kind = type(found).__name__.lower()
            self._refuse(found, f"{kind} brings in text that cannot be examined")
        self._block(self.tree.body, buffered=False)
        for mention in self._mentions(self.tree):
            if id(mention) not in self.accepted:
                self._refuse(mention, f"{mention.name} is used outside the test of a branch")
        for use in self._reads_of_tainted():
            self._refuse(use, f"{read(use)} is set where the flag decides and used outside")
        self._clocks()
        moving = find_moving(self.tree, self.settings - self.flags, self.exclusive)
        unique = list(dict.fromkeys(self.guards.refusals))
        return self.guards._replace(refusals=sorted(unique), moving=moving)

    # -- the flag ------------------------------------------------------------------------------

    def _block(self, body: list[nodes.Node], *, buffered: bool) -> None:
        for node in body:
            match node:
                case nodes.If():
                    self._if(node, buffered=buffered)
                case nodes.Output():
                    for child in node.nodes:
                        if isinstance(child, nodes.CondExpr):
                            self._inline(child, buffered=buffered)
                case nodes.For():
                    within = buffered or node.recursive
                    self._block(node.body, buffered=within)
                    self._block(node.else_, buffered=within)
                case nodes.Scope() | nodes.With() | nodes.ScopedEvalContextModifier():
                    self._block(node.body, buffered=buffered)
                case _ if isinstance(node, _BUFFERED):
                    self._block(node.body, buffered=True)

    def _if(self, node: nodes.If, *, buffered: bool) -> None:
        arms = [(n.test, n.body) for n in (node, *node.elif_)]
        # The condition of each arm in each world; the last one is `else`.
        not_before: _Reached = dict.fromkeys((_OFF, _ON, *_PASSES), True)
        on_flag = False
        for test, body in [*arms, (None, node.else_)]:
            own = test is not None and any(True for _ in self._mentions(test))
            on_flag = on_flag or own
            reached: _Reached = {}
            for world in not_before:
                value = True if test is None else truth(evaluate(test, self._in(world)))
                reached[world] = both(not_before[world], value)
                not_before[world] = both(not_before[world], negate(value))
            if own:
                assert test is not None
                self._accept(test)
            if not on_flag:
                self._block(body, buffered=buffered)
            else:
                self._arm(test, body, reached, own=own, buffered=buffered)

    def _arm(
        self,
        test: nodes.Node | None,
        body: list[nodes.Node],
        reached: _Reached,
        *,
        own: bool,
        buffered: bool,
    ) -> None:
        off, on = reached[_OFF], reached[_ON]
        line = test.lineno if test is not None else (body[0].lineno if body else 0)
        if on is False:
            # Never runs while generating, so it cannot write generation-only text.
            for item in body:
                self._accept(item)
            self.exclusive.update(id(n) for item in body for n in walk(item))
            if off is not False:
                self._taint(body)
        elif off is False:
            for item in body:
                self._accept(item)
            self._taint(body)
            if not writes(body):
                return
            if buffered:
                self._refuse_at(line, "a guard inside a macro or block whose output is buffered")
                return
            self.guards.branches.append(Branch(line, describe(test), body))
            self.exclusive.update(id(n) for item in body for n in walk(item))
        elif _is_history(reached):
            self._block(body, buffered=buffered)
        else:
            if own and writes(body):
                self._refuse_at(line, "this branch may run with and without the flag")
            if own:
                self._taint(body)
            self._block(body, buffered=buffered)

    def _inline(self, node: nodes.CondExpr, *, buffered: bool) -> None:
        if not any(True for _ in self._mentions(node.test)):
            return
        worlds = (_OFF, _ON, *_PASSES)
        values = {world: truth(evaluate(node.test, self._in(world))) for world in worlds}
        fields = []
        for field, wanted in (("expr1", True), ("expr2", False)):
            reached: _Reached = {w: None if v is None else v is wanted for w, v in values.items()}
            expression = getattr(node, field)
            if expression is None:
                continue
            if _is_history(reached):
                continue
            # The other one of what is history is written in a last pass without the flag only.
            never = reached[_ON] is False or all(reached[world] is False for world in _PASSES)
            if never:  # while generating, as in `_arm`
                self.exclusive.update(id(n) for n in walk(expression))
                continue
            if reached[_OFF] is not False:
                return  # Left unaccepted, hence refused.
            fields.append((field, expression))
        self._accept(node)
        for field, _ in fields:
            if buffered:
                self._refuse_at(node.lineno, "a guard inside a macro or block that is buffered")
                return
            self.guards.inline.append(InlineBranch(node.lineno, describe(node.test), node, field))
            self.exclusive.update(id(n) for n in walk(getattr(node, field)))

    def _keeps_the_flag(self, value: nodes.Node) -> bool:
        """Whether assigning ``value`` to the flag leaves it as it is, or turns it off for good."""
        off, on = (evaluate(value, self._in(world)) for world in (_OFF, _ON))
        return off is False and isinstance(on, bool)

    def _in(self, world: _World) -> Lookup:
        """Only what the world says and the flag's aliases are known."""
        # Each alias once: a chain of them may mention each other any number of times.
        known: dict[str, Any] = {FLAG: world.flag}

        def lookup(node: nodes.Expr) -> Any:
            if world.last is not None and is_loop_last(node):
                return world.last
            if not isinstance(node, nodes.Name):
                return UNKNOWN
            if node.name in self.aliases and node.name not in known:
                known[node.name] = UNKNOWN  # What it reads of itself was there before.
                known[node.name] = evaluate(self.aliases[node.name].node, lookup)
            return known.get(node.name, UNKNOWN)

        return lookup

    def _mentions(self, node: nodes.Node) -> Iterator[nodes.Name]:
        for item in walk(node):
            if isinstance(item, nodes.Name) and item.name in self.flags:
                yield item

    def _accept(self, node: nodes.Node) -> None:
        self.accepted.update(id(name) for name in self._mentions(node))

    def _taint(self, body: list[nodes.Node]) -> None:
        for item in body:
            for node in walk(item):
                name = assigned(node)
                if name is not None and name not in self.flags:
                    self.tainted.append(node)

    def _reads_of_tainted(self) -> Iterator[nodes.Node]:
        names = {assigned(node) for node in self.tainted}
        for node in walk(self.tree):
            name = read(node)
            if name is None or name not in names or id(node) in self.exclusive:
                continue
            if any(assigned(w) == name and self.places.reaches(w, node) for w in self.tainted):
                yield node

    def _refuse(self, node: nodes.Node, why: str) -> None:
        self._refuse_at(node.lineno, why)

    def _refuse_at(self, line: int, why: str) -> None:
        self.guards.refusals.append(Finding(line, why))

    def _clocks(self) -> None:
        for call in self.tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now":
                wanted = call.args[0] if call.args else None
                shown = repr(wanted.value) if isinstance(wanted, nodes.Const) else "..."
                self.guards.clocks.append(Finding(call.lineno, f"strftime_now({shown})"))


def _is_history(reached: _Reached) -> bool:
    """Whether a branch writes what any later prompt has at the same place."""
    return all(reached[world] is True for world in _PASSES)


def _aliases(tree: nodes.Template) -> dict[str, nodes.Assign]:
    """Names assigned once, at top level, from an expression that mentions the flag."""
    stores: dict[str, int] = {}
    for node in walk(tree):
        name = assigned(node)
        if name is not None:
            stores[name] = stores.get(name, 0) + 1
    found: dict[str, nodes.Assign] = {}
    for node in tree.body:
        if not isinstance(node, nodes.Assign) or not isinstance(node.target, nodes.Name):
            continue
        name = node.target.name
        if name != FLAG and stores[name] == 1 and names_in(node.node) & {FLAG, *found}:
            found[name] = node
    return found


class _Places:
    """Document order and enclosing loops of every node, for the reach of an assignment."""

    def __init__(self, tree: nodes.Template) -> None:
        self.order: dict[int, int] = {}
        self.loops: dict[int, tuple[nodes.For, ...]] = {}
        self.end: dict[int, int] = {}
        self.in_macro: set[int] = set()
        self._visit(tree, (), macro=False)

    def _visit(self, node: nodes.Node, loops: tuple[nodes.For, ...], *, macro: bool) -> None:
        self.order[id(node)] = len(self.order)
        self.loops[id(node)] = loops
        if macro:
            self.in_macro.add(id(node))
        inner = (*loops, node) if isinstance(node, nodes.For) else loops
        for child in node.iter_child_nodes():
            self._visit(child, inner, macro=macro or isinstance(node, nodes.Macro))
        self.end[id(node)] = len(self.order)

    def reaches(self, write: nodes.Node, read: nodes.Node) -> bool:
        """Whether ``read`` may see what ``write`` assigned. A plain name set in a loop is gone
        after each pass; a namespace attribute stays. Reads in macros happen at any time."""
        after = self.order[id(read)] > self.order[id(write)]
        loops = self.loops[id(write)]
        if id(read) in self.in_macro:
            return True
        if not loops:
            return after
        if isinstance(write, nodes.NSRef):
            return self.order[id(read)] > self.order[id(loops[0])]
        return after and self.order[id(read)] < self.end[id(loops[-1])]
