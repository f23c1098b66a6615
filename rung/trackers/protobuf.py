"""Protocol buffers by hand: the wire format alone, both ways, for the few messages of wandb and TensorBoard.

A message is bytes; `fields` gives number and value of each of its fields in order, `message` the same as a dict, and
the writers give the bytes of one field. The wire has four shapes and no types: a varint comes as an unsigned int,
everything else as bytes; `signed`, `zigzag`, `double` and `text` convert them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes  # of a field
_DOUBLE = struct.Struct("<d")
_FLOAT = struct.Struct("<f")


class Malformed(ValueError):
    """Bytes that are no message."""


def fields(data: Value) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a message; raises Malformed at the first that is none."""
    data = part(data)
    at, end = 0, len(data)
    while at < end:
        # Nearly all tags and lengths are below 128, one byte; without this shortcut a wandb file reads half as fast.
        tag = data[at]
        tag, at = (tag, at + 1) if tag < 0x80 else _varint(data, at)
        number, shape = tag >> 3, tag & 7
        if number == 0:
            raise Malformed("a field has the number 0")
        value: Value
        if shape == 0:
            value, at = _varint(data, at)
        else:
            if shape == 2:
                length = data[at] if at < end else 0x80
                length, at = (length, at + 1) if length < 0x80 else _varint(data, at)
            elif shape in (1, 5):
                length = 8 if shape == 1 else 4
            else:
                raise Malformed(f"field {number} has the unknown shape {shape}")
            if at + length > end:
                raise Malformed(f"field {number} is cut off")
            value = data[at : at + length]
            at += length
        yield number, value


def message(data: Value) -> dict[int, Value]:
    """The fields of a message by number; of one that is repeated, the last."""
    return dict(fields(data))


def signed(value: Value) -> int:
    """int32, int64, bool and enum."""
    if isinstance(value, bytes):
        raise Malformed("a whole number was expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def zigzag(value: Value) -> int:
    """sint32 and sint64."""
    if isinstance(value, bytes):
        raise Malformed("a whole number was expected")
    return (value >> 1) ^ -(value & 1)


def double(value: Value) -> float:
    return float(_DOUBLE.unpack(_fixed(value, 8))[0])


def single(value: Value) -> float:
    return float(_FLOAT.unpack(_fixed(value, 4))[0])


def text(value: Value) -> str:
    """A string; what is not UTF-8 is shown as an escape rather than lost."""
    return part(value).decode("utf-8", "backslashreplace")


def part(value: Value) -> bytes:
    """Bytes, or a message within."""
    if isinstance(value, int):
        raise Malformed("text or a message was expected")
    return value


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def of_int(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def of_double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + _DOUBLE.pack(value)


def of_single(number: int, value: float) -> bytes:
    """A float of four bytes; what is too large for one is infinite, as in every other conversion to float32."""
    try:
        return varint(number << 3 | 5) + _FLOAT.pack(value)
    except OverflowError:
        return varint(number << 3 | 5) + _FLOAT.pack(float("inf") if value > 0 else float("-inf"))


def of_bytes(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def of_text(number: int, value: str) -> bytes:
    return of_bytes(number, value.encode("utf-8", "backslashreplace"))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Malformed("a number is cut off" if at >= len(data) else "a number has more than 64 bits")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7


def _fixed(value: Value, length: int) -> bytes:
    if isinstance(value, int) or len(value) != length:
        raise Malformed(f"a number of {length} bytes was expected")
    return value
