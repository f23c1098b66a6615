"""The plan of a run: the rate against the budget.

All of it is arithmetic on what was asked for. A run that only time ends has no number of steps, and half of the
questions cannot be asked of it here; the rehearsal, which knows how long a step takes, asks them. Whether keys and code
are what their author believes is asked in provenance.py and listed here, with the rest of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rung.doctor.preflight import provenance
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.budget import Rate
from rung.engine.schedule import Schedule
from rung.units import Budget

NEAR = (0.95, 1.05)  # planned steps over the horizon of the schedule
MOST_WARMUP = 0.2  # of the run
KEPT = 1.5  # times the floor: a rate above that at the end has not come down
LINE_KEEPS = 0.05  # of the peak: what a straight line has left at NEAR[0]; stands in for a floor of 0
SOON = 0.9  # of the run: a floor that is reached before leaves steps that hardly train
SHORTEST_FALL = 10  # steps; a shape that falls within fewer is a jump to the optimizer's moments
FALLING = ("cosine", "linear", "wsd")
MOST_POINTS = 20_000  # of the schedule that are looked at, besides all near its corners


class Plan(NamedTuple):
    """A schedule and how long it will be followed."""

    schedule: Schedule
    num_steps: int

    @property
    def end(self) -> float:
        """The rate where the run ends."""
        return self.schedule.lr(self.num_steps)

    @property
    def at_floor(self) -> int | None:
        """The first step after the warm-up whose rate is the floor, if there is one within the run."""
        s = self.schedule
        if s.shape not in FALLING or s.decay_steps >= self.num_steps:
            return None
        return s.decay_steps


def limits(budget: Budget, rate: Rate) -> dict[str, int]:
    """Each limit of a budget that can be counted, as the user wrote its unit, in steps."""
    found = {
        "steps": Budget(steps=budget.steps),
        "tokens": Budget(targets=budget.targets),
        "epochs": Budget(epochs=budget.epochs),
    }
    steps = {unit: rate.steps(one) for unit, one in found.items()}
    return {unit: number for unit, number in steps.items() if number is not None}


def schedule_against_budget(bench: Bench) -> Iterator[Result]:
    name, setup = "schedule against budget", bench.setup
    schedule, budget = setup.schedule, setup.cfg.optimizer.max_iters
    if schedule.shape not in FALLING:
        seen = f"{schedule.shape}: declared to follow no horizon; peak {schedule.peak:g}"
        yield Result(name, "pass", seen, rule="O10")
        return
    if setup.num_steps is None:
        seen = f"only time ends the run ({budget}); the rate reaches its floor at step {schedule.decay_steps}"
        yield Result(name, "skip", f"{seen}; the rehearsal of `rung check` compares them", rule="O10")
        return
    plan = Plan(schedule, setup.num_steps)
    faults = list(_faults(plan))
    each = limits(budget, setup.rate)
    binding = min(each, key=lambda unit: each[unit])
    time = f", or {budget.seconds:g} s" if budget.seconds is not None else ""
    seen = (
        f"{plan.num_steps} steps planned (limited by {binding} in optimizer.max_iters={budget}{time}), "
        f"{schedule.shape} over {schedule.decay_steps}, warm-up {schedule.warmup_steps}; "
        f"rate {schedule.peak:g} at its peak, {plan.end:.3g} at the end, floor {schedule.floor:g}"
    )
    remedy = f"set lr.lr_decay_iters={plan.num_steps}, or leave it out: it follows optimizer.max_iters"
    if faults:
        yield Result(name, "warn", f"{'; '.join(faults)}. {seen}", remedy, "O10")
    else:
        yield Result(name, "pass", seen, rule="O10")


def _faults(plan: Plan) -> Iterator[str]:
    schedule, share = plan.schedule, plan.num_steps / plan.schedule.decay_steps
    has_left = plan.end > max(KEPT * schedule.floor, LINE_KEEPS * schedule.peak) * (1 + 1e-9)
    if not NEAR[0] <= share <= NEAR[1]:
        yield f"the run is {share:.2f} of the schedule's horizon"
    if has_left and schedule.floor < schedule.peak:
        yield f"the rate ends at {plan.end / schedule.peak:.0%} of its peak, not at its floor"
    if plan.at_floor is not None and plan.at_floor < SOON * plan.num_steps:
        yield f"the floor is reached after {plan.at_floor / plan.num_steps:.0%} of the run"


def warm_up(bench: Bench) -> Iterator[Result]:
    name, setup, schedule = "warm-up", bench.setup, bench.setup.schedule
    length = setup.num_steps or (schedule.decay_steps if schedule.shape in FALLING else None)
    steps = schedule.warmup_steps
    if not steps:
        yield Result(name, "pass", f"none: the first update has the rate {schedule.lr(0):g}", rule="O10")
        return
    rates = np.array([schedule.lr(step) for step in _points(schedule, steps)])
    if (np.diff(rates) < 0).any():
        yield Result(name, "fail", "the rate falls during the warm-up", "raise lr.learning_rate above its start", "O10")
    elif length is None:
        yield Result(name, "skip", f"{steps} steps; only time ends the run, so their share is not known", rule="O10")
    elif steps > MOST_WARMUP * length:
        seen = f"{steps} of {length} steps ({steps / length:.0%}) are warm-up; more than {MOST_WARMUP:.0%} is unusual"
        yield Result(name, "warn", seen, f"set lr.warmup_iters={max(1, length // 20)}, or train longer", "O10")
    else:
        yield Result(name, "pass", f"{steps} of {length} steps ({steps / length:.1%})", rule="O10")


def shape_of_rate(bench: Bench) -> Iterator[Result]:
    """Jumps, rates that contradict each other, and a schedule that does nothing."""
    name, setup, s = "shape of the rate", bench.setup, bench.setup.schedule
    scales = {o.name: o.lr_scale for o in setup.stepper.objectives}
    family = ", ".join(f"{objective} x{scale:g}" for objective, scale in scales.items())
    seen = f"{s.shape}, start {s.start:g}, peak {s.peak:g}, floor {s.floor:g}; {family}"
    odd = {objective: scale for objective, scale in scales.items() if not (math.isfinite(scale) and scale > 0)}
    if not s.start <= s.peak >= s.floor:
        remedy = "lower lr.warmup_start_lr or lr.min_lr, or raise lr.learning_rate"
        yield Result(name, "fail", f"a rate lies above the peak: {seen}", remedy, "O10")
    elif odd:
        which = ", ".join(odd)
        yield Result(name, "warn", f"{which} would not be trained: {seen}", "give lr_scale a number above 0", "O10")
    elif idle := _does_nothing(bench):
        yield Result(name, "warn", f"{idle[0]}: {seen}", idle[1], "O10")
    elif jump := _jump(s, setup.num_steps or s.decay_steps):
        step, change = jump
        seen = f"the rate changes by {change / s.peak:.0%} of its peak in one step, at step {step}; {seen}"
        yield Result(name, "warn", seen, "give the fall more steps: raise lr.wsd_decay_fraction", "O10")
    else:
        yield Result(name, "pass", seen, rule="O10")


def _does_nothing(bench: Bench) -> tuple[str, str] | None:
    """What makes the schedule idle, and what would wake it."""
    s, setup = bench.setup.schedule, bench.setup
    if s.peak == 0:
        return "the learning rate is 0", "set lr.learning_rate"
    if s.shape in FALLING and s.floor == s.peak:
        return f"{s.shape} falls from {s.peak:g} to {s.floor:g}", "lower lr.min_lr, or say lr.decay_lr=false"
    if s.shape != "plateau":
        return None
    if s.plateau_factor == 1.0 or s.floor == s.peak:
        return "plateau never lowers the rate", "set lr.plateau_factor below 1 and lr.min_lr below lr.learning_rate"
    every = None if setup.cfg.eval_interval.is_never else setup.rate.steps(setup.cfg.eval_interval)
    num_evals = (setup.num_steps // max(1, every) if every else 1) if setup.num_steps else None
    if num_evals is not None and num_evals <= s.plateau_patience:
        seen = f"plateau waits for {s.plateau_patience} evals without a new best, and the run has {num_evals}"
        return seen, "lower eval_interval or lr.plateau_patience"
    return None


def _jump(schedule: Schedule, length: int) -> tuple[int, float] | None:
    """The step with the largest change, if that is twice what the slopes of this shape explain."""
    points = _points(schedule, length)
    rates = np.array([[schedule.lr(step), schedule.lr(step + 1)] for step in points])
    changes = np.abs(rates[:, 1] - rates[:, 0])
    worst = int(changes.argmax())
    fall, rise = schedule.peak - schedule.floor, schedule.peak - schedule.start
    room = max(1, schedule.decay_steps - schedule.warmup_steps)
    num_falling = room
    if schedule.shape == "wsd":
        num_falling = max(min(SHORTEST_FALL, room), round(schedule.wsd_decay_fraction * schedule.decay_steps))
    explained = [math.pi / 2 * fall / num_falling]
    if schedule.warmup_steps:
        explained.append(rise / schedule.warmup_steps)
    return (points[worst], float(changes[worst])) if changes[worst] > 2 * max(explained) else None


def _points(schedule: Schedule, length: int) -> list[int]:
    """All steps of a short run; of a long one many, and all around the corners."""
    if length <= MOST_POINTS:
        return list(range(max(1, length)))
    s = schedule
    corners = (0, s.warmup_steps, s.decay_steps, round(s.decay_steps * (1 - s.wsd_decay_fraction)), length - 1)
    near = {corner + k for corner in corners for k in range(-20, 21)}
    spread = np.linspace(0, length - 1, MOST_POINTS).astype(int).tolist()
    return sorted({*spread, *(step for step in near if 0 <= step < length)})


CHECKS: list[Check] = [
    Check("schedule against budget", schedule_against_budget),
    Check("warm-up", warm_up),
    Check("shape of the rate", shape_of_rate),
    *provenance.CHECKS,
]
