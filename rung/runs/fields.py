"""Values of runs by name, for listing: filter, sort, columns, groups over seeds.

A name is a field (status, best, why ...), a config key (lr.learning_rate), `derived.` and one of the derived numbers,
or `min:`, `max:` or `last:` and a metric (min:loss, last:eval/full_val/loss). A run without the value matches only `!=`
and sorts last in either order.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import RunError
from rung.runs.columns import Summary
from rung.runs.query import Run, list_runs, nearest

USUAL = ("status", "step", "best", "best_step", "parent", "why", "verdict", "tags", "seed", "created")
_OPERATOR = re.compile(r"(!=|<=|>=|=|<|>|~)")
_METRIC = re.compile(r"(min|max|last):(.+)", re.S)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip


def verdict_word(run: Run) -> str | None:
    """supported, refuted or inconclusive; of an older run any text."""
    verdict = run.document.get("verdict")
    word = verdict.get("word") if isinstance(verdict, dict) else verdict
    return None if word is None else str(word)


def last_loss(run: Run) -> float | None:
    """The loss of the latest eval, on the set that `best` is about."""
    evals = [name for name in summary_of(run) if name.startswith("eval/") and name.endswith("/loss")]
    wanted = f"eval/{(run.best or {}).get('set')}/loss"
    name = wanted if wanted in evals else next(iter(evals), None)
    return None if name is None else summary_of(run)[name].last


FIELDS: dict[str, Callable[[Run], Any]] = {
    "run": lambda run: run.id,
    "id": lambda run: run.id,
    "status": lambda run: run.status,
    "step": lambda run: run.step,
    "best": lambda run: (run.best or {}).get("loss"),
    "loss": lambda run: (run.best or {}).get("loss"),
    "best_step": lambda run: (run.best or {}).get("step"),
    "last": last_loss,
    "verdict": verdict_word,
    "tag": lambda run: run.document.get("tags") or [],
    "path": lambda run: str(run.path),
    "code": lambda run: code_of(run),
    "ab": lambda run: (run.document.get("ab") or {}).get("id"),
}
_OF_DOCUMENT = (  # as run.json has them
    "experiment", "number", "uid", "parent", "why", "tags", "recipe", "preset", "seed", "created", "ended", "reason",
)  # fmt: skip


def value_of(run: Run, name: str) -> Any:
    """The value of a name; None where the run has none."""
    if name in FIELDS:
        return FIELDS[name](run)
    if name in _OF_DOCUMENT:
        return run.document.get(name)
    values, key = _looked_up(run, name)
    found = values.get(key)
    return getattr(found, name.partition(":")[0]) if isinstance(found, Summary) else found


def _looked_up(run: Run, name: str) -> tuple[Mapping[str, Any], str]:
    """Where a name that is not a field is looked up (summaries, derived numbers, config), and its key there."""
    if match := _METRIC.fullmatch(name):
        return summary_of(run), match[2]
    if name.startswith("derived."):
        return run.document.get("derived") or {}, name.removeprefix("derived.")
    return config_of(run), name


def config_of(run: Run) -> dict[str, Any]:
    """Dotted key -> value; empty where the file cannot be read, because a listing continues."""
    try:
        return dict(leaves(run.config(keep=True)))
    except RunError:
        return {}


def summary_of(run: Run) -> dict[str, Summary]:
    try:
        return run.summary()
    except RunError:
        return {}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_names(names: Sequence[str], runs: Sequence[Run]) -> None:
    """RunError for a name that none of the runs knows, with the nearest that they do."""
    for name in names:
        if not runs or name in FIELDS or name in _OF_DOCUMENT:
            continue
        if any(key in values for values, key in (_looked_up(run, name) for run in runs)):
            continue
        metrics = list(dict.fromkeys(metric for run in runs for metric in summary_of(run)))
        if match := _METRIC.fullmatch(name):
            raise RunError(f"no listed run recorded {match[2]}; {nearest(match[2], metrics)}", code="no-metric")
        if name in metrics:
            message = f"{name} is a metric: say min:{name}, max:{name} or last:{name}."
            raise RunError(message, code="no-key")
        keys = dict.fromkeys(key for run in runs for key in config_of(run))
        derived = dict.fromkeys(f"derived.{key}" for run in runs for key in run.document.get("derived") or {})
        hint = nearest(name, [*FIELDS, *_OF_DOCUMENT, *keys, *derived])
        raise RunError(f"{name} is neither a field nor a config key of a listed run; {hint}", code="no-key")


class Condition(NamedTuple):
    """`lr.learning_rate>1e-4`, taken apart."""

    name: str
    operator: str
    text: str

    def holds(self, run: Run) -> bool:
        value = value_of(run, self.name)
        if isinstance(value, list):
            found = any(_compare(each, self.operator.replace("!=", "="), self.text) for each in value)
            return not found if self.operator == "!=" else found
        return _compare(value, self.operator, self.text)


def condition(text: str) -> Condition:
    name, found, rest = [*_OPERATOR.split(text, maxsplit=1), "", ""][:3]
    if not found or not name.strip():
        message = f"--where {text!r} is not a condition; write one such as status=finished or 'lr.min_lr>1e-5'."
        raise RunError(message, code="bad-value")
    if found == "~":
        try:
            re.compile(rest.strip())
        except re.error as error:
            message = f"--where {text!r}: {rest.strip()!r} is not a regular expression: {error}."
            raise RunError(message, code="bad-value") from None
    return Condition(name.strip(), found, rest.strip())


def _compare(value: Any, op: str, text: str) -> bool:
    if op == "~":
        return value is not None and re.search(text, _text(value), re.IGNORECASE) is not None
    a, b = _number(value), _number(text)
    if op in ("=", "!="):
        if a is not None and b is not None:
            is_same = a == b or (math.isnan(a) and math.isnan(b))
        else:
            is_same = _text(value) == text or (value is None and text in ("null", "none"))
        return is_same == (op == "=")
    if a is not None and b is not None:
        return _ORDERS[op](a, b)
    return isinstance(value, str) and a is None and b is None and _ORDERS[op](value, text)  # dates


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> float | None:
    """Also of a text: budgets such as optimizer.max_iters are kept as they were written."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def find(
    root: Path,
    experiments: Sequence[str] = (),
    where: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    problems: list[str] | None = None,
) -> list[Run]:
    """The runs that fulfil all conditions; by experiment and number, or sorted by a name, lowest first."""
    conditions = [condition(text) for text in where]
    runs = [run for name in dict.fromkeys(experiments) or [None] for run in list_runs(root, name, problems)]
    check_names([each.name for each in conditions], runs)
    kept = [run for run in runs if all(each.holds(run) for each in conditions)]
    return kept if sort is None else sort_runs(kept, sort, reverse)


