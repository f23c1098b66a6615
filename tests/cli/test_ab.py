"""If this fails, `rung ab` trains what is there already, starts with a mistake, forgets a run, or judges what it must
not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rung.cli import cli, trial
from rung.runs.query import list_runs, open_run
from rung.runs.record import amend
from tests.compare.arms import arms, make
from tests.compare.test_gate import EDITS, git
from tests.compare.test_judge import CLOSE

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "system.device=cpu", "system.threads=1", "system.data_workers=0", "data.batch_size=4", "optimizer.max_iters=20",
    "lr.learning_rate=1e-2", "lr.warmup_iters=2", "eval_interval=2", "checkpoint.every=5", "checkpoint.best=false",
    "model.width=8", "model.layers=1", "num_rows=64", "num_eval=16", "signals.layers_every=0", "signals.look_every=0",
)  # fmt: skip

Rung = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def ask(*words: object) -> tuple[int, str]:
    """rung in this process; what is trained has processes of its own all the same."""
    from rung.errors import UserError

    done = CliRunner().invoke(cli, [*map(str, words)])
    if isinstance(done.exception, UserError):
        return 2, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def judged(*words: object) -> dict[str, Any]:
    code, output = ask("ab", "--judge", "--json", *words)
    assert code == 0, output
    found: dict[str, Any] = json.loads(output)
    return found


# Judging runs that exist.


def test_runs_are_judged_and_the_words_are_printed(folder: Path) -> None:
    arms(folder / "runs", CLOSE)
    code, output = ask("ab", "--judge", "case/1..3", "--", "case/4", "case/5..6")
    assert code == 0
    assert "(3 pairs, corr 1.00): BETTER" in output
    assert "lr.learning_rate 0.1 -> 0.2" in output
    assert judged("case/1..3", "--", "case/4..6")["word"] == "BETTER"
    assert not list(open_run("case/1", folder / "runs").events("judgement"))  # reading changes nothing


def test_check_is_for_scripts(folder: Path) -> None:
    arms(folder / "runs", CLOSE)
    assert ask("ab", "--judge", "--check", "case/1..3", "--", "case/4..6")[0] == 0
    assert ask("ab", "--judge", "--check", "case/4..6", "--", "case/1..3")[0] == 1
    assert ask("ab", "--judge", "case/4..6", "--", "case/1..3")[0] == 0


def test_several_variants_are_judged_against_one_control(folder: Path) -> None:
    arms(folder / "runs", CLOSE)
    for seed in (1, 2, 3):
        make(folder / "runs", seed, 1.5 + seed / 900, key=0.3)
    words = ("case/1..3", "--", "case/4..6", "--", "case/7..9")
    code, output = ask("ab", "--judge", *words)
    assert code == 0
    assert output.count("B\N{MINUS SIGN}A = ") == 2
    assert "BETTER" in output
    assert "WORSE" in output
    assert "noise: sd over seeds" in output
    found, alone = judged(*words), judged(*words[:3])
    assert [one["word"] for one in found["variants"]] == ["BETTER", "WORSE"]
    assert found["variants"][0]["level"] == pytest.approx(alone["level"] / 2)
    assert found["variants"][0]["low"] < alone["low"]
    assert ask("ab", "--judge", "--check", *words)[0] == 1


def test_the_last_line_says_what_to_do(folder: Path) -> None:
    arms(folder / "runs", [(1.0, 0.99), (1.01, 1.03), (0.99, 0.97)])
    make(folder / "runs", 1, 0.5, key=0.2, config={"width": 8})
    for words in (["case/1..3", "--", "case/4..6"], ["case/1", "--", "case/7"]):
        assert ask("ab", "--judge", *words)[1].splitlines()[-1].startswith("next ")
    assert "--allow width" in ask("ab", "--judge", "case/1", "--", "case/7")[1].splitlines()[-1]


@pytest.mark.parametrize("edit", EDITS)
def test_a_forgotten_edit_is_confounded(folder: Path, edit: str) -> None:
    """The one that costs people days: uncommitted, or in a file that git does not know yet."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "model.py").write_text("depth = 4\n")
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "first")
    runs = folder / "runs"
    for seed in (1, 2, 3):
        make(runs, seed, 1 + seed / 1000, code_root=repository)
    EDITS[edit](repository)
    for seed in (1, 2, 3):
        make(runs, seed, 0.9 + seed / 900, key=0.2, code_root=repository)
    code, output = ask("ab", "--judge", "case/1..3", "--", "case/4..6")
    assert code == 0
    assert "CONFOUNDED" in output
    assert "code: " in output
    assert "BETTER" not in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ab"], "which run is the base"),
        (["ab", "case/1"], "what is the change"),
        (["ab", "case/9", "a=1"], "there is no case/9"),
        (["ab", "--judge", "case/1"], "which runs are to be judged"),
        (["ab", "--judge", "case/1", "--"], "which runs are to be judged"),
        (["ab", "--judge", "case/1", "--", "--", "case/1"], "which runs are to be judged"),
        (["ab", "--judge", "case/1", "--", "case/9"], "there is no case/9"),
        (["ab", "--judge", "case/1", "--", "case/1"], "both arms"),
        (["ab", "--judge", "case/3..1", "--", "case/1"], "smaller number first"),
        (["ab", "case/1", "seed=4"], "--seeds"),
        (["ab", "case/1", "a=1", "--aa"], "leave out"),
    ],
)
def test_a_mistake_is_a_sentence(folder: Path, words: list[str], says: str) -> None:
    make(folder / "runs")
    code, output = ask(*words)
    assert (code, says in output) == (2, True), output
    assert len(list_runs(folder / "runs")) == 1


