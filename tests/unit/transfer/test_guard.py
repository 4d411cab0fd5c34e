"""What no client of ours would send: bytes, numbers and messages of any content."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_kit import GRID, chain, make_layout, make_record

from backhaul.protocols import store_pb2, store_pb2_grpc
from backhaul.transfer.daemon import guard
from backhaul.transfer.daemon.catalog import Catalog
from backhaul.transfer.daemon.guard import InputGuard, QuietLog, wrong_number
from backhaul.transfer.index import BlockIndex

SERVICE = store_pb2.DESCRIPTOR.services_by_name["Catalog"]
METHODS = {method.name: method.input_type for method in SERVICE.methods}
MESSAGES: list[Descriptor] = list(store_pb2.DESCRIPTOR.message_types_by_name.values())
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
        server = grpc.aio.server(interceptors=[InputGuard()])
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
    thread.join(60)


def send(target: str, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/{SERVICE.full_name}/{method}")
        try:
            call(data, timeout=20)
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code(), failed.details()
    return grpc.StatusCode.OK, ""


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


# -- messages of any content ------------------------------------------------------------------


DOMAIN = make_record("x", make_layout()).domain_id
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


class Aborted(Exception):
    """What ``abort`` of a context raises."""


class Context:
    """A call that nobody waits for any longer, so that whatever it holds is taken back."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.callbacks: list[Any] = []

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise Aborted

    def time_remaining(self) -> float:
        return 0.0

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


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


def test_many_lines_are_one_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = QuietLog(lambda: now)
    for second in range(25):
        now = float(second)
        log.warning("refused %s", second)
    assert caplog.messages == [
        "refused 0",
        "refused 10 (9 more before)",
        "refused 20 (9 more before)",
    ]
    assert guard.LOG_INTERVAL_S == 10
