"""Whether the arrays of a batch are there, finite, varying, of a scale that a network can take, and alike in all sets.

Looks at host arrays as streams gather them, before a recipe scales them; so pictures of bytes are fine, and ids have no
scale. Of train the rows come in stretches of neighbours, each as long as the largest eval set: how far these lie apart
says what such a set may be like, without anything being wrong with it.

Nothing is pooled that can be wrong alone: channels, steps in time and rows are judged one by one, since one sound
channel or a few sound rows give the whole array a deviation that looks healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine.contract import gather
from rung.engine.evaluate import EVAL_STEP
from rung.random import Draw

NUM_ROWS, QUICK_ROWS, AGAIN_ROWS = 256, 64, 1024
NUM_STRETCHES = 8
MOST_BYTES, QUICK_BYTES = 200_000_000, 30_000_000
MOST_CHANNELS = 64  # a last axis longer than this is not one of channels
TINY = 1e-6  # of max(1, |mean|): rounding
MASKS = ("mask", "valid", "pad")
FAR = 10.0  # |mean| in standard deviations: beyond that the variation is lost beside the mean
SCALES = (1e-3, 1e3)
LEAST_USUAL = 1e-2  # deviation of the middle one of several channels: below it all of them are small
FEW_VALUES = 3  # of a step or a feature whose neighbours have many
SOME_VALUES = 32
MOSTLY = 0.99  # of a step's numbers are one: it is padding at an end of the rows, and a fault between others
COPIED = 0.1  # share of rows that are one row
EMPTY, MOSTLY_EMPTY = 0.25, 0.5  # share of rows without content, of long rows and of short ones; a condition may be
EMPTY_IDS = 0.9  # left out of a tenth or a fifth on purpose, and texts may be missing
LONG_ROW, SHORT_ROW = 16, 4  # numbers in a row; in fewer, zeros come by themselves
OUTLIER = 1000.0  # times the deviation of the middle row: recordings differ by 100, as 40 dB are
NUM_NAMED = 6  # channels or steps in a sentence
LEAST_ROWS = 32  # of a set; fewer say nothing about it
SHIFT, RATIO = 0.5, 2.0  # of means, in standard deviations, and of those, between train and an eval set


class ArrayStats(NamedTuple):
    """An array of some rows, as float64 with its channels on the last axis, and what is known of it."""

    name: str
    array: np.ndarray
    is_ids: bool
    is_mask: bool
    channels: np.ndarray  # (numbers, channels); one channel where there are none

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.channels.mean(0))

    @property
    def std(self) -> np.ndarray:
        return np.asarray(self.channels.std(0))

    @property
    def still(self) -> np.ndarray:
        """Channels that do not vary."""
        return np.asarray(self.std <= TINY * np.maximum(1, np.abs(self.mean)))


def array_stats(name: str, array: np.ndarray) -> ArrayStats:
    is_mask = array.dtype == np.bool_ or any(part in name.lower() for part in MASKS)
    is_ids = np.issubdtype(array.dtype, np.integer) and array.ndim <= 2
    values = array.astype(np.float64)
    if is_ids or array.ndim < 2:
        return ArrayStats(name, array, is_ids, is_mask, values.reshape(-1, 1))
    if array.ndim == 4 and array.shape[1] in (1, 3, 4) and array.shape[-1] not in (1, 3, 4):
        values = np.moveaxis(values, 1, -1)
    few = values.shape[-1] <= MOST_CHANNELS and not (array.ndim > 2 and array.dtype == np.uint8 and array.shape[-1] > 4)
    return ArrayStats(name, array, is_ids, is_mask, values.reshape(-1, values.shape[-1] if few else 1))


def sample_rows(context: CheckContext, stream: str, num_rows: int) -> dict[str, np.ndarray]:
    """So many rows, or as many as fit the limit: eight stretches, or of a set with few rows those spread over all.

    The quick form keeps them for the next check: it has few, and a slow stream should not be asked twice.
    """
    kept = ("rows", stream, num_rows)
    if kept in context.shared:
        return dict(context.shared[kept])
    setup = context.setup
    of, seed, step = setup.streams[stream], setup.cfg.seed, 0 if stream == "train" else EVAL_STEP
    one = gather(of, np.zeros(1, np.int64), Draw(seed, step, np.arange(1)))
    num_bytes = sum(np.asarray(array).nbytes for array in one.values())
    most = (QUICK_BYTES if context.is_quick else MOST_BYTES) // max(1, num_bytes)
    sizes = [held_out.num_rows for held_out in setup.evaluator.streams.values()]
    # As long as the largest: a set of rollouts takes few moments out of the same episodes.
    stretch = min(setup.streams["train"].num_rows // NUM_STRETCHES, max(sizes, default=of.num_rows))
    wanted = max(1, min(num_rows, most))
    each = wanted // NUM_STRETCHES
    if each < 1 or stretch < each or of.num_rows < NUM_STRETCHES * stretch:
        wanted = min(wanted, of.num_rows)
        ids = np.arange(wanted) * of.num_rows // wanted
    else:
        starts = np.linspace(0, of.num_rows - stretch, NUM_STRETCHES).astype(np.int64)
        ids = (starts[:, None] + np.arange(each) * stretch // each).reshape(-1)
    arrays = {n: np.asarray(a) for n, a in gather(of, ids, Draw(seed, step, np.arange(len(ids)))).items()}
    if context.is_quick:
        context.shared[kept] = arrays
    return dict(arrays)


def _stats_of_store(context: CheckContext) -> dict[str, Any]:
    """What the store of the data says of channels: mean, std and the names of those that do not vary, if anything."""
    for owner in (context.setup.streams["train"], context.setup.recipe):
        info = getattr(getattr(owner, "store", None), "info", None)
        if isinstance(info, Mapping) and isinstance(info.get("statistics"), Mapping):
            return {"names": info.get("controls", ()), **info["statistics"]}
    return {}


@check("inputs", "D4")
def sound_inputs(context: CheckContext) -> Iterator[Result]:
    """Each tensor of the train batch by itself."""
    arrays = sample_rows(context, "train", QUICK_ROWS if context.is_quick else NUM_ROWS)
    known, found = _stats_of_store(context), list[Result]()
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        seen = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        yield Result("fail", f"first axes differ: {seen}", "give every array one entry per row, first")
        return
    lines = []
    for name, a in arrays.items():
        if not a.size:  # prompts without a text before the sound have no tokens there, in any row
            lines.append(f"{name}: {a.dtype} {'x'.join(map(str, a.shape[1:]))}, empty")
            continue
        found += _faults(context, array_stats(name, a), known)
        line = f"{name}: {a.dtype} {'x'.join(map(str, a.shape[1:])) or '1'}, {a.min():.4g} .. {a.max():.4g}"
        lines.append(f"{line}, mean {a.mean(dtype=float):.4g}, std {a.std(dtype=float):.4g}")
    yield from (replace(result, detail="\n".join(lines)) for result in found)
    if not found:
        seen = f"{lengths.pop()} rows of {', '.join(arrays)}: finite, varying"
        yield Result("pass", seen, detail="\n".join(lines))


def _faults(context: CheckContext, stats: ArrayStats, known: Mapping[str, Any]) -> Iterator[Result]:
    name, array, fill = stats.name, stats.array, f"fill {stats.name} where it is gathered, or leave it out"
    if not np.isfinite(stats.channels).all():
        num_bad = int((~np.isfinite(stats.channels)).sum())
        seen = f"{name} has {num_bad} of {array.size} numbers that are not finite"
        yield Result("fail", seen, "repair or drop these rows before training")
        return
    if stats.is_mask or len(array) < 2:
        return
    declared = {other for one in context.setup.recipe.inputs() for other in one.tensors}
    if stats.is_ids and declared and name not in declared and (array == array[:1]).all():
        return  # not what the model is to use: lengths, tasks and prompts that data of one kind has one of
    if array.min() == array.max():
        if array.flat[0] != 1:  # ones are flags, or weights, that do not differ yet
            what = "is silent: all zero" if not array.any() else f"is constant: {array.flat[0]:g}"
            yield Result("warn", f"{name} {what} in {len(array)} rows", fill)
        return
    if (array == array[:1]).all():
        # A ramp is places or times: the same in every row, and rightly so.
        row = array[0].reshape(-1).astype(np.float64)
        is_ramp = len(row) > 2 and np.allclose(np.diff(row, 2), 0, atol=1e-6 * max(1.0, np.abs(row).max()))
        if not is_ramp:
            seen = f"all {len(array)} rows of {name} are the same"
            yield Result("warn", seen, "make the first axis the batch, and gather by id")
        return

    names: Sequence[str] = known.get("names", ())
    num_channels = stats.channels.shape[1]
    names = names if len(names) == num_channels else [str(channel) for channel in range(num_channels)]
    is_standardised = num_channels == len(known.get("mean", ()))

    rows_and_steps = [*_row_faults(stats), *_step_faults(stats)]
    yield from rows_and_steps
    # Floats go into a model as they are, unless the store has statistics to bring them to a common scale. Rows without
    # content or of another scale would be told as that of the whole.
    if np.issubdtype(array.dtype, np.floating) and not is_standardised and not rows_and_steps:
        remedy = (
            f"if the model gets {name} as it is, or the loss as a target, bring it to mean 0 and deviation 1 where it "
            "is gathered, or there; if one of them does so already, nothing needs to change"
        )
        low, high = float(array.min()), float(array.max())
        if low >= 0 and 100 < high <= 255 and (array == np.round(array)).all():
            yield Result("warn", f"{name} has 0..255 as floats", remedy)
        elif odd := _scale_fault(stats, names):
            yield Result("warn", f"{name} {odd}", remedy)

    # Channels that vary neither here nor in more rows (a rare event is no dead channel), nor are known for it.
    if stats.is_ids or num_channels < 2:
        return
    suspects = [c for c in np.flatnonzero(stats.still).tolist() if names[c] not in known.get("constant", ())]
    if suspects:
        more = array_stats(name, sample_rows(context, "train", AGAIN_ROWS)[name])
        suspects = [c for c in suspects if more.still[c]]
    # All ones, as of a flag that is always up, or few rows: nothing to be said.
    dead = [names[c] for c in suspects if stats.mean[c] != 1 and len(array) >= QUICK_ROWS // 2]
    if dead:
        remedy = f"{fill}; or declare them constant in the store"
        yield Result("warn", f"{name} has channels that do not vary: {', '.join(dead)}", remedy)


def _scale_fault(stats: ArrayStats, names: Sequence[str]) -> str:
    """What is wrong with the scale of an array of floats, by channel; those that stand still are not asked."""
    means, deviations = stats.mean, stats.std
    asked = np.flatnonzero(~stats.still) if len(means) > 1 else np.arange(len(means))

    def some(channels: np.ndarray) -> str:
        shown = [f"{names[c]} (mean {means[c]:.3g}, deviation {deviations[c]:.3g})" for c in channels[:NUM_NAMED]]
        more = f" and {len(channels) - NUM_NAMED} more" if len(channels) > NUM_NAMED else ""
        return ", ".join(shown) + more

    is_odd = (np.abs(means) > FAR * deviations) | (deviations < SCALES[0]) | (deviations > SCALES[1])
    if len(means) == 1:
        return f"has mean {means[0]:.4g} and deviation {deviations[0]:.4g}" if is_odd[0] else ""
    if (odd := asked[is_odd[asked]]).size:
        return f"has {len(odd)} of {len(means)} channels far from a common scale: {some(odd)}"
    if asked.size and float(np.median(deviations[asked])) < LEAST_USUAL:
        order = asked[np.argsort(deviations[asked])]
        return f"has small numbers in most of {len(means)} channels: {some(order)}"
    return ""


def _row_faults(stats: ArrayStats) -> Iterator[Result]:
    """Rows without content, copies of one row, and rows of another scale than the rest."""
    name, array = stats.name, stats.array
    if array.ndim < 2 or len(array) < LEAST_ROWS:
        return
    rows = array.reshape(len(array), -1)
    length, is_float = rows.shape[1], np.issubdtype(array.dtype, np.floating)
    is_empty = (rows == rows[:, :1]).all(1)
    share = float(is_empty.mean())

    def is_flags() -> bool:
        """Those that are mostly down are rare events, not samples that were lost."""
        return len(np.unique(rows)) <= FEW_VALUES

    least = EMPTY_IDS if stats.is_ids else EMPTY if length >= LONG_ROW else MOSTLY_EMPTY
    is_many = share >= least and length >= SHORT_ROW
    if is_many and not is_flags():
        zeros = int((is_empty & (rows[:, 0] == 0)).sum())
        what = "all zero" if zeros == is_empty.sum() else "one value throughout"
        seen = f"{name} is {what} in {int(is_empty.sum())} of {len(rows)} rows ({share:.0%})"
        yield Result("warn", seen, "look at how these rows were read or decoded, and leave out those without content")
        return
    copies = Counter(hash(row.tobytes()) for row in rows[~is_empty]) if length >= LONG_ROW else Counter[int]()
    most = max(copies.values(), default=0)
    if most >= max(LEAST_ROWS // 4, COPIED * len(rows)) and not is_flags():
        seen = f"{most} of {len(rows)} rows of {name} are copies of one row"
        yield Result("warn", seen, "look at how these rows were read: a placeholder, or one file under many names")
        return
    if is_float and length >= LONG_ROW:
        deviations = rows.astype(np.float64).std(1)
        middle = float(np.median(deviations[~is_empty])) if (~is_empty).any() else 0.0
        is_loud = deviations > OUTLIER * middle
        if middle > 0 and is_loud.any():
            seen = (
                f"{int(is_loud.sum())} of {len(rows)} rows of {name} have a deviation of up to {deviations.max():.3g}, "
                f"the middle row has {middle:.3g}"
            )
            yield Result("warn", seen, "bring all rows to one scale where they are read, or drop those that are broken")


def _step_faults(stats: ArrayStats) -> Iterator[Result]:
    """Steps in time and features with a handful of values, between others that have many."""
    name, array = stats.name, stats.array
    is_film = array.ndim == 5 and array.dtype == np.uint8
    is_series = np.issubdtype(array.dtype, np.floating) and array.ndim in (2, 3)
    if len(array) < LEAST_ROWS or not (is_film or is_series):
        return
    for axis in range(1, 2 if is_film else array.ndim):
        slices = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
        if len(slices) < 3:
            continue
        ordered = np.sort(slices, axis=1)
        starts = np.diff(ordered, axis=1) != 0
        num_values = 1 + starts.sum(1)
        if np.median(num_values) < SOME_VALUES:
            continue
        is_few = num_values <= FEW_VALUES
        is_time = axis == 1 if array.ndim > 2 else array.shape[1] > MOST_CHANNELS
        # The commonest number, of sorted ones: that in the middle, if it fills more than half.
        middle = ordered[:, ordered.shape[1] // 2, None]
        is_mostly_one = (slices == middle).mean(1) >= MOSTLY
        if is_time:  # padding reaches an end of the rows; a first step of zeros is where a sequence begins
            inner = np.flatnonzero(~is_mostly_one)
            is_edge = np.ones(len(slices), bool)
            is_edge[inner[0] : inner[-1] + 1] = False
            odd = np.flatnonzero((is_few | is_mostly_one) & ~is_edge)
        else:  # of features, flags are whole numbers and rare events mostly nought; a dead one is told elsewhere
            is_flag = (slices == np.round(slices)).all(1)
            odd = np.flatnonzero(is_few & ~is_flag & (num_values > 1) & ~is_mostly_one)
        if len(odd):
            what = "step" if is_time else "feature"
            shown = ", ".join(f"{what} {i} ({num_values[i]})" for i in odd[:NUM_NAMED].tolist())
            more = f" and {len(odd) - NUM_NAMED} more" if len(odd) > NUM_NAMED else ""
            seen = (
                f"{name} has few distinct values in {len(odd)} of {len(slices)} {what}s, where the others have "
                f"{int(np.median(num_values))}: {shown}{more}"
            )
            yield Result("warn", seen, f"look at how {name} is made at these places: filled in, rounded or overwritten")
            return


@check("declared inputs", "C1")
def declared_inputs(context: CheckContext) -> Result:
    """Whether the tensors that `Recipe.inputs` names are in a batch; probes of a run take them away by these names."""
    inputs = list(context.setup.recipe.inputs())
    if not inputs:
        return Result("skip", "the recipe declares none; see Recipe.inputs")
    for stream in ("train", *list(context.setup.evaluator.streams)[:1]):
        there = list(sample_rows(context, stream, 1))
        for given in inputs:
            if missing := [tensor for tensor in given.tensors if tensor not in there]:
                seen = f"{given.name} needs {missing[0]!r}, but a batch of {stream} has {', '.join(there)}"
                return Result("fail", seen, "name one of these in Recipe.inputs")
    return Result("pass", ", ".join(f"{i.name} ({', '.join(i.tensors)})" for i in inputs))


@check("train against eval sets", "D4")
def same_as_in_training(context: CheckContext) -> Iterator[Result]:
    """Each eval set against train, and train against what its store says.

    Looks for another scale, type or order of channels, not for other content, which is what a held-out set is for.
    """
    num_rows, known = QUICK_ROWS if context.is_quick else NUM_ROWS, _stats_of_store(context)
    train = {name: array_stats(name, a) for name, a in sample_rows(context, "train", num_rows).items()}
    for stats in train.values():
        mean, std = np.array(known.get("mean", ())), np.array(known.get("std", ()))
        if stats.is_ids or len(mean) < 2 or stats.channels.shape[1] != len(mean):
            continue
        if not np.isfinite(stats.channels).all():
            continue
        # A store may leave out rows that do not count, and few rows of the sample may be of one kind: twice the limit.
        far = np.abs(stats.mean - mean) / std
        if far.max() > 2 * SHIFT:
            c = int(far.argmax())
            seen = f"{stats.name}[{c}] has mean {stats.mean[c]:.4g}, the store says {mean[c]:.4g}"
            remedy = "prepare the data again; its statistics are stale"
            yield Result("warn", f"{seen} with deviation {std[c]:.4g}", remedy, name="inputs against the store")
    for stream in context.setup.evaluator.streams:
        held = {name: array_stats(name, a) for name, a in sample_rows(context, stream, num_rows).items()}
        both = [name for name in train if name in held]
        both = [name for name in both if name not in context.setup.evaluator.streams[stream].taken_away]
        faults = [fault for name in both for fault in _shifted(train[name], held[name], known)]
        faults += [f"{name} is missing" for name in train if name not in held]
        if faults:
            remedy = f"prepare {stream} exactly as train: same scale, same order of channels"
            yield Result("warn", "; ".join(faults), remedy, name=f"train against {stream}")
            continue
        num_held = max((len(stats.array) for stats in held.values()), default=0)
        seen = f"{len(train)} arrays of the same types; scales differ no more than parts of train do"
        if num_held < LEAST_ROWS:
            seen = f"{len(train)} arrays of the same types; {num_held} rows are too few to compare scales"
        yield Result("pass", seen, name=f"train against {stream}")


def _shifted(train: ArrayStats, held: ArrayStats, known: Mapping[str, Any]) -> Iterator[str]:
    """How a set differs from train beyond what stretches of train differ from each other: held-out episodes are of
    other places, and their means may well be half a deviation away (measured: 0.8 in a walk of several rooms)."""
    name = train.name
    if train.array.dtype != held.array.dtype:
        yield f"{name} is {train.array.dtype} in train and {held.array.dtype} here"
    if train.is_ids or train.is_mask or train.channels.shape[1] != held.channels.shape[1]:
        return
    is_finite = np.isfinite(train.channels).all() and np.isfinite(held.channels).all()
    # Channels that lie at one value most of the time, as a throttle does, have no scale in their deviation.
    quarters = _quarters(train.channels)
    ok = ~train.still & (quarters[0] != quarters[2])
    if len(names := known.get("names", ())) == len(ok):
        ok &= np.array([name not in known.get("constant", ()) for name in names])
    if not ok.any() or not is_finite or len(held.array) < LEAST_ROWS:
        return
    std, width = np.where(ok, train.std, 1), np.where(ok, quarters[2] - quarters[0], 1)
    # Both by means and by quartiles: a few falls from a height move the first, and of whole numbers the second jump.
    usual_shift, usual_ratio = np.zeros((2, len(std))), np.zeros((2, len(std)))

    def apart(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(2, channels) shifts from train, in its deviations, and log ratios of deviations."""
        low, middle, high = _quarters(values)
        shifts = np.abs([(values.mean(0) - train.mean) / std, 1.35 * (middle - quarters[1]) / width])
        wide = np.maximum([values.std(0) / std, (high - low) / width], 1e-12)
        return np.where(ok, shifts, 0), np.where(ok, np.abs(np.log(wide)), 0)

    # The largest shift and log ratio that a stretch of train has against all of it.
    if each := len(train.channels) // NUM_STRETCHES:
        for part in train.channels[: each * NUM_STRETCHES].reshape(NUM_STRETCHES, each, -1):
            far, wide = apart(part)
            usual_shift = np.maximum(usual_shift, far)
            usual_ratio = np.maximum(usual_ratio, np.where(part.std(0) > 0, wide, 0))
    shifts, ratios = apart(held.channels)
    shift, ratio = (shifts - usual_shift).min(0), (ratios - usual_ratio).min(0)
    if (shift > SHIFT).any():
        c = int(shift.argmax())
        straight, reverse = (float(np.abs(means - train.mean).sum()) for means in (held.mean, held.mean[::-1]))
        if train.channels.shape[1] == 3 and reverse < straight / 3:
            yield f"the channels of {name} fit train in reverse order, and not as they are"
        means = f"mean {train.mean[c]:.4g} in train and {held.mean[c]:.4g} here"
        yield f"{name}[{c}] has {means}, {shifts[0, c]:.1f} deviations apart"
    if (ratio > np.log(RATIO)).any():
        c = int(ratio.argmax())
        yield f"{name}[{c}] has deviation {train.std[c]:.4g} in train and {held.std[c]:.4g} here"
    if (ranges := (_range(train), _range(held)))[0] != ranges[1] and all(ranges):
        yield f"{name} lies in {ranges[0]} in train and in {ranges[1]} here"


def _quarters(values: np.ndarray) -> np.ndarray:
    """(3, channels): the quartiles."""
    return np.asarray(np.percentile(values, (25, 50, 75), axis=0))


def _range(stats: ArrayStats) -> str:
    """The usual range that pictures and sound fill to the brim, if it is one."""
    if stats.array.ndim < 3 or not np.issubdtype(stats.array.dtype, np.floating):
        return ""
    low, high = float(stats.array.min()), float(stats.array.max())
    for a, b in ((0, 255), (0, 1), (-1, 1)):
        if abs(low - a) <= 0.02 * (b - a) and abs(high - b) <= 0.02 * (b - a):
            return f"[{a}, {b}]"
    return ""
