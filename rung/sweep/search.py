"""A search in place of a grid: Optuna suggests values, a point is trained with each, and its eval is the answer.

The `search` part of a sweep file is read and checked here before anything starts, without Optuna. What was asked and
answered lies in search.journal in the folder of the sweep, so a killed search continues: what was being trained is
asked again as the same points. The sampler is made anew for each trial, seeded by the seed and the trial's number; a
suggestion is then a function of (seed, number, answers so far), and a search that continues does not repeat its first
draws.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import ConfigError, RunError, UserError
from rung.runs.files import locked, plain, refused
from rung.runs.query import Run, nearest
from rung.sweep.launch import Launcher, ReportState
from rung.sweep.plan import add_points
from rung.sweep.space import Point, Sweep, point_of
from rung.sweep.state import last_claim, run_of, state_of
from rung.text import one_line

JOURNAL = "search.journal"
SAMPLERS = ("tpe", "random", "grid")
DIRECTIONS = ("lower", "higher")
_KEYS = ("trials", "metric", "direction", "sampler", "seed", "space")
_MOST_TRIALS = 100_000
_MOST_FAILED = 3  # one after the other, before any has finished: then the mistake is in all of them
_SPACE = "space"  # attribute of the study

Choices = tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """Numbers from low to high; whole ones where low, high and step are."""

    low: float
    high: float
    step: float | None
    is_log: bool

    @property
    def is_whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.low, self.high, 0 if self.step is None else self.step))

    @property
    def num_values(self) -> int:
        """The number of steps, with both ends."""
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1


@dataclass(frozen=True)
class Settings:
    """The `search` part of a sweep file."""

    trials: int
    metric: str
    direction: str
    sampler: str
    seed: int
    space: Mapping[str, Range | Choices]

    @property
    def num_trials(self) -> int:
        """The trials that were asked for; of a grid at most its combinations."""
        if self.sampler != "grid":
            return self.trials
        sizes = (len(one) if isinstance(one, tuple) else one.num_values for one in self.space.values())
        return min(self.trials, math.prod(sizes))

    def combination(self, number: int) -> dict[str, Any]:
        """Combination `number` of a grid, the last key moving fastest; choices by their place in the list."""
        found: dict[str, Any] = {}
        for name, one in reversed(list(self.space.items())):
            number, place = divmod(number, len(one) if isinstance(one, tuple) else one.num_values)
            found[name] = place if isinstance(one, tuple) else one.low + place * (one.step or 1)
        return found


def read_settings(tree: Mapping[str, Any]) -> Settings:
    """Checks the `search` part of a sweep file, and reports all mistakes at once."""
    wrong = [_unknown("search", name, _KEYS) for name in tree if name not in _KEYS]
    metric, space = tree.get("metric"), tree.get("space")
    if not isinstance(metric, str) or "/" not in metric:
        wrong.append("search: metric is missing or not a set/name; write `metric: validation/loss`")
    trials, seed = tree.get("trials", 20), tree.get("seed", 0)
    if not _is_int(trials) or not 1 <= trials <= _MOST_TRIALS:
        wrong.append(f"search: trials={one_line(trials)} is not a whole number from 1 to {_MOST_TRIALS}")
    if not _is_int(seed) or seed < 0:
        wrong.append(f"search: seed={one_line(seed)} is not a whole number from 0 on")
    direction, sampler = tree.get("direction", "lower"), tree.get("sampler", "tpe")
    for name, value, known in (("direction", direction, DIRECTIONS), ("sampler", sampler, SAMPLERS)):
        if value not in known:
            wrong.append(f"search: {name}={one_line(value)} is not one of {', '.join(known)}")
    if not isinstance(space, dict) or not space:
        wrong.append("search: space is missing; name what to search, as in `lr.learning_rate: {low: 1e-4, high: 1e-2}`")
        space = {}
    found: dict[str, Range | Choices] = {}
    for name, given in space.items():
        try:
            found[str(name)] = _parse_values(given, sampler == "grid")
        except ValueError as error:
            wrong.append(f"search: {name}{error}")
    if wrong:
        raise ConfigError("\n".join(wrong), code="bad-sweep")
    return Settings(trials, str(metric), direction, sampler, seed, found)


def _parse_values(given: Any, is_grid: bool) -> Range | Choices:
    """The values that one key may take. The text of a ValueError follows the key's name in a sentence."""
    if isinstance(given, list):
        if not given:
            raise ValueError(" has no values; give at least one")
        return tuple(given)
    if not isinstance(given, dict):
        raise ValueError(f" must be a list of values or {{low: .., high: ..}}, not {one_line(given)!r}")
    for name in given:
        if name not in ("low", "high", "step", "log"):
            raise ValueError(_unknown("", name, ("low", "high", "step", "log")))
    numbers: dict[str, Any] = {}
    for name in ("low", "high", "step"):
        numbers[name] = value = given.get(name)
        if value is not None and not _is_int(value):  # YAML reads 1e-4 as text
            try:
                numbers[name] = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError):
                numbers[name] = math.nan
            if not math.isfinite(numbers[name]):
                raise ValueError(f": {name}={one_line(value)} is not a number")
    low, high, step, is_log = *numbers.values(), given.get("log", False)
    if low is None or high is None or low >= high:
        raise ValueError(f" needs a low below its high, not {given.get('low')} and {given.get('high')}")
    if not isinstance(is_log, bool) or (is_log and (low <= 0 or step is not None)):
        raise ValueError(": log is true or false, and takes a low above 0 and no step")
    if step is not None and step <= 0:
        raise ValueError(f": step={step} is not above 0")
    found = Range(low, high, step, is_log)
    if is_grid and (is_log or (step is None and not found.is_whole)):
        raise ValueError(" has infinitely many values; sampler=grid takes a list, or a step")
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unknown(where: str, name: Any, known: Sequence[str]) -> str:
    return f"{where}: {one_line(name)} is not a key; {nearest(str(name), known)}"


