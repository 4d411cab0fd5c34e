"""The embedded client against a fake catalog: faults that a real daemon does not produce."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import msgspec
import pytest

from backhaul.protocols import store_pb2, store_pb2_grpc
from backhaul.protocols.checkpoint import DomainId, LeaseId, ObjectKey, PublicationId, Reason
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import (
    ConfigError,
    LookupUnanswered,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreRejected,
    StoreUnavailable,
)
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.transfer.backends.embedded import REASONS, EmbeddedStore
from backhaul.transfer.backends.rpc import BACKOFF_S, ERRORS, Breaker, StoreTimeout
from backhaul.transfer.daemon.catalog import STATUS_CODES
from backhaul.transfer.registry import open_store

RECORD = DomainRecord(
    model="m",
    weights="w",
    layout=CacheLayout(
        groups=(GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=16),), hash_tokens=16
    ),
    hash_function="sha256",
    hash_probe="00",
    kv_dtype="bfloat16",
    platform="cpu",
    vllm="0.32",
)


class FakeCatalog(store_pb2_grpc.CatalogServicer):  # type: ignore[misc]
    """Answers what it is told to, and notes what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.instance_id = "first"
        self.domains: set[str] = set()
        self.records: dict[str, bytes] = {}
        self.fail: dict[str, grpc.StatusCode] = {}
        self.lease_names: list[str] = []
        self.heard = threading.Event()
        self.hang = threading.Event()
        self.hang.set()

    def _enter(self, name: str, context: Any) -> None:
        self.calls.append(name)
        if name in self.fail:
            context.abort(self.fail[name], "as told\nwith a second line")
        self.hang.wait(300)

    def _know(self, domain_id: str, context: Any) -> None:
        if domain_id not in self.domains:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown domain")

    def restart(self, instance_id: str) -> None:
        self.instance_id, self.domains = instance_id, set()

    def Hello(self, request: Any, context: Any) -> Any:
        self._enter("Hello", context)
        return store_pb2.HelloReply(instance_id=self.instance_id)

    def OpenDomain(self, request: Any, context: Any) -> Any:
        self._enter("OpenDomain", context)
        self.domains.add(RECORD.domain_id)
        return store_pb2.OpenDomainReply(domain_id=RECORD.domain_id)

    def Lookup(self, request: Any, context: Any) -> Any:
        self._enter("Lookup", context)
        self._know(request.domain_id, context)
        self.wait_s = request.wait_s
        self.repeat = request.repeat
        self.lease_names.append(request.lease_name)
        self.heard.set()
        match = store_pb2.Match(boundary=16, kinds=["decode_end", "of_tomorrow"], reason="new")
        return store_pb2.LookupReply(matches=[match])

    def Reserve(self, request: Any, context: Any) -> Any:
        self._enter("Reserve", context)
        self._know(request.domain_id, context)
        granted = store_pb2.Grant(status=store_pb2.Grant.GRANTED, offset=64, token=5)
        return store_pb2.ReserveReply(
            grants=[granted for _ in request.wants], instance_id=self.instance_id
        )

    def ListCheckpoints(self, request: Any, context: Any) -> Any:
        self._enter("ListCheckpoints", context)
        start = int(request.cursor or 0)
        end = min(start + min(request.limit or 3, 3), 8)
        infos = [store_pb2.CheckpointInfo(boundary=number) for number in range(start, end)]
        return store_pb2.ListCheckpointsReply(
            checkpoints=infos, next_cursor=str(end) if end < 8 else ""
        )

    def ListDomains(self, request: Any, context: Any) -> Any:
        self._enter("ListDomains", context)
        return store_pb2.ListDomainsReply(
            domains=[
                store_pb2.DomainInfo(domain_id=name, record=record)
                for name, record in self.records.items()
            ]
        )

    def Stats(self, request: Any, context: Any) -> Any:
        self._enter("Stats", context)
        return store_pb2.StatsReply(instance_id=self.instance_id)


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


