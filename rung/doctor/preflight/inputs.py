"""What goes into the model: is it there, is it finite, does it vary, is its scale one that a network can take?

Looks at host arrays as streams gather them, before any recipe scales them; so pictures of bytes are fine as they are,
and ids have no scale. Masks, and channels that a store declares constant, are expected not to vary. A channel that does
not vary in the first rows is asked about again with more: a rare event is not a dead channel. Whether an array goes
into the model or is what the loss compares with cannot be told from it: results name the array, and speak of both.

Whether eval sets are like train is asked in shift.py, and whether the model uses what it is given in briefly.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rung.doctor.preflight import briefly, shift
from rung.doctor.preflight.arrays import AGAIN_ROWS, NUM_ROWS, QUICK_ROWS, Look, declared, look_at, rows_of
from rung.doctor.preflight.result import Bench, Check, Result

FAR = 10.0  # |mean| in standard deviations: what varies is then lost beside what does not
SCALES = (1e-3, 1e3)


def sound_inputs(bench: Bench) -> Iterator[Result]:
    """Each tensor of the train batch by itself."""
    num_rows = QUICK_ROWS if bench.is_quick else NUM_ROWS
    arrays = rows_of(bench, "train", num_rows)
    known, found = declared(bench), list[Result]()
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        seen = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        yield Result("inputs", "fail", f"first axes differ: {seen}", "give every array one entry per row, first", "D4")
        return
    looks = [look_at(name, np.asarray(array)) for name, array in arrays.items()]
    for look in looks:
        found += _wrong(bench, look, known)
    detail = "\n".join(look.line() for look in looks)
    yield from (result._replace(detail=detail) for result in found)
    if not found:
        names = ", ".join(look.name for look in looks)
        yield Result("inputs", "pass", f"{lengths.pop()} rows of {names}: finite, varying", rule="D4", detail=detail)


def _wrong(bench: Bench, look: Look, known: Mapping[str, Any]) -> Iterator[Result]:
    name, array = "inputs", look.array
    if not np.isfinite(look.channels).all():
        num_bad = int((~np.isfinite(look.channels)).sum())
        seen = f"{look.name} has {num_bad} of {array.size} numbers that are not finite"
        yield Result(name, "fail", seen, "repair or drop these rows before training", "D4")
        return
    if look.is_mask or len(array) < 2:
        return
    if array.min() == array.max():
        if array.flat[0] != 1:  # ones are flags, or weights, that do not differ yet
            what = "is silent: all zero" if not array.any() else f"is constant: {array.flat[0]:g}"
            yield Result(name, "warn", f"{look.name} {what} in {len(array)} rows", _fill(look.name), "D4")
        return
    if (array == array[:1]).all():
        if not _is_ramp(array[0]):
            seen = f"all {len(array)} rows of {look.name} are the same"
            yield Result(name, "warn", seen, "make the first axis the batch, and gather by id", "D4")
        return
    yield from _scale(look, known)
    if (dead := _dead(bench, look, known)) and not look.is_ids:
        remedy = f"{_fill(look.name)}; or declare them constant in the store"
        yield Result(name, "warn", f"{look.name} has channels that do not vary: {', '.join(dead)}", remedy, "D4")


def _fill(name: str) -> str:
    return f"fill {name} where it is gathered, or leave it out"


def _is_ramp(row: np.ndarray) -> bool:
    """Places or times: the same in every row, and rightly so."""
    flat = row.reshape(-1).astype(np.float64)
    return len(flat) > 2 and bool(np.allclose(np.diff(flat, 2), 0, atol=1e-6 * max(1.0, np.abs(flat).max())))


def _scale(look: Look, known: Mapping[str, Any]) -> Iterator[Result]:
    """Floats go into a model as they are, unless the store has statistics to bring them to a common scale."""
    array = look.array
    if not np.issubdtype(array.dtype, np.floating) or look.channels.shape[1] == len(known.get("mean", ())):
        return
    low, high, mean, std = float(array.min()), float(array.max()), float(array.mean()), float(array.std())
    remedy = (
        f"if the model gets {look.name} as it is, or the loss as a target, bring it to mean 0 and deviation 1 where it "
        "is gathered, or there; if one of them does so already, all is well"
    )
    if low >= 0 and 100 < high <= 255 and (array == np.round(array)).all():
        yield Result("inputs", "warn", f"{look.name} has 0..255 as floats", remedy, "D4")
    elif abs(mean) > FAR * std or not SCALES[0] <= std <= SCALES[1]:
        yield Result("inputs", "warn", f"{look.name} has mean {mean:.4g} and deviation {std:.4g}", remedy, "D4")


def _dead(bench: Bench, look: Look, known: Mapping[str, Any]) -> list[str]:
    """Channels that vary neither here nor in more rows, nor are known for it."""
    still = look.still
    if look.channels.shape[1] < 2 or not still.any():
        return []
    names: Sequence[str] = known.get("names", ())
    names = list(names) if len(names) == len(still) else [str(channel) for channel in range(len(still))]
    suspects = [c for c in np.flatnonzero(still).tolist() if names[c] not in known.get("constant", ())]
    if suspects:
        more = look_at(look.name, np.asarray(rows_of(bench, "train", AGAIN_ROWS)[look.name]))
        suspects = [c for c in suspects if more.still[c]]
    # All ones, as of a flag that is always up, or few rows: nothing to be said.
    return [names[c] for c in suspects if look.mean[c] != 1 and len(look.array) >= QUICK_ROWS // 2]


def declared_inputs(bench: Bench) -> Iterator[Result]:
    """Whether the tensors that `Recipe.inputs` names are in a batch; probes of a run take them away by these names."""
    inputs, name = list(bench.setup.recipe.inputs()), "declared inputs"
    if not inputs:
        yield Result(name, "skip", "the recipe declares none; see Recipe.inputs", rule="C1")
        return
    for stream in ("train", *list(bench.setup.evaluator.streams)[:1]):
        there = list(bench.rows(stream, 1)[1])
        for given in inputs:
            if missing := [tensor for tensor in given.tensors if tensor not in there]:
                seen = f"{given.name} is said to be in {missing[0]!r}, but a batch of {stream} has {', '.join(there)}"
                yield Result(name, "fail", seen, "name one of these in Recipe.inputs", "C1")
                return
    yield Result(name, "pass", ", ".join(f"{i.name} ({', '.join(i.tensors)})" for i in inputs), rule="C1")


CHECKS: list[Check] = [
    Check("inputs", sound_inputs),
    Check("declared inputs", declared_inputs),
    *shift.CHECKS,
    *briefly.CHECKS,
]
