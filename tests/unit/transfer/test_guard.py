"""What no client of ours would send: bytes, numbers and messages of any content."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_kit import GRID, Driver, chain, keys_of, make_layout, make_record
from prometheus_client import CollectorRegistry

from backhaul.protocols import store_pb2, store_pb2_grpc
from backhaul.protocols.checkpoint import PublicationId
from backhaul.protocols.domain import RECORD_BYTES_MAX
from backhaul.protocols.layout import GROUPS_MAX, NAME_MAX, CacheLayout, GroupKind, GroupLayout
from backhaul.transfer.backends.rpc import MESSAGE_BYTES_MAX
from backhaul.transfer.backends.wire import domain_message
from backhaul.transfer.daemon.catalog import Catalog
from backhaul.transfer.daemon.guard import (
    COUNTS_MAX,
    InputGuard,
    too_many,
    wrong_number,
)
from backhaul.transfer.daemon.metrics import RpcTimer
from backhaul.transfer.daemon.status import StatusReport
from backhaul.transfer.entries import CLIENTS_MAX, DOMAINS_MAX, HASHES_MAX, NAME_BYTES_MAX
from backhaul.transfer.index import BlockIndex

SERVICE = store_pb2.DESCRIPTOR.services_by_name["Catalog"]
METHODS = {method.name: method.input_type for method in SERVICE.methods}
MESSAGES: list[Descriptor] = list(store_pb2.DESCRIPTOR.message_types_by_name.values())
DOMAIN = make_record("x", make_layout()).domain_id
FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def number_paths(
    descriptor: Descriptor, seen: frozenset[str] = frozenset()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Every way from a message to a floating-point field."""
    for field in descriptor.fields:
        if field.cpp_type in FLOATS:
            yield (field,)
        elif field.message_type is not None and field.message_type.full_name not in seen:
            for rest in number_paths(field.message_type, seen | {descriptor.full_name}):
                yield (field, *rest)


PATHS = [(message, path) for message in MESSAGES for path in number_paths(message)]
assert len(PATHS) > 12


def filled(descriptor: Descriptor, path: tuple[FieldDescriptor, ...], value: float) -> Any:
    message: Any = GetMessageClass(descriptor)()
    target = message
    for field in path[:-1]:
        child = getattr(target, field.name)
        target = child.add() if field.is_repeated else child
    if path[-1].is_repeated:
        getattr(target, path[-1].name).append(value)
    else:
        setattr(target, path[-1].name, value)
    return message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5e-324])
@pytest.mark.parametrize(("descriptor", "path"), PATHS)
def test_no_message_carries_what_is_no_amount(
    descriptor: Descriptor, path: tuple[FieldDescriptor, ...], value: float
) -> None:
    wrong = wrong_number(filled(descriptor, path, value))
    name = ".".join(field.name for field in path)
    assert wrong == f"{name} is {value}: it must be finite and 0 or more"
    assert wrong_number(filled(descriptor, path, 0.25)) is None


# -- a server ---------------------------------------------------------------------------------


class _Pool:
    agent_name, agent_metadata, address, capacity_bytes = "pool", b"", 0, 1 << 20


