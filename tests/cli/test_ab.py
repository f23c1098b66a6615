"""If this fails, `rung ab` trains what is there already, starts with a mistake, forgets a run, or judges what it must
not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.cli.ab import _launcher
from rung.compare.decide import EXTRA, FIRST, UNPLANNED, AlphaSpending
from rung.compare.looks import FILE
from rung.errors import RunError, UserError
from rung.runs.process import this_process
from rung.runs.query import list_runs, open_run
from rung.runs.record import amend
from rung.sweep import launch, point, state
from rung.sweep.launch import ReportState
from rung.sweep.launch.local import LocalLauncher
from rung.sweep.plan import load, sweeps
from rung.sweep.space import Point, Sweep
from tests.compare.arms import arms, make
from tests.compare.test_gate import EDITS, git
from tests.compare.test_judge import CLOSE

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "system.device=cpu", "system.threads=1", "system.data_workers=0", "data.batch_size=4", "optimizer.max_iters=20",
    "lr.learning_rate=1e-2", "lr.warmup_iters=2", "eval_interval=2", "checkpoint.every=5", "checkpoint.best=false",
    "model.width=8", "model.layers=1", "num_rows=64", "num_eval=16", "signals.layers_every=0",
    "signals.activation_stats_every=0",
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
    done = CliRunner().invoke(cli, [*map(str, words)])
    if isinstance(done.exception, UserError):
        return 2, f"{done.exception} [{done.exception.code}]"
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
    assert ": BETTER" in output
    found = judged("case/1..3", "--", "case/4..6")
    assert (found["word"], found["num_pairs"]) == ("BETTER", 3)
    assert "lr.learning_rate" in found["factor"]
    assert not list(open_run("case/1", folder / "runs").events("judgement"))  # reading changes nothing


def with_second_metric(root: Path) -> None:
    """Each eval also has val/aux_loss, which moves as val/loss does."""
    for run in list_runs(root):
        events = run.path / "events.ndjson"
        events.write_text(re.sub(r'"loss":([0-9.]+)', r'"loss":\1,"aux_loss":\1', events.read_text()))


def test_judging_again_or_by_another_metric_is_counted(folder: Path) -> None:
    """The same runs show the same figure again; other runs or another metric give chance another try."""
    arms(folder / "runs", [*CLOSE, (1.02, 0.966), (0.98, 0.933)])
    with_second_metric(folder / "runs")
    three = ("case/1..3", "--", "case/6..8")
    first, again = judged(*three), judged(*three, "--delta", 0.5)
    assert (first["look"], first["metrics"], first["level"]) == (1, ["val/loss"], UNPLANNED.level(3))
    assert (again["look"], again["level"], again["low"]) == (1, first["level"], first["low"])

    other = judged(*three, "--metric", "val/aux_loss")
    assert (other["look"], other["metrics"], other["level"]) == (2, ["val/loss", "val/aux_loss"], EXTRA / 2)
    assert other["high"] - other["low"] > first["high"] - first["low"]
    assert ", look 2, 2 metrics" in other["words"]
    assert judged(*three, "--metric", "val/aux_loss")["level"] == EXTRA / 2

    more = judged("case/1..5", "--", "case/6..10")
    assert (more["look"], more["level"]) == (3, UNPLANNED.level(5))
    assert judged("case/1..4", "--", "case/6..9")["level"] == pytest.approx(
        EXTRA / 6
    )  # the second that was not foreseen
    assert judged("case/6..8", "--", "case/1..3")["look"] == 1  # the other way round is the same look
    assert judged("case/2..4", "--", "case/7..9")["look"] == 5  # other seeds of the same configs
    assert judged(*three)["level"] == first["level"]
    assert len((folder / "runs" / FILE).read_text().splitlines()) == 5


def test_metrics_of_one_call_share_the_level(folder: Path) -> None:
    arms(folder / "runs", CLOSE)
    with_second_metric(folder / "runs")
    words = ("case/1..3", "--", "case/4..6", "--metric", "val/loss", "--metric", "eval/val/aux_loss")
    found = judged(*words)
    assert found["metrics"] == ["val/loss", "val/aux_loss"]
    assert [(one["metric"], one["level"]) for one in found["variants"]] == [
        ("val/loss", UNPLANNED.level(3) / 2),
        ("val/aux_loss", UNPLANNED.level(3) / 2),
    ]
    code, output = ask("ab", "--judge", *words)
    text = " ".join(output.split())
    assert (code, text.count(": BETTER"), text.count("2 metrics")) == (0, 2, 2)
    # Who then names the one that came out well alone gets no narrower interval.
    assert judged(*words[:-2])["level"] == UNPLANNED.level(3) / 2
    assert ask("ab", "case/1", "--aa", "--metric", "a", "--metric", "b")[0] == 2


def test_a_verdict_that_cannot_be_kept_says_so(folder: Path) -> None:
    arms(folder / "runs", CLOSE)
    (folder / "runs" / FILE).mkdir()
    found = judged("case/1..3", "--", "case/4..6")
    assert found["word"] == "BETTER"
    assert any("could not be kept" in reason for reason in found["reasons"])
    (folder / "runs" / FILE).rmdir()
    (folder / "runs" / FILE).write_text('{"metric": 3}\nnonsense\n[]\n{"runs": 1, "configs": []}\n')
    assert judged("case/1..3", "--", "case/4..6")["look"] == 1  # damaged lines count nothing


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
    assert "BETTER" in output
    assert "WORSE" in output
    found, alone = judged(*words), judged(*words[:3])
    assert [one["word"] for one in found["variants"]] == ["BETTER", "WORSE"]
    assert found["variants"][0]["level"] == pytest.approx(alone["level"] / 2)
    assert found["variants"][0]["low"] < alone["low"]
    assert ask("ab", "--judge", "--check", *words)[0] == 1


def test_the_last_line_says_what_to_do(folder: Path) -> None:
    arms(folder / "runs", [(1.0, 0.99), (1.01, 1.03), (0.99, 0.97)])
    make(folder / "runs", 1, 0.5, key=0.2, config={"width": 8})
    for words in (["case/1..3", "--", "case/4..6"], ["case/1", "--", "case/7"]):
        assert judged(*words)["what_next"]
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
    found = judged("case/1..3", "--", "case/4..6")
    assert found["word"] == "CONFOUNDED"
    assert any(text.startswith("code: ") for text in found["confounders"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ab"], "[missing-run]"),
        (["ab", "case/1"], "[missing-change]"),
        (["ab", "case/9", "a=1"], "case/9"),
        (["ab", "--judge", "case/1"], "[missing-run]"),
        (["ab", "--judge", "case/1", "--"], "[missing-run]"),
        (["ab", "--judge", "case/1", "--", "--", "case/1"], "[missing-run]"),
        (["ab", "--judge", "case/1", "--", "case/9"], "case/9"),
        (["ab", "--judge", "case/1", "--", "case/1"], "case/1"),
        (["ab", "--judge", "case/3..1", "--", "case/1"], "[bad-range]"),
        (["ab", "case/1", "seed=4"], "--seeds"),
        (["ab", "case/1", "a=1", "--aa"], "[options-conflict]"),
        (["ab", "case/1", "a=1", "--delta", "inf"], "[bad-value]"),
    ],
)
def test_a_mistake_is_a_sentence(folder: Path, words: list[str], expected: str) -> None:
    make(folder / "runs")
    code, output = ask(*words)
    assert (code, expected in output) == (2, True), output
    assert len(list_runs(folder / "runs")) == 1


def test_a_base_of_a_loop_of_its_own_cannot_be_trained(folder: Path) -> None:
    make(folder / "runs", recipe="own loop")
    code, output = ask("ab", "case/1", "lr.learning_rate=1")
    assert (code, "--judge" in output, "[not-supported]" in output) == (2, True, True), output


def test_text_of_users_steers_no_terminal(folder: Path) -> None:
    make(folder / "runs", 1, config={"name": "a\x1b[31m"})
    make(folder / "runs", 1, config={"name": "b\x1b[2J", "more": 1})
    _, output = ask("ab", "--judge", "case/1", "--", "case/2")
    assert "CONFOUNDED" in output
    assert "\x1b" not in output


def own_pairs(root: Path, *planned: int | None) -> None:
    """One pair of runs of a loop of one's own per number that it declares; odd runs are A, even ones B."""
    import rung

    code = root.parent / "code"
    code.mkdir(exist_ok=True)
    (code / "model.py").touch()
    for seed, number in enumerate(planned, 1):
        for lr in (0.1, 0.2):
            run = rung.init("own", {"lr": lr, "steps": 40}, seed=seed, runs=root, code=code, planned_seeds=number)
            for step in range(40):
                loss = 3 / (1 + step) + (0.1 + seed / 900 if lr == 0.2 else seed / 1000)
                run.log({"loss": loss, "val/loss": loss} if step % 5 == 4 else {"loss": loss}, step=step)
            run.finish()


