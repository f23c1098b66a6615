"""Reads runs: finds them by name, lists them, and says honestly how each stands.

Listing reads one run.json per run and nothing else. Reading leaves only derived files behind: copies of the rows by
column (columns.py), and `.config.json`, which is read many times as fast as config.yaml. Two things differ from
run.json: a run that recorded itself as running may turn out to have vanished (process.py), and its parent, or the base
of its A/B, is named by the id that run has now (`follow_moves`).
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung import parse
from rung.errors import CheckpointError, RunError
from rung.lab import runs_folder
from rung.runs.columns import Arrays, Progress, Summary, read_arrays, read_lists, read_series, summaries, unread_bytes
from rung.runs.files import from_json, plain, read_json, read_lines, reason, to_json
from rung.runs.metrics import Faults, last_row, read_columns
from rung.runs.paths import inside, stays
from rung.runs.process import Liveness
from rung.runs.record import STATUSES, check_shape, former_ids, liveness_of, read_document, read_leniently
from rung.runs.renamed import current_config, current_sources

if TYPE_CHECKING:
    from rung.runs.series import Series

ALL_STATUSES = ("running", *STATUSES, "vanished", "silent")
_NUMBER = (int, float)
_QUICK_BYTES = 32 << 20  # of rows: read in less than a second
# What readers of events rely on, wherever a key is there; an event of another shape is a broken line.
_EVENT = {
    "kind": str, "step": int, "unix_s": _NUMBER, "segment": int, "results": (dict, list), "since": int, "rule": str,
    "severity": str, "evidence": [str], "ruled_out": [str], "hides": [str], "changes": dict, "capture": str,
    "rank": int, "micro": int, "tensors": [str], "values": dict, "overrides": [str], "edits": dict, "path": str,
    "file": str, "signal": str, "score": _NUMBER, "value": _NUMBER,
}  # fmt: skip
_REF = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:/([0-9]+|last|best))?/?")


class Run:
    """One run on disk. `document` is its run.json."""

    stop_signal: int = 0  # what stopped it, where this process trained it

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        check_shape(path, document)
        self.path = path
        self.document = document
        self.id: str = document["id"]
        self._config: dict[str, Any] | None = None
        self._summary: dict[str, Summary] | None = None

    def __repr__(self) -> str:
        parts = [self.status, "" if self.step is None else f"step {self.step}"]
        if isinstance(loss := (self.best or {}).get("loss"), int | float):
            parts.append(f"best loss {loss:.4f}")
        return f"<Run {self.id}: {', '.join(filter(None, parts))}>"

    def _repr_html_(self) -> str:
        from rung.report.blocks import Table
        from rung.report.html import fragment
        from rung.report.table import value_text

        best = self.best or {}
        rows = {
            "status": f"{self.status_text}{': ' + str(self.document['reason']) if self.document.get('reason') else ''}",
            "step": self.step,
            "best": f"{value_text(best.get('loss'))} on {best.get('set')} at step {best.get('step')}" if best else None,
            "why": self.document.get("why"),
            "tags": self.document.get("tags") or None,
            "folder": str(self.path),
        }
        shown = {name: v if isinstance(v, str) else value_text(v) for name, v in rows.items() if v is not None}
        return fragment(Table(["run", self.id], list(map(list, shown.items()))))

    @cached_property
    def _liveness(self) -> Liveness:
        return liveness_of(self.path, self.document)

    @property
    def status(self) -> str:
        """finished, stopped, crashed, diverged; running; vanished: its process is gone; silent: cannot be known."""
        return self._liveness.word

    @property
    def status_text(self) -> str:
        """The status with its reason."""
        word, text = self._liveness
        return word if word == text else f"{word} ({text})"

    @property
    def best(self) -> dict[str, Any] | None:
        """step, set, loss and checkpoint of the best eval."""
        return self.document.get("best")

    @property
    def step(self) -> int | None:
        """The last step that was logged; None before the first."""
        last = self.document.get("last_step")
        if self.document.get("status") == "running":
            row = last_row(self.path / "metrics")
            last = last if row is None else row["step"]
        return last

    def config(self, keep: bool = False) -> dict[str, Any]:
        """The resolved configuration, as a tree; with `keep` a quick copy of it is left for the next listing."""
        if self._config is not None:  # it is written once, before the first step
            return self._config
        recipe, file, copy = self.document.get("recipe"), self.path / "config.yaml", self.path / ".config.json"
        try:
            stat = file.stat()
            mark = [stat.st_size, stat.st_mtime_ns]
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = read_json(copy)
                if found["of"] == mark and isinstance(found["config"], dict):
                    self._config = current_config(found["config"], recipe)
                    return self._config
            tree = plain(parse.yaml(parse.read_bytes(file)))
        except OSError as error:
            raise RunError(f"{file} cannot be read: {reason(error)}.", code="cannot-read") from error
        except ValueError as error:
            raise RunError(f"{file} cannot be read: {error}.", code="run-damaged") from error
        tree = tree if isinstance(tree, dict) else {}
        if keep and from_json(data := to_json({"of": mark, "config": tree})) == {"of": mark, "config": tree}:
            with contextlib.suppress(OSError):
                beside = copy.with_name(f"{copy.name}.{os.getpid()}.part")
                beside.write_bytes(data)
                os.replace(beside, copy)
        self._config = current_config(tree, recipe)
        return self._config

    def sources(self) -> dict[str, str]:
        """Dotted key -> who set it."""
        sources = {key: str(source) for key, source in self._json("config.sources.json").items()}
        return current_sources(sources, self.document.get("recipe"))

    def data(self) -> dict[str, Any]:
        return self._json("data.json")

    def definitions(self) -> dict[str, Any]:
        """Metric, or the part of its name before a slash -> what it counts: eval set, mask, reduction."""
        return self._json("definitions.json")

    def initial_weights(self) -> dict[str, Any]:
        """Name of each parameter -> shape and checksum before the first update; empty where they were not recorded."""
        return self._json("init.json")

    def notes(self) -> list[dict[str, Any]]:
        """text and unix_s of what people noted and did not undo, oldest first."""
        kept: list[dict[str, Any]] = []
        for event in self.events():
            if event.get("kind") == "note":
                kept.append(event)
            elif event.get("kind") == "note_undone":
                undone = (event.get("of_unix_s"), str(event.get("text")))
                places = [i for i, n in enumerate(kept) if (n.get("unix_s"), str(n.get("text"))) == undone]
                if places:
                    del kept[places[-1]]
        return kept

    def environment(self) -> dict[str, Any]:
        """env.json of the last attempt."""
        last = parse.mapping((self.document.get("segments") or [{}])[-1])
        return self._json(str(last.get("env") or "") or "env.json")

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Everything that happened, in order, including what a resume repeated; skips broken lines."""
        file = self.path / "events.ndjson"
        try:
            for line in read_lines(file):
                try:
                    event = from_json(line)
                except ValueError:
                    continue
                if not isinstance(event, dict) or (kind is not None and event.get("kind") != kind):
                    continue
                if parse.mismatch(event, _EVENT, "event") is None:
                    yield event
        except OSError as error:
            raise RunError(f"{file} cannot be read: {reason(error)}.", code="cannot-read") from error

    def evals(self) -> list[dict[str, Any]]:
        """step, set, loss and further metrics of the evals that count: what a resume did again replaces what had been.

        An eval event holds `results`, set -> name -> value.
        """
        parts = [part for part in self.document.get("segments") or [] if isinstance(part, dict)]
        told = [(part.get("number"), part.get("first_step")) for part in parts]
        starts = [(number, first) for number, first in told if isinstance(number, int) and isinstance(first, int)]
        found: dict[tuple[int, str], dict[str, Any]] = {}
        taken: dict[tuple[int, str], int] = {}  # in which segment
        for event in self.events("eval"):
            step, segment, results = event.get("step"), event.get("segment") or 0, event.get("results")
            if not isinstance(step, int):
                continue
            # An eval at t is about state t, from which a resume at t starts: that one still counts.
            if any(number > segment and step > first for number, first in starts):
                continue
            for name, values in results.items() if isinstance(results, dict) else ():
                if isinstance(values, dict):
                    values = {k: v for k, v in values.items() if isinstance(v, int | float | None)}
                    # A loop may report an eval in several calls; one that was done again replaces all of them.
                    before = found.get((step, name), {}) if taken.get((step, name)) == segment else {}
                    of = {"step": step, "set": name}
                    found[step, name] = {**of, **before, **values, **of}
                    taken[step, name] = segment
        return [found[key] for key in sorted(found, key=lambda key: key[0])]

    def metrics(self, names: Sequence[str] | None = None, faults: Faults | None = None) -> dict[str, list[Any]]:
        """Columns over all attempts, with `step`, as lists of equal length; None where a row has no such value.

        Faults are counted in rows that are read; of a long run, names are read out of the copy by column.
        """
        copied = None if names is None or faults is not None else read_lists(self.path / "metrics", names)
        return read_columns(self.path / "metrics", names, faults) if copied is None else copied

    def summary(self, progress: Progress | None = None) -> dict[str, Summary]:
        """Metric -> count, last, min and max with their steps; kept beside the rows, so the second look is quick."""
        if self._summary is not None:
            return self._summary
        with self._reading_rows():
            found = summaries(self.path / "metrics", progress)
        found.pop("unix_s", None)
        if self.document.get("status") != "running":
            self._summary = found
        return found

    @property
    def has_unread_rows(self) -> bool:
        """Whether a summary or a curve would have to read many rows first, which takes seconds."""
        return unread_bytes(self.path / "metrics") > _QUICK_BYTES

    def names(self) -> list[str]:
        """The metrics that were recorded, as `series` takes them: loss, norm, eval/full_val/loss."""
        return list(self.summary())

    def series(self, name: str) -> Series:
        """Steps and values of a metric, as numpy arrays, of the rows that have it; RunError where none has."""
        with self._reading_rows():
            found = read_series(self.path / "metrics", name)
        if not len(found) and name not in (known := self.names()):
            raise RunError(f"{self.id} recorded no {name}; {nearest(name, known)}", code="no-metric")
        return found

    def arrays(self, names: Sequence[str]) -> Arrays:
        """Several metrics at once, as numpy arrays; an empty column where a metric was not recorded."""
        with self._reading_rows():
            return read_arrays(self.path / "metrics", names)

    def frame(self, names: Sequence[str] | None = None, kind: str | None = None) -> Any:
        """`step` and these metrics as a data frame of "pandas" or "polars"; None: the one that is installed.

        Has the rows with at least one of `names`; without names all rows and metrics. Absent is null, and not NaN.
        """
        from rung.runs.frames import frame

        return frame(self, names, kind)

    def checkpoints(self) -> list[str]:
        """Names of the whole checkpoints, oldest first; one without a manifest is not whole."""
        names = [p.name for p in _folders(self.path / "checkpoints") if os.path.isfile(p / "manifest.json")]
        return sorted(names, key=lambda name: (int((re.search(r"\d+", name) or ["-1"])[0]), name))

    def pinned(self) -> list[int]:
        """Steps of the checkpoints that are kept for good."""
        from rung.runs.marks import PINNED, read_mark

        try:
            return read_mark(self.path / "checkpoints", PINNED)
        except (CheckpointError, OSError):
            return []

    def samples(self) -> list[Path]:
        found: list[Path] = []
        for folder in _folders(self.path / "samples"):
            with contextlib.suppress(OSError):
                found += sorted(path for path in folder.iterdir() if os.path.isfile(path))
        return [path for path in found if stays(self.path, path)]

    def disk_bytes(self) -> int:
        """Bytes of all files below the run, hard links counted once."""
        from rung.runs.maintenance.disk import bytes_below

        return bytes_below(self.path)

    @contextlib.contextmanager
    def _reading_rows(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"the rows of {self.path} cannot be read: {reason(error)}.", code="cannot-read") from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = read_json(inside(self.path, name))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path}/{name} cannot be read: {error}.", code="run-damaged") from error
        return value if isinstance(value, dict) else {}