def make_catalog() -> tuple[Catalog, BlockIndex]:
    index = BlockIndex(1 << 20, publication_ttl_s=60, lease_max_s=60)
    index.open_domain(make_record("x", make_layout()), 0.0)
    return Catalog(index, _Pool()), index  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A server of the catalog behind the guard, on a loop of its own."""
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        server = grpc.aio.server(interceptors=[InputGuard(), RpcTimer(CollectorRegistry())])
        store_pb2_grpc.add_CatalogServicer_to_server(  # type: ignore[no-untyped-call]
            make_catalog()[0], server
        )
        state["port"] = server.add_insecure_port("127.0.0.1:0")
        state["stop"] = asyncio.Event()
        state["loop"] = asyncio.get_running_loop()
        await server.start()
        ready.set()
        await state["stop"].wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield f"127.0.0.1:{state['port']}"
    state["loop"].call_soon_threadsafe(state["stop"].set)
    thread.join(300)


def send(target: str, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/{SERVICE.full_name}/{method}")
        try:
            call(data, timeout=300)
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code(), failed.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    "path", ["/", "//", "/a", "a", "/a/b/c", "/backhaul.v1.Catalog/", "/backhaul.v1.Catalog//Hello",
             "/backhaul.v1.Catalog/Hello/", "/backhaul.v1.Catalog/../Hello", "/x" * 500],
)  # fmt: skip
def test_a_path_that_is_no_method(target: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path)(b"", timeout=300)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caplog.messages == []


def is_message(descriptor: Descriptor, data: bytes) -> bool:
    try:
        GetMessageClass(descriptor).FromString(data)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_refused_without_noise(
    target: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = b"\xff" * 9
    assert not is_message(METHODS[method], garbage)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            code, details = send(target, method, garbage)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details == f"{method}: 9 bytes that are not its request message"
    assert not [record for record in caplog.records if record.exc_info]
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) <= 1


@settings(max_examples=40, deadline=None)
@given(method=st.sampled_from(sorted(METHODS)), data=st.binary(max_size=60))
@example(method="Lookup", data=b"\x0a\xff")
def test_any_bytes_are_answered(target: str, method: str, data: bytes) -> None:
    code, details = send(target, method, data)
    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), details
    if not is_message(METHODS[method], data):
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in details


REQUEST_PATHS = [(name, path) for name, one in METHODS.items() for path in number_paths(one)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize(("method", "path"), REQUEST_PATHS)
def test_a_number_that_is_no_amount_is_refused_in_one_line(
    target: str, method: str, path: tuple[FieldDescriptor, ...], value: float
) -> None:
    request = filled(METHODS[method], path, value)
    code, details = send(target, method, request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{path[-1].name} is {value}" in details and "\n" not in details


class Aborted(Exception):
    """What ``abort`` of a context raises."""


class Context:
    """A call; without time left nobody waits for it any longer, so that whatever it holds is taken
    back."""

    def __init__(self, left_s: float = 0.0) -> None:
        self.left_s = left_s
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.callbacks: list[Any] = []

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise Aborted

    def time_remaining(self) -> float:
        return self.left_s

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


# -- how many, how large -----------------------------------------------------------------------


def repeated_paths(
    descriptor: Descriptor, seen: frozenset[str] = frozenset()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Every way from a message to a repeated field."""
    for field in descriptor.fields:
        if field.is_repeated:
            yield (field,)
        if field.message_type is not None and field.message_type.full_name not in seen:
            for rest in repeated_paths(field.message_type, seen | {descriptor.full_name}):
                yield (field, *rest)


REPEATED = [(name, path) for name, one in METHODS.items() for path in repeated_paths(one)]


def test_every_repeated_field_of_every_call_is_bounded() -> None:
    assert {path[-1].full_name for _, path in REPEATED} == set(COUNTS_MAX)
    assert all(not field.is_repeated for _, path in REPEATED for field in path[:-1])


def with_values(descriptor: Descriptor, path: tuple[FieldDescriptor, ...], count: int) -> Any:
    message: Any = GetMessageClass(descriptor)()
    target = message
    for field in path[:-1]:
        target = getattr(target, field.name)
        target.SetInParent()
    last = path[-1]
    if last.message_type is not None:
        one = GetMessageClass(last.message_type)()
    else:
        one = b"" if last.type == FieldDescriptor.TYPE_BYTES else ""
    getattr(target, last.name).extend([one] * count)
    return message


