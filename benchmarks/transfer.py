"""Throughput of the embedded store against raw NIXL, over the same memory in the same run.

Measures, per size, with the variants interleaved and the median taken:

- ``write``, ``read``: Store.write and Store.read, with the checksums that production uses.
- ``read, unverified``: Store.read(verify=False).
- ``raw write``, ``raw read``: one NIXL request with the same ranges, posted and polled.
- ``publish``: reserve, write, commit, abandon of objects that the store lacks.
- ``load``: lookup, read, release.

Objects are one page of each of ``--layers`` tensors at shuffled slots, as KV blocks are. The store
is a daemon of its own on this machine, over UCX's own choice of transport (``UCX_TLS`` decides).

    python -m backhaul.benchmarks.transfer --output transfer.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from backhaul.deploy.console import Console
from backhaul.protocols import store_pb2
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    ObjectKey,
    PublicationId,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.transfer.backends.payload import Payload
from backhaul.transfer.backends.rpc import PROTOCOL_VERSION, CatalogChannel
from backhaul.transfer.base import (
    Grant,
    LoadItem,
    MemoryRegion,
    Segments,
    Store,
    TransferResult,
    WriteItem,
)
from backhaul.transfer.descriptors import Objects, coalesced
from backhaul.transfer.nixl_agent import Operation, Outcome, Post
from backhaul.transfer.registry import open_store

MIB = 1 << 20
BLOCK_TOKENS = 16
TIMEOUT_S = 120.0

console = Console()


@dataclass
class Result:
    """One size. Seconds are medians; ``ratio`` is raw over ours, 1 where both are equally fast."""

    mib: float
    objects: int
    repeats: int
    seconds: dict[str, float]
    gb_per_s: dict[str, float]
    ratio: dict[str, float]


class Tensors:
    """Pages of ``objects`` blocks over ``layers`` tensors, each block at a shuffled slot."""

    def __init__(self, objects: int, layers: int, page_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.page_bytes = page_bytes
        self._tensors = [
            np.frombuffer(bytearray(rng.bytes(objects * page_bytes)), dtype=np.uint8)
            for _ in range(layers)
        ]
        self._slots = rng.permutation(objects)

    @property
    def regions(self) -> list[MemoryRegion]:
        """For ``attach``."""
        return [MemoryRegion(t.ctypes.data, t.nbytes) for t in self._tensors]

    def segments(self, index: int) -> Segments:
        """Pages of the object ``index``."""
        at = int(self._slots[index]) * self.page_bytes
        rows = [(t.ctypes.data + at, self.page_bytes) for t in self._tensors]
        return np.array(rows, dtype=np.uint64)

    def digest(self) -> str:
        """Of all bytes."""
        digest = hashlib.blake2b()
        for tensor in self._tensors:
            digest.update(tensor.tobytes())
        return digest.hexdigest()

    def clear(self) -> None:
        """Blank all pages."""
        for tensor in self._tensors:
            tensor[:] = 0


class Raw:
    """NIXL without the store's care: one request over the same ranges."""

    def __init__(self, target: str, regions: Sequence[MemoryRegion]) -> None:
        channel = CatalogChannel(target)
        request = store_pb2.HelloRequest(protocol_version=PROTOCOL_VERSION, client_name="raw")
        hello = channel.call("Hello", request, TIMEOUT_S)
        channel.close()
        self._payload = Payload("raw", regions)
        self._peer = hello.agent_name
        self._payload.agent.add_peer(hello.agent_name, hello.agent_metadata)
        self._pool_address = int(hello.pool_address)

    def prepare(self, segments: Sequence[Segments], offsets: Sequence[int]) -> Post:
        """The descriptors, outside of what is timed; joined where both sides are contiguous."""
        addresses = np.array(offsets, dtype=np.uint64) + np.uint64(self._pool_address)
        pairs = Objects(segments).pairs(addresses, self._payload.table)
        return self._payload.post(coalesced(pairs))

    def run(self, operation: Operation, post: Post) -> None:
        """One transfer."""
        deadline = time.monotonic() + TIMEOUT_S
        ended = self._payload.agent.transfer(operation, self._peer, [post], deadline)
        if ended.outcome is not Outcome.DONE:
            raise RuntimeError(f"raw {operation}: {ended.outcome}: {ended.detail}")

    def close(self) -> None:
        """Free the agent."""
        self._payload.close()


