"""Rules about the rows that training sees: their order, whether all of them come, and ids that no table has.

They go by the numbers of the rows, which every stream has, and never look at the data itself.
"""

from __future__ import annotations

import math
import re

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import before, micro_and_rank, names_the_cause, own_diagnosis, replay

FEWEST_ROWS = 16  # of a set; in a smaller one neighbours meet by chance
OUT_OF_RANGE = re.compile(
    r"index(es)? .*out of (range|bounds)|out of range: |target .* is out of bounds|device-side assert", re.IGNORECASE
)


@rule("D1", "Not shuffled", needs=("follows", "epoch_rows"), in_warmup=True)
def not_shuffled(history: History) -> Finding | None:
    """More than half of the rows follow their neighbour, or an epoch has the order of the one before."""
    rows = int(history.derived.get("epoch_rows") or 0)
    follows = history["follows"].finite.last(WINDOW)
    if rows < FEWEST_ROWS or len(follows) < 20:
        return None
    in_order, repeated = follows.median, 0.0
    # The share of steps whose batch is that of one epoch earlier, if an epoch is a whole number of steps.
    per_epoch, hashes = history.steps_per_epoch, history["batch_hash"].finite
    if 4 <= per_epoch < math.inf and per_epoch == int(per_epoch) and len(hashes) >= per_epoch + 20:
        later, earlier = hashes.values[int(per_epoch) :], hashes.values[: -int(per_epoch)]
        repeated = float(np.mean(later[-WINDOW:] == earlier[-WINDOW:]))
    if not (in_order > 0.5 or repeated > 0.9):
        return None
    wave = autocorrelation(history["loss"].finite.last(3 * WINDOW).values)
    return Finding(
        "warn",
        f"{in_order:.0%} of the rows of a step have the number of the row before plus one"
        if in_order > 0.5
        else f"{repeated:.0%} of the steps repeat the rows of one epoch earlier, in the same order",
        since=int(follows.steps[0]) if in_order > 0.5 else None,
        evidence=[
            f"median over the last {len(follows)} steps {in_order:.2f} (limit .5; a shuffled set has {1 / rows:.2g})",
            f"steps that repeat one of the epoch before: {repeated:.0%} (limit 90 %)",
            f"correlation of the loss with that of the next step: {wave:+.2f} (sorted rows +.31, shuffled -.04)",
        ],
        ruled_out=[f"chance: {rows} rows in random order follow each other in {1 / rows:.2g} of all cases"],
        probe="print `stream.ids(0, 100, seed)`",
        remedy="use the seeded permutation of rung.recipe.Stream for the ids, unless the order is a curriculum",
    )


@rule("D2", "Rows repeated or never seen", "scan", needs=("batch_hash|fresh", "epoch_rows", "rows_per_step"))
def coverage(history: History) -> Finding | None:
    """A batch that comes twice in an epoch, or an epoch that misses rows."""
    per_epoch, rows = history.steps_per_epoch, int(history.derived.get("epoch_rows") or 0)
    if rows < FEWEST_ROWS or per_epoch < 2:  # a step that holds most of the data repeats it by design
        return None
    # Steps that have the same rows as an earlier one of their epoch.
    first_of: dict[tuple[int, float], int] = {}
    again: list[tuple[int, int]] = []
    for step, value in zip(*(column.tolist() for column in history["batch_hash"].finite), strict=True):
        key = (int(step / per_epoch), value)
        if key in first_of and int((step + 1) / per_epoch - 1e-9) == key[0]:  # not a step that spans two epochs
            again.append((first_of[key], step))
        first_of.setdefault(key, step)

    # The mean share of new rows over all whole epochs, and where it first fell below 1.
    share, since, fresh = 1.0, None, history["fresh"].finite
    epochs = int(len(fresh) / per_epoch) if not math.isinf(per_epoch) else 0
    if epochs:
        whole = fresh.between(int(fresh.steps[0]), int(fresh.steps[0]) + int(epochs * per_epoch))
        stale = whole.steps[whole.values < 1]
        share, since = float(whole.values.mean()), int(stale[0]) if len(stale) else None
    is_low = share < 0.95
    if not again and not is_low:
        return None
    with_replacement = is_low and not again and abs(share - (1 - math.exp(-1))) < 0.03
    is_grave = share < 0.5 or len(again) > 0.5 * len(history["batch_hash"])
    severity = "info" if with_replacement else "sick" if is_grave else "warn"
    seen = f"an epoch had {share:.0%} of the rows" if is_low else f"{len(again)} steps repeated a batch"
    return Finding(
        severity,
        f"{seen}, where each of the {rows} should come once"
        + (": rows are drawn with replacement, which misses 37 %" if with_replacement else ""),
        since=again[0][1] if again else since,
        evidence=[
            f"share of rows that were new in their epoch: {share:.3f} over {epochs} epochs (limit .95; .632 with "
            "replacement)",
            "batches that came twice in one epoch: "
            + (", ".join(f"step {b} as {a}" for a, b in again[:5]) + f" ({len(again)} in all)" if again else "none"),
        ],
        ruled_out=[
            "a new epoch: only rows and batches of the same one are compared",
            "" if with_replacement else f"drawing with replacement: that gives .632, here {share:.3f}",
        ],
        probe="compare `np.unique(stream.ids(0, stream.num_rows, seed)).size` with `stream.num_rows`",
        remedy="compute ids from the position alone, which continues from step to step: no iterator that restarts, no "
        "seed that is set again; nothing to do if drawing with replacement is intended",
    )


@rule("D3", "Ids out of range", "scan")
def out_of_range(history: History) -> Finding | None:
    for event in history.events_of("diverged"):
        text = " ".join(dict.fromkeys(str(event[key]) for key in ("why", "error", "diagnosis") if event.get(key)))
        named = OUT_OF_RANGE.search(text)
        is_data = str(event.get("origin", "")).upper() == "DATA" and "not finite" not in text  # that one is N1
        if not (named or is_data):
            continue
        step = int(event.get("step", history.end))
        return Finding(
            "fatal",
            f"step {step} could not be computed: "
            + ("an id or a label is out of range" if named else "its batch is bad")
            + micro_and_rank(event),
            since=step,
            evidence=[
                f"the error: {event.get('why') or text}"[:200] if text else "the values of the batch are at fault",
                own_diagnosis(history, step),
                f"captured in {event['capture']}" if event.get("capture") else "",
            ],
            ruled_out=[f"weights that broke: {before(history, 'loss', step)}"],
            probe=replay(history, step),
            remedy=names_the_cause(history, step, "the row and the value")
            + "; then compare the largest id with the rows of the embedding and the classes of the head: a tokenizer "
            "with more ids than the model, an id stored in too few bits, a position beyond the table",
        )
    return None


def autocorrelation(values: np.ndarray) -> float:
    """Between neighbours, of the residuals of a straight line."""
    if len(values) < 20:
        return math.nan
    at = np.arange(len(values))
    rest = values - np.polyval(np.polyfit(at, values, 1), at)
    power = float((rest * rest).sum())
    return float((rest[1:] * rest[:-1]).sum()) / power if power > 0 else 0.0
