"""If this fails, a page averages a step that was not applied, or shows an epoch otherwise than the record has it."""

from __future__ import annotations

import json
import math
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.compare.epochs import Epoch, epochs
from rung.compare.page import ROUNDED, experiment_page, run_page
from rung.report.blocks import markdown
from rung.report.html import to_html
from rung.runs.files import from_json
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import Record
from tests.compare.made import CONFIG, DERIVED, changed, start_run

Make = Callable[..., Run]
Start = Callable[..., Record]
LENGTHS = {**DERIVED, "epoch_rows": 165, "rows_per_step": 16}  # 10.3 steps: 0 to 10, 11 to 20, 21 to 30, 31 to 41
# What the page of an attempt of speech had, written by hand: the eighth epoch has no eval.
TRAIN = (3.236, 3.101, 3.084, 3.070, 3.073, 3.062, 3.057, 3.058)
VALID = (3.0799570083618164, 3.0559921264648438, 3.0397369861602783, 3.0308120250701904, 3.0213565826416016,
         3.0183966159820557, 3.0101847648620605)  # fmt: skip


def rows_of(num_steps: int, seed: int = 0) -> list[dict[str, float]]:
    chance = random.Random(seed)
    return [
        {"loss": 3 + chance.random(), "targets": float(chance.randrange(1, 2000)), "skipped": 0.0,
         "norm": chance.random() * 9, "lr": chance.random() * 1e-4}
        for _ in range(num_steps)
    ]  # fmt: skip


def written(record: Record, rows: Sequence[dict[str, float]], evals: Sequence[int] = ()) -> Run:
    """A run with these rows and an eval at each of these steps, the last of which is the best."""
    for step, row in enumerate(rows):
        record.log(step, row)
        if step + 1 in evals:
            values = {"loss": 5 - step / 7, "loss_se": 0.1, "accuracy": step / 77, "targets": 100.0}
            record.log(step + 1, {f"eval/val/{name}": value for name, value in values.items()})
            record.event("eval", step=step + 1, results={"val": values})
            record.update(best={"step": step + 1, "set": "val", "loss": values["loss"]})
    record.finish("finished", last_step=len(rows))
    return open_run(record.path, record.path.parent.parent)


def table_of(page: str) -> list[dict[str, str]]:
    """The rows of the first table of epochs, by the heads of its columns; without what makes them bold."""
    lines = re.search(r"^\| epoch \|.*\n\| --- .*\n((?:\|.*\n)*)", page, re.M)
    assert lines is not None
    head, _, *rows = ([cell.strip().strip("*") for cell in line.split("|")[1:-1]] for line in lines[0].splitlines())
    return [dict(zip(head, (cell.replace("**", "") for cell in row), strict=True)) for row in rows]


def json_of(page: str) -> list[dict[str, Any]]:
    block = re.search(r"^```json\n(.*?)^```$", page, re.M | re.S)
    assert block is not None
    found: list[dict[str, Any]] = json.loads(block[1])
    return found


def expected(rows: Sequence[dict[str, float]], steps: Sequence[int]) -> dict[str, float | None]:
    """The same by numpy."""
    chosen = [rows[step] for step in steps]
    applied = [row for row in chosen if not row["skipped"]]
    norms = [row["norm"] for row in applied if math.isfinite(row["norm"])]
    weights = [row["targets"] for row in applied]
    return {
        "train_loss": float(np.average([row["loss"] for row in applied], weights=weights)) if applied else None,
        "lr": chosen[-1]["lr"],
        "norm_median": float(np.median(norms)) if norms else None,
        "norm_p90": float(np.percentile(norms, 90, method="inverted_cdf")) if norms else None,
        "num_norms_not_finite": sum(not math.isfinite(row["norm"]) for row in chosen),
        "num_not_applied": len(chosen) - len(applied),
    }


def check(one: Epoch, rows: Sequence[dict[str, float]]) -> None:
    for name, value in expected(rows, range(one.first_step, one.last_step + 1)).items():
        found = getattr(one, name)
        assert found == (value if value is None else pytest.approx(value, rel=1e-12)), (one.epoch, name)