@pytest.mark.parametrize(("method", "path"), REPEATED)
def test_more_values_than_a_call_may_have_are_refused_unseen(
    target: str, method: str, path: tuple[FieldDescriptor, ...]
) -> None:
    most = COUNTS_MAX[path[-1].full_name]
    assert too_many(with_values(METHODS[method], path, most)) is None
    request = with_values(METHODS[method], path, most + 1)
    code, details = send(target, method, request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{path[-1].name} has {most + 1} values: at most {most} are taken" in details


def answered(method: str, request: Message, catalog: Catalog) -> Context:
    """The call's context, after a call whose caller is there."""
    context = Context(left_s=60.0)

    async def run() -> None:
        with contextlib.suppress(Aborted):
            await getattr(catalog, method)(request, context)

    asyncio.run(run())
    for callback in context.callbacks:
        callback(context)
    return context


def hash_request(method: str, block_hash: bytes) -> Any:
    """A call that is right but for one of its hashes."""
    key = store_pb2.Key(block_hash=block_hash)
    requests: dict[str, Any] = {
        "Lookup": store_pb2.LookupRequest(boundary_hashes=[*chain("ab"), block_hash], wait_s=1.0),
        "Announce": store_pb2.AnnounceRequest(boundary=GRID, block_hash=block_hash, ttl_s=1.0),
        "Reserve": store_pb2.ReserveRequest(
            publication_id="p", wants=[store_pb2.Want(key=key, nbytes=8)]
        ),
        "Commit": store_pb2.CommitRequest(publication_id="p", written=[store_pb2.Written(key=key)]),
        "Commit manifest": store_pb2.CommitRequest(
            publication_id="p",
            manifest=store_pb2.Manifest(
                boundary=3 * GRID, hashes=[*chain("a"), block_hash, *chain("b")], kinds=["boundary"]
            ),
        ),
        "ListCheckpoints": store_pb2.ListCheckpointsRequest(prefix_hashes=[block_hash]),
    }
    request = requests[method]
    request.domain_id = DOMAIN
    return request


def test_a_name_that_no_publication_can_have_does_not_end_the_others() -> None:
    """Requests are named by whoever sends them."""
    catalog, index = make_catalog()
    reserve = store_pb2.ReserveRequest(domain_id=DOMAIN, publication_id="p")
    assert answered("Reserve", reserve, catalog).code is grpc.StatusCode.OK
    before = index.publications.open[PublicationId("p")].expires_at
    index.publications.open[PublicationId("p")].expires_at = 0.0
    request = store_pb2.KeepAliveRequest(publication_ids=["x" * 5000, "", "p"])
    assert answered("KeepAlive", request, catalog).code is grpc.StatusCode.OK
    assert index.publications.open[PublicationId("p")].expires_at >= before


@pytest.mark.parametrize("length", [0, 65, 1 << 20])
@pytest.mark.parametrize(
    "method", ["Lookup", "Announce", "Reserve", "Commit", "Commit manifest", "ListCheckpoints"]
)
def test_every_hash_is_looked_at(method: str, length: int) -> None:
    if method == "ListCheckpoints" and length == 0:
        return  # stands for one that is not known
    catalog, index = make_catalog()
    context = answered(method.partition(" ")[0], hash_request(method, b"h" * length), catalog)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes" in context.details and not index.publications.open
    fitting = hash_request(method, chain("abc")[-1])
    assert answered(method.partition(" ")[0], fitting, catalog).code is grpc.StatusCode.OK


@pytest.mark.parametrize("limit", [0, 1, 3, 4, (1 << 32) - 1])
def test_no_listing_is_answered_with_more_than_a_page(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("backhaul.transfer.daemon.catalog.LISTING_MAX", 3)
    driver = Driver()
    for prefix in "abcdefgh":
        driver.publish(prefix)
    catalog = Catalog(driver.index, _Pool())  # type: ignore[arg-type]
    request = store_pb2.ListCheckpointsRequest(limit=limit)
    listed = []
    while True:
        reply = asyncio.run(catalog.ListCheckpoints(request, Context(left_s=60.0)))
        assert 0 < len(reply.checkpoints) <= min(limit or 3, 3)
        listed += [one.block_hash for one in reply.checkpoints]
        if not reply.next_cursor:
            break
        request.cursor = reply.next_cursor
    assert sorted(listed) == sorted(chain(prefix)[-1] for prefix in "abcdefgh")


def test_a_checkpoint_of_more_objects_than_a_store_counts_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backhaul.transfer.index_input.CHECKPOINT_OBJECTS_MAX", 4)
    catalog, _ = make_catalog()
    codes = []
    for tokens in ("abc", "abcd"):
        manifest = store_pb2.Manifest(
            boundary=len(tokens) * GRID, hashes=chain(tokens), kinds=["boundary"]
        )
        request = store_pb2.CommitRequest(domain_id=DOMAIN, publication_id="p", manifest=manifest)
        codes.append(answered("Commit", request, catalog).code)
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT]


def test_the_longest_prefix_is_answered() -> None:
    catalog, _ = make_catalog()
    hashes = [number.to_bytes(32, "big") for number in range(HASHES_MAX)]
    request = store_pb2.LookupRequest(domain_id=DOMAIN, boundary_hashes=hashes)
    assert answered("Lookup", request, catalog).code is grpc.StatusCode.OK


def test_a_store_full_of_the_largest_domains_can_still_be_listed() -> None:
    """In one message, and on one page."""
    catalog, index = make_catalog()
    groups = tuple(
        GroupLayout(index=i, kind=GroupKind.FULL, block_tokens=GRID, interior="x" * 800)
        for i in range(GROUPS_MAX)
    )
    largest = make_record("", CacheLayout(groups=groups, hash_tokens=GRID))
    record, sizes = largest, []
    for number in range(DOMAINS_MAX):
        name = f"{number} ".ljust(NAME_MAX, "ü")
        record = msgspec.structs.replace(largest, model=name, platform=name, kv_dtype=name)
        sizes.append(len(record.canonical()))
        client = f"{number}".ljust(NAME_BYTES_MAX, "c")
        request = store_pb2.OpenDomainRequest(record=record.canonical(), client_name=client)
        assert answered("OpenDomain", request, catalog).code is grpc.StatusCode.OK
    assert min(sizes) > 0.9 * RECORD_BYTES_MAX and len(index.domains) == DOMAINS_MAX
    for client in range(CLIENTS_MAX):
        index.open_domain(record, 0.0, f"{client}".ljust(NAME_BYTES_MAX, "c"))
    infos = index.list_domains(0.0)
    clients = max(infos, key=lambda info: len(info.clients)).clients
    assert len(clients) == CLIENTS_MAX
    reply = store_pb2.ListDomainsReply(
        domains=[domain_message(info._replace(clients=clients)) for info in infos]
    )
    assert reply.ByteSize() < MESSAGE_BYTES_MAX
    document = StatusReport(index, "backhaul://x:1", lambda: 0.0).document()
    assert len(json.dumps(document)) < 4 << 20


# -- replies that cannot be made --------------------------------------------------------------


def publish(catalog: Catalog, tokens: str) -> None:
    wants = [
        store_pb2.Want(key=store_pb2.Key(group=key.group, block_hash=key.block_hash), nbytes=64)
        for key in keys_of(make_layout(), tokens)
    ]
    reserve = store_pb2.ReserveRequest(domain_id=DOMAIN, publication_id="p", wants=wants)
    grants = asyncio.run(catalog.Reserve(reserve, Context(left_s=60.0))).grants
    manifest = store_pb2.Manifest(
        boundary=len(tokens) * GRID, hashes=chain(tokens), kinds=["decode_end"]
    )
    commit = store_pb2.CommitRequest(
        domain_id=DOMAIN,
        publication_id="p",
        written=[
            store_pb2.Written(key=want.key, token=grant.token)
            for want, grant in zip(wants, grants, strict=True)
        ],
        manifest=manifest,
    )
    assert asyncio.run(catalog.Commit(commit, Context(left_s=60.0))).visible
    asyncio.run(catalog.Abandon(store_pb2.AbandonRequest(publication_id="p"), Context()))


CALLS_THAT_GRANT: list[tuple[str, str, Any]] = [
    ("Lookup", "LookupReply", store_pb2.LookupRequest(boundary_hashes=chain("a"), lease_s=9.0)),
    ("Lookup", "Match", store_pb2.LookupRequest(boundary_hashes=chain("a"), lease_s=9.0)),
    ("Reserve", "ReserveReply", store_pb2.ReserveRequest(publication_id="q")),
    ("Commit", "CommitReply", store_pb2.CommitRequest(publication_id="q")),
]


@pytest.mark.parametrize(("method", "message", "request_"), CALLS_THAT_GRANT)
def test_a_call_that_fails_leaves_neither_lease_nor_publication(
    monkeypatch: pytest.MonkeyPatch, method: str, message: str, request_: Any
) -> None:
    catalog, index = make_catalog()
    publish(catalog, "a")
    request_.domain_id = DOMAIN
    assert answered(method, request_, catalog).code is grpc.StatusCode.OK
    held = len(index.leases.valid), len(index.publications.open)
    assert held in ((1, 0), (0, 1)), "the call grants something where it succeeds"
    index.release(list(index.leases.valid), 0.0)
    index.abandon(PublicationId("q"), 0.0)

    def unmakeable(**values: Any) -> Any:
        raise ValueError("Value out of range")

    with monkeypatch.context() as patch:
        patch.setattr(store_pb2, message, unmakeable)
        assert answered(method, request_, catalog).code is grpc.StatusCode.INTERNAL
    assert not index.leases.valid and not index.publications.open
    index.check()


def test_numbers_that_fit_no_message_leave_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, index = make_catalog()
    publish(catalog, "a")
    lookup = index.lookup

    def beyond(*args: Any) -> Any:
        answer = lookup(*args)
        match = msgspec.structs.replace(answer.matches[0], boundary=1 << 64)
        return answer._replace(matches=(match,))

    monkeypatch.setattr(index, "lookup", beyond)
    request = store_pb2.LookupRequest(domain_id=DOMAIN, boundary_hashes=chain("a"), lease_s=9.0)
    assert answered("Lookup", request, catalog).code is grpc.StatusCode.INTERNAL
    assert not index.leases.valid


@pytest.mark.parametrize("text", ["x" * 100_000, "x\ny", "é\r\nü" * 50_000])
def test_what_an_error_quotes_keeps_it_short_and_on_one_line(text: str) -> None:
    catalog, _ = make_catalog()
    for method, request in [
        (
            "OpenDomain",
            store_pb2.OpenDomainRequest(record=b'{"version": 3, "%s": 1}' % text.encode()),
        ),
        ("ListCheckpoints", store_pb2.ListCheckpointsRequest(kinds=[text])),
        ("ListCheckpoints", store_pb2.ListCheckpointsRequest(cursor=text)),
        ("Lookup", store_pb2.LookupRequest(domain_id=text)),
        ("Locate", store_pb2.LocateRequest(lease_id=text)),
        ("Reserve", store_pb2.ReserveRequest(domain_id=DOMAIN, publication_id=text + "x" * 300)),
        ("Hello", store_pb2.HelloRequest(client_name=text)),
    ]:
        context = answered(method, request, catalog)
        assert context.code is not grpc.StatusCode.OK
        assert "\n" not in context.details and "\r" not in context.details
        assert 0 < len(context.details) <= 500


# -- messages of any content ------------------------------------------------------------------


TEXTS = st.sampled_from(["", "x", DOMAIN, "decode_end", "visible", "a" * 300]) | st.text(max_size=8)
BLOBS = st.sampled_from([b"", *chain("abc"), b"x" * 65]) | st.binary(max_size=40)
SCALARS = {
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(0, 2.0) | st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, GRID, 3 * GRID, 2**63, 2**64 - 1]),
}


def messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Messages of that type, whose values are sometimes right."""
    parts: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            one = messages(field.message_type)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            one = BLOBS
        else:
            one = SCALARS[field.cpp_type]
        parts[field.name] = st.lists(one, max_size=3) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=parts).map(
        lambda values: GetMessageClass(descriptor)(**values)
    )


CALLS = st.sampled_from(sorted(METHODS)).flatmap(
    lambda name: messages(METHODS[name]).map(lambda message: (name, message))
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CALLS, max_size=12))
def test_no_sequence_of_messages_breaks_the_catalog_or_leaves_anything(
    calls: list[tuple[str, Message]],
) -> None:
    async def run() -> None:
        catalog, index = make_catalog()
        for name, message in calls:
            if hasattr(message, "wait_s"):
                message.wait_s = 0
            context = Context()
            try:
                await getattr(catalog, name)(message, context)
            except Aborted:
                assert context.code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (
                    name,
                    message,
                    context.details,
                )
                assert "\n" not in context.details
            for callback in context.callbacks:
                callback(context)
            index.check()
            assert not index.leases.valid and not index.publications.open

    asyncio.run(run())
