"""If this fails, a curve of the page hides a spike or a NaN, is smoothed after thinning, or stands at a wrong x."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.runs import query
from rung.runs.query import open_run
from rung.runs.record import Record
from rung.web.curves import Points, check, points_of, smoothed, thinned
from tests.errors import raises_code
from tests.web.labs import NAN, SPIKE, ServedLab, start, write_long

VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=300)


@given(VALUES, st.floats(0, 0.999))
def test_smoothing_is_the_debiased_average_of_all_finite_values(values: list[float], weight: float) -> None:
    """Against a plain loop over the values."""
    average, gathered, wanted = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            gathered = weight * gathered + (1 - weight)
            wanted.append(average / gathered)
        else:
            wanted.append(value)
    np.testing.assert_allclose(smoothed(np.array(values), weight), wanted, rtol=1e-6, atol=1e-6 * 1e6)


def test_smoothing_does_not_bend_a_constant_at_its_beginning() -> None:
    np.testing.assert_allclose(smoothed(np.full(1000, 3.5), 0.99), np.full(1000, 3.5), rtol=1e-9)


@given(VALUES, st.integers(1, 60))
def test_thinning_hides_no_extreme_and_nothing_that_is_not_finite(values: list[float], num_points: int) -> None:
    x = np.arange(len(values), dtype=np.float64)
    found = thinned(Points(x, np.array(values)), None, None, num_points, 0.0)
    finite = [value for value in values if math.isfinite(value)]
    assert len(found["x"]) == len(found["min"]) == len(found["max"]) == len(found["mean"]) <= max(num_points, 1)
    shown = [value for name in ("min", "max") for value in found[name] if not isinstance(value, str)]
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    assert found["num_nonfinite"] == len(values) - len(finite)
    assert bool(found["has_nonfinite"]) == (len(finite) < len(values))
    if num_points > 1 or len(values) == 1:
        assert (found["x"][0], found["x"][-1]) == (0.0, len(values) - 1)
    assert found["last"] == (values[-1] if math.isfinite(values[-1]) else found["last"])


def test_smoothing_comes_before_thinning() -> None:
    """Ten points of a thousand: each is the mean of what was smoothed over all, not smoothed over ten."""
    values = np.random.default_rng(0).normal(size=1000)
    found = thinned(Points(np.arange(1000.0), values), None, None, 10, 0.9)
    np.testing.assert_allclose(found["mean"], smoothed(values, 0.9).reshape(10, 100).mean(1))
    assert found["max"] == values.reshape(10, 100).max(1).tolist()


def test_a_zoom_keeps_the_smoothing_of_what_came_before_and_one_neighbour_on_each_side() -> None:
    values = np.arange(100.0)
    found = thinned(Points(np.arange(100.0), values), 50, 60, 1000, 0.9)
    assert found["x"] == [float(x) for x in range(49, 62)]
    np.testing.assert_allclose(found["mean"], smoothed(values, 0.9)[49:62])


@pytest.mark.parametrize(
    ("asked", "code"),
    [(("weeks", 10, 0.0), "bad-value"), (("step", 0, 0.0), "bad-range"), (("step", 10, 1.0), "bad-range")],
)
def test_what_cannot_be_drawn_is_refused(asked: tuple[str, int, float], code: str) -> None:
    with raises_code(code):
        check(*asked)


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Steps 0 to 5, of which the resume repeats 4 and 5 with other losses, and goes on to 7; 100 targets a step."""
    root = tmp_path / "runs"
    record = start(root, derived={"rows_per_step": 8, "epoch_rows": 16})
    for step in range(6):
        record.log(step, {"loss": float(step), "targets": 100})
    record.finish("stopped")
    record = Record.reopen(record.path, command=["rung", "resume"])
    for step in range(4, 8):
        record.log(step, {"loss": 10.0 + step, "targets": 100})
    record.log(8, {"eval/full_val/loss": 1.0})
    record.finish("finished")
    return root


