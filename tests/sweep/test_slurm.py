"""If this fails, a sweep on SLURM loses what a job had trained when its place was taken away, submits points twice, or
brings back what somebody cancelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.sweep.launch.slurm import SlurmLauncher, _parameters
from rung.sweep.space import Sweep
from tests.errors import raises_code
from tests.sweep.held import GO, ROOT, planned
from tests.sweep.made import Heard, all_saved, num_segments, runs_of, wait_for
from tests.sweep.slurm.daemons import missing, running

POLL_S = 0.3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(GO, str(tmp_path / "go"))
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    if why := missing():
        pytest.skip(why)
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as home,
        running(Path(home)) as env,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in env.items():
            patch.setenv(name, value)
        yield


def jobs_of(sweep: Sweep) -> dict[str, str]:
    found: dict[str, str] = json.loads((sweep.folder / "slurm" / "jobs.json").read_text())
    return found


def meanwhile(what: Callable[[], None]) -> Callable[[], None]:
    """Does something beside the launcher, which needs the main thread; the returned function waits and raises."""
    faults: list[BaseException] = []

    def work() -> None:
        try:
            what()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def join() -> None:
        thread.join()
        assert not faults, faults

    return join


@pytest.mark.slurm
def test_what_loses_its_place_is_queued_again_and_goes_on(slurm: None, folder: Path) -> None:
    """One job is put back into the queue, one hears that its time is nearly up, one is told to end itself."""
    sweep, heard = planned(folder, 3, launch={"time": 5, "mem_gb": 0.5}), Heard()

    def disturb() -> None:
        wait_for(lambda: all_saved(sweep, 3))
        requeued, warned, ended = (jobs_of(sweep)[point.key] for point in sweep.points)
        subprocess.run(["scontrol", "requeue", requeued], check=True)
        subprocess.run(["scancel", "--signal=USR2", warned], check=True)
        subprocess.run(["scancel", "--signal=TERM", ended], check=True)
        wait_for(lambda: all(run.status == "stopped" or num_segments(run) > 1 for run in runs_of(sweep)))
        (folder / "go").touch()

    join = meanwhile(disturb)
    SlurmLauncher(POLL_S).run(sweep, sweep.points, heard)
    join()
    assert heard.last() == {point.key: "finished" for point in sweep.points}
    assert {job.partition("_")[2] for job in jobs_of(sweep).values()} == {"0", "1", "2"}
    assert len({job.partition("_")[0] for job in jobs_of(sweep).values()}) == 1  # one array, submitted once
    assert len(runs_of(sweep)) == 3
    assert {(run.status, num_segments(run)) for run in runs_of(sweep)} == {("finished", 2)}


@pytest.mark.slurm
def test_the_driver_may_leave_and_come_back(slurm: None, folder: Path) -> None:
    """It attaches to what is in the queue. What somebody cancels then saves, and stays cancelled."""
    sweep, heard, again = planned(folder, 2), Heard(), Heard()
    cancelled, kept = (point.key for point in sweep.points)

    def leave_when_saved(key: str, state: str, where: str) -> None:
        heard(key, state, where)
        if len(heard.keys("running")) == 2:
            wait_for(lambda: all_saved(sweep, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"2 jobs of sweep held stay with SLURM; .* `scancel \d+` cancels them"):
        SlurmLauncher(POLL_S).run(sweep, sweep.points, leave_when_saved)
    before = jobs_of(sweep)

    def cancel() -> None:
        wait_for(lambda: len(again.keys("running")) == 2)
        subprocess.run(["scancel", before[cancelled]], check=True)
        wait_for(lambda: cancelled in again.keys("stopped"))
        (folder / "go").touch()

    join = meanwhile(cancel)
    SlurmLauncher(POLL_S).run(sweep, sweep.points, again)
    join()
    assert jobs_of(sweep) == before  # attached, not submitted
    assert again.last() == {kept: "finished", cancelled: "stopped"}
    status = {run.document["sweep"]["point"]: run.status for run in runs_of(sweep)}
    assert status == again.last()
    assert [num_segments(run) for run in runs_of(sweep)] == [1, 1]


@pytest.mark.slurm
def test_what_sbatch_refuses_is_one_sentence(slurm: None, folder: Path) -> None:
    sweep = planned(folder, 2, launch={"partition": "nowhere"})
    with raises_code("cluster-refused"):
        SlurmLauncher(POLL_S).run(sweep, sweep.points, Heard())


def test_what_the_sweep_file_asks_for_reaches_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/my code")
    launch = {"partition": "gpu", "account": "lab", "time": 90, "mem_gb": 1.5, "gpus": True, "threads": 4,
              "signal_delay_s": 120, "array_parallelism": 8, "setup": ["module load cuda"]}  # fmt: skip
    asked = _parameters(planned(folder, 1, launch=launch, ranks=2))
    assert asked == {
        "job_name": "rung-held", "partition": "gpu", "account": "lab", "time": 90, "nodes": 1, "ntasks_per_node": 1,
        "cpus_per_task": 8, "gpus_per_node": 2, "mem": "1536M", "array_parallelism": 8, "signal_delay_s": 120,
        "setup": ["export PYTHONPATH='/my code'", "module load cuda"], "additional_parameters": {"requeue": True},
        "wckey": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "launch", [{"time": "1 day"}, {"partition": "a\n#SBATCH --uid=0"}, {"setup": "module load cuda"}]
)
def test_options_are_checked_before_anything_is_submitted(folder: Path, launch: dict[str, Any]) -> None:
    with raises_code("bad-value"):
        _parameters(planned(folder, 1, launch=launch))


def test_without_slurm_or_submitit_the_remedy_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = planned(folder, 1)
    monkeypatch.setenv("PATH", str(folder))
    with raises_code("no-cluster"):
        SlurmLauncher().run(sweep, sweep.points, Heard())
    for name in ("sbatch", "squeue"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with raises_code("not-installed"):
        SlurmLauncher().run(sweep, sweep.points, Heard())
