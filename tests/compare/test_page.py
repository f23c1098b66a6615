"""If this fails, the page of a run says something that its record does not, or the same record gives two pages."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rung.compare.page import ROUNDED, notes_of, run_page
from rung.errors import RunError
from rung.report.blocks import markdown
from rung.report.html import to_html
from rung.runs.files import to_json
from rung.runs.query import Run, open_run
from rung.runs.record import Record, amend, append_event
from rung.units import count
from tests.compare.made import CONFIG, changed

Make = Callable[..., Run]
Start = Callable[..., Record]
NUMBER = re.compile(r"(?<![\w.-])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w-])")


def page_of(run: Run) -> str:
    return markdown(run_page(run).page)


def train(record: Record, seed: int, num_steps: int = 40, bad: Iterable[int] = ()) -> Run:
    """A run with all digits in everything."""
    chance = random.Random(seed)
    for step in range(num_steps):
        loss = math.nan if step in bad else 5 * math.exp(-step / 30) + chance.random()
        row = {"loss": loss, "norm": chance.random() * 3, "lr": chance.random() * 1e-3, "targets": 1600.0 + step}
        record.log(step, {**row, "step_s": chance.random(), "wait_s": chance.random() / 9, "batch_hash": float(step)})
        if step % 10 == 9:
            values = {"loss": chance.random() + 2, "loss_se": chance.random(), "velocity": chance.random()}
            record.event("eval", step=step + 1, results={"val": values})
            record.update(best={"step": step + 1, "set": "val", "loss": values["loss"]})
    record.finish("finished", last_step=num_steps)
    return open_run(record.path, record.path.parent.parent)


@pytest.fixture
def child(start: Start, repo: Path) -> Run:
    """The second of two runs, with everything that a page can hold."""
    train(start(code_root=repo), 1)
    (repo / "model.py").write_text("WIDTH = 64\nDEPTH = 2\n")
    config = changed(CONFIG, optimizer__grad_clip=0.5)
    record = start(parent="piano/1", config=config, why="norm | is # high", tags=["tag 1"], code_root=repo)
    record.add_sample(40, "sample-0.txt", b"a text of 12 words\n```\n# not a heading\n", "made at 1.5")
    record.add_sample(40, "sample-0.wav", b"RIFF", "135 notes")
    run = train(record, 2)
    append_event(
        run.path, "note", text="clips after 17 steps\n- [ ] look\n<script>alert(1)</script>", unix_s=1794804318.2
    )
    ab = {"id": "clip", "arm": "variant", "base": "piano/1", "overrides": ["optimizer.grad_clip=0.5"]}
    amend(run.path, verdict={"word": "refuted", "text": "not at 0.5", "unix_s": 1794804319.9}, ab=ab)
    return open_run(run.path, run.path.parent.parent)


def known_numbers(run: Run) -> set[float]:
    """Every number in the files of a run, and each as the page may round it."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(run.path.rglob("*"))
             if path.suffix in (".json", ".yaml", ".ndjson", ".txt")]  # fmt: skip
    known = {float(number) for text in texts for number in NUMBER.findall(text.replace("\\n", " "))}
    columns = run.metrics()
    for name in ("loss", "norm", "lr"):
        known |= {float(format(value, ROUNDED[name])) for value in columns[name] if value is not None}
    of_trivial_models = [loss for about in run.data().values() for loss in about.get("baselines", {}).values()]
    best = [*(event["loss"] for event in run.evals()), *of_trivial_models]
    known |= {float(format(loss, ROUNDED["loss"])) for loss in best}
    rows = [row for row in zip(columns["targets"], columns["step_s"], columns["wait_s"]) if None not in row]
    known |= {float(count(targets / seconds).rstrip("kMBT")) for targets, seconds, _ in rows}
    known |= {float(format(100 * waited / seconds, ROUNDED["wait"])) for _, seconds, waited in rows}
    known.add(statistics.median(targets / seconds for targets, seconds, _ in rows))
    return known


def test_every_number_on_the_page_is_in_the_record(child: Run) -> None:
    known = known_numbers(child) | known_numbers(open_run("piano/1", child.path.parent.parent))
    page = page_of(child)
    counted = [line for line in page.splitlines() if line.startswith("The same in both") or "+1 -1" in line]
    dates = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC|\d{4}-\d\d-\d\dT[\d:.]+Z|(?<![.\w])[0-9a-f]{12,64}\b"
    rest = re.sub(dates, "", "\n".join(line for line in page.splitlines() if line not in counted))
    differences = re.findall(r"^\| (?:best|last|at)[^|]* \| (\S+) \| (\S+) \| (\S+) \|$", rest, re.M)
    assert differences
    for before, after, difference in differences:
        assert format(float(after) - float(before), ROUNDED["difference"]) == difference
        rest = rest.replace(f"| {difference} |", "| |")
    found = {number for number in NUMBER.findall(rest) if float(number) not in known}
    assert found == set()
    assert len(NUMBER.findall(rest)) > 100
    assert "Not all of the record" not in page


