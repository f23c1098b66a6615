"""The code of a run, exactly as it was: committed or not, tracked or not.

Inside git the whole working tree becomes a commit under refs/rung/<experiment>/<n>, so the code diff of two runs is
`git diff`. It is made with an index of its own: the user's index, branch and status stay as they were. Ignored files,
the runs folder, large untracked files and untracked files that look like secrets stay out; all but the first two are
listed. Outside git it is an archive (codetar).

A snapshot that fails never ends a run: `snapshot` returns what it could do, with the reason under `warning`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rung.runs import codetar

UNTRACKED_BYTES = 20_000_000  # one untracked file
_UNTRACKED_TOTAL_BYTES = 200_000_000
_NUM_UNTRACKED = 5_000
_NUM_LISTED = 200
_GIT_TIMEOUT_S = 60.0
_SECRETS = (".env", ".env.*", "*.pem", "*.key", ".netrc", "id_rsa*", "id_ed25519*", "credentials.json")
_QUIET = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "core.splitIndex=false", "core.safecrlf=false")
_EMPTY_TREE = {40: "4b825dc642cb6eb9a060e54bf8d69288fbee4904"}  # by length of a hash; git knows it without storing it


class SnapshotError(Exception):
    """Why there is no snapshot; never leaves this module."""


def snapshot(code_root: Path, run_folder: Path, name: str, exclude: Sequence[Path] = ()) -> dict[str, Any]:
    """Keeps the code below `code_root` for the run `name` ("piano/7"); returns what run.json holds under `code`."""
    warning = None
    try:
        tree = WorkingTree.find(code_root)
        if tree is not None:
            return tree.keep(f"refs/rung/{name}", exclude)
    except (SnapshotError, OSError) as error:
        warning = f"no git snapshot: {error}"
    attempt = name.rpartition("/")[2].partition(".")[2]  # piano/7.1 is the second attempt of piano/7
    try:
        code = codetar.pack(code_root, run_folder / (f"code.{attempt}.tar.gz" if attempt else "code.tar.gz"), exclude)
    except (OSError, ValueError) as error:
        return {"kind": "none", "warning": "; ".join(filter(None, [warning, f"no archive: {error}"]))}
    return {**code, "warning": warning} if warning else code


class WorkingTree:
    """One checkout, seen through a temporary index."""

    def __init__(self, top: Path) -> None:
        self.top = top
        # A git hook or an editor may have pointed these elsewhere.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        for role in ("AUTHOR", "COMMITTER"):
            self.env |= {f"GIT_{role}_NAME": "rung", f"GIT_{role}_EMAIL": "rung@localhost"}

    @classmethod
    def find(cls, folder: Path) -> WorkingTree | None:
        """The checkout that holds `folder`, unless there is none or it ignores the folder."""
        if shutil.which("git") is None:
            return None
        here = cls(folder.resolve())
        found = here.git("rev-parse", "--show-toplevel", check=False)
        if found.returncode != 0:
            if b"not a git repository" in found.stderr or b"work tree" in found.stderr:
                return None
            raise SnapshotError(_words(found.stderr))
        top = Path(os.fsdecode(found.stdout).rstrip("\n"))
        tree = cls(top)
        inside = tree._inside([folder])
        is_ignored = inside and tree.git("check-ignore", "-q", f"{inside[0]}/", check=False).returncode == 0
        return None if is_ignored else tree

    def git(self, *args: str, stdin: bytes | None = None, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        command = ["git", "-C", str(self.top), *(word for key in _QUIET for word in ("-c", key)), *args]
        try:
            done = subprocess.run(
                command, input=stdin or b"", capture_output=True, env=self.env, timeout=_GIT_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SnapshotError(f"git {args[0]} took longer than {_GIT_TIMEOUT_S:.0f} s") from error
        if check and done.returncode != 0:
            raise SnapshotError(f"git {args[0]}: {_words(done.stderr)}")
        return done

    def ask(self, *args: str, stdin: bytes | None = None) -> str:
        return os.fsdecode(self.git(*args, stdin=stdin).stdout).strip()

    def keep(self, ref: str, exclude: Sequence[Path]) -> dict[str, Any]:
        head = os.fsdecode(self.git("rev-parse", "-q", "--verify", "HEAD^{commit}", check=False).stdout).strip() or None
        inside = self._inside(exclude)
        with tempfile.TemporaryDirectory(prefix="rung-index-") as folder:
            self.env["GIT_INDEX_FILE"] = os.path.join(folder, "index")
            try:
                left_out = self._fill_index(folder, inside)
                tree = self.ask("write-tree")
            finally:
                del self.env["GIT_INDEX_FILE"]
        changed = self._changed(head, tree, inside)
        if head and tree == self.ask("rev-parse", f"{head}^{{tree}}"):
            commit = head
        else:
            message = f"rung: the code of {ref.removeprefix('refs/rung/')}"
            commit = self.ask("commit-tree", tree, *(["-p", head] if head else []), "-m", message)
        return {
            "kind": "git",
            "ref": self._make_ref(ref, commit),
            "commit": commit,
            "tree": tree,  # equal trees are equal code, also where the repository is not at hand
            "head": head,
            "dirty": bool(changed),
            "changed": changed[:_NUM_LISTED],
            "num_changed": len(changed),
            "left_out": left_out[:_NUM_LISTED],
            "num_left_out": len(left_out),
        }

    def _fill_index(self, folder: str, inside: Sequence[str]) -> list[str]:
        """Puts the working tree into the temporary index; returns what it left out, each with the reason."""
        index = Path(folder, "index")
        env_index = self.env.pop("GIT_INDEX_FILE")
        users = self.top / self.ask("rev-parse", "--git-path", "index")
        self.env["GIT_INDEX_FILE"] = env_index
        # The user's index knows which files have not changed, so git need not read them all. The copy keeps its time:
        # a file edited in the second in which the index was written is told by that.
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(users, index)
        flagged = [line[2:] for line in self.git("ls-files", "-v", "-z").stdout.split(b"\0") if line[:1].islower()]
        if flagged:
            # "Assume unchanged" hides edits, and hidden edits are the ones we are here for. Taken out and put in again,
            # so that they are read: git has not looked at their times since they were hidden.
            listed = b"\0".join(flagged) + b"\0"
            self.git("update-index", "--force-remove", "-z", "--stdin", stdin=listed)
            self.git("update-index", "--add", "--remove", "-z", "--stdin", stdin=listed)
        self.git("add", "-u", ".")
        if inside:
            self.git("rm", "-r", "-q", "--cached", "--ignore-unmatch", "--", *(f":(literal){name}" for name in inside))
        names = self.git("ls-files", "--others", "--exclude-standard", "-z").stdout.split(b"\0")
        untracked = [os.fsdecode(name) for name in names if name]
        taken, left_out = self._choose([name for name in untracked if not _is_below(name, inside)])
        if taken:
            listed = b"\0".join(map(os.fsencode, taken)) + b"\0"
            self.git("update-index", "--add", "--remove", "-z", "--stdin", stdin=listed)
        return left_out

    def _choose(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Which untracked files to take: sources first, then the small ones, up to the limits."""
        sized: list[tuple[bool, int, str]] = []
        left_out: list[str] = []
        for name in names:
            base = os.path.basename(name)
            if name.endswith("/"):
                left_out.append(f"{name} (a repository of its own)")
            elif any(fnmatch.fnmatch(base, pattern) for pattern in _SECRETS):
                left_out.append(f"{name} (looks like a secret)")
            else:
                with contextlib.suppress(FileNotFoundError):
                    sized.append((not codetar.is_source(base), os.lstat(self.top / name).st_size, name))
        taken: list[str] = []
        total = 0
        for _, size, name in sorted(sized):
            if size > UNTRACKED_BYTES:
                left_out.append(f"{name} ({size} bytes, untracked)")
            elif len(taken) >= _NUM_UNTRACKED or total + size > _UNTRACKED_TOTAL_BYTES:
                left_out.append(f"{name} (too many untracked files)")
            else:
                taken.append(name)
                total += size
        return taken, left_out

    def _inside(self, exclude: Sequence[Path]) -> list[str]:
        """The folders to leave out, relative to the checkout."""
        folders = [path.resolve() for path in exclude]
        return [f.relative_to(self.top).as_posix() for f in folders if f != self.top and f.is_relative_to(self.top)]

    def _changed(self, head: str | None, tree: str, inside: Sequence[str]) -> list[str]:
        """What differs from HEAD, as "M path", "A path" or "D path"."""
        before = head or _EMPTY_TREE.get(len(tree)) or self.ask("mktree")
        words = os.fsdecode(self.git("diff-tree", "-r", "--name-status", "--no-renames", "-z", before, tree).stdout)
        parts = words.split("\0")
        pairs = zip(parts[0::2], parts[1::2])
        return [f"{letter} {name}" for letter, name in pairs if not _is_below(name, inside)]

    def _make_ref(self, ref: str, commit: str) -> str:
        """Creates the ref and never moves one: another runs folder of the same checkout may have used the name."""
        zeros = "0" * len(commit)
        short = f"{ref}-{commit[:12]}"
        for name in (ref, short, *(f"{short}-{number}" for number in range(2, 10))):
            if self.git("update-ref", "--no-deref", name, commit, zeros, check=False).returncode == 0:
                return name
        raise SnapshotError(f"git cannot create {ref}")


def _is_below(name: str, folders: Sequence[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _words(stderr: bytes) -> str:
    lines = [line for line in os.fsdecode(stderr).splitlines() if line.strip()]
    return lines[0].removeprefix("fatal: ") if lines else "failed without a word"
