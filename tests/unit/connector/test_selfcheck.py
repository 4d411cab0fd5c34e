"""The self-check passes on the installed vLLM, and names what is missing or changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from backhaul.connector import selfcheck, u_end_plugin
from backhaul.protocols.errors import UnsupportedError


def test_the_installed_vllm_has_every_surface() -> None:
    assert selfcheck.missing_surfaces() == []


@pytest.mark.parametrize("surface", selfcheck.SURFACES, ids=lambda s: s.name)
def test_every_surface_can_be_found_missing(surface: selfcheck.Surface) -> None:
    gone = surface._replace(name=surface.name + "_gone")
    changed = surface._replace(test=lambda item: False)
    assert "missing" in selfcheck.missing_surfaces((gone,))[0]
    assert "changed" in selfcheck.missing_surfaces((changed,))[0]


class Stub:
    """A callable with a signature and a source of its own."""

    def __init__(self, names: Sequence[str], source: str) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        self.source = source

    def __call__(self) -> None: ...


def lacking(needs: selfcheck.Needs) -> Iterator[Stub]:
    """Stubs that lack one thing each."""
    source = "\n".join(needs.fragments)
    for name in needs.names:
        yield Stub([one for one in needs.names if one != name], source)
    if needs.bare:
        yield Stub(["self", "one_more"], source)
    for at, fragment in enumerate(needs.fragments):
        rest = [*needs.fragments[:at], *needs.fragments[at + 1 :]]
        yield Stub(needs.names, "\n".join([*rest, fragment[:-1]]))
        if needs.in_order and at:
            yield Stub(needs.names, "\n".join([fragment, *rest]))


@pytest.mark.parametrize(
    "surface",
    [*selfcheck.SURFACES, *u_end_plugin.SURFACES],
    ids=lambda s: f"{s.module}.{s.name}",
)
def test_every_predicate_wants_each_thing_that_it_names(
    surface: selfcheck.Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(item: Any) -> str:
        assert isinstance(item, Stub)
        return item.source

    monkeypatch.setattr(selfcheck.inspect, "getsource", source)
    needs = surface.test
    if needs is selfcheck.is_property:
        assert needs(property(len)) and not needs(len)
        return
    assert isinstance(needs, selfcheck.Needs)
    assert needs(Stub(needs.names, "\n".join(needs.fragments)))
    stubs = list(lacking(needs))
    assert stubs
    assert not [vars(stub) for stub in stubs if needs(stub)]


def test_a_surface_of_another_module_is_named_not_raised() -> None:
    absent = selfcheck.SURFACES[0]._replace(module="vllm.no_such_module")
    assert "missing" in selfcheck.missing_surfaces((absent,))[0]


def test_the_error_names_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "missing_surfaces", lambda: ["a.b: missing", "c.d: changed"])
    with pytest.raises(UnsupportedError, match=r"a\.b: missing; c\.d: changed"):
        selfcheck.require_vllm_surface()