def test_full_digits_in_the_table_of_evals(child: Run) -> None:
    page = page_of(child)
    for row in child.evals():
        assert all(repr(row[name]) in page for name in ("loss", "loss_se", "velocity"))


def test_the_same_record_gives_the_same_bytes_anywhere(
    child: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = child.path.parent.parent
    shutil.copytree(root, tmp_path / "elsewhere" / "copy")
    monkeypatch.chdir(tmp_path / "elsewhere")
    copied = open_run("piano/2", Path("copy"))
    pages = [run_page(run, has_files=True) for run in (child, child, copied)]
    for report in pages[1:]:
        assert markdown(report.page) == markdown(pages[0].page)
        assert to_html(report.page) == to_html(pages[0].page)
        assert report.drawings == pages[0].drawings
    assert str(tmp_path) not in to_html(pages[0].page) + markdown(pages[0].page)


def test_the_page_has_its_parts_in_order(child: Run) -> None:
    page = page_of(child)
    heads = re.findall(r"^#+ .*$", re.sub(r"^(`{3,}).*?^\1$", "", page, flags=re.M | re.S), re.M)
    # The doctor may have something to say of a loss that was drawn by lot.
    assert [head for head in heads if head != "## findings"] == [
        "# piano/2", "## result", "## samples of step 40", "## change since piano/1", "### against piano/1",
        "## curves", "### evals", "## experimental settings", "## notes", "## log", "## to do it again",
    ]  # fmt: skip
    assert "> norm \\| is # high" in page
    assert "**verdict**: **refuted** (2026-11-16 04:45:19 UTC)" in page
    assert "\\<script>" in page
    assert "**ab**: variant of clip, base piano/1" in page
    assert "- **`optimizer.grad_clip` `1.0` → `0.5`**" in page
    assert "| code | `model.py` |  |  | hidden | +1 -1 |" in page
    assert "not a strict A/B: 1 confounder" in page
    assert "[sample-0.wav](samples/00000040/sample-0.wav): 135 notes" in page
    assert "````\na text of 12 words\n```" in page
    assert "rung train piano" in page


def test_a_repository_that_is_not_at_hand(
    child: Run, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the machine of a colleague who was sent the folder."""
    repo.rename(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    page = page_of(open_run(child.path, child.path.parent.parent))
    assert "no known repository has" in page
    assert "confounder (code)" in page
    assert str(tmp_path) not in page


def test_a_first_run(make: Make) -> None:
    page = page_of(make())
    assert "**current change**: a first run" in page
    assert "against" not in page


def test_a_run_that_did_nothing_yet(start: Start) -> None:
    record = start()
    report = run_page(open_run(record.path, record.path.parent.parent))
    page = markdown(report.page)
    assert "running, before its first step" in page
    assert "No loss was recorded." in page
    assert report.drawings == {}
    record.close()


def test_losses_that_are_not_finite_are_shown_as_they_are(start: Start) -> None:
    run = train(start(), 3, bad={7, 38, 39})
    report = run_page(run)
    assert "step 39/40  loss NaN" in markdown(report.page)
    assert "not finite (3)" in report.drawings["loss.svg"]
    assert "loss NaN" in page_of(run)


def test_a_metric_that_counts_something_else_gets_no_difference(make: Make) -> None:
    make()
    other = {"eval/val": {"eval set": "7c1e/val/windows-256", "mask": "none", "ignored_ids": [], "rows": 10}}
    page = page_of(make(parent="piano/1", definitions=other, losses=(4.0, 3.0, 2.0, 1.0)))
    assert "val/loss counts something else in the two runs" in page
    assert "| best and last, at step 40 | 2.4 | 1.0 | - |" in page


def test_runs_that_share_no_step(make: Make) -> None:
    make()
    page = page_of(make(parent="piano/1", losses=(3.0, 2.0), every=7))
    assert "no step has a val/loss of both runs" in page


@pytest.mark.parametrize("name", ["config.yaml", "config.sources.json", "data.json", "definitions.json", "env.json"])
def test_a_damaged_file_is_told_in_its_place(make: Make, name: str) -> None:
    make()
    run = make(parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=0.5))
    (run.path / name).write_text('{"a": [')
    page = page_of(open_run(run.path, run.path.parent.parent))
    assert f"piano/2/{name} cannot be read" in page
    assert "### evals" in page
    assert str(run.path.parent.parent) not in page


def test_torn_and_broken_lines(make: Make) -> None:
    run = make()
    rows = run.path / "metrics" / "000.ndjson"
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:10], b"{broken\n", *lines[10:], b'{"step": 40, "loss']))
    with (run.path / "events.ndjson").open("ab") as file:
        file.write(b'nonsense\n{"kind": "note", "text": "half')
    page = page_of(open_run(run.path, run.path.parent.parent))
    assert "1 broken lines of metrics were left out." in page
    assert "half" not in page


def test_odd_values_where_others_were_expected(make: Make) -> None:
    """A record that a stranger wrote: every part of run.json of another kind."""
    run = make()
    document = json.loads((run.path / "run.json").read_text())
    for name in document:
        for odd in (None, 7, "text", [1, None], {"a": {"b": []}}):
            if name in ("schema", "id", "status", "process"):
                continue
            (run.path / "run.json").write_bytes(to_json({**document, name: odd}))
            try:
                again = open_run(run.path, run.path.parent.parent)
            except RunError:  # refused in a sentence
                continue
            report = run_page(again)
            assert markdown(report.page).startswith("# piano/1\n"), (name, odd)
            to_html(report.page)


def test_an_older_run_with_a_plain_verdict(make: Make) -> None:
    run = make(why="NaN")
    amend(run.path, verdict="looks *good*")
    page = page_of(open_run(run.path, run.path.parent.parent))
    assert "> looks \\*good\\*" in page
    assert "> NaN" in page


def test_a_sick_run_has_findings(start: Start) -> None:
    record = start()
    for step in range(200):
        loss = 3.0 if step < 150 else math.nan
        record.log(step, {"loss": loss, "norm": 1.0, "norm_clipped": 1.0, "lr": 1e-3, "targets": 10.0, "step_s": 1.0})
    record.finish("diverged", last_step=200)
    page = page_of(open_run(record.path, record.path.parent.parent))
    assert "## findings" in page
    assert re.search(r"\*\*\w+ (fatal|sick|warn)\*\*", page)


def test_notes_that_were_taken_back(make: Make) -> None:
    run = make()
    for text, when in (("one", 1.0), ("two", 2.0), ("two", 2.0)):
        append_event(run.path, "note", text=text, unix_s=when)
    append_event(run.path, "note_undone", text="two", of_unix_s=2.0)
    assert [note["text"] for note in notes_of(run)] == ["one", "two"]
    append_event(run.path, "note_undone", text="never written", of_unix_s=9.0)
    append_event(run.path, "note_undone", text="one", of_unix_s=1.0)
    assert [note["text"] for note in notes_of(run)] == ["two"]


def test_links_lead_to_the_samples_from_any_folder(child: Run, tmp_path: Path) -> None:
    out = tmp_path / "out" / "deep"
    page = markdown(run_page(child, out).page)
    (target,) = re.findall(r"\[sample-0\.wav\]\((.*?)\)", page)
    assert (out / target).resolve() == (child.path / "samples" / "00000040" / "sample-0.wav").resolve()


def test_a_link_among_the_samples_is_not_followed(child: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("password")
    (child.path / "samples" / "00000040" / "z.txt").symlink_to(secret)
    assert "password" not in to_html(run_page(child, has_files=True).page)


def test_many_evals_are_thinned_and_the_best_stays(start: Start) -> None:
    record = start()
    losses = [3.0 + i / 1000 if i != 333 else 1.25 for i in range(700)]
    for step, loss in enumerate(losses):
        record.event("eval", step=step, results={"val": {"loss": loss, **{f"part_{i}": 0.5 for i in range(20)}}})
    record.update(best={"step": 333, "set": "val", "loss": 1.25})
    record.finish("finished")
    page = page_of(open_run(record.path, record.path.parent.parent))
    assert "**1.25**" in page
    assert "| 699 | val | 3.699 |" in page
    assert re.search(r"\d+ of 700 evals are shown; 12 of 21 values of each are shown", page)


def test_the_log_of_a_long_run_comes_out_of_its_copy_by_column(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to the same page, with what was broken."""
    run = train(start(), seed=3)
    with (run.path / "metrics" / "000.ndjson").open("r+b") as file:
        lines = file.readlines()
        file.seek(0)
        file.writelines([*lines[:5], b"{broken\n", *lines[5:]])
    plain = page_of(run)
    monkeypatch.setattr("rung.runs.columns._SMALL_BYTES", 1)
    assert page_of(open_run(run.path, run.path.parent.parent)) == plain
    assert "1 broken lines of metrics were left out" in plain
