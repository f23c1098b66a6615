"""If this fails, a closer look at an eval set shows another loss than the eval, or errors that are no errors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.engine import examine as looking
from rung.engine.loop import is_milestone, since_best
from tests.contract.cases import piano
from tests.errors import raises_code


def test_the_closer_look_gives_the_loss_of_the_eval(piano_data: Path) -> None:
    setup = piano(piano_data).setup("model.dropout=0.1")
    name, stream = next(iter(setup.evaluator.streams.items()))
    plain = setup.evaluator.run(setup.state.model)[name]
    seen = looking.examine(setup, setup.state.model, name, stream)
    assert seen is not None
    assert seen["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert seen["targets"] == plain["targets"]
    curve = seen["positions"]
    by_position = sum(x * n for x, n in zip(curve["loss"], curve["targets"], strict=True) if x is not None)
    assert by_position / sum(curve["targets"]) == pytest.approx(plain["loss"], rel=1e-6)
    assert len(curve["loss"]) == setup.recipe.cfg.data.context_size


def test_a_look_changes_nothing(piano_data: Path) -> None:
    setup = piano(piano_data).setup("model.dropout=0.1")
    name, stream = next(iter(setup.evaluator.streams.items()))
    before = {key: value.clone() for key, value in setup.state.model.state_dict().items()}
    setup.state.model.train()
    first = looking.examine(setup, setup.state.model, name, stream)
    torch.manual_seed(1)  # what others draw makes no difference
    assert looking.examine(setup, setup.state.model, name, stream) == first
    assert setup.state.model.training
    assert all(torch.equal(value, before[key]) for key, value in setup.state.model.state_dict().items())


@dataclass
class Rows:
    """A look at made-up losses, without a model; each row is its own cluster unless said otherwise."""

    losses: np.ndarray
    weights: np.ndarray
    groups: Sequence[int]
    names: Sequence[str] = ()
    clusters: Sequence[int] | None = None
    batch: int = 7

    def figures(self) -> dict[str, Any]:
        tally, groups = looking.Tally(len(self.names)), np.array(self.groups)
        clusters = np.arange(len(groups)) if self.clusters is None else np.array(self.clusters)
        for start in range(0, len(groups), self.batch):
            part = slice(start, start + self.batch)
            tally.add(self.losses[part], self.weights[part], clusters[part], groups[part])
        return tally.figures(self.names)


def test_the_error_is_that_of_a_mean_where_rows_are_independent() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(2.0, 0.5, (4000, 1))
    seen = Rows(losses, np.ones_like(losses), [-1] * 4000).figures()
    assert seen["se"] == pytest.approx(losses.std(ddof=1) / 4000**0.5, rel=1e-3)
    assert seen["positions"]["se"][0] == pytest.approx(seen["se"], rel=1e-9)


def test_targets_of_one_row_count_as_one_draw() -> None:
    """Ten equal targets in a row know no more than one."""
    rng = np.random.default_rng(0)
    once = rng.normal(2.0, 0.5, (500, 1))
    tenfold = np.repeat(once, 10, axis=1)
    a = Rows(once, np.ones_like(once), [-1] * 500).figures()
    b = Rows(tenfold, np.ones_like(tenfold), [-1] * 500).figures()
    assert b["se"] == pytest.approx(a["se"], rel=1e-9)


def test_rows_of_one_document_count_as_one_draw_however_they_are_batched() -> None:
    rng = np.random.default_rng(0)
    once = rng.normal(2.0, 0.5, (300, 4))
    many = np.repeat(once, 6, axis=0)
    a = Rows(once, np.ones_like(once), [-1] * 300).figures()
    for batch in (1, 4, 6, 100):
        clusters = np.repeat(np.arange(300), 6).tolist()
        b = Rows(many, np.ones_like(many), [-1] * 1800, clusters=clusters, batch=batch).figures()
        assert b["se"] == pytest.approx(a["se"], rel=1e-9)
        assert b["positions"]["se"] == pytest.approx(a["positions"]["se"], rel=1e-9)
        assert (b["rows"], b["clusters"]) == (1800, 300)


def test_intervals_hold_as_often_as_they_say() -> None:
    """Rows of unequal length, groups of unequal size: the true mean lies within two errors 95 times out of 100."""
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(400):
        lengths = rng.integers(1, 9, 60)
        weights = (np.arange(8) < lengths[:, None]).astype(float)
        level = rng.normal(3.0, 0.4, (60, 1))  # rows differ as wholes
        losses = (level + rng.normal(0, 0.2, (60, 8))) * weights
        seen = Rows(losses, weights, [-1] * 60).figures()
        inside += abs(seen["loss"] - 3.0) < 1.96 * seen["se"]
    assert 0.91 <= inside / 400 <= 0.98, inside / 400


def test_labels_that_mean_something_stand_out_and_shuffled_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], 300)
    losses = rng.normal(2.0, 0.5, (900, 4)) + groups[:, None] * 0.3
    seen = Rows(losses, np.ones_like(losses), groups.tolist(), ["a", "b", "c"]).figures()
    control = seen["control"]
    assert control["labels"]["spread"] == pytest.approx(0.6, abs=0.1)
    assert control["labels"]["chi2"] > 100
    assert control["shuffled"]["chi2"] < 12  # three groups: two degrees of freedom
    assert control["shuffled"]["spread"] < 0.1
    assert control["as_far"] == 0
    mean = sum(seen["groups"][name]["loss"] for name in "abc") / 3
    assert seen["mean_of_groups"]["loss"] == pytest.approx(mean)


def test_labels_that_mean_nothing_look_like_labels_at_random() -> None:
    """However odd a single deal may be: the control is the middle of many, and about df."""
    groups, names = np.arange(330) % 11, [f"g{n}" for n in range(11)]
    looks = []
    for seed in range(20):
        losses = np.random.default_rng(seed).normal(2.0, 0.5, (330, 4))
        looks.append(Rows(losses, np.ones_like(losses), groups.tolist(), names).figures()["control"])
    assert all(8 < look["shuffled"]["chi2"] < 14 and look["deals"] == 99 for look in looks)
    assert sum(look["as_far"] < 5 for look in looks) <= 4, "chance makes about one of twenty look like something"
    assert 30 < np.mean([look["as_far"] for look in looks]) < 70


def test_what_was_not_counted_is_none_and_not_a_number_made_up() -> None:
    losses, weights = np.zeros((2, 3)), np.zeros((2, 3))
    losses[0, 0], weights[0, 0] = 1.5, 1.0
    seen = Rows(losses, weights, [0, 1], ["full", "empty"]).figures()
    assert seen["groups"]["empty"]["loss"] is None
    assert seen["positions"]["loss"] == [1.5, None, None]
    assert seen["positions"]["se"] == [None] * 3, "one row that counts has no error, however many do not"
    assert seen["se"] is None
    assert seen["mean_of_groups"]["loss"] == 1.5


@given(st.lists(st.floats(0.1, 9), max_size=30))
@settings(max_examples=200, deadline=None)
def test_patience_counts_evals_since_the_lowest(losses: list[float]) -> None:
    expected = len(losses) - 1 - losses.index(min(losses)) if losses else 0
    assert since_best(losses) == expected


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=30), st.floats(0.5, 0.99))
@settings(max_examples=200, deadline=None)
def test_geometric_saves_are_each_below_the_share_of_the_one_before(losses: list[float], share: float) -> None:
    kept = [losses[0]] + [losses[i] for i in range(1, len(losses)) if is_milestone(losses[: i + 1], share)]
    assert all(b < share * a for a, b in itertools.pairwise(kept))
    assert min(losses) >= share * kept[-1]  # nothing that would have earned one was passed over
    assert not is_milestone(losses, 0.0)


def test_targets_of_several_codebooks_are_counted_together_and_apart() -> None:
    rng = np.random.default_rng(1)
    weights = (rng.uniform(size=(40, 5, 3)) < 0.8).astype(float)
    losses = rng.normal([1.0, 2.0, 4.0], 0.3, (40, 5, 3)) * weights
    clusters = np.repeat(np.arange(20), 2)
    tally = looking.Tally(0, ["coarse", "middle", "fine"])
    for part in (slice(0, 7), slice(7, 40)):
        tally.add(losses[part], weights[part], clusters[part], np.full(40, -1)[part])
    seen = tally.figures([])
    assert seen["loss"] == pytest.approx(losses.sum() / weights.sum(), rel=1e-12)
    by_position = losses.sum((0, 2)) / weights.sum((0, 2))
    assert seen["positions"]["loss"] == pytest.approx(by_position, rel=1e-12)
    assert list(seen["target_parts"]) == ["coarse", "middle", "fine"]
    for number, one in enumerate(seen["target_parts"].values()):  # each as if it were the only one
        alone = Rows(losses[..., number], weights[..., number], [-1] * 40, clusters=clusters.tolist()).figures()
        for key in ("loss", "se", "targets"):
            assert one[key] == pytest.approx(alone[key])
            assert one["positions"][key] == pytest.approx(alone["positions"][key])


def test_further_axes_do_not_move_the_figures_of_the_whole() -> None:
    rng = np.random.default_rng(2)
    losses, weights = rng.normal(2.0, 0.5, (30, 6)), np.ones((30, 6))
    flat = Rows(losses, weights, [0, 1] * 15, ["a", "b"]).figures()
    deep = Rows(np.stack([losses / 2] * 2, -1), np.stack([weights / 2] * 2, -1), [0, 1] * 15, ["a", "b"]).figures()
    assert "target_parts" not in flat
    assert list(deep.pop("target_parts")) == ["part 0", "part 1"]
    assert deep == flat


def test_parts_must_have_as_many_names_as_there_are() -> None:
    tally = looking.Tally(0, ["one", "two"])
    with raises_code("bad-loss"):
        tally.add(np.ones((1, 2, 3)), np.ones((1, 2, 3)), np.zeros(1), np.zeros(1))


def test_one_target_a_row_is_one_position() -> None:
    tally = looking.Tally(0)
    tally.add(np.array([1.0, 3.0]), np.ones(2), np.arange(2), np.full(2, -1))
    assert tally.figures([])["positions"]["loss"] == [2.0]


def test_batches_may_be_as_long_as_their_longest_row() -> None:
    """The same rows, padded to one length or each batch to its own; a cluster goes on from one batch to the next."""
    rng = np.random.default_rng(0)
    lengths = np.array([3, 9, 5, 12, 2, 7])
    clusters, groups = np.array([0, 0, 1, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 0])
    weights = (np.arange(12) < lengths[:, None]).astype(float)
    losses = rng.integers(0, 64, (6, 12)) / 64 * weights  # so that sums are exact in any order
    whole, parts = looking.Tally(2), looking.Tally(2)
    whole.add(losses, weights, clusters, groups)
    for start in range(0, 6, 2):
        some, longest = slice(start, start + 2), lengths[start : start + 2].max()
        parts.add(losses[some, :longest], weights[some, :longest], clusters[some], groups[some])
    assert parts.figures(["a", "b"]) == whole.figures(["a", "b"])