def level_of(root: Path, *planned: int | None) -> float:
    """The error that the judge allows itself on these pairs."""
    own_pairs(root, *planned)
    numbers = range(1, 2 * len(planned), 2)
    words = [f"own/{n}" for n in numbers], [f"own/{n + 1}" for n in numbers]
    found = judged(*words[0], "--", *words[1], "--metric", "val/loss", "--runs", root)
    assert found["num_pairs"] == len(planned)
    return float(found["level"])


def test_a_loop_of_ones_own_can_declare_how_many_seeds_are_planned(folder: Path) -> None:
    assert level_of(folder / "planned", 3, 3, 3) == FIRST
    assert open_run("own/1", folder / "planned").document["planned_seeds"] == 3
    assert level_of(folder / "unplanned", None, None, None) == UNPLANNED.level(3)
    assert "planned_seeds" not in open_run("own/1", folder / "unplanned").document


def test_a_plan_that_was_made_up_later_is_none(folder: Path) -> None:
    """The first look is where the plan says; before and after it, and where not all runs had it, is elsewhere."""
    assert level_of(folder / "early", 5, 5, 5) == AlphaSpending(5).level(3) < UNPLANNED.level(3)
    assert level_of(folder / "more", 3, 3, 3, 4) == AlphaSpending(3).level(4) < UNPLANNED.level(4)
    assert level_of(folder / "late", None, 3, 3) == UNPLANNED.level(3)


