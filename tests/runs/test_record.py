"""If this fails, two runs share a number, a start leaves rubbish behind, or run.json lies."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from rung.errors import UserError
from rung.runs import record as record_module
from rung.runs.query import Run, open_run
from rung.runs.record import Record, amend
from tests.errors import raises_code

Start = Callable[..., Record]


def test_a_new_run_says_what_it_is(start: Start, tmp_path: Path) -> None:
    record = start(parent="piano/0", why="a smaller rate", tags=["a"], device={"name": "cpu"})
    assert (record.id, record.path) == ("piano/1", tmp_path / "runs/piano/1")
    document = json.loads((record.path / "run.json").read_text())
    assert document["schema"] == 1
    assert document["status"] == "running"
    assert document["process"]["pid"] == os.getpid()
    assert document["versions"].keys() == {"rung", "python", "torch"}
    assert (document["parent"], document["why"]) == ("piano/0", "a smaller rate")
    assert yaml.safe_load((record.path / "config.yaml").read_text())["lr"]["learning_rate"] == 1e-4
    assert list(yaml.safe_load((record.path / "config.yaml").read_text())) == ["lr", "stage"]
    env = json.loads((record.path / "env.json").read_text())
    assert env["device"] == {"name": "cpu"}
    assert "pytest" in env["packages"]
    assert not list(record.path.glob(".*"))


def test_update_and_finish(start: Start, tmp_path: Path) -> None:
    record = start()
    record.log(0, {"loss": 2.0})
    record.log(1, {"loss": 1.0})
    record.update(best={"step": 2, "set": "val", "loss": math.nan, "checkpoint": "2"})
    amend(record.path, verdict="worse")  # what `rung note` does from another process
    record.event("eval", step=2, results={"val": {"loss": math.inf}})
    sample = record.add_sample(2, "a.txt", b"hello", "a caption")
    record.finish("finished", derived={"x": 1})
    run = open_run("piano", tmp_path / "runs")
    assert run.document["verdict"] == "worse"
    assert run.best is not None
    assert math.isnan(run.best["loss"])
    assert run.step == 1
    assert run.document["segments"][0]["first_step"] == 0
    assert run.document["ended"] > run.document["created"]
    assert [e["kind"] for e in run.events()][-3:] == ["eval", "sample", "end"]
    assert run.evals()[0]["loss"] == math.inf
    assert run.samples() == [sample]
    assert b'"NaN"' in (run.path / "run.json").read_bytes()
    with pytest.raises(ValueError, match="not an end"):
        start().finish("done")
    with pytest.raises(ValueError, match="plain file name"):
        start().add_sample(0, "../x", b"", "")


CLAIM = """
import sys
from pathlib import Path
from rung.runs.record import Record
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    record = Record.create(Path(sys.argv[1]), "race", recipe="r", preset=None, command=[], seed=0, config={},
                           sources={}, derived={}, data={}, why=sys.argv[2])
    record.finish("finished")
    print(record.id)
