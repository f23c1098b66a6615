"""Whether keys and code are what their author believes: keys that nothing reads, twins, code that is nowhere committed.

Reading is noted by the config itself; what remains is to run what an eval runs, on one row of each set, so that keys
which are only read there count as read. Keys that the loop alone reads are listed in LATE. Nothing here refuses a run:
a working tree is kept with each run as it is, and a user may know better.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rung.data.prefetch import to_device
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.recipe import Draw
from rung.runs.provenance import SnapshotError, WorkingTree

# Keys of the engine that only the loop or the command line reads, after everything that is looked at here.
LATE = (
    "eval_interval", "sample_interval", "eval_only", "checkpoint.", "logging.", "guard.", "signals.",
    "system.data_workers",
)  # fmt: skip
CODE = (".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".sh")
NUM_NAMED = 5


def unread_keys(bench: Bench) -> Iterator[Result]:
    """Keys that were set and that nothing has asked for, after the build and one row of every set."""
    name, config = "unread keys", bench.setup.config
    try:
        _touch(bench)
    except Exception as error:  # other checks say what is wrong with it
        seen = f"a row could not be run ({type(error).__name__}: {error}), so what reads the keys is not known"
        yield Result(name, "skip", seen, rule="R1")
        return
    unread = [
        key for key in config.unread() if not key.startswith(LATE) and not config.sources[key].startswith("preset")
    ]
    if unread:
        why = {key: config.schema.keys[key].doc for key in unread} | dict(bench.setup.recipe.unused())
        what = "; ".join(f"{key}={config.values[key]} ({why[key]})" for key in unread)
        remedy = "leave them out, or set what they depend on: as it is they change nothing"
        yield Result(name, "warn", f"set, but nothing reads them: {what}", remedy, "R1")
    else:
        num_set = sum(not source.startswith(("default", "derived")) for source in config.sources.values())
        yield Result(name, "pass", f"all {num_set} keys that were set are read", rule="R1")


def _touch(bench: Bench) -> None:
    """Runs what an eval would, on a row of each set, so that keys which are read there count as read."""
    setup = bench.setup
    draw = Draw(setup.cfg.seed, EVAL_STEP, np.arange(1))
    with eval_mode(setup.state.model), setup.precision.autocast():
        for stream in setup.evaluator.streams.values():
            batch, _ = to_device(stream.gather(np.zeros(1, np.int64), draw), setup.world.device)
            setup.stepper.objectives[0].plain_loss(batch, draw)
            setup.recipe.measure(setup.state.model, batch, draw)


def twin_keys(bench: Bench) -> Iterator[Result]:
    """One name in two sections with two values, where they were one by default and somebody set one of them.

    Names of one word (width, every, noise) mean something else in each section, and sections of one kind that are used
    twice have the same line of documentation on purpose: neither is a twin.
    """
    config = bench.setup.config
    keys, by_leaf = config.schema.keys, defaultdict(list)
    for key in keys.values():
        if "_" in (leaf := key.name.rpartition(".")[2]):
            by_leaf[leaf].append(key)
    twins = [
        (a, b)
        for some in by_leaf.values()
        for i, a in enumerate(some)
        for b in some[i + 1 :]
        if a.doc != b.doc and (a.default == b.default or f"${{{a.name}}}" == b.default or a.default == f"${{{b.name}}}")
    ]
    differ = [(a.name, b.name) for a, b in twins if config.values[a.name] != config.values[b.name]]
    if differ:
        seen = "; ".join(f"{a}={config.values[a]}, but {b}={config.values[b]}" for a, b in differ)
        remedy = f"set both, or only the one that the other follows: {differ[0][0]} and {differ[0][1]} have one name"
        yield Result("twin keys", "warn", seen, remedy, "R1")
    else:
        yield Result("twin keys", "pass", f"{len(twins)} pairs of keys share a name, and agree", rule="R1")


def uncommitted_code(bench: Bench) -> Iterator[Result]:
    """What differs from the last commit; new files count when they are code, for data and notes lie about anywhere."""
    name, root = "committed code", Path.cwd()
    try:
        tree = WorkingTree.find(root)
        if tree is None:
            yield Result(name, "skip", f"{root} is not in git; a copy of the code is kept with the run", rule="R2")
            return
        changed = _changed(tree)
    except (SnapshotError, OSError) as error:
        yield Result(name, "skip", f"git does not answer ({error}); a copy of the code is kept with the run", rule="R2")
        return
    if changed:
        more = f" and {len(changed) - NUM_NAMED} more" if len(changed) > NUM_NAMED else ""
        seen = f"{len(changed)} files differ from the last commit: {', '.join(changed[:NUM_NAMED])}{more}"
        remedy = "commit them, so that the run can be named by a commit; the tree is kept with the run as it is"
        yield Result(name, "warn", seen, remedy, "R2")
    else:
        yield Result(name, "pass", "the working tree is as committed", rule="R2")


def _changed(tree: WorkingTree) -> list[str]:
    lines = os.fsdecode(tree.git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").stdout)
    entries = [(line[:2], line[3:]) for line in lines.split("\0") if line]
    return [path for status, path in entries if status != "??" or path.endswith(CODE)]


def recipe_is_kept(bench: Bench) -> Iterator[Result]:
    """Whether the modules of the recipe lie in what is kept with the run. Installed ones are known by their version."""
    name, root = "recipe in the kept folder", Path.cwd().resolve()
    try:
        tree = WorkingTree.find(root)
    except (SnapshotError, OSError):
        tree = None
    kept = tree.top.resolve() if tree is not None else root
    files = _modules_of(type(bench.setup.recipe).__module__)
    outside = [file for file in files if not file.is_relative_to(kept)]
    inside = [str(file.relative_to(kept)) for file in files if file.is_relative_to(kept)]
    ignored = []
    if tree is not None and inside:
        found = tree.git("check-ignore", "--", *inside, check=False).stdout
        ignored = [kept / line for line in os.fsdecode(found).splitlines()]
    if outside or ignored:
        lost = ", ".join(map(str, [*outside, *ignored][:NUM_NAMED]))
        why = f"outside of {kept}" if outside else "ignored by git"
        remedy = f"start from the folder that holds the recipe, or move it below {kept} and out of .gitignore"
        yield Result(name, "warn", f"{lost}: {why}, so it is not kept with the run", remedy, "R2")
    else:
        yield Result(
            name, "pass", f"{len(inside)} modules of the recipe lie in {kept}, the rest is installed", rule="R2"
        )


def _modules_of(recipe_module: str) -> list[Path]:
    """Files of the recipe's own package, or of the folder it lies in when it has none; not those of installed ones."""
    own = sys.modules.get(recipe_module)
    file = getattr(own, "__file__", None)
    package = recipe_module.partition(".")[0]
    if file is None or package == "rung":
        return []
    folder = Path(file).resolve().parent
    found = set()
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and (name.partition(".")[0] == package or Path(path).resolve().parent == folder):
            found.add(Path(path).resolve())
    return sorted(path for path in found if not {"site-packages", "dist-packages"} & set(path.parts))


UNREAD = Check("unread keys", unread_keys)  # after all others: what they run may read a key, and ids are known by then
CHECKS: list[Check] = [
    Check("twin keys", twin_keys),
    Check("committed code", uncommitted_code),
    Check("recipe in the kept folder", recipe_is_kept),
]
