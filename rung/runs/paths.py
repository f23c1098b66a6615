"""What a run folder may hold, and that nothing in it leads out of it.

A run may come from anybody: pulled, copied, unpacked. So a name that stands in a file, in a manifest or in a bucket
becomes a path by `inside` alone, a folder is listed by `walk`, and something is deleted by `remove`; none of them
follows a link out of the run. Links that lead to another place of the same run are left to work. `check` is what
everybody who opens a run asks first. It looks at the names in the folder itself, in under 0.1 ms; the folders
below it are looked at by whoever goes into them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from rung.errors import RunError
from rung.runs.files import read_json

_STEP = r"[0-9]{1,18}"
_NAME = r"[^/]+"
# Every file that a run may have, as a path in it. What it has besides belongs into files/.
_KNOWN = re.compile(
    rf"""run\.json | heartbeat | [a-z][a-z0-9_-]*(\.[a-z0-9_-]+)*\.(json|yaml|ndjson)
    | [A-Za-z0-9][\w.-]*\.(md|html|svg|png|csv) | [a-z][a-z0-9_-]*(\.[0-9]+)?\.tar\.gz
    | (metrics|tables)/{_STEP}\.ndjson
    | (checkpoints|captures)/(best|pinned)
    | (checkpoints|captures)/(aside-[a-z0-9]+/)?{_STEP}/[A-Za-z0-9][\w.-]*\.(json|safetensors|pt)
    | stalls/rank-[0-9]{{1,6}}\.txt | samples/{_STEP}/{_NAME} | evals/{_NAME} | (mirror|files)/.+""",
    re.VERBOSE,
)
_FOLDERS = {"metrics", "tables", "checkpoints", "captures", "samples", "evals", "mirror", "files", "stalls"}
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # of another system, by any suffix
_ODD = re.compile(r"[\x00-\x1f\x7f\\]")


def inside(folder: Path, name: str) -> Path:
    """The path of `name` below a folder; RunError where the name, or a link on the way, leads out of it."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        message = f"{folder} names the file {name[:200]!r}, which leads out of it and is not opened; do not trust it."
        raise RunError(message, code="bad-path")
    path = folder
    for part in parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # nothing is there, and whoever opens it says so
        if stat.S_ISLNK(mode):
            refuse_link(folder, path)
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise RunError(f"{path} is neither a file nor a folder and is not opened; remove it.", code="leads-out")
    return path


def check_file(folder: Path, path: Path) -> None:
    """Raises RunError where a path below a folder is a link out of it, or anything but a file; nothing may be there."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            return
        if stat.S_ISLNK(mode):
            refuse_link(folder, path)
            mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise RunError(f"{path} is not a file and is not opened; remove it.", code="leads-out")


def refuse_link(folder: Path, path: Path) -> None:
    """Raises RunError for a link that leads out of the folder."""
    if not stays(folder, path):
        raise RunError(
            f"{path} is a link that leads out of {folder} and is not followed; remove it, or put what it names in its "
            "place.",
            code="leads-out",
        )


def stays(folder: Path, path: Path) -> bool:
    """Whether a path below a folder still lies there when all links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check(folder: Path) -> None:
    """Raises RunError where something that a run has is a link out of its folder, or neither a file nor a folder."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
                    continue
                if entry.name not in _FOLDERS and not is_known(entry.name) and entry.name != ".config.json":
                    continue  # nobody opens it
                if entry.is_symlink():
                    refuse_link(folder, Path(entry.path))
                elif not (entry.is_file() or entry.is_dir()):
                    message = f"{entry.path} is neither a file nor a folder and is not opened; remove it."
                    raise RunError(message, code="leads-out")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # whoever reads run.json says so


def walk(folder: Path, top: str = "", is_seen: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
    """Paths of the files below `top`, relative to the folder, without names that `is_seen` refuses.

    A link to a file of the run is one; a link to a folder of it is passed over, since its files have their own names,
    and so is a pipe or a socket. RunError for a link that leads out.
    """
    if top:
        inside(folder, top)
    for place, folders, files in os.walk(folder / top):
        for name in filter(is_seen, [*folders, *files]):
            if os.path.islink(path := os.path.join(place, name)):
                refuse_link(folder, Path(path))
        folders[:] = filter(is_seen, folders)
        for name in filter(is_seen, files):
            if os.path.isfile(path := os.path.join(place, name)):
                yield Path(path).relative_to(folder).as_posix()


def remove(folder: Path, name: str) -> None:
    """Deletes a file, a folder or a link below a folder; never through a link. OSError where that fails."""
    parent, _, last = name.rpartition("/")
    path = (inside(folder, parent) if parent else folder) / last
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)  # which follows no link either
    else:
        path.unlink()


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, wherever it lies."""
    file = folder / "run.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        document = read_json(file) if file.is_file() else None
        return isinstance(document, dict) and "schema" in document and "id" in document
    return False


def holds_runs(folder: Path) -> bool:
    """Whether a folder is an experiment, with runs in it."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(entry.name.isdecimal() and is_run(Path(entry.path)) for entry in entries)
    return False


def outside_of_runs(folder: Path) -> Path:
    """The nearest folder at or above this one that lies in no run, no experiment and no folder of runs."""
    folder = folder.resolve()
    found = folder
    for place in (folder, *folder.parents):  # to the top: a run may hold what looks like one
        if is_run(place):
            found = place.parents[2] if holds_runs(place.parent) and len(place.parents) > 2 else place.parent
        elif holds_runs(place):
            found = place.parents[1] if len(place.parents) > 1 else place
    return found


def is_known(name: str) -> bool:
    """Whether a run may have a file of this name, a path in its folder."""
    return bool(_KNOWN.fullmatch(name)) and is_plain(name)


def is_plain(name: str) -> bool:
    """Whether a relative path leads down, shows all of its names, and means a file on every system."""
    parts = name.split("/")
    return not any(not part or part[0] == "." or _ODD.search(part) or _DEVICES.fullmatch(part) for part in parts)
