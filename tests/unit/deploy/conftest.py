"""One store daemon for all tests here that do not hurt it; each uses domains of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from store_kit import RunningStore, running_store

# How long an example takes is the machine's business.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def live_store() -> Iterator[RunningStore]:
    with running_store() as store:
        yield store
