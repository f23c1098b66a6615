"""What a comparison needs of a run's files more than once, read once: its evals and a few columns of its rows.

Kept for the last few Runs, so a Run that is compared is one state of a run that is going on: what is said of its evals
in one place holds in the next. A Run that was opened anew is read anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rung.errors import RunError
from rung.runs.columns import current, is_long
from rung.runs.metrics import Faults
from rung.runs.query import Run

# Of a file that is damaged, and of one that is whole and holds something else than a record does.
UNREADABLE = (
    RunError, OSError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
_SHARED = ("targets", "step_s", "batch_hash")  # what `compare` and `outcome` both look at: read together


def list_of(value: Any) -> list[Any]:
    """A value of the record that should be a list, and may be missing or damaged."""
    return value if isinstance(value, list) else []


def segments_of(run: Run) -> list[Mapping[str, Any]]:
    """The attempts of a run, the first first."""
    return [part for part in list_of(run.document.get("segments")) if isinstance(part, dict)]


@lru_cache(maxsize=32)
def evals(run: Run) -> Sequence[Mapping[str, Any]]:
    """Run.evals(); RunError where they cannot be read."""
    try:
        return run.evals()
    except UNREADABLE as error:
        raise RunError(f"the evals of {run.path} cannot be read: {error}.") from error


class Column(NamedTuple):
    """The rows that have a number of some name: their places among all rows, their steps, and the numbers."""

    places: Sequence[int]
    steps: Sequence[int]
    values: Sequence[float]


def column(run: Run, name: str) -> Column:
    """Text and truth values are no numbers; RunError where the rows cannot be read."""
    return _columns(run, _SHARED if name in _SHARED else (name,))[name]


def columns(run: Run, names: Sequence[str], faults: Faults | None = None) -> dict[str, Column]:
    """Several at once, and not kept; broken lines are counted in `faults`."""
    folder, kinds = run.path / "metrics", (int, float)  # not `int | float`, built anew for each of a million values
    try:
        is_copied = faults is not None and is_long(folder)  # then the copy by column knows what was broken
        found = run.metrics(names, None if is_copied else faults)
        if faults is not None and is_copied:
            faults.broken = current(folder).broken
    except OSError as error:
        raise RunError(f"the rows of {run.path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    out, steps = {}, found["step"]
    for name in names:
        values = found[name]
        places = [i for i, value in enumerate(values) if type(value) in kinds]
        if len(places) < len(values):
            out[name] = Column(places, [steps[i] for i in places], [values[i] for i in places])
        else:
            out[name] = Column(places, steps, values)
    return out


@lru_cache(maxsize=6)
def _columns(run: Run, names: tuple[str, ...]) -> dict[str, Column]:
    return columns(run, names)
