"""Whether the record of a run can be trusted: keys without effect, uncommitted code, ranks that drifted apart, a resume
that did not continue the run, losses that lost their digits.

A resume is judged by the steps that were taken twice: before the stop, and again after the save. Both are recorded, and
on one CPU they must agree to the last digit. No curve shows a resume that dropped the optimizer's state: the loss of
its first step is equal to all digits, and that of the second is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import listed

WITNESSES = 3  # steps after a resume to compare where arithmetic is not exact: differences grow with each
RECOMPUTED = ("system.", "ddp.", "data.batch_size", "optimizer.gradient_accumulation_steps")  # sums in another order
CAUSES = {  # why a resume did not continue, and the remedy
    "batch_hash": ("it takes other rows", "the data or its order has changed since the save: compare the fingerprints "
                   "of the data; Stream.ids must depend on its arguments alone"),
    "lr": ("it has another learning rate", "the schedule must depend on the step alone: look for a horizon that "
           "changed with the resume"),
    "weights": ("it has other weights or other random numbers", "look for a buffer or parameter that is not saved with "
                "the model (persistent=False), and for random numbers that do not come from `draw`"),
    "updates": ("it begins with the same weights and updates them differently", "look for state of the optimizer or of "
                "the model that is not saved: moments, step counts, buffers that a step changes"),
}  # fmt: skip


@rule("R1", "Keys that nothing reads", "scan", needs=("unread_keys|recipe",))
def unread_keys(history: History) -> Finding | None:
    events = history.events_of("unread_keys")
    keys = [str(key) for key in events[-1].get("keys") or []] if events else []
    if not keys:
        return None
    many = len(keys) > 1
    return Finding(
        "warn",
        f"{listed(keys)} {'have' if many else 'has'} no effect: nothing has read {'them' if many else 'it'}.",
        since=events[-1].get("step"),
        evidence=[f"{key} = {history.config.get(key, 'unknown')}" for key in keys[:5]],
        probe="change the value: the losses stay equal to all digits",
        remedy="spell the key as the code that should read it does, or remove it; keys that only samples read are fine",
    )


@rule("R2", "Code that was not committed", "scan", needs=("code",))
def uncommitted(history: History) -> Finding | None:
    events = history.events_of("code")
    if not events or not events[-1].get("dirty"):
        return None
    changed = [str(name) for name in events[-1].get("changed") or []]
    # Info, because the exact tree, uncommitted files included, is kept with the run.
    return Finding(
        "info",
        f"{events[-1].get('num_changed') or len(changed)} files were not committed when the run was started.",
        evidence=[f"changed: {', '.join(changed[:8])}{' ..' if len(changed) > 8 else ''}"],
        ruled_out=[f"lost code: the tree is kept with the run (`rung show {history.run_id or 'RUN'}` says where)"],
        remedy="commit before runs that others should repeat; a diff of two runs shows how their code differs",
    )


@rule("R3", "Ranks have different weights", "scan", needs=("ranks_differ|num_ranks",))
def ranks_differ(history: History) -> Finding | None:
    events = history.events_of("ranks_differ")
    if not events:
        return None
    tensors = [str(name) for name in events[0].get("tensors") or []]
    return Finding(
        "sick",
        f"At step {events[0].get('step')} the ranks no longer had the same weights"
        + (f", in {len(tensors)} tensors." if tensors else "."),
        since=events[0].get("step"),
        evidence=[f"first {', '.join(tensors[:5])}"] if tensors else [],
        ruled_out=["rounding: the weights are compared by a hash of their bytes, and every rank adds the same numbers"],
        probe="train with system.deterministic=true, and with each rank on another device",
        remedy="look for a parameter that one rank updates alone, a buffer that is not exchanged, or a faulty device; "
        "then go back to a save before this step",
    )


@rule("R4", "A resume that did not continue", "scan")
def resume_differs(history: History) -> Finding | None:
    """Steps that were taken before a stop and again after the resume: batch_hash, lr, loss and norm of both."""
    for first, steps in _stretches(history):
        # On one CPU numbers are added in the same order, unless a key changes that. Else the tolerance is ten times
        # what another order changes in the mean of a step; estimated, not measured.
        args = [str(a) for e in history.events_of("resume") if e.get("step") == first for a in e.get("overrides") or []]
        is_cpu = str(history.derived.get("device", "cpu")).startswith("cpu")
        exact = is_cpu and int(history.derived.get("num_ranks") or 1) == 1
        exact = exact and not any(arg.startswith(RECOMPUTED) for arg in args)
        rounding = 1e-5 if str(history.derived.get("dtype", "")).endswith("float32") else 1e-3
        tolerance = 0.0 if exact else rounding
        pairs = []
        for step in steps if exact else steps[:WITNESSES]:
            rows = {name: history[name].between(step, step + 1).values for name in ("batch_hash", "lr", "loss", "norm")}
            after = {name: float(values[0]) for name, values in rows.items() if len(values)}
            earlier = [row for row in history.superseded[step] if "loss" in row]
            if earlier and "loss" in after:
                pairs.append(Pair(step, earlier[-1], after))
        # What differs first, in the order in which one thing causes the next.
        limits = {"batch_hash": 0.0, "lr": 1e-9, "loss": tolerance, "norm": tolerance}
        differing = ((name, pair) for name, limit in limits.items() for pair in pairs if pair.differs(name, limit))
        name, bad = next(differing, ("", None))
        if bad is None:
            continue
        likely, remedy = CAUSES[name if name in CAUSES else "weights" if bad.step == first else "updates"]
        return Finding(
            "sick",
            f"The resume at step {first} did not continue the run that was stopped: {likely}.",
            since=first,
            evidence=[
                f"{name} at step {bad.step}: {_digits(bad.before[name])} before, {_digits(bad.after[name])} now",
                f"{len(pairs)} steps were taken twice; tolerance {tolerance:g}"
                + (" (one CPU: all digits)" if exact else " relative: sums are not added in the same order each time"),
            ],
            ruled_out=_equal(pairs, first, tolerance, name),
            probe="resume the same save twice and compare: if these differ too, the arithmetic is not deterministic",
            remedy=remedy,
        )
    return None


@rule("R5", "A loss without digits", needs=("loss",))
def telemetry_blind(history: History) -> Finding | None:
    """A summed loss with few significant bits over the last 100 steps, or a loss that never changes."""
    loss, targets = history["loss"].finite.last(WINDOW), history["targets"]
    if len(loss) < WINDOW // 2:
        return None
    norm = history["norm"].finite.last(WINDOW)
    if np.ptp(loss.values) == 0 and len(norm) and np.ptp(norm.values) > 0:
        return Finding(
            "warn",
            f"The recorded loss is {_digits(float(loss.values[-1]))} in all of the last {len(loss)} steps.",
            evidence=[f"the norm of the gradient goes from {norm.values.min():.4g} to {norm.values.max():.4g}"],
            remedy="record the loss that is differentiated, not a constant or a rounded copy of it",
        )
    _, a, b = np.intersect1d(loss.steps, targets.steps, assume_unique=True, return_indices=True)
    sums = loss.values[a] * targets.values[b]
    bits = significant_bits(sums)
    if not len(bits) or bits.max() > 12:
        return None
    # Counts of errors need few bits by nature. Only multiples of 4 and more are no counts.
    if np.all(sums == np.round(sums)) and bits.max() > math.log2(max(float(np.median(np.abs(sums))), 1.0)) - 1:
        return None
    return Finding(
        "warn",
        f"The loss of a step has only {int(bits.max())} significant bits: it moves in steps of "
        f"{2.0 ** -(int(bits.max()) - 1):.2%}.",
        evidence=[f"all of the last {len(bits)} summed losses have at most {int(bits.max())} significant bits; float32 "
                  "has 24, bfloat16 8, float16 11"],
        ruled_out=["chance: one number in 4096 has so few"],
        remedy="sum the loss in float32: `losses.float().sum()`, or cross_entropy on `logits.float()`",
    )  # fmt: skip


class Pair(NamedTuple):
    """One step, before the stop and after the resume."""

    step: int
    before: Mapping[str, float]
    after: Mapping[str, float]

    def differs(self, name: str, tolerance: float) -> bool:
        before, after = self.before.get(name), self.after.get(name)
        if before is None or after is None or before == after or (before != before and after != after):
            return False
        return not abs(after - before) <= tolerance * abs(before)  # also where one of them is not finite


def _stretches(history: History) -> Iterator[tuple[int, list[int]]]:
    """The first step of each resume, and the steps from there on that had been taken before."""
    went_back = [(e.get("to", 0), e.get("step", -1)) for e in history.events_of("rollback")]  # other rows, on purpose
    again = sorted(
        step
        for step, rows in history.superseded.items()
        if any("loss" in row for row in rows) and not any(to <= step <= bad for to, bad in went_back)
    )
    starts = set(history.steps_of("resume")) & set(again)
    for i, step in enumerate(again):
        if step not in starts and (i == 0 or again[i - 1] != step - 1):
            starts.add(step)  # a record that lost its events
    ordered = sorted(starts)
    for first, end in zip(ordered, [*ordered[1:], math.inf]):
        yield first, [step for step in again if first <= step < end]


def _equal(pairs: Sequence[Pair], first: int, tolerance: float, name: str) -> list[str]:
    """What agreed, and is therefore not the cause."""
    causes = {"batch_hash": "other data", "lr": "another learning rate", "loss": "other weights at the save"}
    found = []
    for signal, rival in causes.items():
        where = [pair for pair in pairs if pair.step == first] if signal == "loss" else pairs
        has = [pair for pair in where if signal in pair.before and signal in pair.after]
        if signal != name and has and not any(pair.differs(signal, tolerance) for pair in has):
            found.append(f"{rival}: {signal} is equal at {'the first step' if signal == 'loss' else 'all these steps'}")
    if name == "loss" and not any(pair.differs("loss", tolerance) for pair in pairs if pair.step == first):
        found.append("other weights at the save: the loss of the first step is equal")
    return found


def significant_bits(values: np.ndarray) -> np.ndarray:
    """How many bits of a float32 mantissa each number needs, without those that are 0 or not finite."""
    singles = values[np.isfinite(values) & (values != 0)].astype(np.float32)
    mantissas = (singles.view(np.uint32) & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    lowest = (mantissas & (~mantissas + np.uint32(1))).astype(np.float64)  # the lowest bit that is set
    return 24 - np.log2(lowest).astype(np.int64)


def _digits(value: float) -> str:
    return f"{value:.0f}" if 1e6 < abs(value) < math.inf else repr(value)
