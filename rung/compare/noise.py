"""The noise floor: how far apart runs of one config lie when only the seed differs.

It is estimated from groups of three or more runs that are equal in everything but the seed. Three runs say little about
their own spread, so it is shrunk towards that of related configs: of log loss, so that groups at another loss can help,
and of the same recipe, horizon and metric, since the spread shrinks with training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, NamedTuple

from rung.compare.align import metric_curve, own_endpoint
from rung.compare.factors import Difference, compare
from rung.compare.reading import column, definition_of, fell_short, planned_targets
from rung.errors import RunError
from rung.runs.fields import code_of
from rung.runs.files import to_json
from rung.runs.query import Run, list_runs

LEAST = 3  # seeds in a group
PULL = 4  # degrees of freedom that the related groups count for, at most
# Keys that do not move what is learned, so that they do not split a group before it is looked at closely.
_FREE = ("seed", "logging", "checkpoint", "sample_interval", "sampling")


class Group(NamedTuple):
    """Runs equal but for the seed; one endpoint per seed, runs of one seed averaged."""

    runs: list[Run]
    values: list[float]


@dataclass(frozen=True)
class Floor:
    """`sd` is the spread of one run over seeds, in the metric's own unit at the level that was asked for."""

    sd: float
    df: float
    num_runs: int
    groups: list[list[str]]  # ids

    @property
    def words(self) -> str:
        names = "; ".join(", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "") for ids in self.groups[:3])
        many = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return f"sd over seeds {self.sd:.2g} from {self.num_runs} runs{many} ({names})"


def differences_but_seed(a: Run, b: Run, allowed: Sequence[str] = ()) -> list[Difference]:
    """What spoils the claim that two runs are one config with two seeds; a run that cannot be compared raises."""
    found = [d for d in compare(a, b).of("factor", "hidden", "metric") if (d.part, d.name) != ("config", "seed")]
    return [d for d in found if d.part not in ("seed", *allowed) and d.name not in allowed]


def seed_of(run: Run) -> int | str | None:
    """None where a run names no seed, or something that is none."""
    seed = run.document.get("seed")
    return seed if isinstance(seed, int | str) and not isinstance(seed, bool) else None


def twins(arm: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Runs that name two seeds and have one random state: what varies between them is not the seed."""
    first: dict[bytes, Run] = {}
    for run in arm if len(arm) > 1 else ():
        weights, losses = run.initial_weights(), column(run, "loss").values
        if weights and len(losses) and seed_of(run) is not None:
            other = first.setdefault(to_json([weights, losses[0]]), run)
            if seed_of(other) != seed_of(run):
                yield other, run


def floor_for(run: Run, metric: str) -> Floor | None:
    """The noise floor for runs like this one, out of its experiment; None where no group of three seeds is there."""
    level = own_endpoint(metric_curve(run, metric))
    if not math.isfinite(level):
        return None
    try:
        runs = list_runs(run.path.parent.parent, run.path.parent.name, [])
    except RunError:
        runs = [run]
    found = list(groups([other for other in runs if _is_related(run, other, metric)], metric))
    own = [g for g in found if any(r.path == run.path for r in g.runs) or config_key(g.runs[0]) == config_key(run)]
    is_log = all(value > 0 for group in found for value in group.values) and level > 0
    spread, df = pooled([g.values for g in own], [g.values for g in found if g not in own], is_log)
    if df == 0:
        return None
    ids = [[r.id for r in group.runs] for group in (*own, *(g for g in found if g not in own))]
    return Floor(spread * abs(level) if is_log else spread, df, sum(map(len, ids)), ids)


def pooled(own: Sequence[Sequence[float]], others: Sequence[Sequence[float]], is_log: bool) -> tuple[float, float]:
    """The spread of the own groups, drawn towards that of the others, and its degrees of freedom; 0, 0 of nothing."""

    def both(lists: Sequence[Sequence[float]]) -> tuple[float, int]:
        scaled = [[math.log(x) for x in values] if is_log else list(values) for values in lists]
        squares = sum(variance(values) * (len(values) - 1) for values in scaled)
        df = sum(len(values) - 1 for values in scaled)
        return (squares / df if df else 0.0), df

    (near, df_near), (far, df_far) = both(own), both(others)
    weight = df_far if not df_near else min(PULL, df_far)
    df = df_near + weight
    return (math.sqrt((df_near * near + weight * far) / df), float(df)) if df else (0.0, 0.0)


def groups(runs: Sequence[Run], metric: str) -> Iterator[Group]:
    """Finished runs that are equal but for the seed, three seeds or more."""
    by_key: dict[bytes, list[Run]] = {}
    for run in runs:
        if run.status == "finished" and seed_of(run) is not None and not fell_short(run):
            by_key.setdefault(config_key(run), []).append(run)
    for alike in by_key.values():
        if len({seed_of(run) for run in alike}) < LEAST:
            continue
        kept = [alike[0], *(run for run in alike[1:] if not differences_but_seed(alike[0], run))]
        if any(twins(kept)):
            continue
        by_seed: dict[Any, list[float]] = {}
        for run in kept:
            by_seed.setdefault(seed_of(run), []).append(own_endpoint(metric_curve(run, metric)))
        values = [fmean(found) for found in by_seed.values()]
        if len(values) >= LEAST and all(map(math.isfinite, values)):
            yield Group(kept, values)


def config_key(run: Run) -> bytes:
    """Cheap, and equal wherever two runs may be one config: what remains is left to `compare`."""
    try:
        config = {name: value for name, value in run.config().items() if name not in _FREE}
    except RunError:
        config = {"damaged": str(run.path)}
    return to_json([run.document.get("recipe"), dict(sorted(config.items())), code_of(run)])


def _is_related(run: Run, other: Run, metric: str) -> bool:
    """Whether the spread over seeds of `other` says something about that of `run`."""
    try:
        definitions = [definition_of(r, metric)[1] for r in (run, other)]
    except RunError:
        return False
    return (
        run.document.get("recipe") == other.document.get("recipe")
        and definitions[0] == definitions[1]
        and planned_targets(run) == planned_targets(other)
        and (planned_targets(run) is not None or run.step == other.step)
    )
