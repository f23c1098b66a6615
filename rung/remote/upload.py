"""Uploads a run while it trains: after each save the record and the checkpoints, at the end all of it.

A step only sets a flag; a thread does the rest, and rests after a push twice as long as that took, because files of
lines are hashed each time. A failure becomes an event `remote` and never ends the run: the next save tries again.
`finish` does not wait; `close` does, for a bounded time.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rung.errors import UserError
from rung.remote.bucket import Bucket, Report
from rung.remote.manifest import check_item, place_of, read_manifest
from rung.remote.push import PushCancelled, PushOptions, push_run, refuse_another
from rung.remote.snapshot import uid_of
from rung.runs.query import ref
from rung.runs.record import append_event, read_document
from rung.text import one_line
from rung.units import size

CLOSE_S = 600.0  # how long the end of a training waits for the last push
_REST_S = 2.0  # at least, between two pushes of a running run
_LET_GO_S = 5.0  # for a transfer to notice that it was given up


class Uploader:
    """Follows a record (record.Follower): notes what is due and returns at once."""

    def __init__(self, run_path: Path, url: str) -> None:
        """Raises UserError for a bad URL or where obstore is missing; sends no request."""
        self._path = run_path
        self._id = str(read_document(run_path)["id"])
        check_item("run", self._id)
        self._bucket = Bucket(url, is_new=True)
        self.problem: str | None = None
        self.num_pushes = 0
        self.sent_bytes = 0
        self._report: Report | None = None
        self._wake = threading.Condition()
        self._is_due = self._has_ended = self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Checks now, not at the first save, whether another run has this name there; see `summary_line`."""
        try:
            found = read_manifest(self._bucket, "run", self._id)
            if found is not None:
                refuse_another(self._bucket, uid_of(read_document(self._path)), found[0])
        except UserError as error:
            self._fail(one_line(error).rstrip("."))

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "save":
            with self._wake:
                self._is_due = True
                self._wake.notify()

    def finish(self, status: str) -> None:
        """The run has ended: all of it is sent once more, beside whatever the process does now."""
        with self._wake:
            self._is_due = self._has_ended = True
            self._wake.notify()

    def close(self, timeout: float = CLOSE_S, report: Report | None = None) -> None:
        """Waits for the last push, at most `timeout` seconds; `summary_line` then says whether everything was sent."""
        self._report = report
        self.finish("")
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._is_given_up = True
            self._fail(f"not all of it was sent within {timeout:.0f} s after the end")
            self._thread.join(_LET_GO_S)

    def summary_line(self) -> str:
        """Where the run goes, and once it has ended, whether it is there."""
        where = self._bucket.at(place_of("run", self._id))
        if self.problem is not None:
            return f"remote: {self.problem}; {self._remedy()}"
        if not self._has_ended:
            return f"remote: {where}, after each save and at the end"
        if self._thread.is_alive():
            return f"remote: {where}, still being sent"
        pushes = f"{self.num_pushes} push{'es' if self.num_pushes != 1 else ''}"
        return f"remote: {where}, all of it ({size(self.sent_bytes)} sent in {pushes})"

    def _work(self) -> None:
        options = PushOptions(
            report=lambda *progress: self._report(*progress) if self._report else None,
            is_over=lambda: self._is_given_up,
        )
        while not self._is_given_up:
            with self._wake:
                while not self._is_due:
                    self._wake.wait()
                self._is_due, is_last = False, self._has_ended
            started = time.monotonic()
            try:
                done = push_run(self._bucket, self._path, options=options)
            except PushCancelled:
                pass  # `close` has said so
            except UserError as error:
                self._fail(one_line(error).rstrip("."))
            except Exception as error:  # whatever it is, it must not end the run
                self._fail(f"{type(error).__name__}: {one_line(error)}")
            else:
                self.problem = None
                self.num_pushes += 1
                self.sent_bytes += done.sent_bytes
            if is_last:
                return
            with self._wake:
                rest_s = max(_REST_S, 2 * (time.monotonic() - started))
                self._wake.wait_for(lambda: self._has_ended, rest_s)

    def _remedy(self) -> str:
        return f"`rung push {ref(self._path, self._id)} {shlex.quote(self._bucket.url)}` sends what is missing"

    def _fail(self, problem: str) -> None:
        self.problem = problem
        with contextlib.suppress(Exception):
            append_event(self._path, "remote", text=f"{problem}; {self._remedy()}", url=self._bucket.url)


def require(url: str) -> None:
    """Raises UserError where a run could not be sent there; called before a run begins."""
    Bucket(url, is_new=True).read("runs/.none")  # an answer of any kind: the place is there and knows us
