"""Whose code a run may name: that of the user, never that which came with a run.

A recipe on the command line is the user's choice. One that a run or a capture names is not: run.json may be a
stranger's, and a stranger's files may lie beside it. So what is imported for a run must be found in the user's own
code: the working folder and what Python finds besides, except runs folders, runs, prepared data and checkpoints,
wherever they lie. Where it would be found is asked of Python's finders one name at a time, since
`importlib.util.find_spec` executes the packages above a module. A module that is imported already has been executed by
the user's choice.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rung.errors import RunError, UserError
from rung.runs.files import read_json
from rung.runs.paths import holds_runs, is_run
from rung.runs.query import Run, root_of

_NAME = re.compile(r"[\w-]+")  # of folders too, which are imported as packages
_MOST_BYTES = 50_000_000  # of a manifest that is looked at
_TRUST = "RUNG_TRUST"  # in the environment, so that it holds for the processes of an A/B too


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """Inside of it, a run may name any code: for --trust."""
    before = os.environ.get(_TRUST)
    os.environ[_TRUST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TRUST]


def _is_trusting() -> bool:
    return os.environ.get(_TRUST) == "1"


def check_module(name: str, run: Run, root: Path) -> None:
    """Raises RunError where importing a module that a run names would execute anything but the user's own code."""
    if _is_trusting() or name in sys.modules:
        return
    if name.partition(".")[0] in sys.stdlib_module_names:
        message = f"{run.id} names the module {name} of Python as its recipe, which is none."
        raise RunError(message, code="foreign-code")
    files = _files_of(name)
    if files is None:
        problem = f"no module {name} for the recipe of {run.id}; looked from {Path.cwd()}"
        raise UserError(problem, code="no-recipe")
    _refuse(files, name, run, root)


def check_file(file: Path, run: Run, root: Path) -> None:
    """Raises RunError where a file of code that a run names is not the user's own."""
    if _is_trusting():
        return
    if not _is_below(file, Path.cwd()):
        message = f"{run.id} names the code {file}, which is not below {Path.cwd()}; add --trust if you trust that run."
        raise RunError(message, code="foreign-code")
    _refuse([file], str(file), run, root)


def is_foreign(path: Path, roots: Sequence[Path] = ()) -> bool:
    """Whether a path lies in a run, a checkpoint, prepared data or one of these runs folders."""
    here = os.path.realpath(Path.cwd())
    for spelling in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        above = [Path(spelling), *Path(spelling).parents]
        if any(is_run(folder) or _is_stored(folder) for folder in above):
            return True
        for root in {real for one in roots for real in (os.path.abspath(one), os.path.realpath(one))}:
            if Path(root) not in above[1:]:
                continue
            # A project may lie in the folder that holds its runs: then the user is in that project.
            child = Path(root) / Path(spelling).relative_to(root).parts[0]
            if child.name.startswith(".") or holds_runs(child) or not _is_below(Path(here), child):
                return True
    return False


def _refuse(paths: Sequence[Path], name: str, run: Run, root: Path) -> None:
    roots = [root, root_of()]
    if run.id == f"{run.path.parent.name}/{run.path.name}":
        roots.append(run.path.parent.parent)
    for path in paths:
        if is_foreign(path, roots):
            raise RunError(
                f"{run.id} names the code {name}, and {path} lies in a runs folder or in what was pulled, so it is not "
                "executed; use your own copy outside of it, or add --trust if you trust whoever made that run.",
                code="foreign-code",
            )


def _files_of(module: str) -> list[Path] | None:
    """Every file that importing a module executes, packages first; None where there is no such module."""
    if not all(_NAME.fullmatch(part) for part in module.split(".")):
        return None
    found: list[Path] = []
    places: list[str] | None = None
    here = str(Path.cwd())
    is_added = here not in sys.path  # as find_recipe will
    if is_added:
        sys.path.insert(0, here)
    try:
        for name in module.split("."):
            # Below a package the plain finder does, under the last name alone: with the full one, a package without
            # __init__.py asks for its parent, which is not imported.
            spec = _top(name) if places is None else PathFinder.find_spec(name, places)
            if spec is None:
                return None
            if spec.has_location and spec.origin:
                found.append(Path(spec.origin))
            below: Any = spec.submodule_search_locations
            places = list(getattr(below, "_path", below) or [])
    finally:
        if is_added:
            sys.path.remove(here)
    return found or None


def _top(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, None)) is not None:
            return spec
    return None


def _is_below(path: Path, folder: Path) -> bool:
    return any(
        Path(spell(path)).is_relative_to(Path(spell(folder))) for spell in (os.path.abspath, os.path.realpath)
    )  # fmt: skip


def _is_stored(folder: Path) -> bool:
    """Whether a folder is a checkpoint or prepared data."""
    file = folder / "manifest.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = read_json(file) if file.is_file() and file.stat().st_size <= _MOST_BYTES else None
        return isinstance(manifest, dict) and isinstance(manifest.get("files"), dict)
    return False