def test_every_axis_is_what_it_says(resumed: Path) -> None:
    run = open_run("piano/1", resumed)
    wanted = [0.0, 1.0, 2.0, 3.0, 14.0, 15.0, 16.0, 17.0]
    for axis, x in {
        "step": range(8),
        "targets": range(0, 800, 100),
        "epochs": np.arange(8) / 2,
    }.items():
        points = points_of(run, "loss", axis)
        assert points.values.tolist() == wanted
        assert points.x.tolist() == list(x)
    # An eval at step 8 is of the state after eight updates.
    assert points_of(run, "eval/full_val/loss", "targets").x.tolist() == [800.0]
    files = [run.path / "metrics" / f"{part:03d}.ndjson" for part in (0, 1)]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    kept = [row["unix_s"] for row in rows[:4] + rows[6:10]]
    np.testing.assert_allclose(points_of(run, "loss", "time").x, np.array(kept) - kept[0], atol=1e-9)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLab]:
    root = tmp_path_factory.mktemp("long") / "runs"
    write_long(root, num_steps=60_000, num_metrics=6)
    served = ServedLab(root)
    yield served
    served.stop()


def test_the_first_reading_of_a_long_run_says_how_far_it_is(long: ServedLab, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(query, "_QUICK_BYTES", 1000)
        answer = long.ask("/api/curve?runs=long/1&metric=loss")
        assert answer.status == 202
        (reading,) = answer.json["reading"]
        assert reading["run"] == "long/1"
        assert 0 <= reading["done_bytes"] <= max(reading["total_bytes"], 0)
        while answer.status == 202:
            answer = long.ask("/api/curve?runs=long/1&metric=loss&points=50")
    (series,) = answer.json["series"]
    assert series["num_points"] == 60_000


def test_a_spike_and_a_nan_of_a_long_run_are_seen_and_found_again_by_zooming(long: ServedLab) -> None:
    (series,) = long.get("/api/curve?runs=long/1&metric=loss&points=50&smooth=0.99")["series"]
    assert max(series["max"]) == 50.0
    assert (series["num_nonfinite"], len(series["has_nonfinite"])) == (1, 1)
    at = series["x"][series["max"].index(50.0)]
    assert abs(at - SPIKE) <= 60_000 / 50
    (zoomed,) = long.get(f"/api/curve?runs=long/1&metric=loss&from={NAN - 5}&to={NAN + 5}")["series"]
    assert zoomed["has_nonfinite"] == [NAN]
    assert zoomed["mean"][zoomed["x"].index(NAN)] == "NaN"


def test_a_run_without_the_metric_does_not_hide_the_others(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for names in (["loss"], ["accuracy"]):
        record = start(root)
        record.log(0, dict.fromkeys(names, 1.0))
        record.finish("finished")
    served = ServedLab(root)
    found = served.get("/api/curve?runs=piano/1,piano/2&metric=loss")
    assert [one["run"] for one in found["series"]] == ["piano/1"]
    assert [(one["run"], one["code"]) for one in found["errors"]] == [("piano/2", "no-metric")]
    served.stop()


def test_a_new_row_is_in_the_next_answer_and_baselines_stand_beside_evals(tmp_path: Path) -> None:
    record = start(tmp_path / "runs")
    record.log(0, {"eval/full_val/loss": 4.0})
    served = ServedLab(tmp_path / "runs")
    path = "/api/curve?runs=piano/1&metric=eval/full_val/loss"
    assert served.get(path)["series"][0]["mean"] == [4.0]
    assert served.get(path)["series"][0]["baselines"] == [{"name": "unigram", "value": 4.1}]
    record.log(1, {"eval/full_val/loss": 3.0})
    assert served.get(path)["series"][0]["mean"] == [4.0, 3.0]
    served.stop()
    record.finish("stopped")