@pytest.fixture
def store(catalog: FakeCatalog) -> Iterator[EmbeddedStore]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    store_pb2_grpc.add_CatalogServicer_to_server(catalog, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = EmbeddedStore(f"127.0.0.1:{port}", client_name="unit")
    yield client
    client.close()
    catalog.hang.set()
    server.stop(0).wait(10)


def lookup(store: EmbeddedStore, timeout_s: float = 60.0) -> Any:
    return store.lookup(RECORD.domain_id, [b"h"], wait_s=60, timeout_s=timeout_s)


class TestRecords:
    """The daemon answers with all domains at once, and walks through all of them for that."""

    def test_every_record_of_an_answer_is_kept(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        records = [msgspec.structs.replace(RECORD, model=f"m{i}") for i in range(5)]
        catalog.records = {one.domain_id: one.canonical() for one in records}
        catalog.records["of another version"] = b'{"version":1}'
        for one in records:
            assert store.domain_record(one.domain_id, timeout_s=60) == one
        assert catalog.calls.count("ListDomains") == 1
        for unknown in ("of another version", "nobody's"):
            with pytest.raises(StoreRejected):
                store.domain_record(DomainId(unknown), timeout_s=60)

    def test_a_domain_that_came_later_is_asked_for(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        with pytest.raises(StoreRejected):
            store.domain_record(RECORD.domain_id, timeout_s=60)
        catalog.records[RECORD.domain_id] = RECORD.canonical()
        assert store.domain_record(RECORD.domain_id, timeout_s=60) == RECORD

    def test_its_time_out_leaves_lookups_alone(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        store.open_domain(RECORD, timeout_s=60)
        lookup(store)
        catalog.hang.clear()
        with pytest.raises(StoreTimeout):
            store.domain_record(RECORD.domain_id, timeout_s=0.2)
        catalog.hang.set()
        catalog.calls.clear()
        assert len(lookup(store).matches) == 1
        assert catalog.calls == ["Lookup"], "nor is it a sign of a restart"


class TestErrors:
    def test_the_map_is_total(self) -> None:
        assert set(ERRORS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}

    def test_it_undoes_the_daemons(self) -> None:
        """What the index raises arrives as the same kind, but for bugs and versions."""
        for kind, code in STATUS_CODES:
            if issubclass(kind, StoreError):
                assert issubclass(kind, ERRORS[code]), (kind, code)

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (grpc.StatusCode.RESOURCE_EXHAUSTED, StoreFull),
            (grpc.StatusCode.INVALID_ARGUMENT, StoreRejected),
            (grpc.StatusCode.INTERNAL, StoreUnavailable),
            (grpc.StatusCode.FAILED_PRECONDITION, StoreRejected),
        ],
    )
    def test_one_line_with_the_method(
        self,
        store: EmbeddedStore,
        catalog: FakeCatalog,
        code: grpc.StatusCode,
        kind: type[StoreError],
    ) -> None:
        catalog.fail["Stats"] = code
        with pytest.raises(kind, match=r"^127\.0\.0\.1:\d+: Stats: as told$"):
            store.stats(timeout_s=60)

    @pytest.mark.parametrize(
        "code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED]
    )
    def test_a_guard_in_front_of_the_store_denies(
        self, catalog: FakeCatalog, code: grpc.StatusCode
    ) -> None:
        """Every call, before the catalog sees it, as a proxy with mutual TLS does."""

        class Guard(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
            def intercept_service(self, continuation: Any, details: Any) -> Any:
                def refuse(_: Any, context: Any) -> Any:
                    context.abort(code, "no certificate of this cluster")

                return grpc.unary_unary_rpc_method_handler(refuse)

        server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[Guard()])
        add: Any = store_pb2_grpc.add_CatalogServicer_to_server
        add(catalog, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        store = EmbeddedStore(f"127.0.0.1:{port}", client_name="unit")
        key = ObjectKey(0, 0, b"h")
        name = PublicationId("p")
        for call in (
            lambda: lookup(store),
            lambda: store.reserve(RECORD.domain_id, name, [(key, 1)], timeout_s=60),
            lambda: store.open_domain(RECORD, timeout_s=60),
        ):
            with pytest.raises(StoreDenied, match="no certificate of this cluster"):
                call()
        assert catalog.calls == []
        denied = next(reason for kind, reason in REASONS if issubclass(StoreDenied, kind))
        assert denied is Reason.DENIED, "what a read or write that is refused comes to"
        store.close()
        server.stop(0).wait(10)

    def test_nobody_listens(self) -> None:
        store = EmbeddedStore("127.0.0.1:1")
        with pytest.raises(StoreUnavailable):
            store.stats(timeout_s=60)
        store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            store.stats(timeout_s=60)


class TestSession:
    def test_hello_once(self, store: EmbeddedStore, catalog: FakeCatalog) -> None:
        for _ in range(3):
            store.stats(timeout_s=60)
        assert catalog.calls == ["Hello", "Stats", "Stats", "Stats"]

    def test_a_restarted_store_learns_its_domains(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        store.open_domain(RECORD, timeout_s=60)
        lookup(store)
        catalog.restart("second")
        catalog.calls.clear()
        lookup(store)
        assert catalog.calls == ["Lookup", "Hello", "OpenDomain", "Lookup"]

    def test_a_domain_that_nobody_opened_is_refused(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        with pytest.raises(StoreRejected):
            store.lookup(DomainId("0" * 16), [], timeout_s=60)
        assert catalog.calls == ["Hello", "Lookup"]

    def test_a_domain_is_remembered_where_opening_failed(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        catalog.fail["OpenDomain"] = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(StoreUnavailable):
            store.open_domain(RECORD, timeout_s=60)
        catalog.fail.clear()
        lookup(store)

    @pytest.mark.parametrize("opened_by_others", [False, True])
    def test_a_grant_is_bound_to_one_life_of_the_store(
        self, store: EmbeddedStore, catalog: FakeCatalog, opened_by_others: bool
    ) -> None:
        store.open_domain(RECORD, timeout_s=60)
        want = (ObjectKey(0, 0, b"h"), 10)
        (first,) = store.reserve(RECORD.domain_id, PublicationId("p"), [want], timeout_s=60)
        catalog.restart("second")
        if opened_by_others:
            catalog.domains.add(RECORD.domain_id)
        (second,) = store.reserve(RECORD.domain_id, PublicationId("p"), [want], timeout_s=60)
        assert first == second  # nothing in the numbers tells them apart
        assert (vars(first)["instance_id"], vars(second)["instance_id"]) == ("first", "second")

    def test_a_lookup_leaves_time_for_the_answer(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        store.open_domain(RECORD, timeout_s=60)
        answer = lookup(store, timeout_s=50.0)
        assert catalog.wait_s == pytest.approx(40.0)
        (match,) = answer.matches  # values of a newer daemon do no harm
        assert [kind.value for kind in match.kinds] == ["decode_end"]
        assert match.reason == "internal"

    def test_each_lookup_names_its_lease(self, store: EmbeddedStore, catalog: FakeCatalog) -> None:
        store.open_domain(RECORD, timeout_s=60)
        for lease_s in (5, 5, 0):
            store.lookup(RECORD.domain_id, [b"h"], lease_s=lease_s, timeout_s=60)
        first, second, third = catalog.lease_names
        assert first and second and first != second and not third

    @pytest.mark.parametrize("repeat", [False, True])
    def test_a_lookup_says_whether_its_request_asked_before(
        self, store: EmbeddedStore, catalog: FakeCatalog, repeat: bool
    ) -> None:
        store.open_domain(RECORD, timeout_s=60)
        store.lookup(RECORD.domain_id, [b"h"], repeat=repeat, timeout_s=60)
        assert catalog.repeat is repeat

    def test_empty_requests_are_not_sent(self, store: EmbeddedStore, catalog: FakeCatalog) -> None:
        store.release([], timeout_s=60)
        store.keep_alive([], timeout_s=60)
        assert catalog.calls == []

    @pytest.mark.parametrize(("limit", "count"), [(0, 8), (2, 2), (3, 3), (5, 5), (9, 8)])
    def test_a_listing_asks_on_until_it_is_whole(
        self, store: EmbeddedStore, limit: int, count: int
    ) -> None:
        infos = store.list_checkpoints(limit=limit, timeout_s=60)
        assert [info.boundary for info in infos] == list(range(count))


class TestHungStore:
    def test_costs_one_deadline_then_nothing(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        now = 100.0
        store._channel.breaker = Breaker(lambda: now)
        store.stats(timeout_s=60)
        catalog.hang.clear()
        with pytest.raises(StoreTimeout):
            store.stats(timeout_s=0.2)
        asked = list(catalog.calls)
        with pytest.raises(StoreTimeout, match=r"next attempt in 0\.2 s"):
            store.release([LeaseId("x")], timeout_s=60)
        catalog.hang.set()
        assert catalog.calls == asked, "it is not asked"
        now += BACKOFF_S[0]
        store.stats(timeout_s=60)

    @pytest.mark.parametrize("lease_s", [0.0, 5.0])
    def test_a_lookup_without_an_answer_says_what_it_may_have_been_granted(
        self, store: EmbeddedStore, catalog: FakeCatalog, lease_s: float
    ) -> None:
        store.open_domain(RECORD, timeout_s=60)
        lookup(store)
        catalog.heard.clear()
        catalog.hang.clear()
        with pytest.raises(StoreTimeout if not lease_s else LookupUnanswered) as caught:
            store.lookup(RECORD.domain_id, [b"h"], lease_s=lease_s, timeout_s=0.2)
        catalog.hang.set()
        assert "Deadline Exceeded" in str(caught.value)
        if isinstance(caught.value, LookupUnanswered):
            assert catalog.heard.wait(300)
            assert caught.value.lease == f"first.{catalog.lease_names[-1]}"

    def test_a_lookup_that_was_never_sent_was_granted_nothing(
        self, store: EmbeddedStore, catalog: FakeCatalog
    ) -> None:
        store._channel.breaker = Breaker(lambda: 100.0)
        store._channel.breaker.timed_out(100.0)
        with pytest.raises(StoreUnavailable, match="next attempt") as caught:
            store.lookup(RECORD.domain_id, [b"h"], lease_s=5, timeout_s=60)
        assert not isinstance(caught.value, LookupUnanswered)
        assert not catalog.calls

    def test_a_hasty_call_does_not_trip(self, store: EmbeddedStore, catalog: FakeCatalog) -> None:
        store.stats(timeout_s=60)
        catalog.hang.clear()
        with pytest.raises(StoreTimeout):
            store.stats(timeout_s=0.01)
        catalog.hang.set()
        store.stats(timeout_s=60)


class TestBreaker:
    @pytest.fixture
    def clock(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    def breaker(self, clock: list[float]) -> Breaker:
        return Breaker(clock=lambda: clock[0])

    def trip(self, breaker: Breaker, clock: list[float]) -> None:
        breaker.enter(1.0)
        breaker.timed_out(clock[0])

    def test_backs_off_further_each_time_but_not_for_ever(
        self, breaker: Breaker, clock: list[float]
    ) -> None:
        waits = []
        for _ in range(8):
            self.trip(breaker, clock)
            started = clock[0]
            while self.refuses(lambda: breaker.enter(0.0)):
                clock[0] += 0.05
            waits.append(clock[0] - started)
        assert waits[0] == pytest.approx(BACKOFF_S[0], abs=0.06)
        assert waits[1] == pytest.approx(2 * BACKOFF_S[0], abs=0.06)
        assert waits[-1] == pytest.approx(BACKOFF_S[1], abs=0.06)

    def test_one_probe_at_a_time(self, breaker: Breaker, clock: list[float]) -> None:
        self.trip(breaker, clock)
        clock[0] += BACKOFF_S[0]
        breaker.enter(1.0)
        assert self.refuses(lambda: breaker.enter(1.0))
        breaker.succeeded()
        breaker.enter(1.0)
        breaker.enter(1.0)

    def test_calls_that_hung_together_count_once(
        self, breaker: Breaker, clock: list[float]
    ) -> None:
        for _ in range(5):
            breaker.enter(1.0)
        for _ in range(5):
            breaker.timed_out(clock[0] - 1)
        clock[0] += BACKOFF_S[0]
        breaker.enter(1.0)

    def test_a_probe_that_never_reports_is_replaced(
        self, breaker: Breaker, clock: list[float]
    ) -> None:
        self.trip(breaker, clock)
        clock[0] += BACKOFF_S[0]
        breaker.enter(1.0)
        clock[0] += 1.01
        breaker.enter(1.0)

    @staticmethod
    def refuses(call: Callable[[], None]) -> bool:
        try:
            call()
        except StoreTimeout:
            return True
        return False


class TestRegistry:
    @pytest.mark.parametrize(
        "uri",
        [
            "",
            "backhaul://",
            "backhaul://host",
            "backhaul://host:0",
            "backhaul://host:seven",
            "backhaul://host:7400/path",
            "backhaul://host:7400?capacity=1MiB",
            "http://host:7400",
            "host:7400",
            "inprocess://",
            "inprocess://name?size=64MiB",
            "inprocess://name?capacity=lots",
            "inprocess://name?capacity=2",
            "inprocess://name?capacity=1023PiB",
            "inprocess://name:1",
        ],
    )
    def test_a_bad_address_is_one_line(self, uri: str) -> None:
        with pytest.raises(ConfigError) as caught:
            open_store(uri)
        assert "\n" not in str(caught.value)

    def test_the_valid_forms_are_named(self) -> None:
        with pytest.raises(ConfigError, match="backhaul://HOST:PORT, inprocess://NAME"):
            open_store("redis://x")

    def test_nothing_is_contacted(self) -> None:
        open_store("backhaul://[::1]:7400", client_name="x").close()

    def test_a_name_is_one_pool(self) -> None:
        first = open_store("inprocess://unit?capacity=2MiB")
        second = open_store("inprocess://unit?capacity=2MiB")
        first.open_domain(RECORD, timeout_s=1)
        assert second.stats(timeout_s=1).domains == 1
        assert second.stats(timeout_s=1).capacity_bytes == 2 << 20
        with pytest.raises(ConfigError, match="open with"):
            open_store("inprocess://unit?capacity=4MiB")
