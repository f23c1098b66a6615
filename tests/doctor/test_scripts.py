"""If this fails, the doctor calls a script that died healthy, or a rule asks a free-form record for a recipe's keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import rung
from rung.cli import doctor
from rung.doctor.diagnose import ask
from rung.doctor.history import read
from rung.doctor.report import report_of
from rung.runs.query import open_run
from rung.runs.record import Record

FREE = {"lr": "cosine", "optimizer": {"eps": "default", "grad_clip": None, "beta2": [0.9]}, "loss": "mse", "depth": 3}
DIAGNOSIS = "loss NaN: input x[3, 7] is NaN"


def script(
    root: Path,
    rows: Mapping[str, Sequence[float]],
    events: Sequence[Mapping[str, Any]] = (),
    status: str = "finished",
    config: Mapping[str, Any] = FREE,
    **fields: Any,
) -> str:
    """A folder as a script with its own loop leaves it."""
    record = Record.create(
        root, "mine", recipe="own loop", preset=None, command=["train.py"], seed=None, config=config, sources={},
        derived={"parameters": 100}, data={},
    )  # fmt: skip
    for step in range(max(map(len, rows.values()), default=0)):
        record.log(step, {name: values[step] for name, values in rows.items() if step < len(values)})
    for event in events:
        record.event(**event)
    record.finish(status, **fields)
    return record.id


def doctor_json(root: Path, run: str, *args: str) -> dict[str, Any]:
    result = CliRunner().invoke(doctor.command, [run, "--json", "--runs", str(root), *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return {**json.loads(result.output), "exit_code": result.exit_code}


def failed(step: int, **fields: Any) -> dict[str, Any]:
    usual = {"why": f"loss nan at step {step}", "diagnosis": DIAGNOSIS, "capture": f"captures/{step:08d}"}
    return {"kind": "diverged", "step": step, **usual, **fields}


def guarded(num_steps: int, **columns: Sequence[float]) -> dict[str, Sequence[float]]:
    """The rows of a healthy guarded loop."""
    rng = np.random.default_rng(1)
    loss = (1.1 + 2.3 * np.exp(-np.arange(num_steps) / 60) + rng.normal(0, 0.03, num_steps)).tolist()
    norm = rng.uniform(0.5, 0.9, num_steps).tolist()
    usual = {"loss": loss, "norm": norm, "norm_clipped": norm, "lr": [1e-3] * num_steps, "skipped": [0.0] * num_steps}
    return {**usual, **columns}


def test_a_script_that_the_guard_stopped_is_fatal_and_can_be_replayed(tmp_path: Path) -> None:
    rows = guarded(31)
    for name in ("loss", "norm", "norm_clipped"):
        rows[name] = [*rows[name][:30], math.nan]
    run = script(tmp_path, rows, [failed(30)], "diverged", reason="loss nan at step 30")
    report = doctor_json(tmp_path, run, "--check")
    assert report["exit_code"] == 1
    (finding,) = report["findings"]
    assert (finding["rule"], finding["severity"], finding["since"]) == ("N1", "fatal", 30)
    assert finding["probe"] == f"rung replay {tmp_path / run}@30 --build FILE:FUNCTION"  # it is not in runs/ of here
    assert DIAGNOSIS in " ".join(finding["evidence"])
    assert report["failed"] == {}


def test_a_real_guarded_loop_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = rung.init("mine", config={"lr": 1e-3, "loss": "mse"}, seed=1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    guard = run.guard(model, optimizer)

    def take(step: int) -> None:
        x = torch.ones(8, 4)
        x[3, 2] = math.nan if step == 20 else 1.0
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        guard.step(loss, x)

    with pytest.raises(rung.Diverged):
        list(map(take, range(30)))
    run.finish("diverged", quiet=True)
    report = doctor_json(tmp_path / "runs", run.id)
    (finding,) = (f for f in report["findings"] if f["severity"] == "fatal")
    assert (finding["rule"], finding["since"], finding["probe"]) == (
        "N1", 20, f"rung replay {run.id}@20 --build FILE:FUNCTION",
    )  # fmt: skip
    assert "row 3" in " ".join(finding["evidence"])  # the guard's own diagnosis
    assert (report["steps"], report["failed"]) == (21, {})


@pytest.mark.parametrize("num_steps", [0, 30])
def test_without_a_bad_row_the_event_is_enough(num_steps: int, tmp_path: Path) -> None:
    run = script(tmp_path, guarded(num_steps), [failed(num_steps)], "diverged")
    (finding,) = doctor_json(tmp_path, run)["findings"]
    assert (finding["rule"], finding["severity"], finding["since"]) == ("N7", "fatal", num_steps)
    assert finding["probe"] == f"rung replay {tmp_path / run}@{num_steps} --build FILE:FUNCTION"
    assert f"`{finding['probe']}`" in finding["remedy"]
    assert DIAGNOSIS in " ".join(finding["evidence"])
    assert f"captures/{num_steps:08d}" in " ".join(finding["evidence"])
    text = CliRunner().invoke(doctor.command, [run, "--runs", str(tmp_path)]).output
    assert "1 fatal" in text
    assert finding["remedy"].split("`")[1] in " ".join(text.split())


@pytest.mark.parametrize("status", ["diverged", "crashed"])
def test_a_status_is_enough(status: str, tmp_path: Path) -> None:
    run = script(tmp_path, guarded(20), status=status, reason="KeyError: 'x'")
    report = doctor_json(tmp_path, run, "--check")
    (finding,) = report["findings"]
    rule = "R6" if status == "crashed" else "N7"
    assert (finding["rule"], finding["severity"], finding["since"]) == (rule, "fatal", 20)
    assert (report["verdict"], rule in report["answers"]["sick"]) == ("sick", True)
    assert "KeyError: 'x'" in finding["what"]
    assert "rung replay" not in finding["probe"] + finding["remedy"]  # nothing was captured that could be replayed
    assert report["exit_code"] == 1


def test_steps_that_were_skipped_are_a_warning_about_the_first(tmp_path: Path) -> None:
    skips = [failed(step) for step in (40, 60)] + [{"kind": "skip", "step": step} for step in (40, 60)]
    run = script(tmp_path, guarded(100), skips)
    (finding,) = doctor_json(tmp_path, run)["findings"]
    assert (finding["rule"], finding["severity"], finding["since"]) == ("N7", "warn", 40)


def test_a_healthy_script_is_told_how_many_rules_could_not_look(tmp_path: Path) -> None:
    run = script(tmp_path, guarded(200))
    report = doctor_json(tmp_path, run)
    assert (report["findings"], report["failed"], report["early"]) == ([], {}, [])
    answers, how = report["answers"], report["how"]
    assert sorted(rule for of in answers.values() for rule in of) == sorted(report["rules"])
    assert answers["sick"] == {}
    assert {"N1", "N2", "N7", "O5", "R5", "R6", "L2"} <= set(answers["healthy"])
    assert report["unasked"]["O6"] == "tensors"  # "default" is a value of optimizer.eps, though no number
    assert report["unasked"]["P1"] == "wait_s, step_s"
    assert report["unasked"]["O4"] == "optimizer.grad_clip"
    assert report["unasked"]["R1"] == "unread_keys or recipe"
    assert set(report["unasked"]) <= set(answers["not_looked_at"])
    assert "run.watch(model, optimizer)" in how["O6"]
    assert all(how[rule] for rule in report["unasked"])
    text = CliRunner().invoke(doctor.command, [run, "--runs", str(tmp_path)]).output
    counts = {name: len(of) for name, of in answers.items()}
    assert text.splitlines()[-1] == (
        f"{counts['sick']} sick, {counts['healthy']} healthy, {counts['not_looked_at']} not looked at"
    )
    # Without an eval, and with nobody to see the weights, this is no healthy run.
    assert (report["verdict"], len(report["unknown"])) == ("not known", 3)
    assert "healthy" not in text.rpartition("\n\n")[0]


def test_a_script_without_a_loss_is_looked_at_too(tmp_path: Path) -> None:
    run = script(tmp_path, {"norm": [1.0] * 80 + [math.nan] * 2})
    report = doctor_json(tmp_path, run)
    assert report["steps"] == 82
    assert [(f["rule"], f["severity"], f["since"]) for f in report["findings"]] == [("N2", "fatal", 80)]


def test_a_scaler_that_skips_is_not_fatal_where_skips_are_not_recorded(tmp_path: Path) -> None:
    rows = guarded(100, scale=[65536.0] * 3 + [32768.0] * 97)
    del rows["skipped"]
    rows["norm"] = [*rows["norm"][:2], math.inf, *rows["norm"][3:]]
    assert [(f["rule"], f["severity"]) for f in doctor_json(tmp_path, script(tmp_path, rows))["findings"]] == [
        ("N2", "info")
    ]
    rows["skipped"] = [0.0] * 100
    assert doctor_json(tmp_path, script(tmp_path, rows))["findings"][0]["severity"] == "fatal"  # it was applied


def test_what_is_advised_can_be_done_with_a_script(tmp_path: Path) -> None:
    """`rung train --parent` and `rung check` need a recipe."""
    rows = guarded(200, norm=[4.0] * 200, norm_clipped=[1.0] * 200)
    config = {"optimizer": {"name": "sgd", "grad_clip": 1.0}}
    findings = doctor_json(tmp_path, script(tmp_path, rows, config=config))["findings"]
    (finding,) = (f for f in findings if f["rule"] == "O4")
    assert (finding["changes"], finding["command"]) == ({}, "")
    assert not finding["probe"].startswith("rung ")


@pytest.mark.parametrize("name", ["loss", "norm", "lr", "skipped", "scale", "targets", "wait_s", "logits/entropy"])
def test_no_rule_fails_on_a_record_of_one_name(name: str, tmp_path: Path) -> None:
    values = [1.0, math.nan, *np.linspace(1, 100, 120).tolist()]
    history = read(open_run(script(tmp_path, {name: values}), tmp_path))
    for answer in ask(history, raises=True):
        if answer.missing and ":" not in "".join(answer.rule.needs):
            assert answer.rule(history) == [], answer.rule.id  # nothing is lost by not asking it
    assert report_of(history).history.end == 122


@pytest.mark.parametrize(
    ("rise", "expected"), [(30, 29), (1, 0), (100, 99)], ids=["warm-up", "constant", "still rising"]
)
def test_the_warm_up_of_a_script_is_read_off_its_rate(rise: int, expected: int, tmp_path: Path) -> None:
    rates = [1e-3 * min(1.0, (step + 1) / rise) for step in range(100)]
    history = read(open_run(script(tmp_path, guarded(100, lr=rates)), tmp_path))
    assert history.warmup_steps == expected


def found_in(root: Path, rows: Mapping[str, Sequence[float]], evals: Mapping[int, float], **config: Any) -> list[str]:
    """Rules of severity warn and more in a loop that logs these."""
    events = [{"kind": "eval", "step": step, "results": {"val": {"loss": loss}}} for step, loss in evals.items()]
    history = read(open_run(script(root, rows, events, config=config), root))
    return [f.rule for f in report_of(history).at_least("warn")]


def test_a_rate_that_swings_is_told_and_one_cycle_is_not(tmp_path: Path) -> None:
    steps = np.arange(300)
    for number, (period, config, expected) in enumerate((
        (16, {}, ["L3"]), (16, {"schedule": "cyclic"}, []), (300, {}, []),
    )):  # fmt: skip
        rate = 5e-4 * (1 - np.cos(2 * np.pi * (steps + 1) / period)) + 1e-6
        rows = {"loss": guarded(300)["loss"], "lr": rate.tolist()}
        assert found_in(tmp_path / str(number), rows, {}, **config) == expected


def test_an_eval_that_never_beats_the_untrained_model_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = {"loss": (0.4 + 2 * np.exp(-np.arange(300) / 60) + rng.normal(0, 0.03, 300)).tolist()}
    of_a_copy = {step: float(2.4 + rng.normal(0, 0.01)) for step in range(0, 300, 40)}
    assert found_in(tmp_path / "copy", rows, of_a_copy) == ["E1"]  # which names the cause, and L7 the result
    other_labels = {step: 2.5 + step / 80 for step in range(0, 300, 40)}
    assert found_in(tmp_path / "labels", rows, other_labels) == ["L7"]
    overfits = {step: 2.4 - 0.3 * min(step, 80) / 80 + step / 500 for step in range(0, 300, 40)}
    assert "L7" not in found_in(tmp_path / "overfits", rows, overfits)
    more_negatives = {step: 5.5 - 2 * step / 300 for step in range(0, 300, 40)}  # ln 256 beside ln 32, and it falls
    assert found_in(tmp_path / "contrastive", rows, more_negatives) == []


def test_losses_that_a_count_of_the_config_lies_between_are_told(tmp_path: Path) -> None:
    loss = np.array(guarded(300)["loss"])
    evals = {step: float(loss[step]) for step in range(0, 300, 40)}
    divided = {"loss": (loss / 4).tolist()}
    assert found_in(tmp_path / "divided", divided, evals, grad_accum=4) == ["L9"]
    assert found_in(tmp_path / "summed", {"loss": (loss * 16).tolist()}, evals, batch_size=16) == ["L9"]
    assert found_in(tmp_path / "other", divided, evals, grad_accum=8) == []  # another part, perhaps
    assert found_in(tmp_path / "same", {"loss": loss.tolist()}, evals, grad_accum=4) == []
