"""If this fails, Tab offers nothing or what does not exist, takes seconds, or an unknown option gets no advice."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rung.cli import main
from rung.cli.words import schema
from rung.recipes import CATALOG
from rung.resolve import find_recipe, schema_of
from tests.compare.arms import make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RUNG_RUNS", "RUNG_DATA"):
        monkeypatch.delenv(name, raising=False)
    for experiment in ("bach", "bach", "chopin"):
        make(tmp_path / "runs", experiment=experiment, recipe="piano")
    for file in ("data/maestro/manifest.json", "data/hub/asap/manifest.json", "runs/.sweeps/rates/sweep.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is told after `line` and Tab, by the protocol of click; bash takes = for a word of its own."""
    words = line.split()
    monkeypatch.setenv("_RUNG_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - (not line.endswith(" "))))
    monkeypatch.setattr(sys, "argv", ["rung"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.err) == (0, "")
    return [one.removeprefix("plain,") for one in printed.out.split()]


CASES = {
    "rung tr": ["train"],
    "rung train ": sorted(CATALOG),
    "rung check pi": ["piano"],
    "rung train piano lr.le": ["lr.learning_rate="],
    "rung train piano pres": ["preset="],
    "rung train piano preset = s": ["small"],
    "rung train piano preset=s": ["preset=small"],  # as zsh and fish give it
    "rung train world preset = ": ["ollin", "small", "tiny"],
    "rung train piano lr.schedule = cos": ["cosine"],
    "rung train piano system.compile = ": ["true", "false"],
    "rung train piano --expe": ["--experiment"],
    "rung train piano --mirror w": ["wandb"],
    "rung train --parent ba": ["bach", "bach/1", "bach/2"],
    "rung train --parent bach/1 model.n_l": ["model.n_layer="],
    "rung resume bach/1 data.augmentation": [],
    "rung show ": ["bach", "chopin"],
    "rung show ch": ["chopin", "chopin/1"],
    "rung diff bach/1 bach/": ["bach/1", "bach/2"],
    "rung ab ba": ["bach", "bach/1", "bach/2"],
    "rung ab bach/1 model.n_h": ["model.n_head="],
    "rung ls b": ["bach"],
    "rung data pi": ["piano"],
    "rung data piano dataset.sus": ["dataset.sustain="],
    "rung data show ": ["hub/asap", "maestro"],
    "rung sweep show ": ["rates"],
}


@pytest.mark.parametrize("line", CASES)
def test_tab_offers_what_there_is(
    line: str, lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered(line, monkeypatch, capsys) == CASES[line]


@pytest.mark.parametrize("recipe", CATALOG)
def test_the_keys_that_are_offered_are_those_of_the_recipe(recipe: str) -> None:
    assert schema(recipe).keys == schema_of(recipe, find_recipe(recipe)).keys


def test_a_shell_completes_without_torch(lab: Path) -> None:
    """The script of `_RUNG_COMPLETE=bash_source` in bash itself, with a rung that cannot import torch."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    (lab / "torch.py").write_text("raise ImportError('torch is slow')")
    shim = lab / "bin/rung"
    shim.parent.mkdir()
    shim.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rung\n")
    shim.chmod(0o755)
    env = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{lab}:{ROOT}"}
    script = """
        compopt() { printf 'compopt %s %s\\n' "$@"; }
        eval "$(_RUNG_COMPLETE=bash_source rung)"
        COMP_WORDS=(rung train piano lr.learn) COMP_CWORD=3
        _rung_completion rung; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "--norc", "-c", script], env=env, cwd=lab, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["compopt -o nospace", "lr.learning_rate="], done.stderr


MEANT = {
    "train piano --lr 1e-3": "lr.learning_rate=1e-3",
    "train piano --lr=1e-3": "lr.learning_rate=1e-3",
    "train piano --learning-rate 1e-3": "lr.learning_rate=1e-3",
    "train piano --batch-size 8 --why x": "data.batch_size=8",
    "train piano --epochs 3": "optimizer.max_iters='3 epochs'",
    "train piano --preset small": "preset=small",
    "train bach/1 --n-layre 2": "model.n_layer=2",
    "train piano --experimnt x": "--experiment?",
    "train --from bach/1 seed=2": "it is now --parent",
    "ls --tre": "--tree?",
    "ls --lr 3": "`rung ls --help`",
}


@pytest.mark.parametrize("line", MEANT)
def test_an_unknown_option_is_answered_with_what_was_meant(
    line: str, lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rung", *line.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert MEANT[line] in said
    assert "[usage]" in said
