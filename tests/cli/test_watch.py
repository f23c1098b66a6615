"""If this fails, `rung watch` misses what another terminal trains, or never ends."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from rung.cli import main, watch
from rung.runs.record import Record, append_event, read_document
from tests.compare.arms import make


def watched(
    ref: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 0
) -> str:
    monkeypatch.setattr(sys, "argv", ["rung", "watch", ref, "--runs", str(root)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    return capsys.readouterr().out


def test_a_run_that_has_ended_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    make(tmp_path / "runs", experiment="bach")
    lines = watched("bach", tmp_path / "runs", monkeypatch, capsys).splitlines()
    assert lines[0] == "bach/1  finished"
    assert "bach/1 is finished, at step 100" in lines
    assert max(map(len, lines[1:-1])) <= 80
    assert any("\u28ff" >= sign > "\u2800" for sign in lines[2])  # the curve
    make(tmp_path / "runs", experiment="chopin", status="crashed", losses=())
    assert "chopin/1 is crashed" in watched("chopin", tmp_path / "runs", monkeypatch, capsys, code=1)


def test_a_run_is_followed_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    record = Record.create(
        tmp_path / "runs", "bach", recipe="case:Case", preset=None, command=["rung"], seed=1,
        config={"logging": {"log_interval": 1}}, sources={}, derived={"num_steps": 4}, data={}, code_root=tmp_path,
    )  # fmt: skip
    record.log(0, {"loss": 3.0, "norm": 1.0, "targets": 8, "step_s": 0.1})

    seen = threading.Event()
    real = watch._tell

    def tell(*words: object) -> None:
        real(*words)  # type: ignore[arg-type]
        seen.set()

    monkeypatch.setattr(watch, "_tell", tell)

    def train() -> None:
        while not any(thread.name == "watching" for thread in threading.enumerate()):
            pass
        record.log(1, {"loss": 2.5, "norm": 1.0, "targets": 8, "step_s": 0.1})
        record.event("eval", step=2, results={"val": {"loss": 2.25}})
        seen.wait(20)
        record.event("finding", step=2, severity="warning", rule="P1", title="Waiting", what="for data")
        record.log(3, {"loss": 2.0, "norm": 1.0, "targets": 8, "step_s": 0.1})
        record.finish("finished", last_step=4, totals={"elapsed_s": 1.0})

    trainer = threading.Thread(target=train)
    threading.current_thread().name = "watching"
    try:
        trainer.start()
        shown = watched("bach/1", tmp_path / "runs", monkeypatch, capsys)
    finally:
        threading.current_thread().name = "MainThread"
        trainer.join()
    assert "bach/1  running" in shown
    assert "eval val at step 2  loss 2.2500" in shown
    assert "warning: Waiting (P1): for data" in shown
    assert "step 3/4  loss 2.0000" in shown
    assert "bach/1 is finished, at step 4" in shown
    append_event(record.path, "note", text="watched")  # and nothing of the run was touched
    assert read_document(record.path)["status"] == "finished"
