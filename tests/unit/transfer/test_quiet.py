"""Lines that anybody who reaches a port can cause do not fill the log."""

from __future__ import annotations

import logging

import pytest

from backhaul.transfer.daemon.quiet import LOG_INTERVAL_S, QuietLog, QuietServers


class Clock:
    """A time that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


def test_many_lines_are_one_and_a_count() -> None:
    clock, lines = Clock(), Lines()
    logger = logging.Logger("of its own")
    logger.addHandler(lines)
    log = QuietLog(logger, clock)
    for second in range(25):
        clock.now = float(second)
        log.warning("refused %s", second)
    assert lines.messages == [
        "refused 0",
        "refused 10 (9 more before)",
        "refused 20 (9 more before)",
    ]
    assert LOG_INTERVAL_S == 10


def shown(quiet: QuietServers, name: str, text: str, *args: object) -> str | None:
    """The line as it is written; None where it is not."""
    record = logging.LogRecord(name, logging.ERROR, "", 0, text, args, None)
    return record.getMessage() if quiet.filter(record) else None


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error", "grpc._cython.cygrpc"])
def test_a_server_says_each_kind_of_line_once_in_a_while(name: str) -> None:
    clock = Clock()
    quiet = QuietServers(clock)
    # Addresses and descriptors in the further lines make no kind of their own.
    lines = [f"socket.accept() out of system resource\nsocket: <fd={i}>" for i in range(2048)]
    assert [line for line in lines if shown(quiet, name, line)] == lines[:1]
    assert shown(quiet, name, "Invalid %s", "HTTP") == "Invalid HTTP"
    assert shown(quiet, name, "Invalid %s", "HTTP") is None
    clock.now = LOG_INTERVAL_S
    assert shown(quiet, name, lines[5]) == f"{lines[5]} (2047 more before)"
    assert shown(quiet, name, "Invalid %s", "HTTP") == "Invalid HTTP (1 more before)"
    # Texts of any number keep a bounded memory.
    told = [i for i in range(1000) if shown(quiet, name, f"text {i}")]
    assert len(told) < 100 and told == list(range(len(told)))


def test_a_caller_that_left_while_it_was_answered_leaves_no_traceback() -> None:
    logger, lines = logging.Logger("grpc._cython.cygrpc"), Lines()
    logger.addHandler(lines)
    lines.addFilter(QuietServers(Clock()))
    lines.setFormatter(logging.Formatter("%(message)s"))
    for text in (
        "ExecuteBatchError raised in core by servicer method [/backhaul.v1.Catalog/Reserve]",
        "Unexpected [KeyError] raised by servicer method [/backhaul.v1.Catalog/Reserve]",
    ):
        try:
            raise KeyError("a")
        except KeyError:
            logger.exception(text)
    left, fault = lines.messages
    assert left == "an answer had no reader any more"
    assert fault.startswith("Unexpected") and "Traceback" in fault, "a fault of ours is told whole"


def test_our_own_lines_are_all_shown() -> None:
    quiet = QuietServers(Clock())
    for name in ("backhaul.proxy.exchange", "uvicorn", "asyncio.events"):
        assert [shown(quiet, name, "again") for _ in range(3)] == ["again"] * 3
