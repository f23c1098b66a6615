"""Writes a run: one folder, `<root>/<experiment>/<n>`, that says what ran and what happened.

A run exists once its run.json does; that file comes last, so a start that fails leaves nothing behind. Numbers are
claimed by mkdir and never given twice. A run's id is where its folder lies, so a rename changes it; whatever refers to
a run uses its uid. run.json is read again under a lock before each change, because others may write a verdict into it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from rung import __version__
from rung.errors import RunError
from rung.files import write_whole
from rung.parse import mismatch
from rung.runs import paths
from rung.runs.files import LineFile, locked, newer, plain, read_json, reason, to_json, write_json, writing
from rung.runs.metrics import MetricsWriter, Number, TablesWriter, last_row, next_segment
from rung.runs.process import BEAT_S, HEARTBEAT, Liveness, liveness, this_process
from rung.runs.provenance import environment, packages, snapshot

# Of run.json, and of all documents, rows, tables and events beside it; saves, captures and evals, which are also read
# by their own paths, name their own. Raise it when an older reader would misread a run.
SCHEMA = 1
EVAL_SCHEMA = 1  # of evals/<split>-<step>.json
STATUSES = ("finished", "stopped", "crashed", "diverged")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBER = re.compile(r"[1-9][0-9]*")
_ID = re.compile(rf"{_NAME.pattern}/[0-9]+")
COUNTER = ".last"
_NUMBER_OR_NAME = (int, float, str)  # of a float that may be NaN
_PROCESS = {"pid": int, "host": str, "boot_id": str, "namespace": str, "started": int}
# What readers of run.json rely on, wherever a key is there; whatever else it holds they look at before they use it.
SHAPE = {
    "schema": int, "uid": str, "id": str, "experiment": str, "number": int,
    "tags": [str], "recipe": str, "preset": str, "status": str, "command": [str], "created": str, "ended": str,
    "versions": dict, "process": _PROCESS, "last_step": int, "formerly": list, "imported": dict, "sweep": dict,
    "best": {"step": int, "set": str, "loss": _NUMBER_OR_NAME},
    "derived": dict, "totals": dict, "prepared": [list], "code": dict, "segments": list,
    "ab": {"id": str, "arm": str, "base": str},
}  # fmt: skip


class Follower(Protocol):
    """Receives what a run records, right after it was written. Must neither raise nor wait."""

    def row(self, step: int, values: Mapping[str, Number]) -> None: ...
    def event(self, event: Mapping[str, Any]) -> None: ...
    def finish(self, status: str) -> None: ...


class Record:
    """An open run. `create` starts one, `reopen` continues one; `finish` ends it."""

    def __init__(self, path: Path, document: dict[str, Any], segment: int, code: Mapping[str, Any]) -> None:
        self.path = path
        self.id = str(document["id"])
        self.segment = segment
        self.code = dict(code)  # the snapshot of this attempt
        self.last_step: int | None = document.get("last_step")
        self._document = document
        self._metrics = MetricsWriter(path / "metrics", segment)
        self._tables = TablesWriter(path / "tables", segment)
        self._events = LineFile(path / "events.ndjson")
        self._heartbeat = path / HEARTBEAT
        self._has_rows = False
        self._followers: list[Follower] = []
        self._pid = os.getpid()
        self._is_closed = threading.Event()
        _beat(self._heartbeat)
        threading.Thread(target=_beat_until, args=(self._is_closed, self._heartbeat), daemon=True).start()
        weakref.finalize(self, self._is_closed.set)  # of a record that somebody forgot to close
        if code.get("warning"):
            self.event("warning", text=f"code snapshot: {code['warning']}")

    @classmethod
    def create(
        cls,
        root: Path,
        experiment: str,
        *,
        recipe: str,
        preset: str | None,
        command: list[str],
        seed: int | None,
        config: Mapping[str, Any],
        sources: Mapping[str, str],
        derived: Mapping[str, Any],
        data: Mapping[str, Any],
        definitions: Mapping[str, Any] = {},
        initial_weights: Mapping[str, Any] | None = None,
        parent: str | None = None,
        parent_uid: str | None = None,
        why: str | None = None,
        tags: Sequence[str] = (),
        code_root: Path | None = None,
        device: dict[str, Any] | None = None,
        sweep: Mapping[str, Any] | None = None,
        prepared: Sequence[Sequence[str]] = (),
    ) -> Record:
        """Claims the next number and writes all that is known before step 0.

        The code below `code_root` is kept with the run; without it none is, and run.json says so. `definitions` say
        what a metric counts ("eval/full_val": mask, ignored ids, reduction, eval set): two runs whose definitions of a
        metric differ cannot be compared by it. `initial_weights` are checksums by parameter name. `sweep` names the
        sweep and the point that the run is of. `parent_uid` is only needed where the parent is not under `root`.
        `prepared` are the commands that prepare its data.
        """
        import yaml  # type: ignore[import-untyped]  # a quarter of the import time, and only a start needs it

        check_name(experiment)
        with claimed(root, experiment) as path:
            number = int(path.name)
            text: str = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, default_flow_style=False)
            write_whole(path / "config.yaml", text.encode())
            write_json(path / "config.sources.json", sources)
            write_json(path / "data.json", data)
            write_json(path / "definitions.json", definitions)
            if initial_weights is not None:
                write_json(path / "init.json", initial_weights)
            write_json(path / "env.json", environment(device))
            uid, run_id = uuid.uuid4().hex, f"{experiment}/{number}"
            code = _code(path, uid, run_id, root, code_root)
            process, now = this_process(), utc_now()
            versions = {"rung": __version__, "python": platform.python_version(), "torch": packages().get("torch")}
            document = {
                "schema": SCHEMA,
                "uid": uid,  # the same wherever the folder is copied or moved to
                "id": run_id,
                "experiment": experiment,
                "number": number,
                "parent": parent,  # its id at this time; readers find it by the uid
                "parent_uid": parent_uid or (read_leniently(root / parent).get("uid") if parent else None),
                "why": why,
                "verdict": None,
                "tags": list(tags),
                "recipe": recipe,
                "preset": preset,
                "status": "running",
                "command": list(command),
                "seed": seed,
                "created": now,
                "ended": None,
                "versions": versions,
                "process": process,
                "best": None,
                "last_step": None,
                "derived": plain(derived),
                "code": code,
                "segments": [_segment(0, command, process, now, "env.json", None)],
                **({} if sweep is None else {"sweep": plain(sweep)}),
                **({"prepared": [list(words) for words in prepared]} if prepared else {}),
            }
            write_json(path / "run.json", document)
            return cls(path, plain(document), 0, code)

    @classmethod
    def reopen(
        cls,
        path: Path,
        *,
        command: list[str],
        code_root: Path | None = None,
        device: dict[str, Any] | None = None,
    ) -> Record:
        """Continues a run in a new metrics segment; refuses one that is still running.

        The code is kept again, of the current folder unless another one is named, if it was at the start. Where it lay
        then is not asked: whoever made the run wrote that.
        """
        path = path.resolve()
        check_shape(path, read_document(path))  # a folder that is no run gets a sentence of its own
        with writing(str(path)), locked(path):
            document = read_document(path)
            status, text = liveness_of(path, document)
            if status == "running":
                message = f"{document['id']} is still running ({text}); stop it first, or start a new run."
                raise RunError(message, code="wrong-state")
            number = max(next_segment(path / "metrics"), len(document.get("segments") or []))
            env_name = f"env.{number}.json"
            write_json(path / env_name, environment(device))
            if code_root is None and (document.get("code") or {}).get("root"):
                code_root = Path.cwd()
            name = f"{document.get('uid') or document['id']}.{number}"
            code = _code(path, name, document["id"], path.parent.parent, code_root)
            process, now, row = this_process(), utc_now(), last_row(path / "metrics")
            segment = _segment(number, command, process, now, env_name, code)
            last_step = None if row is None else int(row["step"])
            document |= {"schema": SCHEMA, "status": "running", "ended": None, "process": process}
            document["last_step"] = last_step
            document["segments"] = [*(document.get("segments") or []), segment]
            write_json(path / "run.json", document)
            return cls(path, plain(document), number, code)

    @property
    def attempt(self) -> Mapping[str, Any]:
        """The entry of run.json for the attempt that is writing."""
        return dict(self._document["segments"][-1])

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """One row of metrics: the update from state `step`, or an eval of that state; about 7 us, never buffered."""
        self._metrics.log(step, values)
        self.last_step = step
        if not self._has_rows:
            self._has_rows = True
            # Where this segment begins, so that what it supersedes is known without opening the rows.
            *before, part = self._document["segments"]
            self.update(segments=[*before, {**part, "first_step": step}])
        for follower in self._followers:
            follower.row(step, values)

    def table(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        """Numbers per layer at a step; see metrics.py."""
        self._tables.add(kind, step, names, columns)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """One line of events.ndjson: an eval, a save, a skip, a finding, a sample, a note."""
        event: dict[str, Any] = {"kind": kind, "step": step, "unix_s": time.time(), "segment": self.segment, **fields}
        self._events.append(to_json(event) + b"\n")
        for follower in self._followers:
            follower.event(event)

    def follow(self, follower: Follower) -> None:
        """From now on `follower` receives each row and event."""
        self._followers.append(follower)

    def update(self, **fields: Any) -> None:
        """Replaces fields of run.json; all other fields stay, whoever wrote them."""
        self._document = amend(self.path, **fields)

    def rewind(self) -> None:
        """Continues in a new segment of this attempt: what it logs from now on replaces later steps of the old one."""
        self._metrics.close()
        self._tables.close()
        self.segment = next_segment(self.path / "metrics")
        now = utc_now()
        part = {**self._document["segments"][-1], "number": self.segment, "started": now, "first_step": None}
        self.update(segments=[*self._document["segments"], part])
        self._metrics = MetricsWriter(self.path / "metrics", self.segment)
        self._tables = TablesWriter(self.path / "tables", self.segment)
        self._has_rows = False

    def finish(self, status: str, **fields: Any) -> None:
        """Says how the run ended: finished, stopped, crashed or diverged."""
        if status not in STATUSES:
            raise ValueError(f"{status!r} is not an end of a run; use one of {', '.join(STATUSES)}")
        if os.getpid() != self._pid:  # a child that a recipe forked unwinds the same stack; its parent still trains
            return
        self._metrics.sync()
        self.event("end", step=self.last_step, status=status)
        self.update(**{"status": status, "ended": utc_now(), "last_step": self.last_step, **fields})
        self.close()
        for follower in self._followers:
            follower.finish(status)

    def close(self) -> None:
        """Closes the files without recording an end; a run left like this is shown as vanished."""
        self._is_closed.set()
        self._metrics.close()
        self._tables.close()
        self._events.close()

    def add_sample(self, step: int, name: str, data: bytes, caption: str = "") -> Path:
        """Keeps an artifact of state `step` and records an event."""
        if not name or name != os.path.basename(name) or name.startswith("."):
            raise ValueError(f"{name!r} is not a plain file name for a sample")
        path = paths.inside(self.path, f"samples/{step:08d}/{name}")
        with writing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        self.event("sample", step=step, path=path.relative_to(self.path).as_posix(), caption=caption)
        return path


def _beat_until(is_closed: threading.Event, heartbeat: Path) -> None:
    while not is_closed.wait(BEAT_S):
        _beat(heartbeat)


def _beat(heartbeat: Path) -> None:
    """A sign of life for those who look from another machine."""
    with contextlib.suppress(OSError):  # a full disk is reported by the row that does not fit
        try:
            os.utime(heartbeat)
        except FileNotFoundError:
            heartbeat.touch()


def append_event(path: Path, kind: str, **fields: Any) -> None:
    """An event from somebody who is not the run's process: a note, a verdict. One write, so it may still be running."""
    file = LineFile(path / "events.ndjson")
    try:
        file.append(to_json({"kind": kind, "step": None, "unix_s": time.time(), **fields}) + b"\n")
    finally:
        file.close()


