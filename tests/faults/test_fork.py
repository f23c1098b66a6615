"""If this fails, a process that a recipe or a script forks ends the run of its parent, which still trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rung.runs.query import open_run

RECIPE = '''
import os, sys
from tests.contract.toy import Film, Toy

class Forking(Film):
    def gather(self, ids, draw):
        if not os.path.exists("forked"):
            open("forked", "w").close()
            if (child := os.fork()) == 0:
                sys.exit(3)
            os.waitpid(child, 0)
        return super().gather(ids, draw)

class Forks(Toy):
    def streams(self):
        return {**super().streams(), "held_out": Forking(100, 7)}
'''
TRAIN = '''
import rung
words = "data.batch_size=4 optimizer.max_iters=6 lr.warmup_iters=2 eval_interval=3 system.device=cpu system.data_workers=0"
run = rung.train("forks:Forks", words.split(), check=False, display=False)
print("STATUS", run.status)
'''
SCRIPT = '''
import os, sys
import rung
run = rung.init(experiment="forks", code=False)
for step in range(6):
    run.log({"loss": 1.0})
    if step == 2:
        if (child := os.fork()) == 0:
            sys.exit(3)
        os.waitpid(child, 0)
print("STATUS", run.status)
'''


@pytest.mark.parametrize(("code", "status"), [(TRAIN, "finished"), (SCRIPT, "running")])
def test_the_end_of_a_child_is_not_that_of_the_run(tmp_path: Path, code: str, status: str) -> None:
    (tmp_path / "forks.py").write_text(RECIPE)
    (tmp_path / "script.py").write_text(code)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"STATUS {status}" in done.stdout
    run = open_run("forks/1", tmp_path / "runs")
    assert run.status == "finished", run.document.get("reason")
    assert len([v for v in run.metrics(["loss"])["loss"] if v is not None]) >= 6
    assert len(list(run.events("end"))) == 1