def test_an_epoch_is_the_mean_of_what_was_applied(start: Start) -> None:
    rows = rows_of(40)
    rows[4] |= {"loss": 1e6, "norm": math.inf, "skipped": 1.0}  # as float16 does where it overflows
    rows[5] |= {"loss": math.nan, "norm": math.nan, "skipped": 1.0}
    rows[13] |= {"norm": math.nan}
    rows[14] |= {"loss": math.nan, "targets": 0.0}  # no target, no update
    run = written(start(derived=LENGTHS), rows, evals=(5, 11, 20, 40))
    found = epochs(run)
    assert [(one.epoch, one.first_step, one.last_step, one.num_steps) for one in found] == [
        (1, 0, 10, 11), (2, 11, 20, 10), (3, 21, 30, 10), (4, 31, 39, 9),
    ]  # fmt: skip
    rows[14] |= {"skipped": 1.0}
    for one in found:
        check(one, rows)
    assert [one.num_not_applied for one in found] == [2, 1, 0, 0]
    assert [one.num_norms_not_finite for one in found] == [2, 1, 0, 0]
    assert [one.eval_step for one in found] == [11, 20, None, 40]
    assert found[1].evals == {"val/loss": 5 - 19 / 7, "val/loss_se": 0.1, "val/accuracy": 19 / 77, "val/targets": 100.0}
    assert [one.is_best for one in found] == [False, False, False, True]
    assert [one.is_complete for one in found] == [True, True, True, False]


def test_what_is_not_there_is_visible(start: Start) -> None:
    run = written(start(derived=LENGTHS), rows_of(40), evals=(11, 20))
    page = markdown(run_page(run).page)
    assert [row["epoch"] for row in table_of(page)] == ["1", "2 (best)", "3", "4 (unfinished)"]
    assert [row["eval at"] for row in table_of(page)] == ["11", "20", "no eval", "no eval"]
    assert [row["val/loss"] for row in table_of(page)][2:] == ["", ""]
    assert "at step 20, in epoch 2" in page


def test_no_step_of_an_epoch_was_applied(start: Start) -> None:
    rows = [row | {"loss": math.nan, "norm": math.nan, "skipped": 1.0} for row in rows_of(24)]
    run = written(start(derived=LENGTHS), rows)
    assert [(one.train_loss, one.norm_median, one.num_not_applied) for one in epochs(run)] == [
        (None, None, 11), (None, None, 10), (None, None, 3),
    ]  # fmt: skip
    assert {row["train loss"] for row in table_of(markdown(run_page(run).page))} == {"-"}


