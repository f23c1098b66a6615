"""How the code of two runs differs: what they executed, and their snapshots, uncommitted and untracked files included.

Where both runs say what they executed (runs/executed.py), that decides about Python: a file that was edited, lies
elsewhere or is ignored by git is found by its hash, and one that neither ran is a note. What else differs between the
folders counts, because a run may have read it, unless it is output. Of runs that do not say, every file counts.

Equal trees are equal, also where no repository is at hand. Two commits of one repository are compared by git, with
nothing of the user's settings; anything else (an archive, two repositories) file by file. Nothing is unpacked, checked
out or fetched.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rung.compare.reading import list_of, mapping, segments_of
from rung.errors import RunError
from rung.runs.executed import CONFIG_SUFFIXES, read_contents
from rung.runs.executed import SCHEMA as EXECUTED_SCHEMA
from rung.runs.files import from_json, newer, read_json
from rung.runs.paths import inside, outside_of_runs
from rung.runs.provenance import SnapshotError, WorkingTree, is_source
from rung.runs.query import Run

MOST_ARCHIVE_BYTES = 200_000_000  # unpacked, in memory; provenance packs a quarter of it
MOST_COMPARED_BYTES = 2_000_000  # of one file that is compared here: difflib takes seconds at that size
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # anything else would reach git as an option
_NUM_SHOWN = 5
_NUM_OTHERS = 2_000
Files = Mapping[bytes, tuple[str, Callable[[], bytes]]]  # name -> what git calls the content, and how to get it


class ChangedFile(NamedTuple):
    """A file that differs; `status` is M, A or D, and lines are counted as git does (None for a binary file)."""

    status: str
    path: str
    added: int | None
    removed: int | None
    why: str = ""  # what is to be known of it besides the lines
    weight: str = "hidden"  # or note; lone: one run executed it and the other did not, which may follow from a key


class Resumed(NamedTuple):
    """An attempt of a run that continued with other code than the run began with."""

    run_id: str
    step: int | None
    files: list[ChangedFile]
    problem: str


@dataclass
class CodeDiff:
    """No `files` means equal, unless a `problem` says why nothing could be compared: then nobody knows."""

    files: list[ChangedFile] = field(default_factory=list)
    patch: str = ""
    problem: str = ""
    notes: list[str] = field(default_factory=list)  # files that no snapshot holds, code that changed on a resume
    resumed: list[Resumed] = field(default_factory=list)
    is_executed: bool = False  # whether both runs say what they executed
    num_executed: int = 0  # files that both executed, and that are equal
    unknown: list[str] = field(default_factory=list)  # what could not be looked at
    ran: tuple[Ran | None, Ran | None] = (None, None)


class Snapshot(NamedTuple):
    """What run.json says of the code of one attempt, and where its archive would be."""

    run_id: str
    folder: Path
    code: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.code.get("kind"))

    @property
    def commit(self) -> str:
        return str(self.code.get("commit"))

    def names(self) -> set[tuple[str, str]]:
        """What names the content: two snapshots that share one of them are equal."""
        keys = {"git": ("tree", "commit"), "tar": ("sha256",)}.get(self.kind, ())
        return {(key, str(self.code[key])) for key in keys if self.code.get(key)}


class CodeUnavailable(Exception):
    """Why a snapshot cannot be read; becomes a `problem`."""


class Ran(NamedTuple):
    """What an attempt of a run executed, and where to read it."""

    snapshot: Snapshot
    document: Mapping[str, Any]
    has_ended: bool

    @property
    def files(self) -> list[Mapping[str, Any]]:
        return [one for one in list_of(self.document.get("files")) if isinstance(one, dict) and one.get("sha256")]

    @property
    def written(self) -> set[str]:
        """Files of the kept folder that appeared or changed while it ran."""
        names = [*list_of(self.document.get("wrote")), *list_of(self.document.get("outputs"))]
        return set(map(str, names))

    def content(self, entry: Mapping[str, Any]) -> bytes | None:
        """What it executed under this name; None where nobody kept it."""
        label, kept = str(entry.get("file")), str(entry.get("kept") or "")
        try:
            if kept == "snapshot":
                found = _files(self.snapshot, is_mixed=False).get(os.fsencode(label))
                data = found[1]() if found is not None else None
                return data if data is not None and hashlib.sha256(data).hexdigest() == entry["sha256"] else None
            if kept:
                return read_contents(inside(self.snapshot.folder, os.path.basename(kept))).get(label)
        except (CodeUnavailable, SnapshotError, OSError, ValueError, RunError):
            pass
        return None


def ran(run: Run, snapshot: Snapshot, env: str = "env.json") -> Ran | None:
    """None where the run does not say what it executed, as one that was recorded before runs did."""
    try:
        path = inside(run.path, f"executed{os.path.basename(env).removeprefix('env')}")
        document = mapping(read_json(path))
    except (OSError, ValueError, RunError):
        return None
    if problem := newer(path, document, EXECUTED_SCHEMA):
        raise RunError(f"{problem}.", code="version-mismatch")
    if not list_of(document.get("files")):  # a module at least is always there, unless nothing could be seen
        return None
    return Ran(snapshot, document, run.status == "finished")


def diff(a: Run, b: Run) -> CodeDiff:
    """The change from the code of `a` to that of `b`, each as it was at the run's start."""
    snapshots = [Snapshot(run.id, run.path, mapping(run.document.get("code"))) for run in (a, b)]
    firsts = [next(iter(segments_of(run)), {}) for run in (a, b)]
    sides = [ran(run, one, str(first.get("env") or "env.json")) for run, one, first in zip((a, b), snapshots, firsts)]
    found = compared(*snapshots)
    if sides[0] is not None and sides[1] is not None:
        found = _with_executed(found, sides[0], sides[1])
    else:
        found = _with_scripts(found, a, b, snapshots)
        found.files = [_as_notebook(file, snapshots) or file for file in found.files]
        silent = [run.id for run, side in zip((a, b), sides) if side is None]
        found.unknown.append(f"what {' and '.join(dict.fromkeys(silent))} executed outside of the kept folder")
    found.ran = (sides[0], sides[1])
    for snapshot in snapshots:
        left_out = [str(name) for name in list_of(snapshot.code.get("left_out"))]
        if left_out:
            more = f" and {len(left_out) - _NUM_SHOWN} more" if len(left_out) > _NUM_SHOWN else ""
            found.notes.append(f"the snapshot of {snapshot.run_id} leaves out {', '.join(left_out[:_NUM_SHOWN])}{more}")

    for run, first, side in list(zip((a, b), snapshots, sides))[: 2 if a.path != b.path else 1]:
        seen = set()
        for part in segments_of(run):
            later = first._replace(code=mapping(part.get("code")))
            # A rollback writes the attempt once more: the same code, reported once.
            if not part.get("code") or (key := frozenset(later.names())) in seen:
                continue
            seen.add(key)
            then = ran(run, later, str(part.get("env") or "env.json"))
            if side is not None and then is not None:
                change = _with_executed(compared(first, later), side, then, is_resume=True)
            elif first.names() & later.names():
                continue
            else:
                change = compared(first, later)
            files = [file for file in change.files if file.weight == "hidden"]
            if files or change.problem:
                found.resumed.append(Resumed(run.id, part.get("first_step"), files, change.problem))
                what = change.problem or ", ".join(file.path for file in files[:_NUM_SHOWN])
                found.notes.append(f"{run.id} continued at step {part.get('first_step')} with other code: {what}")
    return found


