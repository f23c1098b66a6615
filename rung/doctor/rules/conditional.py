"""Models that are steered, that go on by themselves, or that play against each other.

What a model is given may be ignored without any curve showing it; what it makes may be good for one step and worthless
after ten; of two networks that compete, one may have won, or have left the game. All of this is told from probes and
measures at evals, and from what a recipe records of its objectives.

A recipe speaks to these rules by names: measures such as `l1@8` and `persistence@8` in its evals, and for an objective
beyond the first `accuracy`, `gap` and `hinge` among its parts, with `grad_ratio` in the first (see the world recipe).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule

IN_A_ROW = 3  # evals
USED = 0.01  # rise of the loss without an input that is used: +26000 % measured; ignored 0, irrelevant -0.3 %
WORSE = 10.0  # error at the last horizon over that at the first: healthy 1.5
BETTER = 0.9  # of persistence, at the first horizon
ERRORS = ("l1", "l2", "mse", "mae", "rmse", "error", "loss", "nll")  # measures of which less is better
STILL, MEAN = ("persistence",), ("mean_frame", "climatology")  # guesses that learn nothing: no change, the average
LOW, HIGH = "_low", "_high"
ByHorizon = Mapping[int, Series]


@rule("C1", "An input is ignored")
def input_ignored(history: History) -> list[Finding]:
    """probe/without_<input>: how much the loss rises when the input is taken away, at three evals in a row."""
    found = []
    for name in _probed(history):
        rise, high = history[f"probe/without_{name}"].last(IN_A_ROW), history[f"probe/without_{name}{HIGH}"]
        low, high = history[f"probe/without_{name}{LOW}"].last(IN_A_ROW), high.last(IN_A_ROW)
        # Early in training nothing but the average has been learned yet, and a memory of long ago comes last of all.
        if min(len(rise), len(high)) < IN_A_ROW or rise.steps[-1] < 0.5 * _planned(history):
            continue
        if not bool(np.all(high.values < USED)):  # a NaN is no evidence
            continue
        span = f" [{low.values[-1]:+.2%}, {high.values[-1]:+.2%}]" if len(low) else f" (at most {high.values[-1]:+.2%})"
        found.append(
            Finding(
                "C1",
                "warn",
                f"Taking {name} away changed the loss by {rise.values[-1]:+.2%}{span} at step {int(rise.steps[-1])}: "
                "by then the model did not use it.",
                since=int(rise.steps[0]),
                evidence=[
                    f"step {step}: {value:+.3%}, 95 % of bootstraps below {top:+.3%} (limit {USED:+.0%})"
                    for step, value, top in zip(rise.steps, rise.values, high.values)
                ],
                ruled_out=["too few rows to tell: the whole interval lies below the limit",
                           f"an early moment: it was still so at step {int(rise.steps[-1])} of {_planned(history)}"],
                probe=f"`rung data report` tells at which lag {name} explains the data at all",
                remedy=(f"if {name} explains the data at lag 0, look at its way into the model: multiplied by 0, "
                        "detached, overwritten, normalised away; if at another lag, shift it; if nowhere, drop it; a "
                        "run of a few hundred steps may only have been too short"),
                title=f"An input is ignored: {name}",
            )
        )  # fmt: skip
    return found


@rule("C3", "Good for one step, not for many")
def free_running(history: History) -> list[Finding]:
    """Eval measures by horizon (l1@1, l1@8 ..) against persistence and the mean at the same horizon."""
    found = []
    for set_name, measures in history.evals.items():
        by_name = _by_horizon(measures)
        for name, horizons in by_name.items():
            if name not in ERRORS or len(horizons) < 2 or _progress(history) < 0.5:
                continue
            finding = _decays(set_name, name, horizons, by_name)
            if finding is not None:
                found.append(finding)
    return found


@rule("G1", "The discriminator dominates")
def dominates(history: History) -> list[Finding]:
    """<objective>/accuracy, /gap and /hinge or /loss over the last 100 steps; grad_ratio."""
    found = []
    for name in _opponents(history):
        accuracy, gap = _level(history, f"{name}/accuracy"), _level(history, f"{name}/gap")
        loss = _level(history, f"{name}/hinge" if f"{name}/hinge" in history else f"{name}/loss")
        if not (accuracy > 0.98 and (gap > 10 or loss < 0.05)):  # healthy .54, .01-.03; dominated .999, 71-84
            continue
        ratio = _level(history, "grad_ratio")
        found.append(
            Finding(
                "G1",
                "sick" if gap > 10 or ratio > 3 else "warn",
                f"The {name} tells made from real {accuracy:.1%} of the time; little is left to learn from it.",
                evidence=[
                    f"medians of the last {WINDOW} steps: accuracy {accuracy:.4f} (limit 0.98), gap of the scores "
                    f"{gap:.3g} (limit 10), its loss {loss:.3g} (limit 0.05)",
                    f"its pull at what is made over that of the other loss: {ratio:.3g} (healthy 0.05 to 0.1, "
                    "too much above 3, and near 0 where its loss saturates)",
                ],
                probe="its accuracy on held-out rows: near 0.5 there means that it has learned the rows by heart",
                remedy="a third of its learning rate, fewer of its steps, a penalty on its gradient (R1), or noise on "
                "what it sees",
                changes=_third(history, "adversarial.lr_scale"),
            )
        )
    return found


@rule("G2", "The discriminator does nothing")
def does_nothing(history: History) -> list[Finding]:
    """Weights that never move, and grad_ratio: what the generator feels of the other one."""
    found = []
    for name in _opponents(history):
        if history.end < 200:  # in the first steps all of this can be so for a while
            continue
        ratio = history["grad_ratio"].last(WINDOW // 10).finite  # recorded every ten steps
        finding = _stands_still(history, name) or _is_not_felt(history, name, ratio)
        if finding is not None:
            found.append(finding)
    return found


def _decays(set_name: str, name: str, horizons: ByHorizon, by_name: Mapping[str, ByHorizon]) -> Finding | None:
    near, far = min(horizons), max(horizons)
    if min(len(horizons[near]), len(horizons[far])) < IN_A_ROW:
        return None
    first, last = (horizons[h].last(IN_A_ROW).values for h in (near, far))
    still, mean = (_baseline(by_name, names) for names in (STILL, MEAN))
    wrong = []
    if np.all(last > WORSE * first):
        wrong.append(f"after {far} it is {last[-1] / first[-1]:.1f} times that after {near} (limit {WORSE:g})")
    if far in mean and np.all(last > mean[far].last(IN_A_ROW).values):
        wrong.append(f"after {far} it is above {mean[far].values[-1]:.4g}, that of always answering the average")
    if near in still and np.all(first > BETTER * still[near].last(IN_A_ROW).values):
        wrong.append(f"after {near} it is not 10 % below {still[near].values[-1]:.4g}, that of changing nothing")
    if not wrong:
        return None
    table = ", ".join(f"{h}: {series.values[-1]:.4g}" for h, series in sorted(horizons.items()))
    crossing = [h for h in sorted(horizons) if h in still and horizons[h].values[-1] >= still[h].values[-1]]
    evidence = [f"{name} by horizon at step {horizons[far].steps[-1]}: {table}"]
    if crossing:
        evidence.append(f"from horizon {crossing[0]} on it is no better than changing nothing")
    elif still:
        evidence.append("at every horizon it is better than changing nothing")
    is_bad_at_once = len(wrong) == 1 and "not 10 % below" in wrong[0]
    remedy = (
        "train longer, or let the model copy from what it saw last: it has not learned yet what changes"
        if is_bad_at_once
        else "train on its own outputs (closed loop), add noise to what it remembers, or begin with shorter rollouts"
    )
    return Finding(
        "C3",
        "warn",
        f"On {set_name}, the {name} of what the model makes on its own: {'; '.join(wrong)}.",
        evidence=evidence,
        ruled_out=[f"one bad eval: the last {IN_A_ROW} agree"],
        probe="`rung sample` shows where it breaks; where the world itself is chaotic, judge by the horizon above",
        remedy=remedy,
    )


def _stands_still(history: History, name: str) -> Finding | None:
    table, taken = history.table("tensors"), history[f"{name}/norm"].steps
    if table is None or "update" not in table.columns:
        return None
    own = [i for i, tensor in enumerate(table.names) if tensor.startswith(f"{name}.")]
    rows = np.isin(table.steps, taken) if len(taken) else np.ones(len(table.steps), bool)  # it may not be due each step
    updates = table.columns["update"][rows][-IN_A_ROW:]
    if not own or len(updates) < IN_A_ROW or not np.all(updates[:, own] == 0):
        return None
    others = [i for i in range(len(table.names)) if i not in set(own)]
    is_alone = not others or not np.any(np.all(updates[:, others] == 0, axis=0))
    return Finding(
        "G2",
        "sick",
        f"None of the {len(own)} tensors of the {name} has changed in the last {IN_A_ROW} looks at them.",
        evidence=[f"update is exactly 0 at steps {', '.join(map(str, table.steps[rows][-IN_A_ROW:]))}"],
        remedy=f"its parameters in its Objective, a lr_scale above 0 (adversarial.lr_scale="
        f"{history.config.get('adversarial.lr_scale', 'unknown')}), and a loss that reaches them",
        hides=["O9"] if is_alone else [],  # this says it with the reason
    )


def _is_not_felt(history: History, name: str, ratio: Series) -> Finding | None:
    if len(ratio) < 5 or ratio.median >= 1e-3:  # measured 1e-5 with a weight of 1e-5; healthy .05 to .09
        return None
    is_detached = bool(np.all(ratio.values == 0))
    what = "is exactly 0" if is_detached else f"is {ratio.median:.2g} of that of the other loss"
    weight = history.config.get("adversarial.weight")
    return Finding(
        "G2",
        "sick" if is_detached else "warn",
        f"The pull of the {name} at what is made {what}: it is as if it were not there.",
        evidence=[f"grad_ratio median {ratio.median:.3g} over steps {ratio.steps[0]} to {ratio.steps[-1]}; limit "
                  "0.001, healthy 0.05 to 0.1", f"its accuracy {_level(history, f'{name}/accuracy'):.3f}"],
        ruled_out=[] if is_detached else ["a detached output: the pull is small, not 0"],
        remedy="let the gradient through: no detach() and no torch.no_grad() between its score and what was made"
        if is_detached
        else f"a larger weight of the adversarial loss (adversarial.weight={weight}): aim at a ratio of 0.05",
        changes={"adversarial.weight": float(weight) * 0.05 / ratio.median}
        if not is_detached and isinstance(weight, float) and weight > 0 and ratio.median > 0
        else {},
    )  # fmt: skip


def _probed(history: History) -> Iterator[str]:
    """Inputs that were taken away, by name."""
    known = {name.removeprefix("probe/without_") for name in history.rows if name.startswith("probe/without_")}
    for name in sorted(known):
        is_bound = any(name.endswith(end) and name.removesuffix(end) in known for end in (LOW, HIGH))
        if not is_bound:
            yield name


def _by_horizon(measures: Mapping[str, Series]) -> dict[str, dict[int, Series]]:
    """`l1@8` -> {"l1": {8: ..}}"""
    found: dict[str, dict[int, Series]] = {}
    for full, series in measures.items():
        name, at, horizon = full.partition("@")
        if at and horizon.isdecimal():
            found.setdefault(name, {})[int(horizon)] = series
    return found


def _baseline(by_name: Mapping[str, Mapping[int, Series]], names: tuple[str, ...]) -> Mapping[int, Series]:
    """Of these guesses the one that was measured; horizons with fewer evals than needed are no baseline."""
    for name in names:
        if name in by_name:
            return {h: s for h, s in by_name[name].items() if len(s) >= IN_A_ROW}
    return {}


def _opponents(history: History) -> list[str]:
    """Objectives beyond the first that say how often they are right."""
    ending = "/accuracy"
    return [name.removesuffix(ending) for name in history.rows if name.endswith(ending)]


def _level(history: History, name: str) -> float:
    """The median of the last 100 rows that have it; NaN where there are fewer than 50 (10 for what comes rarely)."""
    series = history[name].last(WINDOW)
    return series.median if len(series) >= (10 if name == "grad_ratio" else WINDOW // 2) else float("nan")


def _progress(history: History) -> float:
    """The share of the run that is done; without a plan, of a thousand steps."""
    return history.end / _planned(history)


def _planned(history: History) -> int:
    return max(history.num_steps or 1000, 1)


def _third(history: History, key: str) -> dict[str, float]:
    value = history.config.get(key)
    return {key: float(value) / 3} if isinstance(value, int | float) and value > 0 else {}