class Outcome(NamedTuple):
    """What became of a point: `state` is finished, diverged, failed, or open where it can still continue."""

    value: float | None
    state: str
    text: str = ""


class Search:
    """The search of a sweep, which has been kept (plan.keep): its points are added to the plan as they are asked."""

    def __init__(self, sweep: Sweep) -> None:
        self.settings = settings = read_settings(sweep.search or {})
        self.sweep = sweep
        try:
            import optuna
        except ImportError:
            raise UserError(
                "a search needs Optuna, which is not installed; pip install 'rung[search]'.", code="not-installed"
            ) from None
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        file = sweep.folder / JOURNAL
        direction = {"lower": "minimize", "higher": "maximize"}[settings.direction]
        space = {name: list(one) if isinstance(one, tuple) else vars(one) for name, one in settings.space.items()}
        meant = {"metric": settings.metric, "direction": direction, "space": plain(space)}
        try:
            with _quiet():
                if file.exists():
                    with locked(file):  # a killed process may have left its last line unfinished
                        data = file.read_bytes()
                        if data[-1:] not in (b"", b"\n"):
                            os.truncate(file, data.rfind(b"\n") + 1)
                lock: Any = _Lock(file)
                storage = JournalStorage(JournalFileBackend(str(file), lock))
                self._study = optuna.create_study(
                    storage=storage, study_name="search", direction=direction, load_if_exists=True
                )
                before = self._study.user_attrs.get(_SPACE)
                if before is None:
                    self._study.set_user_attr(_SPACE, meant)
        except OSError as error:
            raise refused(str(file), error) from error
        if before not in (None, meant):
            raise ConfigError(
                f"search: metric, direction or space of {sweep.name} have changed since its first trial, so what was "
                f"learned does not hold; call the sweep something else with --name NAME, or remove {file}.",
                code="sweep-mismatch",
            )
        self._asked: dict[str, Point] = {}  # by this process, and not answered yet
        self._points: dict[int, Point] = {}  # by the number of their trial

    def ask(self, num: int = 1) -> list[Point]:
        """Up to `num` points to train: first those that a killed search had asked, then new ones; [] at the end."""
        with _quiet():
            points: dict[str, Point] = {}
            for trial in self._trials("RUNNING"):
                point = self._point(trial)
                if point.key not in self._asked and len(points) < num:
                    points.setdefault(point.key, point)
            while len(points) < num and (new := self._suggest()) is not None:
                if new.key not in self._asked:  # else it is answered along with its twin
                    points.setdefault(new.key, new)
        self._asked |= points
        if points:
            self.sweep = add_points(self.sweep, points.values())
        return list(points.values())

    def tell(self, point: Point, value: float | None, state: str = "failed") -> None:
        """The figure of a point; without one, `state` is "diverged" (keep away from there) or "failed" (unknown).

        A point that two trials suggested answers both.
        """
        with _quiet():
            for trial in self._trials("RUNNING"):
                if self._point(trial).key == point.key:
                    self._answer(trial.number, value, state)
        self._asked.pop(point.key, None)

    def best(self) -> tuple[Point, float] | None:
        """The best point so far and its value; of equal ones the first. None where none has finished."""
        sign = 1 if self.settings.direction == "lower" else -1
        done = [trial for trial in self._trials("COMPLETE") if trial.value is not None]
        if not done:
            return None
        found = min(done, key=lambda trial: (sign * trial.value, trial.number))
        return self._point(found), found.value

    def _trials(self, *states: str) -> list[Any]:
        """Without those that were begun and have no values: a kill between the two leaves nothing to continue, and the
        next one that is asked has its number and so its values."""
        wanted = [t for t in self._study.get_trials(deepcopy=False) if t.state.name in states]
        return [t for t in wanted if t.state.name != "RUNNING" or self.settings.space.keys() <= t.params.keys()]

    def _point(self, trial: Any) -> Point:
        if trial.number not in self._points:
            chosen = {name: (one, trial.params[name]) for name, one in self.settings.space.items()}
            varies = {name: one[value] if isinstance(one, tuple) else value for name, (one, value) in chosen.items()}
            self._points[trial.number] = point_of(self.sweep, varies)
        return self._points[trial.number]

    def _suggest(self) -> Point | None:
        """A new trial; one that suggests what another has answered is answered at once and counts."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
        from optuna.samplers import RandomSampler, TPESampler

        space: dict[str, Any] = {}
        for name, one in self.settings.space.items():
            if isinstance(one, tuple):  # by their place in the list: Optuna takes no lists or mappings as values
                space[name] = CategoricalDistribution(list(range(len(one))))
            elif one.is_whole:
                space[name] = IntDistribution(int(one.low), int(one.high), one.is_log, int(one.step or 1))
            else:
                space[name] = FloatDistribution(one.low, one.high, one.is_log, one.step)
        while (number := len(self._trials("RUNNING", "COMPLETE", "PRUNED", "FAIL"))) < self.settings.num_trials:
            text = f"{self.settings.seed}/{number}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
            if self.settings.sampler == "tpe":
                # Trials in flight count as bad, so that several at once do not all go to one place.
                self._study.sampler = TPESampler(seed=seed, multivariate=True, constant_liar=True)
            else:
                self._study.sampler = RandomSampler(seed=seed)
            if self.settings.sampler == "grid" and not self._trials("WAITING"):  # one may wait since a kill
                self._study.enqueue_trial(self.settings.combination(number))
            trial = self._study.ask(space)
            point = self._point(trial)
            twins = [
                other
                for other in self._trials("COMPLETE", "PRUNED")
                if other.number != trial.number and self._point(other).key == point.key
            ]
            if not twins:
                return point
            is_complete = twins[0].state.name == "COMPLETE"
            self._answer(trial.number, twins[0].value if is_complete else None, "" if is_complete else "diverged")
        return None

    def _answer(self, number: int, value: float | None, state: str) -> None:
        from optuna.trial import TrialState

        if value is not None and math.isfinite(value):
            self._study.tell(number, value)
        else:
            # A pruned trial counts as worse than all finished ones; a failed one says nothing of its place.
            is_bad = value is not None or state == "diverged"
            self._study.tell(number, state=TrialState.PRUNED if is_bad else TrialState.FAIL)


def drive(search: Search, launcher: Launcher, report: ReportState, at_once: int = 1) -> bool:
    """Asks, trains and answers until the trials are used up; False where it was stopped before, and can continue.

    One at a time, the same seed gives the same suggestions; more at once are quicker and know less of each other.
    """
    failed: list[Outcome] = []
    while points := search.ask(at_once):
        launcher.run(search.sweep, points, report)
        found = [(point, outcome(search, point)) for point in points]
        for point, one in found:
            if one.state != "open":
                search.tell(point, one.value, one.state)
        if any(one.state == "open" for _, one in found):
            return False
        failed = [*failed, *(one for _, one in found)] if all(one.state == "failed" for _, one in found) else []
        if len(failed) >= _MOST_FAILED and search.best() is None:
            why = f": {failed[-1].text}" if failed[-1].text else ""
            raise RunError(
                f"the first {len(failed)} points of {search.sweep.name} failed, so the search stops{why} "
                f"(`rung sweep log {search.sweep.name} {points[-1].key}` shows one)",
                code="training-failed",
            )
    return True


def outcome(search: Search, point: Point) -> Outcome:
    """What became of a point: the best eval of its run, by the metric of the search."""
    sweep, settings = search.sweep, search.settings
    found = state_of(sweep, last_claim(sweep, point.key), run_of(sweep, point.key))
    if found.run is not None and found.run.status == "finished":
        value = best_value(found.run, settings.metric, settings.direction == "lower")
        return Outcome(value, "finished") if math.isfinite(value) else Outcome(None, "diverged")
    if found.run is not None and found.run.status == "diverged":
        return Outcome(None, "diverged")
    return Outcome(None, "failed" if found.word == "failed" else "open", found.text)


def best_value(run: Run, metric: str, is_lower_better: bool) -> float:
    """The best finite value of set/name among the evals; NaN where none is finite, RunError where there is none."""
    group, _, name = metric.removeprefix("eval/").rpartition("/")
    evals = run.evals()
    rows = [row for row in evals if row["set"] == group and isinstance(row.get(name), int | float)]
    if not rows:
        known = dict.fromkeys(f"{row['set']}/{key}" for row in evals for key in row if key not in ("set", "step"))
        raise RunError(
            f"search: {run.id} has no metric {one_line(metric)}; {nearest(metric, list(known))}", code="no-metric"
        )
    finite = [float(row[name]) for row in rows if math.isfinite(row[name])]
    return (min if is_lower_better else max)(finite) if finite else math.nan


class _Lock:
    """A lock on the journal for Optuna, whose own lock outlives a killed process by half a minute."""

    def __init__(self, file: Path) -> None:
        self._file, self._held = file, contextlib.ExitStack()

    def acquire(self) -> bool:
        self._held.enter_context(locked(self._file))
        return True

    def release(self) -> None:
        self._held.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Optuna, which reports every trial on stderr and warns of parts that it calls experimental."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
