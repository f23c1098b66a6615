"""If this fails, a loop that learns nothing, or not what its author thinks, is called healthy, or a good one sick.

Real scripts are run from outside, and rung is told little more than losses. Each fault is in a plain loop at the level
of a module and in a class of its own with a scheduler and micros, and both have healthy twins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rung.doctor.history import read
from rung.doctor.report import Report, report_of
from rung.runs.query import open_run

HERE, ROOT = Path(__file__).parent / "loops", Path(__file__).resolve().parents[2]
FAULTS = {
    "plain": {
        "no_step": "L1", "rate_zero": "L1", "other_model": "L1", "frozen": "L1", "no_zero_grad": "L1", "left_out": "L1",
        "some_still": "L1", "no_backward": "L1", "stale_eval": "E1", "two_evals": "L4", "nan_metric": "L2",
        "nan_eval": "L2", "joint": "L3", "restarts": "L3", "ends_early": "L3", "never_warm": "L3", "wrong_sign": "L6",
        "key_not_passed": "L8",
    },
    "trainer": {
        "no_step": "L1", "rate_zero": "L1", "other_model": "L1", "frozen": "L1", "no_zero_grad": "L1", "left_out": "L1",
        "stale_eval": "E1", "dropout_eval": "L4", "train_mode": "L4", "nan_metric": "L2", "nan_eval": "L2",
        "restarts": "L3", "ends_early": "L3", "no_relation": "L5", "unigram": "L5", "targets_are_inputs": "L7",
        "key_not_passed": "L8",
    },
}  # fmt: skip
TWINS = {
    "plain": ["healthy", "cosine", "milestones", "by_hand", "placeholder", "quiet_eval"],
    "trainer": ["healthy", "cycled"],
}


@pytest.fixture(scope="module", params=FAULTS)
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Report]]:
    """What the doctor says of each run of a script, which has all of them in one process."""
    folder, name = tmp_path_factory.mktemp(request.param), str(request.param)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HERE / f"{name}.py"), *TWINS[name], *FAULTS[name]]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = folder / "runs"
    return name, {path.name: report_of(read(open_run(path.name, runs))) for path in runs.iterdir() if path.is_dir()}


def test_each_fault_is_named(loop: tuple[str, dict[str, Report]]) -> None:
    name, reports = loop
    named = {fault: [f.rule for f in reports[fault].at_least("warn")] for fault in FAULTS[name]}
    missed = {fault: named[fault] for fault, rule in FAULTS[name].items() if rule not in named[fault]}
    assert missed == {}
    assert all(reports[fault].verdict == "sick" for fault in FAULTS[name])


def test_the_cause_is_the_only_finding(loop: tuple[str, dict[str, Report]]) -> None:
    name, reports = loop
    more = {
        fault: [f.rule for f in reports[fault].at_least("warn") if f.rule != rule]
        for fault, rule in FAULTS[name].items()
    }
    assert {fault: rules for fault, rules in more.items() if rules} == {}


def test_healthy_twins_are_healthy_and_nobody_has_failed(loop: tuple[str, dict[str, Report]]) -> None:
    name, reports = loop
    for twin in TWINS[name]:
        report = reports[twin]
        assert report.at_least("warn") == [], twin
        assert (report.verdict, report.unknown) == ("healthy", []), twin
    errors = {a.rule.id: a.error for report in reports.values() for a in report.asked if a.error}
    assert errors == {}


def test_the_line_of_code_that_lets_a_rule_look_is_said(loop: tuple[str, dict[str, Report]]) -> None:
    how = loop[1]["healthy"].how
    assert how["O7"] == "run.watch(model, optimizer)"
    assert how["A1"].startswith("run.guard(model, optimizer")
    assert "run.rows(ids)" in how["D2"]
    assert how["C1"].startswith("run.without(")
    assert set(how) <= set(loop[1]["healthy"].answers["not_looked_at"])
