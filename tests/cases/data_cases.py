"""Runs whose rows come in order, again and again, or with an id that the model does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rung.doctor.history import read
from rung.recipe import Stream
from rung.runs.query import open_run
from tests.cases.case import Case, Seen, diagnosed, trained
from tests.cases.running import run_case
from tests.cases.statistics import FACT
from tests.cases.tiny import VOCAB, Rows, Tiny, chain


class InOrder(Rows):
    def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
        return np.arange(position, position + num_rows) % self.num_rows


class StartsAgain(Rows):
    """As a loader that makes a new iterator every 25 steps of 16 rows: a fifth of the data, over and over."""

    def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
        return super().ids(position % 400, num_rows, seed)


class Sorted(Tiny):
    def streams(self) -> Mapping[str, Stream]:
        ids = chain(self.cfg.num_rows, 1)
        ids = ids[np.argsort(ids[:, 0], kind="stable")]
        return {**super().streams(), "train": InOrder("sorted", ids=ids)}


class Restarted(Tiny):
    def streams(self) -> Mapping[str, Stream]:
        return {**super().streams(), "train": StartsAgain("again", ids=chain(self.cfg.num_rows, 1))}


class OneIdTooMany(Tiny):
    """One row of the first hundred has an id for which there is no embedding."""

    def streams(self) -> Mapping[str, Stream]:
        streams = dict(super().streams())
        train = streams["train"]
        assert isinstance(train, Rows)
        train.arrays["ids"][train.ids(9 * 16 + 3, 1, self.seed)[0], 5] = VOCAB
        return streams


def broken_off(root: Path, seed: int) -> Seen:
    """What is found in a run that a step ended with an exception."""
    with contextlib.suppress(IndexError):
        run_case(OneIdTooMany, root, seed=seed)
    return diagnosed(read(open_run("case/1", root)))


CASES = [  # which rows come is a matter of integers: no trajectory moves it
    Case("D1", "sorted and in order", trained(Sorted), trained(Tiny), statistic=FACT),
    Case("D2", "a fifth of the data again and again", trained(Restarted), trained(Tiny), "sick", is_quick=True,
         statistic=FACT),
    Case("D3", "one id too many", broken_off, trained(Tiny), "fatal", is_quick=True, statistic=FACT),
]  # fmt: skip
