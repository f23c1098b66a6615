"""Where the time and the memory of a run go: waiting for data, copying it, leaks, slowing down.

From the host's clock and from counters of the first rank. Whether a device is bound by launching kernels or by
arithmetic (P3) cannot be told from these. A loss below half a minute over the whole run is info: nobody changes
anything for it, and the clock of a run of seconds measures other processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rung.doctor.coincidence import events_near
from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import at
from rung.robust import theil_sen

SETTLED = 20  # steps in which caches fill and kernels are compiled
SHARE = 0.10  # of a step: a slow loader had 0.62, a fast one 0.05
WORTH_S = 30.0
SLOWER, SLOWER_THAN_PARENT = 0.10, 0.07
MOST_WINDOWS = 64  # of a run that are compared; rules are asked hundreds of times, and more windows say no more
BLOCK = 50  # steps whose median decides whether they were slow
LASTING = 0.05  # of the planned run, for which it has to have been slow without a break; other processes come and go


@rule("P1", "Waiting for data", needs=("wait_s", "step_s"))
def loader_bound(history: History) -> Finding | None:
    seen = _window(history, "wait_s", "step_s")
    if seen is None:
        return None
    waits, steps = seen
    share = _share(waits, steps)
    half = len(waits) // 2
    is_first_epoch = history.end <= history.steps_per_epoch
    # The first epoch reads the disk, later ones memory: waits that end by themselves are no problem.
    if share <= SHARE or (is_first_epoch and _share(waits[half:], steps[half:]) <= SHARE):
        return None
    copies = history["copy_s"].last(len(waits)).median
    workers = history.config.get("system.data_workers")
    more = 2 * int(history.number("system.data_workers") or 1)
    return Finding(
        _severity(history, float(np.mean(waits))),
        f"The device waited for data {share:.0%} of the time in the last {len(waits)} steps.",
        evidence=[
            f"wait_s median {np.median(waits):.3g}, 95th percentile {np.quantile(waits, 0.95):.3g}; "
            f"step_s median {np.median(steps):.3g}; limit {SHARE:.0%}, without the two longest waits",
            f"without waiting, a step would take {1 - share:.2f} of its time: {1 / (1 - share):.2f}x faster",
            "this is still the first epoch: part of it may be the first read from disk" if is_first_epoch else "",
        ],
        ruled_out=[f"copying to the device: copy_s median {copies:.3g}"] if copies < 0.5 * np.median(waits) else [],
        probe="time `Stream.gather` alone: reading, decoding and collating are all in it",
        remedy=(f"gather in {more} threads (system.data_workers={more}, now {workers}); if that does not help, decode "
                "once, when the data is prepared, and keep the store on a local disk"),
        changes={"system.data_workers": more},
    )  # fmt: skip


@rule("P2", "Waiting for copies to the device", needs=("copy_s", "step_s", "wait_s"))
def transfer_bound(history: History) -> Finding | None:
    """copy_s over step_s, where copies are not hidden behind the step before."""
    seen = _window(history, "copy_s", "step_s", "wait_s")
    if seen is None or str(history.derived.get("device", "cpu")).startswith("cpu"):
        return None
    copies, steps, waits = seen
    share = _share(copies, steps)
    workers = int(history.number("system.data_workers") or 0)
    # Copies run in the threads that gather, and cost something only if the step waits for these or there are none.
    is_hidden = workers > 0 and (_share(waits, steps) <= SHARE or copies.sum() < 0.5 * waits.sum())
    if share <= SHARE or is_hidden:
        return None
    cause = "no thread copies ahead (system.data_workers=0)" if not workers else "the step waits for them"
    return Finding(
        _severity(history, float(np.mean(copies))),
        f"Copying rows to the device took {share:.0%} of a step, and {cause}.",
        evidence=[
            f"copy_s median {np.median(copies):.3g}, step_s median {np.median(steps):.3g}, wait_s median "
            f"{np.median(waits):.3g} over {len(steps)} steps; limit {SHARE:.0%}"
        ],
        probe="time the same steps with rows that are on the device already",
        remedy="copy smaller types (uint8 or float16, converted on the device), and copy ahead of the step",
        changes={} if workers else {"system.data_workers": 1},
        hides=["P1"],  # the waiting is this copying
    )


@rule("P4", "Memory grows", needs=("memory_mb|reserved_mb|rss_mb",))
def memory_creep(history: History) -> Iterator[Finding]:
    """memory_mb, reserved_mb and rss_mb after step 100: Theil-Sen slope and its significance."""
    on_device = _creep(history, "memory_mb", "allocated on the device")
    on_device = on_device or _creep(history, "reserved_mb", "reserved on the device")  # what is allocated is reserved
    for finding in (on_device, _creep(history, "rss_mb", "of the process")):
        if finding is not None:
            yield finding


def _creep(history: History, name: str, what: str) -> Finding | None:
    # A store is memory-mapped: its pages join the process until each was touched once.
    is_mapped = name == "rss_mb" and math.isfinite(history.steps_per_epoch)
    first = max(100, math.ceil(history.steps_per_epoch)) if is_mapped else 100
    series = _few(history[name].between(first, history.end).finite)
    third = max(len(series) // 3, 1)
    if len(series) < 8 or np.median(series.values[-third:]) - np.median(series.values[:third]) < 10.0:
        return None  # most runs end here, and the rest costs a millisecond
    for part in ("eval_s", "save_s", "sample_s"):  # without steps that follow one of these
        is_quiet = ~np.isin(series.steps, history[part].steps[history[part].values > 0])
        series = Series(series.steps[is_quiet], series.values[is_quiet])
    if len(series) < 8 or series.steps[-1] - series.steps[0] < 200:
        return None
    targets = _few(history["targets"].between(int(series.steps[0]), int(series.steps[-1]) + 1)).finite.values
    if len(targets) >= 4:
        third = max(len(targets) // 3, 1)
        usual = np.median(targets[:third])
        if abs(np.median(targets[-third:]) - usual) > 0.02 * usual:
            return None  # longer rows
    slope, p_value = theil_sen(*series)
    growth = slope * float(series.steps[-1] - series.steps[0])
    middle = len(series) // 2
    later, _ = theil_sen(series.steps[middle:], series.values[middle:])
    if slope <= 0 or p_value >= 0.01 or growth <= max(0.01 * series.median, 20.0) or later < slope / 3:
        return None
    # What leaks hardly ever falls; an allocator goes up and down by steps (music `tiny` on a CPU: by 22 MB of 600), and
    # what it has gained in the end says something only beside those.
    if growth < 4 * max(0.0, float(-np.diff(series.values).min())):
        return None
    planned = max(history.num_steps or 0, history.end)
    at_end = float(series.values[-1]) + slope * (planned - history.end)
    return Finding(
        "warn",
        f"Memory {what} grew by {growth:.0f} MB from step {series.steps[0]} to {series.steps[-1]}, and still grows.",
        since=int(series.steps[0]),
        evidence=[
            f"{name} {series.values[0]:.0f} -> {series.values[-1]:.0f} MB, {1000 * slope:.1f} MB per 1000 steps "
            f"(Theil-Sen over {len(series)} values without evals and saves, p {p_value:.1g}); limit 1 % and 20 MB",
            f"at this pace {at_end:.0f} MB at step {planned}",
        ],
        ruled_out=["longer rows: the targets of a step stayed the same"],
        probe="train without evals and samples (eval_interval=0): does it still grow?",
        remedy="look for tensors that are kept with their graph (append `loss.item()`, not `loss`), and for lists and "
        "caches that only grow",
        title=f"Memory grows ({name})",
    )


@rule("P5", "Slower than it was", needs=("targets", "step_s"))
def slower(history: History) -> Finding | None:
    """log(targets / step_s) of the last steps, against the run's own usual speed and its parent's.

    Usual is the upper quartile of the windows before, as the best of hundreds is chance. Slower means that it began
    once: at most a tenth of the steps before were as slow, and all of them since.
    """
    steps, rates = _rates(history)
    if len(rates) < 2 * WINDOW:
        return None
    now = float(np.median(rates[-WINDOW:]))
    windows = np.lib.stride_tricks.sliding_window_view(rates[:-WINDOW], WINDOW)
    windows = windows[:: max(WINDOW // 2, len(windows) // MOST_WINDOWS)]
    usual = float(np.quantile(np.median(windows, axis=1), 0.75))
    noise = 1.25 * Series(steps, rates).last(2 * WINDOW).sigma / math.sqrt(WINDOW)  # of a median of so many
    middle = (usual + now) / 2
    is_slower = now < usual - max(-math.log(1 - SLOWER), 6 * noise)
    if not is_slower or any(np.median(part) > middle for part in np.split(rates[-WINDOW:], 5)):
        return _slower_than_parent(history, now)
    # Where the last stretch without a fast block begins, unless slow blocks were common before it.
    first = len(rates) % BLOCK
    blocks = np.median(rates[first:].reshape(-1, BLOCK), axis=1)
    fast = np.flatnonzero(blocks > middle)
    if not len(fast) or np.mean(blocks[: fast[-1] + 1] <= middle) > 0.1:
        return None
    start, stop = first + fast[-1] * BLOCK, min(first + (fast[-1] + 2) * BLOCK, len(rates))
    # The sum of what lies above the middle rises before the change and falls after it.
    begin = start + min(int(np.argmax(np.cumsum(rates[start:stop] - middle))) + 1, stop - start - 1)
    lasting = max(WINDOW, LASTING * max(history.num_steps or 0, history.end))
    if len(rates) - begin < lasting or _targets_changed(history):
        return None
    onset = int(steps[begin])
    step_s = history["step_s"]
    before, after = step_s.between(SETTLED, onset).median, step_s.last().median
    waited = history["wait_s"].last().median - history["wait_s"].between(SETTLED, onset).median
    near, is_loader = events_near(history, onset), waited > 0.5 * (after - before)
    evidence = [
        f"targets a second usually {math.exp(usual):.4g} (upper quartile of medians of {WINDOW} steps), "
        f"{math.exp(now):.4g} in the last {WINDOW}; limit {SLOWER:.0%}",
        f"step_s median {before:.3g} before step {onset}, {after:.3g} now",
        f"near step {onset}: {', '.join(near)}" if near else "",
        f"{waited:.3g} s of it is waiting for data" if is_loader else "",
    ]
    return Finding(
        _severity(history, after - before, since=onset),
        f"Steps became {1 - math.exp(now - usual):.0%} slower at about step {onset}.",
        since=onset,
        evidence=evidence,
        ruled_out=[
            "larger steps: the targets of a step stayed the same",
            "" if is_loader else f"waiting for data: wait_s changed by {waited:+.2g} s",
        ],
        probe="check for another program on the device, its clock and temperature, and recompilation "
        "(`TORCH_LOGS=recompiles`)",
        remedy="find out what happened at that step; a resume from the last save often runs at the old speed again",
    )


def _slower_than_parent(history: History, now: float) -> Finding | None:
    parent = history.parent
    if parent is None or _targets_changed(history):
        return None
    # The same config except for what costs no time: the seed and the learning rate.
    keys = {key for key in set(history.config) | set(parent.config) if not key.startswith(("seed", "lr."))}
    same = ("device", "dtype", "num_ranks", "rows_per_step", "parameters")
    if any(history.config.get(key) != parent.config.get(key) for key in keys):
        return None
    _, rates = _rates(parent)
    if len(rates) < WINDOW or any(history.derived.get(name) != parent.derived.get(name) for name in same):
        return None
    before = float(np.median(rates[:: max(1, len(rates) // 1000)]))
    if now - before > math.log(1 - SLOWER_THAN_PARENT):
        return None
    return Finding(
        "info",  # another day and perhaps another machine: not worth a warning
        f"Steps are {1 - math.exp(now - before):.0%} slower than those of {parent.run_id}, with the same config.",
        evidence=[f"targets a second {math.exp(before):.4g} there, {math.exp(now):.4g} here (medians); limit "
                  f"{SLOWER_THAN_PARENT:.0%}"],
        probe="run both again, one after the other, on this machine",
        remedy=f"compare device, driver and torch of the two: `rung diff {parent.run_id} {history.run_id}`",
    )  # fmt: skip


def _window(history: History, *names: str) -> list[np.ndarray] | None:
    """These values in the last 100 steps that have them all, after SETTLED; None if too few."""
    columns = [history[name].finite.between(SETTLED, history.end).last(WINDOW) for name in names]
    values = [at(column, columns[0].steps) for column in columns]
    has_all = np.isfinite(values).all(axis=0)
    return [column[has_all] for column in values] if has_all.sum() >= WINDOW // 2 else None


def _share(parts: np.ndarray, wholes: np.ndarray) -> float:
    """The share of the time, without the two longest: one hiccup of a disk is no state of the run."""
    kept = np.argsort(parts)[: max(len(parts) - 2, 1)]
    return float(parts[kept].sum() / max(wholes[kept].sum(), 1e-9))


def _severity(history: History, a_step_s: float, since: int = 0) -> str:
    planned = max(history.num_steps or 0, history.end) - since
    return "warn" if a_step_s * planned >= WORTH_S else "info"


def _rates(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Steps and log(targets / step_s), after SETTLED."""
    steps, times = history["step_s"]
    counts = at(history["targets"], steps)
    good = (steps >= SETTLED) & (counts > 0) & (times > 0)
    return steps[good], np.log(counts[good] / times[good])


def _targets_changed(history: History) -> bool:
    """Steps of another size take another time on any machine."""
    targets = _few(history["targets"].between(SETTLED, history.end)).finite
    medians = [float(np.median(part)) for part in np.array_split(targets.values, 4) if len(part)]
    return max(medians) > 1.02 * min(medians)


def _few(series: Series) -> Series:
    """A few hundred rows, spread evenly; medians need no more."""
    return Series(series.steps[:: len(series) // 300 + 1], series.values[:: len(series) // 300 + 1])
