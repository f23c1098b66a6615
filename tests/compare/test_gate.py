"""If this fails, a verdict is given where none is due: two changes, another metric, a run that broke."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.compare.gate import Gate
from rung.compare.judge import Judgement, judge
from rung.errors import RunError
from rung.runs.files import from_json, to_json
from rung.runs.query import Run, open_run
from rung.runs.record import amend
from tests.compare.arms import DEFINITIONS, arms, curve, make
from tests.errors import raises_code

CLOSE = [(1.0, 0.95), (1.01, 0.957), (0.99, 0.941)]  # about 0.05 better, and steadily


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_two_changes_are_confounded_and_both_named(root: Path) -> None:
    a = [make(root, seed) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.5 + seed / 100, key=0.2, config={"width": 8}) for seed in (1, 2, 3)]
    found = judge(a, b)
    assert found.word == "CONFOUNDED"
    assert {"lr.learning_rate", "width"} <= {one.split()[1] for one in found.confounders}
    assert math.isnan(found.effect)
    assert judge(a, b, allowed=["width"]).word == "BETTER"


@pytest.mark.parametrize(
    "more",
    [
        {"num_steps": 200, "every": 20},  # another horizon
        {"rows": 8},  # other targets in all
        {"data": {"train": {"fingerprint": "other/1"}, "val": {"fingerprint": "chain/val"}}},
    ],
    ids=["horizon", "targets", "data"],
)
def test_hidden_differences_are_confounded(root: Path, more: dict[str, Any]) -> None:
    a = [make(root, seed) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.5 + seed / 100, key=0.2, **more) for seed in (1, 2, 3)]
    found = judge(a, b)
    assert found.word == "CONFOUNDED"
    assert found.confounders


def test_larger_steps_over_equal_targets_are_one_change(root: Path) -> None:
    """Evals at equal targets: those of the variant come at other steps."""
    a = [make(root, seed, 1 + seed / 1000, rows=4, num_steps=100, every=10) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.9 + seed / 900, key=0.2, rows=8, num_steps=50, every=5) for seed in (1, 2, 3)]
    found = judge(a, b)
    assert (found.word, found.confounders) == ("BETTER", [])
    assert found.effect == pytest.approx(-0.1, abs=1e-3)


def test_inside_an_arm_only_the_seed_may_differ(root: Path) -> None:
    a, b = arms(root, CLOSE)
    found = judge([*a, make(root, 4, key=0.15)], b)
    assert found.word == "CONFOUNDED"
    assert any("0.15" in one for one in found.confounders)


def test_another_meaning_of_the_metric_is_incomparable(root: Path) -> None:
    a, b = arms(root, CLOSE)
    odd = [make(root, 1, 0.5, key=0.2, definitions={"eval/val": {"eval set": "chain/val", "mask": "no specials"}})]
    found = judge(a, odd)
    assert found.word == "INCOMPARABLE"
    assert "no specials" in found.reasons[0]
    assert judge(a, b).word == "BETTER"


def test_a_metric_with_a_definition_of_its_own_is_judged_by_that(root: Path) -> None:
    """A part of the loss that no mask changes, under two masks."""
    masks = [{"eval set": "chain/val", "mask": mask} for mask in ("none", "no specials")]
    own = {"eval set": "chain/val", "counts": "every code"}
    known = [{"eval/val": mask, "eval/val/loss": own} for mask in masks]
    a = [make(root, seed, 1 + seed / 1000, definitions=known[0]) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.5 + seed / 999, key=0.2, definitions=known[1]) for seed in (1, 2, 3)]
    assert judge(a, b, metric="val/loss").word == "BETTER"
    other = {"eval/val": masks[0], "eval/val/loss": {**own, "counts": "another"}}
    b = [make(root, seed, 0.5 + seed / 999, key=0.2, definitions=other) for seed in (1, 2, 3)]
    assert judge(a, b, metric="val/loss").word == "INCOMPARABLE"
    # Only which way is better: what is counted is left to the eval set.
    for_a, for_b = ({"eval/val": mask, "eval/val/loss": {"better": "lower"}} for mask in masks)
    a = [make(root, seed, 1 + seed / 1000, definitions=for_a) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.5 + seed / 999, key=0.2, definitions=for_b) for seed in (1, 2, 3)]
    assert judge(a, b, metric="val/loss").word == "INCOMPARABLE"


def test_no_shared_step_and_no_metric_are_incomparable(root: Path) -> None:
    a = [make(root, 1, every=10)]
    assert judge(a, [make(root, 1, key=0.2, losses=[])]).word == "INCOMPARABLE"
    assert judge(a, [make(root, 1, key=0.2)], metric="val/accuracy").word == "INCOMPARABLE"
    early = [make(root, 1, every=97, losses=[3.0])]
    late = [make(root, 1, key=0.2, every=99, losses=[2.0])]
    found = judge(early, late)
    assert found.word == "INCOMPARABLE"
    assert "same step" in found.reasons[0]


def test_evals_that_stop_in_the_middle_are_no_endpoint(root: Path) -> None:
    """The mean over the last evals that both have was taken at half of the schedule."""
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    b = [make(root, seed, key=0.2, losses=[x - 0.1 - seed / 999 for x in curve(1.0)[:5]]) for seed in (1, 2, 3)]
    found = judge(a, b)
    assert found.word == "INCOMPARABLE"
    assert "step 50 of 100" in found.reasons[0]


def test_a_run_that_ended_before_its_budget_is_left_out(root: Path) -> None:
    """By a budget in time: finished, on the way down a schedule that ends later."""
    a, b = arms(root, CLOSE)
    for run in b:
        amend(run.path, last_step=70)
    short = [open_run(run.id, root) for run in b]
    found = judge(a, short)
    assert (found.word, len(found.left_out)) == ("UNDECIDED", 3)
    assert "70 of 100 planned steps" in found.left_out[0]
    assert judge(a, short, allowed=["budget"]).word == "BETTER"


def test_runs_of_two_lengths_that_are_allowed_are_taken_at_their_ends(root: Path) -> None:
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.9 + seed / 900, key=0.2, num_steps=200, every=20) for seed in (1, 2, 3)]
    found = judge(a, b, allowed=["budget"])
    assert found.word == "BETTER"
    assert found.effect == pytest.approx(-0.1, abs=1e-3)


def test_a_nan_beside_the_last_fifth_is_no_number(root: Path) -> None:
    """The evals of B are read between two of them, and one of these is NaN."""
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    losses = [3.0, 2.0, 1.5, 1.2, math.nan, 1.0, 0.9]
    b = [make(root, seed, key=0.2, rows=8, num_steps=50, every=7, losses=losses) for seed in (1, 2, 3)]
    assert judge(a, b).word == "INCOMPARABLE"


def test_a_nan_long_before_the_end_is_told(root: Path) -> None:
    a, b = arms(root, CLOSE)
    odd = make(root, 4, key=0.2, losses=[3.0, math.nan, *curve(0.95)[2:]])
    found = judge([*a, make(root, 4)], [*b, odd])
    assert any(odd.id in reason and "not finite" in reason for reason in found.reasons)


def test_two_recipes_are_more_than_one_change(root: Path) -> None:
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.9 + seed / 900, recipe="other:Other") for seed in (1, 2, 3)]
    found = judge(a, b)
    assert found.word == "CONFOUNDED"
    assert "other:Other" in found.confounders[0]
    assert judge(a, b, declared="recipe").word == "BETTER"


def test_seeds_that_decide_nothing_are_no_replicates(root: Path) -> None:
    """A script that names its seed and never uses it: what differs between its runs is the rounding of the device."""

    def made(seed: int, end: float, key: float, weights: str, number: int | None) -> Run:
        run = make(root, seed, end, key, config={"lr": {"learning_rate": key}})
        (run.path / "init.json").write_bytes(to_json({"head": [[4], weights]}))
        amend(run.path, seed=number)
        return open_run(run.id, root)

    def both(weights: str, is_named: bool) -> Judgement:
        arms = [
            [
                made(1, end + number * 1e-6 * end, key, weights.format(number), number if is_named else None)
                for number in (1, 2, 3)
            ]
            for end, key in ((1.0, 0.1), (0.9, 0.2))
        ]
        return judge(arms[0], arms[1], allowed=["code", "seed"])

    named = both("one", is_named=True)
    assert named.word == "CONFOUNDED"
    assert "the seed decides nothing" in named.confounders[0]
    silent = both("one", is_named=False)
    assert (silent.word, silent.num_pairs) == ("UNDECIDED", 1)
    assert any("count as one" in reason for reason in silent.reasons)
    assert both("{}", is_named=True).word == "BETTER"
    assert both("{}", is_named=False).method == "Welch"


@pytest.mark.parametrize("seed", [[1], {"a": 1}, True, 1.5])
def test_a_seed_that_is_none_pairs_nothing(root: Path, seed: Any) -> None:
    a, b = arms(root, CLOSE[:1])
    for run in (*a, *b):
        amend(run.path, seed=seed)
    found = judge([open_run(a[0].id, root)], [open_run(b[0].id, root)])
    assert (found.word, found.pairs) == ("UNDECIDED", [])
    assert "1 run an arm" in found.summary_line()


def test_another_definition_of_another_set_does_not_matter(root: Path) -> None:
    """Only B says what the set "other" counts, and both have evals of it."""
    more = {**DEFINITIONS, "eval/other": {"rows": 3}}
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.9 + seed / 900, key=0.2, definitions=more) for seed in (1, 2, 3)]
    for run in (*a, *b):
        events = run.path / "events.ndjson"
        events.write_text(events.read_text().replace('"val":{', '"other":{"loss":1.0},"val":{'))
    a, b = ([open_run(run.id, root) for run in arm] for arm in (a, b))
    assert judge(a, b, metric="val/loss", allowed=["sick"]).word == "BETTER"
    assert judge(a, b, metric="other/loss", allowed=["sick"]).word == "CONFOUNDED"


@pytest.mark.parametrize("status", ["stopped", "crashed", None])
def test_a_run_that_has_not_finished_is_not_judged_and_named(root: Path, status: str | None) -> None:
    a, b = arms(root, CLOSE)
    short = make(root, 4, 0.1, key=0.2, status=status)
    found = judge([*a, make(root, 4)], [*b, short])
    assert found.num_pairs == 3
    assert any(short.id in one for one in found.left_out)
    alone = judge(a[:1], [short])
    assert alone.word == "UNDECIDED"
    assert math.isnan(alone.effect)


@pytest.mark.parametrize("how", ["status", "evals"])
def test_a_variant_that_diverged_is_worse_without_an_interval(root: Path, how: str) -> None:
    a = [make(root, seed) for seed in (1, 2, 3)]
    nan = [*curve(1.0)[:-1], math.nan]
    b = [make(root, seed, key=0.2, losses=nan, status="diverged" if how == "status" else "finished") for seed in (1, 2)]
    b.append(make(root, 3, 0.2, key=0.2))  # one that went well must not make up for it
    found = judge(a, b)
    assert (found.word, found.is_provisional) == ("WORSE", True)
    assert math.isnan(found.low)
    assert any("diverged" in reason for reason in found.reasons)
    assert judge(b, a).word == "BETTER"
    assert judge(a[:1], b[:1]).is_provisional
    broken = [make(root, seed, key=0.2, losses=nan) for seed in (1, 2, 3)]
    assert not judge(a, broken).is_provisional


def test_one_broken_run_of_three_is_no_verdict(root: Path) -> None:
    """In equal arms of which every third run breaks, one and none are seen in nearly half of all cases."""
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.8 + seed / 900, key=0.2, status="diverged" if seed == 3 else "finished")
         for seed in (1, 2, 3)]  # fmt: skip
    assert judge(a, b).word == judge(b, a).word == "UNDECIDED"
    assert judge(a, b).what_next


def test_a_sick_run_gets_no_verdict_unless_allowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.compare import gate

    a, b = arms(root, CLOSE)
    monkeypatch.setattr(gate, "sickness", lambda run: [f"{run.id} is sick: O1"] if run.id == b[1].id else [])
    found = judge(a, b)
    assert found.word == "CONFOUNDED"
    assert b[1].id in found.confounders[0]
    assert judge(a, b, allowed=["sick"]).word == "BETTER"


def test_what_the_doctor_calls_fatal_refuses_the_verdict(root: Path) -> None:
    """Evals look fine and the run says finished, but the loss of the training rows is NaN from step 51 on."""
    a, b = arms(root, CLOSE)
    rows = b[2].path / "metrics" / "000.ndjson"
    lines = [from_json(line) for line in rows.read_bytes().splitlines()]
    rows.write_bytes(b"".join(to_json({**x, "loss": x["loss"] if x["step"] < 51 else math.nan}) + b"\n" for x in lines))
    found = judge(a, b)
    assert found.word == "CONFOUNDED"
    assert f"{b[2].id} is fatal: N1" in found.confounders[0]


def test_nothing_differs_is_an_aa_test(root: Path) -> None:
    a = [make(root, seed, 1 + seed / 100) for seed in (1, 2, 3)]
    b = [make(root, seed, 1 + seed / 100 + (-1) ** seed / 1000) for seed in (1, 2, 3)]
    found = judge(a, b)
    assert (found.is_aa, found.factor) == (True, "none")
    assert any("A/A" in reason for reason in found.reasons)
    assert found.word in ("EQUIVALENT", "UNDECIDED")


def test_nothing_differs_is_never_better(root: Path) -> None:
    a = [make(root, seed, 1 + seed / 1000) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.8 + seed / 900) for seed in (1, 2, 3)]
    assert judge(a, b).word == judge(b, a).word == "UNDECIDED"
    assert "change something" in judge(a, b).what_next


def test_a_run_in_both_arms_is_refused(root: Path) -> None:
    a, b = arms(root, CLOSE)
    with raises_code("options-conflict"):
        judge(a, [*b, a[0]])
    with raises_code("too-few"):
        judge(a, [])


def test_a_run_named_twice_counts_once(root: Path) -> None:
    a, b = arms(root, CLOSE)
    assert judge([*a, a[0]], b).to_dict()["effect"] == judge(a, b).effect


def test_two_runs_folders_with_one_name_are_two_runs(tmp_path: Path) -> None:
    """Copied from another machine: the ids are equal, the folders are not."""
    a, b = arms(tmp_path / "here" / "runs", CLOSE)
    shutil.copytree(tmp_path / "here" / "runs", tmp_path / "runs")
    copies = [open_run(run.id, tmp_path / "runs") for run in b]
    assert judge(a, copies).word == "BETTER"
    assert judge(a, [*b, *copies]).num_pairs == 3  # a copy is no second run
    with raises_code("options-conflict"):
        judge([*a, b[0]], copies)
    again = make(tmp_path / "elsewhere" / "runs", 1, 0.9, key=0.2)
    assert again.id == a[0].id
    pair = judge(a, [again], allowed=["code"]).pairs[0]
    assert (pair.a, pair.b) == ([str(a[0].path)], [str(again.path)])


def test_runs_that_name_no_seed_are_not_paired(root: Path) -> None:
    a, b = arms(root, CLOSE)
    for run in (*a, *b):
        run.document["seed"] = None
    found = judge(a, b)
    assert found.pairs == []
    assert found.method == "Welch"
    assert Gate(a, b).seeds == []


def test_a_damaged_file_is_a_sentence(root: Path) -> None:
    a, b = arms(root, CLOSE[:1])
    (b[0].path / "definitions.json").write_text("{")
    with pytest.raises(RunError, match=r"definitions\.json"):
        judge(a, b)


# Code.


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Asked from there: git looks into no folder because a run names it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "model.py").write_text("depth = 4\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder)
    return folder


EDITS: dict[str, Callable[[Path], Any]] = {
    "uncommitted": lambda folder: (folder / "model.py").write_text("depth = 5\n"),
    "untracked": lambda folder: (folder / "unused.py").write_text("x = 1\n"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_forgotten_edit_is_confounded(root: Path, repository: Path, edit: str) -> None:
    a = [make(root, seed, 1 + seed / 1000, code_root=repository) for seed in (1, 2, 3)]
    EDITS[edit](repository)
    b = [make(root, seed, 0.9 + seed / 900, key=0.2, code_root=repository) for seed in (1, 2, 3)]
    found = judge(a, b)
    assert found.word == "CONFOUNDED"
    assert any(".py" in one for one in found.confounders)
    assert judge(a, b, allowed=["code"]).word == "BETTER"


def test_many_files_are_one_confounder(root: Path, repository: Path) -> None:
    a = [make(root, 1, code_root=repository)]
    for number in range(9):
        (repository / f"part{number}.py").write_text("x = 1\n")
    found = judge(a, [make(root, 1, key=0.2, code_root=repository)])
    assert len(found.confounders) == 1
    assert "9 files" in found.confounders[0]
    assert found.summary_line().startswith("CONFOUNDED: code: 9 files (part0.py new, +1 -0")


def test_an_edit_between_two_runs_of_an_arm_is_confounded(root: Path, repository: Path) -> None:
    a = [make(root, seed, 1 + seed / 1000, code_root=repository) for seed in (1, 2, 3)]
    b = [make(root, seed, 0.9 + seed / 900, key=0.2, code_root=repository) for seed in (1, 2)]
    EDITS["uncommitted"](repository)
    b.append(make(root, 3, 0.9, key=0.2, code_root=repository))
    assert judge(a, b).word == "CONFOUNDED"


def test_declared_code_is_the_one_change(root: Path, repository: Path) -> None:
    a = [make(root, seed, 1 + seed / 1000, code_root=repository) for seed in (1, 2, 3)]
    EDITS["uncommitted"](repository)
    b = [make(root, seed, 0.9 + seed / 900, code_root=repository) for seed in (1, 2, 3)]
    assert judge(a, b).word == "CONFOUNDED"
    found = judge(a, b, declared="code")
    assert found.word == "BETTER"
    assert "model.py" in found.factor


def test_weights_that_begin_otherwise_follow_from_declared_code_alone(root: Path, repository: Path) -> None:
    def made(seed: int, end: float, code: str) -> Run:
        run = make(root, seed, end, code_root=repository)
        (run.path / "init.json").write_bytes(to_json({"head": [[4], f"{code}{seed}"]}))
        return run

    a = [made(seed, 1 + seed / 1000, "old") for seed in (1, 2, 3)]
    EDITS["uncommitted"](repository)
    b = [made(seed, 0.9 + seed / 900, "new") for seed in (1, 2, 3)]
    assert any("initial weights" in one for one in judge(a, b, allowed=["code"]).confounders)
    found = judge(a, b, declared="code")
    assert found.word == "BETTER"
    assert any("follows from the code" in reason for reason in found.reasons)