def root_of(root: Path | str | None = None) -> Path:
    """The runs folder: as given, else $RUNG_RUNS, else runs/ of the lab."""
    return Path(root) if root is not None else runs_folder()


def open_run(ref: str | Path, root: Path) -> Run:
    """The run of "piano/7", "piano" or "piano/last" (the latest), "piano/best" (lowest best loss), or of a path."""
    match = _REF.fullmatch(str(ref)) if isinstance(ref, str) else None
    if not match or not os.path.isdir(root / match[1]):
        path = Path(ref).expanduser()
        if os.path.isfile(path / "run.json"):
            run = Run(path.resolve(), read_document(path))
            if run.id == f"{run.path.parent.name}/{run.path.name}":  # else it does not lie in a runs folder
                follow_moves([run], run.path.parent.parent)
            return run
        if match is None and path.exists():
            raise RunError(f"{path} is not a run: it has no run.json.", code="no-run")
        raise _unknown(str(ref), root)

    experiment, which = match[1], match[2] or "last"
    if which == "best":
        losses = {run: (run.best or {}).get("loss") for run in list_runs(root, experiment, [])}
        finite = {run: loss for run, loss in losses.items() if isinstance(loss, int | float) and math.isfinite(loss)}
        if not finite:
            message = f"no run of {experiment} has a finite eval loss yet; name one by number (rung ls {experiment})."
            raise RunError(message, code="no-run")
        return min(finite, key=lambda run: finite[run])
    numbers = numbers_in(root / experiment)
    for number in reversed(numbers) if which == "last" else [int(which)]:
        path = root / experiment / str(number)
        if os.path.lexists(path / "run.json"):
            run = Run(path, read_document(path))
            follow_moves([run], root)
            return run

    # There is none; perhaps `rung mv` gave it another name.
    wanted = experiment if which == "last" else f"{experiment}/{int(which)}"
    moved = None
    for run in list_runs(root, problems=[]):
        if any(wanted in (old, old.rpartition("/")[0]) for old in former_ids(run.document)):
            moved = run.id
    if moved is not None:
        message = f"{experiment}/{which} is now {moved}: it was moved."
        if which == "last":
            message = f"the runs of {experiment} were moved, one of them to {moved} (rung ls lists all)."
        raise RunError(message, code="run-moved")
    if which == "last":
        raise RunError(f"{experiment} has no runs under {root} yet.", code="no-run")
    there = f"runs {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"run {numbers[0]}" if numbers else "no runs"
    raise RunError(f"there is no {experiment}/{which}; {experiment} has {there} (rung ls {experiment}).", code="no-run")


