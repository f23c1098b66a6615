"""Asks a failed step the questions, in their order, and hands the answers to the judge.

Each question is one or a few tries of the step under other conditions. A question that cannot be asked here (no GPU, no
compiler, no older weights, a model that has no float64) is noted as such and never guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from rung.engine.guarded import ObjectiveState
from rung.engine.op_tracer import OpTracer
from rung.engine.prefetch import Micro
from rung.forensics.autopsy import Autopsy, autopsy, implementations
from rung.forensics.first import is_finite
from rung.forensics.rerun import EAGER, Conditions, Rerun, Try, Weights
from rung.forensics.samples import SameFailure, find_samples
from rung.forensics.verdict import Answers, Verdict, judge
from rung.robust import median, sigma

Report = Callable[[str], None]
NUM_TRIES = 10  # before a failure is called transient
NUM_OTHERS = 8  # batches
FAR = 20.0  # robust sigmas of other batches from which a value is worth a word


def examine(
    rerun: Rerun, error: str = "", not_tested: list[str] | None = None, report: Report = lambda text: None
) -> Verdict:
    """Why the step failed. `error` is what it raised when it was recorded, if it did."""
    a = Answers(rerun.step, rerun.dtype, rerun.device.type, rerun.is_compiled, error, not_tested=[*(not_tested or ())])
    a.bad_weights, a.bad_state = rerun.bad_weights, rerun.bad_state
    if rerun.micros:
        report("taking the step again, as it was recorded")
        _again(rerun, a)
    if a.bad_weights and rerun.first_broken is not None:
        report("taking the steps before it again, to see when the weights broke")
        a.broken = rerun.first_broken()
    if a.failed is None:
        return judge(a)
    number = a.failed.number
    if number is not None:
        rank, a.micro = rerun.place_of(number)
        a.rank = rank if max(rerun.ranks) > 0 else None
    if a.failed.place in ("weights", "state"):
        if not a.bad_weights and not a.bad_state:  # or it is not this update that broke them
            a.autopsy = look_at_update(rerun, a.failed)
        return judge(a)
    if number is None:
        if a.failed.place == "sum":
            _climb(rerun, a, rerun.micros)
        return judge(a)
    micro = rerun.micros[number]
    objective = next(o for o in rerun.objectives if o.name == a.failed.objective)
    report("looking for the first operation")
    a.found = rerun.first(micro, objective)
    if a.bad_weights or a.bad_state:
        return judge(a)
    _look_at_batch(rerun, a, micro, objective)
    if a.failed.place != "error":
        report("trying other precisions and devices")
        _climb(rerun, a, [micro])
    if judge(a).origin in ("COMPILER", "PRECISION", "DEVICE"):
        return judge(a)
    # What is compared from here on is eager, and compiled code puts its errors in words of its own.
    eager = rerun.take(EAGER, [micro]) if a.is_compiled else a.failed
    same_failure = SameFailure(eager if eager.fails else a.failed)
    report("looking for the sample")
    if a.is_empty:
        a.samples, a.num_rows = micro.ids.tolist(), len(micro.ids)
    else:
        find_samples(rerun, a, micro, same_failure)
    report("trying other batches and older weights")
    _counterfactuals(rerun, a, number, same_failure)
    return judge(a)


def _again(rerun: Rerun, a: Answers) -> None:
    """Twice; and if neither fails, more often."""
    conditions = Conditions(is_compiled=rerun.is_compiled)
    for number in range(NUM_TRIES):
        tried = rerun.take(conditions, with_update=True)
        if (
            conditions.is_compiled and tried.place == "error" and not a.error
        ):  # of the compiler itself, say: there is none here
            a.not_tested.append(f"compiled: {tried.error[:160]}")
            a.is_compiled, conditions = False, EAGER
            tried = rerun.take(conditions, with_update=True)
        a.num_tries += 1
        a.num_failed += tried.fails
        a.failed = a.failed or (tried if tried.fails else None)
        if number >= 1 and a.failed is not None:
            return


def look_at_update(rerun: Rerun, failed: Try) -> Autopsy | None:
    """The first tensor that the update breaks, element by element; nothing stays changed."""
    named = dict(rerun.model.named_parameters())
    bad = [name for name in named if any(name == t or t.endswith(f" of {name}") for t in failed.tensors)]
    if not bad:
        return None
    parameter = named[bad[0]]
    optimizers = [optimizer for objective in rerun.due for optimizer in objective.optimizers]
    owner = next((o for o in optimizers if any(p is parameter for g in o.param_groups for p in g["params"])), None)
    if owner is None:  # frozen: no update has touched it
        return None
    with rerun.undone():
        before = parameter.detach().clone()
        rerun.update(failed.gradients)
        gradient = failed.gradients.get(parameter, torch.zeros_like(before))
        found = autopsy(bad[0], parameter, before, gradient, owner)

    def is_fine() -> bool:
        with rerun.undone():
            return not any(rerun.update(failed.gradients))

    return found._replace(fine=implementations(optimizers, is_fine))


def _look_at_batch(rerun: Rerun, a: Answers, micro: Micro, objective: ObjectiveState) -> None:
    """Numbers that are not finite, ids outside of their tables, no targets, values far outside of the others."""
    for name, tensor in micro.batch.items():
        if not is_finite(tensor):
            num_bad = int((~torch.isfinite(tensor)).sum())
            a.batch.append(f"{num_bad} of {tensor.numel()} values of {name} are not finite")
    assert a.failed is not None
    counts = a.failed.counts
    with rerun.undone(), torch.compiler.set_stance("force_eager"), torch.no_grad(), OpTracer(rerun.model) as tracer:
        try:
            batch = {name: tensor.to(rerun.device, copy=True) for name, tensor in micro.batch.items()}
            rerun.seed(objective, micro)
            with rerun.precision.autocast():
                objective.plain_loss(batch, micro.draw)
        except Exception:  # what it raised is known; what it was given until then is what we want
            pass
    for lookup in tracer.lookups:
        low, high = (int(lookup.ids.min()), int(lookup.ids.max())) if lookup.ids.numel() else (0, 0)
        if low < 0 or high >= lookup.num_rows:
            a.is_out_of_range = True
            a.batch.append(
                f"ids from {low} to {high} are looked up in {lookup.module}, which has {lookup.num_rows} rows"
            )
    targets = [(j.targets != j.ignore_index) for j in tracer.loss_calls if j.ignore_index is not None]
    a.is_empty = bool(targets and not any(bool(t.any()) for t in targets)) or bool(counts and counts[-1] == 0)
    if a.is_empty:
        a.batch.append(f"none of its {sum(t.numel() for t in targets) or 'targets'} targets counts")


def _climb(rerun: Rerun, a: Answers, micros: list[Micro]) -> None:
    """The ladder of precisions, devices and compilation, on the least that fails."""
    ladder = {"eager": EAGER} if a.is_compiled else {}
    ladder |= {"float32": Conditions("float32")} if a.dtype != "float32" else {}
    ladder |= {"bfloat16": Conditions("bfloat16")} if a.dtype == "float16" else {}
    ladder |= {"float32 on cpu": Conditions("float32", "cpu")} if a.device != "cpu" else {}
    ladder |= {"float64 on cpu": Conditions("float64", "cpu")}
    for name, conditions in ladder.items():
        tried = rerun.take(conditions, micros)
        if tried.place == "error":  # not every model has every kernel
            a.not_tested.append(f"{name}: {tried.error[:160]}")
        else:
            a.ladder[name] = tried.fails


def _counterfactuals(rerun: Rerun, a: Answers, number: int, same_failure: SameFailure) -> None:
    if rerun.other_batches is None:
        a.not_tested.append("other batches: none available")
    else:
        _try_other_batches(rerun, a, number, same_failure, rerun.other_batches())
    is_asked = False
    for name, weights in rerun.older_weights() if rerun.older_weights is not None else ():
        is_asked = True
        tried = rerun.take(EAGER, [rerun.micros[number]], weights)
        fails = same_failure(tried)
        if fails is None:
            a.not_tested.append(f"{name}: {tried.error[:160] or 'they fail in another way'}")
            continue
        a.older = (name, fails)
        if not fails:
            a.growth = _growth(rerun, weights, name)
            return
    if not is_asked and a.step > 0:
        a.not_tested.append("older weights: none available")


def _try_other_batches(
    rerun: Rerun, a: Answers, number: int, same_failure: SameFailure, batches: Iterable[list[Micro]]
) -> None:
    """These weights with rows that are not to blame."""
    guilty, outcomes, seen = set(a.samples), [], []
    others: Counter[str] = Counter()  # failures of another kind
    for micros in batches:
        if number < len(micros) and not guilty & set(micros[number].ids.tolist()):
            tried = rerun.take(EAGER, [micros[number]])
            fails = same_failure(tried)
            if fails is None:
                others[tried.error[:160] or "it fails in another way"] += 1
                continue
            outcomes.append(fails)
            seen.append(micros[number])
        if len(outcomes) == NUM_OTHERS:
            break
    a.others = (sum(outcomes), len(outcomes)) if outcomes else None
    a.not_tested += [f"{count} of the other batches: {why}" for why, count in others.items()]
    if not outcomes and not others:
        a.not_tested.append("other batches: all have the same rows")
    a.batch += _outliers(rerun.micros[number], seen)


def _growth(rerun: Rerun, older: Weights, when: str) -> str:
    """The weight that grew most, where it is enough to explain something."""
    grown = {
        name: float(p.detach().abs().max()) / max(float(older[name].abs().max()), 1e-30)
        for name, p in rerun.model.named_parameters()
        if name in older and p.numel()
    }
    name = max(grown, key=lambda n: grown[n], default="")
    return f"the largest of {name} is {grown[name]:.3g} times as large as in {when}" if grown.get(name, 0) > 10 else ""


def _outliers(micro: Micro, others: list[Micro]) -> list[str]:
    said = []
    for name, tensor in micro.batch.items():
        if not tensor.is_floating_point() or not others or not is_finite(tensor) or not tensor.numel():
            continue
        usual = [float(v) for m in others for v in (m.batch[name].abs().max(),) if m.batch[name].numel()]
        largest, scale = float(tensor.abs().max()), max(sigma(usual), 1e-12) if usual else math.inf
        score = (largest - median(usual)) / scale if usual else 0.0
        if score > FAR and largest > 2 * median(usual):
            said.append(f"the largest of {name} is {largest:.4g}; in other batches it is {median(usual):.4g}")
    return said
