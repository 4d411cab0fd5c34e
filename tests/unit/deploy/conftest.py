"""One store daemon for all tests here that do not hurt it; each uses domains of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_kit import RunningStore, running_store


@pytest.fixture(scope="session")
def live_store() -> Iterator[RunningStore]:
    with running_store() as store:
        yield store
