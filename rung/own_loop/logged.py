"""What a script logs, sorted out: numbers of training, evals, and what cannot be kept as a number.

Nothing here writes and nothing waits for a device: a tensor that lies on one stays a tensor. Names that scripts use for
the same thing (train/loss, grad_norm, learning_rate) are kept, and copied to the one name that rung's readers know.

The surprising thing: which set an eval is of is read from its name. val/loss, val_loss, eval/wiki/loss and loss/test
are evals; train/loss and value_loss are not.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_WORD = r"(?:val|valid|validation|eval|evaluation|test|dev|holdout)"
_FIRST = re.compile(rf"({_WORD}\d*(?:[-_.][^/]*)?)/(.+)", re.I)
_JOINED = re.compile(rf"({_WORD}\d*)[_.-](.+)", re.I)
_LAST = re.compile(rf"([^/]+)/({_WORD}\d*)", re.I)
_SAME = {
    "loss": ("train/loss", "train_loss", "loss/train", "training_loss", "train/loss_step", "train_loss_step"),
    "norm": ("grad_norm", "train/grad_norm", "gradient_norm", "train/norm"),
    "lr": ("learning_rate", "train/learning_rate", "train/lr", "train_lr"),
}
_ALIAS = {name: known for known, names in _SAME.items() for name in names}
# What stands beside the numbers of an eval to say when it was, and makes no row of training of it.
COMPANIONS = frozenset({"epoch", "iter", "iteration", "step", "global_step", "trainer/global_step"})
_RESERVED = frozenset({"unix_s"})  # written with each row


class Eval(NamedTuple):
    set: str
    name: str


@dataclass
class Logged:
    """`row` and `evals` hold numbers, or tensors of one number; `odd` says of each other name why it was left out."""

    row: dict[str, Any] = field(default_factory=dict)
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)

    @property
    def is_eval_only(self) -> bool:
        return bool(self.evals) and COMPANIONS.issuperset(self.row)


@functools.lru_cache(maxsize=10_000)  # a script has a few names; one that makes them up must not fill the memory
def eval_of(name: str) -> Eval | None:
    """Set and metric where the name is that of an eval."""
    if found := _FIRST.fullmatch(name):
        group, metric = found[1], found[2]
        if group.lower() == "eval" and "/" in metric:
            group, metric = metric.split("/", 1)
    elif found := _LAST.fullmatch(name):
        group, metric = found[2], found[1]
    elif (found := _JOINED.fullmatch(name)) and "/" not in name:
        group, metric = found[1], found[2]
    else:
        return None
    return Eval(group, "loss" if metric.lower() == "loss" else metric)


def sort_out(values: Mapping[Any, Any]) -> Logged:
    """In a loop of 10 ms a step all of this runs with cold caches, at several times what it takes in a test: so the
    usual row, of numbers and tensors on the host, goes the short way."""
    row: dict[str, Any] = {}
    logged = Logged(row)
    for name, value in values.items():
        kind = type(value)
        if kind is not float and kind is not int:
            if getattr(value, "is_cpu", False) and value.numel() == 1:
                value = value.item()
            elif value is None:
                continue
            else:
                _sort_odd(f"{name}", value, logged)
                continue
        if type(name) is str and _is_plain(name):
            row[name] = value
        else:
            _sort_named(f"{name}", value, logged)
    for name in _ALIAS.keys() & row.keys():
        row.setdefault(_ALIAS[name], row[name])
    return logged


def _sort_odd(name: str, value: Any, logged: Logged) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            _sort_odd(f"{name}/{key}", part, logged)
    elif value is not None:
        number, why = _number(value)
        if why:
            logged.odd[name] = why
        else:
            _sort_named(name, number, logged)


def _sort_named(name: str, value: Any, logged: Logged) -> None:
    if name in _RESERVED:
        logged.odd[name] = "is written by rung itself"
    elif (found := eval_of(name)) is None:
        logged.row[name] = value
    else:
        logged.evals.setdefault(found.set, {})[found.name] = value


@functools.lru_cache(maxsize=10_000)
def _is_plain(name: str) -> bool:
    return name not in _RESERVED and eval_of(name) is None


def is_away(value: Any) -> bool:
    """A tensor that is not on the host."""
    return type(value) is not float and getattr(value, "is_cpu", True) is False


def to_float(value: Any) -> float:
    """Of what `sort_out` let through. A device is waited for."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _number(value: Any) -> tuple[Any, str]:
    """The value as a number, or as a tensor of one that lies on a device; or why it is neither."""
    if isinstance(value, bool | int | float):
        return (int(value) if isinstance(value, bool) else value), ""
    if isinstance(value, str | bytes):
        return None, "is text, and a row holds numbers; run.note() and run.sample() keep texts"
    try:
        if hasattr(value, "is_cpu"):
            if value.numel() != 1:
                return None, f"is a tensor of {value.numel()} numbers; log one, such as its mean"
            value = value.detach()
            return (value.reshape(()) if is_away(value) else value.item()), ""
        if getattr(value, "size", 1) == 1 and hasattr(value, "item"):
            value = value.item()
        return float(value), ""
    except Exception:  # an object of any kind, whose conversion may fail in any way
        return None, f"is a {type(value).__name__}, not a number"