def ref(path: Path, run_id: str) -> str:
    """How to name a run on the command line from here: its id where that finds it, else its path."""
    usual = runs_folder() / run_id
    return run_id if usual.exists() and usual.samefile(path) else shlex.quote(str(path))


def list_runs(root: Path, experiment: str | None = None, problems: list[str] | None = None) -> list[Run]:
    """Every run, by experiment and number. A run that cannot be read is named in `problems`, or raises without it."""
    if experiment is not None and not os.path.isdir(root / experiment):
        raise _unknown(experiment, root)
    runs = _read_runs(root, experiment, problems)
    follow_moves(runs, root, is_all=experiment is None)
    return runs


def _read_runs(root: Path, experiment: str | None, problems: list[str] | None) -> list[Run]:
    runs: list[Run] = []
    unread: list[str] = []
    for name in [experiment] if experiment is not None else experiments(root, unread):
        for number in numbers_in(root / name, None if experiment is None else unread):
            path = root / name / str(number)
            try:
                runs.append(Run(path, read_document(path)))
            except RunError as error:
                if error.code == "no-run":
                    continue  # being created at this moment, or a start that was killed
                if problems is None:
                    raise
                unread.append(str(error))
    if problems is None and unread:
        raise RunError(unread[0], code="cannot-read")
    if problems is not None:
        problems += unread
    return runs


