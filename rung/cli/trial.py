"""An A/B as a sweep: arms x seeds are its points, and runs that exist and equal what would be trained serve them.

A run is equal in its config, its code as it lies here, its packages and its data. To tell whether an earlier run had
the same code, the present code is kept for a moment, as for a run, and let go again. Training is left to rung.sweep,
conclusions to rung.compare.judge.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rung.errors import RunError, UserError
from rung.runs.query import Run, list_runs, ref
from rung.runs.record import amend
from rung.sweep.plan import SWEEPS
from rung.sweep.space import Point, Sweep
from rung.sweep.state import runs_of

if TYPE_CHECKING:
    from rung.resolve import Resolved

ENDED = ("finished", "diverged")  # what the judge takes
_ENVIRONMENT = ("python", "implementation", "packages", "rung_sha256", "gpus")


@dataclass(frozen=True)
class Arm:
    """One side of an A/B: what is added to the config of the base run."""

    name: str  # control or variant
    overrides: tuple[str, ...]
    resolved: Resolved


class Cell(NamedTuple):
    """One arm with one seed: the key of its point, and the run that serves there, if there is one."""

    arm: Arm
    seed: int
    key: str
    run: Run | None

    @property
    def has_ended(self) -> bool:
        return self.run is not None and self.run.status in ENDED


@dataclass
class Trial:
    """An A/B of one base run. `id` is the same whenever the same question is asked."""

    base: Run
    root: Path
    arms: list[Arm]
    seeds: list[int]
    experiment: str
    why: str
    declared: str | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        base = str(self.base.document.get("uid") or self.base.id)
        asked = [base, *sorted(self.arms[-1].overrides), self.declared or ""]
        return hashlib.sha256("\n".join(asked).encode()).hexdigest()[:10]

    def can_train(self, arm: Arm) -> bool:
        """False for the control where the code is what was changed: the old code cannot be had here."""
        return arm.name != "control" or self.declared != "code"

    def find(self, is_here: bool) -> list[Cell]:
        """Every cell, seed by seed, so that what is there when somebody stops is made of whole pairs.

        A cell takes a run that has ended before one to resume, and the newest of them.
        """
        now, cells = self._current(is_here), []
        there = [self.base, *reversed(list_runs(self.root, None, []))]
        for seed, arm in itertools.product(self.seeds, self.arms):
            key = _digest(self.id, arm.name, seed, {**now, "data": now["data"][arm.name]})
            # A run trained for this cell after the code was edited must not serve: the cell takes another key.
            while any(_point_of(run) == key and not self._is_equal(run, arm, seed, key, now) for run in there):
                key = _digest(key)
            equal = [run for run in there if self._is_equal(run, arm, seed, key, now)]
            fit = [run for run in equal if run.status in (*ENDED, "running") or run.checkpoints()]
            ended = [run for run in fit if run.status in ENDED]
            cells.append(Cell(arm, seed, key, next(iter([*ended, *fit]), None)))
        return cells

    def sweep(self, cells: Sequence[Cell]) -> Sweep:
        """The sweep that trains what is missing. A cell that cannot be trained and has no run is left out."""
        root, points = self.root.absolute(), []
        for cell in cells:
            if cell.run is None and not self.can_train(cell.arm):
                continue
            words = ("--parent", str(self.base.path.absolute()), f"seed={cell.seed}", *cell.arm.overrides)
            run = None
            if cell.run is not None and _point_of(cell.run) != cell.key:  # one that was made elsewhere
                path = cell.run.path.absolute()
                run = str(path.relative_to(root) if path.is_relative_to(root) else path)
            varies = {"arm": cell.arm.name, "seed": cell.seed}
            points.append(Point(cell.key, (*words, "--tag", f"ab={self.id}"), varies, run))
        return Sweep(
            name=f"ab-{self.id}",
            folder=root / SWEEPS / f"ab-{self.id}",
            runs=root,
            recipe=str(self.base.document.get("recipe")),
            experiment=self.experiment,
            points=tuple(points),
            retries=0,  # the first failure ends an A/B
            launch=self.launch,
            why=self.why,
        )

    def mark(self, sweep: Sweep) -> None:
        """Writes the arm of each run that was trained for this A/B into its run.json."""
        arms, runs = {arm.name: arm for arm in self.arms}, runs_of(sweep)
        for point in sweep.points:
            for run in runs.get(point.key, []):
                if f"ab={self.id}" in (run.document.get("tags") or []) and not run.document.get("ab"):
                    arm = arms[point.varies["arm"]]
                    base = {"base": self.base.id, "base_uid": self.base.document.get("uid")}
                    of = {"id": self.id, "arm": arm.name, **base, "overrides": list(arm.overrides)}
                    amend(run.path, ab=of)

    def _current(self, is_here: bool) -> dict[str, Any]:
        """Code, environment and data of a run that would be started now; elsewhere with the GPUs that the base had."""
        from rung.runs.provenance import WorkingTree, environment, snapshot

        env = environment()
        if not is_here:
            env["gpus"] = self.base.environment().get("gpus")
        here = Path.cwd().resolve()
        with tempfile.TemporaryDirectory(prefix="rung-ab-") as folder:
            code = snapshot(here, Path(folder), f"ab-now/{os.getpid()}", [self.root.resolve()])
            tree = WorkingTree.find(here) if code.get("kind") == "git" else None
            if tree is not None:
                tree.git("update-ref", "-d", str(code["ref"]), check=False)
        return {
            "code": _code_of(code),
            "environment": {name: env.get(name) for name in _ENVIRONMENT},
            "data": {arm.name: {n: s.fingerprint for n, s in streams_of(arm.resolved).items()} for arm in self.arms},
        }

    def _is_equal(self, run: Run, arm: Arm, seed: int, key: str, now: Mapping[str, Any]) -> bool:
        """Whether a run is what would be trained now. What was trained for the cell may have got another GPU."""
        if run.document.get("recipe") != self.base.document.get("recipe") or run.document.get("seed") != seed:
            return False
        names = [name for name in _ENVIRONMENT if name != "gpus" or _point_of(run) != key]
        try:
            if _learning(run.config()) != _learning({**arm.resolved.config.tree(), "seed": seed}):
                return False
            if not self.can_train(arm):
                return _code_of(run.document.get("code")) == _code_of(self.base.document.get("code"))
            env, data = run.environment(), run.data()
        except RunError:
            return False
        return (
            _code_of(run.document.get("code")) == now["code"]
            and all(env.get(name) == now["environment"][name] for name in names)
            and {name: (data.get(name) or {}).get("fingerprint") for name in data} == now["data"][arm.name]
        )


def streams_of(resolved: Resolved) -> Mapping[str, Any]:
    cfg = resolved.config.view("engine")
    return resolved.recipe_class(resolved.config.view("recipe"), cfg.seed).streams()


def refuse_other_horizon(base: Run, control: Resolved, variant: Resolved) -> None:
    """A change that also moves the budget is two changes; refused before anything is trained."""
    from rung.engine.budget import Rate

    def horizon(resolved: Resolved) -> tuple[int, float, float]:
        """Steps, targets in all, and where the schedule ends as a share of the steps."""
        cfg, train = resolved.config.view("engine"), streams_of(resolved)["train"]
        rows = cfg.data.batch_size * cfg.optimizer.gradient_accumulation_steps
        rate = Rate(rows, train.num_rows, train.targets_per_row)
        num_steps, decay = rate.steps(cfg.optimizer.max_iters), rate.steps(cfg.lr.lr_decay_iters) or 0
        if num_steps is None:
            message = f"{base.id} has a budget in time alone, by which the faster arm trains longer; train a base with "
            message += "optimizer.max_iters in steps or tokens (--allow budget tries it anyway)"
            raise UserError(message, code="budget-mismatch")
        return num_steps, num_steps * rows * train.targets_per_row, decay / num_steps if num_steps else 0.0

    (steps_a, targets_a, end_a), (steps_b, targets_b, end_b) = horizon(control), horizon(variant)
    one_step = max(targets_a / steps_a, targets_b / steps_b) if steps_a and steps_b else 0.0
    if abs(targets_a - targets_b) > one_step:
        budgets = [resolved.config.values["optimizer.max_iters"] for resolved in (control, variant)]
        if budgets[0] == budgets[1]:
            remedy = (
                "give the budget in tokens, so that both arms see as many: train a new base with "
                f"`rung train --parent {ref(base.path, base.id)} optimizer.max_iters='{targets_a:.0f} tokens'`"
            )
        else:
            remedy = "a longer run is not compared with a shorter one: leave optimizer.max_iters alone"
        raise UserError(
            f"the change also moves the budget: {targets_a:.0f} targets in {steps_a} steps of the control, "
            f"{targets_b:.0f} in {steps_b} of the variant; {remedy} (--allow budget tries it anyway)",
            code="budget-mismatch",
        )
    if abs(end_a - end_b) > 2 / min(steps_a, steps_b):
        raise UserError(
            f"the change also moves the end of the schedule: at {end_a:.0%} of the control's steps, at "
            f"{end_b:.0%} of the variant's; set lr.lr_decay_iters so that both end alike (--allow budget "
            "tries it anyway)",
            code="budget-mismatch",
        )


def changed_keys(control: Resolved, variant: Resolved) -> list[str]:
    """Keys that the variant changes and that may change what is learned, without those that only follow another."""
    from rung.config import differences

    found = differences(_learning(control.config.tree()), _learning(variant.config.tree()))
    return [name for name in found if not variant.config.sources.get(name, "").startswith("derived")]


def _learning(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config without keys that do not change what is learned."""
    from rung.compare.factors import NO_LEARNING
    from rung.config import differences

    flat = {name: after for name, (_, after) in differences({}, tree).items()}
    return {name: value for name, value in flat.items() if not name.startswith(NO_LEARNING)}


def _point_of(run: Run) -> str | None:
    """The point of a sweep that a run was trained for."""
    of = run.document.get("sweep")
    return of.get("point") if isinstance(of, dict) else None


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=6).hexdigest()


def _code_of(code: Any) -> str | None:
    """The hash of a run's code."""
    found = code if isinstance(code, dict) else {}
    return next((str(found[name]) for name in ("tree", "sha256") if found.get(name)), None)