"""


def test_eight_processes_get_forty_numbers(tmp_path: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CLAIM, str(tmp_path), str(i)], stdin=-1, stdout=-1, text=True)
        for i in range(8)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:  # all are ready before any is let go
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    ids = [(name, str(i)) for i, child in enumerate(children) for name in child.communicate()[0].split()]
    assert sorted(int(name.split("/")[1]) for name, _ in ids) == list(range(1, 41))
    for name, who in ids:
        assert open_run(name, tmp_path).document["why"] == who


def test_numbers_are_never_given_again(start: Start, tmp_path: Path) -> None:
    first, _, third = start(), start(), start()
    for record in (first, third):
        record.close()
        subprocess.run(["rm", "-r", str(record.path)], check=True)
    assert start().id == "piano/4"
    (tmp_path / "runs/piano/9").mkdir()  # somebody's folder: neither used nor touched
    assert start().id == "piano/10"
    assert not any((tmp_path / "runs/piano/9").iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a b", "a.lock", "a..b", "ü", "x" * 101, "a\n"])
def test_names_that_cannot_be_used(name: str, start: Start, tmp_path: Path) -> None:
    with raises_code("bad-name"):
        start(name)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("victim", ["config.yaml", "env.json", "run.json"])
def test_a_refused_start_leaves_nothing(
    code: int, victim: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replace(a: Path, b: Path) -> None:
        if Path(b).name == victim:
            raise OSError(code, os.strerror(code))
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError) as caught:
        start()
    assert os.strerror(code).lower() in str(caught.value)
    assert str(caught.value).count("\n") == 0
    assert not (tmp_path / "runs").exists()
    monkeypatch.undo()
    other = start()
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError):
        start()
    assert [p.name for p in (tmp_path / "runs/piano").iterdir() if p.name.isdecimal()] == [other.path.name]


def test_a_root_that_is_a_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with raises_code("bad-folder"):
        start(root=tmp_path / "file" / "runs")


def test_a_full_disk_while_running_keeps_the_old_run_json(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    record = start()
    before = (record.path / "run.json").read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises_code("disk-full") as caught:
        record.update(best={"loss": 1.0})
    assert "run.json" in str(caught.value)
    assert (record.path / "run.json").read_bytes() == before
    assert sorted(p.name for p in record.path.iterdir() if p.name.startswith(".")) == []


def test_reopen_continues_in_a_new_segment(start: Start, tmp_path: Path) -> None:
    record = start()
    for step in range(6):
        record.log(step, {"loss": 1.0})
    record.event("eval", step=3, results={"val": {"loss": 3.0}, "other": {"loss": 3.5}})
    record.event("eval", step=5, results={"val": {"loss": 5.0}})
    record.finish("crashed")
    again = Record.reopen(record.path, command=["rung", "resume", "piano/1"])
    again.log(3, {"loss": 0.5})
    again.event("eval", step=4, results={"val": {"loss": 4.0}})
    run = open_run("piano/1", tmp_path / "runs")
    assert run.status == "running"
    assert run.metrics(["loss"]) == {"step": [0, 1, 2, 3], "loss": [1.0, 1.0, 1.0, 0.5]}
    evals = [(e["step"], e["set"], e["loss"]) for e in run.evals()]
    assert evals == [(3, "val", 3.0), (3, "other", 3.5), (4, "val", 4.0)]
    assert [s["env"] for s in run.document["segments"]] == ["env.json", "env.1.json"]
    assert (run.path / "env.1.json").exists()
    assert run.document["command"] == ["rung", "train", "piano"]
    assert run.document["segments"][1]["command"] == ["rung", "resume", "piano/1"]
    with raises_code("wrong-state"):
        Record.reopen(record.path, command=[])
    with raises_code("no-run"):
        Record.reopen(tmp_path / "nowhere", command=[])


def test_a_run_beats_through_a_long_eval_and_no_longer_than_it_is_open(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "BEAT_S", 0.01)
    beating = set(threading.enumerate())
    record = start()
    [thread] = set(threading.enumerate()) - beating
    os.utime(record.path / "heartbeat", (0, 0))
    deadline = time.monotonic() + 60
    while not (record.path / "heartbeat").stat().st_mtime:  # while nothing is logged
        assert time.monotonic() < deadline
    record.close()
    thread.join(60)
    assert not thread.is_alive()


def test_no_secret_of_the_environment_is_kept(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "q7Zk" * 8
    monkeypatch.setenv("HF_TOKEN", secret)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("pass\n")
    record = start(code_root=tmp_path / "code")
    record.log(0, {"loss": 1.0})
    record.finish("finished")
    Record.reopen(record.path, command=[], code_root=tmp_path / "code").finish("stopped")
    files = [path for path in record.path.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_nothing_here_imports_torch_or_numpy() -> None:
    code = (
        "import sys; import rung.runs.query, rung.runs.record, rung.cli.ls, rung.cli.show; "
        "print([m for m in ('torch', 'numpy', 'yaml', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_of_a_newer_rung_is_refused_in_words(start: Start, tmp_path: Path) -> None:
    record = start()
    amend(record.path, schema=99)
    with raises_code("version-mismatch"):
        open_run("piano/1", tmp_path / "runs")
    (record.path / "run.json").write_text('{"schema"')
    with raises_code("run-damaged"):
        Run(record.path, record_module.read_document(record.path))