def is_same_run(run: Run, uid: str | None) -> bool:
    """Whether a run is the one that a reference means; older references have no uid, and the name has to do."""
    return not uid or run.document.get("uid") == uid


def follow_moves(runs: Sequence[Run], root: Path, is_all: bool = False) -> None:
    """Updates the parent of each run, and the base of its A/B, to the ids they have now.

    run.json holds the uid of the other run beside its id of that time. Runs of an older rung hold the id alone; a run
    that was moved since still knows that it had it. All runs are read only where a run is not where its id says.
    """
    there = {run.id: run.document for run in runs}
    ids_now: dict[str, str] | None = None  # by uid, and by former id
    for run in runs:
        for holder, key in ((run.document, "parent"), (run.document.get("ab"), "base")):
            name = holder.get(key) if holder else None
            if not holder or not isinstance(name, str):
                continue
            uid = holder.get(f"{key}_uid")
            if name not in there:
                there[name] = read_leniently(root / name)
            if there[name] and (not uid or there[name].get("uid") == uid):
                continue
            if ids_now is None:
                ids_now = {}
                for other in runs if is_all else _read_runs(root, None, []):
                    for known in (other.document.get("uid"), *former_ids(other.document)):
                        ids_now.setdefault(str(known), other.id)
            holder[key] = ids_now.get(str(uid or name), name)


