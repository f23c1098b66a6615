"""A process that has imported everything once and forks a child per job, each of which is one `rung ...` of a user.

A job is one line of JSON: argv, cwd, out (a file for what it prints), and what shall go wrong. The answer is a line
with the child's pid, at once, and a line with its exit status, at the end. What can go wrong:

    die          {"files": [...], "at": n}: SIGKILL before the n-th line of code executed in these files
    tear         {"name": "optimizer.pt", "at": n}: SIGKILL with the n-th file of that name half written
    full_after   from the n-th os.write on, the disk is full
    limit_bytes  no file may grow beyond this (RLIMIT_FSIZE)
"""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
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


def live(job: dict[str, Any]) -> int:
    """The child: everything a `rung` process does, and what the job adds to it."""
    os.chdir(job["cwd"])
    for number, ending in ((1, ""), (2, ".err")):
        os.dup2(os.open(job["out"] + ending, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["rung", *job["argv"]]
    if "tear" in job:
        tear(**job["tear"])
    if "full_after" in job:
        fill_disk(job["full_after"])
    if "limit_bytes" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit_bytes"], resource.RLIM_INFINITY))
    from rung.cli import main

    counter = Countdown(**job["die"]) if "die" in job else None
    code = 1
    try:
        sys.settrace(counter)
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.settrace(None)
    if counter is not None:
        Path(job["out"] + ".lines").write_text(str(counter.num_lines))
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


def serve() -> None:
    warm()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(live(json.loads(line)))
            finally:
                os._exit(70)
        answers.write(f"{pid}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


if __name__ == "__main__":
    serve()
