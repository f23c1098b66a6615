"""A run as the rules see it: what it recorded, up to some step.

Read from the run's folder, or collected row by row while it trains. A value that is absent and one that is NaN are
different things (runs/series.py): rules count what is not finite and never average it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from rung.runs.metrics import read_tables, superseded_rows
from rung.runs.query import Run, is_same_run, open_run
from rung.runs.renamed import EVENTS, current_metric
from rung.runs.series import EMPTY as EMPTY
from rung.runs.series import WINDOW as WINDOW
from rung.runs.series import Series

SCRIPTS = ("own loop", "script")  # what run.json calls the recipe of a user's own loop; "import wandb" is one too


_BASELINE = re.compile(  # in nats: the name alone is clear, or says that it is a loss
    r"(unigram|uniform|bigram)(?:_(?:loss|nats|nll|ce|entropy))?|(?:trivial|baseline|chance)_(?:loss|nats|nll|ce)"
)
_VOCABULARY = ("vocab_size", "vocab", "n_vocab", "num_classes", "n_classes", "num_labels")


class Table(NamedTuple):
    """Numbers per name and step: `columns[c][i, j]` belongs to steps[i] and names[j]."""

    steps: np.ndarray
    names: list[str]
    columns: dict[str, np.ndarray]

    def last(self, num_rows: int) -> Table:
        return Table(self.steps[-num_rows:], self.names, {c: v[-num_rows:] for c, v in self.columns.items()})

    def until(self, end: int) -> Table:
        num_rows = int(np.searchsorted(self.steps, end))
        return Table(self.steps[:num_rows], self.names, {c: v[:num_rows] for c, v in self.columns.items()})


@dataclass
class History:
    run_id: str = ""
    status: str = "running"
    config: dict[str, Any] = field(default_factory=dict)  # dotted; free-form in a run of a script
    derived: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Series] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    evals: dict[str, dict[str, Series]] = field(default_factory=dict)  # set -> name -> values at eval steps
    events: list[dict[str, Any]] = field(default_factory=list)
    parent: History | None = None
    superseded: dict[int, list[dict[str, float]]] = field(default_factory=dict)  # step -> earlier rows of that step
    is_script: bool = False  # a loop of the user's own: no recipe that could be trained again, a free-form config
    reason: str = ""  # why it ended, from run.json
    last_step: int = 0  # from there too: more than `end` where rows are missing

    def __getitem__(self, name: str) -> Series:
        """The series of a recorded value; an empty one where it was never recorded."""
        return self.rows.get(name, EMPTY)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def has(self, need: str) -> bool:
        """Whether the run recorded this; of "a|b", whether it recorded one of them; of "a:5", whether five times."""
        names, _, least = need.partition(":")
        return self.count(names) >= int(least or 1)

    def count(self, names: str) -> int:
        """How often it recorded this, in the longest curve of that name; of "a|b", of the one it recorded most often.

        A name is a row (`loss`, `*/accuracy`), an eval (`eval/*/loss`), a table (`tensors`), a kind of event, a config
        key (has a dot), a derived number, `parent` or `recipe`.
        """
        if "|" in names:
            return max(map(self.count, names.split("|")))
        if names in ("parent", "recipe"):
            return int(self.parent is not None if names == "parent" else not self.is_script)
        if "." in names:
            return int(self.config.get(names) is not None)
        if names.startswith("eval/"):
            pairs = ((f"eval/{of}/{key}", series) for of, named in self.evals.items() for key, series in named.items())
            return max((len(series) for name, series in pairs if fnmatchcase(name, names)), default=0)
        if "*" in names:
            return max((len(series) for name, series in self.rows.items() if fnmatchcase(name, names)), default=0)
        if names in self.rows:
            return len(self.rows[names])
        if names in self.tables:
            return len(self.tables[names].steps)
        return int(self.derived.get(names) is not None) or len(self.events_of(names))

    def number(self, key: str) -> float | None:
        """A number of the config; None where the key is absent or holds something else."""
        value = self.config.get(key)
        try:
            return None if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            return None

    @property
    def end(self) -> int:
        """The last step recorded, plus one; without a loss, of any row."""
        counted = [self["loss"]] if len(self["loss"]) else self.rows.values()
        return max((int(series.steps[-1]) + 1 for series in counted if len(series)), default=0)

    @property
    def num_steps(self) -> int | None:
        return self.derived.get("num_steps")

    @property
    def warmup_steps(self) -> int:
        """As the run says; of a script, how long its rate rises from the first step on."""
        said, lr = self.derived.get("warmup_steps"), self["lr"].finite
        if said is not None or not self.is_script or not len(lr) or lr.steps[0] > 0:
            return int(said or 0)
        stops = np.flatnonzero(np.diff(lr.values) <= 0)
        return int(lr.steps[stops[0] if len(stops) else -1])

    @property
    def steps_per_epoch(self) -> float:
        rows, a_step = self.derived.get("epoch_rows"), self.derived.get("rows_per_step")
        return rows / a_step if rows and a_step else float("inf")

    def table(self, kind: str) -> Table | None:
        """None where nothing was recorded so far; else it has at least one row."""
        table = self.tables.get(kind)
        return table if table is not None and len(table.steps) else None

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == kind]

    def steps_of(self, kind: str) -> list[int]:
        """The steps of the events of this kind; an event that names none is left out."""
        return [int(e["step"]) for e in self.events_of(kind) if isinstance(e.get("step"), int | float)]

    def until(self, end: int) -> History:
        """The same run as it looked when `end` steps had been taken. Costs little: arrays are cut, not copied."""
        return replace(
            self,
            status=self.status if end >= self.end else "running",
            rows={name: series.between(0, end) for name, series in self.rows.items()},
            tables={kind: table.until(end) for kind, table in self.tables.items()},
            evals={name: {k: s.between(0, end + 1) for k, s in of.items()} for name, of in self.evals.items()},
            events=[e for e in self.events if not isinstance(e.get("step"), int) or e["step"] <= end],
        )


def read(run: Run, with_parent: bool = True) -> History:
    """Everything in a run's folder. A parent that is gone is no parent."""
    recipe = str(run.document.get("recipe") or "")
    is_script = recipe in SCRIPTS or recipe.startswith("import ")
    evals: dict[str, list[Mapping[str, Any]]] = {}  # by set
    for row in run.evals():
        evals.setdefault(str(row["set"]), []).append({k: v for k, v in row.items() if k != "set"})
    arrays = run.arrays([name for name in run.names() if not name.startswith("eval/")])
    rows: dict[str, Series] = {}
    for name, (at, values) in arrays.columns.items():
        steps, name = arrays.steps[at], current_metric(name)
        if name in rows:  # a run that was resumed after the name had changed
            steps, values = np.concatenate([rows[name].steps, steps]), np.concatenate([rows[name].values, values])
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        rows[name] = Series(steps, values)
    history = History(
        run.id,
        run.status,
        dict(flat(run.config())),
        {**(run.document.get("derived") or {}), **(_observed(run) if is_script else {})},
        rows,
        tables_from_rows(read_tables(run.path / "tables")),
        {name: series_from_rows(rows) for name, rows in evals.items()},
        [e | {"kind": EVENTS[e["kind"]]} if e.get("kind") in EVENTS else e for e in run.events()],
        superseded=superseded_rows(run.path / "metrics"),
        is_script=is_script,
        reason=str(run.document.get("reason") or ""),
        last_step=int(run.document.get("last_step") or 0),
    )
    if is_script and run.status in ("finished", "stopped"):  # nobody has said how long it was to be
        history.derived.setdefault("num_steps", history.end or None)
    if code := run.document.get("code"):  # not an event of its own: it was known before there were any
        history.events.insert(0, {**code, "kind": "code", "step": 0})
    parent = run.document.get("parent")
    if with_parent and parent:
        try:
            found = open_run(str(parent), run.path.parent.parent)
            if is_same_run(found, run.document.get("parent_uid")):
                history.parent = read(found, with_parent=False)
        except Exception:  # deleted, damaged or elsewhere: rules that compare have nothing to compare with
            history.parent = None
    return history


