"""The framing of wandb's files: a header of seven bytes, then records in blocks of 32 kB, as in LevelDB.

A record is whole, or cut at the ends of blocks into a first, middle and last part; each part has its own checksum. So a
reader can begin at any block, and lose no more than a block to damage. A file without an end is normal for a run that
is going: wandb writes with a delay, even for a while after it said that it had finished.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from rung.errors import RunError
from rung.trackers.protobuf import Malformed, fields

_MAGIC = b":W&B"
_HEAD_BYTES, _BLOCK_BYTES = 7, 1 << 15  # of the file and of a part; of a block
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_EXIT = 18  # the field of a record that says how the run ended


def log_records(path: Path, problems: list[str]) -> Iterator[bytes]:
    """The whole records of a file; a block with a wrong checksum is passed over and told, a torn end is not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {(error.strerror or str(error)).lower()}.", code="cannot-read") from error
    if data[:4] != _MAGIC[: len(data)]:
        raise RunError(f"{path} is not a wandb file: it begins with {data[:4]!r}, not {_MAGIC!r}.", code="bad-source")
    for record, at in _parsed(data, _HEAD_BYTES):
        if record is not None:
            yield record
        else:
            problems.append(
                f"{path} is damaged at byte {at}: the rest of its block of {_BLOCK_BYTES} bytes is left out"
            )


def is_ended(path: Path) -> bool:
    """Whether the last blocks of a file say how the run ended."""
    try:
        with open(path, "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size // _BLOCK_BYTES - 1) * _BLOCK_BYTES
            file.seek(begin)
            found = _parsed(file.read(), 0 if begin else _HEAD_BYTES)
        return any(number == _EXIT for record, _ in found for number, _ in fields(record or b""))
    except (OSError, Malformed):
        return False


def _parsed(data: bytes, at: int) -> Iterator[tuple[bytes | None, int]]:
    """Each whole record and where it ends; None and where it is for a damaged part, whose block is passed over."""
    begun: bytes | None = None
    while at + _HEAD_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEAD_BYTES:
            at += left
            continue
        length, kind = data[at + 4] | data[at + 5] << 8, data[at + 6]
        end = at + _HEAD_BYTES + length
        if end > len(data) and length + _HEAD_BYTES <= left:
            return
        is_sound = length + _HEAD_BYTES <= left and _WHOLE <= kind <= _LAST
        if not is_sound or zlib.crc32(data[at + 6 : end]) != _crc(data, at):
            yield None, at
            at, begun = at + left, None
            continue
        body, at = data[at + _HEAD_BYTES : end], end
        if kind == _WHOLE:
            yield body, at
        elif kind == _FIRST:
            begun = body
        elif begun is not None:  # else the first part was in a damaged block
            begun += body
            if kind == _LAST:
                yield begun, at
                begun = None


def _crc(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
