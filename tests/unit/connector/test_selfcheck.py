"""The self-check passes on the installed vLLM, and names what is missing or changed."""

import pytest

pytest.importorskip("vllm")

from backhaul.connector import selfcheck
from backhaul.protocols.errors import UnsupportedError


def test_the_installed_vllm_has_every_surface() -> None:
    assert selfcheck.missing_surfaces() == []


@pytest.mark.parametrize("surface", selfcheck.SURFACES, ids=lambda s: s.name)
def test_every_surface_can_be_found_missing(surface: selfcheck.Surface) -> None:
    gone = surface._replace(name=surface.name + "_gone")
    changed = surface._replace(test=lambda item: False)
    assert "missing" in selfcheck.missing_surfaces((gone,))[0]
    assert "changed" in selfcheck.missing_surfaces((changed,))[0]


def test_a_surface_of_another_module_is_named_not_raised() -> None:
    absent = selfcheck.SURFACES[0]._replace(module="vllm.no_such_module")
    assert "missing" in selfcheck.missing_surfaces((absent,))[0]


def test_the_error_names_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "missing_surfaces", lambda: ["a.b: missing", "c.d: changed"])
    with pytest.raises(UnsupportedError, match=r"a\.b: missing; c\.d: changed"):
        selfcheck.require_vllm_surface()
