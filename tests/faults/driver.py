"""A process that has imported everything once and forks a child per job, each of which is one `rung ...` of a user.

A job is one line of JSON: argv, cwd, out (a file for what it prints), and what shall go wrong. The answer is a line
with the child's pid, at once, and a line with its exit status, at the end. What can go wrong:

    die          {"files": [...], "at": n}: SIGKILL before the n-th line of code executed in these files
    tear         {"name": "optimizer.pt", "at": n}: SIGKILL with the n-th file of that name half written
    full_after   from the n-th os.write on, the disk is full
    limit_bytes  no file may grow beyond this (RLIMIT_FSIZE)
    points       {"of": [...], "kill": [name, n]}: SIGKILL before the n-th visit of a line of these functions, which are
                 named as "files.py:write_whole"; without `kill`, how often each line is visited
    disk         {"how": "full", "error" or "short", "at": n}: the n-th call that writes fails; see break_disk
    clock        {"after": n, "by_s": -3600}: the clock is set back at the n-th time that somebody asks for it

`call` in place of argv names a function, "module:function", and `given` its arguments.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Traces code of the given files, named as under rung/, and dies at a given line; without one it counts."""

    def __init__(self, files: list[str], at: int | None) -> None:
        import rung

        self.num_lines, self._at = 0, at
        self._prefixes = tuple(str(Path(str(rung.__file__)).parent / file) for file in files)

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._prefixes) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at:
                die()
        return self._line


class Points:
    """Traces the lines of some functions in all threads, each line named, and dies at a given visit of one."""

    def __init__(self, of: list[str], kill: list[Any] | None = None) -> None:
        import rung

        self.visits: Counter[str] = Counter()
        self._of, self._kill = [one.partition(":")[::2] for one in of], kill
        self._top = f"{Path(str(rung.__file__)).parent}{os.sep}"
        self._names: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in self._names:
            file = code.co_filename.removeprefix(self._top)
            is_ours = any(file.startswith(place) and code.co_qualname.startswith(name) for place, name in self._of)
            self._names[code] = f"{file}:{code.co_qualname}" if is_ours else None
        return None if self._names[code] is None else self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            name = f"{self._names[frame.f_code]}:{frame.f_lineno}"
            self.visits[name] += 1
            if self._kill == [name, self.visits[name]]:
                die()
        return self._line


