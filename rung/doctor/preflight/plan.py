"""The plan of a run: the learning rate against the budget.

All of it is arithmetic on the config. A run that only time ends has no number of steps; the rehearsal, which knows how
long a step takes, checks that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rung.doctor.preflight.result import CheckContext, Result, check
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


@check("schedule against budget", "O10")
def schedule_against_budget(context: CheckContext) -> Result:
    setup, schedule, budget = context.setup, context.setup.schedule, context.setup.cfg.optimizer.max_iters
    if schedule.shape not in FALLING:
        return Result("pass", f"{schedule.shape} has no horizon; peak {schedule.peak:g}")
    if setup.num_steps is None:
        seen = f"only time ends the run ({budget}); the rate reaches its floor at step {schedule.decay_steps}"
        return Result("skip", f"{seen}; the rehearsal of a full check compares them")
    # Each limit of the budget that can be counted, as the user wrote its unit, in steps.
    limits = {"steps": Budget(steps=budget.steps), "tokens": Budget(targets=budget.targets),
              "epochs": Budget(epochs=budget.epochs)}  # fmt: skip
    in_steps = {unit: number for unit, one in limits.items() if (number := setup.rate.steps(one)) is not None}
    time = f", or {budget.seconds:g} s" if budget.seconds is not None else ""
    seen = (
        f"{setup.num_steps} steps planned (limited by {min(in_steps, key=in_steps.__getitem__)} in "
        f"optimizer.max_iters={budget}{time}), "
        f"{schedule.shape} over {schedule.decay_steps}, warm-up {schedule.warmup_steps}; rate {schedule.peak:g} at its "
        f"peak, {schedule.lr(setup.num_steps):.3g} at the end, floor {schedule.floor:g}"
    )
    remedy = f"set lr.lr_decay_iters={setup.num_steps}, or leave it out: it follows optimizer.max_iters"
    faults = "; ".join(schedule_faults(schedule, setup.num_steps))
    return Result("warn" if faults else "pass", f"{faults}. {seen}" if faults else seen, remedy)


def schedule_faults(schedule: Schedule, num_steps: int) -> Iterator[str]:
    share, end = num_steps / schedule.decay_steps, schedule.lr(num_steps)
    has_left = end > max(KEPT * schedule.floor, LINE_KEEPS * schedule.peak) * (1 + 1e-9)
    if not NEAR[0] <= share <= NEAR[1]:
        yield f"the run is {share:.2f} of the schedule's horizon"
    if has_left and schedule.floor < schedule.peak:
        yield f"the rate ends at {end / schedule.peak:.0%} of its peak, not at its floor"
    if schedule.shape in FALLING and schedule.decay_steps < SOON * num_steps:
        yield f"the floor is reached after {schedule.decay_steps / num_steps:.0%} of the run"


@check("warm-up", "O10")
def warm_up(context: CheckContext) -> Result:
    setup, schedule = context.setup, context.setup.schedule
    length = setup.num_steps or (schedule.decay_steps if schedule.shape in FALLING else None)
    steps = schedule.warmup_steps
    if not steps:
        return Result("pass", f"none: the first update has the rate {schedule.lr(0):g}")
    if (np.diff([schedule.lr(step) for step in _points(schedule, steps)]) < 0).any():
        return Result("fail", "the rate falls during the warm-up", "raise lr.learning_rate above its start")
    if length is None:
        return Result("skip", f"{steps} steps; only time ends the run, so their share is not known")
    if steps > MOST_WARMUP * length:
        seen = f"{steps} of {length} steps ({steps / length:.0%}) are warm-up; more than {MOST_WARMUP:.0%} is unusual"
        wanted = max(1, length // 20)
        shorten = f"set lr.warmup_iters={wanted}, or train longer" if wanted < steps else "train longer"
        return Result("warn", seen, shorten)
    return Result("pass", f"{steps} of {length} steps ({steps / length:.1%})")


@check("shape of the rate", "O10")
def shape_of_rate(context: CheckContext) -> Result:
    """Jumps, rates that contradict each other, and a schedule that does nothing."""
    setup, s = context.setup, context.setup.schedule
    groups = [(o.name, group) for o in setup.stepper.objectives for x in o.optimizers for group in x.param_groups]
    scales = list(dict.fromkeys((objective, group.get("lr_scale", 1.0)) for objective, group in groups))
    family = ", ".join(f"{objective} x{scale:g}" for objective, scale in scales)
    seen = f"{s.shape}, start {s.start:g}, peak {s.peak:g}, floor {s.floor:g}; {family}"
    odd = [objective for objective, scale in scales if not (math.isfinite(scale) and scale > 0)]
    if not s.start <= s.peak >= s.floor:
        remedy = "lower lr.warmup_start_lr or lr.min_lr, or raise lr.learning_rate"
        return Result("fail", f"a rate lies above the peak: {seen}", remedy)
    if odd:
        return Result("warn", f"{', '.join(odd)} would not be trained: {seen}", "give lr_scale a number above 0")
    if s.peak == 0:
        return Result("warn", f"the learning rate is 0: {seen}", "set lr.learning_rate")
    if s.shape in FALLING and s.floor == s.peak:
        remedy = "lower lr.min_lr, or set lr.decay_lr=false"
        return Result("warn", f"{s.shape} falls from {s.peak:g} to {s.floor:g}: {seen}", remedy)
    if s.shape == "plateau":
        if s.plateau_factor == 1.0 or s.floor == s.peak:
            remedy = "set lr.plateau_factor below 1 and lr.min_lr below lr.learning_rate"
            return Result("warn", f"plateau never lowers the rate: {seen}", remedy)
        every = None if setup.cfg.eval_interval.is_never else setup.rate.steps(setup.cfg.eval_interval)
        num_evals = (setup.num_steps // max(1, every) if every else 1) if setup.num_steps else math.inf
        if num_evals <= s.plateau_patience:
            waits = f"plateau waits for {s.plateau_patience} evals without a new best, and the run has {num_evals}"
            return Result("warn", f"{waits}: {seen}", "lower eval_interval or lr.plateau_patience")
    if jump := largest_jump(s, setup.num_steps or s.decay_steps):
        step, change = jump
        seen = f"the rate changes by {change / s.peak:.0%} of its peak in one step, at step {step}; {seen}"
        return Result("warn", seen, "give the fall more steps: raise lr.wsd_decay_fraction")
    return Result("pass", seen)


def largest_jump(schedule: Schedule, length: int) -> tuple[int, float] | None:
    """The step with the largest change, if that is twice what the slopes of this shape explain."""
    points = _points(schedule, length)
    rates = np.array([[schedule.lr(step), schedule.lr(step + 1)] for step in points])
    changes = np.abs(rates[:, 1] - rates[:, 0])
    worst = int(changes.argmax())
    num_falling = room = max(1, schedule.decay_steps - schedule.warmup_steps)
    if schedule.shape == "wsd":
        num_falling = max(min(SHORTEST_FALL, room), round(schedule.wsd_decay_fraction * schedule.decay_steps))
    explained = math.pi / 2 * (schedule.peak - schedule.floor) / num_falling
    if schedule.warmup_steps:
        explained = max(explained, (schedule.peak - schedule.start) / schedule.warmup_steps)
    return (points[worst], float(changes[worst])) if changes[worst] > 2 * explained else None


def _points(schedule: Schedule, length: int) -> list[int]:
    """All steps of a short run; of a long one many, and all around the corners."""
    if length <= MOST_POINTS:
        return list(range(max(1, length)))
    s = schedule
    corners = (0, s.warmup_steps, s.decay_steps, round(s.decay_steps * (1 - s.wsd_decay_fraction)), length - 1)
    near = {corner + k for corner in corners for k in range(-20, 21)}
    spread = np.linspace(0, length - 1, MOST_POINTS).astype(int).tolist()
    return sorted({*spread, *(step for step in near if 0 <= step < length)})
