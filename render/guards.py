"""Which branches of a chat template are generation-only, and where that cannot be known.

A branch is generation-only if, in three-valued logic with everything else unknown, its condition is
False when ``add_generation_prompt`` is False. The flag may appear nowhere else: every mention that
is not the test of such a branch, inside one, an alias for one, or dead code is a *refusal*, so a
template whose output depends on the flag in some other way is never guessed at.

Separately found: *moving* branches (text put into the last user message only, which will not be
there once another message follows) and *clocks* (``strftime_now``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import meta, nodes

from backhaul.render.ternary import UNKNOWN, Lookup, both, evaluate, negate, truth

FLAG = "add_generation_prompt"

_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
"""Their output is collected first and written later, so an offset inside means nothing."""

_OPAQUE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)

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


class Guards(NamedTuple):
    """What ``analyse`` found; ``branches`` and ``inline`` are generation-only."""

    branches: list[Branch]
    inline: list[InlineBranch]
    moving: list[Branch]
    refusals: list[Finding]
    clocks: list[Finding]
    trailing: list[Finding]

    @property
    def guarded(self) -> bool:
        """Whether there is at least one generation-only branch that can write something."""
        return bool(self.branches or self.inline)


def analyse(tree: nodes.Template) -> Guards:
    """Examine a parsed template. Reads the tree only."""
    return _Analysis(tree).run()


class _Analysis:
    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.aliases = _aliases(tree)
        self.flags = {FLAG, *self.aliases}
        self.guards = Guards([], [], [], [], [], [])
        self.accepted: set[int] = set()
        self.exclusive: set[int] = set()
        self.tainted: list[nodes.Node] = []
        self.places = _Places(tree)

    def run(self) -> Guards:
        for alias in self.aliases.values():
            self._accept(alias)
        for assign in self.tree.find_all(nodes.Assign):
            if _assigned(assign.target) == FLAG and self._keeps_the_flag(assign.node):
                self._accept(assign)
        for found in self.tree.find_all(_OPAQUE):
            kind = type(found).__name__.lower()
            self._refuse(found, f"{kind} brings in text that cannot be examined")
        self._block(self.tree.body, buffered=False)
        for mention in self._mentions(self.tree):
            if id(mention) not in self.accepted:
                self._refuse(mention, f"{mention.name} is used outside the test of a branch")
        for read in self._reads_of_tainted():
            self._refuse(read, f"{_read(read)} is set where the flag decides and used outside")
        self._moving(self.tree.body, _Place(user=False, loop=False))
        self._clocks()
        self._trailing()
        unique = list(dict.fromkeys(self.guards.refusals))
        return self.guards._replace(refusals=sorted(unique))

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
        # The condition of each arm, with the flag off and on; the last one is `else`.
        not_before = {flag: True for flag in (False, True)}  # type: dict[bool, bool | None]
        on_flag = False
        for test, body in [*arms, (None, node.else_)]:
            own = test is not None and any(True for _ in self._mentions(test))
            on_flag = on_flag or own
            reached: dict[bool, bool | None] = {}
            for flag in (False, True):
                value = True if test is None else truth(evaluate(test, self._with(flag)))
                reached[flag] = both(not_before[flag], value)
                not_before[flag] = both(not_before[flag], negate(value))
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
        reached: dict[bool, bool | None],
        *,
        own: bool,
        buffered: bool,
    ) -> None:
        off, on = reached[False], reached[True]
        line = test.lineno if test is not None else (body[0].lineno if body else 0)
        if on is False:
            # Never runs while generating, so it cannot write generation-only text.
            for item in body:
                self._accept(item)
            self.exclusive.update(id(n) for item in body for n in _walk(item))
            if off is not False:
                self._taint(body)
        elif off is False:
            for item in body:
                self._accept(item)
            self._taint(body)
            if not _writes(body):
                return
            if buffered:
                self._refuse_at(line, "a guard inside a macro or block whose output is buffered")
                return
            self.guards.branches.append(Branch(line, describe(test), body))
            self.exclusive.update(id(n) for item in body for n in _walk(item))
        else:
            if own and _writes(body):
                self._refuse_at(line, "this branch may run with and without the flag")
            if own:
                self._taint(body)
            self._block(body, buffered=buffered)

    def _inline(self, node: nodes.CondExpr, *, buffered: bool) -> None:
        if not any(True for _ in self._mentions(node.test)):
            return
        values = {f: truth(evaluate(node.test, self._with(f))) for f in (False, True)}
        fields = []
        for field, wanted in (("expr1", True), ("expr2", False)):
            reached = {f: None if v is None else v is wanted for f, v in values.items()}
            expression = getattr(node, field)
            if expression is None or reached[True] is False:
                continue
            if reached[False] is not False:
                return  # Left unaccepted, hence refused.
            fields.append((field, expression))
        self._accept(node)
        for field, _ in fields:
            if buffered:
                self._refuse_at(node.lineno, "a guard inside a macro or block that is buffered")
                return
            self.guards.inline.append(InlineBranch(node.lineno, describe(node.test), node, field))
            self.exclusive.update(id(n) for n in _walk(getattr(node, field)))

    def _keeps_the_flag(self, value: nodes.Node) -> bool:
        """Whether assigning ``value`` to the flag leaves it as it is, or turns it off for good."""
        off, on = (evaluate(value, self._with(flag)) for flag in (False, True))
        return off is False and isinstance(on, bool)

    def _with(self, flag: bool) -> Lookup:
        """The world in which only the flag and its aliases are known."""
        # Each alias once: a chain of them may mention each other any number of times.
        known: dict[str, Any] = {FLAG: flag}

        def lookup(node: nodes.Expr) -> Any:
            if not isinstance(node, nodes.Name):
                return UNKNOWN
            if node.name in self.aliases and node.name not in known:
                known[node.name] = UNKNOWN  # What it reads of itself was there before.
                known[node.name] = evaluate(self.aliases[node.name].node, lookup)
            return known.get(node.name, UNKNOWN)

        return lookup

    def _mentions(self, node: nodes.Node) -> Iterator[nodes.Name]:
        for item in _walk(node):
            if isinstance(item, nodes.Name) and item.name in self.flags:
                yield item

    def _accept(self, node: nodes.Node) -> None:
        self.accepted.update(id(name) for name in self._mentions(node))

    def _taint(self, body: list[nodes.Node]) -> None:
        for item in body:
            for node in _walk(item):
                name = _assigned(node)
                if name is not None and name not in self.flags:
                    self.tainted.append(node)

    def _reads_of_tainted(self) -> Iterator[nodes.Node]:
        names = {_assigned(node) for node in self.tainted}
        for node in _walk(self.tree):
            name = _read(node)
            if name is None or name not in names or id(node) in self.exclusive:
                continue
            if any(_assigned(w) == name and self.places.reaches(w, node) for w in self.tainted):
                yield node

    def _refuse(self, node: nodes.Node, why: str) -> None:
        self._refuse_at(node.lineno, why)

    def _refuse_at(self, line: int, why: str) -> None:
        self.guards.refusals.append(Finding(line, why))

    # -- moving control text, clocks, text after the loop -----------------------------------------

    def _moving(self, body: list[nodes.Node], where: _Place) -> None:
        """Branches of a user's message that ask how far from the end it is."""
        for node in body:
            if isinstance(node, nodes.For):
                over = any("messages" in n.name for n in node.iter.find_all(nodes.Name)) or (
                    isinstance(node.iter, nodes.Name) and "messages" in node.iter.name
                )
                self._moving(node.body, where._replace(loop=over))
            elif isinstance(node, nodes.If):
                before: bool | None = True
                for arm in (node, *node.elif_):
                    value = truth(evaluate(arm.test, _as_user))
                    reached = both(before, value)
                    before = both(before, negate(value))
                    if reached is not False:
                        self._moving_arm(arm, where)
                if before is not False:
                    self._moving(node.else_, where)

    def _moving_arm(self, arm: nodes.If, where: _Place) -> None:
        inside = where._replace(user=where.user or _asks_for_user(arm.test))
        if inside.user and inside.loop and on_position(arm.test) and _outputs(arm.body):
            self.guards.moving.append(Branch(arm.test.lineno, describe(arm.test), arm.body))
        else:
            self._moving(arm.body, inside)

    def _clocks(self) -> None:
        for call in self.tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now":
                wanted = call.args[0] if call.args else None
                shown = repr(wanted.value) if isinstance(wanted, nodes.Const) else "..."
                self.guards.clocks.append(Finding(call.lineno, f"strftime_now({shown})"))

    def _trailing(self) -> None:
        """Text at top level after the last loop and outside every guard. Where a template variable
        decides on it (a tool choice, a response format), it is control text that moves on."""
        loops = [i for i, node in enumerate(self.tree.body) if isinstance(node, nodes.For)]
        settings = _settings(self.tree) - self.flags
        for node in self.tree.body[loops[-1] + 1 :] if loops else []:
            self._after_the_loop([node], settings)

    def _after_the_loop(self, body: list[nodes.Node], settings: set[str]) -> None:
        for node in body:
            if id(node) in self.exclusive:
                continue
            if isinstance(node, nodes.If):
                for arm in (node, *node.elif_):
                    if any(id(item) in self.exclusive for item in arm.body):
                        continue
                    if _outputs(arm.body) and _names(arm.test) & settings:
                        what = Branch(arm.test.lineno, describe(arm.test), arm.body)
                        self.guards.moving.append(what)
                    else:
                        self._after_the_loop(arm.body, settings)
                self._after_the_loop(node.else_, settings)
            elif isinstance(node, nodes.Output) and _outputs([node]):
                plain = [c for c in node.nodes if not isinstance(c, nodes.CondExpr)]
                if plain:
                    self.guards.trailing.append(Finding(node.lineno, "text after the message loop"))


