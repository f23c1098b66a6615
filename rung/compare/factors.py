"""What differs between two runs, and whether that was one change.

A config key that differs was set by somebody and is written down. An edit in a file is what people forget, so code
confounds a comparison unless it is declared by name. Nobody declares data, machine, budget, the meaning of a metric or
the initial weights either: a difference there is hidden unless a config key that differs explains it. A value known for
one run only counts as a difference; one known for neither becomes a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rung.compare.code import ChangedFile, CodeDiff
from rung.compare.code import diff as code_diff
from rung.compare.reading import (
    column,
    evals,
    fell_short,
    is_of_engine,
    list_of,
    mapping,
    number_of,
    part_of,
    planned_targets,
    segments_of,
)
from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import read_json, to_json
from rung.runs.paths import inside
from rung.runs.query import Run

PARTS = ("config", "code", "data", "environment", "seed", "budget", "metric", "pairing")
# What a difference means for a verdict:
#   factor   what was changed on purpose, a candidate for "the one change": a config key that somebody set
#   hidden   a difference nobody declared: code, data, packages, another horizon; spoils a verdict unless allowed
#   metric   the metric itself means something else: the figures cannot be compared at all
#   follows  a consequence of a factor, as a key derived from another
#   note     shown, and harmless: the host, where files lie, how often it was logged
WEIGHTS = ("factor", "hidden", "metric", "follows", "note")
ABSENT = "absent"  # the source of a value that is not there, as opposed to one that is null

# Keys that change where and how a run is computed and shown, not what it learns: those that `rung resume` takes anew,
# without precision, compilation and guard, which can change results.
NO_LEARNING = (
    "system.device", "system.data_workers", "system.threads", "ddp.", "logging.", "signals.", "checkpoint.",
    "sample_interval", "sampling.", "eval_interval",
)  # fmt: skip
# Rows in one forward pass, and passes in one step. A loss is a sum over the step: only dropout knows of the cut.
_CUT = ("data.batch_size", "optimizer.gradient_accumulation_steps")
_DOCUMENTS = (".md", ".rst")
_DOCUMENT_NAMES = ("LICENSE", ".gitignore")
_NUM_FILES, _NUM_PARAMETERS = 4, 6  # shown in a sentence
CHANGED = "changed at step "  # the source of a key that a script set anew while it trained
# Sections of the engine that cannot change what data is read; any other key may be one of the recipe's data.
_NOT_DATA = ("optimizer.", "lr.", "system.", "ddp.", "guard.", "eval_", "init_from", "model.", "data.batch_size")
_MACHINE = ("host", "platform", "cpu", "memory_bytes")
# Keys of updates alone, by what scripts call them: such a key does not explain other initial weights.
_OF_TRAINING = re.compile(
    r"(\w+_)?lr|learning_rate|lr_\w+|batch_size|weight_decay|wd|momentum|betas?|beta[12]|eps|warmup\w*|(max_)?grad\w*"
    r"|clip\w*|(num_|max_|n_)?(epochs|steps|iters)|optim\w*|sched\w*|eval\w*|log\w*|save\w*",
    re.I,
)


class Difference(NamedTuple):
    part: str  # one of PARTS
    name: str  # optimizer.grad_clip; model.py; torch; train
    before: Any
    after: Any
    weight: str  # one of WEIGHTS
    detail: str = ""  # in words, where the two values do not say enough
    source_before: str = ""  # who set it: default, preset tiny, command line; ABSENT
    source_after: str = ""

    @property
    def has_values(self) -> bool:
        """Whether the two values tell what changed; else only `detail` does, as of code."""
        return self.part != "code" and not (self.before is None and self.after is None)


@dataclass
class Comparison:
    """Two runs side by side. `code` holds the patch; `same` what was looked at and found equal, in words."""

    a: Run
    b: Run
    differences: list[Difference]
    code: CodeDiff
    same: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how the runs stand: still running, diverged, shorter than planned

    def of(self, *weights: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.weight in weights]


def compare(a: Run, b: Run, *, has_rows: bool = True) -> Comparison:
    """Everything that differs from `a` to `b`; raises RunError where a file of a run is damaged.

    Without `has_rows` the rows stay unread, and whether each step saw the same data unknown: enough for a listing.
    """
    code = code_diff(a, b)
    same: list[str] = []
    of_code = list(_code(a, b, code, same))
    config = list(_config(a, b, is_other_code=any(d.weight == "hidden" for d in of_code)))
    keys = [d.name for d in config if d.weight == "factor"]
    data = list(_data(a, b, keys, same))
    differences = [*config, *of_code, *data, *_environment(a, b, keys, same)]
    seeds = a.document.get("seed"), b.document.get("seed")
    if seeds[0] != seeds[1]:
        differences.append(Difference("seed", "seed", *seeds, "hidden"))
    elif seeds[0] is None:
        differences.append(Difference("seed", "seed", None, None, "note", "neither run says its seed"))
    else:
        same.append(f"seed ({seeds[0]})")
    differences += _budget(a, b, same)
    differences += _metric(a, b, same, has_rows)
    differences += _pairing(a, b, keys, same)
    if has_rows and not any(d.weight in ("hidden", "follows") for d in data):
        differences += _batches(a, b, same)

    # What to know of a run before its figures are read.
    notes = []
    if a.path == b.path or (a.document.get("uid") and a.document.get("uid") == b.document.get("uid")):
        notes.append(f"both are the same run, {a.id}")
    for run in (a, b):
        if run.status != "finished":
            notes.append(f"{run.id} is {run.status_text}, at step {'none' if run.step is None else run.step}")
        if run.status != "running" and (did := fell_short(run)):
            notes.append(f"{run.id} did {did}")
    return Comparison(a, b, differences, code, same, notes)


def _config(a: Run, b: Run, is_other_code: bool) -> Iterator[Difference]:
    trees = []
    for run in (a, b):
        tree = run.config()
        if not isinstance(tree, dict):
            raise RunError(f"{run.path / 'config.yaml'} is damaged: it holds no keys.", code="run-damaged")
        trees.append(dict(leaves(tree)))
    was, now = trees
    sources = (a.sources(), b.sources())
    names = []
    for name in dict.fromkeys([*was, *now]):
        is_of_one_kind = name in was and name in now and isinstance(was[name], bool) == isinstance(now[name], bool)
        # As JSON too, where NaN is equal to NaN.
        if not is_of_one_kind or (was[name] != now[name] and to_json(was[name]) != to_json(now[name])):
            names.append(name)
    if a.document.get("recipe") != b.document.get("recipe"):
        yield Difference("config", "recipe", a.document.get("recipe"), b.document.get("recipe"), "factor")
    is_known = is_of_engine(a) and is_of_engine(b)
    is_plateau = "plateau" in (was.get("lr.schedule"), now.get("lr.schedule"))
    cuts: list[list[Any]] = [[tree.get(name) for name in _CUT] for tree in (was, now)]
    has_cuts = is_known and all(type(number) is int for cut in cuts for number in cut)
    is_same_rows = has_cuts and math.prod(cuts[0]) == math.prod(cuts[1])

    for name in names:
        if name == "seed" and a.document.get("seed") != b.document.get("seed"):
            continue  # reported as the seed
        set_by = [str(sources[i].get(name, "")) if name in tree else ABSENT for i, tree in enumerate((was, now))]
        origins = {source.partition(": from ")[2] for source in set_by}
        if len(origins) == 1 and (origin := origins.pop()) in names:
            weight, detail = "follows", f"follows from {origin}"
        elif set(set_by) == {ABSENT, "default"} and is_other_code:
            weight, detail = "follows", "the key was added or removed with the code"
        else:
            changed = [source for source in set_by if source.startswith(CHANGED)]
            weight, detail = "factor", ", ".join(dict.fromkeys(changed))
        if weight == "factor" and is_known:
            if name in _CUT and is_same_rows:
                rows = math.prod(cuts[0])
                weight, detail = "note", f"the same {rows} rows a step, split differently: only dropout draws differ"
            elif name == "eval_iters":
                weight, detail = "metric", "evals see other rows"
            elif name.startswith(NO_LEARNING) and not (name == "eval_interval" and is_plateau):
                weight = "note"
        yield Difference("config", name, was.get(name), now.get(name), weight, detail, *set_by)

    # Keys that end alike, and that a script set anew while it trained: the config holds the last value only.
    for name in (name for name in was if name in now and name not in names):
        set_by = [str(one.get(name, "")) for one in sources]
        changed = [f"{source} of the {which}" for source, which in zip(set_by, ("first", "second"))
                   if source.startswith(CHANGED)]  # fmt: skip
        if set_by[0] != set_by[1] and changed:
            detail = f"{', '.join(changed)}: it was another value before"
            yield Difference("config", name, was[name], now[name], "hidden", detail, *set_by)


def _code(a: Run, b: Run, code: CodeDiff, same: list[str]) -> Iterator[Difference]:
    def name_of(run: Run) -> str | None:
        kept = part_of(run, "code")
        return next((str(kept[key])[:12] for key in ("commit", "sha256") if kept.get(key)), None)

    if code.problem:
        yield Difference("code", "code", name_of(a), name_of(b), "hidden", f"unknown: {code.problem}")
    elif not code.files:
        same.append(f"code ({name_of(a)})")
    for file in code.files:
        count = "binary" if file.added is None else f"+{file.added} -{file.removed}"
        detail = {"A": f"new, {count}", "D": f"gone, {count}"}.get(file.status, count)
        yield Difference("code", file.path, file.removed, file.added, _weight_of_file(file), detail)
    for one in code.resumed:
        is_harmless = not one.problem and all(_weight_of_file(file) == "note" for file in one.files)
        what = one.problem or ", ".join(file.path for file in one.files)
        detail = f"{one.run_id} continued at step {one.step} with other code: {what}"
        yield Difference("code", f"resume of {one.run_id}", None, None, "note" if is_harmless else "hidden", detail)


def _weight_of_file(file: ChangedFile) -> str:
    path = PurePosixPath(file.path)
    is_document = path.suffix.lower() in _DOCUMENTS or path.name in _DOCUMENT_NAMES
    return "note" if is_document else "hidden"


# Nobody declares what follows. `keys` are the config keys that differ; `same` is told what was found equal.


def _data(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What was trained on; eval sets are left to `_metric`."""
    was, now = a.data(), b.data()
    evaluated = {str(row["set"]) for run in (a, b) for row in evals(run)}
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


