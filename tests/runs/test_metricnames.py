"""If this fails, a run has the wrong evals: a curve to be judged by is missed, or a clock is judged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.runs.metricnames import SETS, eval_of, is_eval_clock, usual_name


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
        ("Val/Loss", ("val", "loss")),
        ("validation/acc/top1", ("validation", "acc/top1")),
        ("val_unseen/loss", ("val_unseen", "loss")),
        ("val_wiki/loss", ("val_wiki", "loss")),
        ("eval/wiki/loss", ("wiki", "loss")),
        ("val2/loss", ("val2", "loss")),
        ("val2_loss", ("val2", "loss")),
        ("test.acc", ("test", "acc")),
        ("dev_f1", ("dev", "f1")),
        ("dev_clean/wer", ("dev_clean", "wer")),
        ("valid_ppl", ("valid", "ppl")),
        ("Accuracy/test", ("test", "Accuracy")),
        ("val_loss/head", ("val", "loss/head")),
        ("val_loss/dataloader_idx_1", ("val_1", "loss")),
    ],
)
def test_evals_are_recognised(metric: str, expected: tuple[str, str]) -> None:
    assert eval_of(metric) == expected


@pytest.mark.parametrize(
    "metric",
    [
        "loss", "train/loss", "train_loss", "lr", "eval_s", "eval/runtime", "eval_runtime", "eval_samples_per_second",
        "eval/steps_per_second", "best_val_loss", "value/loss", "value_loss", "device/temp", "valid_rows", "dev_mem",
        "unit_test", "val", "val/", "/val", "", "/", "_", "eval//loss", "test/epoch", "evaluate_loss", "n_val",
        "device_mem", "max_val", "evals", "validity/x", "latest/x", "train/val_weight", "devices/0", "testing",
        "dev_mem/gpu0", "val/time", "loss/dataloader_idx_0", "/dataloader_idx_0", "val_", "val2",
    ],
)  # fmt: skip
def test_what_is_no_eval_stays_a_metric(metric: str) -> None:
    assert eval_of(metric) is None


@given(st.text(max_size=30))
def test_any_name_is_answered(metric: str) -> None:
    found = eval_of(metric)
    assert found is None or (found[0] and found[1])


@given(st.sampled_from(sorted(SETS)), st.text(min_size=1, max_size=12).filter(lambda name: "/" not in name))
def test_a_set_before_a_slash_is_an_eval_unless_it_is_a_clock(of_set: str, name: str) -> None:
    found = eval_of(f"{of_set}/{name}")
    assert found is None or found[0] == of_set
    if name.isalpha() and name.isascii() and len(name) > 7 and not name.lower().endswith("time"):
        assert found is not None


@pytest.mark.parametrize("metric", ["eval_runtime", "val/time", "eval/wiki/samples_per_second", "test/epoch"])
def test_a_clock_of_an_eval_is_known_as_one(metric: str) -> None:
    assert is_eval_clock(metric)


@pytest.mark.parametrize("metric", ["time", "step_s", "val/loss", "train/runtime", "epoch"])
def test_other_names_are_no_clocks_of_evals(metric: str) -> None:
    assert not is_eval_clock(metric)


def test_other_names_of_the_same_thing() -> None:
    names = ["train/loss", "Train/Loss", "grad_norm", "learning_rate", "lr-AdamW", "loss", "norm", "train/acc"]
    assert [usual_name(name) for name in names] == ["loss", "loss", "norm", "lr", "lr", None, None, None]
