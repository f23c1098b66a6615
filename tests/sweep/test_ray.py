"""If this fails, a sweep on Ray loses points with a lost node, trains one twice, or does not stop when told to."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.errors import RunError
from rung.sweep.launch import child
from rung.sweep.launch import ray as on_ray
from rung.sweep.launch.ray import RayLauncher
from rung.sweep.state import ask_to_stop
from tests.errors import raises_code
from tests.sweep import made
from tests.sweep.held import GO, STEPS, planned
from tests.sweep.made import Heard, all_saved, made_sweep, num_segments, runs_of, wait_for

ROOT = Path(__file__).resolve().parents[2]
STORE = 80 * 2**20


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose trainings are real and wait in the middle for a file `go`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(GO, str(tmp_path / "go"))
    for name in ("RUNG_RUNS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def folder(real: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with stand-ins for trainings, which take no time; all else is real."""
    monkeypatch.setattr(child, "command_of", made.command_of)
    (real / "ends").write_text("held")
    return real


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that takes no work, and two nodes of one CPU."""
    import ray
    from ray.cluster_utils import Cluster

    home = tempfile.mkdtemp(prefix="rr")  # short: Ray's sockets lie below, and their paths have a limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", home)
        (Path(home) / "ray").mkdir()
        made = Cluster()
        try:
            quick = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}  # a lost node is seen soon
            made.add_node(num_cpus=0, object_store_memory=STORE, include_dashboard=False, _system_config=quick)
            made.workers = [made.add_node(wait=False, num_cpus=1, object_store_memory=STORE) for _ in range(2)]
            made.wait_for_nodes()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(home, ignore_errors=True)


def test_a_sweep_stops_when_told_and_goes_on(folder: Path, cluster: Any) -> None:
    """By Ctrl-C in the driver, and by the wish to stop that `rung sweep stop` leaves; both let the training save."""
    sweep = made_sweep(folder / "runs", [0])
    (point,) = sweep.points

    class Interrupting(Heard):
        def __call__(self, key: str, state: str, where: str) -> None:
            super().__call__(key, state, where)
            if state == "running":
                wait_for(lambda: all_saved(sweep, 1))
                raise KeyboardInterrupt

    interrupted = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        RayLauncher(cluster.address).run(sweep, sweep.points, interrupted)
    assert interrupted.last() == {point.key: "stopped"}
    assert [(run.status, num_segments(run)) for run in runs_of(sweep)] == [("stopped", 1)]

    class Wishing(Heard):
        def __call__(self, key: str, state: str, where: str) -> None:
            super().__call__(key, state, where)
            if state == "running":
                wait_for(lambda: [num_segments(run) for run in runs_of(sweep)] == [2])
                ask_to_stop(sweep)

    told = Wishing()
    RayLauncher(cluster.address).run(sweep, sweep.points, told)
    assert told.last() == {point.key: "stopped"}
    assert len(told.keys("waiting")) == 1  # it was not placed again
    assert [(run.status, num_segments(run)) for run in runs_of(sweep)] == [("stopped", 2)]


def test_a_node_that_does_not_see_the_sweep_says_so(folder: Path, cluster: Any) -> None:
    sweep = made_sweep(folder / "runs", [0, 1])
    (sweep.folder / "sweep.json").unlink()
    heard = Heard()
    with pytest.raises(RunError, match=r"sweep\.json"):
        RayLauncher(cluster.address).run(sweep, sweep.points, heard)


def test_points_of_a_lost_node_go_on_elsewhere(real: Path, cluster: Any) -> None:
    sweep, heard, faults = planned(real, 3), Heard(), []

    def lose_a_node() -> None:
        try:
            wait_for(lambda: all_saved(sweep, 2) and len(heard.keys("running")) == 2)  # as many as there are CPUs
            cluster.remove_node(cluster.workers[0], allow_graceful=False)
            wait_for(lambda: any(run.status != "running" or num_segments(run) > 1 for run in runs_of(sweep)))
        except BaseException as fault:
            faults.append(fault)
        finally:
            (real / "go").touch()

    other = threading.Thread(target=lose_a_node, daemon=True)
    other.start()
    RayLauncher(cluster.address).run(sweep, sweep.points, heard)
    other.join()
    assert not faults
    assert heard.last() == {point.key: "finished" for point in sweep.points}
    lost = heard.keys("lost")
    assert len(lost) == 1
    assert sorted(heard.keys("finished")) == sorted(point.key for point in sweep.points)  # each once
    runs = {run.document["sweep"]["point"]: run for run in runs_of(sweep)}
    assert len(runs) == len(runs_of(sweep)) == 3  # one run each, whatever happened
    assert {run.status for run in runs.values()} == {"finished"}
    assert [key for key, run in runs.items() if num_segments(run) == 2] == lost
    for run in runs.values():  # each step once: what was resumed went on from its save
        assert [step for step in run.metrics(["loss"])["step"] if step < STEPS] == list(range(STEPS))
    assert not list((sweep.folder / "ray").iterdir())  # no signs are left behind


def test_what_no_node_has_is_said() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 4.0, "GPU": 8.0}}]
    assert on_ray._lack(nodes, {"CPU": 4, "GPU": 0, "memory": 0}) == ""
    assert "2 CPU, 2 GPU, 1 a100" in on_ray._lack(nodes, {"CPU": 2, "GPU": 2, "a100": 1})


@pytest.mark.parametrize(
    "launch",
    [{"threads": "many"}, {"resources": {"CPU": 2}}, {"resources": {"a100": "one"}}, {"resources": ["a100"]}],
)
def test_launch_options_are_checked_before_ray_starts(folder: Path, launch: dict[str, Any]) -> None:
    import ray

    sweep = made_sweep(folder / "runs", [0], launch=launch)
    with raises_code("bad-value"):
        RayLauncher("127.0.0.1:1").run(sweep, sweep.points, Heard())
    assert not ray.is_initialized()


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens_is_said(folder: Path, form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = form.format(taken.getsockname()[1])
    sweep = made_sweep(folder / "runs", [0])
    with raises_code("no-cluster"):
        RayLauncher(address).run(sweep, sweep.points, Heard())


def test_without_ray_the_remedy_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sweep = made_sweep(folder / "runs", [0])
    with raises_code("not-installed"):
        RayLauncher().run(sweep, sweep.points, Heard())
