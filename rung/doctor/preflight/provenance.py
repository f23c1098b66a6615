"""Whether keys and code are what their author believes: twin keys, uncommitted code, a recipe that is not kept.

Nothing here refuses a run: the working tree is kept with each run as it is. Keys without effect are in rehearsal.py.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path

from rung.doctor.preflight.result import CheckContext, Result, check
from rung.runs.provenance import SnapshotError, WorkingTree

CODE = (".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".sh")
NUM_NAMED = 5


@check("twin keys", "R1")
def twin_keys(context: CheckContext) -> Result:
    """One name in two sections with two values, where the defaults are equal and somebody set one of them.

    Names of one word (width, every, noise) mean something else in each section, a section that is used twice has the
    same documentation on purpose, and the parts of one section (model.text, model.audio) have sizes of their own: none
    of these is a twin.
    """
    config = context.setup.config
    keys, by_leaf = config.schema.keys, defaultdict(list)
    for key in keys.values():
        if "_" in (leaf := key.name.rpartition(".")[2]):
            by_leaf[leaf].append(key)
    twins = [
        (a, b)
        for some in by_leaf.values()
        for i, a in enumerate(some)
        for b in some[i + 1 :]
        if a.doc != b.doc
        and a.name.partition(".")[0] != b.name.partition(".")[0]
        and (a.default == b.default or f"${{{a.name}}}" == b.default or a.default == f"${{{b.name}}}")
    ]
    differ = [(a.name, b.name) for a, b in twins if config.values[a.name] != config.values[b.name]]
    if differ:
        seen = "; ".join(f"{a}={config.values[a]}, but {b}={config.values[b]}" for a, b in differ)
        remedy = f"set both, or only the one that the other follows: {differ[0][0]} and {differ[0][1]} have one name"
        return Result("warn", seen, remedy)
    return Result("pass", f"{len(twins)} pairs of keys share a name, and agree")


@check("committed code", "R2")
def uncommitted_code(context: CheckContext) -> Result:
    """What differs from the last commit; new files count only if they are code."""
    root = Path.cwd()
    try:
        tree = WorkingTree.find(root)
        if tree is None:
            return Result("skip", f"{root} is not in git; a copy of the code is kept with the run")
        lines = os.fsdecode(tree.git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").stdout)
    except (SnapshotError, OSError) as error:
        return Result("skip", f"git failed ({error}); a copy of the code is kept with the run")
    entries = [(line[:2], line[3:]) for line in lines.split("\0") if line]
    changed = [path for status, path in entries if status != "??" or path.endswith(CODE)]
    if changed:
        more = f" and {len(changed) - NUM_NAMED} more" if len(changed) > NUM_NAMED else ""
        seen = f"{len(changed)} files differ from the last commit: {', '.join(changed[:NUM_NAMED])}{more}"
        remedy = "commit them, so that the run can be named by a commit; the tree is kept with the run as it is"
        return Result("warn", seen, remedy)
    return Result("pass", "the working tree is as committed")


@check("recipe in the kept folder", "R2")
def recipe_is_kept(context: CheckContext) -> Result:
    """Whether the modules of the recipe are kept with the run. Installed ones are known by their version."""
    root = Path.cwd().resolve()
    try:
        tree = WorkingTree.find(root)
    except (SnapshotError, OSError):
        tree = None
    kept = tree.top.resolve() if tree is not None else root
    files = _modules_of(type(context.setup.recipe).__module__)
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
        return Result("warn", f"{lost}: {why}, so it is not kept with the run", remedy)
    return Result("pass", f"{len(inside)} modules of the recipe are in {kept}, the rest is installed")


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
