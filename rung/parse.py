"""What others wrote becomes plain values here: the bytes of a file, its lines, JSON and YAML, within limits.

A file in a run, a bucket or a data set may be damaged, or made to do harm: a pipe nobody writes to, a line without an
end, a list nested a million deep (which ends a C parser's stack, and the process), 300 bytes of aliases that stand for
gigabytes. Every reader of such text goes through this module, which raises ParseError or OSError and nothing else.
ParseError is a ValueError; it says what is wrong and leaves it to the caller to name the file.

Of two equal keys the last counts. That a value has the type its reader goes into is checked with `mismatch`.
"""

from __future__ import annotations

import errno
import functools
import io
import json as _json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

MOST_BYTES = 64 << 20  # of a document; the largest of our own, an index of 100,000 metrics, has 20 MB
MOST_LINE_BYTES = 32 << 20
MOST_DATA_BYTES = 4 << 30  # of what somebody names to train on: a store's index, a table, annotations
NO_LIMIT = math.inf  # of values, where the size of the file is the limit
MOST_DEPTH = 100  # ours have 8; 900 stop Python functions that walk through a value by recursion
MOST_VALUES = 5_000_000  # of JSON: one byte of text can become 50 bytes of memory
MOST_NODES = 100_000  # of YAML, with aliases written out: each takes about a kilobyte while it is read
_DECODE = msgspec.json.Decoder().decode
T = TypeVar("T")


# What msgspec's decoders raise where a hot loop calls one of its own types directly.
BROKEN = (ValueError, RecursionError, MemoryError)


class ParseError(ValueError):
    """Text that is not what it should be, or that goes beyond a limit."""


def open_file(path: Path | str) -> IO[bytes]:
    """Opens a file for reading; OSError for a pipe, a device or a socket, which could keep a reader waiting."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            folder = stat.S_ISDIR(mode)
            code = errno.EISDIR if folder else errno.EINVAL
            raise OSError(code, os.strerror(code) if folder else "Not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_bytes(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file; ParseError for one that is larger than `most_bytes`, which is not read."""
    with open_file(path) as file:
        data = b"" if (too_large := os.fstat(file.fileno()).st_size > most_bytes) else file.read(most_bytes + 1)
    if too_large or len(data) > most_bytes:
        raise ParseError(f"it is larger than {most_bytes >> 20} MB")
    return data


