"""How the code of two runs differs, out of their snapshots: uncommitted and untracked files included.

Equal trees are equal code, also where no repository is at hand, unless the runs executed two scripts of it. Two commits
of one repository are compared by git, with nothing of the user's settings; anything else (an archive, two repositories)
file by file. Nothing is unpacked, checked out or fetched. Which of the files matter is left to factors.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rung.compare.reading import list_of, mapping, segments_of
from rung.errors import RunError
from rung.runs.paths import inside, outside_of_runs
from rung.runs.provenance import SnapshotError, WorkingTree, is_source
from rung.runs.query import Run

MOST_ARCHIVE_BYTES = 200_000_000  # unpacked, in memory; provenance packs a quarter of it
MOST_COMPARED_BYTES = 2_000_000  # of one file that is compared here: difflib takes seconds at that size
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # anything else would reach git as an option
_NUM_SHOWN = 5
Files = Mapping[bytes, tuple[str, Callable[[], bytes]]]  # name -> what git calls the content, and how to get it


class ChangedFile(NamedTuple):
    """A file that differs; `status` is M, A or D, and lines are counted as git does (None for a binary file)."""

    status: str
    path: str
    added: int | None
    removed: int | None


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


def diff(a: Run, b: Run) -> CodeDiff:
    """The change from the code of `a` to that of `b`, each as it was at the run's start."""
    snapshots = [Snapshot(run.id, run.path, mapping(run.document.get("code"))) for run in (a, b)]
    found = compared(*snapshots)
    # Two runs of somebody's own loop that executed two scripts ran other code, even where both trees hold both of them.
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
    for snapshot in snapshots:
        left_out = [str(name) for name in list_of(snapshot.code.get("left_out"))]
        if left_out:
            more = f" and {len(left_out) - _NUM_SHOWN} more" if len(left_out) > _NUM_SHOWN else ""
            found.notes.append(f"the snapshot of {snapshot.run_id} leaves out {', '.join(left_out[:_NUM_SHOWN])}{more}")

    for run, first in zip((a, b) if a.path != b.path else (a,), snapshots):
        seen = set()
        for part in segments_of(run):
            later = first._replace(code=mapping(part.get("code")))
            # A rollback writes the attempt once more: the same code, reported once.
            if not part.get("code") or first.names() & later.names() or (key := frozenset(later.names())) in seen:
                continue
            seen.add(key)
            change = compared(first, later)
            if change.files or change.problem:
                found.resumed.append(Resumed(run.id, part.get("first_step"), change.files, change.problem))
                what = change.problem or ", ".join(file.path for file in change.files[:_NUM_SHOWN])
                found.notes.append(f"{run.id} continued at step {part.get('first_step')} with other code: {what}")
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
