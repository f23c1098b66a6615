"""The conditions of two runs: data, machine, budget, what their metrics count, and whether they are paired.

Nobody declares these, so a difference here is hidden unless a config key that differs explains it. What is known of one
run only counts as a difference; what is known of neither is told as a note.

The surprising thing: another number of steps stays hidden even where a config key asked for it. The schedules end
elsewhere, so no two points of the curves belong together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rung.compare.difference import Difference, is_of_engine, part_of
from rung.compare.reading import column, evals, segments_of
from rung.errors import RunError
from rung.runs.files import read_json
from rung.runs.query import Run

# Sections of the engine that cannot change what data is read; any other key may be one of the recipe's data.
_NOT_DATA = ("optimizer.", "lr.", "system.", "ddp.", "guard.", "eval_", "init_from", "model.", "data.batch_size")
_MACHINE = ("host", "platform", "cpu", "memory_bytes")
_OF_TRAINING = re.compile(
    r"(\w+_)?lr|learning_rate|lr_\w+|batch_size|weight_decay|wd|momentum|betas?|beta[12]|eps|warmup\w*|(max_)?grad\w*"
    r"|clip\w*|(num_|max_|n_)?(epochs|steps|iters)|optim\w*|sched\w*|eval\w*|log\w*|save\w*",
    re.I,
)
_NUM_TOLD = 6


def data(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What was trained on. `keys` are the config keys that differ; eval sets are told by `metric`."""
    was, now = a.data(), b.data()
    evaluated = _sets(a) | _sets(b)
    names = [name for name in dict.fromkeys([*was, *now]) if name == "train" or name not in evaluated]
    if not names:
        yield Difference("data", "train", None, None, "note", "neither run says what data it read")
    for name in names:
        old, new = _mapping(was.get(name)), _mapping(now.get(name))
        before, after = old.get("fingerprint"), new.get("fingerprint")
        if before == after and before is not None:
            same.append(f"data of {name} ({before}, {old.get('rows')} rows)")
        elif before is None or after is None:
            weight = "note" if before is after else "hidden"
            whom = "neither run says" if before is after else f"{(a if before is None else b).id} does not say"
            yield Difference("data", name, before, after, weight, f"{whom} what data it read")
        else:
            is_known = is_of_engine(a) and is_of_engine(b)
            cause = _cause_of_data(str(before), str(after), keys if is_known else [k for k in keys if _names_data(k)])
            words = _changes({**_mapping(old.get("about")), "rows": old.get("rows")},
                             {**_mapping(new.get("about")), "rows": new.get("rows")})  # fmt: skip
            detail = "; ".join(filter(None, [words, f"follows from {cause}" if cause else ""]))
            yield Difference("data", name, before, after, "follows" if cause else "hidden", detail)


def _cause_of_data(before: str, after: str, keys: Collection[str]) -> str:
    """The config key that explains another fingerprint; "" where none does.

    A fingerprint begins with the store, then says how rows are cut from it: another context explains other rows of
    the same store, never another store.
    """
    causes = [key for key in keys if not key.startswith(_NOT_DATA)]
    stores = [text.partition("/")[0] for text in (before, after)]
    if "/" in before and "/" in after and stores[0] != stores[1]:
        causes = [key for key in causes if key.startswith("dataset.")]
    return ", ".join(causes)


def _names_data(key: str) -> bool:
    """Of the keys of a script, which may be any, only one that says so explains other data: data_dir, dataset.name."""
    return any(part.startswith("data") for part in key.split("."))


