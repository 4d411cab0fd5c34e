"""A chat template that is rendered once and says where its generation-only text begins.

The marks are empty strings of a type of its own, written first in each generation-only branch of
the template's syntax tree; jinja2 does the rest. The text is what the plain template writes, byte
for byte. They are variables and not calls: in a sandbox a call takes longer than all else here.
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

_MARK, _INLINE = "_backhaul_mark", "_backhaul_inline"
_MOVED, _MOVED_INLINE = "_backhaul_moved", "_backhaul_moved_inline"


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
        self._moving = bool(self.guards.moving.branches or self.guards.moving.inline)
        self._inline = bool(self.guards.inline)
        self._template: jinja2.Template | None = None
        if self.guards.refusals:
            self.reason = Reason.REFUSED
        elif not self.guards.guarded:
            self.reason = Reason.UNGUARDED
        elif environment.finalize is not None or environment.autoescape is not False:
            self.reason = Reason.REFUSED  # output is made anew: a mark could be lost unseen
        else:
            _insert(self.guards)
            tree.set_environment(environment)
            code = environment.compile(tree)
            # Themselves, and not ChainMaps over them as of plain templates: those are copied into
            # each render entry by entry.
            self._template = jinja2.Template.from_code(environment, code, environment.globals)
            self._new_context = self._template.new_context
            self._render = self._template.root_render_func

    def render(self, **variables: Any) -> Rendering | None:
        """Render; None where the template is refused or unguarded (``reason``): render it plainly.

        Raises what the template raises.
        """
        if self._template is None:
            return None
        mark = moved = _Mark()
        variables[_MARK] = mark  # this call's own dictionary
        if self._moving:
            variables[_MOVED] = moved = _Mark()
            variables[_MOVED_INLINE] = moved.before
        if self._inline:
            variables[_INLINE] = mark.before
        # As jinja2.Template.render, which joins the same pieces.
        pieces: list[str] = list(self._render(self._new_context(variables)))
        text = "".join(pieces)
        if moved is not mark and moved.written:
            return Rendering(text, None, Reason.MOVING_CONTROL_TEXT)
        length = _length_from_first_mark(pieces, mark.written) if mark.written else 0
        if length is None:
            return Rendering(text, None, Reason.REFUSED)
        return Rendering(text, len(text) - length)


class _Marked(str):
    """A piece of output at which generation-only text begins. Stays what it is when the template
    turns it into a string."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


class _Mark(_Marked):
    """An empty piece that counts how often it was written, of one render."""

    written = 0

    def __str__(self) -> str:
        self.written += 1
        return self

    def before(self, value: object) -> _Marked:
        """The same in front of a value, for a place that takes one expression."""
        self.written += 1
        return _Marked(value)


def _length_from_first_mark(pieces: list[str], fired: int) -> int | None:
    """Characters from the first of ``fired`` marks on, looking at no more than these pieces; None
    where a mark was lost because its output was collected elsewhere first."""
    length = 0
    for piece in reversed(pieces):
        if fired == 0:
            break
        length += len(piece)
        if isinstance(piece, _Marked):
            fired -= 1
    return length if fired == 0 else None


def _insert(guards: Guards) -> None:
    """Put the marks into the tree that ``guards`` was made from."""
    for name, branches in ((_MARK, guards.branches), (_MOVED, guards.moving.branches)):
        for branch in branches:
            written = nodes.Name(name, "load", lineno=branch.line)
            branch.body.insert(0, nodes.Output([written], lineno=branch.line))
    for name, places in ((_INLINE, guards.inline), (_MOVED_INLINE, guards.moving.inline)):
        for inline in places:
            function = nodes.Name(name, "load")
            value = getattr(inline.expression, inline.field)
            marked = nodes.Call(function, [value], [], None, None, lineno=1)
            setattr(inline.expression, inline.field, marked)


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
