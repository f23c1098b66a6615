"""If this fails, validation rows that are in the training set pass unseen, or a healthy split is called a leak."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rung.script.overlap import overlap, rows_of
from rung.script.run import OwnRun
from tests.script.test_run import ended

RNG = np.random.default_rng(1)
ROWS = RNG.standard_normal((3000, 7)).astype(np.float32)
PICTURES = RNG.integers(0, 255, (500, 3, 5, 5)).astype(np.uint8)
TEXT = RNG.integers(0, 50, 40_000)


def share(train: object, val: object) -> float | None:
    both = rows_of(train), rows_of(val)
    assert both[0] is not None
    assert both[1] is not None
    found = overlap(*both)
    return None if found is None else found.share


@pytest.mark.parametrize(
    ("train", "val", "expected"),
    [
        (ROWS[:2000], ROWS[2000:], 0.0), (ROWS, ROWS[:400], 1.0), (ROWS[:1200], ROWS[1000:1400], 0.5),
        (torch.from_numpy(ROWS), torch.from_numpy(ROWS[5:300]), 1.0), (PICTURES[:400], PICTURES[400:], 0.0),
        (PICTURES, PICTURES[::5], 1.0), (TEXT[:30_000], TEXT[30_000:], 0.0), (TEXT, TEXT, 1.0),
        (TEXT, TEXT[10_001:20_003], 1.0), (TEXT[:20_000], TEXT[15_000:25_000], 0.5),
        (ROWS, PICTURES, None), (TEXT, TEXT.astype(np.int32), None), (ROWS, TEXT, None), (ROWS, ROWS[:5], None),
    ],
)  # fmt: skip
def test_the_share_of_rows_that_are_in_train(train: object, val: object, expected: float | None) -> None:
    assert share(train, val) == (None if expected is None else pytest.approx(expected, abs=0.02))


def test_a_silence_that_train_repeats_is_no_leak() -> None:
    train, val = RNG.integers(1, 200, 400_000).astype(np.uint8), RNG.integers(1, 200, 20_000).astype(np.uint8)
    train[100_000:110_000], val[500:600] = 0, 0
    assert share(train, val) == pytest.approx(0, abs=0.01)
    val[1000:11_000] = train[200_000:210_000]
    assert share(train, val) == pytest.approx(0.5, abs=0.02)


def test_rows_that_repeat_anyway_are_counted() -> None:
    few = np.repeat(ROWS[:10], 100, axis=0)
    train, val = rows_of(few), rows_of(few[:50])
    assert train is not None
    assert val is not None
    assert overlap(train, val) == (50, 1.0, 1.0)


HALVES = torch.ones(5000, dtype=torch.bfloat16)  # numpy has no such type


@pytest.mark.parametrize(
    "what", [np.arange(5000), HALVES, "a path", b"bytes", np.array(["text"] * 100), np.zeros(()), None]
)
def test_what_has_no_rows_is_left_alone(what: object) -> None:
    assert rows_of(what) is None


@pytest.mark.parametrize("names", [("train", "val"), ("val", "train")])
def test_sets_that_a_script_names_are_compared(names: tuple[str, str], start: Callable[..., OwnRun]) -> None:
    run = start()
    for name in names:
        run.data(name, ROWS if name == "train" else ROWS[:400])
    run.data("train_again", ROWS)  # that name says what it is
    run.log({"loss": 1.0})
    (event,) = ended(run).events("overlap")
    assert (event["set"], event["share"], event["rows"]) == ("val", 1.0, 400)
