"""If this fails, the doctor calls healthy units, attention or logits sick, or overlooks those that are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.doctor.history import History
from tests.cases.made import found, history, series, severity, table, tensors

LOOKS = range(0, 200, 2)


def units(function: float, **columns: object) -> History:
    usual: dict[str, object] = {"silent": 0.3, "dead": 0.0, "saturated": 0.0, "slope": 0.8}
    usual["looks"] = [[min(50, n + 1)] * 2 for n in range(len(LOOKS))]
    made = table(["mlp.1", "mlp.3"], LOOKS, function=function, **(usual | columns))
    return history({"loss": np.linspace(3, 1, 200).tolist()}, tables={"units": made})


def attention(logits: object, entropy: float, collapsed: float) -> History:
    made = table(["a", "b"], LOOKS, logit=logits, entropy=entropy, collapsed=collapsed)
    return history({"loss": [2.0] * 200}, tables={"attention": made})


def answers(num_steps: int = 200, every: int = 10, evals: float | None = None, **values: object) -> History:
    """Looks with these values, constant or one per look."""
    steps = list(range(0, num_steps, every))
    usual: dict[str, object] = {"vocab": 32.0, "targets": 512.0, "entropy": 1.1, "loss": 1.2, "top1": 0.1}
    usual |= {"lse": 5.0, "logit_mean": 0.0, "target_entropy": 3.2, "target_share": 0.08}
    made = history({"loss": np.linspace(3, 1, num_steps).tolist()})
    for name, value in (usual | values).items():
        made.rows[f"logits/{name}"] = series(np.broadcast_to(np.asarray(value), (len(steps),)).tolist(), steps)
    if evals is not None:
        made.evals["val"] = {"loss": series([evals] * 3, [50, 100, 150])}
    return made


class TestDeadUnits:
    def test_a_layer_that_never_speaks(self) -> None:
        made = units(0, dead=[[0.2, 0.95]] * 100)
        assert severity(made, "A1") == "sick"
        assert "mlp.3" in found(made, "A1").what  # type: ignore[union-attr]

    def test_silent_in_one_look_is_not_dead(self) -> None:
        assert severity(units(0, silent=0.46), "A1") is None

    def test_few_looks_say_nothing(self) -> None:
        assert severity(units(0, dead=0.99, looks=20.0), "A1") is None

    def test_units_that_died_while_the_loss_fell_are_told_without_a_cure(self) -> None:
        """As in the best runs of a small GPT at a rate of 1e-2."""
        made = units(0, dead=[[0.1, 0.1]] * 60 + [[0.1, 0.6]] * 40)
        assert severity(made, "A1") == "info"
        assert found(made, "A1").changes == {}  # type: ignore[union-attr]

    @pytest.mark.parametrize(("share", "expected"), [(0.6, "warn"), (0.95, "sick")])
    def test_units_that_died_when_the_loss_rose(self, share: float, expected: str) -> None:
        looks = range(0, 600, 6)
        columns = {"silent": 0.3, "dead": [[0.1, 0.1]] * 60 + [[0.1, share]] * 40, "saturated": 0.0, "slope": 0.8}
        made = table(["mlp.1", "mlp.3"], looks, function=0, looks=[[min(50, n + 1)] * 2 for n in range(100)], **columns)
        losses = [*np.linspace(3, 1, 360), *np.full(240, 1.6)] + 0.02 * np.random.default_rng(0).standard_normal(600)
        sick = history({"loss": losses.tolist()}, tables={"units": made})
        assert severity(sick, "A1") == expected
        assert found(sick, "A1").changes == {"lr.learning_rate": pytest.approx(3.3e-4)}  # type: ignore[union-attr]

    def test_a_tanh_cannot_die(self) -> None:
        assert severity(units(1, dead=0.99), "A1") is None


class TestSaturation:
    # Scales 1, 5 and 50 of the weights before a tanh.
    @pytest.mark.parametrize(
        ("share", "slope", "expected"), [(0.001, 0.78, None), (0.47, 0.26, None), (0.94, 0.027, "warn")]
    )
    def test_by_scale(self, share: float, slope: float, expected: str | None) -> None:
        assert severity(units(1, saturated=share, slope=slope), "A2") == expected

    def test_a_gate_that_is_shut_is_judged_by_its_own_steepest_slope(self) -> None:
        assert severity(units(2, saturated=0.5, slope=0.04), "A2") is None
        assert severity(units(2, saturated=0.95, slope=0.002), "A2") == "info"

    def test_one_odd_look_is_not_enough(self) -> None:
        shares = [[0.0, 0.0]] * 100
        shares[60] = shares[80] = [0.99, 0.99]
        assert severity(units(1, saturated=shares), "A2") is None

    def test_targets_out_of_reach(self) -> None:
        assert severity(answers(outside=0.4), "A2") == "fatal"
        assert severity(answers(outside=0.0), "A2") is None


class TestAttention:
    @pytest.mark.parametrize(
        ("logit", "entropy", "collapsed", "expected"),
        [(2.4, 0.98, 0, None), (16, 0.34, 0, None), (93, 0.2, 0.1, None), (20, 0.01, 1.0, None),
         (60, 0.01, 1.0, "warn"), (200, 0.5, 0.0, None), (6725, 0.01, 1.0, "sick"), (16897, 0.0, 1.0, "fatal")],
    )  # fmt: skip
    def test_by_size(self, logit: float, entropy: float, collapsed: float, expected: str | None) -> None:
        assert severity(attention(logit, entropy, collapsed), "A3") == expected

    def test_beyond_a_hundred_growth_counts(self) -> None:
        grows = np.linspace(50, 300, 100)[:, None] * [1.0, 0.5]
        assert severity(attention(grows, 0.5, 0.0), "A3") == "warn"
        assert severity(attention(grows[::-1], 0.5, 0.0), "A3") is None


class TestDrift:
    def test_logits_that_run_away(self) -> None:
        assert severity(answers(lse=np.linspace(3.5, -60, 20)), "A4") == "warn"
        assert severity(answers(lse=np.linspace(3.5, 40, 20)), "A4") == "warn"

    @settings(max_examples=20, deadline=None)
    @given(start=st.floats(3, 12), end=st.floats(3, 12))
    def test_the_sizes_of_healthy_models_are_left_alone(self, start: float, end: float) -> None:
        assert severity(answers(lse=np.linspace(start, end, 20)), "A4") is None

    def test_a_large_vocabulary_is_no_drift(self) -> None:
        made = answers(lse=np.linspace(10.8, 11.5, 20), vocab=50304.0)
        made.derived["dtype"] = "bfloat16"
        assert severity(made, "A4") is None

    def test_large_but_still_is_no_drift(self) -> None:
        assert severity(answers(lse=[25.0, 24.0] * 10), "A4") is None


class TestEntropy:
    def test_sure_and_wrong(self) -> None:
        assert severity(answers(entropy=0.1, loss=7.0), "A5") == "sick"

    def test_sure_and_right(self) -> None:
        assert severity(answers(entropy=0.02, loss=0.05), "A5") is None

    def test_one_answer_for_everything(self) -> None:
        assert severity(answers(entropy=1.0, loss=3.0, top1=0.97), "A5") == "sick"

    def test_a_model_that_knows_only_frequencies_has_not_collapsed(self) -> None:
        assert severity(answers(entropy=3.2, loss=3.25, top1=1.0), "A5") is None

    def test_one_class_of_data_shows_in_the_eval(self) -> None:
        one = {"entropy": 5e-5, "loss": 5e-5, "top1": 1.0, "target_entropy": 0.0, "target_share": 1.0}
        assert severity(answers(**one, evals=16.0), "A5") == "sick"
        assert severity(answers(**one, evals=1e-4), "A5") is None

    def test_too_few_targets_to_tell(self) -> None:
        assert severity(answers(entropy=0.1, loss=7.0, targets=16.0), "A5") is None

    def test_better_but_less_sure(self) -> None:
        made = answers(600, entropy=np.linspace(3.2, 3.3, 60), loss=np.linspace(3.5, 3.4, 60))
        assert severity(made, "A5") == "info"
        made = answers(600, entropy=np.linspace(3.3, 3.2, 60), loss=np.linspace(3.5, 3.4, 60))
        assert severity(made, "A5") is None

    def test_rougher_than_the_parent(self) -> None:
        rng = np.random.default_rng(0)
        made, parent = (answers(600, entropy=1.0 + s * rng.standard_normal(60)) for s in (0.1, 0.01))
        assert severity(made, "A5") is None
        made.parent = parent
        assert severity(made, "A5") == "info"

    def test_the_entropy_of_every_step_comes_before_that_of_looks(self) -> None:
        """At the usual distance of looks there are three in 300 steps: too few to tell anything."""
        rng, noise = np.random.default_rng(0), np.random.default_rng(1).standard_normal(600) / 100
        rises, falls = np.linspace(3.2, 3.3, 600) + noise, np.linspace(3.3, 3.2, 600) + noise

        def made(entropy: np.ndarray) -> History:
            one = answers(600, every=100)
            one.rows["entropy"] = series(entropy.tolist(), list(range(600)))
            return one

        assert severity(made(rises), "A5") == "info"
        assert severity(made(falls), "A5") is None
        rough = made(falls + rng.standard_normal(600) / 5)
        assert severity(rough, "A5") is None
        rough.parent = made(falls)
        assert severity(rough, "A5") == "info"
        rough.parent = answers(600, entropy=np.linspace(3.3, 3.2, 60))  # looks and steps cannot be compared
        assert severity(rough, "A5") is None

    def test_a_short_run_without_looks(self) -> None:
        made = history({"loss": np.linspace(3, 1, 250).tolist(), "entropy": np.linspace(1, 2, 250).tolist()})
        assert severity(made, "A5") == "info"
        made.is_script = True  # the entropy of a policy, say
        assert severity(made, "A5") is None


def stream_of(scale: float, init_from: str = "scratch_next_token", depth: int = 6, width: int = 32) -> History:
    """A residual stream that starts at 1 and gains a factor `scale` per block."""
    names = [f"blocks.{n}" for n in range(depth)]
    sizes = [scale ** (n + 1) for n in range(depth)]
    modules = table(names, [0, 100], rms=sizes, peak=1.0, entered=[1.0, *sizes[:-1]], ratio=scale - 1)
    weights = tensors([f"{name}.weight" for name in names] + ["head.weight"], range(10), numel=float(width * width))
    return history({"loss": [2.0] * 10}, {"init_from": init_from}, tables={"modules": modules, "tensors": weights})


@pytest.mark.parametrize(
    ("growth", "expected"), [(0.40, None), (0.41, None), (0.5, None), (0.59, "warn"), (0.84, "warn"), (0.39, None)]
)
def test_the_residual_stream_against_the_parent(growth: float, expected: str | None) -> None:
    made, parent = stream_of(math.exp(growth)), stream_of(math.exp(0.40))
    assert severity(made, "A6") is None  # alone it means nothing
    made.parent = parent
    assert severity(made, "A6") == expected


@pytest.mark.parametrize("other", [{"depth": 12}, {"width": 64}])
def test_a_child_of_another_depth_or_width_is_not_compared(other: dict[str, Any]) -> None:
    made = stream_of(math.exp(0.7), **other)
    made.parent = stream_of(math.exp(0.40))
    assert severity(made, "A6") is None


def test_weights_from_elsewhere_have_a_scale_of_their_own() -> None:
    made = stream_of(3.0, "text/7")
    made.parent = stream_of(1.5)
    assert severity(made, "A6") is None