class Bench:
    """All variants of one size, over one client and one raw agent."""

    def __init__(self, store: Store, target: str, objects: int, layers: int, page: int) -> None:
        self.objects, self.bytes_per_object = objects, layers * page
        self._store = store
        self._tensors = Tensors(objects, layers, page)
        store.attach(self._tensors.regions)
        self._raw = Raw(target, self._tensors.regions)
        self._domain = store.open_domain(_domain(objects * layers * page), timeout_s=TIMEOUT_S)
        self._fresh = 0

    def close(self) -> None:
        """Free both agents."""
        self._raw.close()
        self._store.close()

    def run(self, repeats: int) -> Result:
        """Time every variant ``repeats`` times, in turn."""
        chain, grants = self._reserve()
        segments = [self._tensors.segments(index) for index in range(self.objects)]
        post = self._raw.prepare(segments, [grant.offset for grant in grants])
        digest = self._tensors.digest()
        writes = self._writes(grants)
        timed = self._time(
            repeats,
            {
                "raw write": lambda: self._raw.run(Operation.WRITE, post),
                "write": lambda: _check(self._store.write(writes, timeout_s=TIMEOUT_S)),
            },
        )
        self._commit(chain, self._store.write(writes, timeout_s=TIMEOUT_S))
        self._tensors.clear()
        self._load(chain)
        if self._tensors.digest() != digest:
            raise RuntimeError("what was read is not what was written")
        lease = self._store.lookup(self._domain, chain, lease_s=300, timeout_s=TIMEOUT_S).lease
        if lease is None:
            raise RuntimeError("the checkpoint is not there")
        loads = [
            LoadItem(ObjectKey(0, 0, name), self._tensors.segments(i))
            for i, name in enumerate(chain)
        ]

        def read(verify: bool) -> None:
            _check(self._store.read(lease, loads, verify=verify, timeout_s=TIMEOUT_S))

        timed |= self._time(
            repeats,
            {
                "raw read": lambda: self._raw.run(Operation.READ, post),
                "read": lambda: read(True),
                "read, unverified": lambda: read(False),
                "load": lambda: self._load(chain),
            },
        )
        self._store.release([lease], timeout_s=TIMEOUT_S)
        timed |= self._time(repeats, {"publish": self._publish})
        return self._result(timed, repeats)

    def _result(self, timed: dict[str, float], repeats: int) -> Result:
        total = self.objects * self.bytes_per_object
        raw = {name: timed["raw write" if _is_write(name) else "raw read"] for name in timed}
        return Result(
            mib=total / MIB,
            objects=self.objects,
            repeats=repeats,
            seconds=timed,
            gb_per_s={name: total / seconds / 1e9 for name, seconds in timed.items()},
            ratio={name: raw[name] / seconds for name, seconds in timed.items()},
        )

    def _time(self, repeats: int, variants: dict[str, Callable[[], None]]) -> dict[str, float]:
        samples: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(repeats + 1):
            for name, call in variants.items():
                started = time.perf_counter()
                call()
                if turn:  # the first warms up
                    samples[name].append(time.perf_counter() - started)
        return {name: statistics.median(times) for name, times in samples.items()}

    def _reserve(self) -> tuple[list[bytes], list[Grant]]:
        self._fresh += 1
        name = hashlib.sha256(f"{self._domain} {self._fresh}".encode()).digest()
        chain = [
            hashlib.sha256(name + bytes([i % 256, i // 256])).digest() for i in range(self.objects)
        ]
        wants = [(ObjectKey(0, 0, one), self.bytes_per_object) for one in chain]
        publication = PublicationId(f"bench-{os.getpid()}-{self._domain}-{self._fresh}")
        return chain, self._store.reserve(self._domain, publication, wants, timeout_s=TIMEOUT_S)

    def _writes(self, grants: Sequence[Grant]) -> list[WriteItem]:
        return [WriteItem(grant, self._tensors.segments(i)) for i, grant in enumerate(grants)]

    def _commit(self, chain: list[bytes], result: TransferResult) -> None:
        _check(result)
        publication = PublicationId(f"bench-{os.getpid()}-{self._domain}-{self._fresh}")
        manifest = CheckpointManifest(
            boundary=len(chain) * BLOCK_TOKENS,
            hashes=tuple(chain),
            kinds=(CheckpointKind.DECODE_END,),
        )
        commit = self._store.commit(
            self._domain, publication, 0, result.written, manifest, timeout_s=TIMEOUT_S
        )
        if not commit.visible:
            raise RuntimeError(f"not visible: {commit}")
        self._store.abandon(publication, timeout_s=TIMEOUT_S)

    def _publish(self) -> None:
        chain, grants = self._reserve()
        self._commit(chain, self._store.write(self._writes(grants), timeout_s=TIMEOUT_S))

    def _load(self, chain: list[bytes]) -> None:
        lease = self._store.lookup(self._domain, chain, lease_s=300, timeout_s=TIMEOUT_S).lease
        if lease is None:
            raise RuntimeError("the checkpoint is not there")
        items = [
            LoadItem(ObjectKey(0, 0, name), self._tensors.segments(i))
            for i, name in enumerate(chain)
        ]
        _check(self._store.read(lease, items, verify=True, timeout_s=TIMEOUT_S))
        self._store.release([lease], timeout_s=TIMEOUT_S)


def _is_write(name: str) -> bool:
    return name in ("raw write", "write", "publish")


def _check(result: TransferResult) -> None:
    if not result.ok:
        raise RuntimeError(f"a transfer failed: {result.reason}")


def _domain(nbytes: int) -> DomainRecord:
    layout = CacheLayout(
        groups=(GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=BLOCK_TOKENS),),
        hash_tokens=BLOCK_TOKENS,
    )
    return DomainRecord(
        model=f"benchmark-{os.getpid()}-{nbytes}",
        weights="none",
        layout=layout,
        hash_function="sha256",
        hash_probe="00",
        kv_dtype="bfloat16",
        platform="cpu",
        vllm="0.32",
    )


@contextlib.contextmanager
def _daemon(capacity_bytes: int) -> Iterator[str]:
    """A store daemon; yields ``host:port``."""
    command = [sys.executable, "-m", "backhaul.deploy.cli", "store", "--prefault"]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--capacity", str(capacity_bytes), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 120)
        words = process.stdout.readline().replace(",", " ").split() if ready else []
        if "grpc" not in words:
            raise RuntimeError("the store daemon did not start")
        yield words[words.index("grpc") + 1]
    finally:
        process.kill()
        process.wait(timeout=30)


def _show(results: Sequence[Result]) -> None:
    names = list(results[0].seconds)
    table = Table(title="GB/s (share of raw NIXL)")
    table.add_column("MiB", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        cells = [
            f"{result.gb_per_s[name]:.2f}"
            + ("" if name.startswith("raw") else f" ({result.ratio[name]:.2f})")
            for name in names
        ]
        table.add_row(f"{result.mib:g}", *cells)
    console.print(table)


def main(
    sizes: Annotated[
        str, typer.Option(help="Sizes in MiB, separated by commas.")
    ] = "1,4,16,64,256",
    page: Annotated[int, typer.Option(metavar="BYTES", help="One page of one layer.")] = 64 << 10,
    layers: Annotated[int, typer.Option(help="Pages per object.")] = 8,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.")] = 7,
    output: Annotated[Path | None, typer.Option(help="Where to write results as JSON.")] = None,
) -> None:
    """Load and publish throughput of the embedded store against raw NIXL."""
    wanted = [max(round(float(size) * MIB / (page * layers)), 1) for size in sizes.split(",")]
    results = []
    with _daemon(4 * max(wanted) * page * layers + 64 * MIB) as target:
        for objects in wanted:
            store = open_store(f"backhaul://{target}", client_name="benchmark")
            bench = Bench(store, target, objects, layers, page)
            try:
                results.append(bench.run(repeats))
            finally:
                bench.close()
    _show(results)
    if output is not None:
        settings: dict[str, Any] = {
            "page_bytes": page,
            "layers": layers,
            "ucx_tls": os.environ.get("UCX_TLS", ""),
            "cpus": os.cpu_count(),
            "machine": platform.platform(),
            "load_average": os.getloadavg(),
        }
        rows = [asdict(result) for result in results]
        output.write_text(json.dumps({"settings": settings, "results": rows}, indent=2) + "\n")
        console.print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
