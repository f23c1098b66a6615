"""Mirrors a run to another tracker while it trains.

A step only puts its row into a bounded queue; a thread does the rest. A full queue drops rows and counts them. An error
ends the mirror, is reported and recorded as an event, and never ends the run. `finish` waits for a bounded time and
reports what a slow tracker did not take by then; `replay` writes the whole mirror again from the record.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rung.errors import RunError, UserError
from rung.runs.files import floats_again, refused
from rung.runs.metrics import numbers, read_rows
from rung.runs.paths import inside
from rung.runs.query import Run, ref
from rung.runs.record import append_event
from rung.text import one_line

KINDS = ("wandb", "tensorboard")
MOST_WAITING = 10_000  # rows; at 100 steps a second a tracker may stand still for a minute and a half
FLUSH_S = 1.0
FINISH_S = 10.0


class Sink(Protocol):
    """Where a mirror's rows go. All calls come from one thread; any of them may raise or take its time."""

    name: str
    num_refused: int  # rows that the tracker could not take

    def open(self) -> None: ...
    def row(self, step: int, unix_s: float, values: Mapping[str, float]) -> None: ...
    def note(self, step: int | None, unix_s: float, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self, status: str) -> None: ...
    def summary_line(self) -> str:
        """Where it is and how to look at it."""


class Mirror:
    """A follower of a record (record.Follower): copies what it is told and returns at once."""

    def __init__(self, kind: str, sink: Sink, run_folder: Path, run_id: str) -> None:
        self.problem: str | None = None
        self.num_dropped = 0
        self._kind, self._sink, self._folder, self._id = kind, sink, run_folder, run_id
        self._waiting: queue.Queue[tuple[str, Any]] = queue.Queue(MOST_WAITING)
        self._status: str | None = None
        self._in_hand = 0  # rows that the sink was given and has not taken yet
        self._thread = threading.Thread(target=self._work, name=f"mirror {kind}", daemon=True)
        self._thread.start()

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        if self.problem is not None:
            self.num_dropped += 1
            return
        try:
            self._waiting.put_nowait(("row", (step, time.time(), dict(values))))
        except queue.Full:
            self.num_dropped += 1

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "note" and self.problem is None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(("note", (event.get("step"), event.get("unix_s"), event.get("text"))))

    def finish(self, status: str) -> None:
        """Waits for what is queued, a bounded time; what was lost becomes an event of the run."""
        self._status = status
        self._thread.join(FINISH_S)
        if self.problem is not None:
            return  # that was told when it happened
        if self._thread.is_alive():
            self._fail(f"{self._sink.name} did not take everything within {FINISH_S:.0f} s after the end")
        elif missing := self._missing_line():
            self._warn(missing)

    def summary_line(self) -> str:
        """Where the mirror is and how to look at it; and, where rows are missing, how many and how to have them all."""
        missing = self._missing_line()
        return f"{self._sink.summary_line()}\n  {missing}" if missing else self._sink.summary_line()

    def _work(self) -> None:
        """Feeds the sink until the run has ended and nothing waits, or somebody gave up on us."""
        try:
            self._sink.open()
            next_flush = time.monotonic() + FLUSH_S
            while self.problem is None:
                try:
                    kind, item = self._waiting.get(timeout=FLUSH_S / 10 if self._status is None else 0.01)
                except queue.Empty:
                    if self._status is not None:
                        break
                else:
                    self._in_hand = int(kind == "row")
                    _hand_over(self._sink, kind, *item)
                    self._in_hand = 0
                if time.monotonic() >= next_flush:
                    self._sink.flush()
                    next_flush = time.monotonic() + FLUSH_S
            self._sink.close(str(self._status))
        except BaseException as error:  # SystemExit too: some trackers leave by it
            self._fail(f"{self._sink.name} failed: {_one_line(error)}")

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self._warn(f"mirror: {problem}; {self._remedy()}")

    def _missing_line(self) -> str:
        num_lost = self.num_dropped + self._sink.num_refused
        if self.problem is not None:
            num_lost += self._in_hand + sum(kind == "row" for kind, _ in tuple(self._waiting.queue))
        if self.problem is None and not num_lost:
            return ""
        dropped = f"{num_lost} rows are not in it" if num_lost else ""
        return f"mirror: {'; '.join(filter(None, [self.problem, dropped, self._remedy()]))}"

    def _remedy(self) -> str:
        return f"the record has all: rung mirror {ref(self._folder, self._id)} {self._kind}"

    def _warn(self, text: str) -> None:
        with contextlib.suppress(Exception):
            append_event(self._folder, "warning", text=text)


