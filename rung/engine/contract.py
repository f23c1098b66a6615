"""Calls a recipe's own functions, and turns their mistakes into one sentence with file and line.

What runs at every step is looked at only where it failed; return values are looked at before step 0.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rung.errors import RecipeError, UserError
from rung.random import Draw
from rung.recipe import Arrays, Loss, Part, Stream

MOST_ROWS = 3  # that a sentence names


class Gathers(Protocol):
    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays: ...


def place_of(what: Any) -> str:
    """Where a function, a method or a class was written, and its name: bytes_gru.py:41 gather()."""
    while isinstance(what, functools.partial):
        what = what.func
    what = inspect.unwrap(what)
    if not (inspect.isclass(what) or hasattr(what, "__code__")):
        what = type(what)
    name = what.__name__ if inspect.isclass(what) else f"{what.__name__}()"
    try:
        file = inspect.getsourcefile(what)
        line = what.__code__.co_firstlineno if hasattr(what, "__code__") else inspect.getsourcelines(what)[1]
    except (TypeError, OSError):  # typed into an interpreter
        return name
    return f"{_short(file)}:{line} {name}" if file else name


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def check_streams(streams: Mapping[str, Stream], streams_of: Callable[..., Any]) -> None:
    """What each stream must say of itself; `streams_of` is the method that made them."""
    if "train" not in streams:
        made = ", ".join(streams) or "none"
        raise RecipeError(f"{place_of(streams_of)} has no stream called train; it has {made}", code="bad-stream")
    for name, stream in streams.items():
        fingerprint = getattr(stream, "fingerprint", None)
        if not isinstance(fingerprint, str) or not fingerprint:
            what = f"has the fingerprint {fingerprint!r}" if hasattr(stream, "fingerprint") else "has no fingerprint"
            raise RecipeError(
                f"{place_of(type(stream))}, the stream {name}, {what}; set self.fingerprint to a text that changes "
                "with the data, such as a hash of it",
                code="bad-stream",
            )
        if not isinstance(getattr(stream, "num_rows", None), int | np.integer):
            raise RecipeError(
                f"{place_of(type(stream))}, the stream {name}, has no num_rows; set self.num_rows to those of an epoch",
                code="bad-stream",
            )


def gather(stream: Stream, ids: np.ndarray, draw: Draw, gathers: Gathers | None = None) -> Arrays:
    """The rows as the stream, or `gathers` in its place, gives them; an error names the rows that cause it."""
    try:
        return (gathers or stream).gather(ids, draw)
    except (UserError, MemoryError):
        raise
    except Exception as failure:
        error = failure
    bad: dict[int, Exception] = {}
    for number, row in enumerate(ids.tolist()):
        try:
            stream.gather(ids[number : number + 1], replace(draw, rows=draw.rows[number : number + 1]))
        except Exception as alone:
            bad[row] = alone
        if len(bad) == MOST_ROWS:
            break
    which = f"row{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}" if bad else f"{len(ids)} rows together"
    which += " and maybe more" if len(bad) == MOST_ROWS else ""
    first, when = next(iter(bad.values()), error), "in an eval" if draw.is_eval else f"at step {draw.step}"
    # The last line in the file of the stream that led to the error; else the last of all.
    frames = traceback.extract_tb(first.__traceback__)
    last = ([frame for frame in frames if frame.filename == inspect.getsourcefile(stream.gather)] or frames)[-1]
    what = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0][:200]}"
    raise RecipeError(
        f"{place_of(stream.gather)} of {type(stream).__name__} fails on {which} {when}: {what} "
        f"({_short(last.filename)}:{last.lineno}); fix it, or leave such rows out of the stream",
        code="gather-failed",
    ) from error


def bad_arrays(stream: Stream, arrays: Any) -> RecipeError | None:
    """Why this cannot be sent to a device, where it is the recipe's mistake."""

    def wrong(what: str) -> RecipeError:
        return RecipeError(f"{place_of(stream.gather)} returns {what}", code="bad-batch")

    if not isinstance(arrays, Mapping):
        return wrong(f"{type(arrays).__name__}; return a dict of named numpy arrays")
    for name, array in arrays.items():
        if isinstance(array, Tensor):
            return wrong(f"a torch tensor as {name!r}; return numpy arrays, the engine makes tensors of them")
        if not isinstance(array, np.ndarray):
            return wrong(f"{type(array).__name__} as {name!r}; return a numpy array")
        if array.dtype.kind not in "biufc":
            if array.dtype.kind in "US" or any(isinstance(one, str | bytes) for one in array.flat):
                return wrong(f"strings as {name!r}; return numbers, such as the ids of tokens")
            return wrong(f"dtype {array.dtype} as {name!r}; return numbers, with rows padded to one length")
    return None


def read_loss(function: Callable[..., Any], loss: Any) -> Loss:
    """What a loss returned, with counts that were plain numbers as tensors."""
    problem = ""
    if not isinstance(loss, Loss):
        problem = f"{type(loss).__name__}; return Loss(sum, count), the summed loss and the number of targets"
    elif not isinstance(loss.sum, Tensor) or loss.sum.numel() != 1:
        what = f"shape {tuple(loss.sum.shape)}" if isinstance(loss.sum, Tensor) else f"a {type(loss.sum).__name__}"
        problem = f"a Loss whose sum has {what}; return one number, as each.sum() gives it"
    elif not isinstance(loss.count, Tensor | int | float) or torch.as_tensor(loss.count).numel() != 1:
        problem = "a Loss whose count is no single number; return the number of targets"
    if problem:
        raise RecipeError(f"{place_of(function)} returns {problem}", code="bad-loss")
    return loss._replace(count=torch.as_tensor(loss.count), parts=read_parts(function, loss.parts))


def read_parts(function: Callable[..., Any], parts: Any) -> dict[str, Part]:
    """The parts of a loss, or what `measure` returned, as tensors."""
    problem = ""
    if not isinstance(parts, Mapping):
        problem = f"{type(parts).__name__}; return a dict of named (sum, count)"
    elif odd := [n for n, pair in parts.items() if not isinstance(pair, tuple | list) or len(pair) != 2]:
        problem = f"{odd[0]!r} as {type(parts[odd[0]]).__name__}; return (sum, count), not a mean"
    if problem:
        raise RecipeError(f"{place_of(function)} returns {problem}", code="bad-loss")
    return {name: (torch.as_tensor(pair[0]), torch.as_tensor(pair[1])) for name, pair in parts.items()}
