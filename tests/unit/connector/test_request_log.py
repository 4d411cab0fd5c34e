"""The request log never fails a caller, loses nothing that it can keep, and follows logrotate."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backhaul.connector import request_log
from backhaul.connector.request_log import RequestLog, memory_bytes
from backhaul.protocols.record import LoggedRequest


def record(n: int) -> LoggedRequest:
    return LoggedRequest(
        time=float(n), engine="e", request_id=f"r{n}", finish="FINISHED_STOPPED", prompt_tokens=n
    )


def ids(path: Path) -> list[str]:
    # Empty ones where two logs found a file that the other was writing.
    lines = filter(None, path.read_text().splitlines())
    return [json.loads(line)["request_id"] for line in lines]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Counted:
    """A log, and the sums of what it says of itself."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.log = RequestLog(str(path), **more)
        self.written = self.dropped = 0

    def counts(self) -> tuple[int, int]:
        written, dropped = self.log.take_counts()
        assert written >= 0 and dropped >= 0
        self.written += written
        self.dropped += dropped
        return self.written, self.dropped

    def write(self, n: int) -> None:
        """Write one, and wait until it is on its way."""
        before = sum(self.counts())
        self.log.write(record(n))
        wait_until(lambda: sum(self.counts()) > before)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "requests.jsonl"
    left = [t for t in threading.enumerate() if t.name == "backhaul-request-log"]
    for thread in left:
        thread.join(300)
    assert not any(thread.is_alive() for thread in left), "a log was not closed"


def test_every_record_is_one_line_in_order(path: Path) -> None:
    log = RequestLog(str(path))
    for n in range(1000):
        log.write(record(n))
    log.close()
    assert ids(path) == [f"r{n}" for n in range(1000)]
    assert log.take_counts() == (1000, 0)
    assert log.take_counts() == (0, 0)


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_file_that_was_taken_away_is_made_anew(path: Path, how: str) -> None:
    one = Counted(path)
    one.write(0)
    if how == "moved":
        path.rename(path.with_suffix(".1"))
    elif how == "deleted":
        path.unlink()
    else:
        other = path.with_suffix(".new")
        other.write_text("")
        other.rename(path)
    one.write(1)
    one.log.close()
    assert ids(path) == ["r1"]
    if how == "moved":
        assert ids(path.with_suffix(".1")) == ["r0"]


def test_a_file_that_cannot_be_written_costs_the_records_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(request_log.logger, "warning", lambda line, *_: said.append(line))
    missing = path.parent / "later" / "requests.jsonl"
    one = Counted(missing)
    one.write(0)
    one.write(1)
    assert (one.written, one.dropped) == (0, 2)
    assert len([line for line in said if "request log" in line]) == 1, "said once"
    missing.parent.mkdir()
    one.write(2)
    one.log.close()
    assert (one.written, one.dropped) == (1, 2)
    assert ids(missing) == ["r2"]


def test_what_a_killed_engine_left_torn_costs_no_other_line(path: Path) -> None:
    whole, torn = b'{"request_id":"r0"}\n', b'{"request_id":"r'
    path.write_bytes(whole + torn)
    one = Counted(path)
    one.write(1)
    one.write(2)
    one.log.close()
    lines = path.read_bytes().splitlines()
    assert lines[:2] == [whole[:-1], torn] and len(lines) == 4
    assert [json.loads(line)["request_id"] for line in lines[2:]] == ["r1", "r2"]


def test_a_disk_that_fills_up_within_a_line_costs_that_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written whole before it counts as written, and what comes later is readable."""

    class Full:
        left = 0

        def write(self, data: memoryview) -> int:
            if self.left == 0:
                raise OSError(errno.ENOSPC, "no space left")
            taken = min(self.left, len(data))
            with path.open("ab") as file:
                file.write(data[:taken])
            self.left -= taken
            return taken

    one, disk = Counted(path), Full()
    size = len(msgspec.json.encode(record(0))) + 1
    disk.left = 2 * size + size // 2
    with monkeypatch.context() as patch:
        patch.setattr(RequestLog, "_opened", lambda self: disk)
        for n in range(4):
            one.log.write(record(n))
        wait_until(lambda: sum(one.counts()) == 4)
    assert one.counts() == (2, 2)
    one.write(5)
    one.log.close()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4 and json.loads(lines[3])["request_id"] == "r5"


def test_a_disk_that_hangs_delays_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()
    append = RequestLog._append

    def hanging(self: RequestLog, records: list[LoggedRequest]) -> None:
        begun.set()
        assert go_on.wait(300)
        append(self, records)

    monkeypatch.setattr(RequestLog, "_append", hanging)
    one = Counted(path, queue_max=4)
    one.log.write(record(0))
    assert begun.wait(300)
    for n in range(1, 10):
        one.log.write(record(n))
    assert one.counts() == (0, 5), "four wait, five are dropped"
    go_on.set()
    wait_until(lambda: one.counts()[0] == 5)
    one.log.close()
    assert ids(path) == [f"r{n}" for n in range(5)]


def test_records_that_wait_take_a_bounded_amount_of_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = threading.Event(), threading.Event()
    append = RequestLog._append

    def hanging(self: RequestLog, records: list[LoggedRequest]) -> None:
        begun.set()
        assert go_on.wait(300)
        append(self, records)

    monkeypatch.setattr(RequestLog, "_append", hanging)
    long = msgspec.structs.replace(record(1), token_ids=tuple(range(1000)))
    one = Counted(path, bytes_max=3 * memory_bytes(long))
    one.log.write(long)
    assert begun.wait(300)
    for _ in range(5):
        one.log.write(long)
    assert one.counts() == (0, 3), "the one being written and two more fit"
    go_on.set()
    wait_until(lambda: one.counts()[0] == 3)
    one.log.write(long)
    wait_until(lambda: one.counts()[0] == 4)  # what was written makes room
    one.log.close()


def test_two_engines_may_share_a_file(path: Path) -> None:
    logs = [RequestLog(str(path)) for _ in range(2)]
    for n in range(500):
        for log in logs:
            log.write(record(n))
    for log in logs:
        log.close()
    assert sorted(ids(path)) == sorted([f"r{n}" for n in range(500)] * 2)


def test_closing_twice_is_harmless(path: Path) -> None:
    log = RequestLog(str(path))
    log.close()
    log.close()
    assert not path.exists() or not ids(path)
