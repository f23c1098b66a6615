"""A search in place of a grid: Optuna suggests values, a point is trained with each, and its eval is the answer.

Everything that was asked and told lies in search.journal in the folder of the sweep, so that a search that was killed
goes on: what was being trained is asked again as the same points. Placing points is left to a launcher, what Optuna is
told of a run to `outcome`.

The surprising thing: the sampler is made anew for each trial, seeded by the seed and the trial's number. A suggestion
is then a function of (seed, number, what was told before), and a search that goes on does not repeat its first draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import ConfigError, RunError, UserError
from rung.runs.files import locked, plain, refused
from rung.runs.query import Run
from rung.sweep.launch import Launcher, Told
from rung.sweep.plan import add_points
from rung.sweep.ranges import Choices, Range, Settings, read_settings
from rung.sweep.space import Point, Sweep, point_of
from rung.sweep.state import runs_of, state_of
from rung.text import one_line

JOURNAL = "search.journal"
_MOST_FAILED = 3  # one after the other, before any has finished: then the mistake is in all of them
_BEGUN = ("RUNNING", "COMPLETE", "PRUNED", "FAIL")
_SPACE = "space"  # attribute of the study


class Outcome(NamedTuple):
    """What became of a point: `state` is finished, diverged, failed, or open where it can still go on."""

    value: float | None
    state: str
    text: str = ""


class Search:
    """The search of a sweep, which has been kept (plan.keep): its points are added to the plan as they are asked."""

    def __init__(self, sweep: Sweep) -> None:
        self.settings = read_settings(sweep.search or {})
        self.sweep = sweep
        self._study = _open(sweep, self.settings)
        self._asked: dict[str, Point] = {}  # by this process, and not told yet
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
                if new.key not in self._asked:  # else it is told along with its twin
                    points.setdefault(new.key, new)
        self._asked |= points
        if points:
            self.sweep = add_points(self.sweep, points.values())
        return list(points.values())

    def tell(self, point: Point, value: float | None, state: str = "failed") -> None:
        """The figure of a point; without one, `state` is "diverged" (keep away from there) or "failed" (no word on it).

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
        return [trial for trial in self._study.get_trials(deepcopy=False) if not states or trial.state.name in states]

    def _point(self, trial: Any) -> Point:
        if trial.number not in self._points:
            self._points[trial.number] = point_of(self.sweep, _varies(trial, self.settings))
        return self._points[trial.number]

    def _suggest(self) -> Point | None:
        """A new trial; one that suggests what another has answered is answered at once and counts."""
        while (number := len(self._trials(*_BEGUN))) < self._num_wanted():
            self._study.sampler = _sampler(self.settings, number)
            if self.settings.sampler == "grid" and not self._trials("WAITING"):  # one may wait since a kill
                self._study.enqueue_trial(self.settings.combination(number))
            trial = self._study.ask(_distributions(self.settings.space))
            point = self._point(trial)
            answer = self._known(point, trial.number)
            if answer is None:
                return point
            self._answer(trial.number, *answer)
        return None

    def _num_wanted(self) -> int:
        if self.settings.sampler != "grid":
            return self.settings.trials
        return min(self.settings.trials, self.settings.num_combinations)

    def _known(self, point: Point, number: int) -> tuple[float | None, str] | None:
        for trial in self._trials("COMPLETE", "PRUNED"):
            if trial.number != number and self._point(trial).key == point.key:
                return (trial.value, "") if trial.state.name == "COMPLETE" else (None, "diverged")
        return None

    def _answer(self, number: int, value: float | None, state: str) -> None:
        from optuna.trial import TrialState

        if value is not None and math.isfinite(value):
            self._study.tell(number, value)
        else:
            # A pruned trial counts as worse than all finished ones; a failed one says nothing of its place.
            is_bad = value is not None or state == "diverged"
            self._study.tell(number, state=TrialState.PRUNED if is_bad else TrialState.FAIL)


def drive(search: Search, launcher: Launcher, told: Told, at_once: int = 1) -> bool:
    """Asks, trains and tells until the trials are used up; False where it was stopped before, and can go on.

    One at a time, the same seed gives the same suggestions; more at once are quicker and know less of each other.
    """
    failed: list[Outcome] = []
    while points := search.ask(at_once):
        launcher.run(search.sweep, points, told)
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
                f"(`rung sweep log {search.sweep.name} {points[-1].key}` shows one)"
            )
    return True


