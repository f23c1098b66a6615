"""What a run executed: the command, every source file it ran outside of packages, and what else decides about numbers.

A snapshot (provenance.py) is for restoring a folder: it holds files that nothing imports, and none that git ignores or
that lie elsewhere. What ran is in the modules of the process. Programs import late, so this is written when the run
starts and again when modules were added, at most once a second. A run that is killed has what it had imported by then.

A file counts as executed if a module was loaded from it, or if the command or an executed file names it as a Python or
configuration file: that is how `exec(open("configurator.py").read())` and `--config base.yaml` are seen. Packages are
known by the version of the distribution that owns the loaded module, which is not always the one that metadata names
first. Environment variables are kept if libraries compute by them, or if the executed files read them.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gzip
import hashlib
import io
import marshal
import os
import re
import stat
import sys
import sysconfig
import tarfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from rung.files import write_whole
from rung.runs.files import to_json, write_json
from rung.runs.process import start_time
from rung.runs.provenance import SnapshotError, WorkingTree, sources_below, version_of
from rung.secrets import is_secret_file

if TYPE_CHECKING:
    from rung.runs.record import Record

SCHEMA = 1  # of executed.json
CONFIG_SUFFIXES = frozenset(
    {".yaml", ".yml", ".toml", ".json", ".jsonc", ".ini", ".cfg", ".conf", ".properties", ".sh"}
)
CELLS, TYPED, PIPED = "(cells)", "(-c)", "(stdin)"  # what was executed and lies in no file
_FILE_BYTES, _TOTAL_BYTES = 1_000_000, 10_000_000  # kept in the run, before they are packed
_NUM_WROTE = 500
_NUM_NAMED = 200
_EVERY_S = 1.0
_CLOCK_S = 0.03  # the kernel says in hundredths when a process began, and up to now as well
_LITERAL = re.compile(r"""(?<![\w\\])[rbfRBF]{0,2}(["'])((?:(?!\1)[^\n\\]){1,200})\1""")
_READS = re.compile(r"""(?:environ(?:\.(?:get|pop|setdefault))?|getenv)\s*[\[(]\s*["'](\w{1,100})["']""")
_VARIABLES = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NVIDIA|TORCH|PYTORCH|NCCL|OMP|MKL|KMP|GOMP|OPENBLAS|TRITON|XLA|JAX|TF(?!_CLI|_VAR)|ATEN|ACCELERATE|HF|HIP|HSA"
    r"|ROCR|MIOPEN|TRANSFORMERS|TOKENIZERS|FLASH|XFORMERS|BNB|DS)_\w+|TORCH\w+|PYTHON(HASHSEED|OPTIMIZE|PATH)|WORLD_SIZE"
    r"|LD_PRELOAD"
)
# Of no interest although a script reads them: who and where, and what every process of a job has its own of.
_PERSONAL = re.compile(
    r"HOME|USER\w*|LOGNAME|PATH|PWD|OLDPWD|SHELL|TERM|LANG|LC_\w+|HOSTNAME|TMP|TMPDIR|TEMP|DISPLAY|SSH_\w+|(LOCAL_|GROUP_"
    r"|NODE_|ROLE_)?RANK|MASTER_(ADDR|PORT)|SLURM_\w+|RUNG_\w+|WANDB_\w+|XDG_\w+|TORCHELASTIC_\w+|COLUMNS|LINES"
)
_SECRET_NAME = re.compile(r"(?i)token(?!izers)|secret|passw|api_?key|(^|_)key$|credential|auth|cookie|dsn")
# In a copy of a file that git ignores: people keep their keys there. A value like "<|endoftext|>" is none.
_SECRET_LINE = re.compile(
    r"""(?im)(^.*(?:secret|passw|api_?key|token|credential|private_key|access_key)\w*["']?\s*[:=]\s*)(["'])(?=[^"']*\d)"""
    r"""([^"'\s<|]{12,})\2"""
)
_GENERATED = re.compile(r"torchinductor_\w*|\.triton|__pycache__|ipykernel_\d+")
_num_started = 0  # in this process


