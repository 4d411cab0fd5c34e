"""The request log: one JSON line per request, written off the scheduler's thread.

Nothing here ever fails or delays a request: what a full queue or a full disk cannot take is
dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from backhaul.protocols.record import LoggedRequest

logger = logging.getLogger("vllm.backhaul")

_QUEUE_MAX = 4096
"""Records waiting for the disk."""
_QUEUE_BYTES_MAX = 64 << 20
"""Memory of those records, roughly: long prompts with their token ids are large."""
_RECORD_BYTES, _HASH_BYTES, _TOKEN_BYTES = 2_000, 120, 40
"""Python's objects for a record without lists, a hash in hex, a token id."""
_BATCH_MAX = 256
_CLOSE_TIMEOUT_S = 2.0
"""How long an engine that stops waits for its last lines."""


class RequestLog:
    """Appends records to a file. ``write`` may be called from one thread; it never blocks.

    The file is opened again when it was moved or deleted, so that logrotate needs no signal, and
    each batch is one write in append mode, so that several engines may share a file.
    """

    def __init__(
        self, path: str, *, queue_max: int = _QUEUE_MAX, bytes_max: int = _QUEUE_BYTES_MAX
    ) -> None:
        self._path = path
        self._queue: queue.Queue[LoggedRequest | None] = queue.Queue(queue_max)
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = None
        self._bytes_max = bytes_max
        self._bytes_in = 0  # changed by the caller's thread only
        self._bytes_out = 0  # changed by the writer's thread only
        self._refused = 0  # by the queue; changed by the caller's thread only
        self._written = 0  # changed by the writer's thread only, as is the next one
        self._lost = 0
        self._told = (0, 0)
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="backhaul-request-log", daemon=True)
        self._thread.start()

    def write(self, record: LoggedRequest) -> None:
        """Queue a record; a full queue drops it."""
        size = memory_bytes(record)
        if self._bytes_in - self._bytes_out + size > self._bytes_max:
            self._refused += 1
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._refused += 1
        else:
            self._bytes_in += size

    def take_counts(self) -> tuple[int, int]:
        """Records written, and dropped, since the last call."""
        now = (self._written, self._refused + self._lost)
        before, self._told = self._told, now
        return now[0] - before[0], now[1] - before[1]

    def close(self) -> None:
        """Write what is queued, as far as the disk lets it, and stop. Safe to call twice."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return  # a disk that hangs; the thread ends with the process
        self._thread.join(_CLOSE_TIMEOUT_S)

    # -- on the writer's thread ---------------------------------------------------------------

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch = list(self._batch())
            going_on = batch[-1] is not None
            records = [record for record in batch if record is not None]
            if not records:
                continue
            written = self._written
            try:
                self._append(records)
                self._failing = False
            except Exception as error:
                self._lost += len(records) - (self._written - written)
                if not self._failing:  # once until it works again
                    logger.warning("backhaul: request log %s: %s", self._path, error)
                self._failing = True
                self._close_file()
            finally:
                self._bytes_out += sum(map(memory_bytes, records))
        self._close_file()

    def _batch(self) -> Iterator[LoggedRequest | None]:
        """At least one item; ends with None where the log is to be closed."""
        item = self._queue.get()
        yield item
        for _ in range(_BATCH_MAX):
            if item is None:
                return
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            yield item

    def _append(self, records: list[LoggedRequest]) -> None:
        lines = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        file = self._opened()
        view = memoryview(lines)
        try:
            while view:  # a raw write may take a part only
                view = view[file.write(view) :]
        finally:
            self._written += lines[: len(lines) - len(view)].count(b"\n")

    def _opened(self) -> BinaryIO:
        if self._file is not None:
            try:
                there, ours = os.stat(self._path), os.fstat(self._file.fileno())
                if (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev):
                    return self._file
            except FileNotFoundError:
                pass
            self._close_file()
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # closed in _close_file
        if _is_torn(self._path):
            self._file.write(b"\n")
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_torn(path: str) -> bool:
    """Whether a file's last line has no end: its engine was killed, or its disk was full. The next
    line would be lost with it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it may be written and not read
        return False


def memory_bytes(record: LoggedRequest) -> int:
    """About how much memory a record takes while it waits."""
    return (
        _RECORD_BYTES
        + _HASH_BYTES * len(record.boundary_hashes)
        + _TOKEN_BYTES * len(record.token_ids)
    )
