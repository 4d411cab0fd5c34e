"""A chat template that is rendered once and says where its generation-only text begins.

The marks are calls that write an empty string of a type of its own, put first into each
generation-only branch of the template's syntax tree; jinja2 does the rest. The text is what the
plain template writes, byte for byte.
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
        fired = 0
        moved = False

        def mark(kind: int, value: object = "") -> str:
            nonlocal fired, moved
            if kind == _MOVING:
                moved = True
                return _UNMARKED
            fired += 1
            return _Marked(value)

        context = self._template.new_context({**variables, _MARK: mark})
        # As jinja2.Template.render, which joins the same pieces.
        pieces: list[str] = list(self._template.root_render_func(context))
        text = "".join(pieces)
        if moved:
            return Rendering(text, None, Reason.MOVING_CONTROL_TEXT)
        length = _length_from_first_mark(pieces, fired)
        if length is None:
            return Rendering(text, None, Reason.REFUSED)
        return Rendering(text, len(text) - length)


class _Marked(str):
    """A piece of output, often empty, at which generation-only text begins. Stays what it is when
    the template turns it into a string."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


_UNMARKED = ""


def _length_from_first_mark(pieces: list[str], fired: int) -> int | None:
    """Characters from the first of ``fired`` marks on, looking at no more than these pieces; None
    where a mark was lost because its output was collected elsewhere first."""
    length = 0
    for piece in reversed(pieces):
        if fired == 0:
            break
        length += len(piece)
        if type(piece) is _Marked:
            fired -= 1
    return length if fired == 0 else None


def _insert(guards: Guards) -> None:
    """Put the marks into the tree that ``guards`` was made from."""
    for kind, branches in ((_GENERATION, guards.branches), (_MOVING, guards.moving)):
        for branch in branches:
            branch.body.insert(0, nodes.Output([_call(kind)], lineno=branch.line))
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