def _environment(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What it ran on, at the start of each run; and what an attempt of one run changed about it."""
    was, now = _environments(a), _environments(b)
    if not was[0] and not now[0]:
        yield Difference("environment", "environment", None, None, "note", "neither run says what it ran on")
    elif not was[0] or not now[0]:
        whom = a.id if not was[0] else b.id
        yield Difference("environment", "environment", None, None, "hidden", f"{whom} does not say what it ran on")
    else:
        found = list(_changed_environment(was[0], now[0], (a.id, b.id)))
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
            ids = ("its start", "a resume")
            if changed := [d for d in _changed_environment(attempts[0], later, ids) if d.weight == "hidden"]:
                changes = ", ".join(f"{d.name} {d.detail or f'{d.before} -> {d.after}'}" for d in changed)
                detail = f"attempt {number} of {run.id} ran in another environment than its start: {changes}"
                yield Difference("environment", "resume", None, None, "hidden", detail)


def _environments(run: Run) -> list[Mapping[str, Any]]:
    """One per attempt that has a file of its own, the first first; {} where there is none."""
    names = [str(part.get("env") or "env.json") for part in segments_of(run)] or ["env.json"]
    found: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(names):
        path = inside(run.path, name.rpartition("/")[2])
        try:
            found.append(mapping(read_json(path)))
        except FileNotFoundError:
            found.append({})
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}.", code="run-damaged") from error
    return [found[0], *(one for one in found[1:] if one)]


def _changed_environment(was: Mapping[str, Any], now: Mapping[str, Any], ids: tuple[str, str]) -> Iterator[Difference]:
    sides = []
    for env in (was, now):
        packages = dict(mapping(env.get("packages")))
        gpus = [gpu for gpu in list_of(env.get("gpus")) if isinstance(gpu, dict)]
        named = {
            "python": f"{env.get('implementation', '')} {env.get('python')}".strip(),
            "torch": packages.pop("torch", None),
            # Version and source: a checkout that is being worked on has one version and many states.
            "rung": f"{packages.pop('rung', None)}, source {env.get('rung_sha256') or 'unknown'}",
            "GPU": ", ".join(str(gpu.get("name")) for gpu in gpus),
            "driver": ", ".join(str(gpu.get("driver")) for gpu in gpus),
        }
        sides.append((named, packages))
    (named_before, old), (named_after, new) = sides
    for name, before in named_before.items():
        after = named_after[name]
        if before != after:
            detail = "" if before and after else f"{ids[1] if before else ids[0]} does not say"
            yield Difference("environment", name, before, after, "hidden", detail)
    if old != new:
        names = [name for name in sorted(old.keys() | new.keys(), key=str.lower) if old.get(name) != new.get(name)]
        before, after = ({n: packages[n] for n in names if n in packages} for packages in (old, new))
        yield Difference("environment", "packages", before, after, "hidden", _changes(old, new, ids))
    for name in _MACHINE:
        if was.get(name) != now.get(name):
            yield Difference("environment", name, was.get(name), now.get(name), "note")


def _budget(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """How long it trains: steps, the horizon of the schedule, targets in all.

    Another number of steps is hidden even where a config key asked for it: no two points of the curves match.
    """
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


def _metric(a: Run, b: Run, same: list[str], has_rows: bool) -> Iterator[Difference]:
    """What each eval counts. Sets that only one run evaluates are notes."""
    definitions = [a.definitions(), b.definitions()]
    sets = sorted({f"eval/{row['set']}" for run in (a, b) for row in evals(run)})
    for name in dict.fromkeys([*definitions[0], *definitions[1], *sets]):
        known = [name in one for one in definitions]
        if all(known):
            before, after = (one if isinstance(one := of[name], dict) else {"definition": one} for of in definitions)
            # A part of a loss that differs as its whole eval set does is told with that.
            of_set = "/".join(name.split("/")[:2])
            is_part = of_set != name and all(of_set in one for one in definitions)
            wholes = [mapping(one.get(of_set)) for one in definitions]
            changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            if is_part and all(wholes[0].get(key) != wholes[1].get(key) for key in changed):
                continue
            if not changed:
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


def _pairing(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
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
        detail += ", ".join(other[:_NUM_PARAMETERS]) + (f"; follows from {', '.join(causes)}" if causes else "")
        weight = "follows" if causes else "hidden"
        yield Difference("pairing", "initial weights", was[other[0]], now[other[0]], weight, detail)
    else:
        same.append(f"initial weights of {len(shared)} parameters" + (f"; {lone} differ in shape" if lone else ""))


def _batches(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
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


class Strictness(NamedTuple):
    """Whether a comparison is of one change. `confounders` are all that stand in the way, several factors included."""

    is_strict: bool
    factor: Difference | None
    confounders: list[Difference]
    allowed: list[Difference]
    words: str


def strictness(comparison: Comparison, allowed: Collection[str] = (), declared: str | None = None) -> Strictness:
    """Strict: exactly one factor, and nothing hidden and no other metric beyond what is `allowed`.

    `allowed` names parts ("seed", "environment") or differences ("packages", "optimizer.beta2"). `declared` makes a
    part ("code") or a difference ("torch") the one factor.
    """
    weighty = comparison.of("factor", "hidden", "metric")
    meant = [d for d in weighty if declared is not None and declared in (d.part, d.name)]
    accepted = [d for d in weighty if d not in meant and (d.part in allowed or d.name in allowed)]
    rest = [d for d in weighty if d not in meant and d not in accepted]
    factors = [d for d in rest if d.weight == "factor"]
    hidden = [d for d in rest if d.weight != "factor"]
    if declared is not None and not meant:
        words = f"not a strict A/B: {declared} was declared as the change, and does not differ"
        return Strictness(False, None, [*factors, *hidden], accepted, words)
    if len(meant) == 1:
        factors.insert(0, meant[0]._replace(weight="factor"))
    elif meant:  # several differences of the part that was declared, as one
        names = ", ".join(d.name for d in meant)
        factors.insert(0, Difference(meant[0].part, str(declared), None, None, "factor", names))

    factor = factors[0] if len(factors) == 1 else None
    besides = f" (allowed: {_listed(accepted)})" if accepted else ""
    if factor is not None and not hidden:
        return Strictness(True, factor, [], accepted, f"strict A/B: {change_of(factor)}{besides}")
    if not factors and not hidden:
        words = f"not an A/B: nothing that matters differs{besides}"
    elif not factors and all(d.part == "seed" for d in hidden):
        words = f"not an A/B: a repeat with another seed{besides}"
    else:
        counts = []
        if factor is None:
            counts.append(f"{len(factors)} factors ({_listed(factors)})" if factors else "no factor")
        if hidden:
            num = len({d.name if d.part != "code" else "code" for d in hidden})
            counts.append(f"{num} confounder{'s' if num != 1 else ''} ({_listed(hidden)})")
        beside = f" beside {change_of(factor)}" if factor is not None else ""
        words = f"not a strict A/B: {', '.join(counts)}{beside}{besides}"
    confounders = hidden if factor is not None else [*factors, *hidden]
    return Strictness(False, factor, confounders, accepted, words)


def change_of(difference: Difference) -> str:
    """optimizer.grad_clip 1.0 -> 0.5; for code the files."""
    if not difference.has_values:
        return f"{difference.name} ({difference.detail})" if difference.detail else difference.name
    before = "(absent)" if difference.source_before == ABSENT else difference.before
    after = "(absent)" if difference.source_after == ABSENT else difference.after
    return f"{difference.name} {before} -> {after}"


def _listed(differences: Sequence[Difference]) -> str:
    """Names, the files of the code as one."""
    files = [d.name for d in differences if d.part == "code"]
    names = [d.name for d in differences if d.part != "code"]
    if files:
        more = f" and {len(files) - _NUM_FILES} more" if len(files) > _NUM_FILES else ""
        names.append("code" if files == ["code"] else f"code: {', '.join(files[:_NUM_FILES])}{more}")
    return ", ".join(names)
