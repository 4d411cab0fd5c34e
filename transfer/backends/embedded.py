"""Temporary embedded client."""

from __future__ import annotations

import threading
import time
import uuid

import grpc
import numpy as np

from backhaul.protocols import store_pb2 as pb
from backhaul.protocols import store_pb2_grpc as rpc
from backhaul.protocols.checkpoint import *
from backhaul.protocols.errors import *
from backhaul.transfer.base import *


class EmbeddedStore(Store):
    def __init__(self, target, client_name=""):
        self.target = target
        self.stub = None
        self.lock = threading.Lock()
        self.agent = None
        self.peer = None
        self.domains = {}
        self.regions = []

    def _call(self, name, request, timeout_s):
        with self.lock:
            if self.stub is None:
                self.stub = rpc.CatalogStub(grpc.insecure_channel(self.target, options=[("grpc.max_receive_message_length", 1 << 26)]))
        try:
            return getattr(self.stub, name)(request, timeout=timeout_s)
        except grpc.RpcError as e:
            code = e.code()
            if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise StoreRejected(e.details())
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise StoreFull(e.details())
            raise StoreUnavailable(e.details())

    def _hello(self, timeout_s):
        r = self._call("Hello", pb.HelloRequest(protocol_version=1, client_name="x"), timeout_s)
        return r

    def attach(self, regions):
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"backhaul-{uuid.uuid4().hex}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(r.address, r.nbytes, r.device, "") for r in regions], "DRAM")

    def _connect(self):
        with self.lock:
            if self.peer is None:
                pass
        if self.peer is None:
            h = self._hello(2.0)
            with self.lock:
                if self.peer is None:
                    self.peer = self.agent.add_remote_agent(h.agent_metadata)
                    self.base = h.pool_address

    def _xfer(self, op, local, remote, timeout_s):
        with self.lock:
            l = self.agent.get_xfer_descs(local, "DRAM")
            r = self.agent.get_xfer_descs(remote, "DRAM")
            h = self.agent.initialize_xfer(op, l, r, self.peer)
            st = self.agent.transfer(h)
            end = time.monotonic() + timeout_s
            while st == "PROC" and time.monotonic() < end:
                time.sleep(0.0005)
                st = self.agent.check_xfer_state(h)
            self.agent.release_xfer_handle(h)
        return st == "DONE"

    @staticmethod
    def _descs(offsets, segs, base):
        local, remote = [], []
        for off, seg in zip(offsets, segs):
            pos = base + off
            for a, n in seg.tolist():
                local.append((a, n, 0))
                remote.append((pos, n, 0))
                pos += n
        return np.array(local, dtype=np.uint64), np.array(remote, dtype=np.uint64)

    def read(self, lease, items, *, verify, timeout_s):
        try:
            self._connect()
            loc = self._call("Locate", pb.LocateRequest(lease_id=lease, keys=[pb.Key(rank=i.key.rank, group=i.key.group, block_hash=i.key.block_hash) for i in items]), timeout_s)
        except StoreRejected:
            return TransferResult(ok=False, reason=Reason.LEASE_EXPIRED)
        except StoreError:
            return TransferResult(ok=False, reason=Reason.UNREACHABLE)
        l, r = self._descs([x.offset for x in loc.locations], [i.segments for i in items], self.base)
        ok = self._xfer("READ", l, r, timeout_s)
        return TransferResult(ok=ok, reason=None if ok else Reason.TIMEOUT, nbytes=int(l[:, 1].sum()))

    def write(self, items, *, timeout_s):
        self._connect()
        l, r = self._descs([i.grant.offset for i in items], [i.segments for i in items], self.base)
        ok = self._xfer("WRITE", l, r, timeout_s)
        return TransferResult(ok=ok, reason=None if ok else Reason.TIMEOUT, nbytes=int(l[:, 1].sum()), written=tuple(Written(i.grant.key, i.grant.token, 0) for i in items) if ok else ())

    def open_domain(self, record, *, timeout_s):
        self._call("OpenDomain", pb.OpenDomainRequest(record=record.canonical()), timeout_s)
        return record.domain_id

    def announce(self, domain, boundary, block_hash, *, ttl_s, timeout_s):
        self._call("Announce", pb.AnnounceRequest(domain_id=domain, boundary=boundary, block_hash=block_hash, ttl_s=ttl_s), timeout_s)

    def reserve(self, domain, publication, wants, *, timeout_s):
        r = self._call("Reserve", pb.ReserveRequest(domain_id=domain, publication_id=publication, wants=[pb.Want(key=pb.Key(rank=k.rank, group=k.group, block_hash=k.block_hash), nbytes=n) for k, n in wants]), timeout_s)
        m = {1: GrantStatus.GRANTED, 2: GrantStatus.PRESENT, 3: GrantStatus.BUSY, 4: GrantStatus.FULL}
        return [Grant(k, m[g.status], n, g.offset, g.token) for (k, n), g in zip(wants, r.grants)]

    def commit(self, domain, publication, rank, written, manifest=None, *, timeout_s):
        req = pb.CommitRequest(domain_id=domain, publication_id=publication, rank=rank, written=[pb.Written(key=pb.Key(rank=w.key.rank, group=w.key.group, block_hash=w.key.block_hash), token=w.token, checksum=w.checksum) for w in written])
        if manifest:
            req.manifest.CopyFrom(pb.Manifest(boundary=manifest.boundary, hashes=manifest.hashes, kinds=manifest.kinds, producer=manifest.producer))
        r = self._call("Commit", req, timeout_s)
        return CommitResult(r.visible, tuple(ObjectKey(k.rank, k.group, k.block_hash) for k in r.missing))

    def abandon(self, publication, *, timeout_s):
        self._call("Abandon", pb.AbandonRequest(publication_id=publication), timeout_s)

    def keep_alive(self, publications, *, timeout_s):
        self._call("KeepAlive", pb.KeepAliveRequest(publication_ids=publications), timeout_s)

    def lookup(self, domain, boundary_hashes, *, above_tokens=0, lease_s=0.0, wait_s=0.0, timeout_s):
        r = self._call("Lookup", pb.LookupRequest(domain_id=domain, boundary_hashes=boundary_hashes, above_tokens=above_tokens, lease_s=lease_s, wait_s=wait_s), timeout_s)
        ms = tuple(CheckpointMatch(boundary=m.boundary, kinds=tuple(CheckpointKind(k) for k in m.kinds), consumable=m.consumable, reason=Reason(m.reason) if m.reason else None, age_s=m.age_s, producer=m.producer) for m in r.matches)
        return LookupResult(matches=ms, lease=r.lease_id or None, waited_s=r.waited_s)

    def renew(self, lease, lease_s, *, timeout_s):
        pass

    def release(self, leases, *, timeout_s):
        self._call("ReleaseLease", pb.ReleaseLeaseRequest(lease_ids=leases), timeout_s)

    def stats(self, *, timeout_s):
        return StoreStats()

    def list_checkpoints(self, domain=None, *, limit=0, timeout_s):
        return []

    def close(self):
        pass