def _observed(run: Run) -> dict[str, Any]:
    """What a script's loop has shown of itself (script/observe.py), which rows its sets share, and what trivial models
    lose on its data."""
    found: dict[str, Any] = {}
    for event in run.events("observed"):  # the last one has it all
        found["observed"] = dict(event)
    if overlaps := {str(event.get("set")): dict(event) for event in run.events("overlap")}:
        found["overlap"] = overlaps
    known = list(flat(run.config()))
    for of_set in run.data().values():  # as told to run.data
        known += (
            flat(of_set["about"]) if isinstance(of_set, Mapping) and isinstance(of_set.get("about"), Mapping) else ()
        )
    baselines = {}
    for key, value in known:
        leaf = key.rpartition(".")[2].lower()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            if named := _BASELINE.fullmatch(leaf):
                baselines[named[1] or leaf] = float(value)
            elif leaf in _VOCABULARY and value >= 2:
                baselines.setdefault("uniform", math.log(value))
    return found | ({"baselines": baselines} if baselines else {})


def series_from_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Rows with a `step` -> a series per number in them, without the steps that lack it."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = found.setdefault(name, ([], []))
                steps.append(int(row["step"]))
                values.append(value)
    return {name: Series(np.asarray(s, np.int64), np.asarray(v, np.float64)) for name, (s, v) in found.items()}


def tables_from_rows(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Table]:
    """Rows of the latest names only: a model whose layers changed has two tables, and the later one counts."""
    found = {}
    for kind, all_rows in tables.items():
        names = list(all_rows[-1]["names"])
        rows = [row for row in all_rows if row["names"] == names]
        columns = [c for c in rows[-1] if c not in ("names", "step")]
        values = {c: np.asarray([row.get(c, [np.nan] * len(names)) for row in rows], np.float64) for c in columns}
        found[kind] = Table(np.asarray([row["step"] for row in rows], np.int64), names, values)
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