@pytest.mark.parametrize("planned", [0, -3, 2.5, "3", True])
def test_a_plan_is_a_number_of_seeds(folder: Path, planned: Any) -> None:
    import rung

    with pytest.raises(UserError, match="planned_seeds"):
        rung.init("own", runs=folder / "runs", planned_seeds=planned)
    assert not list_runs(folder / "runs")


# Training.


@pytest.fixture(scope="module")
def trained_apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, in a process of its own."""
    place = tmp_path_factory.mktemp("base")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "rung", "train", "tests.cases.tiny:Tiny", *TINY, "--experiment", "tiny"]
    subprocess.run([*words, "--no-check"], cwd=place, env=env, check=True, capture_output=True)
    return place / "runs"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base run, trained once, in a folder without any code; in this process, whose code its variants execute too."""
    place = tmp_path_factory.mktemp("base")
    with contextlib.chdir(place):
        code, output = ask("train", "tests.cases.tiny:Tiny", *TINY, "--experiment", "tiny", "--no-check")
    assert code == 0, output
    return place / "runs"


class InProcess:
    """A launcher that trains in this process, point by point, which saves the seconds of importing torch."""

    def run(self, sweep: Sweep, points: Sequence[Point], told: ReportState) -> None:
        for one in points:
            if not state.is_asked_to_stop(sweep):
                told(one.key, "running", "here")
                ended = point.run_point(sweep.folder, one.key)
                told(one.key, ended.outcome, ended.text)