class _Place(NamedTuple):
    """Where the search for moving text stands: inside a branch for users' messages, and directly
    in a loop over messages."""

    user: bool
    loop: bool


def _asks_for_user(test: nodes.Node) -> bool:
    """Whether a test compares something with the role "user"."""
    compared = (c for c in _walk(test) if isinstance(c, nodes.Compare))
    return any(isinstance(n, nodes.Const) and n.value == "user" for c in compared for n in _walk(c))


def _as_user(node: nodes.Expr) -> Any:
    """The world in which the message at hand is a user's."""
    if isinstance(node, nodes.Getattr) and node.attr == "role":
        return "user"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return "user" if node.arg.value == "role" else UNKNOWN
    return "user" if isinstance(node, nodes.Name) and node.name == "role" else UNKNOWN


_GIVEN = frozenset({"messages", "bos_token", "eos_token", "raise_exception", "namespace"})


def _settings(tree: nodes.Template) -> set[str]:
    """Template variables that a request may set, and names assigned from them."""
    found = meta.find_undeclared_variables(tree) - _GIVEN
    assigns = [(_assigned(a.target), _names(a.node)) for a in tree.find_all(nodes.Assign)]
    while more := {name for name, read in assigns if name and read & found} - found:
        found |= more
    return found


def _names(node: nodes.Node) -> set[str]:
    return {n.name for n in _walk(node) if isinstance(n, nodes.Name)}