def amend(path: Path, **fields: Any) -> dict[str, Any]:
    """Replaces fields of a run's run.json and returns the whole; also for those who are not the run's process."""
    with writing(str(path / "run.json")), locked(path):
        document = {**read_document(path), **plain(fields)}
        write_json(path / "run.json", document)
    return document


def read_document(path: Path) -> dict[str, Any]:
    """run.json with the id that its folder gives it; RunError where it is missing, damaged or of a newer rung."""
    file = path / "run.json"
    paths.check(path)
    try:
        document = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path} is not a run: it has no run.json.", code="no-run") from None
    except OSError as error:
        raise RunError(f"cannot read {file}: {reason(error)}.", code="cannot-read") from error
    except ValueError as error:
        raise RunError(f"{file} is damaged: {error}.", code="run-damaged") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, int):
        raise RunError(f"{file} is damaged: it names no schema.", code="run-damaged")
    if problem := newer(path, document, SCHEMA):
        raise RunError(f"{problem}.", code="version-mismatch")
    if not isinstance(document.get("id"), str):
        raise RunError(f"{file} is damaged: it names no id.", code="run-damaged")
    return named_by_folder(document, path)


def check_shape(path: Path, document: Mapping[str, Any]) -> None:
    """RunError where readers of this run.json could not go into it; changing another field of it is still allowed."""
    if found := mismatch(document, SHAPE, "it"):
        raise RunError(f"{path / 'run.json'} is damaged: {found}; fix or remove it.", code="run-damaged")


