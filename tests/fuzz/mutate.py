"""Valid files, made wrong: as documents (another type somewhere, a key gone, text that steers) and as bytes."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def fuzzed(num_examples: int) -> settings:
    """So many inputs, always the same ones; in `make test-fuzz` 100,000 others each time."""
    return settings(
        max_examples=int(os.environ.get("RUNG_FUZZ_EXAMPLES", num_examples)),
        deadline=None,
        derandomize="RUNG_FUZZ_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


STEERS = "\x1b[31m\x1b]0;x\x07\u202e\x9b"


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODD = [
    None, True, 0, -1, 1.5, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, "", "x", "NaN", "-Infinity", STEERS,
    "a\nb\rc", "../../..", "/etc/passwd", "\udcff", "[red]", "9" * 400, [], {}, [None], [[]], {"": None},
    {"a": {"b": 1}}, [1, 2, 3], {"step": "x"}, nested(60), "long " * 5000, 10**30,
]  # fmt: skip
LENGTHS = [b"\xff" * 4, b"\0" * 4, b"\x7f" + b"\xff" * 3, b"\xff" * 3 + b"\x7f"]
odd = st.sampled_from(ODD)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every node of a document, itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@st.composite
def documents(draw: Any, valid: Any) -> Any:
    """A document with one to three of its nodes replaced, removed or added to."""
    found = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(found)))
        value = copy.deepcopy(draw(odd))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return value
            continue
        holder = found
        for key in path[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if how == "replace":
            holder[path[-1]] = value
        elif how == "remove":
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(["", STEERS, "x.y", "../x"]))] = value
        else:
            holder.append(value)
    return found


@st.composite
def damaged(draw: Any, valid: bytes) -> bytes:
    """Bytes that were cut, overwritten, repeated or mixed with what a format may trip over."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.integers(0, 4))
        if how == 0:
            del data[at:]
        elif how == 1:
            data[at : at + draw(st.integers(1, 8))] = draw(st.binary(min_size=1, max_size=8))
        elif how == 2:
            data[at:at] = data[at : at + draw(st.integers(1, 64))] * draw(st.sampled_from([1, 3]))
        elif how == 3:
            data[at : at + 4] = draw(
                st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f" + b"\xff" * 3, b"\xff" * 3 + b"\x7f"])
            )
        else:
            more = [b"[" * 5000, b"NaN", b"&a [*a]", b"\n", b"\x1b[31m", b"9" * 5000, b"{"]
            data[at:at] = draw(st.sampled_from(more))
    return bytes(data)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
