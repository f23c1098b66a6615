"""What each epoch of a run came to, from its record: loss, learning rate, gradient norms, and the last eval in it.

A step belongs to the epoch in which its rows begin, and an eval to the epoch of the update before it. Steps that were
not applied are counted and go into no mean or percentile, and neither does a norm that is not finite.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from rung.compare.reading import columns, evals, number_of, part_of, segments_of
from rung.runs.files import to_json
from rung.runs.query import Run


@dataclass(frozen=True)
class Epoch:
    """One epoch; None where there is nothing to say, as of the loss where no step was applied."""

    epoch: int  # the first is 1
    is_complete: bool
    is_best: bool  # has the eval that the record calls the best of the run
    train_loss: float | None  # mean over the targets of the applied steps
    lr: float | None  # of the last step
    norm_median: float | None  # of the applied steps, and so is the next
    norm_p90: float | None  # a recorded norm: nine tenths are no larger
    num_norms_not_finite: int  # of all steps
    eval_step: int | None  # of the last eval in this epoch
    evals: dict[str, float]  # set/name -> value
    num_not_applied: int  # of num_steps
    num_steps: int
    first_step: int
    last_step: int


class _Step(NamedTuple):
    step: int
    loss: float
    weight: float  # targets; 0 where the step was not applied
    norm: float | None
    lr: float | None


@lru_cache(maxsize=32)
def epochs(run: Run) -> Sequence[Epoch]:
    """Oldest first; none where the length of an epoch is not known, or a run is shorter or a step longer than that."""
    derived = part_of(run, "derived")
    sizes = [number_of(derived.get(name)) for name in ("epoch_rows", "rows_per_step", "num_steps")]
    epoch_rows, rows_per_step, planned = (int(size or 0) for size in sizes)
    if not 0 < rows_per_step < epoch_rows or max(run.step or 0, planned) * rows_per_step < epoch_rows:
        return []
    position, not_applied = _data_order(run, rows_per_step)
    found = columns(run, ("loss", "targets", "skipped", "norm", "lr"))
    targets, skipped, norms, lr = (dict(zip(c.rows, c.values)) for name, c in found.items() if name != "loss")
    steps: dict[int, list[_Step]] = {}
    for row, step, loss in zip(found["loss"].rows, map(int, found["loss"].steps), found["loss"].values):
        # A step without a target changes nothing either; where targets were not recorded, all steps weigh the same.
        weight = 0.0 if skipped.get(row) or step in not_applied else targets.get(row, 1.0)
        one = _Step(step, loss, weight, norms.get(row), lr.get(row))
        steps.setdefault(position(step) // epoch_rows, []).append(one)

    last_evals: dict[int, tuple[int, dict[str, float]]] = {}
    for result in evals(run):
        if result["step"] > 0:  # else it is of the weights that the run began with
            number = position(result["step"] - 1) // epoch_rows
            before = last_evals.get(number)
            values = before[1] if before is not None and before[0] == result["step"] else {}
            for name, value in result.items():
                if name not in ("step", "set") and number_of(value) is not None:
                    values[f"{result['set']}/{name}"] = value
            last_evals[number] = result["step"], values
    best = number_of((run.best or {}).get("step"))
    best_epoch = position(int(best) - 1) // epoch_rows if best else None

    out, newest = [], max(steps, default=0)
    for number, rows in sorted(steps.items()):
        applied = [one for one in rows if one.weight]
        finite = sorted(one.norm for one in applied if one.norm is not None and math.isfinite(one.norm))
        loss_sum = math.fsum(one.weight * one.loss for one in applied)
        eval_step, values = last_evals.get(number, (None, {}))
        out.append(
            Epoch(
                epoch=number + 1,
                # After a rollback the rest of an epoch may have been left out: it is over, too.
                is_complete=number < newest or position(rows[-1].step) + rows_per_step >= (number + 1) * epoch_rows,
                is_best=number == best_epoch,
                train_loss=loss_sum / math.fsum(one.weight for one in applied) if applied else None,
                lr=rows[-1].lr,
                norm_median=statistics.median(finite) if finite else None,
                norm_p90=finite[math.ceil(0.9 * len(finite)) - 1] if finite else None,
                num_norms_not_finite=sum(one.norm is not None and not math.isfinite(one.norm) for one in rows),
                eval_step=eval_step,
                evals=values,
                num_not_applied=len(rows) - len(applied),
                num_steps=len(rows),
                first_step=rows[0].step,
                last_step=rows[-1].step,
            )
        )
    return out


def epochs_json(found: Sequence[Epoch]) -> str:
    """A list with a line for each epoch, with all digits; what is not finite by its name."""
    lines = [msgspec.json.format(to_json(asdict(one)), indent=0).decode() for one in found]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _data_order(run: Run, rows_per_step: int) -> tuple[Callable[[int], int], set[int]]:
    """step -> rows seen before it; and the steps that were undone though no row says so.

    After a rollback the data continues beyond the bad batch. What happened before a later attempt began counts no more.
    """
    attempts = [(number_of(part.get("number")) or 0, number_of(part.get("first_step"))) for part in segments_of(run)]
    starts, undone = [(0, 0)], set()
    for event in run.events():
        is_rollback = event.get("kind") == "rollback"
        step = event.get("to" if is_rollback else "step")
        if not isinstance(step, int) or not (is_rollback or event.get("kind") == "diverged"):
            continue
        segment = number_of(event.get("segment")) or 0
        if any(number > segment and first is not None and first <= step for number, first in attempts):
            continue
        if not is_rollback:
            undone.add(step)
        elif isinstance(event.get("position"), int):
            starts.append((step, event["position"]))
    starts.sort()

    def position(step: int) -> int:
        first, rows = starts[bisect_right(starts, step, key=lambda start: start[0]) - 1]
        return rows + (step - first) * rows_per_step

    return position, undone
