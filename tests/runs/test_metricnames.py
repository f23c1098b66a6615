"""If this fails, an imported run has the wrong evals: a curve to be judged by is missed, or a clock is judged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.runs.evalnames import SETS, eval_name


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("val/loss", ("val", "loss")),
        ("val_loss", ("val", "loss")),
        ("val.loss", ("val", "loss")),
        ("Validation Loss", ("validation", "loss")),
        ("valid_loss", ("valid", "loss")),
        ("eval_loss", ("eval", "loss")),
        ("eval/loss", ("eval", "loss")),
        ("eval/full_val/loss", ("full_val", "loss")),
        ("eval/full_val/acc/top1", ("full_val", "acc/top1")),
        ("test/acc", ("test", "acc")),
        ("test_acc_top5", ("test", "acc_top5")),
        ("test/FID", ("test", "FID")),
        ("val/acc/top1", ("val", "acc/top1")),
        ("Loss/val", ("val", "loss")),
        ("loss/test", ("test", "loss")),
        ("loss_val", ("val", "loss")),
        ("accuracy_validation", ("validation", "accuracy")),
        ("eval_rouge1", ("eval", "rouge1")),
        ("val_loss_epoch", ("val", "loss_epoch")),
        ("dev_wer", ("dev", "wer")),
    ],
)
def test_evals_are_recognised(metric: str, expected: tuple[str, str]) -> None:
    assert eval_name(metric) == expected


@pytest.mark.parametrize(
    "metric",
    [
        "loss", "train/loss", "train_loss", "lr", "eval_s", "eval/runtime", "eval_runtime", "eval_samples_per_second",
        "eval/steps_per_second", "best_val_loss", "value/loss", "value_loss", "device/temp", "valid_rows", "dev_mem",
        "unit_test", "val", "val/", "/val", "", "/", "_", "eval//loss", "test/epoch", "evaluate_loss", "n_val",
    ],
)  # fmt: skip
def test_what_is_no_eval_stays_a_metric(metric: str) -> None:
    assert eval_name(metric) is None


@given(st.text(max_size=30))
def test_any_name_is_answered(metric: str) -> None:
    found = eval_name(metric)
    assert found is None or (found[0] and found[1])


@given(st.sampled_from(sorted(SETS)), st.text(min_size=1, max_size=12).filter(lambda name: "/" not in name))
def test_a_set_before_a_slash_is_an_eval_unless_it_is_a_clock(of_set: str, name: str) -> None:
    found = eval_name(f"{of_set}/{name}")
    assert found is None or found[0] == of_set
    if name.isalpha() and name.isascii() and len(name) > 7 and not name.lower().endswith("time"):
        assert found is not None
