"""If this fails, one pair is judged by a noise floor that is none: of other configs, of one run, or of nothing."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.compare.noise import PULL, floor_for, groups, pooled
from rung.runs.files import to_json
from rung.runs.query import list_runs, open_run
from rung.runs.record import amend
from tests.compare.arms import make

ENDS = (1.0, 1.02, 0.97, 1.01)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_the_floor_is_the_spread_over_seeds(root: Path) -> None:
    runs = [make(root, seed, end) for seed, end in enumerate(ENDS)]
    floor = floor_for(runs[0], "val/loss")
    assert floor is not None
    assert floor.sd == pytest.approx(statistics.stdev(math.log(end) for end in ENDS) * ENDS[0])
    assert (floor.df, floor.num_runs) == (3, 4)
    assert runs[1].id in floor.words


def test_two_seeds_are_no_floor_and_neither_is_one_seed_often(root: Path) -> None:
    runs = [make(root, seed, 1 + seed / 100) for seed in (1, 2)]
    runs += [make(root, 1, 1.1), make(root, 1, 1.2)]
    assert floor_for(runs[0], "val/loss") is None


def test_runs_that_differ_in_more_than_the_seed_are_not_one_group(root: Path) -> None:
    for seed, end in enumerate(ENDS):
        make(root, seed, end, key=0.1 * (seed + 1))
    assert list(groups(list_runs(root), "val/loss")) == []


def test_edited_code_splits_a_group(root: Path) -> None:
    for seed, end in enumerate(ENDS):
        make(root, seed, end)
        (root.parent / "code" / "model.py").write_text(f"depth = {seed}\n")
    assert list(groups(list_runs(root), "val/loss")) == []


def test_unfinished_and_broken_runs_are_left_out(root: Path) -> None:
    runs = [make(root, seed, end) for seed, end in enumerate(ENDS)]
    make(root, 7, 5.0, status="crashed")
    make(root, 8, 5.0, status=None)
    floor = floor_for(runs[0], "val/loss")
    assert floor is not None
    assert floor.num_runs == 4
    make(root, 9, losses=[math.nan] * 10)  # of the same config: then its spread is not known
    assert floor_for(runs[0], "val/loss") is None


def test_seeds_that_decide_nothing_are_no_floor(root: Path) -> None:
    """Three seeds, one random state: their spread is the rounding of the device, and anything would exceed it."""
    runs = [make(root, 1, 1 + seed * 1e-6) for seed in (1, 2, 3)]
    for seed, run in enumerate(runs):
        amend(run.path, seed=seed)
        (run.path / "init.json").write_bytes(to_json({"head": [[4], "one"]}))
    assert floor_for(open_run(runs[0].id, root), "val/loss") is None


def test_related_configs_help_and_others_do_not(root: Path) -> None:
    mine = make(root, 1, 2.0, key=0.5)
    for seed, end in enumerate(ENDS):
        make(root, seed, end)
    floor = floor_for(mine, "val/loss")
    assert floor is not None
    assert floor.sd == pytest.approx(2 * statistics.stdev(math.log(end) for end in ENDS))  # as large a share of 2.0
    longer = make(root, 1, 2.0, num_steps=200, every=20)
    assert floor_for(longer, "val/loss") is None  # another horizon
    other = make(root, 1, 2.0, definitions={"eval/val": {"mask": "other"}})
    assert floor_for(other, "val/loss") is None


def test_metrics_that_are_not_positive_keep_their_unit(root: Path) -> None:
    values = (-1.0, 0.0, 1.0)
    runs = [make(root, seed, losses=[value] * 10) for seed, value in enumerate(values)]
    floor = floor_for(runs[0], "val/loss")
    assert floor is not None
    assert floor.sd == pytest.approx(1.0)


@given(
    st.lists(st.lists(st.floats(0.5, 2), min_size=3, max_size=6), max_size=3),
    st.lists(st.lists(st.floats(0.5, 2), min_size=3, max_size=6), max_size=3),
)
def test_the_pooled_spread_lies_between_own_and_others(own: list[list[float]], others: list[list[float]]) -> None:
    sd, df = pooled(own, others, is_log=True)
    alone = [pooled(one, [], True)[0] for one in (own, others) if one]
    if not alone:
        assert (sd, df) == (0, 0)
        return
    assert min(alone) - 1e-12 <= sd <= max(alone) + 1e-12
    most = sum(len(values) - 1 for values in own) + (PULL if own else math.inf)
    assert df <= most
