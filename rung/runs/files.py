"""Documents that are whole or absent, lines that are whole or skipped, and JSON that keeps NaN.

A line is one unbuffered write to a file opened for appending, so a killed process loses nothing that was written. JSON
has no NaN: it and the infinities are stored as strings, and `floats_again` turns them back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from rung import parse
from rung.errors import RunError
from rung.files import write_whole

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_encoder = msgspec.json.Encoder()
_REMEDY = {
    errno.ENOSPC: ("disk-full", "free some space"),
    errno.EDQUOT: ("disk-full", "free some space or ask for a larger quota"),
    errno.EACCES: ("no-permission", "choose a folder you may write to (--runs or RUNG_RUNS)"),
    errno.EPERM: ("no-permission", "choose a folder you may write to (--runs or RUNG_RUNS)"),
    errno.EROFS: ("no-permission", "choose a folder on a writable disk (--runs or RUNG_RUNS)"),
    errno.ENOTDIR: ("bad-folder", "choose another folder (--runs or RUNG_RUNS)"),
}


def name_of(value: float) -> str:
    """A non-finite float as it is written."""
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def plain(value: Any) -> Any:
    """The same value out of dicts, lists, strings, numbers and None, for JSON or YAML; other types become text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # a file name need not be UTF-8, and JSON is
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    item = getattr(value, "item", None)  # a numpy or torch scalar, without importing either
    if callable(item) and getattr(value, "ndim", None) == 0:
        return plain(item())
    return str(value)


def named(value: Any) -> Any:
    """A plain value with every non-finite float replaced by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return name_of(value)
    if isinstance(value, dict):
        return {k: named(v) for k, v in value.items()}
    if isinstance(value, list):
        return [named(v) for v in value]
    return value


def floats_again(value: Any) -> Any:
    """The inverse of `named`. A text that is exactly "NaN" comes back as a float: the price of one spelling."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: floats_again(v) for k, v in value.items()}
    if isinstance(value, list):
        return [floats_again(v) for v in value]
    return value


def to_json(value: Any) -> bytes:
    return _encoder.encode(named(plain(value)))


def from_json(data: bytes | str) -> Any:
    """Raises ParseError (a ValueError) on anything that is not whole JSON within the limits of rung/parse.py."""
    value = parse.json(data)
    text = data.encode() if isinstance(data, str) else data
    # Most documents have none, and walking through them takes longer than reading them.
    return floats_again(value) if b'NaN"' in text or b'Infinity"' in text else value


def reason(error: OSError) -> str:
    """What went wrong, without the number and the file name."""
    return (error.strerror or str(error)).lower()


def refused(what: str, error: OSError) -> RunError:
    """The error for a disk that cannot be written: what, why, and the remedy."""
    code, remedy = _REMEDY.get(error.errno or 0, ("cannot-write", "check the disk"))
    return RunError(f"cannot write {what}: {reason(error)}; {remedy}.", code=code)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Any OSError of the body becomes the sentence of `refused`."""
    try:
        yield
    except OSError as error:
        raise refused(what, error) from error


def write_json(path: Path, value: Any) -> None:
    write_whole(path, msgspec.json.format(to_json(value), indent=2) + b"\n")


def read_json(path: Path) -> Any:
    return from_json(parse.read_bytes(path))


def newer(path: Path, document: Any, known: int) -> str | None:
    """What is wrong with a document that a newer rung wrote; None where this one can read it, or it is none."""
    schema = document.get("schema", 0) if isinstance(document, Mapping) else 0
    if not isinstance(schema, int) or schema <= known:
        return None
    return f"{path} was written by a newer rung (schema {schema}, this one reads up to {known}); upgrade rung"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """One process at a time per folder; yields False on a disk without locks, where renames are still atomic."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        os.close(fd)


class LineFile:
    """A file of lines, each appended by one write."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0)
        self.fd = os.open(path, flags, 0o666)
        size = os.fstat(self.fd).st_size
        # A line that an earlier process left unfinished must not swallow our first one.
        self._is_torn = size > 0 and os.pread(self.fd, 1, size - 1) != b"\n"

    def append(self, line: bytes) -> None:
        """Writes all of `line`, which ends with a newline, or none; raises RunError naming the file."""
        was_torn, written = self._is_torn, 0
        if was_torn:
            line = b"\n" + line
        try:
            written = os.write(self.fd, line)
            while written != len(line):
                written += os.write(self.fd, line[written:])
        except OSError as error:
            self._is_torn = was_torn or written > 0
            with contextlib.suppress(OSError):  # cuts a half-written line off again
                end = os.lseek(self.fd, 0, os.SEEK_CUR)
                if written and os.fstat(self.fd).st_size == end:  # else somebody else has appended since
                    os.ftruncate(self.fd, end - written)
                    self._is_torn = was_torn
            raise refused(str(self.path), error) from error
        self._is_torn = False

    def sync(self) -> None:
        with contextlib.suppress(OSError):
            os.fdatasync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            self.sync()
            os.close(self.fd)
            self.fd = -1


def read_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, without a last one that has no newline; none where there is no file."""
    try:
        with parse.open_file(path) as file:
            for line in parse.lines(file):
                if line.endswith(b"\n"):
                    yield line
    except FileNotFoundError:
        return