def environment(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What it ran on, at the start of each run; and what an attempt of one run changed about it."""
    was, now = _environments(a), _environments(b)
    if not was[0] and not now[0]:
        yield Difference("environment", "environment", None, None, "note", "neither run says what it ran on")
    elif not was[0] or not now[0]:
        whom = a.id if not was[0] else b.id
        yield Difference("environment", "environment", None, None, "hidden", f"{whom} does not say what it ran on")
    else:
        found = [*_environment(was[0], now[0], (a.id, b.id)), *_device(a, b, keys)]
        if not any(difference.weight == "hidden" for difference in found):
            same.append(f"python, torch, device and {len(_mapping(was[0].get('packages')))} packages")
        yield from found
    for run, attempts in ((a, was), (b, now)) if a.path != b.path else ((a, was),):
        for number, later in enumerate(attempts[1:], 1):
            changed = [d for d in _environment(attempts[0], later, ("its start", "a resume")) if d.weight == "hidden"]
            if changed:
                words = ", ".join(f"{d.name} {d.detail or f'{d.before} -> {d.after}'}" for d in changed)
                detail = f"attempt {number} of {run.id} ran elsewhere than its start: {words}"
                yield Difference("environment", "resume", None, None, "hidden", detail)


def _environments(run: Run) -> list[Mapping[str, Any]]:
    """One per attempt that has a file of its own, the first first; {} where there is none."""
    names = [str(part.get("env") or "env.json") for part in segments_of(run)] or ["env.json"]
    found: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(names):
        path = run.path / name.rpartition("/")[2]
        try:
            found.append(_mapping(read_json(path)))
        except FileNotFoundError:
            found.append({})
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}.") from error
    return [found[0], *(one for one in found[1:] if one)]


def _environment(was: Mapping[str, Any], now: Mapping[str, Any], ids: tuple[str, str]) -> Iterator[Difference]:
    packages = [_mapping(env.get("packages")) for env in (was, now)]
    alone: dict[str, list[Any]] = {
        "python": [f"{env.get('implementation', '')} {env.get('python')}".strip() for env in (was, now)],
        "torch": [found.get("torch") for found in packages],
        "rung": [_rung(env) for env in (was, now)],
        "GPU": [_of_gpus(env, "name") for env in (was, now)],
        "driver": [_of_gpus(env, "driver") for env in (was, now)],
    }
    for name, (before, after) in alone.items():
        if before != after:
            detail = "" if before and after else f"{ids[1] if before else ids[0]} does not say"
            yield Difference("environment", name, before, after, "hidden", detail)
    old, new = ({n: v for n, v in found.items() if n not in ("torch", "rung")} for found in packages)
    if old != new:
        names = [name for name in sorted(old.keys() | new.keys(), key=str.lower) if old.get(name) != new.get(name)]
        theirs = [{n: found[n] for n in names if n in found} for found in (old, new)]
        yield Difference("environment", "packages", theirs[0], theirs[1], "hidden", _changes(old, new, ids))
    for name in _MACHINE:
        if was.get(name) != now.get(name):
            yield Difference("environment", name, was.get(name), now.get(name), "note")


def _rung(env: Mapping[str, Any]) -> str:
    """Version and source: a checkout that is being worked on has one version and many states."""
    version, source = _mapping(env.get("packages")).get("rung"), env.get("rung_sha256")
    return f"{version}, source {source or 'unknown'}"


def _of_gpus(env: Mapping[str, Any], key: str) -> str:
    gpus = env.get("gpus")
    return ", ".join(str(gpu.get(key)) for gpu in gpus if isinstance(gpu, dict)) if isinstance(gpus, list) else ""


def _device(a: Run, b: Run, keys: Collection[str]) -> Iterator[Difference]:
    """What was chosen for the run: `auto` in both configs may mean two devices."""
    was, now = part_of(a, "derived"), part_of(b, "derived")
    for name in ("device", "dtype", "num_ranks", "threads"):
        if was.get(name) != now.get(name):
            is_asked = name == "dtype" and "system.dtype" in keys
            weight = "follows" if is_asked else "note" if name == "threads" else "hidden"
            yield Difference("environment", name, was.get(name), now.get(name), weight)


def budget(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """How long it trains: steps, the horizon of the schedule, targets in all."""
    was, now = part_of(a, "derived"), part_of(b, "derived")
    ends = "the schedules end elsewhere; points in the middle of a schedule cannot be compared"
    steps = [_number(derived.get("num_steps")) for derived in (was, now)]
    horizons = [_number(derived.get("decay_steps")) for derived in (was, now)]
    targets = [_planned(derived) for derived in (was, now)]
    if None in steps:
        yield from _unplanned(a, b)
        return
    if steps[0] != steps[1]:
        equal = "; targets in all are equal" if targets[0] == targets[1] is not None else ""
        yield Difference("budget", "num_steps", steps[0], steps[1], "hidden", ends + equal)
    elif targets[0] != targets[1]:
        yield Difference("budget", "targets", targets[0], targets[1], "hidden", "targets in all; steps are equal")
    if horizons[0] != horizons[1] and (steps[0] == steps[1] or steps != horizons):
        yield Difference("budget", "decay_steps", horizons[0], horizons[1], "hidden", ends)
    if steps[0] == steps[1] and targets[0] == targets[1] and horizons[0] == horizons[1]:
        planned = f", about {targets[0]:.0f} targets" if targets[0] is not None else ""
        same.append(f"budget ({steps[0]:g} steps{planned})")


def _planned(derived: Mapping[str, Any]) -> float | None:
    parts = [_number(derived.get(name)) for name in ("num_steps", "rows_per_step", "targets_per_row")]
    return None if None in parts else float(parts[0] * parts[1] * parts[2])  # type: ignore[operator]


def _unplanned(a: Run, b: Run) -> Iterator[Difference]:
    """Runs that declare no budget, as those of one's own loop: then how far they came."""
    planned = [part_of(run, "derived").get("num_steps") for run in (a, b)]
    if planned[0] != planned[1]:
        whom = a.id if planned[0] is None else b.id
        yield Difference("budget", "num_steps", planned[0], planned[1], "hidden", f"{whom} declares no budget")
    elif a.step != b.step:
        detail = "the last step; neither run declares a budget"
        yield Difference("budget", "last_step", a.step, b.step, "hidden", detail)


def metric(a: Run, b: Run, same: list[str], has_rows: bool) -> Iterator[Difference]:
    """What each eval counts. Sets that only one run evaluates are notes."""
    was, now = a.definitions(), b.definitions()
    counts = [_last_targets(run) for run in (a, b)]
    sets = [{f"eval/{name}" for name in _sets(run)} for run in (a, b)]
    for name in dict.fromkeys([*was, *now, *sorted(sets[0] | sets[1])]):
        known = [name in definitions for definitions in (was, now)]
        if known == [True, True]:
            before, after = _as_mapping(was[name]), _as_mapping(now[name])
            if before == after:
                same.append(f"definition of {name}")
            else:
                old, new = _differing(before, after)
                yield Difference("metric", name, old, new, "metric", _changes(before, after))
            continue
        is_seen = [is_known or _has(run, name, has_rows) for run, is_known in zip((a, b), known)]
        if is_seen != [True, True]:
            yield Difference("metric", name, known[0], known[1], "note", f"only {(a if is_seen[0] else b).id} has it")
        elif any(known):
            whom = b.id if known[0] else a.id
            yield Difference("metric", name, known[0], known[1], "hidden", f"{whom} does not say what it counts")
        else:
            yield _by_fingerprint(name, a, b)
    for name in sorted(counts[0].keys() & counts[1].keys()):
        if counts[0][name] != counts[1][name]:
            detail = "targets of an eval: mask, ignored ids or rows differ"
            yield Difference("metric", f"targets of {name}", counts[0][name], counts[1][name], "metric", detail)


def _by_fingerprint(name: str, a: Run, b: Run) -> Difference:
    """Older runs say of an eval set what it is, not what is counted in it."""
    stream = name.removeprefix("eval/")
    before, after = (_mapping(run.data().get(stream)).get("fingerprint") for run in (a, b))
    if before != after:
        return Difference("metric", name, before, after, "metric", "another eval set")
    return Difference("metric", name, before, after, "note", "neither run says what it counts")


def _has(run: Run, name: str, has_rows: bool) -> bool:
    """Whether the run has an eval set "eval/val", an eval metric "val/loss" or a metric of its rows of this name."""
    if any(name in (f"eval/{row['set']}", *(f"{row['set']}/{key}" for key in row)) for row in evals(run)):
        return True
    return has_rows and bool(column(run, name).values)


def _last_targets(run: Run) -> dict[str, float]:
    return {row["set"]: row["targets"] for row in evals(run) if isinstance(row.get("targets"), int | float)}


def _sets(run: Run) -> set[str]:
    return {str(row["set"]) for row in evals(run)}


def pairing(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """Whether runs of one seed began with the same weights; runs of two seeds never do."""
    yield from _weights_from(a, b, keys)
    if a.document.get("seed") == b.document.get("seed"):
        yield from _initial_weights(a, b, keys, same)


def batches(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """Whether the steps of runs of one seed, with as many rows each of the same data, saw the same rows."""
    rows = [part_of(run, "derived").get("rows_per_step") for run in (a, b)]
    if a.document.get("seed") != b.document.get("seed") or rows[0] != rows[1]:
        return
    found = [column(run, "batch_hash") for run in (a, b)]
    if found[0].values and found[0][1:] == found[1][1:]:
        same.append(f"rows of all {len(found[0].values)} shared steps")
        return
    hashes = [dict(zip(one.steps, one.values)) for one in found]
    shared = sorted(hashes[0].keys() & hashes[1].keys())
    other = [step for step in shared if hashes[0][step] != hashes[1][step]]
    if other:
        detail = f"other rows at {len(other)} of {len(shared)} shared steps, from step {other[0]}"
        yield Difference("pairing", "batches", hashes[0][other[0]], hashes[1][other[0]], "hidden", detail)
    elif shared:
        same.append(f"rows of all {len(shared)} shared steps")
    else:
        silent = [run.id for run, one in zip((a, b), hashes) if not one]
        whom = ["no step is in both records", f"{' '.join(silent)} does not say", "neither run says"][len(silent)]
        detail = f"{whom} which rows a step saw" if silent else whom
        yield Difference("pairing", "batches", None, None, "note", detail)


def _weights_from(a: Run, b: Run, keys: Collection[str]) -> Iterator[Difference]:
    before, after = (part_of(run, "derived").get("weights_from") for run in (a, b))
    if before != after:
        is_asked = "init_from" in keys
        detail = "follows from init_from" if is_asked else "init_from led to another checkpoint"
        yield Difference("pairing", "weights_from", before, after, "follows" if is_asked else "hidden", detail)


def _initial_weights(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    was, now = a.initial_weights(), b.initial_weights()
    if not was or not now:
        if was or now:
            whom = b.id if was else a.id
            detail = f"{whom} does not say what its weights were before the first update"
            yield Difference("pairing", "initial weights", None, None, "note", detail)
        return
    shared = [name for name in was if name in now and _shape(was[name]) == _shape(now[name])]
    other = [name for name in shared if was[name] != now[name]]
    lone = len(was.keys() | now.keys()) - len(shared)
    if other:
        causes = [key for key in keys if not _is_of_training(key)] if a.document.get("seed") is not None else []
        detail = f"{len(other)} of {len(shared)} parameters of equal name and shape begin otherwise: "
        detail += ", ".join(other[:_NUM_TOLD]) + (f"; follows from {', '.join(causes)}" if causes else "")
        weight = "follows" if causes else "hidden"
        yield Difference("pairing", "initial weights", was[other[0]], now[other[0]], weight, detail)
    else:
        same.append(f"initial weights of {len(shared)} parameters" + (f"; {lone} differ in shape" if lone else ""))


def _is_of_training(key: str) -> bool:
    """Whether a key speaks of updates alone; those of a script are known by what scripts call them."""
    return key.startswith(("optimizer.", "lr.")) or _OF_TRAINING.fullmatch(key.rpartition(".")[2]) is not None


def _shape(entry: Any) -> Any:
    return entry[0] if isinstance(entry, list) and entry else None


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {"definition": value}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [n for n in dict.fromkeys([*before, *after]) if (n in before, before.get(n)) != (n in after, after.get(n))]
    return {n: before[n] for n in names if n in before}, {n: after[n] for n in names if n in after}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], ids: tuple[str, str] = ("", "")) -> str:
    """What differs between two mappings, in words."""
    old, new = _differing(before, after)
    words = []
    for name in dict.fromkeys([*old, *new]):
        if name in old and name in new:
            words.append(f"{name} {old[name]} -> {new[name]}")
        else:
            value, whom = (old[name], ids[0] or "the first") if name in old else (new[name], ids[1] or "the second")
            words.append(f"{name} {value} only in {whom}")
    return ", ".join(words)