def _with_scripts(found: CodeDiff, a: Run, b: Run, snapshots: list[Snapshot]) -> CodeDiff:
    """Of runs that do not say what they executed: two of somebody's own loop that name two scripts ran other code, even
    where both trees hold both of them."""
    is_own = all(run.document.get("recipe") == "own loop" for run in (a, b))
    commands = [list_of(run.document.get("command")) for run in (a, b)]
    scripts = [str(command[0]) for command in commands if command]
    if is_own and len(scripts) == 2 and all(scripts) and scripts[0] != scripts[1]:
        contents = [_script(snapshot, script) for snapshot, script in zip(snapshots, scripts)]
        if None in contents:  # not in the snapshot, or it could be one of several
            found.files.append(ChangedFile("M", " -> ".join(scripts), None, None))
        elif contents[0] == contents[1]:
            found.notes.append(f"the script has two names, {scripts[0]} and {scripts[1]}, and the same content")
        else:
            changed, patch = _compared_file(" -> ".join(scripts), *contents)
            found.files.append(changed)
            found.patch += patch
    return found


# What was executed


def _with_executed(tree: CodeDiff, a: Ran, b: Ran, is_resume: bool = False) -> CodeDiff:
    """The change of two folders, with what ran in the first place and all else weighed by it."""
    found = CodeDiff(problem=tree.problem, notes=list(tree.notes), is_executed=True)
    patches: list[str] = []
    sides = (a, b)
    of_file: list[set[str]] = [{str(one["file"]) for one in side.files} for side in sides]
    in_tree = {file.path for file in tree.files}
    for old, new in _paired(a.files, b.files):
        if old is not None and new is not None:
            _compare_executed(found, patches, (a, old), (b, new))
            continue
        if is_resume:  # it may have stopped before, or begun after, the import
            continue
        side, entry = (a, old) if old is not None else (b, new)
        assert entry is not None
        other = b if side is a else a
        name = str(entry["file"])
        if entry.get("how") == "named" and name in in_tree:  # read by the other under another name, if at all
            of_file[0 if side is a else 1].discard(name)
            continue
        content, which = side.content(entry), side.snapshot.run_id
        status = "A" if side is b else "D"
        if entry.get("is_written"):
            why, weight = f"written by {which} itself", "note"
        elif (there := _in_snapshot(other.snapshot, name)) is not None and (
            hashlib.sha256(there).hexdigest() == entry["sha256"]
        ):
            why, weight = f"both had it, only {which} executed it", "note"
        elif not other.has_ended:
            why, weight = f"only {which} executed it; {other.snapshot.run_id} has not finished", "note"
        else:
            verb = "executed" if entry.get("how") == "imported" else "names"
            why, weight = f"only {which} {verb} it", "lone" if entry.get("how") == "imported" else "hidden"
        changed, patch = _compared_file(name, *((None, content) if side is b else (content, None)))
        if content is None:
            changed = changed._replace(status=status, added=None, removed=None)
        elif weight != "note":
            patches.append(patch)
        found.files.append(changed._replace(why=why, weight=weight))

    # Files of the folders that neither executed.
    is_notebook = [side.document.get("main") in ("notebook", "session") for side in sides]
    blocks = _by_file(tree.patch)
    for file in tree.files:
        if file.path in of_file[0] or file.path in of_file[1]:
            continue  # told above, by what was executed
        weighed = _weighed(file, sides, is_notebook)
        found.files.append(weighed)
        if weighed.weight != "note" and file.path in blocks:
            patches.append(blocks[file.path])
    found.patch = "".join(patches)
    if "notebook" in (a.document.get("main"), b.document.get("main")):
        found.notes.append("of a notebook, the cells that were executed are compared")
    for side in sides:
        has_program = any("__main__" in _modules(one) for one in side.files)
        if side.document.get("main") == "session" or (side.document.get("main") == "piped" and not has_program):
            found.unknown.append(f"what was typed or piped into {side.snapshot.run_id}")
    return found


