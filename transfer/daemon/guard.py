"""What arrives that is no request: refused with ``INVALID_ARGUMENT``, and one quiet log line.

gRPC itself answers ``UNKNOWN`` to bytes that are no message and logs a traceback for each, so that
anybody who can reach the port could fill the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from backhaul.transfer.daemon.quiet import QuietLog
from backhaul.transfer.entries import CALL_CHOICES_MAX, CALL_OBJECTS_MAX, HASHES_MAX

logger = logging.getLogger(__name__)


class Malformed:
    """Stands for a request that could not be read, on its way to the handler."""

    def __init__(self, why: str) -> None:
        self.why = why


def wrong_number(message: Message) -> str | None:
    """What is wrong with the first floating-point field, at any depth, that is negative,
    infinite or no number: all of them are durations or amounts. None where none is wrong."""
    for field in _fields_with_numbers(message.DESCRIPTOR):
        value: Any = getattr(message, field.name)
        values: Sequence[Any] = value if field.is_repeated else [value]
        for one in values:
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                wrong = wrong_number(one)
                if wrong is not None:
                    return f"{field.name}.{wrong}"
            elif not 0 <= one < math.inf:  # also refuses NaN
                return f"{field.name} is {one}: it must be finite and 0 or more"
    return None


_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_numbers: dict[str, list[FieldDescriptor]] = {}


def _fields_with_numbers(descriptor: Any) -> list[FieldDescriptor]:
    """Fields that are floating-point numbers or contain some; the others are not looked at, for
    messages carry many thousand hashes."""
    known = _numbers.get(descriptor.full_name)
    if known is None:
        known = _numbers[descriptor.full_name] = []  # ends the recursion of recursive messages
        known += [
            field
            for field in descriptor.fields
            if field.cpp_type in _FLOATS
            or (field.message_type is not None and _fields_with_numbers(field.message_type))
        ]
    return known


COUNTS_MAX: dict[str, int] = {
    "backhaul.v1.LookupRequest.boundary_hashes": HASHES_MAX,
    "backhaul.v1.LocateRequest.keys": CALL_OBJECTS_MAX,
    "backhaul.v1.ReleaseLeaseRequest.lease_ids": CALL_OBJECTS_MAX,
    "backhaul.v1.ReserveRequest.wants": CALL_OBJECTS_MAX,
    "backhaul.v1.CommitRequest.written": CALL_OBJECTS_MAX,
    "backhaul.v1.Manifest.hashes": HASHES_MAX,
    "backhaul.v1.Manifest.kinds": CALL_CHOICES_MAX,
    "backhaul.v1.KeepAliveRequest.publication_ids": CALL_OBJECTS_MAX,
    "backhaul.v1.ListCheckpointsRequest.kinds": CALL_CHOICES_MAX,
    "backhaul.v1.ListCheckpointsRequest.visibilities": CALL_CHOICES_MAX,
    "backhaul.v1.ListCheckpointsRequest.prefix_hashes": HASHES_MAX,
}
"""Repeated field of a request -> how many values it may have. Handlers run on the event loop, each
to its end: what nobody counts holds up everybody's lookups."""


def too_many(message: Message) -> str | None:
    """Which repeated field has more values than it may; None where none has."""
    for field, value in message.ListFields():
        if field.is_repeated:
            count, most = len(value), COUNTS_MAX.get(field.full_name)
            if most is not None and count > most:
                return f"{field.name} has {count} values: at most {most} are taken"
        elif field.message_type is not None:
            wrong = too_many(value)
            if wrong is not None:
                return f"{field.name}.{wrong}"
    return None


class InputGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg, unused-ignore]
    """Reads requests in gRPC's place, for every service of the server."""

    def __init__(self) -> None:
        self._log = QuietLog(logger)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        reads = _reading(handler.request_deserializer)
        writes = handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._one(method, handler.unary_unary), reads, writes
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._one_to_many(method, handler.unary_stream), reads, writes
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._many(method, handler.stream_stream), reads, writes
            )
        return handler

    def _one(self, method: str, handle: Callable[..., Awaitable[Any]]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            await self._check(method, request, context)
            return await handle(request, context)

        return call

    def _one_to_many(self, method: str, handle: Callable[..., Any]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            await self._check(method, request, context)
            answers = handle(request, context)
            if hasattr(answers, "__aiter__"):
                async for answer in answers:
                    await context.write(answer)
            else:  # a coroutine that writes to the context itself
                await answers

        return call

    def _many(self, method: str, handle: Callable[..., AsyncIterator[Any]]) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                await self._check(method, request, context)
                yield request

        async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
            async for answer in handle(checked(requests, context), context):
                yield answer

        return call

    async def _check(self, method: str, request: Any, context: Any) -> None:
        """Abort the call unless the request can be handled."""
        if isinstance(request, Malformed):
            wrong: str | None = request.why
        else:  # counted first: looking at each of too many takes as long as the call would
            wrong = too_many(request) or wrong_number(request)
        if wrong is not None:
            self._log.warning("refused a call of %s: %s", method, wrong)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{method}: {wrong}")


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC treats what a deserializer raises as a fault of the server, so it returns it."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed(f"{len(data)} bytes that are not its request message")

    return read
