"""The conditions of two runs: data, machine, budget, what their metrics count, and whether they are paired.

Nobody declares these, so a difference here is hidden unless a config key that differs explains it. A value known for
one run only counts as a difference; one known for neither becomes a note. A different number of steps is always hidden,
even where a config key asked for it: the schedules end elsewhere, so no two points of the curves match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rung.compare.difference import Difference
from rung.compare.reading import (
    column,
    evals,
    is_of_engine,
    list_of,
    mapping,
    number_of,
    part_of,
    planned_targets,
    segments_of,
)
from rung.errors import RunError
from rung.runs.files import read_json
from rung.runs.query import Run

# Sections of the engine that cannot change what data is read; any other key may be one of the recipe's data.
_NOT_DATA = ("optimizer.", "lr.", "system.", "ddp.", "guard.", "eval_", "init_from", "model.", "data.batch_size")
_MACHINE = ("host", "platform", "cpu", "memory_bytes")
# Keys of updates alone, by what scripts call them: such a key does not explain other initial weights.
_OF_TRAINING = re.compile(
    r"(\w+_)?lr|learning_rate|lr_\w+|batch_size|weight_decay|wd|momentum|betas?|beta[12]|eps|warmup\w*|(max_)?grad\w*"
    r"|clip\w*|(num_|max_|n_)?(epochs|steps|iters)|optim\w*|sched\w*|eval\w*|log\w*|save\w*",
    re.I,
)
_NUM_SHOWN = 6


def data(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What was trained on. `keys` are the config keys that differ; eval sets are left to `metric`."""
    was, now = a.data(), b.data()
    evaluated = _sets(a) | _sets(b)
    names = [name for name in dict.fromkeys([*was, *now]) if name == "train" or name not in evaluated]
    if not names:
        yield Difference("data", "train", None, None, "note", "neither run says what data it read")
    if not (is_of_engine(a) and is_of_engine(b)):
        # The keys of a script may be any: only one that says so explains other data, as data_dir and dataset.name.
        keys = [key for key in keys if any(part.startswith("data") for part in key.split("."))]
    for name in names:
        old, new = mapping(was.get(name)), mapping(now.get(name))
        before, after = old.get("fingerprint"), new.get("fingerprint")
        if before == after and before is not None:
            same.append(f"data of {name} ({before}, {old.get('rows')} rows)")
        elif before is None or after is None:
            weight = "note" if before is after else "hidden"
            whom = "neither run says" if before is after else f"{(a if before is None else b).id} does not say"
            yield Difference("data", name, before, after, weight, f"{whom} what data it read")
        else:
            causes = [key for key in keys if not key.startswith(_NOT_DATA)]
            # A fingerprint begins with the store, then says how rows are cut from it: another context explains other
            # rows of the same store, never another store.
            stores = [str(one).partition("/") for one in (before, after)]
            if stores[0][1] and stores[1][1] and stores[0][0] != stores[1][0]:
                causes = [key for key in causes if key.startswith("dataset.")]
            about = [{**mapping(one.get("about")), "rows": one.get("rows")} for one in (old, new)]
            changes = _changes(about[0], about[1])
            detail = "; ".join(filter(None, [changes, f"follows from {', '.join(causes)}" if causes else ""]))
            yield Difference("data", name, before, after, "follows" if causes else "hidden", detail)


