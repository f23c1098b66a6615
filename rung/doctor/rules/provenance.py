"""Whether the record of a run can be trusted: keys that did nothing, code that was not committed, ranks that drifted
apart, a resume that was another run, numbers that lost their digits.

What happened is told by events. A resume is judged by the steps that were taken twice: before it was stopped, and again
after the save. Both stand in the record, and on one CPU they must agree to the last digit.

The surprising thing: no curve shows a resume that dropped the optimizer's state. The loss of its first step is equal to
all digits, and that of the second is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History
from rung.doctor.rules import rule

WITNESSES = 3  # steps after a resume to compare where arithmetic is not exact: differences grow with each
RECOMPUTED = ("system.", "ddp.", "data.batch_size", "optimizer.gradient_accumulation_steps")  # sums in another order


@rule("R1", "Keys that nothing reads", kind="scan")
def unread_keys(history: History) -> Finding | None:
    """The event of keys that were set and that nothing had read by the first eval."""
    events = history.events_of("unread_keys")
    keys = [str(key) for key in events[-1].get("keys") or []] if events else []
    if not keys:
        return None
    many = len(keys) > 1
    return Finding(
        "R1",
        "warn",
        f"{', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''} "
        f"{'were' if many else 'was'} set, and nothing has read {'them' if many else 'it'}.",
        since=events[-1].get("step"),
        evidence=[f"{key} = {history.config.get(key, 'unknown')}" for key in keys[:5]],
        probe="change the value: the losses stay equal to all digits",
        remedy="spell the key as the code that should read it does, or leave it out; keys that only samples read are "
        "fine",
    )


@rule("R2", "Code that was not committed", kind="scan")
def uncommitted(history: History) -> Finding | None:
    """The event about the working tree from which the run was started."""
    events = history.events_of("code")
    if not events or not events[-1].get("dirty"):
        return None
    changed = [str(name) for name in events[-1].get("changed") or []]
    # Info and no more: the exact tree, uncommitted files included, is kept with the run. Elsewhere it would be lost.
    return Finding(
        "R2",
        "info",
        f"{events[-1].get('num_changed') or len(changed)} files were not committed when the run was started.",
        evidence=[f"changed: {', '.join(changed[:8])}{' ..' if len(changed) > 8 else ''}"],
        ruled_out=["lost code: the tree as it was is kept with the run (`rung show` says where)"],
        remedy="commit before runs that others should repeat; `git diff` between the kept trees of two runs tells how "
        "their code differs",
    )


@rule("R3", "Ranks have different weights", kind="scan")
def ranks_differ(history: History) -> Finding | None:
    """The event of a comparison of the weights between ranks."""
    events = history.events_of("ranks_differ")
    if not events:
        return None
    tensors = [str(name) for name in events[0].get("tensors") or []]
    return Finding(
        "R3",
        "sick",
        f"At step {events[0].get('step')} the ranks no longer held the same weights"
        + (f", in {len(tensors)} tensors." if tensors else "."),
        since=events[0].get("step"),
        evidence=[f"first {', '.join(tensors[:5])}"] if tensors else [],
        ruled_out=["rounding: the weights are compared by a hash of their bytes, and every rank adds the same numbers"],
        probe="the same run with system.deterministic=true, and each rank on another device",
        remedy="a parameter that one rank updates alone, a buffer that is not exchanged, or a faulty device; go back "
        "to a save before this step",
    )


@rule("R4", "A resume that did not continue", kind="scan")
def resume_differs(history: History) -> Finding | None:
    """Steps that were taken before a stop and again after the resume: batch_hash, lr, loss and norm of both."""
    for first, steps in _stretches(history):
        exact = _is_exact(history, first)
        compared = steps if exact else steps[:WITNESSES]
        pairs = [pair for step in compared for pair in _pairs(history, step)]
        tolerance = 0.0 if exact else _tolerance(history)
        cause = _cause(pairs, first, tolerance)
        if cause is None:
            continue
        name, bad, likely, remedy = cause
        return Finding(
            "R4",
            "sick",
            f"The run that was resumed at step {first} is not the one that was stopped: {likely}.",
            since=first,
            evidence=[
                f"{name} at step {bad.step}: {_digits(bad.before[name])} before, {_digits(bad.after[name])} now",
                f"{len(pairs)} steps were taken twice; tolerance {tolerance:g}"
                + (" (one CPU: all digits)" if exact else " relative: sums are not added in the same order each time"),
            ],
            ruled_out=_equal(pairs, first, tolerance, name),
            probe="resume the same save twice and compare the two: if they differ too, the arithmetic does not repeat",
            remedy=remedy,
        )
    return None


@rule("R5", "A loss without digits")
def telemetry_blind(history: History) -> Finding | None:
    """The significant bits of the summed loss over the last 100 steps; a loss that never changes."""
    loss, targets = history["loss"].finite.last(WINDOW), history["targets"]
    if len(loss) < WINDOW // 2:
        return None
    norm = history["norm"].finite.last(WINDOW)
    if np.ptp(loss.values) == 0 and len(norm) and np.ptp(norm.values) > 0:
        return Finding(
            "R5",
            "warn",
            f"The recorded loss is {_digits(float(loss.values[-1]))} in all of the last {len(loss)} steps.",
            evidence=[f"the norm of the gradient goes from {norm.values.min():.4g} to {norm.values.max():.4g}"],
            remedy="return from the loss what is differentiated, not a constant or a rounded copy of it",
        )
    _, a, b = np.intersect1d(loss.steps, targets.steps, assume_unique=True, return_indices=True)
    sums = loss.values[a] * targets.values[b]
    bits = significant_bits(sums)
    if not len(bits) or _is_of_integers(sums, bits) or bits.max() > 12:
        return None
    return Finding(
        "R5",
        "warn",
        f"The loss of a step is known to {int(bits.max())} bits only: it moves in steps of "
        f"{2.0 ** -(int(bits.max()) - 1):.2%} of itself.",
        evidence=[f"all of the last {len(bits)} summed losses have at most {int(bits.max())} significant bits; float32 "
                  "has 24, bfloat16 8, float16 11"],
        ruled_out=["chance: one such number in 4096 would be"],
        remedy="sum the loss in float32: losses.float().sum(), or cross_entropy on logits.float()",
    )  # fmt: skip


class Pair(NamedTuple):
    """One step, as it was and as it was again."""

    step: int
    before: Mapping[str, float]
    after: Mapping[str, float]

    def differs(self, name: str, tolerance: float) -> bool:
        before, after = self.before.get(name), self.after.get(name)
        if before is None or after is None or before == after or (before != before and after != after):
            return False
        return not abs(after - before) <= tolerance * abs(before)  # also where one of them is not finite


def _stretches(history: History) -> Iterator[tuple[int, list[int]]]:
    """The step at which each resume began, and the steps from there on that had been taken before."""
    went_back = [(e.get("to", 0), e.get("step", -1)) for e in history.events_of("rollback")]  # with other rows, wanted
    again = sorted(
        step
        for step, rows in history.superseded.items()
        if any("loss" in row for row in rows) and not any(to <= step <= bad for to, bad in went_back)
    )
    starts = {e["step"] for e in history.events_of("resume") if isinstance(e.get("step"), int)} & set(again)
    for i, step in enumerate(again):
        if step not in starts and (i == 0 or again[i - 1] != step - 1):
            starts.add(step)  # a record whose events are gone
    ordered = sorted(starts)
    for first, end in zip(ordered, [*ordered[1:], math.inf]):
        yield first, [step for step in again if first <= step < end]


def _pairs(history: History, step: int) -> Iterator[Pair]:
    after = {}
    for name in ("batch_hash", "lr", "loss", "norm"):
        series = history[name]
        at = int(np.searchsorted(series.steps, step))
        if at < len(series) and series.steps[at] == step:
            after[name] = float(series.values[at])
    earlier = [row for row in history.superseded[step] if "loss" in row]
    if earlier and "loss" in after:
        yield Pair(step, earlier[-1], after)


def _cause(pairs: Sequence[Pair], first: int, tolerance: float) -> tuple[str, Pair, str, str] | None:
    """What differs first, in the order in which one thing follows from another."""
    for name, likely, remedy in (
        ("batch_hash", "it takes other rows", "the data or its order has changed since the save: compare `rung show` "
         "of the data's fingerprint; Stream.ids must be a function of its arguments alone"),
        ("lr", "its learning rate is another one", "the schedule must depend on the step alone: look for a horizon "
         "that changed with the resume"),
    ):  # fmt: skip
        exact = 0.0 if name == "batch_hash" else 1e-9
        bad = next((pair for pair in pairs if pair.differs(name, exact)), None)
        if bad is not None:
            return name, bad, likely, remedy
    for name in ("loss", "norm"):
        bad = next((pair for pair in pairs if pair.differs(name, tolerance)), None)
        if bad is None:
            continue
        if bad.step == first:
            return name, bad, "its weights or its random numbers are others", (
                "a buffer or parameter that is not saved with the model (persistent=False), or random numbers that "
                "are drawn from somewhere else than `draw`"
            )  # fmt: skip
        if name == "loss" or bad.step > first:
            return name, bad, "it begins with the same weights and updates them differently", (
                "state of the optimizer, or of the model, that is not saved: look for moments, step counts and buffers "
                "that are changed by a step"
            )  # fmt: skip
    return None


def _equal(pairs: Sequence[Pair], first: int, tolerance: float, name: str) -> list[str]:
    """What agreed, and so is not the reason."""
    words = {"batch_hash": "other data", "lr": "another learning rate", "loss": "other weights at the save"}
    found = []
    for signal, rival in words.items():
        where = [pair for pair in pairs if pair.step == first] if signal == "loss" else pairs
        has = [pair for pair in where if signal in pair.before and signal in pair.after]
        if signal != name and has and not any(pair.differs(signal, tolerance) for pair in has):
            found.append(f"{rival}: {signal} is equal at {'the first step' if signal == 'loss' else 'all of them'}")
    if name == "loss" and not any(pair.differs("loss", tolerance) for pair in pairs if pair.step == first):
        found.append("other weights at the save: the loss of the first step is equal")
    return found


def _is_exact(history: History, first: int) -> bool:
    """Whether the same numbers are added in the same order: one CPU, and nothing about it was changed."""
    words = [w for e in history.events_of("resume") if e.get("step") == first for w in e.get("overrides") or []]
    is_plain = not any(str(word).startswith(RECOMPUTED) for word in words)
    is_cpu = str(history.derived.get("device", "cpu")).startswith("cpu")
    return is_cpu and is_plain and int(history.derived.get("num_ranks") or 1) == 1


def _tolerance(history: History) -> float:
    """Ten times what adding in another order changes in a mean over a step; estimates, not measured here."""
    return 1e-5 if str(history.derived.get("dtype", "")).endswith("float32") else 1e-3


def significant_bits(values: np.ndarray) -> np.ndarray:
    """How many bits of a float32's mantissa each number needs; of what is 0 or not finite nothing is said."""
    singles = values[np.isfinite(values) & (values != 0)].astype(np.float32)
    mantissas = (singles.view(np.uint32) & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    lowest = (mantissas & (~mantissas + np.uint32(1))).astype(np.float64)  # the lowest bit that is set
    return 24 - np.log2(lowest).astype(np.int64)


def _is_of_integers(sums: np.ndarray, bits: np.ndarray) -> bool:
    """Counts of mistakes need few bits by nature: as many as they have. Only multiples of 4 and more are no counts."""
    are_whole = bool(np.all(sums == np.round(sums)))
    return are_whole and bits.max() > math.log2(max(float(np.median(np.abs(sums))), 1.0)) - 1


def _digits(value: float) -> str:
    return f"{value:.0f}" if 1e6 < abs(value) < math.inf else repr(value)
