"""Rules about what the engine sees to in a recipe and nobody in a script: that weights move, that gradients are set to
zero, that the rate is the one that was planned, that evals see the weights, that the loss beats a guess.

They go by what a script logs and by what its loop shows of itself (script/observe.py), and need no further line of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import EMPTY, History, Series
from rung.doctor.rules import NotLooked, rule
from rung.doctor.rules.lookups import GOALS, listed, losses, norms

WATCH = "run.watch(model, optimizer)"
FEW_ROWS = 50  # before which nothing is said of a loop that takes no step
LOOKS = 3
SETTLED = 200  # rows after which a loss should be better than a guess
WINDOW = 100
RISING = 3  # rows in a row that make a warm-up
SWINGS = 3  # times that a rate falls and rises again; one cycle has none
ENDED = 1e-4  # of the peak: a cosine is that low in its last half per cent
SAME = 3  # evals with one value to all digits
LEARNED, BARELY = 0.7, 0.97  # of the loss of the untrained model: training came below the one, no eval below the other
EARLY = 0.02  # of the run, in which an eval is one of the untrained model
COUNTS = r"accum|micro|batch|block_size|seq|context|length"  # in names of keys
SHARED = 0.2  # of the rows of an eval set
APART, AROUND, FEW_BEFORE = 1.3, 20, 5  # times the training loss; rows whose median that is, and the fewest
LOST = 0.25  # of the numbers with a gradient that a step leaves as they are; in float32 none, whatever the rate


@rule("L1", "Weights that do not move as they should", "scan", needs=("observed",), is_for_scripts=True)
def weights_do_not_move(history: History) -> Iterator[Finding]:
    """What the observer of the loop has seen; silent where the loop updates its weights without an optimizer."""
    seen: dict[str, Any] = history.derived.get("observed") or {}
    rows, updates, looks = (int(seen.get(name) or 0) for name in ("rows", "updates", "looks"))
    tensors, moved = int(seen.get("num_tensors") or 0), int(seen.get("moved") or 0)
    still, left_out = (list(map(str, seen.get(name) or ())) for name in ("still", "left_out"))
    if rows < FEW_ROWS and updates < FEW_ROWS:
        raise NotLooked(f"{rows} rows of training are too few", f"a run of {FEW_ROWS} rows")
    if seen.get("strangers"):
        yield Finding(
            "sick",
            "the optimizer has none of the parameters of the model that is trained: all that get a gradient "
            f"({listed(left_out)}) are in no optimizer",
            since=0,
            evidence=[f"{updates} steps of an optimizer, in {rows} rows of training"],
            ruled_out=[f"an optimizer that is never called: it took {updates} steps"],
            probe="compare `id(p)` of the model's parameters with those of `optimizer.param_groups`",
            remedy="make the optimizer of the very model that gives the loss, after the last line that replaces it "
            "(a copy, `.to()` of another one, a wrapper)",
            hides=["O9"],
        )
    elif updates == 0 and tensors and not moved and looks >= LOOKS:
        yield Finding(
            "sick",
            f"optimizer.step() was never called in {rows} rows of training, and none of the {tensors} tensors that "
            "were compared has changed",
            since=0,
            evidence=[f"torch has told of no step of any optimizer; weights were compared {looks} times"],
            ruled_out=["weights that are updated by hand: they would have changed"],
            probe="print a weight before and after a step",
            remedy="call `optimizer.step()` after `loss.backward()`, in the same branch",
        )
    elif updates and tensors and not moved and looks >= LOOKS:
        rates = [rate for rate in seen.get("rates") or () if rate is not None]
        no_gradient = int(seen.get("no_gradient") or 0)
        if rates and not any(rates):
            why, remedy = "the learning rate is 0", "give the optimizer a learning rate above 0; look at its schedule"
        elif no_gradient == tensors:
            why = "no tensor of the optimizer has a gradient when it steps"
            remedy = (
                "call `loss.backward()` between `zero_grad()` and `step()`, and make the optimizer of the parameters "
                "that the loss depends on (requires_grad, detach, no_grad, another copy of the model)"
            )
        else:
            why = "there are gradients, and the updates are below the last digit of the weights, or undone"
            remedy = "raise the learning rate, keep the weights in float32, or look for code that writes old weights"
        yield Finding(
            "sick",
            f"none of the {tensors} tensors that were compared has changed in {updates} steps of the optimizer: {why}",
            since=0,
            evidence=[
                f"weights were compared {looks} times over {rows} rows of training",
                f"learning rates of the groups: {listed(rates)}" if rates else "",
                f"without a gradient: {no_gradient} of {tensors} tensors",
            ],
            ruled_out=[f"an optimizer that is never called: it took {updates} steps"],
            probe="print `[p.grad is None for p in model.parameters()]` just before `optimizer.step()`",
            remedy=remedy,
            hides=["O9"],
        )
    elif not tensors or looks < LOOKS:
        why = "no optimizer of torch has stepped" if not updates else f"weights were compared {looks} times only"
        raise NotLooked(f"{why}, and the model is not in sight" if not seen.get("is_model_known") else why, WATCH)
    elif left_out:
        yield Finding(
            "warn",
            f"{len(left_out)}{'' if len(left_out) < 20 else ' or more'} parameters get a gradient, and no optimizer "
            f"has them: {listed(left_out)}",
            since=0,
            evidence=[f"they had a gradient at a step, and none of the optimizers that stepped holds them ({updates} "
                      "steps)"],
            ruled_out=["frozen on purpose: a frozen parameter has no gradient"],
            probe="compare `model.named_parameters()` with the parameters of the optimizer's groups",
            remedy="give them to an optimizer; where they are meant to stay, set requires_grad=False: it saves their "
            "gradients",
        )  # fmt: skip
    elif still:
        yield Finding(
            "warn",
            f"{len(still)} of {tensors} tensors have gradients and have not changed at all: {listed(still)}",
            since=0,
            evidence=[f"compared {looks} times over {updates} steps of the optimizer"],
            ruled_out=["tensors without a gradient: these had one"],
            probe=f"`{WATCH}` records the size of each tensor's updates",
            remedy="look at the learning rate of their group, and whether something writes the old values back",
        )
    half: dict[str, Any] = seen.get("half") or {}
    followed, lost = int(half.get("followed") or 0), int(half.get("still") or 0)
    if moved and followed and lost > LOST * followed:
        yield Finding(
            "warn",
            f"the weights are {half.get('dtype')}, and {lost / followed:.0%} of the numbers that had a gradient stayed "
            "as they were in a step: their updates are below the last digit, and lost",
            since=0,
            evidence=[f"{lost} of {followed} numbers that were followed through a step, in the step that moved most of "
                      f"those that were followed (limit {LOST:.0%})"],
            ruled_out=["an optimizer that keeps copies in float32, or what rounding took: its state names none"],
            probe="compare a weight before and after `optimizer.step()`, to all digits",
            remedy="keep the trained weights in float32, and compute in half precision under `torch.autocast`",
            hides=["O9"],
        )  # fmt: skip
    if seen.get("accumulates"):
        yield Finding(
            "sick",
            "gradients are never set to zero: each step uses the sum of those of all steps so far",
            since=0,
            evidence=["the gradient of a tensor was followed through several steps: what was used is what came in plus "
                      "what was left of the step before"],
            ruled_out=["several backwards in a step: what came in is counted from step to step"],
            probe="print the norm of the gradients: it grows with the number of steps",
            remedy="call `optimizer.zero_grad()` once in each step, before `backward()`",
        )  # fmt: skip


@rule("L2", "A logged number that is not finite", "scan", is_for_scripts=True)
def not_finite(history: History) -> Finding | None:
    """Losses and norms are N1's and N2's. What is NaN at most rows stands for "not measured", and is info."""
    known = {*losses(history), *norms(history), "norm_clipped", "scale", "loss_scale"}
    skipped = history["skipped"]
    left_out = skipped.steps[skipped.values > 0]  # steps that were not applied: whatever they had is gone
    found: list[tuple[int, bool, str, int, int]] = []  # since, is an eval, name, how many, of how many
    for name, series in history.rows.items():
        series = Series(*(column[~np.isin(series.steps, left_out)] for column in series))
        if name not in known and series.num_bad and not name.startswith(("logits/", "probe/")):  # of the guard's own
            found.append(_bad(series, name, is_eval=False))
    for of, measures in history.evals.items():
        for name, series in measures.items():
            if series.num_bad:
                found.append(_bad(series, f"{of}/{name}", is_eval=True))
    if not found:
        return None
    placeholders = [one for one in found if not one[1] and one[3] > 0.5 * one[4] and one[3] < one[4]]
    real = [one for one in found if one not in placeholders and not _overflows_early(history, one[2])]
    first = min(real or found)
    is_eval_bad = any(one[1] for one in real)
    names = listed([f"{name} ({num} of {of})" for _, _, name, num, of in (real or found)])
    return Finding(
        ("sick" if is_eval_bad else "warn") if real else "info",
        f"not finite: {names}, first {first[2]} at step {first[0]}",
        since=first[0],
        evidence=[f"{name}: {num} of {of} values, from step {step} on" for step, _, name, num, of in found[:8]],
        ruled_out=[f"values that were not measured: {listed([p[2] for p in placeholders])}" if placeholders else ""],
        probe="compute it again from what it was made of, at that step",
        remedy="look for a division by a count of 0, the mean of nothing, a root or a logarithm of 0; a mean over "
        "steps must leave such a step out, not carry it along",
    )


def _bad(series: Series, name: str, is_eval: bool) -> tuple[int, bool, str, int, int]:
    return int(series.steps[~np.isfinite(series.values)][0]), is_eval, name, series.num_bad, len(series)


def _overflows_early(history: History, name: str) -> bool:
    """A perplexity is the exponential of a loss, and too large for a float where that is still bad."""
    series = history[name]
    of, _, measure = name.rpartition("/")
    series = series if len(series) else history.evals.get(of, {}).get(measure, EMPTY)
    is_inf = bool(np.isposinf(series.values[~np.isfinite(series.values)]).all())
    return bool(re.search(r"ppl|perplex", name, re.I)) and is_inf and bool(np.isfinite(series.values[-1:]).all())


@rule("L3", "A learning rate that does not go as planned", "scan", needs=("lr:20",), is_for_scripts=True)
def odd_rate(history: History) -> Iterator[Finding]:
    """The curve as logged, or as the optimizer's first group had it: its joints, its end, its warm-up."""
    lr = history["lr"].finite
    steps, values = lr.steps, lr.values
    if len(values) < 20:
        raise NotLooked(f"{len(values)} rates are too few", 'run.log({"lr": lr}) at each step')
    peak = float(values.max())
    curve = f"from {values[0]:.3g} at step {steps[0]}, at most {peak:.3g} at step {steps[values.argmax()]}, "
    curve += f"{values[-1]:.3g} at step {steps[-1]}"
    evidence = [f"the rate goes {curve}"]
    if peak <= 0:
        yield Finding("sick", f"the learning rate is {peak:g} at all {len(values)} rows", since=int(steps[0]),
                      evidence=evidence, remedy="look at what sets it: a schedule that divides whole numbers, a factor "
                      "of 0, a warm-up that begins at 0 and is never stepped")  # fmt: skip
        return
    is_up, is_down = np.diff(values) > 1e-12 * peak, np.diff(values) < -1e-12 * peak
    for place in range(RISING + 1, len(values)):
        before, now = float(values[place - 1]), float(values[place])
        rises = bool(is_up[place - 1 - RISING : place - 1].all())
        usual = float(np.abs(np.diff(values[place - 1 - RISING : place])).max())
        if rises and now < 0.7 * before:
            what = f"falls from {before:.3g} to {now:.3g} at step {steps[place]}, where it was rising"
        elif rises and now > 1.5 * before and now - before > 5 * usual:
            what = f"jumps from {before:.3g} to {now:.3g} at step {steps[place]}, in the middle of a slow rise"
        else:
            continue
        yield Finding(
            "warn",
            f"the learning rate {what}: two parts of the schedule do not meet",
            since=int(steps[place]),
            evidence=[*evidence, f"rates around it: {', '.join(f'{v:.3g}' for v in values[place - 3 : place + 3])}"],
            ruled_out=["steps of a schedule that lowers the rate: those come after a constant or falling rate"],
            probe="plot the schedule alone, without training",
            remedy="let the part after the warm-up begin at the rate where the warm-up ends: one base rate for both, "
            "and a step number that is counted from the same place",
        )
        return
    jumps = [
        place
        for place in range(RISING + 1, len(values))
        if values[place] > 1.5 * values[place - 1] > 0
        and not is_up[place - 1 - RISING : place - 1].any()
        and values[: place - 1].max() > 1.1 * values[place - 1]
    ]
    if jumps:
        is_meant = any(re.search(r"restart|cycl|sgdr|t_0|t_mult", f"{k}={v}", re.I) for k, v in history.config.items())
        at = [int(steps[place]) for place in jumps]
        gaps = np.diff([0, *at])
        yield Finding(
            "info" if is_meant else "warn",
            f"the learning rate starts again {len(at)} times, first at step {at[0]}: from "
            f"{values[jumps[0] - 1]:.3g} to {values[jumps[0]]:.3g}",
            since=at[0],
            evidence=[*evidence, f"at steps {listed(at)}"
                      + (f", every {gaps[0]} steps" if len(at) > 1 and np.ptp(gaps) <= 0.02 * gaps[0] else "")],
            ruled_out=["" if is_meant else "warm restarts by design: nothing in the config names restarts or cycles"],
            probe="print the rate at the first and last step of an epoch",
            remedy="make the scheduler once, before the first epoch, and give it the steps of the whole run; where "
            "restarts are meant, say so in the config",
        )  # fmt: skip
        return
    if len(again := _climbs(values)) >= SWINGS:
        is_meant = any(re.search(r"restart|cycl|sgdr|t_0|t_mult", f"{k}={v}", re.I) for k, v in history.config.items())
        at = [int(steps[place]) for place in again]
        yield Finding(
            "info" if is_meant else "warn",
            f"the learning rate goes up and down: {len(at)} times it rises again after it fell, first at step {at[0]}",
            since=at[0],
            evidence=[*evidence, f"it is half up again at steps {listed(at)}"],
            ruled_out=["" if is_meant else "cycles by design: nothing in the config names restarts or cycles"],
            probe="print the rate of the first hundred steps",
            remedy="give the schedule its horizon in the unit in which it is stepped: a cosine of so many epochs "
            "(T_max) that is stepped at each batch rises again after as many batches",
        )
        return
    num_ended = int((values[::-1] > ENDED * peak).argmax())
    if num_ended > max(FEW_ROWS, 0.1 * len(values)):
        yield Finding(
            "warn",
            f"the learning rate is next to nothing in the last {num_ended} of {len(values)} rows: its schedule ended "
            f"at step {steps[-num_ended]}, and the run did not",
            since=int(steps[-num_ended]),
            evidence=[*evidence, f"below {ENDED * peak:.2g}, a ten-thousandth of its peak (limit 10 % of the rows)"],
            ruled_out=["the end of a decay: that is so low in its last rows only"],
            probe="compare the horizon of the schedule with the number of steps",
            remedy="give the schedule the steps of the whole run; mind a scheduler that is stepped once for each micro "
            "or process",
            hides=["E1", "L4"],
        )
        return
    is_over = history.status in ("finished", "stopped")
    if is_over and len(values) >= WINDOW and values[-1] == peak and values[-1] > 1.05 * values[len(values) // 2]:
        yield Finding(
            "warn",
            f"the learning rate still rises when the run ends: the warm-up is longer than its {history.end} steps",
            since=int(steps[-1]),
            evidence=evidence,
            ruled_out=["a run that was cut short: it ended by itself" if history.status == "finished" else ""],
            probe="compare the length of the warm-up with the number of steps",
            remedy="warm up over at most a tenth of the run, and step the schedule at each update, not at each epoch",
        )
        return
    planned = _number_of(history, ("warmup_steps", "warmup_iters", "warmup", "num_warmup_steps", "n_warmup"))
    every = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    if planned and planned >= 10 * every and steps[0] <= every:
        reached = int(steps[int((values >= 0.99 * peak).argmax())])
        is_short = reached < 0.4 * planned and peak > 0
        if is_short and history.end > planned:
            yield Finding(
                "warn",
                f"a warm-up of {planned:g} steps is configured, and the learning rate is at its peak at step {reached}",
                since=reached,
                evidence=evidence,
                probe="print the rate of the first steps",
                remedy="step the schedule before or after each update, and look whether something else sets the rate",
            )
            return
    if is_over and len(values) >= WINDOW and values[-1] > 0.5 * peak and is_down[len(is_down) // 2 :].mean() > 0.9:
        yield Finding(
            "info",
            f"the run ends while the learning rate still is at {values[-1] / peak:.0%} of its peak and falls: the "
            "schedule has a longer horizon than the run",
            since=int(steps[-1]),
            evidence=evidence,
            remedy="nothing, for a schedule without an end; else give it the steps that the run has: much of what a "
            "decay gains comes at its end",
        )


def _climbs(values: np.ndarray) -> list[int]:
    """Where a rate that had fallen is up again: at 1.5 times its low, and a tenth of its peak."""
    found, high, low, peak = list[int](), float(values[0]), float("inf"), float(values.max())
    for place, value in enumerate(map(float, values)):
        if low < float("inf"):
            low = min(low, value)
            if value > max(1.5 * low, 0.1 * peak):
                found.append(place)
                high, low = value, float("inf")
        else:
            high = max(high, value)
            low = value if value < high / 1.5 else low
    return found


@rule("L4", "Evals that do not measure the weights", "scan", needs=("eval/*/loss:2",), is_for_scripts=True)
def evals_repeat(history: History) -> Iterator[Finding]:
    """One value at several evals while training moved; or two values for the weights of one step."""
    twice: dict[tuple[str, int], list[float]] = {}  # set and step -> each loss that was logged there
    for event in history.events_of("eval"):
        for of, measures in (event.get("results") or {}).items():
            if isinstance(loss := measures.get("loss"), int | float) and math.isfinite(loss):
                twice.setdefault((of, int(event.get("step") or 0)), []).append(float(loss))
    seen: dict[str, Any] = (history.derived.get("observed") or {}).get("evals") or {}
    looked, in_train_mode = int(seen.get("looked") or 0), int(seen.get("in_train_mode") or 0)
    if in_train_mode >= SAME and in_train_mode >= looked - 1:
        yield Finding(
            "warn",
            f"evals ran in training mode: before {in_train_mode} of {looked} evals no module was switched to eval "
            f"mode, and the model has {seen.get('has')}",
            since=0,
            evidence=["neither `eval()` nor `train(False)` was called since the eval before, and every such module in "
                      "sight was in training mode when the result was logged"],
            ruled_out=["a copy that always is in eval mode: none is in sight of the loop"],
            probe="evaluate twice in a row and compare",
            remedy="call `model.eval()` before each eval and `model.train()` after it: dropout is off then, and batch "
            "norm takes its running statistics and leaves them alone",
            hides=["E1", "E2"],
        )  # fmt: skip
        return
    again = {key: values for key, values in twice.items() if len(values) > 1}
    apart = {key: (max(v) - min(v)) / max(abs(v[0]), 1e-12) for key, v in again.items()}
    if apart and (worst := max(apart.values())) > 1e-3:
        (of, step), differing = next((key, again[key]) for key in again if apart[key] == worst)
        yield Finding(
            "warn",
            f"{len(differing)} evals on {of} at step {step} differ, with the same weights: "
            f"{', '.join(f'{value:.5g}' for value in differing[:4])}",
            since=step,
            evidence=[f"{len(again)} evals were repeated; they differ by up to {worst:.2%} (limit 0.1 %)"],
            probe="evaluate twice in a row and compare",
            remedy="set `model.eval()` before an eval (dropout, running statistics), and draw its rows once or with a "
            "seed of its own",
            hides=["E1", "E2"],
        )
        return
    few = not again
    for of, measures in history.evals.items():
        loss = measures.get("loss", EMPTY).finite
        if len(loss) < SAME:
            continue
        one_each = np.flatnonzero(np.append(np.diff(loss.steps) > 0, True))
        steps, values = loss.steps[one_each], loss.values[one_each]
        if len(values) < SAME:
            continue
        few = False
        changes = np.flatnonzero(np.diff(values) != 0) + 1
        first = int(changes[-1]) if len(changes) else 0
        # Where the last result is logged again at each row until there is another, each stays for a while.
        usual = int(np.diff(changes, prepend=0).max(initial=1))
        is_long = len(values) - first >= (SAME if usual == 1 else max(SAME, 2 * usual))
        if is_long and _moved(history, int(steps[first]), int(steps[-1])):
            yield Finding(
                "sick",
                f"{len(values) - first} evals on {of}, from step {steps[first]} to {steps[-1]}, gave exactly "
                f"{values[-1]:.6g}, while the training loss moved",
                since=int(steps[first]),
                evidence=[f"all digits are equal: {float(values[-1])!r}"],
                ruled_out=["a set that is easy or small: any change of the weights moves some digit"],
                probe="evaluate, take one step with a large learning rate, and evaluate again",
                remedy="evaluate the weights that are trained: not a copy made before training, an average that is "
                "never updated, a cached result, or a constant that is logged",
                hides=["L5"],
            )
            return
    if few:
        raise NotLooked(f"fewer than {SAME} evals", 'run.log({"val/loss": loss}) at five steps or more')


def _moved(history: History, first: int, last: int) -> bool:
    """Whether the training loss did not stand still over these steps."""
    loss = history["loss"].finite.between(first, last + 1)
    return len(loss) >= 10 and float(np.ptp(loss.values)) > 1e-9 * max(1.0, abs(loss.median))


@rule("L5", "Worse than guessing", "scan", needs=("baselines", "loss|eval/*/loss"), is_for_scripts=True)
def worse_than_guessing(history: History) -> Finding | None:
    """The loss against what trivial models lose, as the config or `run.data` declare it, or ln of the vocabulary."""
    baselines: dict[str, float] = history.derived.get("baselines") or {}
    train = history["loss"].finite
    if history.end < SETTLED:
        raise NotLooked(f"{history.end} steps are too few", f"a run of {SETTLED} steps")
    seen: list[tuple[str, float]] = []
    for of, measures in history.evals.items():
        if len(loss := measures.get("loss", EMPTY).finite):
            seen.append((f"the loss on {of}", float(np.median(loss.values[-3:]))))
    if len(train) >= WINDOW:
        seen.append(("the training loss", train.last(WINDOW).median))
    # Only a cross entropy in nats can be compared: one that begins near the guess of a model that knows nothing.
    uniform = baselines.get("uniform")
    if uniform and len(train) and not 0.5 * uniform < train.values[:10].max() < 30 * uniform:
        raise NotLooked(f"the loss begins at {train.values[0]:.3g}, which is no cross entropy over {uniform:.3g} nats")
    for name, baseline in sorted(baselines.items(), key=lambda pair: -pair[1]):
        limit = baseline * (0.995 if name == "uniform" else 1.05)
        worse = [(what, value) for what, value in seen if value > limit]
        if not worse:
            continue
        what, value = worse[0]
        guess = "a uniform guess" if name == "uniform" else f"the declared {name}"
        return Finding(
            "sick",
            f"{what} is {value:.4g} after {history.end} steps, not below {guess}, which loses {baseline:.4g}",
            since=SETTLED,
            evidence=[f"{what}: {value:.4g}" for what, value in seen] + [f"{guess}: {baseline:.4g}, limit {limit:.4g}"],
            ruled_out=[f"a run that has only begun: it has taken {history.end} steps (limit {SETTLED})"],
            probe="overfit one batch: the loss must go to 0",
            remedy="look for targets that do not belong to the inputs (a shift, a shuffle of one of them), another "
            "tokenizer or mask in the eval than in training, a loss in other units, or a learning rate far off",
        )
    return None


@rule("L6", "The loss does not fall", "scan", needs=("loss:100",), is_for_scripts=True)
def does_not_fall(history: History) -> Finding | None:
    """Level of the first rows against that of the last; not asked of losses that fight each other, or of rewards."""
    loss = history["loss"].finite
    if len(loss) < WINDOW:
        raise NotLooked(f"{len(loss)} losses are too few", 'run.log({"loss": loss}) at each step')
    if len(losses(history)) > 1 or any(re.search(GOALS, n) for n in history.rows):
        raise NotLooked("several losses, or rewards: their levels say little")
    start = Series(loss.steps[:20], loss.values[:20])
    end = loss.last(min(WINDOW, len(loss) // 3))
    noise = max(loss.last(3 * WINDOW).jumps.sigma / math.sqrt(2), 1e-9 * abs(start.median))
    gain = start.median - end.median
    _, evals = next(((of, m["loss"].finite) for of, m in history.evals.items() if "loss" in m), ("", EMPTY))
    if gain < -max(3 * noise, 0.02 * abs(start.median)):
        return Finding(
            "sick",
            f"the training loss rises: {start.median:.4g} in the first rows, {end.median:.4g} in the last {len(end)}",
            since=int(loss.steps[-len(end)]),
            evidence=[f"it varies by {noise:.2g} from row to row; its best was {loss.values.min():.4g} at step "
                      f"{loss.steps[loss.values.argmin()]}"],
            ruled_out=["noise: the rise is more than three times that"],
            probe="run the script again with a tenth of the learning rate",
            remedy="lower the learning rate, warm it up, clip the gradients; look at the sign of the loss",
        )  # fmt: skip
    if len(loss) < SETTLED or gain > max(0.5 * noise, 1e-3 * abs(start.median)) or end.median == 0:
        return None
    if len(evals) >= 2 and evals.values[0] - evals.values[-1] > 0.01 * abs(evals.values[0]):
        return None
    return Finding(
        "warn",
        f"the training loss has not fallen in {len(loss)} rows: {start.median:.5g} in the first, {end.median:.5g} in "
        f"the last {len(end)}",
        since=int(loss.steps[0]),
        evidence=[f"it varies by {noise:.2g} from row to row; gained {gain:.2g}"]
        + ([f"evals from {evals.values[0]:.5g} to {evals.values[-1]:.5g}"] if len(evals) else []),
        probe="train on a single batch: the loss must go to 0",
        remedy="look whether the loss depends on the weights that are trained, whether inputs and targets belong "
        "together, and try ten times the learning rate; nothing, where a model begins at the end of its training",
    )


@rule("L7", "Trained to nothing, and no use", "scan", needs=("loss:50", "eval/*/loss"), is_for_scripts=True)
def train_without_use(history: History) -> Finding | None:
    """The training loss next to nothing while the eval is no better than the untrained model."""
    loss = history["loss"].finite
    if len(loss) < FEW_ROWS:
        raise NotLooked(f"{len(loss)} losses are too few", 'run.log({"loss": loss}) at each step')
    first, last = float(loss.values[:5].max()), loss.last(20).median
    for of, measures in history.evals.items():
        evals = measures.get("loss", EMPTY).finite
        if not len(evals) or evals.steps[-1] < 0.5 * history.end:
            continue
        value = float(evals.values[-1])
        never_better = value > 0.9 * first and evals.values.min() > 0.8 * first  # else it is E2's
        if first > 0 and 0 <= last < 0.05 * first and never_better and value > 10 * last:
            return Finding(
                "sick",
                f"the training loss is {last:.3g} while the loss on {of} is {value:.4g}, no better than that of the "
                f"untrained model ({first:.4g})",
                since=int(loss.steps[int((loss.values < 0.05 * first).argmax())]),
                evidence=[f"training from {first:.4g} to {last:.3g}; {of} at {len(evals)} evals, last {value:.4g}"],
                ruled_out=["overfitting of the usual kind: an eval is better than the untrained model before it rises"
                           if value <= evals.values.min() * 1.5 else ""],
                probe=f"compute the loss of {of} on rows of the training set, with the code of the eval",
                remedy="look for targets that are equal to the inputs or are among them in training alone, and whether "
                "the eval builds its batches in another way; a set of a few rows is learned by heart just so",
                hides=["E2", "L5"],
            )  # fmt: skip
        start = float(np.median(loss.values[:5]))
        is_one = len(losses(history)) == 1 and not any(re.search(GOALS, name) for name in history.rows)
        never = len(evals) >= SAME and evals.values.min() > BARELY * max(0.0, start)
        # Far above it the eval may fall a little: by less than a quarter of what the training loss does. In other units
        # than those of training it may begin anywhere, and falls as that does.
        least = BARELY
        if never and evals.values.min() > 1.5 * start:
            then = loss.between(0, int(evals.steps[0]) + 1).last(20).median
            least = min(BARELY, 1 - max(0.0, 1 - last / then) / 4)
        never = never and evals.values[1:].min() > least * evals.values[0]
        never = never and evals.steps[0] < 0.3 * history.end
        if is_one and never and 0 < last < LEARNED * start:
            return Finding(
                "warn",
                f"the training loss fell from {start:.4g} to {last:.4g}, and the loss on {of} never was below that of "
                f"the untrained model: {evals.values.min():.4g} at best, {value:.4g} now",
                since=int(evals.steps[0]),
                evidence=[f"{len(evals)} evals on {of} from step {evals.steps[0]} to {evals.steps[-1]}: "
                          + ", ".join(f"{v:.4g}" for v in evals.values[:8])],
                ruled_out=["overfitting of the usual kind: an eval improves before it rises"],
                probe=f"compute the loss of {of} on rows of the training set, with the code of the eval",
                remedy="look whether the eval has other weights (a copy, an average that is never updated), or labels, "
                "ids or scales that differ from those of training; if not, nothing was learned but the rows by heart",
                hides=["E2", "L5"],
            )  # fmt: skip
    if not any(len(measures.get("loss", EMPTY).finite) for measures in history.evals.values()):
        raise NotLooked("no eval has a finite loss", 'run.log({"val/loss": loss})')
    return None


@rule("L8", "A key that did not reach the optimizer", "scan", needs=("observed",), is_for_scripts=True)
def key_did_not_arrive(history: History) -> Finding | None:
    differs: dict[str, Any] = (history.derived.get("observed") or {}).get("differs") or {}
    if not differs:
        return None
    said = listed([f"{key}={told:g}, the optimizer has {has:g}" for key, (told, has) in differs.items()])
    return Finding(
        "warn",
        f"the config does not say what was trained with: {said}",
        since=0,
        evidence=[f"no group of any optimizer that stepped has {key}={told:g}" for key, (told, _) in differs.items()],
        probe="print `optimizer.param_groups`",
        remedy="pass the key on to the optimizer, or take it out of the config: a comparison by it would be none",
    )


@rule("L9", "Train and eval in other units", "scan", needs=("loss", "eval/*/loss"), is_for_scripts=True)
def other_units(history: History) -> Finding | None:
    """An untrained model has one loss on any rows. Where it has two, and a count in the config lies between them, one
    of them was divided by it and the other was not."""
    loss = history["loss"].finite
    evals = {of: m["loss"].finite for of, m in history.evals.items() if len(m.get("loss", EMPTY).finite)}
    early = {of: series for of, series in evals.items() if series.steps[0] <= loss.steps[0] + EARLY * history.end}
    if len(loss) < 5 or not early:
        raise NotLooked("no eval of the untrained model", 'run.log({"val/loss": loss}) before the first step')
    if len(losses(history)) > 1:
        raise NotLooked("several losses")
    counts = {key: history.number(key) for key in history.config if re.search(COUNTS, key.rpartition(".")[2], re.I)}
    for of, series in early.items():
        ours, theirs = float(series.values[0]), float(loss.values[0])
        if ours <= 0 or theirs <= 0:
            continue
        factor = max(ours / theirs, theirs / ours)
        for key, count in counts.items():
            if count and count >= 2 and count == int(count) and abs(factor / count - 1) < 0.1:
                return Finding(
                    "warn",
                    f"the loss of the untrained model is {theirs:.4g} in training and {ours:.4g} on {of}: {factor:.3g} "
                    f"times as much, and {key} is {count:g}",
                    since=int(loss.steps[0]),
                    evidence=[f"step {loss.steps[0]} of training {theirs:.5g}; step {series.steps[0]} {of} {ours:.5g}"],
                    ruled_out=["overfitting: nothing was learned yet"],
                    probe="compute both losses on the same rows, before training",
                    remedy=f"divide both by the same count: one is a sum or a mean over {key}, as where the loss of a "
                    "micro, divided by their number, is logged as that of the step",
                    hides=["E2"],
                )  # fmt: skip
    return None


@rule("L10", "Validation rows in training", "scan", needs=("overlap",), is_for_scripts=True)
def rows_in_train(history: History) -> Iterator[Finding]:
    """Of sets that `run.data` was told as arrays: a row counts to the byte, so what is augmented is not found."""
    for of, seen in (history.derived.get("overlap") or {}).items():
        share, repeats, rows = (float(seen.get(key) or 0.0) for key in ("share", "repeats", "rows"))
        if share - repeats <= SHARED:
            continue
        yield Finding(
            "warn",
            f"{share:.0%} of {of} is in train: its loss is that of rows that were trained on",
            since=0,
            evidence=[f"{share:.1%} of {rows:.0f} rows or spans of 32 values are in train, to the byte; of train's own "
                      f"{repeats:.1%} repeat (limit {SHARED:.0%} above that)"],
            ruled_out=[f"data that repeats itself: only {repeats:.1%} of train's own rows do"],
            probe=f"look for the first rows of {of} in train",
            remedy="split before anything else is done with the rows, by document or recording; and keep the rows of "
            f"{of} out of train",
            hides=["E2"],
        )  # fmt: skip


@rule("L11", "Train and eval apart from the start", "scan", needs=("loss", "eval/*/loss"), is_for_scripts=True)
def apart_from_the_start(history: History) -> Finding | None:
    """In the first epoch nothing is learned by heart: a row loses in training what it would lose in an eval, or more
    (dropout, augmentation). Where the eval loses much more, it is of other targets, or prepared in another way."""
    loss, gaps = history["loss"].finite, list[tuple[str, int, float, float]]()
    is_known, has_looked = math.isfinite(history.steps_per_epoch), False
    for of, measures in history.evals.items():
        evals = measures.get("loss", EMPTY).finite
        before = [(int(step), float(value), loss.between(0, int(step) + 1)) for step, value in zip(*evals, strict=True)]
        before = [one for one in before if len(one[2]) >= FEW_BEFORE]
        first = [one for one in before if one[0] <= history.steps_per_epoch] if is_known else before[:2]
        # Two early evals can show a gap; one that is close to training, whenever it came, shows that there is none.
        is_near = any(value <= APART * train.last(AROUND).median for _, value, train in before)
        has_looked = has_looked or len(first) >= 2 or is_near
        found = []
        for step, value, train in first:
            near = train.last(AROUND)
            error = near.sigma / math.sqrt(len(near))
            if near.median > 0 and value > APART * near.median and value - near.median > 6 * error:
                found.append((of, step, near.median, value))
        # An average of the weights lags behind them, and catches up.
        if len(found) == len(first) >= 2 and found[-1][3] / found[-1][2] > 0.7 * found[0][3] / found[0][2]:
            gaps += found
    if not has_looked:
        raise NotLooked(
            "there are fewer than two evals in the first epoch with training losses before them",
            'run.log({"loss": loss}) at each step, and two evals in the first epoch',
        )
    if not gaps:
        return None
    of, step, ours, theirs = gaps[-1]
    what = f"the loss on {of} is {theirs / ours:.3g} times that of training from the start: {theirs:.4g} against "
    what += f"{ours:.4g} at step {step}"
    if len(losses(history)) > 1 or any(re.search(GOALS, name) for name in history.rows):
        raise NotLooked(f"{what}; with several losses, or rewards, they may be of other things")
    if not is_known:
        raise NotLooked(
            f"{what}; in the first epoch that would be a fault, and nobody knows when it ends",
            'run.data("train", rows) and run.rows(ids) at each step',
        )
    return Finding(
        "warn",
        f"{what}, when no row had been seen twice",
        since=gaps[0][1],
        evidence=[f"step {step}: training {ours:.4g} (median of {AROUND} rows), {of} {theirs:.4g}: "
                  f"{theirs / ours:.3g} times (limit {APART:g})" for of, step, ours, theirs in gaps[:6]],
        ruled_out=[f"rows that were learned by heart: an epoch has {history.steps_per_epoch:.0f} steps"],
        probe=f"compute the loss of training and that of {of} on the same rows, with the same weights",
        remedy=f"look whether both count the same targets (padding, a mask, special tokens), and whether {of} has the "
        "vocabulary, labels and scale of training; nothing, where it is meant to be harder",
        hides=["E2", "L9"],
    )  # fmt: skip


def _number_of(history: History, names: tuple[str, ...]) -> float | None:
    """The first key of the config with such a name, wherever it lies, that holds a number."""
    found = (history.number(key) for key in history.config if key.rpartition(".")[2].lower() in names)
    return next((value for value in found if value is not None), None)