def sort_runs(runs: Sequence[Run], name: str, reverse: bool = False) -> list[Run]:
    check_names([name], runs)
    known, unknown = [], []
    for run in runs:
        value = value_of(run, name)
        number = _number(value)
        if value is None or (number is not None and math.isnan(number)):
            unknown.append(run)
        else:
            known.append(((number is None, number if number is not None else 0.0, _text(value)), run))
    return [run for _, run in sorted(known, key=lambda pair: pair[0], reverse=reverse)] + unknown


def changed_keys(runs: Sequence[Run]) -> list[str]:
    """Config keys whose values are not the same in all of these runs; last those that only tell recipes apart."""
    configs = [config_of(run) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    changed = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return sorted(changed, key=lambda key: len({repr(config[key]) for config in configs if key in config}) < 2)


def code_of(run: Run) -> str | None:
    """What names the code that ran, to the byte; None where it was not kept."""
    code = run.document.get("code") or {}
    found = code.get("tree") or code.get("commit") or code.get("sha256")
    return None if found is None else str(found)


def groups_over_seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of equal recipe, config (but for the seed), data and code together, in the order of their first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        config = {key: value for key, value in config_of(run).items() if key != "seed"}
        try:
            streams = run.data()
        except RunError:
            streams = {}
        data = [(name, of.get("fingerprint")) for name, of in sorted(streams.items()) if isinstance(of, dict)]
        mark = repr((run.document.get("recipe"), sorted(config.items(), key=repr), code_of(run), data))
        found.setdefault(mark, []).append(run)
    return list(found.values())


def group_rows(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """One dict per group over seeds: its runs, and mean, sd and n of each number; texts where all agree."""
    groups: list[dict[str, Any]] = []
    for members in groups_over_seeds(runs):
        group: dict[str, Any] = {"runs": [run.id for run in members], "n": len(members)}
        group["seeds"] = [run.document.get("seed") for run in members]
        group["statuses"] = [run.status for run in members]
        for name in names:
            values = [value_of(run, name) for run in members]
            numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
            finite = [value for value in numbers if math.isfinite(value)]
            if numbers:
                mean = statistics.fmean(finite) if finite else None
                sd = statistics.stdev(finite) if len(finite) > 1 else None
                group[name] = {"mean": mean, "sd": sd, "n": len(finite)}
            else:
                group[name] = values[0] if all(value == values[0] for value in values) else values
        groups.append({**group, "why": members[-1].document.get("why")})
    return groups


def summary(run: Run) -> dict[str, Any]:
    """What `rung ls --json` says of a run."""
    kept = ("experiment", "number", "recipe", "preset", "parent", "why", "verdict", "tags", "seed", "created", "ended")
    head = {"id": run.id, "status": run.status, "status_text": run.status_text, "step": run.step, "best": run.best}
    return {**head, **{name: run.document.get(name) for name in kept}, "path": str(run.path)}
