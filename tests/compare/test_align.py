"""If this fails, two runs are compared at points that do not belong together, or a NaN disappears into an average."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.compare.align import interpolated, outcome
from rung.compare.reading import evals_of, is_lower_better, main_metric, targets_at
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.errors import raises_code

Make = Callable[..., Run]
NAN = float("nan")


def test_equal_steps(make: Make) -> None:
    found = outcome(make(), make(losses=(4.0, 2.9, 2.2, 2.3)))
    assert found.metric == "val/loss"
    assert [(s.at, s.a, s.b) for s in found.at_steps] == [(10, 4, 4), (20, 3, 2.9), (30, 2.5, 2.2), (40, 2.4, 2.3)]
    assert found.a.final == found.a.best == (40, 2.4)
    assert found.b.final == (40, 2.3)
    assert found.b.best == (30, 2.2)
    assert found.problems == []


def test_equal_targets_of_runs_with_other_batches(make: Make) -> None:
    found = outcome(make(), make(losses=(3.8, 2.6, 2.2), targets=3200.0))
    # The second has seen at step 10 what the first has at step 20, and has no eval before that.
    assert [(s.at, s.step, s.a) for s in found.at_targets] == [(32000, 20, 3.0), (48000, 30, 2.5), (64000, 40, 2.4)]
    assert [s.b for s in found.at_targets] == pytest.approx([3.8, 3.2, 2.6])
    assert len(found.at_steps) == 3


def test_nothing_is_continued_or_averaged_over_a_nan(make: Make) -> None:
    found = outcome(make(), make(losses=(3.8, NAN, 2.2), targets=3200.0))
    assert [s.step for s in found.at_targets] == [20, 40]
    assert math.isnan(found.at_targets[1].b)  # an eval of its own, as it was
    assert math.isnan(found.at_steps[1].b)
    assert found.b.num_not_finite == 1
    assert found.b.best == (30, 2.2)
    assert "1 of 3 values of piano/2 are not finite" in found.problems
    assert outcome(make(losses=(NAN, math.inf)), make()).a.best is None


def test_no_shared_step_is_said(make: Make) -> None:
    found = outcome(make(), make(losses=(3.0,), every=7))
    assert found.at_steps == []
    assert any("no step has a val/loss of both runs" in problem for problem in found.problems)


def test_targets_are_those_before_the_step(make: Make, start: Callable[..., Record]) -> None:
    at = targets_at(make())
    assert (at(0), at(1), at(40), at(41), at(0.5)) == (0.0, 1600.0, 64000.0, None, None)
    record = start()
    for step in (0, 1, 3):
        record.log(step, {"targets": 10.0})
    record.log(2, {"loss": 1.0})
    record.finish("finished")
    at = targets_at(open_run(record.path, record.path))
    assert (at(2), at(3), at(4)) == (20.0, None, None)  # row 2 does not say


def test_a_run_without_targets_has_steps_a_second(make: Make, start: Callable[..., Record]) -> None:
    record = start()
    for step in range(3):
        record.log(step, {"loss": 3.0 - step, "step_s": 0.25})
    record.finish("finished")
    run = open_run(record.path, record.path)
    assert main_metric(run) == "loss"
    found = outcome(run, run)
    assert (found.a.targets_per_s, found.a.steps_per_s, found.a.targets) == (None, 4.0, None)
    assert found.a.final == (2, 1.0)
    assert any("do not say how many targets" in problem for problem in found.problems)
    assert outcome(make(), make()).a.targets_per_s == 3200.0


def test_higher_is_better_where_a_definition_says_so(start: Callable[..., Record]) -> None:
    runs = []
    for values in ((0.1, 0.5, 0.4), (0.2, 0.3, 0.6)):
        record = start(definitions={"eval/val/accuracy": {"better": "higher"}})
        for number, value in enumerate(values):
            record.event("eval", step=number, results={"val": {"loss": 1.0, "accuracy": value}})
        record.finish("finished")
        runs.append(open_run(record.path, record.path))
    found = outcome(*runs, "val/accuracy")
    assert not found.is_lower_better
    assert found.a.best == (1, 0.5)
    assert is_lower_better(runs[0], "val/loss") is None
    assert outcome(*runs, "eval/val/loss").is_lower_better


def test_a_direction_that_nobody_gave_is_said(start: Callable[..., Record]) -> None:
    record = start()
    record.event("eval", step=0, results={"val": {"accuracy": 0.5}})
    record.finish("finished")
    run = open_run(record.path, record.path)
    assert main_metric(run) == "val/accuracy"
    assert any("neither run says whether a higher" in problem for problem in outcome(run, run).problems)


def test_the_metric_of_one_run_only(make: Make) -> None:
    found = outcome(make(), make(evals_of="other"))
    assert found.b.final is None
    assert "piano/2 has no val/loss" in found.problems
    with raises_code("no-metric") as caught:
        outcome(make(), make(), "val/los")
    assert "val/loss" in str(caught.value)


def test_a_run_with_nothing_in_it(make: Make, start: Callable[..., Record]) -> None:
    record = start()
    record.close()
    run = open_run(record.path, record.path)
    assert evals_of(run) == {}
    assert outcome(run, make()).problems
    assert outcome(make(), run).problems


finite = st.floats(-1e6, 1e6)


@given(
    points=st.dictionaries(st.integers(0, 1000), finite, min_size=1, max_size=8),
    x=st.floats(-10, 1010),
)
def test_interpolation_is_that_of_numpy_inside_and_nothing_outside(points: dict[int, float], x: float) -> None:
    xs = sorted(points)
    values = [points[at] for at in xs]
    found = interpolated([float(at) for at in xs], values, x)
    if xs[0] <= x <= xs[-1]:
        assert found == pytest.approx(np.interp(x, xs, values), rel=1e-9, abs=1e-6)
    else:
        assert found is None
