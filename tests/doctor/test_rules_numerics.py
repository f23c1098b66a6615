"""If this fails, numbers that are not finite are reported as another disease than they are, or not at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import History
from rung.doctor.rules import catalogue
from tests.cases.made import history, series, tensors

NAN, INF = math.nan, math.inf


def found(of: History) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(of)}


def good(num_steps: int = 60) -> list[float]:
    rng = np.random.default_rng(1)
    return list(2.0 + 0.05 * rng.standard_normal(num_steps))


def diverged(step: int, **fields: object) -> dict[str, object]:
    return {"kind": "diverged", "step": step, "micro": 0, "rank": 0, **fields}


def complete(finding: Finding) -> bool:
    """Enough for a reader to believe it or not."""
    return all((finding.what, finding.evidence, finding.ruled_out, finding.probe, finding.remedy, finding.title))


@given(step=st.integers(1, 59), value=st.sampled_from([NAN, INF, -INF]))
def test_a_bad_loss_is_n1_at_its_step_and_only_that(step: int, value: float) -> None:
    rows = {"loss": [*good(step), value], "norm": [*[1.0] * step, NAN]}
    seen = found(history(rows, events=[diverged(step, diagnosis="row 7 has a NaN")]))
    assert list(seen) == ["N1"]
    assert (seen["N1"].severity, seen["N1"].since) == ("fatal", step)
    assert "row 7 has a NaN" in " ".join(seen["N1"].evidence)
    assert complete(seen["N1"])


def test_a_bad_step_that_was_left_out_does_not_end_a_run() -> None:
    losses = good(100)
    losses[17] = NAN
    seen = found(history({"loss": losses, "norm": [1.0] * 17 + [NAN] + [1.0] * 82}))
    assert seen["N1"].severity == "sick"


def test_a_bad_step_is_remembered_after_the_run_went_back() -> None:
    undone = {17: [{"loss": NAN, "targets": 512.0}]}
    events = [diverged(17), {"kind": "rollback", "step": 17, "to": 10}]
    seen = found(history({"loss": good(100)}, events=events, superseded=undone))
    assert (seen["N1"].severity, seen["N1"].since) == ("sick", 17)


@pytest.mark.parametrize("kind", ["rollback", "weights_broken", "diverged"])
@pytest.mark.parametrize("step", [{}, {"step": None}])
def test_an_event_without_a_step_is_passed_over(kind: str, step: dict[str, object]) -> None:
    events = [{"kind": kind, **step}]
    for rule in catalogue():  # each by itself: `diagnose` leaves out one that raises
        assert not rule.id.startswith("N") or rule(history({"loss": good(100)}, events=events)) == []
    assert "N4" in found(half([0.5] * 60, [0.0] * 60, events=events))


def test_the_loss_of_another_objective_counts() -> None:
    seen = found(history({"loss": good(31), "critic/loss": [*good(30), NAN], "critic/norm": [1.0] * 30 + [NAN]}))
    assert list(seen) == ["N1"]
    assert "critic/loss" in seen["N1"].what


def test_a_nan_norm_under_a_finite_loss_is_an_element() -> None:
    seen = found(history({"loss": good(31), "norm": [1.0] * 30 + [NAN]}, events=[diverged(30)]))
    assert list(seen) == ["N2"]
    assert seen["N2"].severity == "fatal"
    assert "clipped" in " ".join(seen["N2"].evidence)
    assert complete(seen["N2"])


@pytest.mark.parametrize(
    ("norms", "grad"), [([1.0] * 30, 1e19), ([10.0**n for n in range(-10, 20)], INF)], ids=["tensors finite", "grew"]
)
def test_an_inf_norm_of_finite_elements_is_an_overflow(norms: list[float], grad: float) -> None:
    table = tensors(["a", "b"], [30], grad=grad)
    seen = found(history({"loss": good(31), "norm": [*norms, INF]}, tables={"tensors": table}))
    assert seen["N2"].severity == "sick"
    assert "overflow" in seen["N2"].what


def test_an_inf_tensor_out_of_nowhere_is_an_element_and_named() -> None:
    table = tensors(["a", "b", "never used"], [29, 30], grad=[[1.0, 1.0, NAN], [1.0, INF, NAN]])
    seen = found(history({"loss": good(31), "norm": [1.0] * 30 + [INF]}, tables={"tensors": table}))
    assert seen["N2"].severity == "fatal"
    assert "not finite: b" in " ".join(seen["N2"].evidence)


def half(scales: list[float], skips: list[float], norms: list[float] | None = None, **fields: object) -> History:
    rows = {"loss": good(len(scales)), "scale": scales, "skipped": skips}
    rows["norm"] = norms or [INF if skip else 1.0 for skip in skips]
    return history(rows, **fields)


def test_calibration_is_told_and_is_no_disease() -> None:
    scales = [2.0 ** max(10, 16 - n) for n in range(60)]
    seen = found(half(scales, [float(n < 6) for n in range(60)]))
    assert {rule: f.severity for rule, f in seen.items()} == {"N2": "info"}


def test_a_bad_norm_that_was_applied_is_no_calibration() -> None:
    seen = found(half([65536.0] * 60, [0.0] * 60, norms=[1.0] * 30 + [INF] + [1.0] * 29))
    assert seen["N2"].severity == "fatal"


@settings(max_examples=10)
@given(growth=st.sampled_from([0.5, 2.0]), size=st.floats(0.05, 20))
def test_a_norm_that_follows_the_scale_was_taken_too_early(growth: float, size: float) -> None:
    rng = np.random.default_rng(3)
    scales = [65536.0 * growth ** (n // 40) for n in range(120)]
    noise = size * np.exp(0.1 * rng.standard_normal(120))
    scaled = half(scales, [0.0] * 120, norms=list(noise * scales))
    assert found(scaled)["N2"].severity == "warn"
    assert "N2" not in found(half(scales, [0.0] * 120, norms=list(noise)))


def test_a_scale_below_one_is_n4() -> None:
    scales = [2.0 ** (16 - n) for n in range(18)]
    of = half(scales, [1.0] * 18, events=[diverged(17)])
    seen = found(of)
    assert list(seen) == ["N4"]
    assert seen["N4"].severity == "fatal"
    assert seen["N4"].changes == {"system.dtype": "bfloat16"}
    assert complete(seen["N4"])


def test_eight_skips_in_a_row_count_only_after_calibration() -> None:
    early = [1.0] * 16 + [0.0] * 300
    assert "N4" not in found(half([1024.0] * 316, early))
    late = [1.0] * 20 + [0.0] * 100 + [1.0] * 8 + [0.0] * 20
    assert found(half([1024.0] * 148, late))["N4"].since == 127


def test_many_skips_count_after_the_scale_was_found() -> None:
    often = [float(n % 10 == 0) for n in range(400)]
    assert found(half([1024.0] * 400, often))["N4"].severity == "warn"
    seldom = [float(n % 50 == 0) for n in range(400)]
    assert "N4" not in found(half([1024.0] * 400, seldom))


def test_broken_weights_explain_the_bad_loss_after_them() -> None:
    event = {"kind": "weights_broken", "step": 12, "tensors": ["head.weight"], "gradients_finite": True}
    rows = {"loss": [*good(13), NAN], "norm": [*[1.0] * 13, NAN]}
    seen = found(history(rows, events=[event, diverged(13)]))
    assert list(seen) == ["N3"]
    assert "head.weight" in seen["N3"].what
    assert complete(seen["N3"])


def test_broken_weights_are_seen_in_their_norms_too() -> None:
    weight = [[1.0, 1.0], [1.0, INF]]
    seen = found(history({"loss": [*good(20), NAN]}, tables={"tensors": tensors(["a", "b"], [10, 20], weight=weight)}))
    assert list(seen) == ["N3"]
    assert "(b)" in seen["N3"].what


def test_an_objective_that_was_not_due_has_no_broken_weights() -> None:
    columns = {name: [[1.0, 1.0], [1.0, NAN]] for name in ("grad", "weight", "update", "rms", "eps_share")}
    assert "N3" not in found(history({"loss": good(21)}, tables={"tensors": tensors(["a", "b"], [10, 20], **columns)}))


def test_no_targets_explain_a_bad_loss() -> None:
    rows = {"loss": [*good(5), NAN], "norm": [*[1.0] * 5, NAN], "targets": [512.0] * 5 + [0.0]}
    seen = found(history(rows | {"skipped": [0.0] * 5 + [1.0]}, events=[diverged(5)]))
    assert {rule: f.severity for rule, f in seen.items()} == {"N6": "fatal"}
    assert complete(seen["N6"])


def test_an_empty_micro_explains_it_though_others_had_targets() -> None:
    rows = {"loss": [*good(5), NAN], "targets_min": [128.0] * 5 + [0.0], "skipped": [0.0] * 5 + [1.0]}
    assert list(found(history(rows, events=[diverged(5)]))) == ["N6"]


def test_a_bad_loss_is_not_blamed_on_another_step_without_targets() -> None:
    rows = {"loss": [*good(30), NAN], "targets_min": [128.0] * 10 + [0.0] + [128.0] * 20}
    assert list(found(history(rows, events=[diverged(30)]))) == ["N1"]


def test_a_step_without_targets_that_changed_nothing_is_told() -> None:
    losses = good(60)
    losses[9] = NAN
    seen = found(history({"loss": losses, "targets": [512.0] * 9 + [0.0] + [512.0] * 50}))
    assert {rule: f.severity for rule, f in seen.items()} == {"N6": "warn"}


def test_micros_with_few_targets_are_told_when_there_are_many() -> None:
    uneven = [4.0 if n % 8 == 0 else 128.0 for n in range(100)]
    assert found(history({"loss": good(100), "targets_min": uneven}))["N6"].severity == "warn"
    once = [4.0 if n == 8 else 128.0 for n in range(100)]
    assert "N6" not in found(history({"loss": good(100), "targets_min": once}))


def test_a_short_record_is_no_disease() -> None:
    assert found(History()) == {}
    empty = History(rows={"loss": series([])})
    assert found(empty) == {}
