"""What the fault machine needs: the smallest run that saves, evaluates and samples, and what must hold of it after
anything at all has happened to its process."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rung.engine import capture, checkpoint
from rung.errors import RunError
from rung.runs.metrics import Faults, read_rows
from rung.runs.query import Run, open_run

from .lives import Lives, ends_in_a_sentence, losses, saves_of

COUNTS: Counter[str] = Counter()  # of what was done, printed at the end
RUN = "toy/1"
_ARGS = (
    "train tests.contract.toy:Toy --no-check --experiment toy model.width=2 data.batch_size=2 num_frames=8 "
    "optimizer.max_iters=12 lr.warmup_iters=2 checkpoint.every=2 checkpoint.keep=2 eval_interval=5 system.threads=1 "
    "system.device=cpu system.data_workers=0 signals.probes=false signals.doctor=false signals.layers_every=4 "
    "signals.activation_stats_every=0"
)
ARGS = _ARGS.split()
DIVERGES = [*ARGS, "lr.learning_rate=1e38"]
RESUME = ["resume", RUN]
# Operation -> the functions that do it.
OPERATIONS = {
    "save": [
        "engine/checkpoint.py:Checkpoints.save", "engine/checkpoint.py:Checkpoints._mark", "files.py:",
        "engine/recorder.py:Recorder.save",
    ],
    "rotate": ["engine/checkpoint.py:Checkpoints.clean", "engine/checkpoint.py:Checkpoints._remove"],
    "append": [
        "runs/files.py:LineFile", "runs/metrics.py:MetricsWriter", "runs/record.py:", "runs/files.py:write_json",
    ],
    "capture": ["engine/capture.py:write", "engine/divergence.py:DivergenceHandler"],
    "pack": ["data/store.py:StoreWriter", "data/store.py:swap"],
    "push": ["remote/push.py:", "remote/snapshot.py:", "remote/bucket.py:Bucket.write", "remote/bucket.py:Bucket.send"],
    "pull": ["remote/pull.py:"],
    "mv": ["runs/maintenance/moving.py:", "files.py:"],
}  # fmt: skip


def points_of(visits: dict[str, int], rng: random.Random, num: int) -> Iterator[list[Any]]:
    """So many points, each once before any twice, with one of the visits of each."""
    names = sorted(visits)
    rng.shuffle(names)
    for name in itertools.islice(itertools.cycle(names), num):
        yield [name, rng.randint(1, visits[name])]


def the_run(folder: Path) -> Run | None:
    """The run that a life has left, if it came that far."""
    try:
        return open_run(RUN, folder / "runs")
    except RunError:
        return None


class Watched:
    """A folder in which lives end badly, compared with the run that nobody disturbed."""

    def __init__(self, folder: Path, whole: Run) -> None:
        folder.mkdir()
        self.folder, self.whole = folder, whole
        self._lines: dict[str, bytes] = {}

    def look(self) -> Run | None:
        """What was logged is readable, no line of it was lost, and what was saved is whole."""
        run = the_run(self.folder)
        if run is None:
            assert not self._lines, "a run that was there is gone"
            return None
        found = {path.relative_to(run.path).as_posix(): path.read_bytes() for path in run.path.rglob("*.ndjson")}
        for name, lines in self._lines.items():
            assert found[name].startswith(lines), f"lines of {name} were lost"
        self._lines = {name: data[: data.rfind(b"\n") + 1] for name, data in found.items()}
        faults, expected = Faults(), dict(losses(self.whole))
        for row in read_rows(run.path / "metrics", faults):
            assert "loss" not in row or row["loss"] == expected[row["step"]]
        assert faults.broken == 0
        steps = [step for step, _ in losses(run)]
        assert steps == list(range(len(steps))), "a logged step is missing"
        assert list(run.events())[:1] or not found.get("events.ndjson", b"").count(b"\n")
        assert run.config() == self.whole.config()
        saves = saves_of(run)
        for step in saves.steps():
            checkpoint.load(saves.at(step)).tensors()
            assert step <= len(steps), "a save knows more than the record"
        for step in capture.steps(run.path / "captures"):
            checkpoint.load(run.path / f"captures/{step:08d}")
            if list((run.path / f"captures/{step:08d}").glob("capture.*.json")):
                assert capture.read(run.path / f"captures/{step:08d}").facts
        assert saves.best is None or saves.best in saves.steps()
        return run

    def go_on(self, lives: Lives, args: Sequence[str] = RESUME) -> bool:
        """Resumes to the end, which is that of the undisturbed run; False where there was nothing to resume."""
        run = self.look()
        if run is not None and run.status == "finished":
            self.assert_same_end(run)
            return True
        life = lives.rung(*args, cwd=self.folder)
        if run is None or not saves_of(run).steps():
            assert ends_in_a_sentence(life), life.err
            return False
        assert life.code == 0, life.err + life.out
        run = self.look()
        assert run is not None
        self.assert_same_end(run)
        return True

    def assert_same_end(self, run: Run) -> None:
        """Weights, moments, losses, evals and marks are those of the undisturbed run, bit for bit."""
        assert run.status == "finished", run.status_text
        assert losses(run) == losses(self.whole)
        assert run.evals() == self.whole.evals()
        assert run.best == self.whole.best
        ours, theirs = saves_of(run), saves_of(self.whole)
        assert (ours.best, ours.steps()) == (theirs.best, theirs.steps())
        a, b = (checkpoint.load(saves.at(saves.steps()[-1])) for saves in (ours, theirs))
        assert_equal(a.weights, b.weights)
        assert_equal(a.tensors(), b.tensors())
        assert not [path.name for path in ours.folder.glob(".*")], "something half-written was left behind"


def assert_equal(a: Any, b: Any) -> None:
    """Two trees of tensors, numbers and lists, to the bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            assert_equal(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b):
            assert_equal(one, other)
    else:
        assert a == b