NUMBERS = st.floats(0, 1e4, allow_nan=False)
ROWS = st.fixed_dictionaries({
    "loss": NUMBERS, "targets": st.integers(1, 10**6).map(float), "skipped": st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    "norm": st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf])), "lr": st.floats(0, 1, allow_nan=False),
})  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(ROWS, min_size=12, max_size=45), st.lists(st.integers(1, 45), max_size=6))
def test_every_number_of_the_table_is_that_of_the_record(rows: list[dict[str, float]], evals: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = written(start_run(Path(folder), derived=LENGTHS), rows, evals)
        page = markdown(run_page(run).page)
        results = {(row["step"], row["set"]): row for row in run.evals()}
    table, listed = table_of(page), json_of(page)
    ends = [0, 11, 21, 31, 42, 52]
    assert len(table) == len(listed) == sum(begin < len(rows) for begin in ends)
    formats = {"train loss": ("train_loss", "of an epoch"), "lr": ("lr", "lr"), "norm p50": ("norm_median", "norm"),
               "norm p90": ("norm_p90", "norm")}  # fmt: skip
    for number, (cells, raw) in enumerate(zip(table, listed)):
        steps = range(ends[number], min(ends[number + 1], len(rows)))
        want = expected(rows, steps)
        assert cells["steps"] == f"{steps[0]} to {steps[-1]}"
        assert cells["not applied"] == str(want["num_not_applied"])
        assert cells["not finite"] == str(want["num_norms_not_finite"])
        for column, (name, how) in formats.items():
            value = want[name]
            assert raw[name] == (value if value is None else pytest.approx(value, rel=1e-12))
            assert cells[column] == ("-" if value is None else format(raw[name], ROUNDED[how]))
        inside = [step for step in evals if steps[0] < step <= steps[-1] + 1]
        assert cells["eval at"] == (str(max(inside)) if inside else "no eval")
        if inside:
            recorded = results[max(inside), "val"]
            names = ("loss", "loss_se", "accuracy", "targets")
            assert raw["evals"] == {f"val/{name}": recorded[name] for name in names}
            for name in ("loss", "accuracy"):
                assert cells[f"val/{name}"] == format(recorded[name], ROUNDED["of an epoch"])


def test_the_page_that_was_written_by_hand(start: Start) -> None:
    """Each figure of its eight epochs, with digits enough: it had an average norm of inf and a rate of 0.000."""
    record = start(derived={**DERIVED, "epoch_rows": 48, "rows_per_step": 16, "num_steps": 24})
    for step in range(24):
        row = {"loss": TRAIN[step // 3], "targets": 10.0, "skipped": 0.0, "norm": 2.0, "lr": 0.00006}
        record.log(step, row | ({"norm": math.inf, "skipped": 1.0} if step % 3 == 1 else {}))
        if step % 3 == 2 and step < 21:
            record.event("eval", step=step + 1, results={"valid": {"loss": VALID[step // 3], "agg_metrics": 0.4}})
            record.update(best={"step": step + 1, "set": "valid", "loss": VALID[step // 3]})
    record.finish("stopped", last_step=23)
    report = run_page(open_run(record.path, record.path.parent.parent))
    page = markdown(report.page)
    table, listed = table_of(page), json_of(page)
    assert [row["train loss"] for row in table] == [f"{loss:.6g}" for loss in TRAIN]
    assert [row["valid/loss"] for row in table] == [*(f"{loss:.6g}" for loss in VALID), ""]
    assert {row["lr"] for row in table} == {"6.00e-05"}
    assert [(row["norm p50"], row["norm p90"], row["not finite"], row["not applied"]) for row in table] == [
        ("2", "2", "1", "1")
    ] * 8
    assert [row["epoch"] for row in table] == ["1", "2", "3", "4", "5", "6", "7 (best)", "8"]
    assert table[-1]["eval at"] == "no eval"
    assert [one["evals"].get("valid/loss") for one in listed] == [*VALID, None]
    assert set(report.drawings) == {"loss.svg", "norm.svg", "lr.svg"}


def test_all_digits_are_in_the_page_and_beside_it(start: Start) -> None:
    rows = rows_of(30)
    rows[3] |= {"loss": math.nan}  # applied, as nothing says otherwise: not averaged away
    run = written(start(derived=LENGTHS), rows, evals=(11, 30))
    report = run_page(run)
    assert json_of(markdown(report.page)) == json.loads(report.files["epochs.json"])
    found = from_json(report.files["epochs.json"])
    assert [one["train_loss"] for one in found[1:]] == [one.train_loss for one in epochs(run)[1:]]
    assert math.isnan(found[0]["train_loss"])
    assert table_of(markdown(report.page))[0]["train loss"] == "NaN"
    assert "&quot;train_loss&quot;" in to_html(report.page)


def test_many_epochs_are_spread_over_the_table(start: Start) -> None:
    derived = {**DERIVED, "epoch_rows": 32, "rows_per_step": 16}
    run = written(start(derived=derived), rows_of(201), evals=(66,))
    report = run_page(run)
    page = markdown(report.page)
    table = table_of(page)
    assert 20 <= len(table) <= 40
    assert [table[0]["epoch"], table[-1]["epoch"]] == ["1", "101 (unfinished)"]
    assert "33 (best)" in [row["epoch"] for row in table]
    assert f"{101 - len(table)} of 101 epochs" in page
    assert [one["epoch"] for one in json.loads(report.files["epochs.json"])] == list(range(1, 102))
    assert len(json_of(page)) == len(table)


@pytest.mark.parametrize(
    "derived",
    [
        {},
        DERIVED,
        {**LENGTHS, "epoch_rows": 41 * 16},  # longer than the run
        {**LENGTHS, "epoch_rows": 16},  # no longer than a step
        {**LENGTHS, "rows_per_step": None},
        {**LENGTHS, "epoch_rows": "many"},
        {**LENGTHS, "epoch_rows": -3},
    ],
)
def test_a_run_without_epochs_has_a_page_without_them(start: Start, derived: dict[str, Any]) -> None:
    report = run_page(written(start(derived=derived), rows_of(40), evals=(40,)))
    assert "### epochs" not in markdown(report.page)
    assert "epochs.json" not in report.files
    assert "Not all of the record" not in markdown(report.page)
    assert "### evals" in markdown(report.page)


def test_a_run_in_its_first_epoch_of_several(start: Start) -> None:
    record = start(derived=LENGTHS)
    for step, row in enumerate(rows_of(3)):
        record.log(step, row)
    (one,) = epochs(open_run(record.path, record.path.parent.parent))
    assert (one.epoch, one.num_steps, one.is_complete) == (1, 3, False)
    record.close()


def test_an_eval_before_the_first_step_is_of_no_epoch(start: Start) -> None:
    record = start(derived=LENGTHS)
    record.event("eval", step=0, results={"val": {"loss": 9.0}})
    record.update(best={"step": 0, "set": "val", "loss": 9.0})
    assert not any(one.eval_step is not None or one.is_best for one in epochs(written(record, rows_of(40))))


def test_after_a_rollback_the_data_goes_on(start: Start) -> None:
    """Back from step 15 to 10, with the rows from 16 * 16 on: what was done again counts once, in its own epoch."""
    record = start(derived=LENGTHS)
    rows = rows_of(40)
    for step in range(16):
        record.log(step, {**rows[step], "loss": 99.0} if step >= 10 else rows[step])
    record.event("diverged", step=15, why="loss nan")
    record.rewind()
    record.event("rollback", step=15, to=10, position=256)
    for step in range(10, 40):
        record.log(step, rows[step])
    record.finish("finished", last_step=40)
    found = epochs(open_run(record.path, record.path.parent.parent))
    # Steps 0 to 9 are rows 0 to 159; step 10 begins with row 256, step 15 with row 336 and step 25 with row 496.
    assert [(one.epoch, one.first_step, one.last_step) for one in found] == [
        (1, 0, 9), (2, 10, 14), (3, 15, 24), (4, 25, 35), (5, 36, 39),
    ]  # fmt: skip
    for one in found:
        check(one, rows)


def test_an_update_that_was_undone_counts_as_not_applied(start: Start) -> None:
    """Its gradients were finite, so its row does not call it skipped; the event does."""
    rows = rows_of(40)
    record = start(derived=LENGTHS)
    record.event("diverged", step=7, tensors=["wte.weight"])
    record.event("skip", step=7)
    found = epochs(written(record, rows))
    rows[7] |= {"skipped": 1.0}
    check(found[0], rows)
    assert found[0].num_not_applied == 1


def test_an_experiment_has_the_epochs_and_the_settings_of_its_runs(start: Start, tmp_path: Path) -> None:
    first = written(start(derived=LENGTHS), rows_of(40, 1), evals=(11,))
    config = changed(CONFIG, optimizer__grad_clip=10.0)
    second = written(start(parent="piano/1", config=config, derived=LENGTHS), rows_of(40, 2), evals=(31,))
    report = experiment_page("piano", list_runs(tmp_path / "runs", "piano"))
    page = markdown(report.page)
    for run, part in zip((first, second), page.split("\n## RUN ")[1:], strict=True):
        losses = [row["train loss"] for row in table_of(part)]
        assert losses == [format(one.train_loss, ROUNDED["of an epoch"]) for one in epochs(run)]
    assert "in epoch 3" in page.split("\n## RUN 2")[1]
    assert "## experimental settings of piano/2" in page
    assert set(report.files) == {"loss.svg", "lr.svg"}


def test_settings_along_a_chain_of_four(make: Make) -> None:
    """A key that was changed twice is struck once; what a run itself changed is bold; the rest stands plain."""
    sources = {"optimizer.grad_clip": "command line", "data.context_size": "command line"}
    make(sources=sources)
    one = changed(CONFIG, optimizer__grad_clip=10.0, lr__learning_rate=0.001)
    make(parent="piano/1", config=one)
    two = changed(one, optimizer__grad_clip=5.0)
    make(parent="piano/2", config=two)
    run = make(parent="piano/3", config=changed(two, data__batch_size=4))
    report = run_page(run)
    part = markdown(report.page).split("## experimental settings\n\n")[1].split("\n\n")[0]
    assert part.splitlines() == [
        "- piano/1, command line: `data.context_size` `256`",
        "- ~~`optimizer.grad_clip` `1.0` → `10.0`~~ (piano/2; replaced by piano/3)",
        "- `lr.learning_rate` `0.002` → `0.001` (piano/2)",
        "- `optimizer.grad_clip` `10.0` → `5.0` (piano/3)",
        "- **`data.batch_size` `16` → `4`**",
    ]
    page = to_html(report.page)
    assert re.findall(r"<del>(.*?)</del>", page) == [
        "<code>optimizer.grad_clip</code> <code>1.0</code> → <code>10.0</code>"
    ]
    assert "<li><b><code>data.batch_size</code> <code>16</code> → <code>4</code></b></li>" in page
