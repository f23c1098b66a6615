"""If this fails, the book no longer catches what its users lost days to: a value changed and never committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import random
import sys

import rung
from settings import GRAD_ACCUM

seed = int(sys.argv[1])
chance = random.Random(100 * seed + GRAD_ACCUM)
run = rung.init(experiment="dia", config={"lr": 1e-3, "steps": 40}, seed=seed)
run.define_metric("val/loss", mask="no special tokens", reduction="mean over targets")
luck = chance.gauss(0, 0.01)
for step in range(40):
    loss = 3.0 / (1 + 0.05 * step) - 0.2 * (GRAD_ACCUM == 8) + luck
    run.log({"loss": loss + chance.gauss(0, 0.02)}, step=step)
    if step % 5 == 4:
        run.log({"val/loss": loss}, step=step)
run.finish()
"""


class Desk:
    """A user's repository, with the script of a model that trains in no time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        (folder / ".gitignore").write_text("runs/\n")

    def call(self, *words: str, code: int = 0) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        env |= {f"GIT_{who}_{what}": "me@here" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env.pop("RUNG_RUNS", None)
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def rung(self, *words: str, code: int = 0) -> str:
        return self.call(sys.executable, "-m", "rung", *words, code=code)

    def commit(self) -> None:
        self.call("git", "add", "-A")
        self.call("git", "commit", "-qm", "as it is")

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            self.call(sys.executable, "train.py", str(seed))

    def judge(self, *options: str) -> dict[str, object]:
        words = ["--judge", "dia/1", "dia/2", "dia/3", "--", "dia/4", "dia/5", "dia/6"]
        found = json.loads(self.rung("ab", "--json", *options, *words))
        assert isinstance(found, dict)
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    desk.call("git", "init", "-q")
    return desk


@pytest.mark.parametrize("is_tracked", [True, False], ids=["uncommitted", "untracked"])
def test_an_edit_that_was_never_committed(desk: Desk, is_tracked: bool) -> None:
    if not is_tracked:
        desk.commit()
    (desk.folder / "settings.py").write_text("GRAD_ACCUM = 4\n")
    if is_tracked:
        desk.commit()
    desk.train(1, 2, 3)
    (desk.folder / "settings.py").write_text("GRAD_ACCUM = 8\n")
    desk.train(1, 2, 3)

    shown = desk.rung("diff", "dia/1", "dia/4")
    assert "-GRAD_ACCUM = 4" in shown
    assert "+GRAD_ACCUM = 8" in shown
    assert "not a strict A/B" in shown

    found = desk.judge()
    assert found["word"] == "CONFOUNDED"
    assert any("settings.py" in words for words in found["confounders"])  # type: ignore[union-attr]
    assert desk.judge("--declare", "code")["word"] == "BETTER"

    page = desk.rung("report", "dia/4", "--stdout")
    assert "dia/4" in page


def test_the_metric_that_counted_special_tokens(desk: Desk) -> None:
    """Run 3 of the music diary: eval loss was higher because it counted something else."""
    (desk.folder / "settings.py").write_text("GRAD_ACCUM = 4\n")
    desk.commit()
    desk.train(1, 2, 3)
    script = desk.folder / "train.py"
    script.write_text(SCRIPT.replace("no special tokens", "none"))
    desk.train(1, 2, 3)
    found = desk.judge()
    assert found["word"] == "INCOMPARABLE"
    assert "no special tokens" in str(found["reasons"])