def lines(file: IO[bytes], most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """The lines of an open file, each with its end; one that is longer than the limit comes in pieces without one."""
    return iter(functools.partial(file.readline, most_bytes), b"")


def text(data: bytes, most_bytes: int = MOST_BYTES) -> str:
    """UTF-8 with or without a byte order mark."""
    if len(data) > most_bytes:
        raise ParseError(f"it is larger than {most_bytes >> 20} MB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(f"it is not UTF-8: {error}") from None


def json(data: bytes | str, most_values: float = MOST_VALUES) -> Any:
    """Strict JSON: NaN and Infinity are no numbers."""
    return _guarded(_DECODE, data, most_values)


def typed_json(data: bytes, kind: type[T], most_values: float = MOST_VALUES) -> T:
    """Strict JSON of one type, a Struct of msgspec, say; bytes in it are base64."""
    found: T = _guarded(msgspec.json.Decoder(kind).decode, data, most_values)
    return found


def loose_json(data: bytes | str, most_values: float = MOST_VALUES) -> Any:
    """JSON as Python and the tools around it write it, with NaN, Infinity and a byte order mark."""
    return _guarded(_json.loads, data if isinstance(data, str) else text(data, most_bytes=len(data)), most_values)


def _guarded(decode: Any, data: bytes | str, most_values: float) -> Any:
    is_bytes = isinstance(data, bytes)
    marks: Any = (b"[", b"{", b",") if is_bytes else ("[", "{", ",")
    num_open = data.count(marks[0]) + data.count(marks[1])
    if num_open + data.count(marks[2]) > most_values:
        raise ParseError(f"it has more than {most_values} values")
    try:
        value = decode(data)
    except RecursionError:
        raise ParseError(f"it is nested deeper than {MOST_DEPTH}") from None
    except MemoryError:
        raise ParseError("there is not enough memory to read it") from None
    except ValueError as error:  # msgspec's errors are ValueErrors, and so is text that is not UTF-8
        raise ParseError(str(error) or type(error).__name__) from None
    if num_open > MOST_DEPTH and _is_deep(value):
        raise ParseError(f"it is nested deeper than {MOST_DEPTH}")
    return value


def _is_deep(value: Any) -> bool:
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MOST_DEPTH):
        if not level:
            return False
        inside = (inner for outer in level for inner in (outer.values() if type(outer) is dict else outer))
        level = [inner for inner in inside if type(inner) is dict or type(inner) is list]
    return bool(level)


def yaml(data: bytes | str) -> Any:
    """The document of a YAML text, None for an empty one. Aliases work; what they stand for is counted each time."""
    import yaml as library  # type: ignore[import-untyped]  # a quarter of the import time of `rung.runs`

    return _yaml(data, lambda one: library.load(one, getattr(library, "CSafeLoader", library.SafeLoader)))


def checked_yaml(data: bytes | str) -> io.StringIO:
    """A YAML text for another loader, such as OmegaConf's, after its limits were checked."""
    written = data if isinstance(data, str) else text(data)
    _yaml(written, lambda one: None)
    return io.StringIO(written)


def _yaml(data: bytes | str, load: Any) -> Any:
    import yaml as library

    try:
        _check_nodes(library, data)
        return load(data)
    except library.YAMLError as error:
        raise ParseError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ParseError(f"it is nested deeper than {MOST_DEPTH}") from None
    except MemoryError:
        raise ParseError("there is not enough memory to read it") from None
    except ParseError:
        raise
    # A whole number of 5,000 digits, the 31st of February, a list as a key, a tag without a value.
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ParseError(f"it holds a value that cannot be read: {error}") from None


def _check_nodes(library: Any, data: bytes | str) -> None:
    """Counts the nodes of a document, with each alias as what it stands for, before anything is built of them.

    The events come one by one: no recursion, and no more memory than the text.
    """
    if len(data) > MOST_BYTES:
        raise ParseError(f"it is larger than {MOST_BYTES >> 20} MB")
    sizes: dict[str, tuple[int, int]] = {}  # anchor -> nodes and levels of what it names
    above: list[tuple[str | None, int, int]] = []  # of what is open: its anchor, nodes before it, levels inside
    total = 0
    for event in library.parse(data, getattr(library, "CSafeLoader", library.SafeLoader)):
        depth = 0
        if isinstance(event, library.AliasEvent):
            if any(event.anchor == anchor for anchor, *_ in above):
                raise ParseError(f"the alias *{event.anchor} leads into itself")
            nodes, depth = sizes.get(event.anchor, (1, 1))
            total += nodes
        elif isinstance(event, library.ScalarEvent):
            total, depth = total + 1, 1
            if event.anchor:
                sizes[event.anchor] = (1, 1)
        elif isinstance(event, library.CollectionStartEvent):
            above.append((event.anchor, total, 0))
            total += 1
        elif isinstance(event, library.CollectionEndEvent):
            anchor, before, inside = above.pop()
            depth = inside + 1
            if anchor:
                sizes[anchor] = (total - before, depth)
        if total > MOST_NODES:
            raise ParseError(f"it has more than {MOST_NODES} values, aliases written out")
        if len(above) + depth > MOST_DEPTH:
            raise ParseError(f"it is nested deeper than {MOST_DEPTH}")
        if above and depth:
            anchor, before, inside = above[-1]
            above[-1] = anchor, before, max(inside, depth)


Shape = Any  # a type or a tuple of types; {"key": shape}, with "*" for all keys; [shape] for the entries of a list


def mismatch(value: Any, shape: Shape, name: str) -> str | None:
    """What of a value has not the shape that its readers rely on, in words; None where all of it fits.

    A missing key and a null fit everywhere. True and False are no numbers.
    """
    if value is None:
        return None
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{name} is {type(value).__name__}, not dict"
        for key, inner in value.items() if "*" in shape else ():
            if found := mismatch(inner, shape["*"], f"{name}.{key}"):
                return found
        parts = ((key, shape[key]) for key in shape if key != "*" and key in value)
        return next(filter(None, (mismatch(value[key], inner, f"{name}.{key}") for key, inner in parts)), None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{name} is {type(value).__name__}, not list"
        for at, inner in enumerate(value):
            if inner is None or (found := mismatch(inner, shape[0], f"{name}[{at}]")):
                return f"{name}[{at}] is null" if inner is None else found
        return None
    kinds = shape if isinstance(shape, tuple) else (shape,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return f"{name} is {type(value).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}"
    return None


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one: for what may be missing."""
    return value if isinstance(value, Mapping) else {}
