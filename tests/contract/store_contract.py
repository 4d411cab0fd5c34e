"""What the conformance suite needs: fake KV pages, a two-group layout, hash chains, daemons."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreError
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout, checkpoint_objects
from backhaul.transfer.base import (
    CommitResult,
    Grant,
    GrantStatus,
    LoadItem,
    MemoryRegion,
    Segments,
    Store,
    TransferResult,
    WriteItem,
    Written,
)

TIMEOUT_S = 20.0
"""Generous: a loaded machine must not fail a test that is not about time."""
START_TIMEOUT_S = 120
"""Importing NIXL takes seconds, and far more on a machine that is busy otherwise."""
HASH_TOKENS = 16
BOUNDARY = 32
"""Tokens between two boundaries: attention blocks hold 16 tokens, states 32."""
ATTENTION, STATE = 0, 1
PAGE_BYTES = {ATTENTION: 8 << 10, STATE: 20 << 10}
PAGES = {ATTENTION: 3, STATE: 2}
"""Layers per group; an object is one page of each."""
CAPACITY_BYTES = 2 << 20
PUBLICATION_TTL_S = 60.0
"""Outlasts every test that is not about publications that run out."""
SHORT_TTL_S = 2.0
"""For those that are; see ``undisturbed``."""

T = TypeVar("T")
ClientMaker = Callable[[], Store]
WorkerMaker = Callable[..., "Worker"]
"""(domain, rank) -> a worker; both have defaults. Fixtures, see conftest.py."""

_unique = itertools.count()


def object_size(group: int) -> int:
    """Bytes of one object of ``group``."""
    return PAGE_BYTES[group] * PAGES[group]


def make_domain(ranks: int = 1, *, shared_attention: bool = False) -> DomainRecord:
    """A domain that no other test uses. ``shared_attention``: all ranks hold the same of it."""
    layout = CacheLayout(
        groups=(
            GroupLayout(
                index=ATTENTION,
                kind=GroupKind.FULL,
                block_tokens=16,
                copies=ranks if shared_attention else 1,
            ),
            GroupLayout(index=STATE, kind=GroupKind.RECURRENT, block_tokens=32),
        ),
        hash_tokens=HASH_TOKENS,
        ranks=ranks,
    )
    return DomainRecord(
        model=f"contract-{os.getpid()}-{next(_unique)}",
        weights="w",
        layout=layout,
        hash_function="sha256",
        hash_probe="00",
        kv_dtype="bfloat16",
        platform="cpu",
        vllm="0.32",
    )


def hash_chain(seed: str, tokens: int, parent: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """Block hashes of a prefix of ``tokens`` tokens that continues ``parent``."""
    chain = list(parent)
    while len(chain) * HASH_TOKENS < tokens:
        chain.append(hashlib.sha256((chain[-1] if chain else b"") + seed.encode()).digest())
    return tuple(chain)


def at_boundaries(chain: Sequence[bytes]) -> list[bytes]:
    """The hashes that a lookup wants."""
    step = BOUNDARY // HASH_TOKENS
    return list(chain[step - 1 :: step])


def content(key: ObjectKey) -> np.ndarray:
    """The bytes that belong to an object: the same wherever it is made."""
    seed = hashlib.sha256(repr(key).encode()).digest()
    size = object_size(key.group)
    return np.frombuffer(np.random.default_rng(list(seed)).bytes(size), dtype=np.uint8)


class Pages:
    """A worker's KV memory: slots of each group, an object's pages far apart as in vLLM."""

    def __init__(self, slots: int = 24) -> None:
        self.slots = slots
        self._tensors = {
            (group, layer): np.zeros(PAGE_BYTES[group] * slots, dtype=np.uint8)
            for group in PAGES
            for layer in range(PAGES[group])
        }

    @property
    def regions(self) -> list[MemoryRegion]:
        return [MemoryRegion(t.ctypes.data, t.nbytes) for t in self._tensors.values()]

    def segments(self, group: int, slot: int) -> Segments:
        size = PAGE_BYTES[group]
        rows = [
            (self._tensors[group, layer].ctypes.data + slot * size, size)
            for layer in range(PAGES[group])
        ]
        return np.array(rows, dtype=np.uint64)

    def put(self, group: int, slot: int, data: np.ndarray) -> None:
        size = PAGE_BYTES[group]
        for layer in range(PAGES[group]):
            part = data[layer * size : (layer + 1) * size]
            self._tensors[group, layer][slot * size : (slot + 1) * size] = part

    def get(self, group: int, slot: int) -> np.ndarray:
        size = PAGE_BYTES[group]
        return np.concatenate(
            [
                self._tensors[group, layer][slot * size : (slot + 1) * size]
                for layer in range(PAGES[group])
            ]
        )


@dataclass
class Worker:
    """One rank: a client of the store, and pages."""

    store: Store
    domain: DomainRecord
    rank: int = 0
    pages: Pages = field(default_factory=Pages)
    leases: list[LeaseId] = field(default_factory=list)
    publications: dict[PublicationId, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store.attach(self.pages.regions)
        self.domain_id: DomainId = self.store.open_domain(self.domain, timeout_s=TIMEOUT_S)

    def keys(self, chain: Sequence[bytes], boundary: int) -> list[ObjectKey]:
        """What this rank loads of a checkpoint."""
        layout = self.domain.layout
        return [
            ObjectKey(layout.groups[group].owner(self.rank), group, block_hash)
            for group, block_hash in checkpoint_objects(layout, boundary, chain)
        ]

    def reserve(self, publication: PublicationId, keys: Sequence[ObjectKey]) -> list[Grant]:
        wants = [(key, object_size(key.group)) for key in keys]
        self.publications[publication] = None
        return self.store.reserve(self.domain_id, publication, wants, timeout_s=TIMEOUT_S)

    def write(self, grants: Sequence[Grant], timeout_s: float = TIMEOUT_S) -> TransferResult:
        items = []
        for slot, grant in enumerate(g for g in grants if g.status is GrantStatus.GRANTED):
            self.pages.put(grant.key.group, slot, content(grant.key))
            items.append(WriteItem(grant, self.pages.segments(grant.key.group, slot)))
        return self.store.write(items, timeout_s=timeout_s)

    def commit(
        self,
        publication: PublicationId,
        written: Sequence[Written],
        chain: Sequence[bytes] = (),
        boundary: int = 0,
        kind: CheckpointKind = CheckpointKind.DECODE_END,
    ) -> CommitResult:
        manifest = CheckpointManifest(
            boundary=boundary, hashes=tuple(chain[: boundary // HASH_TOKENS]), kinds=(kind,)
        )
        return self.store.commit(
            self.domain_id,
            publication,
            self.rank,
            written,
            manifest if boundary else None,
            timeout_s=TIMEOUT_S,
        )

    def publish(
        self, chain: Sequence[bytes], boundary: int, publication: PublicationId | None = None
    ) -> CommitResult:
        """All of one rank's part; ends the publication unless it was named by the caller."""
        name = publication or new_publication()
        own = [key for key in self.keys(chain, boundary) if key.rank == self.rank]
        grants = self.reserve(name, own)
        assert all(g.status in (GrantStatus.GRANTED, GrantStatus.PRESENT) for g in grants), grants
        result = self.write(grants)
        assert result.ok, result
        commit = self.commit(name, result.written, chain, boundary)
        if publication is None:
            self.store.abandon(name, timeout_s=TIMEOUT_S)
        return commit

    def lookup(
        self, chain: Sequence[bytes], *, lease_s: float = 30.0, wait_s: float = 0.0
    ) -> tuple[list[int], LeaseId | None]:
        """Consumable boundaries, deepest first, and the lease on them."""
        answer = self.store.lookup(
            self.domain_id,
            at_boundaries(chain),
            lease_s=lease_s,
            wait_s=wait_s,
            timeout_s=TIMEOUT_S,
        )
        if answer.lease is not None:
            self.leases.append(answer.lease)
        return [m.boundary for m in answer.matches if m.consumable], answer.lease

    def leave(self) -> None:
        """Give back what was not: the next test may need the whole store."""
        self.store.release(self.leases, timeout_s=TIMEOUT_S)
        for publication in self.publications:
            self.store.abandon(publication, timeout_s=TIMEOUT_S)

    def read(
        self,
        lease: LeaseId,
        chain: Sequence[bytes],
        boundary: int,
        *,
        verify: bool = True,
        timeout_s: float = TIMEOUT_S,
        first_slot: int = 0,
    ) -> TransferResult:
        """Into slots from ``first_slot`` on, which are blanked before."""
        items = []
        for slot, key in enumerate(self.keys(chain, boundary), start=first_slot):
            self.pages.put(key.group, slot, np.zeros(object_size(key.group), dtype=np.uint8))
            items.append(LoadItem(key, self.pages.segments(key.group, slot)))
        return self.store.read(lease, items, verify=verify, timeout_s=timeout_s)

    def holds(self, chain: Sequence[bytes], boundary: int, first_slot: int = 0) -> bool:
        """Whether the pages hold exactly the checkpoint's bytes, as ``read`` places them."""
        return all(
            np.array_equal(self.pages.get(key.group, slot), content(key))
            for slot, key in enumerate(self.keys(chain, boundary), start=first_slot)
        )