def in_process(command: Sequence[str], log: Path, *_: object) -> int:
    """In place of point.follow."""
    code, output = ask(*command[3:])
    log.parent.mkdir(exist_ok=True)
    log.write_text(output)
    return code


@pytest.fixture
def tiny(folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base in a folder of its own."""
    monkeypatch.setattr(launch, "launcher_of", lambda *_: InProcess())
    monkeypatch.setattr(point, "follow", in_process)
    shutil.copytree(trained, folder / "runs")
    return folder / "runs"


def test_mistakes_are_told_before_anything_is_trained(tiny: Path, folder: Path) -> None:
    def refused(*words: str) -> str:
        code, output = ask("ab", "tiny/1", *words)
        assert code == 2, output
        assert len(list_runs(tiny)) == 1
        return output

    assert "optimizer.beta2" in refused("optimizer.beta3=0.9")
    assert "[no-change]" in refused("optimizer.beta1=0.9")
    assert "[too-many-changes]" in refused("optimizer.beta1=0.8", "optimizer.beta2=0.8")
    assert "[budget-mismatch]" in refused("optimizer.max_iters=40")
    message = refused("optimizer.gradient_accumulation_steps=2")
    assert "[budget-mismatch]" in message
    assert "tokens'" in message  # the budget to train a new base with
    assert "lr.lr_decay_iters" in refused("lr.lr_decay_iters=40")


def planned(*change: object) -> list[tuple[str, int, str | None]]:
    """Arm, seed and run of each place, in order."""
    done = CliRunner().invoke(cli, [*map(str, change), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    points = json.loads(done.stdout)["points"]
    return [(one["varies"]["arm"], one["varies"]["seed"], one["run"]) for one in points]


def test_a_dry_run_trains_nothing_and_says_what_it_would(tiny: Path, folder: Path) -> None:
    assert ask("ab", "tiny/1", "optimizer.beta2=0.8", "--dry-run")[0] == 0
    assert len(list_runs(folder / "runs")) == 1
    assert not sweeps(tiny)
    plan = planned("ab", "tiny/1", "optimizer.beta2=0.8")
    assert plan[:3] == [("control", 1337, "tiny/1"), ("variant", 1337, None), ("control", 1338, None)]
    assert len(plan) == 6


def test_an_ab_trains_pairs_once_and_goes_on_where_it_was(tiny: Path, folder: Path) -> None:
    change = ("ab", "tiny/1", "optimizer.beta2=0.8")
    code, output = ask(*change, "--seeds", 2, "--why", "less memory")
    assert code == 0, output
    made = [open_run(f"tiny/{n}", tiny) for n in (2, 3, 4)]
    assert [run.document["ab"]["arm"] for run in made] == ["variant", "control", "variant"]
    assert {run.document["why"] for run in made} == {"less memory"}
    assert {run.document["parent"] for run in made} == {"tiny/1"}

    # A run that was stopped is gone on with; what has ended is not trained again.
    amend(made[2].path, status="stopped", ab=None)
    shutil.rmtree(made[2].path / "checkpoints" / "00000020")
    assert planned(*change, "--seeds", 2)[-1] == ("variant", 1338, "tiny/4")
    ask(*change, "--seeds", 2)
    assert len(list_runs(tiny)) == 4
    assert open_run("tiny/4", tiny).status == "finished"
    assert open_run("tiny/4", tiny).document["ab"]["arm"] == "variant"

    # More seeds: the third pair is trained, and the judgements stand beside the base.
    ask(*change, "--seeds", 3)
    assert len(list_runs(tiny)) == 6
    told = list(open_run("tiny/1", tiny).events("judgement"))
    assert [event["num_pairs"] for event in told] == [2, 2, 3]
    assert told[-1]["a"] == ["tiny/1", "tiny/3", "tiny/5"]
    assert told[-1]["level"] == FIRST  # the first look at three pairs, planned

    # The same runs, judged by hand, with no plan behind them.
    by_hand = judged("tiny/1", "tiny/3", "tiny/5", "--", "tiny/2", "tiny/4", "tiny/6")
    assert by_hand["effect"] == told[-1]["effect"]
    assert by_hand["level"] < told[-1]["level"]

    # Edited code: nothing that is there fits, and nothing is mixed.
    (folder / "helper.py").write_text("x = 1\n")
    assert {run for _, _, run in planned(*change)} == {None}


def test_an_aa_makes_the_floor_that_one_pair_is_judged_by(tiny: Path, folder: Path) -> None:
    ask("train", "--parent", "tiny/1", "lr.learning_rate=1e-4", "--no-check")
    assert judged("tiny/1", "--", "tiny/2")["word"] == "UNDECIDED"
    assert "val/loss" in ask("ab", "tiny/1", "--aa")[1]
    assert len(list_runs(tiny)) == 4
    assert judged("tiny/1", "--", "tiny/2")["floor"]["num_runs"] == 3


@pytest.mark.slow
def test_in_processes_of_their_own_the_judgement_is_all_that_is_printed_as_json(
    folder: Path, trained_apart: Path, rung: Rung
) -> None:
    shutil.copytree(trained_apart, folder / "runs")
    done = rung("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 1, "--json")
    assert json.loads(done.stdout)["b_runs"] == ["tiny/2"]


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
    assert "raise RuntimeError('no more')" in done.stderr  # the end of what the training printed
    assert re.search(r"variant .*1337.*\[training-failed\]", done.stderr.splitlines()[-1])


def test_what_failed_stops_the_rest_and_is_tried_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failure nothing else is started; the same command goes on, and trains nothing twice."""
    starts: list[str] = []

    def follow(command: Sequence[str], log: Path, *rest: object) -> int:
        starts.append(command[3])
        if len(starts) == 2:
            log.parent.mkdir(exist_ok=True)
            log.write_text("\n" * 99 + "a\x1b[2Jb\n")
            return 1
        return in_process(command, log, *rest)

    monkeypatch.setattr(point, "follow", follow)
    change = ("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 3)
    done = CliRunner().invoke(cli, [*map(str, change)])
    assert isinstance(done.exception, RunError)
    assert done.exception.code == "training-failed"
    assert "control" in str(done.exception)
    assert "1338" in str(done.exception)
    shown = done.stderr.splitlines()
    assert (shown[-1], len(shown)) == ("a␛[2Jb", 30)  # the end of what it printed, without what a terminal obeys
    assert len(starts) == 2
    assert [run.document["ab"]["arm"] for run in list_runs(tiny)[1:]] == ["variant"]
    assert not list(open_run("tiny/1", tiny).events("judgement"))
    assert ask(*change)[0] == 0
    assert starts == ["train"] * 6
    assert len(list_runs(tiny)) == 6


def test_what_was_begun_or_ended_elsewhere_serves(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped run that equals what would be trained is resumed, and one that diverged is an answer."""
    for seed in (1338, 1339):
        ask("train", "--parent", "tiny/1", f"seed={seed}", "--no-check")
    stopped, diverged = (open_run(f"tiny/{n}", tiny).path for n in (2, 3))
    amend(stopped, status="stopped")
    shutil.rmtree(stopped / "checkpoints" / "00000020")
    amend(diverged, status="diverged")
    code, output = ask("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 3, "--json")
    assert code == 0, output
    assert len(list_runs(tiny)) == 6  # three variants are new
    assert open_run("tiny/2", tiny).status == "finished"
    assert "ab" not in open_run("tiny/2", tiny).document
    assert open_run("tiny/3", tiny).status == "diverged"
    (folder,) = sweeps(tiny)
    sweep = load(folder)
    assert [(one.varies["seed"], one.varies["arm"]) for one in sweep.points] == [
        (seed, arm) for seed in (1337, 1338, 1339) for arm in ("control", "variant")
    ]
    assert [one.run for one in sweep.points] == ["tiny/1", None, "tiny/2", None, "tiny/3", None]
    words = [one.word for one in state.states(sweep).values()]
    assert words == ["finished", "finished", "finished", "finished", "failed", "finished"]

    # A variant that diverged is not trained again either; a run that goes on is waited for by nobody.
    amend(open_run("tiny/4", tiny).path, status="diverged")
    assert ask("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 3)[0] == 0
    assert len(list_runs(tiny)) == 6
    amend(stopped, status="running", process=this_process())
    code, output = ask("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 3)
    assert (code, "tiny/2" in output, "[wrong-state]" in output) == (2, True, True), output


def test_an_edit_as_the_change_leaves_runs_of_the_old_code_alone(tiny: Path, folder: Path) -> None:
    """The old code cannot be had here: a control that was stopped is not gone on with, and none is trained."""
    ask("train", "--parent", "tiny/1", "seed=1338", "--no-check")
    stopped = open_run("tiny/2", tiny).path
    amend(stopped, status="stopped")
    shutil.rmtree(stopped / "checkpoints" / "00000020")
    (folder / "helper.py").write_text("x = 1\n")
    code, output = ask("ab", "tiny/1", "--declare", "code", "--seeds", 2)
    assert code == 0, output
    assert open_run("tiny/2", tiny).status == "stopped"
    assert [run.document["ab"]["arm"] for run in list_runs(tiny)[2:]] == ["variant", "variant"]
    (told,) = open_run("tiny/1", tiny).events("judgement")
    assert (told["a"], told["b"], told["num_pairs"]) == (["tiny/1"], ["tiny/3", "tiny/4"], 1)


def test_what_was_trained_after_an_edit_does_not_count(tiny: Path) -> None:
    """Somebody edits a file while an A/B trains, and takes it back: what was trained meanwhile is trained again."""
    change = ("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 1, "--json")
    assert ask(*change)[0] == 0
    spoiled = open_run("tiny/2", tiny)
    amend(spoiled.path, code={**spoiled.document["code"], "sha256": "another", "tree": "another"})
    assert ask(*change)[0] == 0
    assert ask(*change)[0] == 0
    assert [run.id for run in list_runs(tiny)] == ["tiny/1", "tiny/2", "tiny/3"]
    assert [event["b"] for event in open_run("tiny/1", tiny).events("judgement")] == [
        ["tiny/2"],
        ["tiny/3"],
        ["tiny/3"],
    ]


def test_a_sweep_that_is_told_to_stop_leaves_nothing_judged(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rung sweep stop` in another terminal, while the first point trains."""

    def follow(command: Sequence[str], *rest: Any) -> int:
        (name,) = (path.name for path in sweeps(tiny))
        assert ask("sweep", "stop", name)[0] == 0
        return in_process(command, *rest)

    monkeypatch.setattr(point, "follow", follow)
    monkeypatch.setattr(state, "signal_here", lambda claim: False)  # that would be this process
    change = ("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 2)
    assert ask(*change)[0] == 3
    assert len(list_runs(tiny)) == 2
    assert not list(open_run("tiny/1", tiny).events("judgement"))
    monkeypatch.setattr(point, "follow", in_process)
    assert ask(*change)[0] == 0
    assert len(list_runs(tiny)) == 4


def test_verbose_shows_what_a_training_printed(tiny: Path) -> None:
    change = ("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 1)
    assert "step 19" not in ask(*change)[1]
    assert "step 19" in ask("ab", "tiny/1", "optimizer.beta2=0.7", "--seeds", 1, "--verbose")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--on", "moon"], "[bad-launcher]"),
        (["--launch", "slotz=2"], "[no-key]"),
        (["--launch", "gpus=2"], "[bad-value]"),
        (["--launch", "slots=0"], "[bad-value]"),
    ],
)
def test_a_place_that_cannot_be_is_a_mistake(folder: Path, trained_apart: Path, words: list[str], says: str) -> None:
    shutil.copytree(trained_apart, folder / "runs")
    code, output = ask("ab", "tiny/1", "optimizer.beta2=0.8", *words, "--dry-run")
    assert (code, says in output) == (2, True), output


def test_slots_leave_the_number_of_threads_alone(folder: Path) -> None:
    """It moves the last digits of a loss, and the base had what the shell gives; unless somebody asks for another."""
    where = folder / "runs"

    def env(**launch: Any) -> list[dict[str, str]]:
        made = _launcher(Sweep("ab", where / ".sweeps/ab", where, "toy", "toy", (), launch=launch), None)
        assert isinstance(made, LocalLauncher)
        return [slot.env for slot in made.slots]

    assert env(slots=2) == [{}, {}]
    assert env(slots=1, gpus=[0, 1]) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert env(slots=1, threads=3) == [{"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}]


def test_two_at_once_give_the_same_runs_and_the_same_verdict(tiny: Path, trained_apart: Path, rung: Rung) -> None:
    """In this process one after the other; in processes of their own two at a time."""

    def curves() -> dict[tuple[str, int], list[float]]:
        found = {}
        for run in list_runs(tiny)[1:]:
            evals = [event["results"]["val"]["loss"] for event in run.events("eval")]
            found[run.document["ab"]["arm"], run.document["seed"]] = evals
        return found

    change = ("ab", "tiny/1", "optimizer.beta2=0.8", "--seeds", 2, "--json")
    told = [json.loads(CliRunner().invoke(cli, [*map(str, change)]).stdout)]
    one_by_one = curves()
    shutil.rmtree(tiny)
    shutil.copytree(trained_apart, tiny)
    told.append(json.loads(rung(*change, "--slots", 2).stdout))
    assert sorted(one_by_one) == [("control", 1338), ("variant", 1337), ("variant", 1338)]
    assert curves() == one_by_one
    for name in ("word", "effect", "num_pairs", "factor", "delta"):
        assert told[0][name] == told[1][name]
    values = [[(pair["seed"], pair["value_a"], pair["value_b"]) for pair in one["pairs"]] for one in told]
    assert values[0] == values[1]


HASTY = """
import os, signal, time
from pathlib import Path
from tests.cases.tiny import Tiny

def interrupt(*_):
    # Once, after a save: sends Ctrl-C to the process above the one above this, and waits until it comes back.
    if not list(Path("runs").glob("hasty/[2-9]/checkpoints/00000005")):
        return
    try:
        os.unlink("runs/.interrupt")
    except FileNotFoundError:
        return
    told, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: (told.append(1), before(*args)))
    above = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(above), signal.SIGINT)
    while not told:
        time.sleep(0.01)

class Hasty(Tiny):
    def model(self):
        model = super().model()
        model.register_forward_pre_hook(interrupt)
        return model
"""


def test_after_ctrl_c_the_same_command_goes_on(folder: Path, rung: Rung) -> None:
    (folder / "hasty.py").write_text(HASTY)
    rung("train", "hasty:Hasty", *TINY, "--experiment", "hasty", "--no-check")
    (folder / "runs" / ".interrupt").touch()
    change = ("ab", "hasty/1", "optimizer.beta2=0.8", "--seeds", 2, "--slots", 2)
    done = rung(*change, check=False)
    assert done.returncode == 130, done.stderr
    begun = list_runs(folder / "runs")
    assert "stopped" in [run.status for run in begun]
    assert len(begun) in (2, 3)  # the other one may not have begun to train
    assert not list(begun[0].events("judgement"))
    rung(*change)
    runs = list_runs(folder / "runs")
    assert [run.status for run in runs] == ["finished"] * 4
    of = [(run.document["ab"]["arm"], run.document["seed"]) for run in runs[1:]]
    assert sorted(of) == [("control", 1338), ("variant", 1337), ("variant", 1338)]
    assert [event["num_pairs"] for event in runs[0].events("judgement")] == [2]


def test_importing_the_verb_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = "import sys, rung.cli.ab; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip() == "[]"