def require(kind: str) -> None:
    """Raises UserError where the package that a mirror needs is not installed; to be asked before a run begins."""
    if kind not in KINDS:
        raise UserError(f"{kind} is not a mirror; use one of {', '.join(KINDS)}.", code="no-mirror")
    if kind == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "a mirror for wandb (--mirror wandb, logging.wandb_log=true) needs the package wandb, which is not "
            "installed: pip install 'rung[wandb]'; or mirror to tensorboard, which needs nothing.",
            code="not-installed",
        )


def open_mirror(kind: str, run_folder: Path, document: Mapping[str, Any], config: Mapping[str, Any]) -> Mirror:
    """A mirror for Record.follow: kind is wandb or tensorboard, document the run.json, config the resolved tree."""
    require(kind)
    inside(run_folder, f"mirror/{kind}")  # or it would be written where a link leads
    sink = sink_for(kind, run_folder / "mirror", document, config)
    return Mirror(kind, sink, run_folder, str(document["id"]))


def sink_for(kind: str, folder: Path, document: Mapping[str, Any], config: Mapping[str, Any]) -> Sink:
    if kind == "wandb":
        from rung.trackers.wandb import WandbSink

        return WandbSink(folder, document, config)
    from rung.trackers.tensorboard import TensorboardSink

    return TensorboardSink(folder, document, config)


def display_path(path: Path) -> str:
    """A path as it is named from here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def replay(kind: str, run: Run) -> tuple[Sink, int]:
    """Writes the whole mirror of a run again, in place of what was there; returns it and the number of rows."""
    require(kind)
    folder = inside(run.path, f"mirror/{kind}").parent
    if run.status == "running" and (folder / kind).exists():
        raise RunError(
            f"{run.id} is running and may be writing {folder / kind} itself; mirror it again when it has ended.",
            code="wrong-state",
        )
    beside = folder / f".{kind}.{os.getpid()}.part"  # as all that is half written, so that `rung gc` knows it
    try:
        beside.mkdir(parents=True)
        sink, num_rows = sink_for(kind, beside, run.document, run.config()), 0
        sink.open()
        for row in read_rows(run.path / "metrics"):
            step, unix_s = row.pop("step"), row.pop("unix_s", 0.0)
            _hand_over(sink, "row", step, unix_s, row)
            num_rows += 1
        for note in run.notes():
            _hand_over(sink, "note", note.get("step"), note.get("unix_s"), note.get("text"))
        sink.close(run.status)
        if not (beside / kind).is_dir():
            raise RunError(f"{kind} wrote nothing; is WANDB_MODE=disabled set?", code="mirror-empty")
        shutil.rmtree(folder / kind, ignore_errors=True)
        (beside / kind).rename(folder / kind)
    except OSError as error:
        raise refused(str(folder), error) from error
    except UserError:
        raise
    except Exception as error:  # whatever the other tracker raises
        raise RunError(f"{kind} could not be written: {_one_line(error)}.", code="mirror-failed") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return sink_for(kind, folder, run.document, run.config()), num_rows


def _hand_over(sink: Sink, kind: str, step: Any, unix_s: Any, what: Any) -> None:
    """A note, or a row as floats and ints, NaN and Inf as such; what is no number is left out of it."""
    unix_s = float(unix_s or time.time())
    if kind == "note":
        sink.note(step, unix_s, str(what))
        return
    values: dict[str, float] = {}
    for name, value in what.items():
        try:
            values[name] = value if type(value) is float else floats_again(numbers({name: value})[name])
        except (TypeError, ValueError, KeyError):
            continue
    sink.row(step, unix_s, values)


def _one_line(error: BaseException) -> str:
    return one_line(error).rstrip(".") or type(error).__name__
