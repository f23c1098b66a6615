"""If this fails, the doctor does not see that an input is ignored, that dreams decay, or that a game is over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import History, Series, Table
from tests.cases.performance_cases import made

EVALS = np.arange(100, 601, 100)


def found(history: History) -> dict[str, Finding]:
    return {f.rule: f for f in diagnose(history)}


def probed(rise: float, low: float, high: float, name: str = "control") -> History:
    rows = {"": rise, "_low": low, "_high": high}
    return made(**{f"probe/without_{name}{end}": (EVALS[:-1], np.full(5, v)) for end, v in rows.items()})


# rises of the loss with 95 % intervals, measured on a model that uses its control, on one that does not, and on noise
@pytest.mark.parametrize(
    ("rise", "low", "high", "is_ignored"),
    [(260.0, 255.0, 264.0, False), (0.0, 0.0, 0.0, True), (-0.003, -0.008, 0.001, True), (0.0, -0.05, 0.05, False)],
)
def test_an_input_is_ignored_when_nothing_gets_worse_without_it(
    rise: float, low: float, high: float, is_ignored: bool
) -> None:
    assert ("C1" in found(probed(rise, low, high))) == is_ignored


def test_the_input_is_named_also_where_its_name_looks_like_a_bound() -> None:
    finding = found(probed(0.0, 0.0, 0.0, "gear_low"))["C1"]
    assert "gear_low" in finding.title


def test_what_cannot_be_told_yet_is_not_told() -> None:
    assert "C1" not in found(probed(0.0, 0.0, float("nan")))
    history = probed(0.0, 0.0, 0.0)
    history.derived["num_steps"] = 10_000  # the beginning of a long run
    assert "C1" not in found(history)
    history.derived["num_steps"] = 1100  # the last eval, at step 500, is not yet of its second half
    assert "C1" not in found(history)
    history.derived["num_steps"] = 600
    assert "C1" in found(history)


def rolled(errors: dict[int, float], still: dict[int, float], mean: float, num_evals: int = 6) -> History:
    history = made()
    steps = EVALS[:num_evals]
    measures = {f"l1@{h}": v for h, v in errors.items()} | {f"persistence@{h}": v for h, v in still.items()}
    measures |= {f"mean_frame@{h}": mean for h in errors}
    history.evals = {"rollout": {name: Series(steps, np.full(len(steps), v)) for name, v in measures.items()}}
    return history


STILL = {1: 0.10, 8: 0.35, 16: 0.40}


@pytest.mark.parametrize(
    ("errors", "part"),
    [
        ({1: 0.05, 8: 0.07, 16: 0.08}, None),  # healthy: 1.6 times
        ({1: 0.02, 8: 0.15, 16: 0.25}, "12.5 times"),
        ({1: 0.06, 8: 0.3, 16: 0.55}, "predicting the average"),
        ({1: 0.095, 8: 0.2, 16: 0.3}, "predicting no change"),
    ],
)
def test_rollouts_are_compared_with_what_needs_no_model(errors: dict[int, float], part: str | None) -> None:
    findings = found(rolled(errors, STILL, mean=0.44))
    assert ("C3" in findings) == (part is not None)
    if part:
        assert part in findings["C3"].what


def test_the_horizon_at_which_it_is_lost_is_named() -> None:
    finding = found(rolled({1: 0.06, 8: 0.36, 16: 0.55}, STILL, mean=0.44))["C3"]
    assert "from horizon 8 on" in " ".join(finding.evidence)


def test_few_evals_and_measures_that_are_no_errors_say_nothing() -> None:
    assert "C3" not in found(rolled({1: 0.06, 16: 0.55}, STILL, mean=0.44, num_evals=2))
    history = rolled({1: 0.05, 16: 0.08}, STILL, mean=0.44)
    history.evals["rollout"] |= {"psnr@1": Series(EVALS, np.full(6, 30.0)), "psnr@16": Series(EVALS, np.full(6, 900.0))}
    assert "C3" not in found(history)


def game(**parts: Any) -> History:
    usual = {"accuracy": 0.54, "gap": 0.02, "hinge": 1.9, "loss": 1.9, "norm": 1.0}
    rows = {f"discriminator/{name}": value for name, value in (usual | parts).items()}
    return made(**rows, grad_ratio=(np.arange(0, 600, 10), np.full(60, 0.07)))


# measured: healthy .54 and .02; dominated .999 and 71 to 84
@pytest.mark.parametrize(
    ("parts", "severity"),
    [
        ({}, None),
        ({"accuracy": 0.999, "gap": 75.0, "hinge": 0.0}, "sick"),
        ({"accuracy": 0.99, "gap": 2.5, "hinge": 0.01}, "warn"),
        ({"accuracy": 0.99, "gap": 2.5}, None),  # sure, and still learning
        ({"accuracy": 0.9, "gap": 20.0}, None),
    ],
)
def test_a_discriminator_that_has_won(parts: dict[str, float], severity: str | None) -> None:
    findings = found(game(**parts))
    assert (findings["G1"].severity if "G1" in findings else None) == severity


@pytest.mark.parametrize(("ratio", "severity"), [(0.07, None), (1e-5, "warn"), (0.0, "sick")])
def test_a_discriminator_that_is_not_felt(ratio: float, severity: str | None) -> None:
    history = game()
    history.rows["grad_ratio"] = Series(np.arange(0, 600, 10), np.full(60, ratio))
    history.config["adversarial.weight"] = 1e-5
    findings = found(history)
    assert (findings["G2"].severity if "G2" in findings else None) == severity
    if ratio == 1e-5:
        assert findings["G2"].changes["adversarial.weight"] == pytest.approx(0.05)  # then the ratio is 0.05


def tensors(own: float, other: float) -> Table:
    names = ["generator.0.weight", "discriminator.0.weight", "discriminator.0.bias"]
    steps = np.arange(0, 600, 20)
    update = np.tile([other, own, own], (len(steps), 1))
    columns = {"grad": 1.0, "weight": 1.0, "rms": 1.0, "numel": 100.0, "decayed": 1.0, "eps_share": 0.0}
    return Table(steps, names, {name: np.full(update.shape, v) for name, v in columns.items()} | {"update": update})


def test_a_discriminator_that_is_not_trained_is_told_once() -> None:
    history = game()
    history.tables["tensors"] = tensors(own=0.0, other=2e-3)
    findings = found(history)
    assert findings["G2"].severity == "sick"
    assert "O9" not in findings  # the same, with less detail


def test_a_discriminator_that_rests_between_its_steps_is_trained() -> None:
    """It is due in every third step, and most looks at the tensors fall on the others."""
    history = game()
    table = tensors(own=0.0, other=2e-3)
    due = table.steps % 3 == 0
    table.columns["update"][due, 1:] = 2e-3
    history.tables["tensors"] = table
    steps = np.arange(0, 600, 3)
    history.rows["discriminator/norm"] = Series(steps, np.ones(len(steps)))
    assert "G2" not in found(history)