class Executed:
    """Follows a record, and keeps beside its rows what the process executed. Never raises, never waits for a device."""

    def __init__(self, record: Record, argv: list[str]) -> None:
        """`argv` is the command without secrets."""
        global _num_started
        self._pid, self._started, self._cwd = os.getpid(), time.time(), Path.cwd()
        self._began = self._process_began = _process_began() or self._started
        env = str(record.attempt.get("env") or "env.json")
        self._path = record.path / f"executed{env.removeprefix('env')}"
        self._archive = self._path.with_suffix(".tar.gz")
        code = record.code
        root = Path(str(code["root"])) if code.get("root") else self._cwd
        self._exclude = [record.path.parent.parent.resolve()]
        self._tree = None
        if code.get("kind") == "git":
            with contextlib.suppress(SnapshotError, OSError):
                self._tree = WorkingTree.find(root)
        self._base = (self._tree.top if self._tree is not None else root).resolve()
        self._held = _held_by(self._tree, code, record.path)
        self._files: dict[Path, dict[str, Any]] = {}  # by where it lies
        self._contents: dict[str, bytes] = {}  # by label, of what no snapshot holds
        self._kept_bytes = 0
        self._modules: set[str] = set()  # that were looked at
        self._packages: dict[str, str] = {}
        self._settled: set[tuple[str, str]] = set()  # package and folder whose distribution is known
        self._owners: dict[Path, dict[str, tuple[str, str]]] = {}
        self._variables: dict[str, str] = {}
        self._read_variables: set[str] = set()
        self._flags: list[dict[str, Any]] = []
        self._outputs: set[str] = set()
        self._has_rows = False
        self._looked_at, self._next = 0, 0.0
        self._written = b""
        self._document: dict[str, Any] = {"schema": SCHEMA, "base": str(self._base), "command": list(argv)}
        self._main, self._stack = "", []
        with _quietly():
            self._main, self._stack = _main(), list(_on_the_stack())
        # A kernel lives for days: what is written in it before a run is not the run's. So is a later run of one script.
        if _num_started or self._main in ("notebook", "session"):
            self._began = self._started
        _num_started += 1
        self.update()

    # What a record tells.

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._has_rows:  # by now a script has set what it sets
            self._has_rows = True
            self._flags.clear()
        elif len(sys.modules) == self._looked_at:
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            self.update()

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") in ("eval", "diverged") and len(sys.modules) != self._looked_at:
            self.update()

    def finish(self, status: str) -> None:
        self.update(is_last=True)
        self._contents = {}  # written
        if self._main not in ("notebook", "session"):
            atexit.register(self._exit)

    def _exit(self) -> None:
        """Results are often written after the run was finished."""
        with _quietly():
            if os.getpid() == self._pid and self._path.exists():
                self._look_at_outputs()
                if to_json(self._document) != self._written:
                    write_json(self._path, self._document)

    def update(self, is_last: bool = False) -> None:
        if os.getpid() != self._pid:  # a worker that was forked
            return
        with _quietly():
            self._look()
            if is_last:
                self._look_at_outputs()
            self._document |= {
                "main": self._main,
                "files": sorted(self._files.values(), key=lambda one: str(one["file"])),
                "packages": dict(sorted(self._packages.items(), key=lambda one: one[0].lower())),
                "variables": dict(sorted(self._variables.items())),
                "read_variables": sorted(self._read_variables),
                "flags": self._flags,
                "outputs": sorted(self._outputs),
                "is_complete": is_last,
            }
            if (content := to_json(self._document)) != self._written:
                if self._contents:
                    write_whole(self._archive, _packed(self._contents))
                write_json(self._path, self._document)
                self._written = content

    # What there is to see.

    def _look(self) -> None:
        is_first = not self._modules
        self._looked_at = len(sys.modules)
        if (flags := _torch_flags()) and (not self._flags or self._flags[-1] != flags):
            self._flags.append(flags)
        for name, module in list(sys.modules.items()):
            if name in self._modules and name != "__main__":
                continue
            self._modules.add(name)
            try:
                names = object.__getattribute__(module, "__dict__")  # a lazy module must not be loaded by a look
                file = names.get("__file__")
            except (AttributeError, TypeError):
                continue
            if not isinstance(file, str) or not file or file.startswith(("<", *_OWN_TEXTS)):
                continue
            is_installed = "site-packages" in file or "dist-packages" in file
            if is_installed and (name.partition(".")[0], os.path.dirname(file)) in self._settled:
                continue
            if is_installed or not file.startswith(_STANDARD_TEXTS):
                with contextlib.suppress(OSError, ValueError):
                    self._module(name, Path(os.path.abspath(file)), names)
        if is_first:
            for path in self._stack:
                self._add(path, "__main__" if path == self._stack[-1] else "", "imported")
            for word in self._document["command"][1:]:
                self._named(word.partition("=")[2] or word, [self._cwd, self._base])
        self._code_without_file()
        for name, value in os.environ.items():
            is_read = name in self._read_variables and not _PERSONAL.fullmatch(name)
            if (is_read or _VARIABLES.fullmatch(name)) and not _SECRET_NAME.search(name):
                # A long word of letters and digits may be a key under any name.
                is_odd = len(value) > 300 or re.search(r"(?=\S*\d)(?=\S*[a-zA-Z])[\w+/=-]{32,}|://[^/\s]*@", value)
                self._variables.setdefault(name, "(not kept)" if is_odd else value)
        self._outputs |= set(self._open_outputs())

    def _module(self, name: str, path: Path, names: Mapping[str, Any]) -> None:
        parts, top = path.parts, name.partition(".")[0]
        spec = names.get("__spec__")
        real = getattr(spec, "name", None) or name  # of __main__ the module that was run
        depth = real.count(".") + (path.stem == "__init__")
        folder = path.parents[depth] if depth < len(path.parents) else path.parent
        is_installed = "site-packages" in parts or "dist-packages" in parts
        if (owner := self._owner(folder, top, is_installed)) is not None:
            said = vars(sys.modules.get(top, object)).get("__version__")
            name_of, version = owner
            # Two descriptions of one package may lie side by side: then only the module knows.
            is_other = isinstance(said, str) and str(said) != version
            self._packages.setdefault(name_of, f"{version} (the module says {said})" if is_other else version)
            self._settled.add((top, str(path.parent)))
            return
        if name == "_remote_module_non_scriptable" or any(map(_GENERATED.fullmatch, parts)):
            return  # torch wrote it
        if name == "__main__" and path.parent in _TOOLS:
            return
        is_main = name in ("__main__", "__mp_main__")
        self._add(path, "__main__" if is_main else name, "imported", names)

    def _owner(self, folder: Path, top: str, is_installed: bool) -> tuple[str, str] | None:
        """Name and version of the distribution in this very folder that a module belongs to."""
        if folder not in self._owners:
            known: dict[str, tuple[str, str]] = {}
            unclear = []
            # Beside its source an egg-info is a package that is being worked on.
            for info in sorted([*folder.glob("*.dist-info"), *(folder.glob("*.egg-info") if is_installed else ())]):
                found = version_of(info)
                if found is None:
                    continue
                try:
                    tops = (info / "top_level.txt").read_text().split() if info.is_dir() else []
                except OSError:
                    tops = []
                for one in tops:
                    known.setdefault(one, found)
                known.setdefault(found[0].replace("-", "_").lower(), found)
                if not tops:
                    unclear.append((info, found))
            self._owners[folder] = known
            for info, found in unclear:  # what a wheel without top_level.txt holds stands in its list of files
                with contextlib.suppress(OSError), (info / "RECORD").open(errors="replace") as lines:
                    for number, line in enumerate(lines):
                        first = line.partition(",")[0].partition("/")[0]
                        known.setdefault(first.removesuffix(".py").partition(".")[0], found)
                        if number > 200:
                            break
        known = self._owners[folder]
        return known.get(top) or known.get(top.lower())

    def _add(self, path: Path, module: str, how: str, names: Mapping[str, Any] | None = None) -> None:
        """One file, read the first time it is seen; only its name and hash if it is no text."""
        if path in self._files:
            known = self._files[path]
            if module and module not in known["modules"]:
                known["modules"] = [*known["modules"], module]
            if how == "imported" and known["how"] == "named":
                known["how"] = how
                if self._is_edited(path, names):
                    known["is_edited"] = True
            return
        if not path.is_file():  # in an archive of modules
            path = next((above for above in path.parents if above.is_file()), path)
            if path in self._files or not path.is_file():
                return
        if len(self._files) >= 20_000:
            return
        data = path.read_bytes()
        label = self._label(path)
        entry: dict[str, Any] = {
            "file": label,
            "modules": [module] if module else [],
            "how": how,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
        }
        is_python = path.suffix.lower() in (".py", ".pyw") or b"\0" not in data[:8000]
        if how == "imported" and self._is_edited(path, names):
            entry["is_edited"] = True
        self._files[path] = entry
        if is_python:
            self._keep(entry, label, data, path)
        else:
            entry["kept"] = ""
        if path.suffix.lower() in (".py", ".pyw", "") and is_python:
            text = data.decode("utf-8", "replace")
            self._read_variables |= set(_READS.findall(text))
            words = [match[1] for match in _LITERAL.findall(text)]
            folders = [path.parent, self._cwd, self._base]
            for word in words:
                self._named(word, folders, words)

    def _is_edited(self, path: Path, names: Mapping[str, Any] | None) -> bool:
        """Whether it changed after it was loaded: then it is not what was executed."""
        state = path.stat()
        return state.st_mtime > self._process_began + _CLOCK_S and not _is_as_imported(path, state, names)

    def _keep(self, entry: dict[str, Any], label: str, data: bytes, path: Path | None = None) -> None:
        """Its content in the run, where the snapshot does not hold it."""
        if self._held.get(label) == _blob(data, 64 if len(next(iter(self._held.values()), "")) == 64 else 40):
            entry["kept"] = "snapshot"
        elif is_secret_file(label):
            entry |= {"kept": "", "why": "looks like a secret"}
        elif len(data) > _FILE_BYTES or self._kept_bytes + len(data) > _TOTAL_BYTES:
            entry |= {"kept": "", "why": "too large"}
        else:
            text = data.decode("utf-8", "surrogateescape")
            shown = _SECRET_LINE.sub(r"\1\2(hidden)\2", text)
            if shown != text:
                entry["is_redacted"] = True
            entry["kept"] = self._archive.name
            self._contents[label] = shown.encode("utf-8", "surrogateescape")
            self._kept_bytes += len(data)

    def _named(self, word: str, folders: Sequence[Path], others: Sequence[str] = ()) -> None:
        """A file of code or configuration that a command or a source names, if there is one."""
        suffix = os.path.splitext(word)[1].lower()
        if suffix not in (".py", *CONFIG_SUFFIXES) or any(c in word for c in "*?{}\0") or len(word) > 300:
            return
        if sum(one["how"] == "named" for one in self._files.values()) >= _NUM_NAMED:
            return
        # A folder may be named apart: Path("conf") / "settings.py".
        apart = [folder / one for one in dict.fromkeys(others) if _FOLDER.fullmatch(one) for folder in folders[:2]]
        for folder in [*folders, *apart[:200]]:
            path = Path(os.path.abspath(folder / os.path.expanduser(word)))
            is_known = is_of_python(path) or any(_is_below(path, place) for place in (_OWN, *self._exclude))
            if is_known or not path.is_file():
                continue
            with contextlib.suppress(OSError):
                self._add(path, "", "named")
            return

    def _code_without_file(self) -> None:
        """Cells of a notebook, a program on the command line or from a pipe."""
        content, name, digest = b"", "", ""
        if self._main == "notebook":
            cells = object.__getattribute__(sys.modules["__main__"], "__dict__").get("In")
            if isinstance(cells, list):
                found = dict.fromkeys(cell.strip() for cell in cells if isinstance(cell, str) and cell.strip())
                name, content = CELLS, "".join(f"# %%\n{cell}\n\n" for cell in found).encode("utf-8", "replace")
        elif self._main == "typed":
            words = sys.orig_argv
            with contextlib.suppress(ValueError, IndexError):
                name, content = TYPED, words[words.index("-c") + 1].encode("utf-8", "replace")
        elif self._main == "piped" and Path(PIPED) not in self._files:
            name = PIPED
            with contextlib.suppress(OSError):
                if stat.S_ISREG((state := os.fstat(0)).st_mode):
                    content = os.pread(0, min(state.st_size, _FILE_BYTES + 1), 0)
            if not content:
                digest = next((one for frame in _frames() if (one := _hash_of_code(frame, "<stdin>"))), "")
        if not name or not (content or digest):
            return
        digest = digest or hashlib.sha256(content).hexdigest()
        entry: dict[str, Any] = {"file": name, "modules": ["__main__"], "how": "imported"}
        entry |= {"sha256": digest, "bytes": len(content), "kept": ""}
        if self._files.get(Path(name), {}).get("sha256") == digest:
            return
        self._files[Path(name)] = entry
        if content:
            self._keep(entry, name, content)
        text = content.decode("utf-8", "replace")
        self._read_variables |= set(_READS.findall(text))
        words = [match[1] for match in _LITERAL.findall(text)]
        for word in words:
            self._named(word, [self._cwd, self._base], words)

    def _label(self, path: Path) -> str:
        """Where it lies as others would call it: below the kept folder, else below home, else as it is."""
        for one in (path, Path(os.path.realpath(path))):
            if _is_below(one, self._base):
                return one.relative_to(self._base).as_posix()
        home = Path.home()
        return f"~/{path.relative_to(home).as_posix()}" if _is_below(path, home) else path.as_posix()

    def _open_outputs(self) -> Iterator[str]:
        """Files below the kept folder that the process has open to write: a redirected output, a log."""
        try:
            numbers = os.listdir("/proc/self/fd")
        except OSError:
            return
        for number in numbers:
            with contextlib.suppress(OSError, ValueError, IndexError):
                target = Path(os.readlink(f"/proc/self/fd/{number}"))
                if not _is_below(target, self._base) or any(_is_below(target, one) for one in self._exclude):
                    continue
                about = Path(f"/proc/self/fdinfo/{number}").read_text()
                mode = int(about.partition("flags:")[2].split()[0], 8) & 3
                if mode and stat.S_ISREG(os.stat(target).st_mode):
                    yield target.relative_to(self._base).as_posix()

    def _look_at_outputs(self) -> None:
        """What appeared or changed in the kept folder since the process began; a person may have written it as well."""
        wrote: list[str] = []
        if self._tree is not None:
            with contextlib.suppress(SnapshotError, OSError):
                done = self._tree.git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").stdout
                wrote = [os.fsdecode(line[3:]) for line in done.split(b"\0") if line[:2] != b" D" and len(line) > 3]
        else:
            left_out: list[str] = []
            paths = sources_below(self._base, self._exclude, left_out)
            wrote = [path.relative_to(self._base).as_posix() for path in paths]
        found = []
        for name in wrote:
            path = self._base / name
            with contextlib.suppress(OSError):
                is_excluded = any(_is_below(path, one) for one in self._exclude)
                if os.lstat(path).st_mtime > self._began + _CLOCK_S and not is_excluded:
                    found.append(name)
        self._document |= {"wrote": sorted(found)[:_NUM_WROTE], "num_wrote": len(found)}
        for path, entry in self._files.items():  # configuration that is also written, as metrics.json is
            with contextlib.suppress(OSError):
                if entry["how"] == "named" and path.stat().st_mtime > self._began + _CLOCK_S:
                    entry["is_written"] = True