def test_a_base_of_a_loop_of_its_own_cannot_be_trained(folder: Path) -> None:
    make(folder / "runs", recipe="own loop")
    code, output = ask("ab", "case/1", "lr.learning_rate=1")
    assert (code, "--judge" in output) == (2, True), output


def test_text_of_users_steers_no_terminal(folder: Path) -> None:
    make(folder / "runs", 1, config={"name": "a\x1b[31m"})
    make(folder / "runs", 1, config={"name": "b\x1b[2J", "more": 1})
    _, output = ask("ab", "--judge", "case/1", "--", "case/2")
    assert "CONFOUNDED" in output
    assert "\x1b" not in output


# Training.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base run, trained once, in a folder without any code."""
    place = tmp_path_factory.mktemp("base")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "rung", "train", "tests.cases.tiny:Tiny", *TINY, "--experiment", "tiny"]
    subprocess.run([*words, "--no-check"], cwd=place, env=env, check=True, capture_output=True)
    return place / "runs"


@pytest.fixture
def tiny(folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base in a folder of its own; trainings run in this process, which saves the seconds of importing torch."""
    monkeypatch.setattr(trial, "follow", lambda command, *_: ask(*command[3:])[0])
    shutil.copytree(trained, folder / "runs")
    return folder / "runs"


def test_mistakes_are_told_before_anything_is_trained(tiny: Path, folder: Path) -> None:
    def refused(*words: str) -> str:
        code, output = ask("ab", "tiny/1", *words)
        assert code == 2, output
        assert len(list_runs(tiny)) == 1
        return output

    assert "did you mean optimizer.beta2" in refused("optimizer.beta3=0.9")
    assert "changes nothing" in refused("optimizer.beta1=0.9")
    assert "2 changes" in refused("optimizer.beta1=0.8", "optimizer.beta2=0.8")
    assert "budget" in refused("optimizer.max_iters=40")
    words = refused("optimizer.gradient_accumulation_steps=2")
    assert "moves the budget" in words
    assert "tokens" in words
    assert "end of the schedule" in refused("lr.lr_decay_iters=40")


def test_a_dry_run_trains_nothing_and_says_what_it_would(tiny: Path, folder: Path) -> None:
    code, output = ask("ab", "tiny/1", "optimizer.beta2=0.8", "--dry-run")
    assert code == 0
    assert "tiny/1 is there" in output
    assert output.count("to train") == 6  # five runs, and the sum
    assert len(list_runs(folder / "runs")) == 1


def test_an_ab_trains_pairs_once_and_goes_on_where_it_was(tiny: Path, folder: Path) -> None:
    change = ("ab", "tiny/1", "optimizer.beta2=0.8")
    code, output = ask(*change, "--seeds", 2, "--why", "less memory")
    assert (code, "optimizer.beta2 0.95 -> 0.8" in output) == (0, True), output
    made = [open_run(f"tiny/{n}", tiny) for n in (2, 3, 4)]
    assert [run.document["ab"]["arm"] for run in made] == ["variant", "control", "variant"]
    assert {run.document["why"] for run in made} == {"less memory"}
    assert {run.document["parent"] for run in made} == {"tiny/1"}

    # A run that was stopped is gone on with; what has ended is not trained again.
    amend(made[2].path, status="stopped", ab=None)
    shutil.rmtree(made[2].path / "checkpoints" / "00000020")
    code, output = ask(*change, "--seeds", 2)
    assert "goes on with tiny/4" in output
    assert len(list_runs(tiny)) == 4
    assert open_run("tiny/4", tiny).status == "finished"
    assert open_run("tiny/4", tiny).document["ab"]["arm"] == "variant"

    # More seeds: the third pair is trained, and the judgements stand beside the base.
    ask(*change, "--seeds", 3)
    assert len(list_runs(tiny)) == 6
    told = list(open_run("tiny/1", tiny).events("judgement"))
    assert [event["num_pairs"] for event in told] == [2, 2, 3]
    assert told[-1]["a"] == ["tiny/1", "tiny/3", "tiny/5"]
    assert told[-1]["level"] == pytest.approx(0.03)  # the first look at three pairs, planned

    # The same runs, judged by hand, with no plan behind them.
    by_hand = judged("tiny/1", "tiny/3", "tiny/5", "--", "tiny/2", "tiny/4", "tiny/6")
    assert by_hand["effect"] == told[-1]["effect"]
    assert by_hand["level"] < told[-1]["level"]

    # Edited code: nothing that is there fits, and nothing is mixed.
    (folder / "helper.py").write_text("x = 1\n")
    assert "is there" not in ask(*change, "--dry-run")[1]


def test_an_aa_makes_the_floor_that_one_pair_is_judged_by(tiny: Path, folder: Path) -> None:
    ask("train", "--from", "tiny/1", "lr.learning_rate=1e-4", "--no-check")
    assert judged("tiny/1", "--", "tiny/2")["word"] == "UNDECIDED"
    assert "noise floor of val/loss" in ask("ab", "tiny/1", "--aa")[1]
    assert len(list_runs(tiny)) == 4
    assert judged("tiny/1", "--", "tiny/2")["floor"]["num_runs"] == 3


@pytest.mark.slow
def test_in_processes_of_their_own_the_judgement_is_all_that_is_printed_as_json(
    folder: Path, trained: Path, rung: Rung
) -> None:
    shutil.copytree(trained, folder / "runs")
    done = rung("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 1, "--json")
    assert json.loads(done.stdout)["b_runs"] == ["tiny/2"]
    assert "to train" in done.stderr


def test_a_training_that_fails_ends_with_a_sentence(folder: Path, rung: Rung) -> None:
    """The recipe breaks in every training after the first: the message names the arm and the seed."""
    (folder / "fragile.py").write_text(
        "from pathlib import Path\n"
        "from tests.cases.tiny import Tiny\n"
        "class Fragile(Tiny):\n"
        "    def model(self):\n"
        "        if Path('broken').exists():\n"
        "            raise RuntimeError('no more')\n"
        "        return super().model()\n"
    )
    rung("train", "fragile:Fragile", *TINY, "--experiment", "fragile", "--no-check")
    (folder / "broken").touch()
    done = rung("ab", "fragile/1", "optimizer.beta2=0.8", check=False)
    assert done.returncode == 2
    assert "no more" in done.stderr  # what the training said last
    assert "the variant with seed 1337 ended with" in done.stderr.splitlines()[-1]


def test_importing_the_verb_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = "import sys, rung.cli.ab; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip() == "[]"


def test_ctrl_c_reaches_the_training_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child interrupts us, saves, and ends as one that was stopped: we are still there to see it."""
    child = "import os, signal; os.kill(os.getppid(), signal.SIGINT); raise SystemExit(130)"
    before = signal.getsignal(signal.SIGINT)
    assert trial.follow([sys.executable, "-c", child], is_quiet=False) == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("is_verbose", [False, True])
def test_the_output_of_a_training_is_shown_when_asked_for(capfd: pytest.CaptureFixture[str], is_verbose: bool) -> None:
    child = "print('step 1'); print('step 2')"
    assert trial.follow([sys.executable, "-c", child], False, is_verbose) == 0
    assert capfd.readouterr().out.split() == (["step", "1", "step", "2"] if is_verbose else [])


def test_of_a_training_that_fails_the_end_is_shown_without_what_a_terminal_obeys(
    capfd: pytest.CaptureFixture[str],
) -> None:
    child = "print('\\n' * 99 + 'a\\x1b[2Jb'); raise SystemExit(3)"
    assert trial.follow([sys.executable, "-c", child], is_quiet=False) == 3
    said = capfd.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", "a␛[2Jb")
    assert len(said.err.splitlines()) <= 30


def test_after_ctrl_c_nothing_is_judged(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "follow", lambda *_: 130)
    code, output = ask("ab", "tiny/1", "optimizer.beta2=0.8")
    assert code == 130
    assert "the same command goes on" in output
    assert not list(open_run("tiny/1", tiny).events("judgement"))
