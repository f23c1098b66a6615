"""If this fails, the page of an experiment leaves a run out, or tells of one what belongs to another."""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from rung.compare.page import MEAN, experiment_page
from rung.report.blocks import markdown
from rung.report.html import to_html
from rung.runs.query import Run, list_runs
from rung.runs.record import amend, append_event
from tests.compare.made import CONFIG, changed

Make = Callable[..., Run]


def page_of(root: Path, name: str = "piano") -> str:
    problems: list[str] = []
    return markdown(experiment_page(name, list_runs(root, name, problems), problems).page)


def part_of(page: str, head: str) -> str:
    """The text below a heading of the second level."""
    return page.split(f"\n## {head}\n", 1)[1].split("\n## ", 1)[0]


def test_it_reads_like_a_book(make: Make, tmp_path: Path, repo: Path) -> None:
    root = tmp_path / "runs"
    make(code_root=repo, why="depth scaling\nmight not work")
    second = make(
        parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=0.5), losses=(4.0, 2.0), every=20, code_root=repo
    )
    amend(second.path, verdict={"word": "supported", "text": "clipping was the cause", "unix_s": 1794804318.0})
    append_event(second.path, "note", text="sounds better", unix_s=1794804319.0)
    (second.path / "report.md").write_text("x")
    page = page_of(root)
    heads = re.findall(r"^## (.*)$", page, re.M)
    assert heads == ["tree", "experimental settings of piano/2", "RUN 1", "RUN 2"]
    assert "> depth scaling\\\n> might not work" in part_of(page, "RUN 1")
    told = part_of(page, "RUN 2")
    assert "`optimizer.grad_clip` `1.0` → `0.5` since `piano/1`" in told
    assert "| best and last, at step 40 | 2.4 | 2.0 | -0.4 |" in told
    assert "**supported** (2026-11-16 04:45:18 UTC)" in told
    assert "> clipping was the cause" in told
    assert "> sounds better" in told
    assert "sounds better" not in part_of(page, "RUN 1")
    assert "| piano/1 |  | - | finished | 2.4000 |  |" in page
    assert (
        "| [piano/2](2/report.md) | piano/1 | `optimizer.grad_clip` `1.0` → `0.5` | finished | 2.0000 | supported |"
        in page
    )
    assert "└ piano/2  finished  2.0000  grad_clip 1.0 → 0.5  (supported)" in part_of(page, "tree")


def test_the_same_records_give_the_same_bytes(make: Make, tmp_path: Path) -> None:
    make()
    make(parent="piano/1", seed=8)
    shutil.copytree(tmp_path / "runs", tmp_path / "copy" / "of runs")
    assert page_of(tmp_path / "runs") == page_of(tmp_path / "copy" / "of runs")
    assert str(tmp_path) not in page_of(tmp_path / "runs")


def test_runs_that_differ_by_their_seed_are_one_line(make: Make, tmp_path: Path, repo: Path) -> None:
    losses = {7: 2.41, 8: 2.5, 9: 2.27}
    for seed, loss in losses.items():
        make(seed=seed, config=changed(CONFIG, seed=seed), losses=(3.0, loss), every=20, code_root=repo)
    make(seed=7, config=changed(CONFIG, optimizer__grad_clip=9.0), code_root=repo)
    make(seed=10, config=changed(CONFIG, seed=10), losses=(3.0, float("nan")), every=20, code_root=repo)
    told = part_of(page_of(tmp_path / "runs"), "over seeds")
    mean, sd = statistics.fmean(losses.values()), statistics.stdev(losses.values())
    assert told.strip() == (
        f"- piano/1, piano/2, piano/3, piano/5: best loss **{mean:{MEAN}} ± {sd:{MEAN}} (n = 3)**, "
        "1 without a finite loss"
    )


def test_a_run_that_cannot_be_read_costs_no_other_its_place(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    make()
    second = make(parent="piano/1")
    third = make(parent="piano/2")
    (second.path / "run.json").write_text("{")
    (third.path / "config.yaml").write_text("a: [")
    page = page_of(root)
    assert "## RUN 1" in page
    assert "## RUN 3" in page
    assert "its parent piano/2 cannot be read" in page
    assert "piano/2/run.json is damaged" in part_of(page, "not readable")
    assert str(tmp_path) not in page


def test_an_experiment_without_runs(tmp_path: Path) -> None:
    assert "There are no runs yet." in markdown(experiment_page("piano", []).page)


def test_html_of_an_experiment(make: Make, tmp_path: Path) -> None:
    make(why="<b>bold</b>")
    report = experiment_page("piano", list_runs(tmp_path / "runs", "piano"))
    page = to_html(report.page)
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert page.count("<svg") == 1
    assert set(report.drawings) == {"loss.svg"}


def test_evals_that_cannot_be_read_cost_no_other_run_its_place(make: Make, tmp_path: Path) -> None:
    make()
    damaged = make(parent="piano/1")
    (damaged.path / "events.ndjson").unlink()
    (damaged.path / "events.ndjson").mkdir()
    page = page_of(tmp_path / "runs")
    assert "![piano: eval loss](loss.svg)" in page
    assert "Not all of the record can be read" in part_of(page, "RUN 2")
    assert "finished" in part_of(page, "RUN 1")