def _aliases(tree: nodes.Template) -> dict[str, nodes.Assign]:
    """Names assigned once, at top level, from an expression that mentions the flag."""
    stores: dict[str, int] = {}
    for node in _walk(tree):
        name = _assigned(node)
        if name is not None:
            stores[name] = stores.get(name, 0) + 1
    found: dict[str, nodes.Assign] = {}
    for node in tree.body:
        if not isinstance(node, nodes.Assign) or not isinstance(node.target, nodes.Name):
            continue
        name = node.target.name
        if name != FLAG and stores[name] == 1 and _names(node.node) & {FLAG, *found}:
            found[name] = node
    return found


def _assigned(node: nodes.Node) -> str | None:
    """Name that the node assigns to: ``x`` or ``ns.x``."""
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Name) and node.ctx in ("store", "param"):
        return str(node.name)
    return None


def _read(node: nodes.Node) -> str | None:
    """Name that the node reads: ``x`` or ``ns.x``."""
    if isinstance(node, nodes.Name) and node.ctx == "load":
        return str(node.name)
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return None


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


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _outputs(body: list[nodes.Node]) -> bool:
    """Whether this level itself writes something other than white space."""
    for node in body:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                if isinstance(child, nodes.TemplateData) and not child.data.strip():
                    continue
                if _raises(child):
                    continue
                return True
    return False


def _writes(body: list[nodes.Node]) -> bool:
    """Whether the body can write anything at any depth (macros it calls included)."""
    for item in body:
        for node in _walk(item):
            if isinstance(node, nodes.Output) and any(
                not (isinstance(c, nodes.TemplateData) and not c.data) and not _raises(c)
                for c in node.nodes
            ):
                return True
            if isinstance(node, nodes.CallBlock | nodes.FilterBlock):
                return True
    return False


def _raises(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "raise_exception"
    )


def on_position(test: nodes.Node) -> bool:
    """Whether a test asks how far from the end of the conversation the message is."""
    for node in _walk(test):
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute):
                if attribute in _POSITION_ATTRIBUTES:
                    return True
            case nodes.Getitem(arg=nodes.Neg()) | nodes.Filter(name="last"):
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
        for n in _walk(node)
    )


def _is_constant(node: nodes.Expr) -> bool:
    return all(isinstance(n, nodes.Const) for n in _walk(node))


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
