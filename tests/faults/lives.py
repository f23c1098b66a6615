"""Short lives of rung: many processes, each the price of a fork, some of which end badly; see driver.py."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rung.engine.checkpoint import Checkpoints
from rung.runs.query import Run, open_run

DRIVER = Path(__file__).with_name("driver.py")
_ARGS = (
    "model.n_layer=1 model.n_head=1 model.n_embd=16 model.dropout=0.1 data.context_size=32 data.batch_size=4 "
    "optimizer.max_iters=30 lr.warmup_iters=2 checkpoint.every=3 checkpoint.keep=2 eval_interval=7 "
    "sampling.num_tokens=4 system.threads=1 system.device=cpu"
)
ARGS = _ARGS.split()
SAVING = ["engine/checkpoint.py", "files.py"]  # the code that saves


class Life(NamedTuple):
    """How a process ended: exit code, or minus the signal."""

    code: int
    out: str
    err: str
    counted: Any = None  # what the job counted: lines, visits of lines, or calls that write


class Lives:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        places = [str(DRIVER.parents[2]), os.environ.get("PYTHONPATH", "")]
        self._driver = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
        )

    def close(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait()

    def begin(self, *args: object, cwd: Path, **faults: Any) -> tuple[int, Path]:
        """Starts a process; its pid, and the file that it prints into."""
        out = self.folder / f"out{next(self._numbers)}"
        job = {"argv": [str(arg) for arg in args], "cwd": str(cwd), "out": str(out), **faults}
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(job) + "\n")
        return int(self._answer()), out

    def end(self, out: Path) -> Life:
        """Waits for the process that `begin` started."""
        code = int(self._answer())
        texts = [Path(f"{out}{ending}") for ending in ("", ".err", ".lines")]
        read = [path.read_text() if path.exists() else "" for path in texts]
        return Life(code, read[0], read[1], json.loads(read[2]) if read[2] else None)

    def rung(self, *args: object, cwd: Path, **faults: Any) -> Life:
        return self.end(self.begin(*args, cwd=cwd, **faults)[1])

    def _answer(self) -> str:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        assert line, "the driver died"
        return line


def but(args: list[str], *changes: str) -> list[str]:
    """The same args with other values; a key may be given only once."""
    names = tuple(f"{change.partition('=')[0]}=" for change in changes)
    return [*(arg for arg in args if not arg.startswith(names)), *changes]


def is_one_sentence(life: Life) -> bool:
    """What a user's mistake and a sick disk must look like."""
    lines = life.err.splitlines()
    return life.code == 2 and len(lines) == 1 and lines[0].startswith("rung: ") and "Traceback" not in life.out


def ends_in_a_sentence(life: Life) -> bool:
    """As `is_one_sentence`, of a verb that may have said before what takes so long."""
    return is_one_sentence(life._replace(err="".join(life.err.splitlines(keepends=True)[-1:]))) and (
        "Traceback" not in life.err
    )


def losses(run: Run) -> list[tuple[int, float]]:
    """The loss of every step, from all attempts together."""
    columns = run.metrics(["loss"])
    return [(step, loss) for step, loss in zip(columns["step"], columns["loss"]) if loss is not None]


def saves_of(run: Run) -> Checkpoints:
    return Checkpoints(run.path / "checkpoints")


def last_weights(run: Run) -> bytes:
    saves = saves_of(run)
    return (saves.at(saves.steps()[-1]) / "model.safetensors").read_bytes()


def the_run(folder: Path) -> Run:
    return open_run("piano/1", folder / "runs")


def assert_same_end(run: Run, whole: Run) -> None:
    """Whatever happened on the way, the run ended as one that nobody disturbed."""
    assert run.status == "finished", run.status_text
    assert losses(run) == losses(whole)
    assert last_weights(run) == last_weights(whole)
    assert run.evals() == whole.evals()
    assert run.best == whole.best
    a, b = saves_of(run), saves_of(whole)
    assert (a.best, a.steps()[-1]) == (b.best, b.steps()[-1])
    assert not list(a.folder.glob(".*")), "something half-written was left behind"