def outcome(search: Search, point: Point) -> Outcome:
    """What became of a point: the best eval of its run, by the metric of the search."""
    sweep, settings = search.sweep, search.settings
    found = state_of(sweep, point, runs_of(sweep).get(point.key, []))
    if found.run is not None and found.run.status == "finished":
        value = best_value(found.run, settings.metric, settings.direction == "lower")
        return Outcome(value, "finished") if math.isfinite(value) else Outcome(None, "diverged")
    if found.run is not None and found.run.status == "diverged":
        return Outcome(None, "diverged")
    return Outcome(None, "failed" if found.word == "failed" else "open", found.text)


def best_value(run: Run, metric: str, is_lower_better: bool) -> float:
    """The best finite value of set/name among the evals; NaN where none is finite, RunError where there is none."""
    group, _, name = metric.removeprefix("eval/").rpartition("/")
    rows = [row for row in run.evals() if row["set"] == group and isinstance(row.get(name), int | float)]
    if not rows:
        known = [f"{row['set']}/{key}" for row in run.evals() for key in row if key not in ("set", "step")]
        near = difflib.get_close_matches(metric, dict.fromkeys(known), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(dict.fromkeys(known)) or 'no evals'}."
        raise RunError(f"search: {run.id} has no metric {one_line(metric)}; {hint}")
    finite = [float(row[name]) for row in rows if math.isfinite(row[name])]
    return (min if is_lower_better else max)(finite) if finite else math.nan


def _distributions(space: Mapping[str, Range | Choices]) -> dict[str, Any]:
    """Choices go by their place in the list: Optuna takes no lists or mappings as values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for name, one in space.items():
        if isinstance(one, tuple):
            found[name] = CategoricalDistribution(list(range(len(one))))
        elif one.is_whole:
            found[name] = IntDistribution(int(one.low), int(one.high), one.is_log, int(one.step or 1))
        else:
            found[name] = FloatDistribution(one.low, one.high, one.is_log, one.step)
    return found


def _varies(trial: Any, settings: Settings) -> dict[str, Any]:
    """The values of a trial as a point takes them."""
    found = {}
    for name, one in settings.space.items():
        value = trial.params[name]
        found[name] = one[value] if isinstance(one, tuple) else value
    return found


def _sampler(settings: Settings, number: int) -> Any:
    from optuna.samplers import RandomSampler, TPESampler

    text = f"{settings.seed}/{number}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    if settings.sampler == "tpe":
        # Trials in flight count as bad, so that several at once do not all go to one place.
        return TPESampler(seed=seed, multivariate=True, constant_liar=True)
    return RandomSampler(seed=seed)


def _open(sweep: Sweep, settings: Settings) -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("a search needs Optuna, which is not installed; pip install 'rung[search]'.") from None
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    file = sweep.folder / JOURNAL
    direction = {"lower": "minimize", "higher": "maximize"}[settings.direction]
    meant = {"metric": settings.metric, "direction": direction, "space": plain(_plain_space(settings.space))}
    try:
        with _quiet():
            _mend(file)
            lock: Any = _Lock(file)
            storage = JournalStorage(JournalFileBackend(str(file), lock))
            study = optuna.create_study(storage=storage, study_name="search", direction=direction, load_if_exists=True)
            before = study.user_attrs.get(_SPACE)
            if before is None:
                study.set_user_attr(_SPACE, meant)
    except OSError as error:
        raise refused(str(file), error) from error
    if before not in (None, meant):
        raise ConfigError(
            f"search: metric, direction or space of {sweep.name} have changed since its first trial, so what was "
            f"learned does not hold; call the sweep something else with --name NAME, or remove {file}."
        )
    return study


def _mend(file: Path) -> None:
    """Takes off a last line that a killed process left unfinished, so that the next one begins a line."""
    if not file.exists():
        return
    with locked(file):
        data = file.read_bytes()
        if data[-1:] not in (b"", b"\n"):
            os.truncate(file, data.rfind(b"\n") + 1)


class _Lock:
    """Of the journal, for Optuna, whose own one outlives a killed process by half a minute."""

    def __init__(self, file: Path) -> None:
        self._file, self._held = file, contextlib.ExitStack()

    def acquire(self) -> bool:
        self._held.enter_context(locked(self._file))
        return True

    def release(self) -> None:
        self._held.close()


def _plain_space(space: Mapping[str, Range | Choices]) -> dict[str, Any]:
    return {name: list(one) if isinstance(one, tuple) else dataclasses.asdict(one) for name, one in space.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna tells of every trial on stderr, and warns of parts that it calls experimental."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
