"""If this fails, a run in progress reports the same thing again and again, or never, or dies of the doctor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rung.doctor.finding import Finding
from rung.doctor.history import History, Table, read
from rung.doctor.live import MOST_ROWS, MOST_TABLES, LiveDoctor, Recent, live_doctor
from rung.doctor.rules import Rule
from rung.engine.loop import fit
from rung.runs.query import open_run
from rung.runs.record import Record
from tests.cases.performance_cases import made, slow_loader
from tests.cases.provenance_cases import as_it_was, forget_moments, resumed
from tests.cases.running import Mute, setup_of
from tests.cases.tiny import Tiny


def scan(severity_at: dict[int, str]) -> Rule:
    """Finds something from the first of these steps on, and worse from the later ones."""

    def look(history: History) -> Finding | None:
        now = [severity for step, severity in severity_at.items() if history.end >= step]
        return Finding(now[-1], "so", since=1) if now else None

    return Rule("X1", "a scan", "scan", look)


def feed(doctor: LiveDoctor, history: History, first: int, end: int) -> None:
    for step in range(first, end):
        row = {}
        for name, series in history.rows.items():
            at = int(np.searchsorted(series.steps, step))
            if at < len(series) and series.steps[at] == step:
                row[name] = float(series.values[at])
        doctor.row(step, row)


def followed(doctor: LiveDoctor, history: History, every: int = 20) -> dict[int, list[str]]:
    """What is reported at which step."""
    reported = {}
    for first in range(0, history.end, every):
        feed(doctor, history, first, first + every)
        if found := doctor.look():
            reported[first + every] = [f.rule for f in found]
    return reported


def empty(**fields: Any) -> History:
    return History(config=made().config, derived=made().derived, **fields)


def test_a_finding_is_reported_once_and_again_when_it_is_worse() -> None:
    doctor = LiveDoctor(empty(), [scan({40: "info", 100: "sick"})])
    assert followed(doctor, made(200)) == {40: ["X1"], 100: ["X1"]}


def test_a_state_is_reported_at_the_third_look() -> None:
    rule = Rule("X1", "so", "state", lambda h: Finding("warn", "so") if h.end >= 100 and h.end != 140 else None)
    doctor = LiveDoctor(empty(), [rule])
    assert followed(doctor, made(300)) == {200: ["X1"]}  # 100, 120, not 140; 160, 180, 200
    assert doctor._reported["X1"].since == 160


def test_it_finds_what_the_doctor_finds() -> None:
    history = slow_loader(1)
    reported = followed(LiveDoctor(empty()), history)
    assert list(reported.values()) == [["P1"]]


def test_a_healthy_run_is_not_disturbed() -> None:
    doctor = LiveDoctor(empty())
    assert followed(doctor, made()) == {}
    assert doctor.failed == {}


def test_a_look_without_anything_new_asks_nothing() -> None:
    asked = []
    doctor = LiveDoctor(empty(), [Rule("X1", "counts", "scan", lambda h: asked.append(h.end))])  # type: ignore[arg-type, return-value]
    feed(doctor, made(), 0, 20)
    doctor.look()
    doctor.look()
    assert asked == [20]
    doctor.event({"kind": "diverged", "step": 19})
    doctor.look()
    assert asked == [20, 20]


def test_a_rule_that_fails_does_not_end_the_run() -> None:
    def look(history: History) -> None:
        raise ZeroDivisionError("x")

    doctor = LiveDoctor(empty(), [Rule("X2", "breaks", "scan", look), scan({20: "warn"})])
    feed(doctor, made(), 0, 20)
    assert [f.rule for f in doctor.look()] == ["X1"]
    assert doctor.failed == {"X2": "ZeroDivisionError: x"}


def test_what_was_told_explains_what_comes_later() -> None:
    broken = Rule("N1", "broken", "scan", lambda h: Finding("fatal", "", since=30) if h.end > 30 else None)
    later = Rule("E1", "later", "scan", lambda h: Finding("sick", "", since=90) if h.end > 90 else None)
    assert followed(LiveDoctor(empty(), [broken, later]), made(200)) == {40: ["N1"]}


def test_memory_is_bounded() -> None:
    doctor = LiveDoctor(empty(), [])
    names = [f"layer{i}" for i in range(50)]
    for step in range(3 * MOST_ROWS):
        doctor.row(step, {"loss": float(step)})
        doctor.event({"kind": "save", "step": step})
        if step % 10 == 0:
            doctor.table("tensors", step, names, {"grad": [float(step)] * 50})
    history = doctor.history()
    assert history["loss"].values.tolist() == list(range(2 * MOST_ROWS, 3 * MOST_ROWS))
    table = history.table("tensors")
    assert table is not None
    assert len(table.steps) == MOST_TABLES
    assert table.columns["grad"][:, 7].tolist() == table.steps.tolist()
    assert len(history.events) == 500


def test_a_step_that_comes_again_replaces_what_came_after() -> None:
    column = Recent(Table(np.zeros(0, np.int64), [], {"value": np.zeros(0)}), 10)
    for step, value in [(0, 1.0), (1, 2.0), (2, 3.0), (1, 9.0)]:
        column.add(step, value)
    assert column.series.steps.tolist() == [0, 1]
    assert column.series.values.tolist() == [1.0, 9.0]


def test_names_that_change_begin_a_new_table() -> None:
    doctor = LiveDoctor(empty(), [])
    doctor.table("tensors", 0, ["a"], {"grad": [1.0]})
    doctor.table("tensors", 20, ["a", "b"], {"grad": [1.0, math.nan]})
    table = doctor.history().table("tensors")
    assert table is not None
    assert (table.names, table.steps.tolist()) == (["a", "b"], [20])


def test_events_that_stay_true_are_not_forgotten() -> None:
    doctor = LiveDoctor(empty(), [])
    doctor.event({"kind": "unread_keys", "step": 3, "keys": ["a"]})
    for step in range(2000):
        doctor.event({"kind": "save", "step": step})
    assert len(doctor.history().events_of("unread_keys")) == 1


class Hears(Mute):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("spoil", [as_it_was, forget_moments])
def test_a_resumed_run_is_watched_from_where_it_continues(spoil: Any, tmp_path: Path) -> None:
    """The steps that are taken again are compared while they are taken, and nothing of the old future is seen."""
    run = resumed(tmp_path, 1, as_it_was)
    from rung.engine.build import restore
    from rung.engine.checkpoint import Checkpoints

    setup = setup_of(
        Tiny, "seed=1", "optimizer.max_iters=60", "checkpoint.every=30", "checkpoint.keep=0", root=tmp_path
    )
    restore(setup, Checkpoints(run.path / "checkpoints").at(30))
    spoil(setup)
    record = Record.reopen(run.path, command=["test"])
    record.event("resume", step=30, overrides=[])
    doctor, hears = live_doctor(run.path), Hears()
    assert doctor.history().end == 30
    fit(setup, record, hears, doctor)
    record.finish("finished")
    is_reported = any("(R4)" in text for text in hears.lines)
    assert is_reported == (spoil is forget_moments)
    assert any(e["rule"] == "R4" for e in read(open_run(run.id, tmp_path)).events_of("finding")) == is_reported
