"""A chat template that is rendered once and says where its generation-only text begins.

The marks are calls that write nothing, put first into each generation-only branch of the template's
syntax tree; jinja2's public API does the rest. The text is what the plain template writes, byte for
byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from backhaul.render.guards import Guards, analyse
from backhaul.render.reasons import Reason

_MARK = "_backhaul_mark"
_GENERATION, _MOVING = 0, 1


class Rendering(NamedTuple):
    """One render.

    Attributes:
        text: what the plain template writes.
        u_end: characters before the generation-only text, or None with a ``reason``.
    """

    text: str
    u_end: int | None
    reason: Reason | None = None


class MarkedTemplate:
    """A compiled template with marks.

    Thread-safe: all state of a render is local to it.

    Args:
        source: the template's text.
        environment: the environment that the plain template is compiled in.
    """

    def __init__(self, source: str, environment: jinja2.Environment) -> None:
        tree = environment.parse(source)
        self.guards: Guards = analyse(tree)
        self.reason: Reason | None = None
        self._template: jinja2.Template | None = None
        if self.guards.refusals:
            self.reason = Reason.REFUSED
        elif not self.guards.guarded:
            self.reason = Reason.UNGUARDED
        else:
            _insert(self.guards)
            tree.set_environment(environment)
            code = environment.compile(tree)
            self._template = jinja2.Template.from_code(
                environment, code, environment.make_globals(None)
            )

    def render(self, **variables: Any) -> Rendering | None:
        """Render; None where the template is refused or unguarded (``reason``): render it plainly.

        Raises what the template raises.
        """
        if self._template is None:
            return None
        pieces: list[str] = []
        first: int | None = None
        moved = False

        def mark(kind: int, value: Any = None) -> Any:
            nonlocal first, moved
            if kind == _MOVING:
                moved = True
            elif first is None:
                first = sum(map(len, pieces))
            return value

        template = self._template
        context = template.new_context({**variables, _MARK: mark})
        append = pieces.append
        # As Template.render, but not through list(): a mark counts what has been written so far.
        for piece in template.root_render_func(context):
            append(piece)
        text = "".join(pieces)
        if moved:
            return Rendering(text, None, Reason.MOVING_CONTROL_TEXT)
        return Rendering(text, len(text) if first is None else first)


def _insert(guards: Guards) -> None:
    """Put the marks into the tree that ``guards`` was made from."""
    for kind, branches in ((_GENERATION, guards.branches), (_MOVING, guards.moving)):
        for branch in branches:
            branch.body.insert(0, nodes.ExprStmt(_call(kind), lineno=branch.line))
    for inline in guards.inline:
        marked = _call(_GENERATION, getattr(inline.expression, inline.field))
        setattr(inline.expression, inline.field, marked)


def _call(kind: int, *values: nodes.Expr) -> nodes.Call:
    arguments = [nodes.Const(kind), *values]
    return nodes.Call(nodes.Name(_MARK, "load"), arguments, [], None, None, lineno=1)


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` of Hugging Face templates: its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        caller = self.call_method("_body")
        return nodes.CallBlock(caller, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def environment() -> jinja2.Environment:
    """An environment like the one in which Hugging Face tokenizers compile chat templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    made.globals["raise_exception"] = raise_exception
    return made
