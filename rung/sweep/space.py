"""The points of a sweep: which there are, the command-line overrides of each, and the key that each is known by.

A key depends on what the overrides mean, not on how they are spelled or ordered, so a sweep file can be rearranged,
moved and extended, and points that are already trained are still found. A config file counts by its content.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.config import load_file, parse_overrides
from rung.errors import ConfigError, UserError
from rung.text import one_line

_KEY_BYTES = 6
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:+-]*")  # text that needs no quotes, unless YAML has another idea of it
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Point:
    """One run to be made. `words` follow the recipe in `rung train RECIPE ...`; `varies` is what sets it apart."""

    key: str
    words: tuple[str, ...]
    varies: Mapping[str, Any]
    run: str | None = None  # a run that was made elsewhere and serves here; its path, from the folder of the runs

    @property
    def label(self) -> str:
        """`varies` as a person reads it."""
        return " ".join(f"{name}={one_line(value)}" for name, value in self.varies.items()) or self.key


@dataclass(frozen=True)
class Sweep:
    """A planned sweep. It lives in `folder`, which is <runs>/.sweeps/<name>."""

    name: str
    folder: Path  # absolute
    runs: Path  # absolute
    recipe: str
    experiment: str
    points: tuple[Point, ...]
    eval_split: str | None = None
    retries: int = 1
    ranks: int = 1  # processes of one run, under torchrun where more than one
    launch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metric: str | None = None
    search: Mapping[str, Any] | None = None
    why: str | None = None
    words: tuple[str, ...] = ()  # what all points share

    def point(self, key_or_index: str) -> Point:
        """The point of this key, of the beginning of one, or of this place in the list, counted from 0."""
        exact = [point for point in self.points if point.key == key_or_index]
        if exact:
            return exact[0]
        if key_or_index.isdecimal() and int(key_or_index) < len(self.points):
            return self.points[int(key_or_index)]
        found = [point for point in self.points if key_or_index and point.key.startswith(key_or_index)]
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} points begin with {key_or_index!r}" if found else f"there is no point {key_or_index!r}"
        message = f"{what} in sweep {self.name}; `rung sweep show {self.name}` lists their keys."
        raise UserError(message, code="no-point")


def make_point(recipe: str, shared: Sequence[str], varies: Mapping[str, Any]) -> Point:
    """The point with these values on top of the words that all points share."""
    words = (*shared, *(override(name, value) for name, value in varies.items()))
    return Point(key_of(recipe, words), words, dict(varies))


def point_of(sweep: Sweep, varies: Mapping[str, Any]) -> Point:
    """The point of this sweep with these values."""
    return make_point(sweep.recipe, sweep.words, varies)


def override(name: str, value: Any) -> str:
    """`name=value` that the command line reads back as this value."""
    if not _NAME.fullmatch(name):
        message = f"{one_line(name)!r} is not a key; write it with dots, such as lr.learning_rate"
        raise ConfigError(message, code="no-key")
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_overrides([f"x={value}"]) == {"x": value}:
        return f"{name}={value}"
    return f"{name}={_to_yaml(value)}"


def _to_yaml(value: Any) -> str:
    """A value in one line of YAML; JSON is close, but has no infinity and splits rare characters in two."""
    if isinstance(value, str):
        signs = (c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in value)
        return f'"{"".join(signs)}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_to_yaml(str(name))}: {_to_yaml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_to_yaml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if value != value else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


def key_of(recipe: str, words: Sequence[str]) -> str:
    """A short name for what these words train; the same for every spelling and order of them."""
    plain, files = split_files(words)
    held = []
    for file in files:
        try:
            stat = os.stat(file)
        except OSError:
            raise ConfigError(f"no config file {file}", code="no-file") from None
        held.append(_keys_of_file(file, stat.st_mtime_ns, stat.st_size))
    meant = [recipe, held, sorted({leaf for one in plain for leaf in _keys_of_word(one)})]
    return hashlib.blake2b(json.dumps(meant).encode(), digest_size=_KEY_BYTES).hexdigest()


@functools.lru_cache(4096)  # the points of a grid share most of their words, and reading one takes a millisecond
def _keys_of_word(one: str) -> tuple[str, ...]:
    return (one,) if one.startswith("preset=") else tuple(_leaves(parse_overrides([one]), ""))


@functools.lru_cache(64)
def _keys_of_file(file: str, _changed_ns: int, _size: int) -> tuple[str, ...]:
    return tuple(sorted(_leaves(load_file(Path(file)), "")))


def _leaves(value: Any, name: str) -> Iterator[str]:
    """Each key with its value, in one spelling."""
    if isinstance(value, Mapping) and value:
        for part, one in value.items():
            yield from _leaves(one, f"{name}.{part}" if name else str(part))
    else:
        yield f"{name}={json.dumps(_plain(value))}"


def split_files(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """key=value words, and the config files that are named by -c."""
    plain: list[str] = []
    files: list[str] = []
    rest = iter(words)
    for one in rest:
        if one == "-c":
            files.append(next(rest))
        else:
            plain.append(one)
    return plain, files


def _plain(value: Any) -> Any:
    """The same value whether somebody wrote 3e5 or 300000."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
