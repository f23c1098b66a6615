"""The code of a run, exactly as it was, committed or not, tracked or not; and what it ran on.

Inside git the whole working tree becomes a commit under refs/rung/<uid of the run>, made with an index of its own: the
user's index, branch and status stay as they were. Large untracked files and those that look like secrets stay out, and
are listed. Outside git it is an archive of the source-like files; the same files give the same bytes, so two archives
can be compared by hash. A snapshot that fails never ends a run: the reason is under `warning`.

Nothing is imported to describe the environment: versions come from the packages' metadata, GPUs from nvidia-smi, and
what only torch can know is handed in as `device`. Variables of the process are not stored here: people keep their
secrets there. Those that decide about numbers, and what the run executed, are in executed.py.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import os
import platform
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rung.files import write_whole
from rung.runs.paths import outside_of_runs
from rung.secrets import is_secret_file

UNTRACKED_BYTES = 20_000_000  # one untracked file
_UNTRACKED_TOTAL_BYTES = 200_000_000
_NUM_UNTRACKED = 5_000
_NUM_LISTED = 200
_GIT_TIMEOUT_S = 60.0
_SMI_TIMEOUT_S = 5.0
_QUIET = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.splitIndex=false", "core.safecrlf=false", "gc.auto=0",
    "core.sshCommand=false", "core.pager=cat",
)  # fmt: skip
# Where commits are only read, and the repository's own settings may be anybody's: nothing of them starts a program, and
# what is missing is not fetched. (The last is for git before 2.45, which does not know GIT_NO_LAZY_FETCH.)
_READING = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_PAGER": "cat", "GIT_ALLOW_PROTOCOL": "none",
}  # fmt: skip
_SOURCE_SUFFIXES = frozenset(
    {".py", ".pyi", ".pyx", ".ipynb", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".md", ".rst", ".txt", ".sh"}
    | {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".ts", ".html", ".css", ".sql", ".lock"}
)
_SOURCE_NAMES = frozenset({"Makefile", "Dockerfile", "LICENSE"})
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "site-packages", "build", "dist", "wandb"})
# A run started in a home folder must not spend minutes packing it.
_FILE_BYTES = 1_000_000
_TOTAL_BYTES = 50_000_000
_NUM_SEEN = 50_000
_EMPTY_TREE = {40: "4b825dc642cb6eb9a060e54bf8d69288fbee4904"}  # by length of a hash; git knows it without storing it


class SnapshotError(Exception):
    """Why there is no snapshot; never leaves this module."""


def snapshot(
    code_root: Path, run_folder: Path, name: str, exclude: Sequence[Path] = (), run_id: str = ""
) -> dict[str, Any]:
    """Keeps the code below `code_root` as `name`, the uid of the run; returns what run.json holds under `code`.

    A resumed run keeps the code of each attempt: `name` is then the uid and the attempt, "40d4dc21....1".
    """
    warning = None
    try:
        tree = WorkingTree.find(code_root)
        if tree is not None:
            return tree.keep(f"refs/rung/{name}", exclude, f"rung: the code of {run_id or name}")
    except (SnapshotError, OSError) as error:
        warning = f"no git snapshot: {error}"
    attempt = name.rpartition("/")[2].partition(".")[2]
    try:
        code = pack(code_root, run_folder / (f"code.{attempt}.tar.gz" if attempt else "code.tar.gz"), exclude)
    except (OSError, ValueError) as error:
        return {"kind": "none", "warning": "; ".join(filter(None, [warning, f"no archive: {error}"]))}
    return {**code, "warning": warning} if warning else code


class WorkingTree:
    """One checkout, seen through a temporary index."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.checkout: Path | None = None  # of a repository that is only read
        # A git hook or an editor may have pointed these elsewhere.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        for role in ("AUTHOR", "COMMITTER"):
            self.env |= {f"GIT_{role}_NAME": "rung", f"GIT_{role}_EMAIL": "rung@localhost"}

    @classmethod
    def find(cls, folder: Path) -> WorkingTree | None:
        """The checkout that holds `folder`, unless there is none or it ignores the folder."""
        if shutil.which("git") is None or outside_of_runs(folder) != folder.resolve():
            return None  # also what lies in a run, whose settings may be anybody's
        here = cls(folder.resolve())
        found = here.git("rev-parse", "--show-toplevel", check=False)
        if found.returncode != 0:
            if b"not a git repository" in found.stderr or b"work tree" in found.stderr:
                return None
            raise SnapshotError(_first_line(found.stderr))
        top = Path(os.fsdecode(found.stdout).rstrip("\n"))
        tree = cls(top)
        inside = tree._inside([folder])
        is_ignored = inside and tree.git("check-ignore", "-q", f"{inside[0]}/", check=False).returncode == 0
        return None if is_ignored else tree

    @classmethod
    def to_read(cls, folder: Path) -> WorkingTree | None:
        """The repository that holds `folder`, for its commits and refs alone; never one that came with a run.

        It is looked for from outside of all runs. It has no work tree and no index: an attribute there could call a
        source file binary and hide it.
        """
        if shutil.which("git") is None:
            return None
        here = cls(outside_of_runs(folder))
        here.env |= _READING
        where = here.git("rev-parse", "--absolute-git-dir", check=False)
        if b"dubious ownership" in where.stderr:  # the user may have said that it is safe
            asked = cls(Path(os.sep)).git("config", "--global", "--get-all", "safe.directory", check=False).stdout
            safe = os.fsdecode(asked).splitlines()
            here.env |= {"GIT_CONFIG_COUNT": str(len(safe))}
            for number, value in enumerate(safe):
                here.env |= {f"GIT_CONFIG_KEY_{number}": "safe.directory", f"GIT_CONFIG_VALUE_{number}": value}
            where = here.git("rev-parse", "--absolute-git-dir", check=False)
        if where.returncode != 0:
            return None
        git_dir = Path(os.fsdecode(where.stdout).rstrip("\n"))
        top = os.fsdecode(here.git("rev-parse", "--show-toplevel", check=False).stdout).rstrip("\n")
        tree = cls(git_dir)
        tree.checkout = Path(top) if top else None
        tree.env |= here.env | {
            "GIT_DIR": str(git_dir),
            "GIT_WORK_TREE": str(git_dir),
            "GIT_INDEX_FILE": str(git_dir / "rung-has-no-index"),
        }
        return tree

    def git(self, *args: str, stdin: bytes | None = None, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        command = ["git", "-C", str(self.top), *(arg for key in _QUIET for arg in ("-c", key)), *args]
        try:
            done = subprocess.run(
                command, input=stdin or b"", capture_output=True, env=self.env, timeout=_GIT_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SnapshotError(f"git {args[0]} took longer than {_GIT_TIMEOUT_S:.0f} s") from error
        if check and done.returncode != 0:
            raise SnapshotError(f"git {args[0]}: {_first_line(done.stderr)}")
        return done

    def ask(self, *args: str, stdin: bytes | None = None) -> str:
        return os.fsdecode(self.git(*args, stdin=stdin).stdout).strip()

    def keep(self, ref: str, exclude: Sequence[Path], message: str) -> dict[str, Any]:
        """Commits the working tree under `ref`; returns what run.json holds of it."""
        head = os.fsdecode(self.git("rev-parse", "-q", "--verify", "HEAD^{commit}", check=False).stdout).strip() or None
        inside = self._inside(exclude)
        tree, left_out = self._write_tree(inside)
        # What differs from HEAD, as "M path", "A path" or "D path".
        before = head or _EMPTY_TREE.get(len(tree)) or self.ask("mktree")
        listed = self.git("diff-tree", "-r", "--name-status", "--no-renames", "-z", before, tree).stdout
        parts = os.fsdecode(listed).split("\0")
        pairs = zip(parts[0::2], parts[1::2])
        changed = [f"{letter} {name}" for letter, name in pairs if not _is_below(name, inside)]
        if head and tree == self.ask("rev-parse", f"{head}^{{tree}}"):
            commit = head
        else:
            commit = self.ask("commit-tree", tree, *(["-p", head] if head else []), "-m", message)
        # Creates the ref and never moves one: a copy of the run may have been resumed before, and has the same uid.
        zeros, short = "0" * len(commit), f"{ref}-{commit[:12]}"
        for name in (ref, short, *(f"{short}-{number}" for number in range(2, 10))):
            if self.git("update-ref", "--no-deref", name, commit, zeros, check=False).returncode == 0:
                break
        else:
            raise SnapshotError(f"git cannot create {ref}")
        return {
            "kind": "git",
            "ref": name,
            "commit": commit,
            "tree": tree,  # equal trees are equal code, also where the repository is not at hand
            "head": head,
            "dirty": bool(changed),
            "changed": changed[:_NUM_LISTED],
            "num_changed": len(changed),
            "left_out": left_out[:_NUM_LISTED],
            "num_left_out": len(left_out),
        }

    def _write_tree(self, inside: Sequence[str]) -> tuple[str, list[str]]:
        """The working tree as a tree of git, and what it leaves out, each with the reason."""
        users = self.top / self.ask("rev-parse", "--git-path", "index")
        with tempfile.TemporaryDirectory(prefix="rung-index-") as folder:
            self.env["GIT_INDEX_FILE"] = os.path.join(folder, "index")
            try:
                # The user's index knows which files have not changed, so git need not read them all. The copy keeps its
                # time, by which git recognises a file edited in the second in which the index was written.
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(users, self.env["GIT_INDEX_FILE"])
                listed = self.git("ls-files", "-v", "-z").stdout.split(b"\0")
                flagged = [line[2:] for line in listed if line[:1].islower()]
                # "Assume unchanged" hides edits, and hidden edits are the ones we are here for. Taken out and put in
                # again, so that they are read: git has not looked at their times since they were hidden.
                self._update_index(flagged, "--force-remove")
                self._update_index(flagged, "--add", "--remove")
                self.git("add", "-u", ".")
                if inside:
                    paths = [f":(literal){name}" for name in inside]
                    self.git("rm", "-r", "-q", "--cached", "--ignore-unmatch", "--", *paths)
                others = self.git("ls-files", "--others", "--exclude-standard", "-z").stdout.split(b"\0")
                untracked = [name for name in map(os.fsdecode, filter(None, others)) if not _is_below(name, inside)]
                taken, left_out = self._choose(untracked)
                self._update_index([os.fsencode(name) for name in taken], "--add", "--remove")
                self._take_submodules(left_out)
                return self.ask("write-tree"), left_out
            finally:
                del self.env["GIT_INDEX_FILE"]

    def _take_submodules(self, left_out: list[str]) -> None:
        """A submodule is kept as its commit, and with edits that are in no commit as its files."""
        staged = os.fsdecode(self.git("ls-files", "--stage", "-z").stdout).split("\0")
        for name in [line.partition("\t")[2] for line in staged if line.startswith("160000 ")]:
            other = WorkingTree(self.top / name)
            if not (other.top / ".git").exists() or not other.ask("status", "--porcelain"):
                continue
            self._update_index([os.fsencode(name)], "--force-remove")
            files = other._files(left_out, f"{name}/")
            self._update_index([os.fsencode(file) for file in files], "--add", "--remove")

    def _files(self, left_out: list[str], prefix: str) -> list[str]:
        """The files of a checkout and of its submodules, as named from the outermost one."""
        staged = os.fsdecode(self.git("ls-files", "--stage", "-z").stdout).split("\0")[:-1]
        found = [line.partition("\t")[2] for line in staged if not line.startswith("160000 ")]
        others = self.git("ls-files", "--others", "--exclude-standard", "-z").stdout.split(b"\0")
        taken, left = self._choose([os.fsdecode(name) for name in others if name])
        left_out += [f"{prefix}{line}" for line in left]
        files = [prefix + name for name in (*found, *taken)]
        for name in [line.partition("\t")[2] for line in staged if line.startswith("160000 ")]:
            if (self.top / name / ".git").exists():
                files += WorkingTree(self.top / name)._files(left_out, f"{prefix}{name}/")
        return files

    def _update_index(self, names: Sequence[bytes], *options: str) -> None:
        if names:
            self.git("update-index", *options, "-z", "--stdin", stdin=b"\0".join(names) + b"\0")

    def _choose(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Which untracked files to take: sources first, then the small ones, up to the limits."""
        sized: list[tuple[bool, int, str]] = []
        left_out: list[str] = []
        for name in names:
            base = os.path.basename(name)
            if name.endswith("/"):
                left_out.append(f"{name} (a repository of its own)")
            elif is_secret_file(name):
                left_out.append(f"{name} (looks like a secret)")
            else:
                with contextlib.suppress(FileNotFoundError):
                    sized.append((not is_source(base), os.lstat(self.top / name).st_size, name))
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


def _is_below(name: str, folders: Sequence[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _first_line(stderr: bytes) -> str:
    lines = [line for line in os.fsdecode(stderr).splitlines() if line.strip()]
    return lines[0].removeprefix("fatal: ") if lines else "failed without a message"


def is_source(name: str) -> bool:
    return name in _SOURCE_NAMES or os.path.splitext(name)[1].lower() in _SOURCE_SUFFIXES


def pack(root: Path, out: Path, exclude: Sequence[Path] = ()) -> dict[str, Any]:
    """Archives the source-like files below `root` in `out`; returns what run.json holds of it."""
    left_out: list[str] = []
    buffer = io.BytesIO()
    num_files = total = 0
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sources_below(root, [p.resolve() for p in exclude], left_out):
            name = path.relative_to(root).as_posix()
            try:
                data = path.read_bytes()
            except OSError:
                left_out.append(f"{name} (cannot be read)")
                continue
            if len(data) > _FILE_BYTES or total + len(data) > _TOTAL_BYTES:
                left_out.append(f"{name} (too large)")
                continue
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
            num_files, total = num_files + 1, total + len(data)
    data = buffer.getvalue()
    write_whole(out, data)
    return {
        "kind": "tar",
        "file": out.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "num_files": num_files,
        "left_out": left_out[:_NUM_LISTED],
    }


def sources_below(root: Path, exclude: Sequence[Path], left_out: list[str]) -> Iterator[Path]:
    """What an archive of the folder would hold; `exclude` are resolved, and `left_out` is told where it stops."""
    num_seen = 0
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        if {"manifest.json", "index.jsonl"} <= set(names):  # prepared data
            folders.clear()
            continue
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED_FOLDERS and (here / name).resolve() not in exclude
        )
        for name in sorted(names):
            num_seen += 1
            if num_seen > _NUM_SEEN:
                left_out.append(f"all after {num_seen - 1} files ({here} and beyond)")
                return
            path = here / name
            if name.startswith(".") or not is_source(name) or not path.is_file() or path.is_symlink():
                continue
            if is_secret_file(path.relative_to(root).as_posix()):
                left_out.append(f"{path.relative_to(root).as_posix()} (looks like a secret)")
                continue
            yield path


def environment(device: dict[str, Any] | None = None) -> dict[str, Any]:
    """The contents of env.json: python, packages, processor, memory, GPUs and driver."""
    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line for line in lines if line.startswith(("model name", "Model", "Hardware"))]
        cpu = models[0].partition(":")[2].strip() if models else ""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_bytes: int | None = None
    with contextlib.suppress(ValueError, OSError):
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # No GPUs without nvidia-smi, or where it does not answer in time.
    gpus: list[dict[str, str]] = []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        gpus = [{"name": row[0], "driver": row[1], "memory": row[2]} for row in rows if len(row) == 3]
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": {"model": cpu or platform.processor() or platform.machine(), "count": os.cpu_count(), "usable": usable},
        "memory_bytes": memory_bytes,
        "gpus": gpus,
        "device": device or {},
        "rung_sha256": own_source(),
        "packages": packages(),
    }


@functools.cache  # 60 ms for 64 packages, and they do not change under a process
def packages() -> dict[str, str]:
    """Every installed distribution, by name: of several, the one that comes first on the path, as for an import."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        if one.metadata["Name"]:
            found.setdefault(str(one.metadata["Name"]), one.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def version_of(info: Path) -> tuple[str, str] | None:
    """Name and version of the distribution that a folder `*.dist-info` or `*.egg-info` describes."""
    name, _, version = info.stem.partition("-")
    if version and info.suffix == ".dist-info":
        return name, version
    with contextlib.suppress(OSError):
        text = (info / "PKG-INFO" if info.is_dir() else info).read_text(errors="replace")
        fields = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines() if ": " in line)
        if fields.get("Name") and fields.get("Version"):
            return fields["Name"], fields["Version"]
    return None


@functools.cache  # 12 ms, and the code that runs was read before
def own_source() -> str:
    """A hash of rung's own modules: a checkout that is being worked on has one version and many states."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        with contextlib.suppress(OSError):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
