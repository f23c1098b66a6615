"""Looks at what batches hold before a model gets them for good: ids that have a row, labels that have a class, and
targets in every micro.

On CUDA an id out of range ends the process, so it must be found before the call. The first forward goes through a lens
that looks before each lookup, and says which array of the batch the ids came from. Further micros are then judged on
the host, by their smallest and largest id: that only accuses. The rows accused go through the wary forward as well, and
it alone convicts, so padding that no table ever sees is no error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rung.data.prefetch import Cut, Feed, Micro
from rung.doctor.preflight.forward import NotAsked, forward, rows_of
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.lens import Lens, OutOfRange, WaryLens, num_classes

ROWS = 4  # of one forward
MICROS, QUICK_MICROS = 64, 4
LIMIT_S, QUICK_LIMIT_S = 10.0, 0.3  # of looking at further micros; the first one is always looked at


class Source(NamedTuple):
    """An array of the batch whose numbers name rows of a table, or classes."""

    array: str
    what: str  # id or label
    limit: int
    module: str
    dtype: torch.dtype


def ids_in_range(bench: Bench) -> Iterator[Result]:
    """Ids below the rows of their table, labels below the classes of the logits (D3)."""
    try:
        lens = _wary(bench, bench.micro)
    except OutOfRange as found:
        yield _out_of_range(bench, bench.micro, found)
        return
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        bench.shared["broken"] = "the first forward fails"
        yield Result("first forward", "fail", f"{type(error).__name__}: {line}", "make the loss work on rows of step 0")
        return
    sources, is_complete = sources_of(lens, bench.micro)
    if not sources and is_complete:
        raise NotAsked("no table of embeddings and no labels of classes were seen")
    num_looked, acquitted = 0, set[tuple[str, int]]()
    for micro in micros(bench):
        rows = _accused(micro, sources, acquitted) if is_complete else np.arange(len(micro.ids))
        while len(rows):
            part = _on_device(bench, micro, rows[:ROWS])
            try:
                _wary(bench, part)
            except OutOfRange as found:
                yield _out_of_range(bench, part, found)
                return
            acquitted |= {(s.array, int(v)) for s in sources for v in np.unique(part.batch[s.array].cpu())}
            rows = _accused(micro, sources, acquitted) if is_complete else rows[:0]
        num_looked += 1
    how = "on the host" if is_complete else f"by a forward of {ROWS} rows each"
    limits = ", ".join(sorted({f"{s.what}s of {s.array} below {s.limit} ({s.module or 'the loss'})" for s in sources}))
    yield Result("ids in range", "pass", f"{limits or 'all lookups'}; {num_looked} micros, {how}", rule="D3")
    yield from _too_narrow(sources)


def _wary(bench: Bench, micro: Micro) -> WaryLens:
    lens = WaryLens(bench.setup.state.model)
    forward(bench, micro, lens)
    return lens


def _out_of_range(bench: Bench, micro: Micro, found: OutOfRange) -> Result:
    where, per_row = "", found.num_values // max(1, len(micro.ids))
    if per_row and found.num_values % len(micro.ids) == 0:
        where = f"row {micro.ids[found.place // per_row]} of train, position {found.place % per_row}: "
    bench.shared["broken"] = "ids are out of range"
    of = "rows" if found.what == "id" else "classes"
    return Result(
        "ids in range", "fail",
        f"{where}{found.what} {found.value} goes into {found.module or 'the loss'}, which has {found.limit} {of}",
        f"the largest {found.what} may be {found.limit - 1}: enlarge the {'table' if of == 'rows' else 'head'}, mend "
        "the data, or mask what is padding", "D3",
    )  # fmt: skip


def sources_of(lens: Lens, micro: Micro) -> tuple[list[Source], bool]:
    """Which arrays of the batch were looked up or judged as they are, and whether that explains every lookup."""
    sources, is_complete = [], True
    for lookup in lens.lookups:
        if (name := array_of(lookup.ids, micro)) is not None:
            sources.append(Source(name, "id", lookup.num_rows, lookup.module, micro.batch[name].dtype))
        elif not is_place(lookup.ids, len(micro.ids)):
            is_complete = False
    for judged in lens.judged:
        if judged.targets.is_floating_point() or judged.ignore_index is None:
            continue
        if (name := array_of(judged.targets, micro, judged.ignore_index)) is not None:
            sources.append(Source(name, "label", num_classes(judged), judged.module, micro.batch[name].dtype))
        else:
            is_complete = False
    return sources, is_complete


def is_place(ids: Tensor, num_rows: int) -> bool:
    """Whether these are positions, counted once or the same for every row; they do not change from micro to micro."""
    if torch.equal(ids.flatten(), torch.arange(ids.numel(), device=ids.device)):
        return True
    by_row = ids.reshape(num_rows, -1) if ids.numel() % num_rows == 0 else ids.reshape(1, -1)
    return len(by_row) > 1 and bool((by_row == by_row[0]).all())


def array_of(ids: Tensor, micro: Micro, ignored: int | None = None) -> str | None:
    """The integer array of the batch of which each row of `ids` is a stretch, the same one in all rows."""
    found = stretch_of(ids, micro, ignored)
    return None if found is None else found[0]


def stretch_of(ids: Tensor, micro: Micro, ignored: int | None = None) -> tuple[str, int] | None:
    """That array, and where in it the stretch begins."""
    num_rows = len(micro.ids)
    if not ids.numel() or ids.numel() % num_rows:
        return None
    ids = ids.reshape(num_rows, -1).long()
    counts = torch.ones_like(ids, dtype=torch.bool) if ignored is None else ids != ignored
    if not counts.any():
        return None
    for name, array in micro.batch.items():
        if array.is_floating_point() or array.dtype == torch.bool or array.dim() < 2:
            continue
        whole = array.reshape(num_rows, -1).long()
        for start in range(min(whole.shape[1] - ids.shape[1], 8) + 1):
            if ((whole[:, start : start + ids.shape[1]] == ids) | ~counts).all():
                return name, start
    return None


def micros(bench: Bench) -> Iterator[Micro]:
    """Micros of the run after the first, on the host, as long as there is time."""
    setup = bench.setup
    rows, device = setup.cut.micro_rows, torch.device("cpu")
    feed = Feed(setup.streams["train"], Cut(rows, rows), setup.cfg.seed, device, 0)
    end = time.monotonic() + (QUICK_LIMIT_S if bench.is_quick else LIMIT_S)
    for step in range(QUICK_MICROS if bench.is_quick else MICROS):
        if step and time.monotonic() > end:
            return
        yield feed.take(step)[0]


def _accused(micro: Micro, sources: list[Source], acquitted: set[tuple[str, int]]) -> np.ndarray:
    """Rows with a number that has no row or class, unless that number has been through a forward before."""
    rows = np.zeros(len(micro.ids), bool)
    for source in sources:
        array = micro.batch[source.array].reshape(len(micro.ids), -1).long().numpy()
        if array.size and (array.min() < 0 or array.max() >= source.limit):
            is_bad = (array < 0) | (array >= source.limit)
            known = [value for name, value in acquitted if name == source.array]
            rows |= (is_bad & ~np.isin(array, known)).any(axis=1)
    return np.flatnonzero(rows)


def _on_device(bench: Bench, micro: Micro, rows: np.ndarray) -> Micro:
    device = bench.setup.world.device
    batch = {name: torch.from_numpy(tensor.numpy()[rows]).to(device) for name, tensor in micro.batch.items()}
    draw = type(micro.draw)(micro.draw.seed, micro.draw.step, micro.draw.rows[rows])
    return Micro(micro.ids[rows], draw, batch)


def _too_narrow(sources: list[Source]) -> Iterator[Result]:
    for source in sources:
        largest = torch.iinfo(source.dtype).max
        if largest < source.limit - 1:
            yield Result(
                "width of ids", "warn",
                f"{source.array} is {str(source.dtype).removeprefix('torch.')} and ends at {largest}, but "
                f"{source.module or 'the loss'} has {source.limit}: larger ids would have wrapped around",
                "store the ids in a wider dtype", "D3",
            )  # fmt: skip
            return


def targets(bench: Bench) -> Iterator[Result]:
    """Targets in each micro: none explains a loss that is not finite, few make a noisy step (N6)."""
    counts: list[float] = []
    end = time.monotonic() + (QUICK_LIMIT_S if bench.is_quick else LIMIT_S)
    for micro in micros(bench):
        count = 0.0
        for start in range(0, len(micro.ids), ROWS):
            part = _on_device(bench, micro, np.arange(start, min(start + ROWS, len(micro.ids))))
            loss = forward(bench, part)
            if not torch.isfinite(loss.sum):
                yield _not_finite(bench, part)
                return
            count += float(loss.count.detach())
            if counts and time.monotonic() > end:
                break
        else:
            counts.append(count)
    few, middle = float(np.quantile(counts, 0.05)), float(np.median(counts))
    seen = (
        f"{len(counts)} micros of {bench.setup.cut.micro_rows} rows: median {middle:g} targets, fewest {min(counts):g}"
    )
    if min(counts) == 0:
        yield Result("targets per micro", "warn", f"{counts.count(0.0)} of {seen}",
                     "leave rows without targets out of the stream", "N6")  # fmt: skip
    elif few < 0.1 * middle:
        yield Result("targets per micro", "warn", f"{seen}; the fewest 5 % have {few / middle:.3f} of the median",
                     "mix rows with many and few targets, or pack short ones together", "N6")  # fmt: skip
    else:
        yield Result("targets per micro", "pass", seen, rule="N6")


def _not_finite(bench: Bench, micro: Micro) -> Result:
    """Names the row, and whether it is the lack of targets that makes its loss non-finite."""
    bench.shared["broken"] = "the loss is not finite"
    for row in range(len(micro.ids)):
        one = rows_of(micro, row, row + 1)
        loss = forward(bench, one)
        if torch.isfinite(loss.sum):
            continue
        where = f"row {one.ids[0]} of train has a loss of {float(loss.sum.detach()):g}"
        if float(loss.count.detach()) == 0:
            return Result("targets per micro", "fail", f"{where} and no target",
                          "sum the losses of targets that count, and return their number; a mean over none is NaN",
                          "N6")  # fmt: skip
        return Result("finite loss", "fail", f"{where} over {float(loss.count.detach()):g} targets",
                      "look at this row: a number that is not finite, or log 0, 0/0, an overflow", "N1")  # fmt: skip
    return Result("finite loss", "fail", f"rows {micro.ids.tolist()} of train together have a loss that is not finite",
                  "look at what the loss computes over rows", "N1")  # fmt: skip


CHECKS = [Check("ids in range", ids_in_range), Check("targets per micro", targets)]