def _modules(entry: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in list_of(entry.get("modules"))]


def _paired(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """Each executed file with its counterpart: the program with the program, a module with the module of that name,
    whatever folder it was found in, then by name."""
    pairs: list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]] = []
    left, right = list(before), list(after)

    def take(key: Callable[[Mapping[str, Any]], Collection[Any]]) -> None:
        places: dict[Any, Mapping[str, Any]] = {}
        for one in right:
            for name in key(one):
                places.setdefault(name, one)
        for one in list(left):
            partner = next((places[name] for name in key(one) if name in places), None)
            if partner is not None and any(partner is other for other in right):
                pairs.append((one, partner))
                left[:] = [other for other in left if other is not one]
                right[:] = [other for other in right if other is not partner]

    take(lambda one: ["__main__"] if "__main__" in _modules(one) else [])
    take(lambda one: [(str(one["file"]), name) for name in _modules(one)])
    take(lambda one: [str(one["file"])])
    take(_modules)
    take(lambda one: [(os.path.basename(str(one["file"])), one["sha256"])])
    return [*pairs, *((one, None) for one in left), *((None, one) for one in right)]


def _compare_executed(
    found: CodeDiff, patches: list[str], before: tuple[Ran, Mapping[str, Any]], after: tuple[Ran, Mapping[str, Any]]
) -> None:
    old, new = before[1], after[1]
    names = [str(old["file"]), str(new["file"])]
    name = " -> ".join(dict.fromkeys(names))
    edited = [side.snapshot.run_id for side, entry in (before, after) if entry.get("is_edited")]
    if edited:
        why = f"edited after {' and '.join(edited)} had loaded it: what ran is not known"
        found.files.append(ChangedFile("M", name, None, None, why))
    elif old["sha256"] == new["sha256"]:
        found.num_executed += 1
        if names[0] != names[1] and "__main__" in _modules(old):
            found.notes.append(f"the script has two names, {names[0]} and {names[1]}, and the same content")
    elif old.get("is_written") and new.get("is_written"):
        found.files.append(ChangedFile("M", name, None, None, "written by both runs themselves", "note"))
    else:
        contents = [side.content(entry) for side, entry in (before, after)]
        if contents[0] is None or contents[1] is None:
            whys = [str(entry.get("why") or "its content was not kept") for entry in (old, new)]
            why = whys[0] if contents[0] is None else whys[1]
            found.files.append(ChangedFile("M", name, None, None, f"other content; {why}"))
        elif contents[0] == contents[1]:
            why = "differs only in what looks like a secret, which is not kept"
            found.files.append(ChangedFile("M", name, None, None, why))
        elif name.endswith(".ipynb") and cells_of(contents[0]) == cells_of(contents[1]) is not None:
            found.num_executed += 1
        else:
            changed, patch = _compared_file(name, *contents)
            found.files.append(changed)
            patches.append(patch)


