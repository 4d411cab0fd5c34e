"""Files of JSON lines that a process may have been killed over: read, and gone on with.

A line is whole once its newline is there. What stands behind the last one is a line all the same
where it is a whole object, as an editor may leave it; else it is torn. It is then said on standard
error, passed over by readers, and cut off by whoever goes on writing, so that what is appended
begins on a line of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from backhaul.protocols.errors import ConfigError

_BLOCK_BYTES = 1 << 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def whole_lines(path: Path, *, say_torn: bool = True) -> Iterator[tuple[str, bytes]]:
    """``file:number`` and the line, for each that was written to its end.

    Raises ``ConfigError`` where the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") or is_whole(line):
                    yield f"{path}:{number}", line
                elif say_torn:
                    say(f"{path}:{number} was not written to its end, and is passed over")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def appending(path: Path) -> Iterator[IO[bytes]]:
    """The file, to append lines to, for the length of the block; nobody else may meanwhile.

    Raises ``ConfigError`` where another process appends to it, and what opening raises.
    """
    with contextlib.ExitStack() as stack:
        # "a+" would seek, which pipes and terminals do not.
        file = stack.enter_context(path.open("ab"))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _lock(file, path)
            _mend(file, stack.enter_context(path.open("rb")), path)
        yield file


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is being written by another command: wait for its end, or name another file"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # of some network file systems
            raise


def _mend(file: IO[bytes], reader: IO[bytes], path: Path) -> None:
    tail, at = b"", reader.seek(0, os.SEEK_END)
    end = at
    while at and b"\n" not in tail:
        step = min(at, _BLOCK_BYTES)
        at = reader.seek(at - step)
        tail = reader.read(step) + tail
    tail = tail.rpartition(b"\n")[2]
    if not tail:
        return
    if is_whole(tail):
        file.write(b"\n")
        file.flush()
    else:
        file.truncate(end - len(tail))
        say(f"{path}: its last line was not written to its end, and is cut off")


def is_whole(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def say(words: str) -> None:
    """One line on standard error, where it takes one."""
    with contextlib.suppress(OSError):
        print(f"backhaul: {words}", file=sys.stderr, flush=True)
