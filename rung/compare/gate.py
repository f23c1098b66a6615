"""What must hold before any statistics: the metric means the same, one thing was changed, every run ended healthy.

Every run of an arm must equal the first one but for the seed, and every pair of a seed must differ in exactly one
declared factor. All obstacles are listed. Unfinished runs are left out and named; runs that diverged are kept aside,
because breaking is a result but not a number.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rung.compare.align import endpoint, metric_curve, own_tail
from rung.compare.factors import Difference, change_of, compare, strictness
from rung.compare.noise import differences_but_seed, seed_of, twins
from rung.compare.reading import Curve, definition_of, fell_short, part_of, planned_targets
from rung.runs.query import Run

_TWINS = "two seeds, and the same weights and the same loss at the first step: the seed decides nothing"
_NUM_PAIRS, _NUM_FILES = 2, 4  # shown of each


@dataclass
class Gate:
    """`word` is empty where nothing stands in the way; `a` and `b` are the runs that count."""

    a: list[Run]
    b: list[Run]
    word: str = ""
    factor: str = ""
    is_aa: bool = False
    confounders: list[str] = field(default_factory=list)
    blame: list[str] = field(default_factory=list)  # what --allow would have to name for each of them
    reasons: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    diverged: dict[str, list[Run]] = field(default_factory=dict)
    curves: dict[Run, Curve] = field(default_factory=dict)
    names: dict[Run, str] = field(default_factory=dict)  # the id, or the path where two runs share one

    @property
    def seeds(self) -> list[Any]:
        """Those that both arms have, in the order of A; a run that names no seed has no partner."""
        other = {seed_of(run) for run in self.b}
        mine = dict.fromkeys(seed_of(run) for run in self.a)
        return [seed for seed in mine if seed is not None and seed in other]

    def of_seed(self, seed: Any) -> tuple[list[Run], list[Run]]:
        first, second = ([r for r in arm if seed_of(r) == seed] for arm in (self.a, self.b))
        return first, second


def identity(run: Run) -> str:
    """The same for a run and its copy in another folder."""
    return str(run.document.get("uid") or run.path.resolve())


def check_arms(a: Sequence[Run], b: Sequence[Run], metric: str, allowed: Sequence[str], declared: str | None) -> Gate:
    """INCOMPARABLE comes before CONFOUNDED: where figures mean two things, it does not matter what was changed."""
    gate = Gate([], [])
    ids = Counter(run.id for run in {str(run.path): run for run in (*a, *b)}.values())
    gate.names = {run: run.id if ids[run.id] == 1 else str(run.path) for run in (*a, *b)}
    for name, runs, kept in (("A", a, gate.a), ("B", b, gate.b)):
        for run in {identity(run): run for run in runs}.values():
            if run.status == "diverged":
                gate.diverged.setdefault(name, []).append(run)
            elif run.status != "finished":
                gate.left_out.append(f"{gate.names[run]} is not judged: {run.status_text}, at step {run.step}")
            elif (did := fell_short(run)) and "budget" not in allowed:
                gate.left_out.append(f"{gate.names[run]} is not judged: it did {did}")
            else:
                kept.append(run)
    gate.curves = {run: metric_curve(run, metric) for run in (*gate.a, *gate.b)}
    for name, kept in (("A", gate.a), ("B", gate.b)):
        for run in [run for run in kept if not all(map(math.isfinite, own_tail(gate.curves[run])))]:
            kept.remove(run)
            gate.diverged.setdefault(name, []).append(run)

    incomparable = _compare(gate, metric, allowed, declared)
    for run in (*gate.a, *gate.b):
        curve = gate.curves[run]
        if not curve.steps:
            incomparable.append(f"{gate.names[run]} has no {metric}")
        elif not own_tail(curve):
            ended = f"the last one is at step {curve.steps[-1]:g} of {run.step}"
            incomparable.append(f"{gate.names[run]} has no {metric} in the last fifth of its training: {ended}")
    for one, two in (pair for seed in gate.seeds for pair in itertools.product(*gate.of_seed(seed))):
        curves, names = [gate.curves[one], gate.curves[two]], f"{gate.names[one]} and {gate.names[two]}"
        end = endpoint(*curves)
        if end is None and all(map(own_tail, curves)):
            incomparable.append(f"{names} have no {metric} at the same step in the last fifth of training")
        elif end is not None and not math.isfinite(end.difference):
            why = f"a {metric} beside the last fifth is not finite"
            incomparable.append(f"{names} cannot be aligned at equal targets: {why}")
    if incomparable:
        gate.word, gate.reasons = "INCOMPARABLE", [*dict.fromkeys(incomparable), *gate.reasons]
        return gate

    if "sick" not in allowed:
        found = [text for run in (*gate.a, *gate.b) for text in sickness(run)]
        gate.confounders += found
        gate.blame += ["sick"] if found else []
    if gate.confounders:
        gate.word = "CONFOUNDED"
    elif not gate.diverged and not (gate.a and gate.b):
        gate.word = "UNDECIDED"
        gate.reasons.append("no finished run in one of the arms")
    for run in (*gate.a, *gate.b):
        num = sum(not math.isfinite(value) for value in gate.curves[run].values)
        if num:
            gate.reasons.append(f"{gate.names[run]} has {num} {metric} before its last fifth that are not finite")
    return gate


def _compare(gate: Gate, metric: str, allowed: Sequence[str], declared: str | None) -> list[str]:
    """Tells the gate what confounds, within the arms and across them; returns why figures cannot be compared."""
    arms = [[*kept, *gate.diverged.get(name, [])] for name, kept in (("A", gate.a), ("B", gate.b))]
    found: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    factors: list[str] = []
    incomparable: list[str] = []
    blame: dict[str, None] = {}

    def note(one: Run, two: Run, differences: Sequence[Difference]) -> None:
        counted = [definition_of(run, metric) for run in (one, two)]
        # A definition of this metric alone, which both share: then it does not matter what else its eval set counts.
        is_same_own = counted[0] == counted[1] and counted[0][0] == f"eval/{metric}"
        names = f"{gate.names[one]} and {gate.names[two]}"
        files = [d for d in differences if d.part == "code"]
        if len(files) > 1:  # one confounder, however many they are
            more = f" and {len(files) - _NUM_FILES} more" if len(files) > _NUM_FILES else ""
            detail = ", ".join(f"{d.name} {d.detail}".strip() for d in files[:_NUM_FILES]) + more
            as_one = Difference("code", f"{len(files)} files", None, None, files[0].weight, detail)
            differences = [as_one, *(d for d in differences if d.part != "code")]
        for difference in differences:
            if difference.part == "metric" and (is_same_own or not _concerns(difference, metric)):
                continue
            if difference.name in ("initial weights", "batches") and seed_of(one) is None:
                continue  # without seeds nothing is paired, and other weights are what repetitions have
            if difference.weight == "metric":
                incomparable.append(f"{metric} means something else: {_text(difference)} ({names})")
            else:
                blame[difference.name if difference.part == "config" else difference.part] = None
                values = (str(difference.before), str(difference.after)) if difference.part != "pairing" else ()
                which = (difference.part, difference.name, *values)
                found.setdefault(which, (_text(difference), []))[1].append(names)

    # Runs of one seed across the arms; where no seed is common, the first of each.
    pairs = [(x, y) for x in arms[0] for y in arms[1] if seed_of(x) is not None and seed_of(x) == seed_of(y)]
    for one, two in pairs or ([(arms[0][0], arms[1][0])] if all(arms) else []):
        strict = strictness(compare(one, two), (*allowed, "seed"), declared)
        follows = [d for d in strict.confounders if declared == "code" and d.part == "pairing"]
        note(one, two, [d for d in strict.confounders if d not in follows and not _is_same_budget(one, two, d)])
        gate.reasons += [f"follows from the code: {_text(d)}" for d in follows]
        if strict.factor and strict.factor.name == "recipe" and declared != "recipe":
            detail = "data, model and loss at once; --declare recipe if that is the change"
            note(one, two, [strict.factor._replace(detail=detail)])
        factors += [change_of(strict.factor)] if strict.factor else []
    for arm in arms:
        for other in arm[1:]:
            note(arm[0], other, differences_but_seed(arm[0], other, allowed))
        if "pairing" not in allowed:
            for one, two in twins(arm):
                note(one, two, [Difference("pairing", "seed", None, None, "hidden", _TWINS)])

    gate.reasons = list(dict.fromkeys(gate.reasons))
    gate.factor = "; ".join(dict.fromkeys(factors)) or ("none" if all(arms) and not found else "")
    gate.is_aa = gate.factor == "none"
    gate.blame = list(blame)
    for text, names in found.values():
        more = f" and {len(names) - _NUM_PAIRS} more pairs" if len(names) > _NUM_PAIRS else ""
        gate.confounders.append(f"{text} [{', '.join(names[:_NUM_PAIRS])}{more}]")
    return incomparable


def _concerns(difference: Difference, metric: str) -> bool:
    """Whether what a metric counts touches this one: another definition of another eval set does not."""
    chosen, slash, _ = metric.partition("/")
    for prefix in ("eval/", "targets of "):
        if difference.name.startswith(prefix):
            return bool(slash) and difference.name.removeprefix(prefix) in (chosen, metric)
    return difference.name in (metric, metric.rpartition("/")[2])


def _is_same_budget(a: Run, b: Run, difference: Difference) -> bool:
    """Fewer and larger steps over equal targets are one change; more targets in all are another."""
    if difference.part != "budget" or difference.name not in ("num_steps", "decay_steps"):
        return False
    targets, derived = [planned_targets(run) for run in (a, b)], [part_of(run, "derived") for run in (a, b)]
    if not targets[0] or not targets[1]:
        return False
    # A budget in targets is rounded down to whole steps, in each run by at most one.
    steps = [float(one["num_steps"]) for one in derived]
    one_step = max(total / n for total, n in zip((targets[0], targets[1]), steps))
    ends = [float(one.get("decay_steps") or 0) / n for one, n in zip(derived, steps)]
    return abs(targets[0] - targets[1]) <= one_step and abs(ends[0] - ends[1]) <= 2 / min(steps)


def sickness(run: Run) -> list[str]:
    """What the doctor finds sick or fatal in a run."""
    from rung.doctor.diagnose import diagnose
    from rung.doctor.history import read

    found = [f for f in diagnose(read(run), raises=False) if f.severity in ("sick", "fatal")]
    return [f"{run.id} is {f.severity}: {f.rule} {f.what} (`--allow sick` judges it all the same)" for f in found]


def _text(difference: Difference) -> str:
    if difference.part == "pairing":  # before and after are checksums, which tell nobody anything
        return f"{difference.part}: {difference.name} ({difference.detail})"
    text = f"{difference.part}: {change_of(difference)}"
    is_complete = difference.part == "code" or not difference.detail or difference.detail in text
    return text if is_complete else f"{text} ({difference.detail})"
