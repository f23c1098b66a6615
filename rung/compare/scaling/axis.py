"""What varies between the runs of a sweep, and which of it stands on the axis.

The surprising thing: where an axis may be 0, that can mean "all there are" (ZERO_IS_ALL), which stands at the far end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.compare.difference import part_of
from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import to_json
from rung.runs.query import Run
from rung.text import one_line
from rung.units import Budget

COMPONENTS = "dataset.num_components"
ZERO_IS_ALL = (COMPONENTS, "dataset.max_unique_tokens")
CONTROL = "dataset.shuffle_labels"
# Keys that say how much there is of something: components, tokens, layers, steps.
_AMOUNT = re.compile(r"(.*\.)?(n_|num_|max_)\w+|(.*\.)?(width|layers|depth|dim|hidden\w*|vocab_size|context_size)")
RECORDED = ("parameters", "unique_tokens", "targets")  # what may stand on the axis besides a key


def is_amount(axis: str) -> bool:
    """Whether it is an amount of something, of which more may help more and more slowly."""
    return axis in RECORDED or _AMOUNT.fullmatch(axis) is not None


def varied(runs: Sequence[Run]) -> dict[Path, Mapping[str, Any]]:
    """What each point sets, of the keys that have several values; of runs without a sweep, the keys that differ.

    Where only seeds have several values so far, all that a point sets.
    """
    given = {run.path: part_of(run, "sweep").get("varies") for run in runs}
    found = {path: value if isinstance(value, dict) else {} for path, value in given.items()}
    is_swept = any(found.values())
    if not is_swept:
        found = {run.path: dict(_set_keys(run)) for run in runs}
    distinct: dict[str, set[bytes]] = {}
    for one in found.values():
        for key, value in one.items():
            distinct.setdefault(key, set()).add(to_json(value))
    absent = {key for key in distinct for one in found.values() if key not in one}
    several = {key for key, values in distinct.items() if len(values) > 1 or key in absent}
    if is_swept and not any(_is_quantity(key) for key in several):
        several = set(distinct)
    return {path: {key: value for key, value in one.items() if key in several} for path, one in found.items()}


def _set_keys(run: Run) -> Iterator[tuple[str, Any]]:
    sources = run.sources()
    for key, value in leaves(run.config()):
        if not str(sources.get(key, "")).startswith("derived"):
            yield key, value


def is_seed_key(key: str) -> bool:
    return key.rpartition(".")[2] == "seed" or key.endswith("_seed")


def _is_quantity(key: str) -> bool:
    """Whether a key may stand on the axis unasked."""
    return not is_seed_key(key) and key != CONTROL


def choose(x: str | None, varies: Mapping[Path, Mapping[str, Any]], runs: Sequence[Run]) -> str:
    """The axis that was asked for, else the number of components, else the first number that varies, else the seed."""
    keys = list(dict.fromkeys(key for run in runs for key in varies[run.path]))
    if x is not None:
        if x in keys or x in RECORDED:
            return x
        raise RunError(f"{one_line(x)} is not varied; on the axis may stand {', '.join([*keys, *RECORDED])}.")
    others = [key for key in keys if _is_quantity(key)]
    if COMPONENTS in others:
        return COMPONENTS
    numeric = [key for key in others if all(number_of(varies[run.path].get(key)) is not None for run in runs)]
    # A search gives a continuous key another value each time, and such a key cannot tell series apart.
    scattered = [key for key in numeric if len({number_of(varies[run.path][key]) for run in runs}) == len(runs)]
    return (scattered or numeric or others or ["seed"])[0]


def number_of(value: Any) -> float | None:
    """A number, also out of text such as 1e-3 or "10M tokens"; None where it is none."""
    found = quantity(value)
    return None if found is None else found[0]


def quantity(value: Any) -> tuple[float, str] | None:
    """A number and its unit; a plain one counts steps."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return (number, "steps") if math.isfinite(number := float(value)) else None
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        budget = Budget.parse(str(value))
    except ValueError:
        return None
    units = {name: getattr(budget, name) for name in ("steps", "targets", "epochs", "seconds")}
    given = [(float(number), name) for name, number in units.items() if number is not None]
    return given[0] if len(given) == 1 else None
