"""Lines and documents of a file, in bounded memory, and their decoding with errors that name the
field and its value."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec

from backhaul.benchmarks.traces.faults import LineFault, Reason, Skips, TraceError

LINE_BYTES_MAX = 16 << 20
"""A prompt of a million tokens is four to eight MiB of text; a longer line is no trace's."""

DOCUMENT_BYTES_MAX = 256 << 20
"""A JSON document is read whole, unlike lines, so this bounds memory."""

_CHUNK_BYTES = 1 << 20
_BLANK = b" \t\r\n"

T = TypeVar("T")


class Record(NamedTuple):
    """One line of a file, or one element of a document: where it begins and its JSON."""

    line: int
    data: bytes


_OTHER_FORMS = {
    b"\x1f\x8b": "compressed with gzip: decompress it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it first",
    b"\xfd7zXZ": "compressed with xz: decompress it first",
    b"BZh": "compressed with bzip2: decompress it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"PAR1": "a Parquet file: write it as JSON lines",
    b"\xff\xfe": "UTF-16 text: write it as UTF-8",
    b"\xfe\xff": "UTF-16 text: write it as UTF-8",
}
"""How files begin that are kept beside traces, and what to do with them."""


def _opened(path: Path) -> BinaryIO:
    """The file behind the mark with which some editors begin UTF-8. Raises ``TraceError`` for what
    holds no plain text, ``OSError``."""
    file = path.open("rb")
    start = file.read(6)
    for form, words in _OTHER_FORMS.items():
        if start.startswith(form):
            file.close()
            raise TraceError(f"{path}: the file is {words}")
    file.seek(len(BOM_UTF8) if start.startswith(BOM_UTF8) else 0)
    return file


def read_lines(path: Path, skips: Skips) -> Iterator[Record]:
    """The lines that are not blank. A line above ``LINE_BYTES_MAX`` is a fault and is passed over
    without being held. Raises ``TraceError`` where the file cannot be read."""
    number = 0
    try:
        with _opened(path) as file:
            while data := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(data) > LINE_BYTES_MAX and not data.endswith(b"\n"):
                    problem = f"give lines of at most {LINE_BYTES_MAX:,} bytes"
                    skips.take(number, LineFault(Reason.TOO_LONG, "", data[:64], problem))
                    while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                        pass
                elif data.strip(_BLANK):
                    yield Record(number, data)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def read_document(path: Path) -> bytes:
    """The whole file. Raises ``TraceError`` where it cannot be read or is too large."""
    try:
        with _opened(path) as file:
            data = file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if len(data) > DOCUMENT_BYTES_MAX:
        raise TraceError(
            f"{path}: above {DOCUMENT_BYTES_MAX:,} bytes in one JSON document: write a line per "
            "element (JSON lines), which is read piece by piece"
        )
    return data


def is_document(path: Path) -> bool:
    """Whether a file is one JSON document rather than JSON lines: its first line is no JSON by
    itself, or too long for a line. Raises ``TraceError`` where it cannot be read or is empty."""
    try:
        record = next(read_lines(path, Skips(path, strict=True)), None)
    except TraceError:
        return True
    if record is None:
        raise TraceError(f"{path}: the file is empty")
    try:
        _ANY.decode(record.data)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False


def document_elements(path: Path) -> Iterator[Record]:
    """A document's elements: an array's, or the document itself. Raises ``TraceError`` where it is
    no JSON: no element can be told from the next then."""
    data = read_document(path)
    try:
        yield from _split(Record(1, data))
    except (msgspec.DecodeError, RecursionError) as error:
        line = _line_of(data, error)
        raise TraceError(f"{path}:{line}: line {_not_json(error)}") from None


def elements(record: Record) -> list[Record]:
    """An array's elements, or the record itself. Raises ``LineFault``."""
    try:
        return list(_split(record))
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineFault(Reason.NOT_JSON, "", record.data[:64], _not_json(error)) from None


def members(record: Record) -> set[str]:
    """Names of an object's members; empty for what is no object."""
    try:
        return set(_MEMBERS.decode(record.data))
    except (msgspec.DecodeError, RecursionError):
        return set()


def _split(record: Record) -> Iterator[Record]:
    if record.data.lstrip(_BLANK)[:1] != b"[":
        yield Record(record.line, bytes(_ANY.decode(record.data)))
        return
    position, line = 0, record.line
    for raw in _ARRAY.decode(record.data):
        piece = bytes(raw)
        found = record.data.find(piece, position)
        line += record.data.count(b"\n", position, found)
        yield Record(line, piece)
        line += piece.count(b"\n")
        position = found + len(piece)


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_ANY = msgspec.json.Decoder(msgspec.Raw)
_UNTYPED = msgspec.json.Decoder()
_BYTE = re.compile(r"\(byte (\d+)\)")
_WHERE = re.compile(r" - at `\$(.*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[(\.\.\.)\]")


def decode(decoder: msgspec.json.Decoder[T], record: Record) -> T:
    """The record as the decoder's type. Raises ``LineFault``."""
    try:
        return decoder.decode(record.data)
    except msgspec.ValidationError as error:
        message = str(error)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LineFault(Reason.NOT_JSON, "", record.data[:64], _not_json(error)) from None
    raise _type_fault(message, record.data)


def _type_fault(message: str, data: bytes) -> LineFault:
    """The fault behind a validation error: its path and the value that lies there."""
    where = _WHERE.search(message)
    path = where.group(1) if where else ""
    problem = message[: where.start()] if where else message
    problem = problem[:1].lower() + problem[1:].replace("`", "")
    if missing := _MISSING.search(message):
        field = f"{path}.{missing.group(1)}".lstrip(".")
        return LineFault(Reason.MISSING, field, None, "the field is missing")
    try:
        value = _value_at(_UNTYPED.decode(data), path)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return LineFault(Reason.NOT_JSON, "", data[:64], _not_json(error))
    reason = Reason.WRONG_TYPE if ", got " in problem else Reason.OUT_OF_RANGE
    return LineFault(reason, path.lstrip("."), value, problem)


def _value_at(value: Any, path: str) -> Any:
    for name, index, _any_key in _STEP.findall(path):
        try:
            value = value[name] if name else value[int(index)]
        except (LookupError, TypeError, ValueError):
            return value
    return value


def _not_json(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is no JSON that can be read: nested too deeply"
    return f"is no JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _line_of(data: bytes, error: Exception) -> int:
    byte = _BYTE.search(str(error))
    return data.count(b"\n", 0, int(byte.group(1)) if byte else len(data)) + 1
