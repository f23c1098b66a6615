"""The framing of TensorBoard's event files: length, its checksum, data, its checksum.

A writer appends whole records with one write each, so a killed process leaves at most one torn record at the end. A
reader stops silently there, and with an error at a wrong checksum: what lies behind it cannot be found again. The
checksum is CRC-32C, not the CRC-32 of zlib, and it is stored rotated and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_MOST_BYTES = 1 << 31  # a longer record is a wrong length whose checksum happens to fit


class Damaged(ValueError):
    """A record whose checksum is wrong."""


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _FOOT.pack(masked(length)) + data + _FOOT.pack(masked(data))


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, in order; raises Damaged where a checksum is wrong."""
    with open(path, "rb") as file:
        at = 0
        while True:
            head = file.read(12)
            if len(head) < 12:
                return
            length, crc = _HEAD.unpack(head)
            if masked(head[:8]) != crc or length > _MOST_BYTES:
                raise Damaged(f"the record at byte {at} of {path} has a wrong checksum of its length")
            body = file.read(length + 4)
            if len(body) < length + 4:
                return
            data = body[:length]
            if masked(data) != _FOOT.unpack(body[length:])[0]:
                raise Damaged(f"the record at byte {at} of {path} has a wrong checksum")
            yield data
            at += length + 16
