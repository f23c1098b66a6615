"""If this fails, what a script logs is taken for something else: an eval for training, a word for a number."""

from __future__ import annotations

import decimal
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.script.logged import sort_out


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


def test_of_several_names_for_the_same_thing_the_first_counts() -> None:
    for names in (["train_loss", "train/loss", "training_loss"], ["training_loss", "train_loss", "train/loss"]):
        assert sort_out({name: float(i) for i, name in enumerate(names)}).row["loss"] == 0.0
    logged = sort_out({"val/loss": 1.0, "val_loss": 2.0})
    assert logged.evals == {"val": {"loss": 1.0}}
    assert set(logged.odd) == {"val_loss"}


@given(st.dictionaries(st.text(), st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.binary())))
def test_nothing_is_lost_and_nothing_raises(values: dict[str, object]) -> None:
    logged = sort_out(values)
    kept = len(logged.odd) + sum(len(of) for of in logged.evals.values())
    kept += sum(name in values for name in logged.row)
    assert kept >= sum(value is not None for value in values.values())