def read_contents(path: Path) -> dict[str, bytes]:
    """Label -> what an archive of a run holds of it; OSError or ValueError where it is damaged."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive.getmembers():
                if member.isfile() and member.size <= _FILE_BYTES and (content := archive.extractfile(member)):
                    found[member.name.removeprefix("files/")] = content.read()
    except (EOFError, tarfile.TarError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def _packed(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for label, data in sorted(contents.items()):
            entry = tarfile.TarInfo(f"files/{label}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _held_by(tree: WorkingTree | None, code: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Label -> the hash by which git would call the content, of all that the snapshot of a run holds."""
    found: dict[str, str] = {}
    with contextlib.suppress(SnapshotError, OSError, ValueError, tarfile.TarError):
        if tree is not None:
            for line in filter(None, tree.git("ls-tree", "-r", "-z", str(code["commit"])).stdout.split(b"\0")):
                about, _, name = line.partition(b"\t")
                found[os.fsdecode(name)] = about.split()[2].decode()
        elif code.get("kind") == "tar":
            with tarfile.open(folder / str(code["file"]), "r:gz") as archive:
                for member in archive.getmembers():
                    if member.isfile() and (content := archive.extractfile(member)):
                        found[member.name] = _blob(content.read(), 40)
    return found


def _blob(data: bytes, length: int) -> str:
    make = hashlib.sha256 if length == 64 else hashlib.sha1
    return make(b"blob %d\0" % len(data) + data).hexdigest()


