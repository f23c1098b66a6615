"""Checks batches before the model trains on them: ids have a row, labels have a class, every micro has targets.

On CUDA an id out of range ends the process, so it must be found before the call. The first forward pass runs under a
BoundsCheck, which knows from which array of the batch the ids come. Further micros are screened on the host; suspect
rows then run under the BoundsCheck too, and it alone decides: padding that never reaches a table is no error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rung.doctor.preflight.forward import forward, rows_of
from rung.doctor.preflight.result import CheckContext, NotApplicable, Result, check
from rung.engine.op_tracer import BoundsCheck, OpTracer, OutOfRange, num_classes
from rung.engine.prefetch import BatchLayout, Micro, Prefetcher
from rung.errors import RecipeError

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


@check("ids in range", "D3")
def ids_in_range(context: CheckContext) -> Iterator[Result]:
    """Ids below the rows of their table, labels below the classes of the logits."""
    model = context.setup.state.model
    tracer = BoundsCheck(model)
    try:
        forward(context, context.micro, tracer)
    except OutOfRange as found:
        yield _out_of_range(context, context.micro, found)
        return
    except RecipeError:
        raise
    except Exception as error:
        context.shared["broken"] = "the first forward fails"
        seen = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield Result("fail", seen, "fix the loss on the rows of step 0", name="first forward", rule="")
        return
    sources, is_complete = sources_of(tracer, context.micro)
    if not sources and is_complete:
        raise NotApplicable("there are no embeddings and no class labels")
    num_looked, cleared = 0, set[tuple[str, int]]()
    for micro in micros(context):
        rows = _suspects(micro, sources, cleared) if is_complete else np.arange(len(micro.ids))
        while len(rows):
            part = _on_device(context, micro, rows[:ROWS])
            try:
                forward(context, part, BoundsCheck(model))
            except OutOfRange as found:
                yield _out_of_range(context, part, found)
                return
            cleared |= {(s.array, int(v)) for s in sources for v in np.unique(part.batch[s.array].cpu())}
            rows = _suspects(micro, sources, cleared) if is_complete else rows[:0]
        num_looked += 1
    how = "on the host" if is_complete else f"by a forward of {ROWS} rows each"
    limits = ", ".join(sorted({f"{s.what}s of {s.array} below {s.limit} ({s.module or 'the loss'})" for s in sources}))
    yield Result("pass", f"{limits or 'all lookups'}; {num_looked} micros, {how}")
    for source in sources:
        largest = torch.iinfo(source.dtype).max
        if largest < source.limit - 1:
            seen = (
                f"{source.array} is {str(source.dtype).removeprefix('torch.')} and ends at {largest}, but "
                f"{source.module or 'the loss'} has {source.limit}: larger ids would have wrapped around"
            )
            yield Result("warn", seen, "store the ids in a wider dtype", name="width of ids")
            return


def _out_of_range(context: CheckContext, micro: Micro, found: OutOfRange) -> Result:
    where, per_row = "", found.num_values // max(1, len(micro.ids))
    if per_row and found.num_values % len(micro.ids) == 0:
        where = f"row {micro.ids[found.place // per_row]} of train, position {found.place % per_row}: "
    context.shared["broken"] = "ids are out of range"
    of = "rows" if found.what == "id" else "classes"
    seen = f"{where}{found.what} {found.value} goes into {found.module or 'the loss'}, which has {found.limit} {of}"
    remedy = (
        f"the largest {found.what} may be {found.limit - 1}: enlarge the {'table' if of == 'rows' else 'head'}, fix "
        "the data, or mask the padding"
    )
    return Result("fail", seen, remedy)


def sources_of(tracer: OpTracer, micro: Micro) -> tuple[list[Source], bool]:
    """Which arrays of the batch were looked up or judged as they are, and whether that explains every lookup."""
    sources, is_complete = [], True
    for lookup in tracer.lookups:
        if (found := stretch_of(lookup.ids, micro)) is not None:
            sources.append(Source(found[0], "id", lookup.num_rows, lookup.module, micro.batch[found[0]].dtype))
        elif not is_place(lookup.ids, len(micro.ids)):
            is_complete = False
    for call in tracer.loss_calls:
        if call.targets.is_floating_point() or call.ignore_index is None:
            continue
        if (found := stretch_of(call.targets, micro, call.ignore_index)) is not None:
            sources.append(Source(found[0], "label", num_classes(call), call.module, micro.batch[found[0]].dtype))
        else:
            is_complete = False
    return sources, is_complete


def is_place(ids: Tensor, num_rows: int) -> bool:
    """Whether these are positions, counted once or the same for every row; they do not change from micro to micro."""
    if torch.equal(ids.flatten(), torch.arange(ids.numel(), device=ids.device)):
        return True
    by_row = ids.reshape(num_rows, -1) if ids.numel() % num_rows == 0 else ids.reshape(1, -1)
    return len(by_row) > 1 and bool((by_row == by_row[0]).all())


def stretch_of(ids: Tensor, micro: Micro, ignored: int | None = None) -> tuple[str, int] | None:
    """The integer array of the batch of which each row of `ids` is a stretch, and where in it all of them begin."""
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


def micros(context: CheckContext) -> Iterator[Micro]:
    """Micros of the run after the first, on the host, as long as there is time."""
    setup = context.setup
    rows, device = setup.layout.micro_rows, torch.device("cpu")
    prefetcher = Prefetcher(setup.streams["train"], BatchLayout(rows, rows), setup.cfg.seed, device, 0)
    end = time.monotonic() + (QUICK_LIMIT_S if context.is_quick else LIMIT_S)
    for step in range(QUICK_MICROS if context.is_quick else MICROS):
        if step and time.monotonic() > end:
            return
        yield prefetcher.take(step)[0]


def _suspects(micro: Micro, sources: list[Source], cleared: set[tuple[str, int]]) -> np.ndarray:
    """Rows with a number that has no row or class, unless that number has been through a forward before."""
    rows = np.zeros(len(micro.ids), bool)
    for source in sources:
        array = micro.batch[source.array].reshape(len(micro.ids), -1).long().numpy()
        is_bad = (array < 0) | (array >= source.limit)
        if is_bad.any():
            known = [value for name, value in cleared if name == source.array]
            rows |= (is_bad & ~np.isin(array, known)).any(axis=1)
    return np.flatnonzero(rows)


def _on_device(context: CheckContext, micro: Micro, rows: np.ndarray) -> Micro:
    device = context.setup.world.device
    batch = {name: torch.from_numpy(tensor.numpy()[rows]).to(device) for name, tensor in micro.batch.items()}
    return Micro(micro.ids[rows], replace(micro.draw, rows=micro.draw.rows[rows]), batch)


@check("targets per micro", "N6")
def targets(context: CheckContext) -> Result:
    """Targets in each micro: none explains a loss that is not finite, few make a noisy step."""
    counts: list[float] = []
    end = time.monotonic() + (QUICK_LIMIT_S if context.is_quick else LIMIT_S)
    for micro in micros(context):
        count = 0.0
        for start in range(0, len(micro.ids), ROWS):
            part = _on_device(context, micro, np.arange(start, min(start + ROWS, len(micro.ids))))
            loss = forward(context, part)
            if not torch.isfinite(loss.sum):
                return _not_finite(context, part)
            count += float(loss.count.detach())
            if counts and time.monotonic() > end:
                break
        else:
            counts.append(count)
    few, middle = float(np.quantile(counts, 0.05)), float(np.median(counts))
    rows = context.setup.layout.micro_rows
    seen = f"{len(counts)} micros of {rows} rows: median {middle:g} targets, fewest {min(counts):g}"
    if min(counts) == 0:
        return Result("warn", f"{counts.count(0.0)} of {seen}", "drop rows without targets from the stream")
    if few < 0.1 * middle:
        seen += f"; the fewest 5 % have {few / middle:.3f} of the median"
        return Result("warn", seen, "mix rows with many and few targets, or pack short ones together")
    return Result("pass", seen)


def _not_finite(context: CheckContext, micro: Micro) -> Result:
    """Names the row, and whether it is the lack of targets that makes its loss non-finite."""
    context.shared["broken"] = "the loss is not finite"
    for row in range(len(micro.ids)):
        one = rows_of(micro, row, row + 1)
        loss = forward(context, one)
        if torch.isfinite(loss.sum):
            continue
        where = f"row {one.ids[0]} of train has a loss of {float(loss.sum.detach()):g}"
        if float(loss.count.detach()) == 0:
            remedy = "sum the losses of targets that count, and return their number; a mean over none is NaN"
            return Result("fail", f"{where} and no target", remedy)
        seen = f"{where} over {float(loss.count.detach()):g} targets"
        remedy = "inspect this row: a number that is not finite, log 0, 0/0, or an overflow"
        return Result("fail", seen, remedy, name="finite loss", rule="N1")
    seen = f"rows {micro.ids.tolist()} of train together have a loss that is not finite"
    return Result("fail", seen, "check what the loss computes across rows", name="finite loss", rule="N1")