def read_leniently(path: Path) -> dict[str, Any]:
    """What a run.json says, also one of a newer rung; empty where it is damaged or not there."""
    with contextlib.suppress(OSError, ValueError, RunError):
        document = read_json(paths.inside(path, "run.json"))
        return named_by_folder(document, path) if isinstance(document, dict) else {}
    return {}


def named_by_folder(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The document of a run that lies in `<experiment>/<n>`, under that name.

    run.json has another one where a folder was renamed by hand, or `rung mv` was killed before its rename: then the
    name it was about to get is in `id`, and the present one in `formerly`.
    """
    folder, number = os.path.split(os.path.abspath(path))
    experiment = os.path.basename(folder)
    recorded, here = document.get("id"), f"{experiment}/{number}"
    is_in_runs = _NUMBER.fullmatch(number) and _NAME.fullmatch(experiment)
    if not is_in_runs and isinstance(recorded, str) and not _ID.fullmatch(recorded):  # folders are named after it
        return {**document, "id": f"{re.sub('[^A-Za-z0-9]+', '-', number).strip('-') or 'run'}/1"}
    if here == recorded or not isinstance(recorded, str) or not is_in_runs:
        return document
    known = former_ids(document)
    formerly = [name for name in known if name != here] if here in known else [*known, recorded]
    return {**document, "id": here, "experiment": experiment, "number": int(number), "formerly": formerly}


def former_ids(document: Mapping[str, Any]) -> list[str]:
    """Ids that a run had before it was moved, oldest first."""
    formerly = document.get("formerly")
    return [str(name) for name in formerly] if isinstance(formerly, list) else []


def liveness_of(path: Path, document: Mapping[str, Any]) -> Liveness:
    """The recorded status of a run; of one that recorded itself as running, what became of its process."""
    recorded, process = str(document.get("status")), document.get("process")
    if recorded != "running":
        return Liveness(recorded, recorded)
    heartbeat = None
    with contextlib.suppress(OSError):
        heartbeat = os.stat(path / HEARTBEAT).st_mtime
    return liveness(process if isinstance(process, dict) else None, heartbeat)


def check_name(experiment: str) -> None:
    """Raises RunError for a name that would not work as a folder, in a git ref and on the command line."""
    if not _NAME.fullmatch(experiment) or ".." in experiment or experiment.endswith((".", ".lock")):
        raise RunError(
            f"{experiment!r} cannot name an experiment; use up to 100 letters, digits, '.', '_' and '-', "
            "with a letter or digit first and no '..' or '.lock'.",
            code="bad-name",
        )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextlib.contextmanager
def claimed(root: Path, experiment: str) -> Iterator[Path]:
    """A new, empty run folder, removed again when the body fails."""
    made: list[Path] = []
    path: Path | None = None
    try:
        with writing(f"a run under {root}"):
            for folder in (root, root / experiment):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    made.append(folder)
            folder = (root / experiment).resolve()
            with locked(folder):
                number = last_number(folder) + 1
                while path is None:
                    with contextlib.suppress(FileExistsError):  # on a disk without locks, another start may be faster
                        (folder / str(number)).mkdir()
                        path = folder / str(number)
                    number += 1
                reserve_number(folder, int(path.name))
            yield path
    except BaseException:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        for folder in reversed(made):  # only if still empty: another run may have started there
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [COUNTER]:
                    (folder / COUNTER).unlink()
                folder.rmdir()
        raise


def last_number(experiment: Path) -> int:
    """The highest number that an experiment has ever used."""
    given = [int(name) for name in os.listdir(experiment) if name.isdecimal()] if experiment.is_dir() else []
    with contextlib.suppress(OSError, ValueError):
        given.append(int((experiment / COUNTER).read_text()))
    return max(given, default=0)


def reserve_number(experiment: Path, number: int) -> None:
    """From now on the experiment only uses higher numbers. The caller holds the lock of the folder."""
    write_whole(experiment / COUNTER, f"{max(last_number(experiment), number)}\n".encode())


def _segment(
    number: int, command: Sequence[str], process: dict[str, Any], now: str, env: str, code: dict[str, Any] | None
) -> dict[str, Any]:
    segment = {"number": number, "started": now, "first_step": None, "command": list(command), "process": process}
    return {**segment, "env": env, **({"code": code} if code else {})}


def _code(path: Path, name: str, run_id: str, root: Path, code_root: Path | None) -> dict[str, Any]:
    if code_root is None:
        return {"kind": "none", "reason": "the run was started without a code folder"}
    code_root, root = code_root.resolve(), root.resolve()
    # Code that lies inside the runs folder must not be excluded with it; then only the experiment is.
    exclude = [path.parent] if code_root.is_relative_to(root) else [root]
    return {**snapshot(code_root, path, name, exclude, run_id), "root": str(code_root)}