def environment(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What it ran on, at the start of each run; and what an attempt of one run changed about it."""
    was, now = _environments(a), _environments(b)
    if not was[0] and not now[0]:
        yield Difference("environment", "environment", None, None, "note", "neither run says what it ran on")
    elif not was[0] or not now[0]:
        whom = a.id if not was[0] else b.id
        yield Difference("environment", "environment", None, None, "hidden", f"{whom} does not say what it ran on")
    else:
        found = list(_environment(was[0], now[0], (a.id, b.id)))
        # What was chosen for the run: `auto` in both configs may mean two devices.
        chosen = [part_of(run, "derived") for run in (a, b)]
        for name in ("device", "dtype", "num_ranks", "threads"):
            before, after = (one.get(name) for one in chosen)
            if before != after:
                is_asked = name == "dtype" and "system.dtype" in keys
                weight = "follows" if is_asked else "note" if name == "threads" else "hidden"
                found.append(Difference("environment", name, before, after, weight))
        if not any(difference.weight == "hidden" for difference in found):
            same.append(f"python, torch, device and {len(mapping(was[0].get('packages')))} packages")
        yield from found
    for run, attempts in ((a, was), (b, now)) if a.path != b.path else ((a, was),):
        for number, later in enumerate(attempts[1:], 1):
            changed = [d for d in _environment(attempts[0], later, ("its start", "a resume")) if d.weight == "hidden"]
            if changed:
                changes = ", ".join(f"{d.name} {d.detail or f'{d.before} -> {d.after}'}" for d in changed)
                detail = f"attempt {number} of {run.id} ran in another environment than its start: {changes}"
                yield Difference("environment", "resume", None, None, "hidden", detail)


def _environments(run: Run) -> list[Mapping[str, Any]]:
    """One per attempt that has a file of its own, the first first; {} where there is none."""
    names = [str(part.get("env") or "env.json") for part in segments_of(run)] or ["env.json"]
    found: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(names):
        path = run.path / name.rpartition("/")[2]
        try:
            found.append(mapping(read_json(path)))
        except FileNotFoundError:
            found.append({})
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}.", code="run-damaged") from error
    return [found[0], *(one for one in found[1:] if one)]


def _environment(was: Mapping[str, Any], now: Mapping[str, Any], ids: tuple[str, str]) -> Iterator[Difference]:
    def of_gpus(env: Mapping[str, Any], key: str) -> str:
        return ", ".join(str(gpu.get(key)) for gpu in list_of(env.get("gpus")) if isinstance(gpu, dict))

    def named(env: Mapping[str, Any]) -> dict[str, Any]:
        packages = mapping(env.get("packages"))
        return {
            "python": f"{env.get('implementation', '')} {env.get('python')}".strip(),
            "torch": packages.get("torch"),
            # Version and source: a checkout that is being worked on has one version and many states.
            "rung": f"{packages.get('rung')}, source {env.get('rung_sha256') or 'unknown'}",
            "GPU": of_gpus(env, "name"),
            "driver": of_gpus(env, "driver"),
        }

    after_by_name = named(now)
    for name, before in named(was).items():
        after = after_by_name[name]
        if before != after:
            detail = "" if before and after else f"{ids[1] if before else ids[0]} does not say"
            yield Difference("environment", name, before, after, "hidden", detail)
    old, new = (
        {n: v for n, v in mapping(env.get("packages")).items() if n not in ("torch", "rung")} for env in (was, now)
    )
    if old != new:
        names = [name for name in sorted(old.keys() | new.keys(), key=str.lower) if old.get(name) != new.get(name)]
        before, after = ({n: packages[n] for n in names if n in packages} for packages in (old, new))
        yield Difference("environment", "packages", before, after, "hidden", _changes(old, new, ids))
    for name in _MACHINE:
        if was.get(name) != now.get(name):
            yield Difference("environment", name, was.get(name), now.get(name), "note")


def budget(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """How long it trains: steps, the horizon of the schedule, targets in all."""
    derived = [part_of(run, "derived") for run in (a, b)]
    steps = [number_of(one.get("num_steps")) for one in derived]
    if None in steps:  # no budget is declared, as in one's own loop: then how far they came
        planned = [one.get("num_steps") for one in derived]
        if planned[0] != planned[1]:
            whom = a.id if planned[0] is None else b.id
            yield Difference("budget", "num_steps", planned[0], planned[1], "hidden", f"{whom} declares no budget")
        elif a.step != b.step:
            detail = "the last step; neither run declares a budget"
            yield Difference("budget", "last_step", a.step, b.step, "hidden", detail)
        return
    ends = "the schedules end at different steps; points in the middle of a schedule cannot be compared"
    horizons = [number_of(one.get("decay_steps")) for one in derived]
    targets = [planned_targets(run) for run in (a, b)]
    if steps[0] != steps[1]:
        equal = "; targets in all are equal" if targets[0] == targets[1] is not None else ""
        yield Difference("budget", "num_steps", steps[0], steps[1], "hidden", ends + equal)
    elif targets[0] != targets[1]:
        yield Difference("budget", "targets", targets[0], targets[1], "hidden", "targets in all; steps are equal")
    if horizons[0] != horizons[1] and (steps[0] == steps[1] or steps != horizons):
        yield Difference("budget", "decay_steps", horizons[0], horizons[1], "hidden", ends)
    if steps[0] == steps[1] and targets[0] == targets[1] and horizons[0] == horizons[1]:
        about = f", about {targets[0]:.0f} targets" if targets[0] is not None else ""
        same.append(f"budget ({steps[0]:g} steps{about})")


def metric(a: Run, b: Run, same: list[str], has_rows: bool) -> Iterator[Difference]:
    """What each eval counts. Sets that only one run evaluates are notes."""
    definitions = [a.definitions(), b.definitions()]
    sets = sorted(f"eval/{name}" for name in _sets(a) | _sets(b))
    for name in dict.fromkeys([*definitions[0], *definitions[1], *sets]):
        known = [name in one for one in definitions]
        if all(known):
            before, after = (one if isinstance(one := of[name], dict) else {"definition": one} for of in definitions)
            if before == after:
                same.append(f"definition of {name}")
            else:
                old, new = _differing(before, after)
                yield Difference("metric", name, old, new, "metric", _changes(before, after))
            continue
        is_seen = []  # as an eval set "eval/val", an eval metric "val/loss" or a metric of the rows
        for run, is_known in zip((a, b), known):
            names = (n for row in evals(run) for n in (f"eval/{row['set']}", *(f"{row['set']}/{key}" for key in row)))
            is_seen.append(is_known or name in names or (has_rows and bool(column(run, name).values)))
        if is_seen != [True, True]:
            yield Difference("metric", name, known[0], known[1], "note", f"only {(a if is_seen[0] else b).id} has it")
        elif any(known):
            whom = b.id if known[0] else a.id
            yield Difference("metric", name, known[0], known[1], "hidden", f"{whom} does not say what it counts")
        else:  # older runs say of an eval set what it is, not what is counted in it
            stream = name.removeprefix("eval/")
            was, now = (mapping(run.data().get(stream)).get("fingerprint") for run in (a, b))
            detail = "another eval set" if was != now else "neither run says what it counts"
            yield Difference("metric", name, was, now, "metric" if was != now else "note", detail)
    counts = [
        {row["set"]: row["targets"] for row in evals(run) if isinstance(row.get("targets"), int | float)}
        for run in (a, b)
    ]
    for name in sorted(counts[0].keys() & counts[1].keys()):
        if counts[0][name] != counts[1][name]:
            detail = "targets of an eval: mask, ignored ids or rows differ"
            yield Difference("metric", f"targets of {name}", counts[0][name], counts[1][name], "metric", detail)


def _sets(run: Run) -> set[str]:
    return {str(row["set"]) for row in evals(run)}


def pairing(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """Whether runs of one seed began with the same weights; runs of two seeds never do."""
    before, after = (part_of(run, "derived").get("weights_from") for run in (a, b))
    if before != after:
        is_asked = "init_from" in keys
        detail = "follows from init_from" if is_asked else "init_from led to another checkpoint"
        yield Difference("pairing", "weights_from", before, after, "follows" if is_asked else "hidden", detail)
    if a.document.get("seed") != b.document.get("seed"):
        return

    was, now = a.initial_weights(), b.initial_weights()
    if not was or not now:
        if was or now:
            whom = b.id if was else a.id
            detail = f"{whom} does not say what its weights were before the first update"
            yield Difference("pairing", "initial weights", None, None, "note", detail)
        return
    shapes = [{name: list_of(entry)[:1] for name, entry in weights.items()} for weights in (was, now)]
    shared = [name for name in was if shapes[0][name] == shapes[1].get(name)]
    other = [name for name in shared if was[name] != now[name]]
    lone = len(was.keys() | now.keys()) - len(shared)
    if other:
        causes = []
        if a.document.get("seed") is not None:
            causes = [key for key in keys if not key.startswith(("optimizer.", "lr."))
                      and not _OF_TRAINING.fullmatch(key.rpartition(".")[2])]  # fmt: skip
        detail = f"{len(other)} of {len(shared)} parameters of equal name and shape start from other values: "
        detail += ", ".join(other[:_NUM_SHOWN]) + (f"; follows from {', '.join(causes)}" if causes else "")
        weight = "follows" if causes else "hidden"
        yield Difference("pairing", "initial weights", was[other[0]], now[other[0]], weight, detail)
    else:
        same.append(f"initial weights of {len(shared)} parameters" + (f"; {lone} differ in shape" if lone else ""))


def batches(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """Whether the steps of runs of one seed, with as many rows each of the same data, saw the same rows."""
    rows = [part_of(run, "derived").get("rows_per_step") for run in (a, b)]
    if a.document.get("seed") != b.document.get("seed") or rows[0] != rows[1]:
        return
    was, now = column(a, "batch_hash"), column(b, "batch_hash")
    if was.values and (was.steps, was.values) == (now.steps, now.values):
        same.append(f"rows of all {len(was.values)} shared steps")
        return
    old, new = (dict(zip(one.steps, one.values)) for one in (was, now))
    shared = sorted(old.keys() & new.keys())
    other = [step for step in shared if old[step] != new[step]]
    if other:
        detail = f"other rows at {len(other)} of {len(shared)} shared steps, from step {other[0]}"
        yield Difference("pairing", "batches", old[other[0]], new[other[0]], "hidden", detail)
    elif shared:
        same.append(f"rows of all {len(shared)} shared steps")
    else:
        silent = [run.id for run, hashes in ((a, old), (b, new)) if not hashes]
        whom = ["no step is in both records", f"{' '.join(silent)} does not say", "neither run says"][len(silent)]
        detail = f"{whom} which rows a step saw" if silent else whom
        yield Difference("pairing", "batches", None, None, "note", detail)


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [n for n in dict.fromkeys([*before, *after]) if (n in before, before.get(n)) != (n in after, after.get(n))]
    return {n: before[n] for n in names if n in before}, {n: after[n] for n in names if n in after}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], ids: tuple[str, str] = ("", "")) -> str:
    """What differs between two mappings, as text."""
    old, new = _differing(before, after)
    changes = []
    for name in dict.fromkeys([*old, *new]):
        if name in old and name in new:
            changes.append(f"{name} {old[name]} -> {new[name]}")
        else:
            value, whom = (old[name], ids[0] or "the first") if name in old else (new[name], ids[1] or "the second")
            changes.append(f"{name} {value} only in {whom}")
    return ", ".join(changes)