def _main() -> str:
    """What kind of program this is: script, module, typed (-c), piped, notebook, session."""
    names = object.__getattribute__(sys.modules["__main__"], "__dict__")
    if "ipykernel" in sys.modules or ("IPython" in sys.modules and isinstance(names.get("In"), list)):
        return "notebook"
    if not str(names.get("__file__") or "<stdin>").startswith("<"):
        return "module" if names.get("__spec__") is not None else "script"
    if "-c" in sys.orig_argv and sys.argv[:1] == ["-c"]:
        return "typed"
    return "session" if hasattr(sys, "ps1") or sys.flags.interactive else "piped"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _on_the_stack() -> Iterator[Path]:
    """Files of the code that called, the outermost last: a profiler runs a script without making it `__main__`."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "<module>" and not name.startswith("<"):
            path = Path(os.path.abspath(name))
            is_known = is_of_python(path) or _is_below(path, _OWN) or path.parent in _TOOLS
            if not is_known and not any(map(_GENERATED.fullmatch, path.parts)) and path.is_file():
                yield path


def is_of_python(path: Path) -> bool:
    """Whether a file belongs to Python itself or to an installed package."""
    return "site-packages" in path.parts or any(_is_below(path, place) for place in _STANDARD)


def _hash_of_code(frame: FrameType, file: str) -> str:
    code = frame.f_code
    if code.co_name != "<module>" or code.co_filename != file:
        return ""
    return hashlib.sha256(marshal.dumps(code, 2)).hexdigest()  # later versions depend on who else refers to a constant


def _is_as_imported(path: Path, state: os.stat_result, names: Mapping[str, Any] | None) -> bool:
    """Whether a file that changed since the process began is what its module was loaded from: a script may have written
    it before. The compiled copy says so; where there is none, what the module holds; of a program nobody knows."""
    spec = (names or {}).get("__spec__")
    if names is None or spec is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        head = Path(str(getattr(spec, "cached", None))).read_bytes()[:16]
        if not sys.dont_write_bytecode and len(head) == 16 and head[4:8] == b"\0\0\0\0":  # known by time, not by a hash
            times = [int.from_bytes(head[at : at + 4], "little") for at in (8, 12)]
            return times == [int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF]
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(value := node.value, ast.Constant):
            targets = [one.id for one in node.targets if isinstance(one, ast.Name)]
            if any(names.get(name) != value.value for name in targets):
                return False
    for code in compile(path.read_bytes(), str(path), "exec", dont_inherit=True).co_consts:
        known = names.get(code.co_name) if isinstance(code, CodeType) else None
        if isinstance(known, FunctionType) and known.__code__ != code:
            return False
    return True


def _process_began() -> float | None:
    """When this process started, by the clock of the files; None where that is unknown."""
    try:
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        ticks = start_time(os.getpid())
        return None if ticks is None else time.time() - (up_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def _torch_flags() -> dict[str, Any]:
    """What torch computes with: TF32, deterministic algorithms, the default type."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends") or not hasattr(torch, "get_default_dtype"):
        return {}  # or it is still being imported
    flags: dict[str, Any] = {}
    asked = {
        "float32_matmul_precision": lambda: torch.get_float32_matmul_precision(),
        "matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "matmul.allow_bf16_reduced": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "matmul.allow_fp16_reduced": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
        "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
        "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
        "sdp.flash": lambda: torch.backends.cuda.flash_sdp_enabled(),
        "sdp.mem_efficient": lambda: torch.backends.cuda.mem_efficient_sdp_enabled(),
        "sdp.math": lambda: torch.backends.cuda.math_sdp_enabled(),
        "deterministic_algorithms": lambda: torch.are_deterministic_algorithms_enabled(),
        "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, ask in asked.items():
            with contextlib.suppress(Exception):  # two ways to set TF32 were mixed: then torch refuses to say
                flags[name] = ask()
    return flags


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A record of the code must not end a training: what cannot be read is not recorded."""
    with contextlib.suppress(Exception):
        yield


_FOLDER = re.compile(r"[\w.~-][\w./~ -]*")
_OWN = Path(__file__).resolve().parents[1]
_OWN_TEXTS = tuple(f"{folder}{os.sep}" for folder in (_OWN, os.path.dirname(os.path.dirname(__file__))))
_STANDARD = tuple(
    dict.fromkeys(
        path
        for name in ("stdlib", "platstdlib")
        if (found := sysconfig.get_paths().get(name))
        for path in (Path(found), Path(found).resolve())
    )
)
_STANDARD_TEXTS = tuple(f"{folder}{os.sep}" for folder in _STANDARD)
_TOOLS = frozenset({Path(sys.prefix) / "bin", Path(sys.base_prefix) / "bin", Path(sysconfig.get_path("scripts")),
                    Path.home() / ".local" / "bin"})  # fmt: skip