def _in_snapshot(snapshot: Snapshot, name: str) -> bytes | None:
    try:
        found = _files(snapshot, is_mixed=False).get(os.fsencode(name))
        return None if found is None else found[1]()
    except (CodeUnavailable, SnapshotError, OSError):
        return None


def _weighed(file: ChangedFile, sides: tuple[Ran, Ran], is_notebook: list[bool]) -> ChangedFile:
    """A file of the kept folders that no run executed: whether one may have read it."""
    path = PurePosixPath(file.path)
    suffix, ids = path.suffix.lower(), [side.snapshot.run_id for side in sides]
    written = [side.written for side in sides]
    outputs = [set(map(str, list_of(side.document.get("outputs")))) for side in sides]

    def note(why: str) -> ChangedFile:
        return file._replace(why=why, weight="note")

    if suffix in _PYTHON:
        return note("executed by neither run")
    if suffix == ".ipynb":
        if (same := _as_notebook(file, [side.snapshot for side in sides])) is not None:
            return same
        instead = "the cells that were executed are compared instead"
        return note(instead if any(is_notebook) else "executed by neither run")
    if any(file.path in names for names in outputs):
        return note("output of a run")
    is_tracked = any(_is_tracked(side.snapshot, file.path) for side in sides)
    if suffix in CONFIG_SUFFIXES or path.name in _CONFIG_NAMES or suffix in _CODE:
        # A person edits the next run's configuration while this one trains: that one run "wrote" it says little.
        if all(file.path in names for names in written):
            return note("written by both runs themselves")
        other = written[0] | written[1] | _written_by_others(sides)
        is_new = file.status != "M" and not is_tracked and suffix in CONFIG_SUFFIXES
        if is_new and file.path in other and not any(_names(side, path.name) for side in sides):
            return note("written while a run ran, and named by no file that was executed")
        return file
    if suffix in _OUTPUTS or suffix.startswith(".tfevents") or "tfevents" in path.name:
        return file if is_tracked and suffix in _DATA else note("output, neither code nor configuration")
    if file.added is None and not is_tracked:
        return note("binary, neither code nor configuration")
    if file.status != "M" and not is_tracked:
        return note(f"neither code nor configuration; only {ids[1] if file.status == 'A' else ids[0]} had it")
    if all(file.path in names for names in written):
        return note("written by both runs themselves")
    if not is_tracked and file.path in written[0] | written[1] | _written_by_others(sides):
        return note("written while a run ran")
    return file


def _names(side: Ran, name: str) -> bool:
    """Whether a source that a run executed spells out this name."""
    return any(name.encode() in (side.content(one) or b"") for one in side.files)


