"""Asks a failed step the questions, in their order, and hands the answers to the judge.

Each question is one or a few tries of the step under other conditions. A question that cannot be asked here (no GPU, no
compiler, no older weights, a model that has no float64) is noted as such and never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from rung.engine.guarded import ObjectiveState
from rung.engine.op_tracer import OpTracer
from rung.engine.prefetch import Micro
from rung.forensics.autopsy import autopsy
from rung.forensics.first import is_finite
from rung.forensics.rerun import EAGER, Conditions, Rerun, Trial, Try, rows_of, with_size_one
from rung.forensics.rivals import blown_up, loud_inputs, loud_weights, small_moments, state_faults
from rung.forensics.verdict import Answers, Broken, Verdict, judge, may_have_rivals
from rung.robust import median, sigma

Report = Callable[[str], None]
NUM_TRIES = 10  # before a failure is called transient
NUM_OTHERS = 8  # batches
MOST_SAMPLES = 4
FAR = 20.0  # robust sigmas of other batches from which a value is worth a word


def examine(
    rerun: Rerun,
    error: str = "",
    not_tested: list[str] | None = None,
    report: Report = lambda text: None,
    first_broken: Callable[[], Broken | None] | None = None,
) -> Verdict:
    """Why the step failed.

    `error` is what it raised when it was recorded, if it did. `first_broken` finds the step that broke the weights.
    """
    a = Answers(rerun.step, rerun.dtype, rerun.device.type, rerun.is_compiled, error, not_tested=[*(not_tested or ())])
    a.bad_weights, a.bad_state = rerun.bad_weights, rerun.bad_state
    verdict = _ask(rerun, a, report, first_broken)
    if not may_have_rivals(verdict, a):
        return verdict
    report("weighing what may have been wrong before the step")
    _weigh_rivals(rerun, a)
    return judge(a)


def _ask(rerun: Rerun, a: Answers, report: Report, first_broken: Callable[[], Broken | None] | None) -> Verdict:
    """The questions about the step itself."""
    if rerun.micros:
        report("taking the step again, as it was recorded")
        conditions = Conditions(is_compiled=rerun.is_compiled)
        while a.num_tries < 2 or (a.failed is None and a.num_tries < NUM_TRIES):
            tried = rerun.take(conditions, with_update=True)
            # An error that was not recorded may be the compiler's own: there is none here, say.
            if conditions.is_compiled and tried.place == "error" and not a.error:
                a.not_tested.append(f"compiled: {tried.error[:160]}")
                a.is_compiled, conditions = False, EAGER
                tried = rerun.take(conditions, with_update=True)
            a.num_tries += 1
            a.num_failed += tried.fails
            a.failed = a.failed or (tried if tried.fails else None)
    if a.bad_weights and first_broken is not None:
        report("taking the steps before it again, to see when the weights broke")
        a.broken = first_broken()
    if a.failed is None:
        return judge(a)
    number = a.failed.number
    if number is not None:
        rank = rerun.ranks[number]
        a.micro = number - rerun.ranks.index(rank)
        a.rank = rank if max(rerun.ranks) > 0 else None
    if a.failed.place in ("weights", "state"):
        if not a.bad_weights and not a.bad_state:  # or it is not this update that broke them
            a.autopsy = autopsy(rerun, a.failed)
        return judge(a)
    if number is None:
        if a.failed.place == "sum":
            _try_other_conditions(rerun, a, rerun.micros)
        return judge(a)
    micro = rerun.micros[number]
    objective = next(o for o in rerun.objectives if o.name == a.failed.objective)
    report("looking for the first operation")
    a.found = rerun.first(micro, objective)
    if a.bad_weights or a.bad_state:
        return judge(a)
    _look_at_batch(rerun, a, a.failed, micro, objective)
    if a.failed.place != "error":
        report("trying other precisions and devices")
        _try_other_conditions(rerun, a, [micro])
    verdict = judge(a)
    if verdict.origin in ("COMPILER", "PRECISION", "DEVICE"):
        return verdict
    # What is compared from here on is eager, and compiled code puts its errors in words of its own.
    eager = rerun.take(EAGER, [micro]) if a.is_compiled else a.failed
    failed = eager if eager.fails else a.failed
    report("looking for the sample")
    if a.is_empty:
        a.samples, a.num_rows = micro.ids.tolist(), len(micro.ids)
    else:
        _find_samples(rerun, a, micro, failed)
    report("trying other batches and older weights")
    _try_other_batches(rerun, a, number, failed)
    _try_older_weights(rerun, a, micro, failed)
    return judge(a)


def _weigh_rivals(rerun: Rerun, a: Answers) -> None:
    """What may have been wrong before the step, and whether the step passes without it."""
    optimizers = [optimizer for objective in rerun.objectives for optimizer in objective.optimizers]
    a.lr = max((float(group["lr"]) for o in optimizers for group in o.param_groups), default=0.0)
    a.lr = rerun.lr if rerun.lr is not None else a.lr
    a.is_adam = any("exp_avg_sq" in state for o in optimizers for state in o.state.values())
    history = rerun.history() if rerun.history is not None else None
    a.state_faults = state_faults(rerun.model.named_parameters(), optimizers)
    a.small_moments = small_moments(optimizers)
    first = None
    for when, weights in rerun.older_weights() if rerun.older_weights is not None else ():
        first = weights if when.endswith("of the beginning") else first
    a.signs = blown_up(rerun.model, history, a.step, first)
    number = a.failed.number if a.failed is not None and a.failed.number is not None else 0
    micros = [rerun.micros[number]] if rerun.micros else []
    a.loud_inputs = loud_inputs(micros[0].batch) if micros else {}
    for others in rerun.other_batches() if a.loud_inputs and rerun.other_batches is not None else ():
        usual = loud_inputs(others[min(number, len(others) - 1)].batch)
        a.loud_inputs = {name: rms for name, rms in a.loud_inputs.items() if name in usual}  # or it is this batch only
    if a.loud_inputs and rerun.rescaled is not None:
        a.rescaled = rerun.rescaled(a.loud_inputs)
    if a.loud_inputs and a.rescaled is None and not a.bad_weights and not a.bad_state:
        names = ", ".join(f"input {name}" if name.isdecimal() else name for name in a.loud_inputs)
        tried = rerun.take(EAGER, [with_size_one(micro, a.loud_inputs) for micro in rerun.micros])
        if not (tried.fails and a.signs):  # after weights were blown up it is too late for other inputs
            a.rescaled = Trial(f"the step with {names} divided by its rms", tried.fails)
    if a.signs and rerun.slower is not None:
        a.slower = rerun.slower()
    if not a.signs and not a.bad_weights and not a.bad_state and micros:
        a.loud_weights = loud_weights(rerun.model)
        if a.loud_weights:
            small = {name: p.detach() / a.loud_weights[name] for name, p in rerun.model.named_parameters()
                     if name in a.loud_weights}  # fmt: skip
            tried = rerun.take(EAGER, micros, small)
            a.smaller = Trial("the step with these weights scaled to a gain of 1", tried.fails)


def _look_at_batch(rerun: Rerun, a: Answers, failed: Try, micro: Micro, objective: ObjectiveState) -> None:
    """Numbers that are not finite, ids outside of their tables, no targets."""
    for name, tensor in micro.batch.items():
        if not is_finite(tensor):
            num_bad = int((~torch.isfinite(tensor)).sum())
            a.batch.append(f"{num_bad} of {tensor.numel()} values of {name} are not finite")
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
    counted = [(call.targets != call.ignore_index) for call in tracer.loss_calls if call.ignore_index is not None]
    has_no_target = bool(counted) and not any(bool(is_counted.any()) for is_counted in counted)
    a.is_empty = has_no_target or bool(failed.counts and failed.counts[-1] == 0)
    if a.is_empty:
        a.batch.append(f"none of its {sum(t.numel() for t in counted) or 'targets'} targets counts")


def _try_other_conditions(rerun: Rerun, a: Answers, micros: list[Micro]) -> None:
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


def _fails_alike(tried: Try, failed: Try) -> bool | None:
    """Whether a try fails as that one did. None: it fails in another way, and answers nothing."""
    if not tried.fails or "error" not in (tried.place, failed.place):
        return tried.fails
    # What an error says whichever the row: without numbers, lists of them, and what it quotes.
    odd = r"'[^']*'|\"[^\"]*\"|\b0x\w+|[-+]?\d[\d.]*(e[-+]?\d+)?|\b(nan|inf)\b"
    kinds = [re.sub(r"#(,? #)*", "#", re.sub(odd, "#", error)) for error in (tried.error, failed.error)]
    return True if tried.place == failed.place and kinds[0] == kinds[1] else None


def _find_samples(rerun: Rerun, a: Answers, micro: Micro, failed: Try) -> None:
    """The rows without which the micro passes, one after the other, by halving.

    Rows fail when they fail as the whole micro does. A try that fails in another way says nothing of its rows: a model
    that does not take so few of them (batch statistics want two) raises something of its own. Such rows are tried in
    company.
    """

    def fails(rows: np.ndarray) -> bool | None:
        """As the micro does; None where these rows cannot be tried."""
        return _fails_alike(rerun.take(EAGER, [rows_of(micro, rows)]), failed) if len(rows) else False

    def outcomes(groups: list[np.ndarray]) -> list[bool | None]:
        """Up to the first that fails."""
        found: list[bool | None] = []
        while len(found) < len(groups) and True not in found:
            found.append(fails(groups[len(found)]))
        return found

    rest, how, is_stuck = np.arange(len(micro.ids)), "alone", False
    a.num_rows = len(rest)
    while does_fail := fails(rest):
        if len(a.samples) == MOST_SAMPLES or a.cut == "together":
            break
        # Halved until one row fails by itself, it takes several together, or fewer cannot be tried.
        rows = rest
        while len(rows) > 1:
            halves = np.array_split(rows, 2)
            half_fails = outcomes(halves)
            if True not in half_fails and None in half_fails:
                is_stuck = True
                company = rest[~np.isin(rest, rows)]
                if len(company) and fails(company) is False:
                    half_fails = outcomes([np.sort(np.concatenate([company, half])) for half in halves])
                else:
                    half_fails = [fails(np.repeat(half, 2)) for half in halves]
                    if False not in half_fails:  # nothing shows that a row may stand beside itself
                        break
                if True in half_fails:
                    how, is_stuck = "in company (fewer cannot be tried)", False
            if True not in half_fails:
                break
            rows = halves[half_fails.index(True)]
        if 1 < len(rows) == a.num_rows:  # which names nobody
            a.not_tested += ["the sample: the model does not take fewer rows"] if is_stuck else []
            return
        a.samples += micro.ids[rows].tolist()
        a.cut = "together" if len(rows) > 1 else how
        rest = rest[~np.isin(rest, rows)]
    a.rest_fails = does_fail


def _try_other_batches(rerun: Rerun, a: Answers, number: int, failed: Try) -> None:
    """These weights with rows that are not to blame; and whether values of this batch are far outside of theirs."""
    if rerun.other_batches is None:
        a.not_tested.append("other batches: none available")
        return
    guilty, outcomes, others = set(a.samples), [], []
    other_failures: Counter[str] = Counter()
    for micros in rerun.other_batches():
        if number < len(micros) and not guilty & set(micros[number].ids.tolist()):
            tried = rerun.take(EAGER, [micros[number]])
            fails = _fails_alike(tried, failed)
            if fails is None:
                other_failures[tried.error[:160] or "it fails in another way"] += 1
                continue
            outcomes.append(fails)
            others.append(micros[number])
        if len(outcomes) == NUM_OTHERS:
            break
    a.others = (sum(outcomes), len(outcomes)) if outcomes else None
    a.not_tested += [f"{count} of the other batches: {why}" for why, count in other_failures.items()]
    if not outcomes and not other_failures:
        a.not_tested.append("other batches: all have the same rows")
    for name, tensor in rerun.micros[number].batch.items():
        if not tensor.is_floating_point() or not tensor.numel() or not is_finite(tensor):
            continue
        usual = [float(other.batch[name].abs().max()) for other in others if other.batch[name].numel()]
        if not usual:
            continue
        largest = float(tensor.abs().max())
        score = (largest - median(usual)) / max(sigma(usual), 1e-12)
        if score > FAR and largest > 2 * median(usual):
            a.batch.append(f"the largest of {name} is {largest:.4g}; in other batches it is {median(usual):.4g}")


def _try_older_weights(rerun: Rerun, a: Answers, micro: Micro, failed: Try) -> None:
    """This batch with earlier weights, until it passes with some; and which weight grew much since then."""
    is_asked = False
    for when, weights in rerun.older_weights() if rerun.older_weights is not None else ():
        is_asked = True
        tried = rerun.take(EAGER, [micro], weights)
        fails = _fails_alike(tried, failed)
        if fails is None:
            a.not_tested.append(f"{when}: {tried.error[:160] or 'they fail in another way'}")
            continue
        a.older = (when, fails)
        if fails:
            continue
        grown = {
            name: float(p.detach().abs().max()) / max(float(weights[name].abs().max()), 1e-30)
            for name, p in rerun.model.named_parameters()
            if name in weights and p.numel()
        }
        name = max(grown, key=lambda n: grown[n], default="")
        if grown.get(name, 0) > 10:
            a.growth = f"the largest of {name} is {grown[name]:.3g} times as large as in {when}"
        return
    if not is_asked and a.step > 0:
        a.not_tested.append("older weights: none available")
