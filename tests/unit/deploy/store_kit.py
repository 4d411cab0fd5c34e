"""A running store daemon with checkpoints in it, and the command line against it."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from backhaul.deploy import cli
from backhaul.protocols import store_pb2, store_pb2_grpc
from backhaul.protocols.layout import GroupKind, checkpoint_objects

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
from index_kit import GRID, chain, make_layout, make_record

START_TIMEOUT_S = 120
LAYOUT = make_layout()


@dataclass
class RunningStore:
    """A daemon process, its addresses, and short calls that fill it."""

    process: subprocess.Popen[str]
    grpc: str
    http: str
    catalog: Any = field(init=False)

    def __post_init__(self) -> None:
        self.catalog = store_pb2_grpc.CatalogStub(  # type: ignore[no-untyped-call]
            grpc.insecure_channel(self.grpc)
        )

    @property
    def uri(self) -> str:
        return f"backhaul://{self.grpc}"

    def open(self, model: str, client: str = "", **fields: Any) -> str:
        """Open a domain that differs by ``model``; its id."""
        import msgspec

        record = msgspec.structs.replace(make_record(model, LAYOUT), **fields).canonical()
        request = store_pb2.OpenDomainRequest(record=record, client_name=client)
        return str(self.catalog.OpenDomain(request).domain_id)

    def publish(
        self, domain: str, tokens: str, *kinds: str, nbytes: int = 256, name: str = ""
    ) -> None:
        """Publish the checkpoint at the end of ``tokens`` (one letter: one block)."""
        self.publish_hashes(domain, chain(tokens), *kinds, nbytes=nbytes, name=name or tokens)

    def publish_hashes(
        self,
        domain: str,
        hashes: list[bytes],
        *kinds: str,
        nbytes: int = 256,
        name: str = "p",
        producer: str = "decode-0",
    ) -> None:
        """Publish a checkpoint whose prefix has these block hashes."""
        boundary = len(hashes) * GRID
        wants = [
            store_pb2.Want(
                key=store_pb2.Key(rank=0, group=group, block_hash=block_hash), nbytes=nbytes
            )
            for group, block_hash in checkpoint_objects(LAYOUT, boundary, hashes)
        ]
        request = store_pb2.ReserveRequest(domain_id=domain, publication_id=name, wants=wants)
        written = [
            store_pb2.Written(key=want.key, token=grant.token, checksum=1)
            for want, grant in zip(wants, self.catalog.Reserve(request).grants, strict=True)
            if grant.status == store_pb2.Grant.GRANTED
        ]
        manifest = store_pb2.Manifest(
            boundary=boundary, hashes=hashes, kinds=kinds or ["decode_end"], producer=producer
        )
        reply = self.catalog.Commit(
            store_pb2.CommitRequest(
                domain_id=domain, publication_id=name, rank=0, written=written, manifest=manifest
            )
        )
        assert reply.visible
        self.catalog.Abandon(store_pb2.AbandonRequest(publication_id=name))

    def leave_loose(self, domain: str, tokens: str, kind: GroupKind) -> None:
        """Commit one class's objects of a prefix, and no checkpoint."""
        hashes = chain(tokens)
        groups = [group.index for group in LAYOUT.groups if group.kind is kind]
        keys = [
            store_pb2.Key(rank=0, group=group, block_hash=block_hash)
            for group, block_hash in checkpoint_objects(LAYOUT, len(hashes) * GRID, hashes)
            if group in groups
        ]
        name = f"loose-{domain}-{tokens}-{kind}"
        grants = self.catalog.Reserve(
            store_pb2.ReserveRequest(
                domain_id=domain,
                publication_id=name,
                wants=[store_pb2.Want(key=key, nbytes=256) for key in keys],
            )
        ).grants
        written = [
            store_pb2.Written(key=key, token=grant.token, checksum=1)
            for key, grant in zip(keys, grants, strict=True)
            if grant.status == store_pb2.Grant.GRANTED
        ]
        self.catalog.Commit(
            store_pb2.CommitRequest(domain_id=domain, publication_id=name, rank=0, written=written)
        )
        self.catalog.Abandon(store_pb2.AbandonRequest(publication_id=name))

    def lookup(self, domain: str, tokens: str, lease_s: float = 0.0) -> Any:
        request = store_pb2.LookupRequest(
            domain_id=domain, boundary_hashes=chain(tokens), lease_s=lease_s
        )
        return self.catalog.Lookup(request)


@contextlib.contextmanager
def running_store(*options: str) -> Iterator[RunningStore]:
    """A daemon for as long as the block lasts."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "backhaul.deploy.cli", "store", "--listen=127.0.0.1:0"),
            *("--http=127.0.0.1:0", "--capacity=4MiB", "--log-level=warning", *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        killer.cancel()
        match = re.search(r"grpc (\S+), .*http (\S+),", line)
        if match is None:
            pytest.fail(f"no ready line but {line!r}")
        yield RunningStore(process, match[1], match[2])
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def backhaul(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command, run in this process: starting
    one per call would take most of a test's time."""
    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO((stdin or "").encode()))
    with (
        mock.patch.object(sys, "argv", ["backhaul", *arguments]),
        mock.patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, out.getvalue(), err.getvalue()
