"""Rules about conditional, free-running and adversarial models.

They go by names: probes at evals, measures such as `l1@8` and `persistence@8` in the evals, and for an objective beyond
the first `accuracy`, `gap` and `hinge` among its parts, with `grad_ratio` in the first (see the world recipe).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import NotLooked, rule
from rung.doctor.rules.lookups import two_digits

IN_A_ROW = 3  # evals
USED = 0.01  # rise of the loss without an input: +26000 % if it is used; 0 if it is ignored, -0.3 % if irrelevant
WORSE = 10.0  # error at the last horizon over that at the first: healthy 1.5
BETTER = 0.9  # of persistence, at the first horizon
ERRORS = ("l1", "l2", "mse", "mae", "rmse", "error", "loss", "nll")  # measures of which less is better
STILL, MEAN = ("persistence",), ("mean_frame", "climatology")  # baselines: no change, the average
LOW, HIGH = "_low", "_high"


@rule("C1", "An input is ignored", needs=("probe/without_*:3",))
def input_ignored(history: History) -> Iterator[Finding]:
    """probe/without_<input>: how much the loss rises without the input, at three evals in a row."""
    known = {name.removeprefix("probe/without_") for name in history.rows if name.startswith("probe/without_")}
    bounds = {name + end for name in known for end in (LOW, HIGH)}
    for name in sorted(known - bounds):
        rise, low, high = (history[f"probe/without_{name}{end}"].last(IN_A_ROW) for end in ("", LOW, HIGH))
        # Early in training only the average has been learned, and long-range memory comes last of all.
        if min(len(rise), len(high)) < IN_A_ROW or rise.steps[-1] < 0.5 * _planned(history):
            continue
        if not bool(np.all(high.values < USED)):  # a NaN is no evidence
            continue
        span = f" [{low.values[-1]:+.2%}, {high.values[-1]:+.2%}]" if len(low) else f" (at most {high.values[-1]:+.2%})"
        yield Finding(
            "warn",
            f"Without {name} the loss changes by {rise.values[-1]:+.2%}{span} at step {int(rise.steps[-1])}: the "
            "model does not use it.",
            since=int(rise.steps[0]),
            evidence=[
                f"step {step}: {value:+.3%}, 95 % of bootstraps below {top:+.3%} (limit {USED:+.0%})"
                for step, value, top in zip(rise.steps, rise.values, high.values)
            ],
            ruled_out=["too few rows to tell: the whole interval is below the limit",
                       f"too early to tell: it still holds at step {int(rise.steps[-1])} of {_planned(history)}"],
            probe=f"correlate {name} with the targets at several lags: at which does it explain the data at all?",
            remedy=f"if {name} explains the data at lag 0, follow it into the model: multiplied by 0, detached, "
            "overwritten, normalised away; if at another lag, shift it; if nowhere, drop it; a run of a few hundred "
            "steps may only be too short",
            title=f"An input is ignored: {name}",
        )  # fmt: skip


@rule("C3", "Good for one step, not for many", needs=("eval/*@*:3",))
def free_running(history: History) -> Iterator[Finding]:
    """Eval measures by horizon (l1@1, l1@8 ..) against persistence and the mean at the same horizon."""
    if history.end < 0.5 * _planned(history):
        raise NotLooked("it is judged in the second half of a run")
    for set_name, measures in history.evals.items():
        by_name: dict[str, dict[int, Series]] = {}  # `l1@8` -> {"l1": {8: ..}}
        for full, series in measures.items():
            name, at, horizon = full.partition("@")
            if at and horizon.isdecimal():
                by_name.setdefault(name, {})[int(horizon)] = series
        # The first of the baselines that was measured, at horizons with enough evals.
        baselines = [next((by_name[name] for name in names if name in by_name), {}) for names in (STILL, MEAN)]
        still, mean = ({h: s for h, s in of.items() if len(s) >= IN_A_ROW} for of in baselines)
        for name, horizons in by_name.items():
            near, far = min(horizons), max(horizons)
            if name not in ERRORS or near == far or min(len(horizons[near]), len(horizons[far])) < IN_A_ROW:
                continue
            first, last = (horizons[h].last(IN_A_ROW).values for h in (near, far))
            wrong = []
            if np.all(last > WORSE * first):
                wrong.append(f"after {far} it is {last[-1] / first[-1]:.1f} times that after {near} (limit {WORSE:g})")
            if far in mean and np.all(last > mean[far].last(IN_A_ROW).values):
                average = f"{mean[far].values[-1]:.4g}, that of always predicting the average"
                wrong.append(f"after {far} it is above {average}")
            is_bad_at_once = near in still and np.all(first > BETTER * still[near].last(IN_A_ROW).values)
            learns_nothing = is_bad_at_once and not wrong
            if is_bad_at_once:
                no_change = f"{still[near].values[-1]:.4g}, that of predicting no change"
                wrong.append(f"after {near} it is not 10 % below {no_change}")
            if not wrong:
                continue
            table = ", ".join(f"{h}: {series.values[-1]:.4g}" for h, series in sorted(horizons.items()))
            crossing = [h for h in sorted(horizons) if h in still and horizons[h].values[-1] >= still[h].values[-1]]
            yield Finding(
                "warn",
                f"On {set_name}, the {name} of free-running rollouts: {'; '.join(wrong)}.",
                evidence=[
                    f"{name} by horizon at step {horizons[far].steps[-1]}: {table}",
                    f"from horizon {crossing[0]} on it is no better than predicting no change" if crossing
                    else "at every horizon it is better than predicting no change" if still else "",
                ],
                ruled_out=[f"one bad eval: the last {IN_A_ROW} agree"],
                probe="look at a rollout step by step: where does it break? In a chaotic world go by the horizons",
                remedy="train longer, or let the model copy from its last input: it has not learned yet what changes"
                if learns_nothing
                else "train on its own outputs (closed loop), add noise to its context, or start with shorter rollouts",
            )  # fmt: skip


@rule("G1", "The discriminator dominates", needs=("*/accuracy",))
def dominates(history: History) -> Iterator[Finding]:
    """<objective>/accuracy, /gap and /hinge or /loss over the last 100 steps; grad_ratio."""
    for name in _opponents(history):
        accuracy, gap = _level(history, f"{name}/accuracy"), _level(history, f"{name}/gap")
        loss = _level(history, f"{name}/hinge" if f"{name}/hinge" in history else f"{name}/loss")
        if not (accuracy > 0.98 and (gap > 10 or loss < 0.05)):  # healthy .54, .01-.03; dominated .999, 71-84
            continue
        ratio, scale = _level(history, "grad_ratio"), history.number("adversarial.lr_scale") or 0.0
        yield Finding(
            "sick" if gap > 10 or ratio > 3 else "warn",
            f"The {name} tells generated from real {accuracy:.1%} of the time: little is left to learn from it.",
            evidence=[
                f"medians of the last {WINDOW} steps: accuracy {accuracy:.4f} (limit 0.98), gap of the scores "
                f"{gap:.3g} (limit 10), its loss {loss:.3g} (limit 0.05)",
                f"grad_ratio, its gradient over that of the other loss: {ratio:.3g} (healthy 0.05 to 0.1, too much "
                "above 3, near 0 where its loss saturates)",
            ],
            probe="measure its accuracy on held-out rows: near 0.5 means that it has memorised the training rows",
            remedy="use a third of its learning rate, fewer of its steps, a gradient penalty (R1), or noise on its "
            "inputs",
            changes={"adversarial.lr_scale": two_digits(scale / 3)} if scale > 0 else {},
        )


@rule("G2", "The discriminator does nothing", needs=("*/accuracy",))
def does_nothing(history: History) -> Iterator[Finding]:
    """Weights that never move, or a grad_ratio near 0: the generator gets no gradient from it."""
    if history.end < 200:  # in the first steps all of this happens for a while
        raise NotLooked(f"{history.end} steps are too few", "a run of 200 steps")
    for name in _opponents(history):
        # Weights that stand still, at the last steps at which they were due.
        table, taken = history.table("tensors"), history[f"{name}/norm"].steps
        own = [i for i, tensor in enumerate(table.names) if tensor.startswith(f"{name}.")] if table is not None else []
        if table is not None and own and "update" in table.columns:
            rows = np.isin(table.steps, taken) if len(taken) else np.ones(len(table.steps), bool)
            steps, updates = table.steps[rows][-IN_A_ROW:], table.columns["update"][rows][-IN_A_ROW:]
            if len(updates) == IN_A_ROW and np.all(updates[:, own] == 0):
                others = np.delete(updates, own, axis=1)
                yield Finding(
                    "sick",
                    f"None of the {len(own)} tensors of the {name} changed at the last {IN_A_ROW} measured steps.",
                    evidence=[f"update is exactly 0 at steps {', '.join(map(str, steps))}"],
                    remedy="check that its objective has these parameters, a learning rate above 0 "
                    f"(adversarial.lr_scale={history.config.get('adversarial.lr_scale', 'unknown')}) and a loss that "
                    "depends on them",
                    # O9 says the same without the reason, unless it says it of others too.
                    hides=[] if np.all(others == 0, axis=0).any() else ["O9"],
                )
                continue

        # A gradient that the generator does not feel; recorded every ten steps.
        ratio = history["grad_ratio"].last(WINDOW // 10).finite
        if len(ratio) < 5 or ratio.median >= 1e-3:  # measured 1e-5 with a weight of 1e-5; healthy .05 to .09
            continue
        is_detached = bool(np.all(ratio.values == 0))
        what = "is exactly 0" if is_detached else f"is {ratio.median:.2g} of that from the other loss"
        weight = history.config.get("adversarial.weight")
        changes = {}
        if isinstance(weight, float) and weight > 0 and ratio.median > 0:
            changes["adversarial.weight"] = two_digits(weight * 0.05 / ratio.median)
        yield Finding(
            "sick" if is_detached else "warn",
            f"The gradient that the generator gets from the {name} {what}: it has no effect.",
            evidence=[f"grad_ratio median {ratio.median:.3g} over steps {ratio.steps[0]} to {ratio.steps[-1]}; limit "
                      "0.001, healthy 0.05 to 0.1", f"its accuracy {_level(history, f'{name}/accuracy'):.3f}"],
            ruled_out=[] if is_detached else ["a detached output: the gradient is small, not 0"],
            remedy="let the gradient through: no `detach()` and no `torch.no_grad()` between its score and the "
            "generator" if is_detached
            else f"raise the weight of the adversarial loss (adversarial.weight={weight}): aim at a ratio of 0.05",
            changes=changes,
        )  # fmt: skip


def _opponents(history: History) -> list[str]:
    """Objectives that record their accuracy."""
    return [name.removesuffix("/accuracy") for name in history.rows if name.endswith("/accuracy")]


def _level(history: History, name: str) -> float:
    """The median of the last 100 rows that have it; NaN if fewer than 50 (10 of grad_ratio, which is rare)."""
    series = history[name].last(WINDOW)
    return series.median if len(series) >= (10 if name == "grad_ratio" else WINDOW // 2) else float("nan")


def _planned(history: History) -> int:
    """Steps of the whole run; a thousand where it has no plan."""
    return max(history.num_steps or 1000, 1)
