"""The git refs that hold the code of runs, `refs/rung/<experiment>/<n>`: renamed with a run, and let go with it.

Which refs are a run's own is known from its run.json alone, name and commit: several runs folders of one checkout share
refs/rung, so a ref that no run.json here names may well be somebody else's. All refs of a repository change in one
transaction. Making refs is left to provenance.

The surprising thing: a repository that is not at hand is no error. The run then keeps the name of its ref, which is
still right wherever the repository is.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import RunError
from rung.runs.provenance import SnapshotError, WorkingTree

_NAME = re.compile(r"refs/rung/[A-Za-z0-9._-]+/[0-9][0-9a-f.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_LAST = re.compile(r"[0-9]+(\.[0-9]+)?(-[0-9a-f]{12})?(-[0-9]+)?")


class Ref(NamedTuple):
    """A snapshot, as run.json has it under `code`: the folder it was made of, its name and its commit."""

    root: str
    ref: str
    commit: str


class Renamed(NamedTuple):
    """A snapshot that gets another name."""

    root: str
    old: str
    new: str
    commit: str


def refs_of(document: Mapping[str, Any]) -> set[Ref]:
    """All snapshots that a run.json names, of the start and of each resume."""
    segments = document.get("segments")
    parts = [document, *(segments if isinstance(segments, list) else [])]
    found = set()
    for part in parts:
        code = part.get("code") if isinstance(part, dict) else None
        root, name, commit = (code.get(key) for key in Ref._fields) if isinstance(code, dict) else (None, None, None)
        # What a damaged or foreign run.json says must not become an order to delete a branch.
        if isinstance(root, str) and _is(_NAME, name) and _is(_COMMIT, commit):
            found.add(Ref(root, str(name), str(commit)))
    return found


def _is(pattern: re.Pattern[str], text: Any) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None


class Repositories:
    """The repositories at hand, by the folder that a run names; each is asked for its refs once."""

    def __init__(self) -> None:
        self._trees: dict[str, WorkingTree | None] = {}
        self._refs: dict[str, dict[str, str]] = {}

    def refs(self, root: str) -> dict[str, str] | None:
        """Name -> commit of everything under refs/rung; None where the repository is not at hand."""
        tree = self._tree(root)
        if tree is None:
            return None
        if root not in self._refs:
            lines = tree.ask("for-each-ref", "--format=%(objectname) %(refname)", "refs/rung").splitlines()
            self._refs[root] = {name: commit for commit, name in (line.split(" ", 1) for line in lines)}
        return self._refs[root]

    def has(self, root: str, commit: str) -> bool:
        tree = self._tree(root)
        return tree is not None and tree.git("cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode == 0

    def plan(self, document: Mapping[str, Any], new_id: str, taken: set[str]) -> list[Renamed]:
        """How a run's refs will be called; those whose repository or commit is not at hand are left out.

        `taken` are names that are promised already; those chosen here are added.
        """
        renamed: list[Renamed] = []
        for ref in sorted(refs_of(document)):
            here, last = self.refs(ref.root), _LAST.fullmatch(ref.ref.rpartition("/")[2])
            if here is None or last is None or not (here.get(ref.ref) == ref.commit or self.has(ref.root, ref.commit)):
                continue
            name = f"refs/rung/{new_id}{last[1] or ''}"
            free = next(new for new in _names(name, ref.commit) if new not in here and new not in taken)
            taken.add(free)
            renamed.append(Renamed(ref.root, ref.ref, free, ref.commit))
        return renamed

    def create(self, renamed: Iterable[Renamed]) -> None:
        """The new names; what an earlier attempt has made already is left as it is."""
        wanted = [r for r in renamed if (self.refs(r.root) or {}).get(r.new) != r.commit]
        self._change((r.root, f"create {r.new} {r.commit}\n") for r in wanted)

    def delete(self, refs: Iterable[Ref]) -> list[Ref]:
        """Lets go of refs that still are what a run.json says they are; returns those."""
        gone = [ref for ref in refs if (self.refs(ref.root) or {}).get(ref.ref) == ref.commit]
        self._change((ref.root, f"delete {ref.ref} {ref.commit}\n") for ref in dict.fromkeys(gone))
        return gone

    def _change(self, orders: Iterable[tuple[str, str]]) -> None:
        by_root: dict[str, list[str]] = {}
        for root, order in orders:
            by_root.setdefault(root, []).append(order)
        for root, lines in by_root.items():
            tree = self._tree(root)
            if tree is None:
                continue
            try:
                tree.git("update-ref", "--no-deref", "--stdin", stdin="".join(lines).encode())
            except SnapshotError as error:
                raise RunError(f"the snapshots in {root} could not be changed: {error}; try again.") from error
            self._refs.pop(root, None)

    def _tree(self, root: str) -> WorkingTree | None:
        if root not in self._trees:
            tree = WorkingTree(Path(root)) if os.path.isdir(root) and shutil.which("git") else None
            try:
                if tree is not None and tree.git("rev-parse", "--git-dir", check=False).returncode != 0:
                    tree = None
            except (SnapshotError, OSError):
                tree = None
            self._trees[root] = tree
        return self._trees[root]


def with_new_names(document: Mapping[str, Any], renamed: Iterable[Renamed]) -> dict[str, Any]:
    """run.json with its refs renamed, at the start and in each segment."""
    names = {r.old: r.new for r in renamed}

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        code = part.get("code")
        if not isinstance(code, dict) or code.get("ref") not in names:
            return part
        return {**part, "code": {**code, "ref": names[code["ref"]]}}

    segments = document.get("segments")
    whole = changed(dict(document))
    if isinstance(segments, list):
        whole["segments"] = [changed(part) if isinstance(part, dict) else part for part in segments]
    return whole


def _names(name: str, commit: str) -> Iterator[str]:
    yield name
    yield f"{name}-{commit[:12]}"
    number = 2
    while True:
        yield f"{name}-{commit[:12]}-{number}"
        number += 1
