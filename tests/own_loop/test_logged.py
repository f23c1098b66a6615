"""If this fails, what a script logs is taken for something else: an eval for training, a word for a number."""

from __future__ import annotations

import decimal
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.own_loop.logged import Eval, eval_of, sort_out


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("val/loss", ("val", "loss")),
        ("val_loss", ("val", "loss")),
        ("Val/Loss", ("Val", "loss")),
        ("eval_loss", ("eval", "loss")),
        ("eval/loss", ("eval", "loss")),
        ("eval/full_val/loss", ("full_val", "loss")),
        ("validation/acc/top1", ("validation", "acc/top1")),
        ("val_unseen/loss", ("val_unseen", "loss")),
        ("val2/loss", ("val2", "loss")),
        ("test/acc", ("test", "acc")),
        ("test.acc", ("test", "acc")),
        ("dev_f1", ("dev", "f1")),
        ("valid_ppl", ("valid", "ppl")),
        ("loss/val", ("val", "loss")),
        ("Accuracy/test", ("test", "Accuracy")),
    ],
)
def test_evals_are_known_by_their_names(name: str, found: tuple[str, str]) -> None:
    assert eval_of(name) == Eval(*found)


@pytest.mark.parametrize(
    "name",
    ["loss", "train/loss", "value_loss", "value/loss", "device_mem", "max_val", "evals", "val", "validity/x", 
     "latest/x", "train/val_weight", "devices/0", "testing"],
)  # fmt: skip
def test_other_names_are_training(name: str) -> None:
    assert eval_of(name) is None


def test_values_of_all_kinds_become_numbers() -> None:
    logged = sort_out(
        {
            "int": 3,
            "float": 0.5,
            "bool": True,
            "tensor": torch.tensor(2.0, requires_grad=True),
            "one": torch.ones(1, 1),
            "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
            "numpy": np.float32(0.25),
            "array": np.ones((1, 1)),
            "decimal": decimal.Decimal("1.5"),
            "none": None,
            "nested": {"a": {"b": 1}},
            "nan": math.nan,
        }
    )
    assert math.isnan(logged.row.pop("nan"))
    assert logged.row == {
        "int": 3, "float": 0.5, "bool": 1, "tensor": 2.0, "one": 1.0, "bfloat16": 1.5, "numpy": 0.25, "array": 1.0,
        "decimal": 1.5, "nested/a/b": 1,
    }  # fmt: skip
    assert logged.odd == {}


class Wicked:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value", ["text", b"bytes", [1, 2], torch.ones(3), np.ones(3), object(), 1j, Wicked(), {1, 2}, "\x1b[31mred"]
)
def test_what_is_no_number_is_told_and_left_out(value: object) -> None:
    logged = sort_out({"odd": value, "loss": 1.0})
    assert logged.row == {"loss": 1.0}
    assert set(logged.odd) == {"odd"}


def test_other_names_for_the_same_thing_are_kept_and_copied() -> None:
    logged = sort_out({"train/loss": 1.0, "learning_rate": 0.1, "grad_norm": 2.0})
    assert logged.row == {
        "train/loss": 1.0,
        "loss": 1.0,
        "learning_rate": 0.1,
        "lr": 0.1,
        "grad_norm": 2.0,
        "norm": 2.0,
    }
    assert sort_out({"train/loss": 1.0, "loss": 3.0}).row["loss"] == 3.0


@given(st.dictionaries(st.text(), st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.binary())))
def test_nothing_is_lost_and_nothing_raises(values: dict[str, object]) -> None:
    logged = sort_out(values)
    kept = len(logged.odd) + sum(len(of) for of in logged.evals.values())
    kept += sum(name in values for name in logged.row)
    merged = len([n for n in values if eval_of(n)]) - len({eval_of(n) for n in values if eval_of(n)})
    assert kept + merged >= sum(value is not None for value in values.values())