def new_publication() -> PublicationId:
    """A name that nobody used."""
    return PublicationId(f"pub-{os.getpid()}-{next(_unique)}")


def undisturbed(attempt: Callable[[], T], within_s: float) -> T:
    """What ``attempt`` answers when it takes less than ``within_s``. One that took longer, on a
    busy machine, says nothing, for what it depends on may have run out: it is made again."""
    while True:
        began = time.monotonic()
        try:
            answer = attempt()
        except (AssertionError, StoreError):
            if time.monotonic() - began < within_s:
                raise
        else:
            if time.monotonic() - began < within_s:
                return answer


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether ``condition`` becomes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass
class Daemon:
    """A store daemon in its own process."""

    process: subprocess.Popen[str]
    port: int

    @property
    def uri(self) -> str:
        return f"backhaul://127.0.0.1:{self.port}"

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, also where it is stopped, and reap."""
        self.process.kill()
        self.process.wait(timeout=300)


@contextlib.contextmanager
def running_daemon(
    port: int = 0, *, publication_ttl_s: float = PUBLICATION_TTL_S
) -> Iterator[Daemon]:
    """A daemon that answers; killed by its pid at the end, whatever happens."""
    command = [sys.executable, "-m", "backhaul.deploy.cli", "store"]
    command += ["--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
    command += ["--capacity", str(CAPACITY_BYTES), "--publication-ttl", str(publication_ttl_s)]
    command += ["--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        found = re.search(r"grpc \S+:(\d+)", line)
        assert found, f"the daemon did not start: {line!r}"
        yield Daemon(process, int(found[1]))
    finally:
        process.kill()
        process.wait(timeout=300)
        if process.stdout is not None:
            process.stdout.close()