_PYTHON = frozenset({".py", ".pyw", ".pyi", ".pyc"})
_CODE = frozenset(
    {".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".jl", ".js", ".j2", ".jinja"}
)
_CONFIG_NAMES = frozenset({"Makefile", "Dockerfile", ".env", ".flags"})
# What programs write. Those of _DATA are also read: a tracked one that differs counts.
_DATA = frozenset(
    {".npy", ".npz", ".bin", ".pkl", ".pt", ".pth", ".ckpt", ".safetensors", ".h5", ".parquet", ".gz", ".zip"}
)
_OUTPUTS = _DATA | {
    ".log", ".out", ".err", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".html", ".wav", ".mp3", ".mid", ".mp4",
    ".db", ".sqlite", ".prof", ".onnx", ".lock", ".tmp", ".swp", ".bak", ".pid", ".tar", ".o", ".so",
}  # fmt: skip


def cells_of(data: bytes) -> list[str] | None:
    """The code of a notebook, cell by cell, without outputs, counts and texts; None where it is no notebook."""
    try:
        cells = mapping(from_json(data)).get("cells")
        sources = [mapping(one).get("source") for one in list_of(cells) if mapping(one).get("cell_type") == "code"]
    except (ValueError, RecursionError):
        return None
    if cells is None:
        return None
    texts = ["".join(map(str, one)) if isinstance(one, list) else str(one or "") for one in sources]
    return [text.strip() for text in texts if text.strip()]


def _as_notebook(file: ChangedFile, snapshots: Sequence[Snapshot]) -> ChangedFile | None:
    """A notebook whose code is the same, as a note; None for any other file."""
    if not file.path.endswith(".ipynb"):
        return None
    contents = [_in_snapshot(snapshot, file.path) for snapshot in snapshots]
    cells = [None if content is None else cells_of(content) for content in contents]
    if cells[0] is None or cells[0] != cells[1]:
        return None
    return file._replace(why="the same code: only outputs, counts or texts differ", weight="note")


def _is_tracked(snapshot: Snapshot, name: str) -> bool:
    """Whether the last commit before the run has the file."""
    head = str(snapshot.code.get("head") or "")
    if snapshot.kind != "git" or not _HASH.fullmatch(head):
        return False
    try:
        return _tracked(snapshot.folder, str(snapshot.code.get("root") or ""), head, snapshot.commit, name)
    except (CodeUnavailable, SnapshotError, OSError):
        return False


@functools.lru_cache(maxsize=1024)
def _tracked(folder: Path, root: str, head: str, commit: str, name: str) -> bool:
    repository = _repository([Snapshot("", folder, {"kind": "git", "commit": commit, "root": root})])
    if repository is None:
        return False
    return repository.git("cat-file", "-e", f"{head}:{name}", check=False).returncode == 0


def _written_by_others(sides: tuple[Ran, Ran]) -> set[str]:
    """What other runs beside these two wrote: of eight runs in a row, the third sees what the first two left."""
    found: set[str] = set()
    for root in dict.fromkeys(side.snapshot.folder.parent.parent for side in sides):
        found |= _written_below(root, max((p.stat().st_mtime_ns for p in (root,) if p.is_dir()), default=0))
    return found


@functools.lru_cache(maxsize=8)
def _written_below(root: Path, changed: int) -> frozenset[str]:
    found: set[str] = set()
    for path in sorted(root.glob("*/*/executed*.json"))[:_NUM_OTHERS]:
        with contextlib.suppress(OSError, ValueError):
            document = mapping(read_json(path))
            found |= {str(name) for key in ("wrote", "outputs") for name in list_of(document.get(key))}
    return frozenset(found)


def _by_file(patch: str) -> dict[str, str]:
    """A patch in parts: the name behind b/, or behind a/ of a file that is gone, -> its part."""
    found = {}
    for part in re.split(r"^(?=diff )", patch, flags=re.M):
        names = re.findall(r"^(?:\+\+\+ b/|--- a/)(.*?)\t?$", part, flags=re.M)
        if names:
            found[names[-1]] = part
    return found


def compared(before: Snapshot, after: Snapshot) -> CodeDiff:
    """The change from one snapshot to the other."""
    try:
        for snapshot in (before, after):
            if not snapshot.names():
                why = snapshot.code.get("reason") or snapshot.code.get("warning")
                raise CodeUnavailable(f"{snapshot.run_id} kept no code{f' ({why})' if why else ''}")
        if before.names() & after.names():
            return CodeDiff()
        if before.kind == after.kind == "git" and (repository := _repository([before, after])) is not None:
            return _by_git(repository, before.commit, after.commit)
        return _by_files(before, after)
    except CodeUnavailable as error:
        return CodeDiff(problem=str(error))
    except (SnapshotError, OSError) as error:
        return CodeDiff(problem=f"the code of {before.run_id} and {after.run_id} cannot be compared: {error}")


def _script(snapshot: Snapshot, script: str) -> bytes | None:
    """What a snapshot holds of a script, whose path may begin outside of it; None unless one file alone fits."""
    try:
        files = _files(snapshot, is_mixed=False)
    except (CodeUnavailable, SnapshotError, OSError):
        return None
    wanted = Path(script).parts
    for length in range(len(wanted), 0, -1):
        ends = [name for name in files if Path(_text(name)).parts[-length:] == wanted[-length:]]
        if len(ends) == 1:
            return files[ends[0]][1]()
    return None


# Two commits of one repository


def _repository(snapshots: list[Snapshot]) -> WorkingTree | None:
    """A repository that has the commits of all: the one around the runs folder, or the current folder's.

    The folder that run.json names is not asked: whoever made the run wrote that.
    """
    for snapshot in snapshots:
        if not _HASH.fullmatch(snapshot.commit):
            raise CodeUnavailable(f"run.json of {snapshot.run_id} is damaged: {snapshot.commit[:80]!r} is not a commit")
    for folder in _folders(snapshots):
        repository = WorkingTree.to_read(folder)
        if repository is None:
            continue
        wanted = [f"{snapshot.commit}^{{tree}}" for snapshot in snapshots]
        if all(repository.git("cat-file", "-e", name, check=False).returncode == 0 for name in wanted):
            return repository
    return None


def _folders(snapshots: list[Snapshot]) -> list[Path]:
    return list(dict.fromkeys(outside_of_runs(folder) for folder in (*(s.folder for s in snapshots), Path.cwd())))


def _by_git(repository: WorkingTree, before: str, after: str) -> CodeDiff:
    plain = ("-c", f"core.attributesFile={os.devnull}", "-c", "core.quotePath=false")
    shape = ("-r", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", before, after)
    status = repository.git(*plain, "diff-tree", "--name-status", "-z", *shape).stdout.split(b"\0")
    counts = repository.git(*plain, "diff-tree", "--numstat", "-z", *shape).stdout.split(b"\0")
    patch = repository.git(
        *plain, "-c", "diff.suppressBlankEmpty=false", "diff-tree", "-p", "-U3", "--src-prefix=a/", "--dst-prefix=b/",
        *shape,
    )  # fmt: skip
    lines = {}
    for record in filter(None, counts):
        added, removed, name = record.split(b"\t", 2)
        lines[name] = (None, None) if added == b"-" else (int(added), int(removed))
    pairs = zip(status[0::2], status[1::2])
    # T, a file that became a link, is a change like any other to a reader.
    files = [ChangedFile(_text(s).replace("T", "M"), _text(n), *lines.get(n, (None, None))) for s, n in pairs]
    return CodeDiff(files=files, patch=_text(patch.stdout))


# Everything else: name by name


def _by_files(before: Snapshot, after: Snapshot) -> CodeDiff:
    is_mixed = before.kind != after.kind
    old, new = _files(before, is_mixed), _files(after, is_mixed)
    notes: list[str] = []
    if is_mixed:  # an archive holds sources only: what it could not hold is not missing
        of_git, of_tar, archive = (old, new, after) if before.kind == "git" else (new, old, before)
        beyond = set()
        for name in of_git.keys() - of_tar.keys():
            parts = _text(name).split("/")
            if not is_source(parts[-1]) or any(part.startswith(".") for part in parts):
                beyond.add(name)
        if beyond:
            notes.append(f"{len(beyond)} files that an archive leaves out (data, hidden files) were not compared")
        notes.append(f"one is an archive of {archive.code.get('root')}: code outside of it is unknown")
        old, new = ({n: f for n, f in files.items() if n not in beyond} for files in (old, new))
    files, patches = [], []
    for name in sorted(old.keys() | new.keys()):
        if name in old and name in new and old[name][0] == new[name][0]:
            continue
        sides = [files_of[name][1]() if name in files_of else None for files_of in (old, new)]
        if sides[0] == sides[1]:  # called differently by two repositories that hash differently
            continue
        changed, patch = _compared_file(_text(name), *sides)
        files.append(changed)
        patches.append(patch)
    return CodeDiff(files=files, patch="".join(patches), notes=notes)


def _files(snapshot: Snapshot, is_mixed: bool) -> Files:
    """By name; from the folder of the run on where the other side is an archive, which begins there."""
    if snapshot.kind == "tar":
        return _archive(snapshot)
    repository = _repository([snapshot])
    if repository is None:
        looked = ", ".join(map(str, _folders([snapshot])))
        raise CodeUnavailable(
            f"the code of {snapshot.run_id} is the commit {snapshot.commit[:12]}, which no known repository has "
            f"(looked in {looked}); ask from the checkout it ran in, or fetch {snapshot.code.get('ref')} from there"
        )
    prefix, root = b"", Path(str(snapshot.code.get("root") or ""))
    # A commit begins at the top of the repository.
    if is_mixed and repository.checkout is not None and root.is_relative_to(repository.checkout):
        below = root.relative_to(repository.checkout).as_posix()
        prefix = b"" if below == "." else os.fsencode(below) + b"/"

    def reader(kind: str, digest: str) -> Callable[[], bytes]:
        if kind == "commit":  # a repository inside of it, known by its commit alone
            return lambda: f"Subproject commit {digest}\n".encode()
        return lambda: repository.git("cat-file", "blob", digest).stdout

    found: dict[bytes, tuple[str, Callable[[], bytes]]] = {}
    for entry in filter(None, repository.git("ls-tree", "-r", "-z", snapshot.commit).stdout.split(b"\0")):
        mode_kind_hash, _, name = entry.partition(b"\t")
        _, kind, digest = _text(mode_kind_hash).split()
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = (digest, reader(kind, digest))
    return found


def _archive(snapshot: Snapshot) -> Files:
    path = snapshot.folder / os.path.basename(str(snapshot.code.get("file") or "code.tar.gz"))
    try:
        path = inside(snapshot.folder, path.name)
    except RunError as error:
        raise CodeUnavailable(str(error)) from error
    found: dict[bytes, tuple[str, Callable[[], bytes]]] = {}
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != snapshot.code.get("sha256"):
            raise CodeUnavailable(
                f"{path} is not the archive that {snapshot.run_id} recorded: a resume or an edit replaced it"
            )
        with tarfile.open(path, "r:gz") as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            if sum(member.size for member in members) > MOST_ARCHIVE_BYTES:
                raise CodeUnavailable(f"{path} holds more than {MOST_ARCHIVE_BYTES} bytes and is not read")
            for member in members:
                content = archive.extractfile(member)
                data = content.read() if content is not None else b""
                name_of_blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                found[os.fsencode(member.name)] = (name_of_blob, partial(bytes, data))
    except FileNotFoundError:
        raise CodeUnavailable(f"the code of {snapshot.run_id} should be in {path}, but that file is missing") from None
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise CodeUnavailable(f"{path} cannot be read: {error}") from error
    return found


def _compared_file(name: str, old: bytes | None, new: bytes | None) -> tuple[ChangedFile, str]:
    status = "A" if old is None else "D" if new is None else "M"
    names = ("/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}")
    head = f"diff a/{name} b/{name}\n"
    if b"\0" in (old or b"")[:8000] or b"\0" in (new or b"")[:8000]:  # how git tells a binary file
        return ChangedFile(status, name, None, None), f"{head}Binary files {names[0]} and {names[1]} differ\n"
    if len(old or b"") + len(new or b"") > MOST_COMPARED_BYTES:
        return ChangedFile(status, name, None, None), f"{head}{names[0]} and {names[1]} differ, too large to show\n"
    sides = [_text(side or b"").split("\n") for side in (old, new)]
    for lines in sides:
        end = lines.pop()
        lines[:] = [f"{line}\n" for line in lines] + ([f"{end}\n\\ No newline at end of file\n"] if end else [])
    out = list(difflib.unified_diff(sides[0], sides[1], *names))
    added, removed = (sum(line.startswith(sign) for line in out[2:]) for sign in "+-")
    return ChangedFile(status, name, added, removed), head + "".join(out)


def _text(data: bytes) -> str:
    """Any bytes as text that can be shown and stored; what is no UTF-8 shows as \\xe9."""
    return data.decode("utf-8", "backslashreplace")
