"""If this fails, an example no longer runs, or the run that it leaves cannot be read like any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.runs.query import open_run

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLES = {"plain_loop": ("plain", 200), "nano_gpt": ("nano", 120), "hf_trainer": ("counting", 60)}
EXAMPLES |= {"lightning_module": ("sine", 60)}


def run(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A copy of the example, as a user has it, in a process of its own."""
    shutil.copy(ROOT / "examples" / f"{name}.py", folder)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, f"{name}.py", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_the_guarded_loop_finds_its_fault(tmp_path: Path) -> None:
    assert "loss nan at step 40; the update was not applied" in run("guarded_loop", tmp_path).stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_leaves_a_run_like_any_other(name: str, tmp_path: Path, rung: Call) -> None:
    experiment, num_steps = EXAMPLES[name]
    run(name, tmp_path)
    found = open_run(f"{experiment}/1", tmp_path / "runs")
    assert (found.status, found.step) == ("finished", num_steps)
    assert found.best is not None
    losses = [loss for loss in found.metrics(["loss"])["loss"] if loss is not None]
    assert losses[-1] < losses[0]
    measured = "norm_clipped" if name == "hf_trainer" else "norm"  # whoever clips shows both
    assert sum(norm is not None for norm in found.metrics([measured])[measured]) >= 20
    assert found.initial_weights()
    assert (found.path / "tables").is_dir()
    assert [event["text"] for event in found.events("warning")] == []
    assert f"{experiment}/1  own loop  finished" in rung("show", experiment).stdout
    healthy = json.loads(rung("doctor", experiment, "--json").stdout)
    assert not [f for f in healthy["findings"] if f["severity"] in ("sick", "fatal")], healthy["findings"]


def test_a_hidden_change_between_two_runs_is_told(tmp_path: Path, rung: Call) -> None:
    """One argument is one change; an edit of the script beside it is not."""
    run("nano_gpt", tmp_path, "--max_iters=20")
    run("nano_gpt", tmp_path, "--max_iters=20", "--weight_decay=0.3", "--parent=nano/1", "--why=more decay")
    strict = rung("diff", "nano/1", "nano/2").stdout
    assert "weight_decay" in strict
    assert "not a strict A/B" not in strict
    script = ROOT / "examples" / "nano_gpt.py"
    (tmp_path / "nano_gpt.py").write_text(script.read_text().replace("std=0.02", "std=0.03"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "nano_gpt.py", "--max_iters=20", "--weight_decay=0.3"]
    subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True)
    hidden = rung("diff", "nano/1", "nano/3").stdout
    assert "not a strict A/B" in hidden
    assert "nano_gpt.py" in hidden