def tear(name: str, at: int) -> None:
    """Lets the n-th file of this name be half on disk when the process is killed; a mark is not there at all."""
    import torch

    from rung.engine import checkpoint

    calls = itertools.count(1)

    def torn(write: Any) -> Any:
        def write_and_die(value: Any, file: Any) -> None:
            write(value, file)
            path = file if isinstance(file, Path) else Path(file.name)
            if path.name == name and next(calls) == at:
                os.truncate(path, path.stat().st_size // 2)
                die()

        return write_and_die

    checkpoint.save_file = torn(checkpoint.save_file)
    torch.save = torn(torch.save)
    whole = checkpoint.write_whole

    def mark(path: Path, data: bytes) -> None:  # this one is whole or absent: it is killed before it is there
        if path.name == name and next(calls) == at:
            die()
        whole(path, data)

    checkpoint.write_whole = mark


def fill_disk(after: int) -> None:
    calls, write = itertools.count(1), os.write

    def full(fd: int, data: Any) -> int:
        if next(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    os.write = full


def break_disk(how: str, at: int) -> list[int]:
    """Lets the n-th call that writes fail: one that fills the disk, for good ("full"); an input/output error, once
    ("error"); or every n-th write takes only half of what it is given ("short"). Returns the count of calls."""
    import torch

    from rung.engine import checkpoint

    calls = [0]
    number = {"full": errno.ENOSPC, "error": errno.EIO}.get(how, 0)

    def is_broken() -> bool:
        calls[0] += 1
        return calls[0] % at == 0 if how == "short" else calls[0] == at or (how == "full" and calls[0] > at)

    def failing(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if is_broken() and number:
                raise OSError(number, os.strerror(number))
            return function(*args, **more)

        return call

    if how == "short":
        write = os.write
        os.write = lambda fd, data: write(fd, data[: max(1, len(data) // 2)] if is_broken() else data)
        return calls
    for name in ("write", "fsync", "fdatasync", "mkdir", "link", "rename", "replace", "utime"):
        setattr(os, name, failing(getattr(os, name)))
    checkpoint.save_file, torch.save = failing(checkpoint.save_file), failing(torch.save)
    Path.write_text, Path.write_bytes = failing(Path.write_text), failing(Path.write_bytes)  # type: ignore[method-assign]
    return calls


def set_clock_back(after: int, by_s: float) -> None:
    """At the n-th time that somebody asks for the time of day, and for good. Time that has passed is another clock."""
    from datetime import datetime, tzinfo

    from rung.runs import record

    calls, now, touch = itertools.count(1), time.time, os.utime

    def moved() -> float:
        return now() + (by_s if next(calls) > after else 0.0)

    class Back(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.fromtimestamp(moved(), tz)

    time.time = moved
    record.datetime = Back  # type: ignore[misc]
    os.utime = lambda path, times=None, **more: touch(path, times or (moved(),) * 2, **more)


def live(job: dict[str, Any]) -> int:
    """The child: everything a `rung` process does, and what the job adds to it."""
    os.chdir(job["cwd"])
    for number, ending in ((1, ""), (2, ".err")):
        os.dup2(os.open(job["out"] + ending, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["rung", *job.get("argv", [])]
    if "tear" in job:
        tear(**job["tear"])
    if "full_after" in job:
        fill_disk(job["full_after"])
    if "limit_bytes" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit_bytes"], resource.RLIM_INFINITY))
    if "clock" in job:
        set_clock_back(**job["clock"])
    calls = break_disk(**job["disk"]) if "disk" in job else [0]
    counter = Countdown(**job["die"]) if "die" in job else None
    points = Points(**job["points"]) if "points" in job else None
    code = 1
    try:
        if points is not None:
            threading.settrace(points)
        sys.settrace(counter or points)
        if "call" in job:
            module, _, name = job["call"].partition(":")
            getattr(importlib.import_module(module), name)(**job["given"])
            code = 0
        else:
            from rung.cli import main

            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    if counter is not None or points is not None or "disk" in job:
        found = counter.num_lines if counter else dict(points.visits) if points else calls[0]
        fd = os.open(job["out"] + ".lines", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "w") as file:
            json.dump(found, file)
    sys.stdout.flush()
    return code


def warm() -> None:
    """Imports what a run imports on its way, so that no child has to; an optimizer imports a third of torch."""
    import torch

    for name in ("eval", "ls", "resume", "sample", "show", "train"):
        importlib.import_module(f"rung.cli.{name}")
    for name in ("engine.loop", "recipes.piano.data", "recipes.piano.model", "recipes.piano.render"):
        importlib.import_module(f"rung.{name}")
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)], fused=True)


def learn(job: dict[str, Any]) -> None:
    """Lives once in a child and imports here what that has imported, so that no later one has to."""
    pid = os.fork()
    if pid == 0:
        try:
            live(job)
            Path(job["out"]).write_text("\n".join(sys.modules))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    for name in Path(job["out"]).read_text().splitlines():
        if name.partition(".")[0] in ("rung", "tests", "torch", "numpy", "obstore", "yaml"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def serve() -> None:
    warm()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        job = json.loads(line)
        if job.pop("is_lesson", False):
            learn(job)
            gc.collect()
            gc.freeze()  # else a child's collector copies all that it looks at
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(live(job))
            finally:
                os._exit(70)
        answers.write(f"{pid}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


if __name__ == "__main__":
    serve()
