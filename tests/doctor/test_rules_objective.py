"""If this fails, the doctor takes slow progress for a flat eval or noise for overfitting, or misses the real thing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.doctor.history import History
from tests.cases.made import found, history, series, severity
from tests.cases.running import setup_of
from tests.cases.tiny import Tiny


def judged(
    evals: Sequence[float], train: tuple[float, float] = (3.0, 1.2), error: float = 0.02, every: int = 50
) -> History:
    """Evals every `every` steps beside a loss that falls from one number to the other, with a little noise."""
    num_steps = every * len(evals)
    noise = 0.02 * np.random.default_rng(0).standard_normal(num_steps + 1)
    made = history(
        {"loss": (np.geomspace(*train, num_steps + 1) + noise).tolist()},
        derived={"epoch_rows": 3200, "rows_per_step": 32, "parameters": 1000},
    )
    steps = [every * (n + 1) for n in range(len(evals))]
    made.evals["val"] = {"loss": series(evals, steps), "loss_se": series([error] * len(evals), steps)}
    return made


class TestFlat:
    def test_exactly_the_same_every_time(self) -> None:
        made = judged([3.4774] * 6)
        assert severity(made, "E1") == "sick"
        assert "exactly" in found(made, "E1").what  # type: ignore[union-attr]

    def test_within_its_error(self) -> None:
        assert severity(judged([3.40, 3.41, 3.39, 3.40, 3.41, 3.40]), "E1") == "warn"

    def test_slow_but_real_progress(self) -> None:
        """From .024 to .003 per epoch, as training does."""
        evals = [0.500, 0.476, 0.462, 0.453, 0.447, 0.443, 0.440]
        assert severity(judged(evals, (0.55, 0.44), error=0.05), "E1") is None

    def test_four_evals_are_too_few(self) -> None:
        assert severity(judged([3.4] * 4), "E1") is None

    def test_nothing_was_learned_at_all(self) -> None:
        assert severity(judged([3.4] * 6, (3.4, 3.39)), "E1") is None

    @settings(max_examples=25, deadline=None)
    @given(st.floats(0.2, 3.0), st.floats(0.5, 0.95))
    def test_evals_that_follow_training_are_never_flat(self, gain: float, shape: float) -> None:
        evals = 1.0 + gain * shape ** np.arange(8)
        made = judged(evals.tolist(), (1.0 + gain, 1.0 + gain * shape**8), error=0.05)
        assert severity(made, "E1") is None


class TestOverfit:
    def test_up_again_while_training_falls(self) -> None:
        made = judged([2.97, 2.5, 2.2, 2.5, 3.4, 4.0, 4.41], (3.0, 0.013))
        finding = found(made, "E2")
        assert finding is not None
        assert (finding.severity, finding.since, finding.changes) == ("sick", 150, {"optimizer.max_iters": 150})
        assert any("targets per parameter" in line for line in finding.evidence)

    def test_a_little_is_a_warning(self) -> None:
        assert severity(judged([3.0, 2.0, 1.5, 1.56, 1.57, 1.58], (3.0, 0.8), error=0.01), "E2") == "warn"

    def test_within_the_error_it_is_noise(self) -> None:
        assert severity(judged([3.0, 2.0, 1.5, 1.56, 1.57, 1.58], (3.0, 0.8), error=0.04), "E2") is None

    @pytest.mark.parametrize(("rise", "expected"), [(1.06, None), (1.15, "sick")])
    def test_without_an_error_a_tenth_is_asked_for(self, rise: float, expected: str | None) -> None:
        """A set that fits one batch."""
        made = judged([3.0, 2.0, 1.5, *[1.5 * rise] * 3], (3.0, 0.8))
        del made.evals["val"]["loss_se"]
        assert severity(made, "E2") == expected

    def test_nothing_is_overfit_in_the_first_epoch(self) -> None:
        made = judged([2.97, 2.5, 2.2, 2.5, 3.4, 4.0, 4.41], (3.0, 0.013))
        made.derived["epoch_rows"] = 32 * 350
        assert severity(made, "E2") is None
        made.derived["epoch_rows"] = 32 * 349
        assert severity(made, "E2") == "sick"

    @pytest.mark.parametrize("warmup", [0, 100, 150, 1000])
    def test_the_command_is_one_that_a_schedule_allows(self, warmup: int) -> None:
        made = judged([2.97, 2.5, 2.2, 2.5, 3.4, 4.0, 4.41], (3.0, 0.013))
        made.derived["warmup_steps"] = warmup
        changes = found(made, "E2").changes  # type: ignore[union-attr]
        setup = setup_of(Tiny, f"lr.warmup_iters={warmup}", *(f"{key}={value}" for key, value in changes.items()))
        assert setup.num_steps == changes["optimizer.max_iters"]
        assert setup.schedule.warmup_steps < setup.num_steps

    def test_two_evals_are_not_three(self) -> None:
        assert severity(judged([3.0, 2.0, 1.5, 1.4, 2.0, 2.2], (3.0, 0.8)), "E2") is None

    def test_a_run_that_diverges_does_not_overfit(self) -> None:
        assert severity(judged([3.0, 2.0, 1.5, 2.0, 2.5, 3.0], (1.2, 3.0)), "E2") is None


def looked(num_steps: int = 200, **values: float) -> History:
    steps = list(range(0, num_steps, 10))
    usual = {"vocab": 32.0, "targets": 512.0, "loss": 1.2, "target_entropy": 3.2, "target_share": 0.08}
    usual |= {"target_loss": 1.0, "other_loss": 1.2}
    made = history({"loss": [1.2] * num_steps}, derived={"epoch_rows": 32000, "rows_per_step": 32})
    for name, value in (usual | values).items():
        made.rows[f"logits/{name}"] = series([value] * len(steps), steps)
    return made


class TestPadding:
    def test_three_quarters_of_the_targets_cost_nothing(self) -> None:
        assert severity(looked(target_share=0.75, target_loss=0.001, other_loss=2.82, loss=0.68), "E5") == "warn"

    def test_padding_that_is_left_out(self) -> None:
        assert severity(looked(loss=1.39, other_loss=1.46), "E5") is None

    def test_rows_with_one_target_have_no_padding(self) -> None:
        """Two in a hundred are positive."""
        made = looked(target_share=0.98, target_loss=0.01, other_loss=1.5, loss=0.04)
        assert severity(made, "E5") == "warn"
        made.rows["targets"] = series([32.0] * 200)
        assert severity(made, "E5") is None

    def test_a_frequent_class_that_is_hard(self) -> None:
        assert severity(looked(target_share=0.6, target_loss=0.4, other_loss=1.5, loss=0.84), "E5") is None

    def test_a_few_targets_are_of_one_kind_by_chance(self) -> None:
        assert severity(looked(target_share=0.75, target_loss=0.001, other_loss=2.8, loss=0.7, targets=8), "E5") is None


class TestTooGood:
    def made(self, loss: float, epoch_rows: int = 32000, **values: float) -> History:
        made = looked(**values)
        made.rows["logits/loss"] = series([loss] * 20, range(0, 200, 10))
        made.rows["loss"] = series(np.geomspace(3.4, loss, 200).tolist()[:100] + [loss] * 100)
        made.derived["epoch_rows"] = epoch_rows
        return made

    def test_certain_before_one_epoch(self) -> None:
        assert severity(self.made(0.007), "E6") == "warn"

    @pytest.mark.parametrize(("on_eval", "expected"), [(0.0013, "info"), (0.097, None), (None, None)])
    def test_rows_with_one_target_may_be_easy(self, on_eval: float | None, expected: str | None) -> None:
        made = self.made(0.007)
        made.rows["targets"] = series([32.0] * 200)  # one a row
        if on_eval is not None:
            made.evals["val"] = {"loss": series([on_eval], [100])}
        assert severity(made, "E6") == expected

    def test_learned_by_heart(self) -> None:
        assert severity(self.made(0.007, epoch_rows=640), "E6") is None

    def test_as_good_as_such_models_get(self) -> None:
        assert severity(self.made(1.06), "E6") is None

    def test_targets_that_hardly_vary(self) -> None:
        assert severity(self.made(0.007, target_entropy=0.1), "E6") is None

    def test_a_sum_with_something_else(self) -> None:
        made = self.made(0.007)
        made.rows["logits/loss"] = series([1.2] * 20, range(0, 200, 10))
        assert severity(made, "E6") is None

    def test_a_loss_that_is_not_in_nats(self) -> None:
        made = self.made(0.007)
        made.rows = {name: values for name, values in made.rows.items() if not name.startswith("logits/")}
        assert severity(made, "E6") is None


@pytest.mark.parametrize("rule", ["E1", "E2", "E5", "E6"])
def test_an_empty_run_has_nothing(rule: str) -> None:
    assert severity(history({"loss": []}), rule) is None
