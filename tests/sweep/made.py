"""Sweeps for tests, and a stand-in for a training: it keeps a real record, takes a tenth of a second, and ends as told.

A stand-in is told by a file `ends` in its working folder: one word for each start, the last one for all later ones.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import Record
from rung.sweep.plan import keep
from rung.sweep.space import Point, Sweep, make_point

TINY = {
    "system.device": "cpu", "system.threads": 1, "system.data_workers": 0, "data.batch_size": 4,
    "optimizer.max_iters": 20, "lr.learning_rate": 1e-2, "lr.warmup_iters": 2, "eval_interval": 5,
    "checkpoint.every": 5, "checkpoint.best": False, "model.width": 8, "model.layers": 1, "num_rows": 64,
    "num_eval": 16, "signals.layers_every": 0, "signals.activation_stats_every": 0, "signals.probes": False,
}  # fmt: skip

REASON = "RuntimeError: broken \x1b[31m as told"
# A point's process that trains by stand-ins.
POINT = """
import sys
from pathlib import Path
from rung.sweep import point
point._command = lambda sweep, step: [sys.executable, "-m", "tests.sweep.made", *step.words]
sys.exit(point.run_point(Path(sys.argv[1]), sys.argv[2]).code)
"""


def command_of(sweep: Sweep, point: Point) -> list[str]:
    """In place of what a launcher starts."""
    return [sys.executable, "-c", POINT, str(sweep.folder), point.key]


def made_sweep(runs: Path, seeds: Sequence[int] = (0, 1), **fields: Any) -> Sweep:
    """A kept sweep of a recipe that nothing trains."""
    shared = ("model.width=8",)
    points = tuple(make_point("toy", shared, {"seed": seed}) for seed in seeds)
    return keep(Sweep("made", runs / ".sweeps" / "made", runs, "toy", "made", points, words=shared, **fields))


def made_run(sweep: Sweep, point: Point, status: str | None = "finished", saved: int | None = None) -> Run:
    """A run of a point; None leaves it as a process that goes on, or has vanished."""
    record = Record.create(
        sweep.runs, sweep.experiment, recipe="toy", preset=None, command=["toy"], seed=0, config={"width": 8},
        sources={}, derived={"num_steps": 20}, data={}, sweep={"name": sweep.name, "point": point.key, "varies": {}},
    )  # fmt: skip
    record.log(saved or 0, {"loss": 1.0})
    if saved is not None:
        save(record.path, saved)
    if status is not None:
        record.finish(status, best={"loss": 1.5, "step": 5, "set": "val"}, reason="as told")
    return open_run(record.path, sweep.runs)


def save(run: Path, step: int) -> None:
    """As much of a checkpoint as a sweep looks at."""
    folder = run / "checkpoints" / f"{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{}")


def stand_in(words: Sequence[str]) -> None:
    """What is run in place of `rung train`, `rung resume` and `rung eval`."""
    file = Path("ends")
    ends = file.read_text().split()
    if len(ends) > 1:
        file.write_text(" ".join(ends[1:]))
    options = dict(itertools.pairwise(words))
    if words[0] == "eval" and ends[0] == "finished":
        folder = Path(words[1], "evals")
        folder.mkdir(exist_ok=True)
        (folder / f"{options['--split']}-5.json").write_text('{"sets": {"test": {"loss": 2.5}}}')
        sys.exit(0)
    if words[0] == "eval":
        sys.exit(1)
    if ends[0] == "refused":
        sys.exit(_refuse())
    if words[0] == "resume":
        record = Record.reopen(Path(words[1]), command=list(words))
    else:
        name, _, key = options["--sweep"].rpartition(":")
        record = Record.create(
            Path(options["--runs"]), options["--experiment"], recipe=words[1], preset=None, command=list(words), seed=0,
            config={"width": 8}, sources={}, derived={"num_steps": 20}, data={},
            sweep={"name": name, "point": key, "varies": {}},
        )  # fmt: skip
    _end(record, ends[0])


def _end(record: Record, how: str) -> None:
    record.log(5, {"loss": 1.0})
    if how == "held":  # until there is a file `go`, or somebody stops it
        signal.signal(signal.SIGTERM, lambda *_: _stop(record))
        save(record.path, 5 + 5 * record.segment)
        while not Path("go").exists():
            time.sleep(0.02)
        how = "finished"
    if how.endswith("+save"):
        save(record.path, 5 + 5 * record.segment)
    word = how.removesuffix("+save")
    if word == "vanishes":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "waits":  # until somebody stops it
        signal.signal(signal.SIGTERM, lambda *_: _stop(record))
        print("waiting", flush=True)  # noqa: T201
        while True:
            signal.pause()
    record.finish(word, reason=REASON)
    sys.exit({"finished": 0, "crashed": 1, "diverged": 1, "stopped": 143}[word])


def _stop(record: Record) -> None:
    save(record.path, 5 + 5 * record.segment)
    record.finish("stopped", reason="SIGTERM")
    sys.exit(143)


def _refuse() -> int:
    print("rung: no data at data/toy; prepare it: `rung data toy`", file=sys.stderr)  # noqa: T201
    return 2


def sweep_file(folder: Path, text: Mapping[str, Any], name: str = "grid.yaml") -> Path:
    """A sweep file; JSON is YAML."""
    file = folder / name
    file.write_text(json.dumps(text))
    return file


class Heard:
    """What a launcher told, in order."""

    def __init__(self) -> None:
        self.news: list[tuple[str, str, str]] = []

    def __call__(self, key: str, state: str, where: str) -> None:
        self.news.append((key, state, where))

    def keys(self, state: str) -> list[str]:
        return [key for key, one, _ in self.news if one == state]

    def last(self) -> dict[str, str]:
        return {key: state for key, state, _ in self.news}


def runs_of(sweep: Sweep) -> list[Run]:
    return list_runs(sweep.runs, None, [])


def num_segments(run: Run) -> int:
    return len(run.document["segments"])


def all_saved(sweep: Sweep, num: int) -> bool:
    """Whether so many runs are held in the middle, each with a checkpoint."""
    runs = runs_of(sweep)
    return len(runs) == num and all(run.checkpoints() for run in runs)


def wait_for(what: Callable[[], Any], deadline_s: float = 300.0) -> Any:
    """Polls until `what` gives something; the deadline only ends a test that hangs."""
    end = time.monotonic() + deadline_s
    while not (found := what()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    stand_in(sys.argv[1:])