def experiments(root: Path, problems: list[str] | None = None) -> list[str]:
    """Folders under `root` with at least one numbered folder; those that cannot be read are named in `problems`."""
    names = [path for path in _folders(root, problems) if not path.name.startswith(".")]
    return [path.name for path in names if numbers_in(path, problems)]


def nearest(name: str, known: Sequence[str]) -> str:
    """Ends a sentence with what somebody may have meant."""
    if not known:
        return "there are none."
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [k for k in known if name and name in k][:3]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(known[:8])}{' ...' if len(known) > 8 else '.'}"


def _unknown(ref: str, root: Path) -> RunError:
    known = experiments(root)
    if not known:
        message = f"there is no run {ref}: no runs under {root}; name another folder with --runs or RUNG_RUNS."
        return RunError(message, code="no-run")
    near = difflib.get_close_matches(ref.split("/")[0], known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the experiments are {', '.join(known[:8])}"
    return RunError(f"there is no run {ref} under {root}; {hint} (rung ls lists all).", code="no-run")


def _folders(path: Path, problems: list[str] | None = None) -> list[Path]:
    """The folders in a folder. One that may not be read, or a link that leads in a circle, hides no other one."""
    found: list[Path] = []
    problems = [] if problems is None else problems
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError as error:
                    problems.append(f"{entry.path} cannot be read: {reason(error)}.")
                else:
                    found += [Path(entry.path)] if is_folder else []
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        problems.append(f"{path} cannot be read: {reason(error)}.")
    return sorted(found)


def numbers_in(folder: Path, problems: list[str] | None = None) -> list[int]:
    """The numbered folders of an experiment; 007 is not the name of a run, nor is a number of 200 digits."""
    names = (path.name for path in _folders(folder, problems))
    return sorted({int(name) for name in names if name.isdecimal() and len(name) < 19})
