"""What a script logs, sorted out: numbers of training, evals, and what cannot be kept as a number.

Nothing here writes and nothing waits for a device: a tensor that lies on one stays a tensor. Names that scripts use for
the same thing (train/loss, grad_norm, learning_rate) are kept, and copied to the one name that rung's readers know.
Which names are evals, and of what set, is said in runs/metricnames.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rung.runs.files import plain
from rung.runs.metricnames import eval_of, is_eval_clock, usual_name
from rung.script.media import is_media

# What stands beside the numbers of an eval to say when it was, and makes no row of training of it.
COMPANIONS = frozenset({"epoch", "iter", "iteration", "step", "global_step", "trainer/global_step"})
_RESERVED = frozenset({"unix_s"})  # written with each row
_plain_names: set[str] = set()  # that were seen to be nothing but names of training
_MOST_NAMES = 10_000  # a script has a few; one that makes them up must not fill the memory


@dataclass(slots=True)
class Logged:
    """`row` and `evals` hold numbers, or tensors of one number; `odd` says of each other name why it was left out."""

    row: dict[str, Any] = field(default_factory=dict)
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    has_clocks: bool = False  # of an eval
    renamed: list[tuple[str, str]] = field(default_factory=list)  # rung's name and the script's
    media: dict[str, Any] = field(default_factory=dict)  # pictures, sound, tables, histograms

    @property
    def is_eval_only(self) -> bool:
        is_eval = bool(self.evals) or self.has_clocks
        return is_eval and all(name in COMPANIONS or is_eval_clock(name) for name in self.row)


def sort_out(values: Mapping[Any, Any]) -> Logged:
    """In a loop of 10 ms a step all of this runs with cold caches, at several times what it takes in a test: so the
    usual value goes a short way."""
    row: dict[str, Any] = {}
    logged = Logged(row)
    for name, value in values.items():
        kind = type(value)
        if kind is not float and kind is not int and getattr(value, "is_cpu", False) and value.numel() == 1:
            value = value.item()
            kind = type(value)
        if (kind is float or kind is int) and name in _plain_names:
            row[name] = value
        elif value is not None:
            _sort(name, value, logged)
    for ours, name in logged.renamed:
        row.setdefault(ours, row[name])
    return logged


def _sort(name: Any, value: Any, logged: Logged) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if part is not None:
                _sort(f"{name}/{key}", part, logged)
        return
    name = plain(f"{name}")  # a name that is no Unicode cannot be written
    if is_media(value):
        logged.media[name] = value
        return
    number, why = _number(value)
    if why or name in _RESERVED:
        logged.odd[name] = why or "is written by rung itself"
    elif name in _plain_names:
        logged.row[name] = number
    elif (found := eval_of(name)) is not None:
        if found.name in (results := logged.evals.setdefault(found.set, {})):
            logged.odd[name] = f"is another name of eval/{found.set}/{found.name}, which is logged beside it"
        else:
            results[found.name] = number
    else:
        logged.row[name] = number
        if is_eval_clock(name):
            logged.has_clocks = True
        elif (ours := usual_name(name)) is not None:
            logged.renamed.append((ours, name))
        elif len(_plain_names) < _MOST_NAMES:
            _plain_names.add(name)


def is_away(value: Any) -> bool:
    """A tensor that is not on the host."""
    return getattr(value, "is_cpu", True) is False


def to_float(value: Any) -> float:
    """Of what `sort_out` let through. A device is waited for."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _number(value: Any) -> tuple[Any, str]:
    """The value as a number, or as a tensor of one that lies on a device; or why it is neither."""
    try:
        if hasattr(value, "is_cpu"):
            if value.numel() != 1:
                return None, f"is a tensor of {value.numel()} numbers; log one, such as its mean"
            if value.is_complex() or value.is_meta:  # packed with others it would fail them all
                return None, f"is a tensor of {'complex numbers' if value.is_complex() else 'no value'}"
            if is_away(value):
                return value.detach().reshape(()), ""
            value = value.item()
        if isinstance(value, bool | int | float):
            return (int(value) if isinstance(value, bool) else value), ""
        if isinstance(value, str | bytes):
            return None, "is text, and a row holds numbers; run.note() and run.sample() keep texts"
        if getattr(value, "size", 1) == 1 and hasattr(value, "item"):
            value = value.item()
        return float(value), ""
    except Exception:  # an object of any kind, whose conversion may fail in any way
        return None, f"is a {type(value).__name__}, not a number"
