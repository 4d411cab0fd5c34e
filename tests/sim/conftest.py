"""The simulations need vLLM; without it nothing here is collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness import Pair
    from sim_bench import Bench

collect_ignore_glob = ["*.py"] if find_spec("vllm") is None else []


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A prefill and a decode side with a store of their own."""
    from harness import Pair, new_uri

    one = Pair(new_uri())
    yield one
    one.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A pair whose store can be made to fail."""
    from sim_bench import Bench

    one = Bench()
    yield one
    one.pair.close()
