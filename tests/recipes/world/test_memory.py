"""If this fails, what a model remembers differs between training, rollout and play, and its dreams will drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.data.store import Store
from rung.random import Draw
from rung.recipes.world.config import Scale, parse_scale
from rung.recipes.world.dream import memory_of, roll
from rung.recipes.world.memory import push, recall, shrink, span, to_frame, to_signal
from rung.recipes.world.stream import Moments
from tests.errors import raises_code
from tests.recipes.world.stores import write_store

SCALES = [Scale(2, 64, 48), Scale(4, 32, 24), Scale(9, 8, 6), Scale(12, 4, 3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("memory") / "world"
    write_store(path, (60, 31, 40), splits=("train", "train", "validation"))
    return Store.open(path)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_halving_is_the_exact_mean_of_four(seed: int, height: int, width: int) -> None:
    frames = np.random.default_rng(seed).integers(0, 256, (2, height * 2, width * 2, 3), np.uint8)
    got = shrink(torch.from_numpy(frames), 2).numpy()
    for y in range(height):
        for x in range(width):
            four = frames[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(np.float64)
            assert np.array_equal(got[:, y, x], np.floor(four.mean(axis=(1, 2)) + 0.5))


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_shrinking_twice_is_shrinking_once(seed: int, first: int, second: int) -> None:
    frames = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (16, 32, 3), np.uint8))
    assert torch.equal(shrink(shrink(frames, first), second), shrink(frames, first * second))


@given(st.integers(0, 2**32))
def test_a_frame_survives_the_way_to_the_model_and_back(seed: int) -> None:
    frames = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (2, 6, 8, 3), np.uint8))
    signal = to_signal(frames)
    assert signal.shape == (2, 3, 6, 8)
    assert signal.abs().max() <= 1
    assert torch.equal(to_frame(signal), frames)


@pytest.mark.parametrize("scales", [SCALES, SCALES[1:]], ids=["whole", "half"])
@pytest.mark.parametrize("num_made", [0, 1, 2, 3, 5, 8, 13, 20])
def test_an_oracle_remembers_the_truth(store: Store, num_made: int, scales: list[Scale]) -> None:
    """A generator that returns the real frame leaves the memory that a recording would have left, for every k."""
    stream = Moments(store, "train", scales, lambda step: num_made + 1)
    rows = np.array([0, 3, 20])
    batch = {k: torch.from_numpy(v) for k, v in stream.gather(rows, Draw(0, 0, rows)).items()}
    real = to_signal(batch["frames"])
    remembered = [m for m, _ in roll(lambda m, a, t: (real[:, t], a), memory_of(batch), num_made + 1)]
    assert len(remembered) == num_made + 1
    later = stream.gather(rows + num_made, Draw(0, 0, rows))  # the rows that begin where the rollout has come to
    for level, want in zip(remembered[-1], memory_of({k: torch.from_numpy(v) for k, v in later.items()}), strict=True):
        assert torch.equal(level, want)


def test_the_store_the_rollout_and_the_player_remember_the_same(store: Store) -> None:
    stream = Moments(store, "train", SCALES)
    gathered = stream.gather(np.array([5]), Draw(0, 0, np.array([5])))
    past = span(SCALES)
    frames = torch.from_numpy(np.array(store.arrays["frames"][5 : 5 + past + 1]))[None]  # row 5 predicts frame 5 + past
    from_packing = memory_of({k: torch.from_numpy(v) for k, v in gathered.items()})
    from_frames = recall(frames[:, :-1], SCALES)
    for a, b in zip(from_packing, from_frames, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(push(from_frames, frames[:, -1]), recall(frames, SCALES), strict=True):
        assert torch.equal(a, b)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 6), st.data())
def test_no_row_leaves_its_record(lengths: list[int], horizon: int, data: st.DataObject) -> None:
    """On a store whose frames say which record and place they are from."""
    scales = [Scale(2, 4, 3), Scale(3, 4, 3)]
    store = _numbered(lengths)
    num_rows = sum(max(0, n - 3) for n in lengths)
    if not num_rows:
        with raises_code("too-few"):
            Moments(store, "train", scales, lambda step: horizon)
        return
    stream = Moments(store, "train", scales, lambda step: horizon)
    assert stream.num_rows == num_rows
    ids = np.arange(num_rows)
    batch = stream.gather(ids, Draw(0, 0, ids))
    seen = set()
    for i in ids:
        first = batch["frames"][i, 0, 0, 0]
        for level in ("memory_0", "memory_1"):
            past = batch[level][i, :, 0, 0]
            assert (past[:, 0] == first[0]).all()
            assert np.array_equal(past[:, 1], np.arange(first[1] - len(past), first[1]))
        for t in range(horizon):
            is_inside = first[1] + t < lengths[first[0]]
            assert batch["valid"][i, t] == is_inside
            if is_inside:
                assert batch["frames"][i, t, 0, 0, :2].tolist() == [first[0], first[1] + t]
                assert batch["controls"][i, t].tolist() == [first[0], first[1] + t]
        seen.add((int(first[0]), int(first[1])))
    assert seen == {(r, t) for r, n in enumerate(lengths) for t in range(3, n)}  # each target once


def _numbered(lengths: list[int]) -> Store:
    """Not on disk: frames whose red is the record and whose green is the place in it."""
    store = Store.__new__(Store)
    place = np.concatenate([np.stack([np.full(n, r), np.arange(n)], 1) for r, n in enumerate(lengths)])
    frames = np.zeros((len(place), 3, 4, 3), np.uint8)
    frames[..., :2] = place[:, None, None]
    store.path = Path("numbered")
    store.manifest = {"files": {}, "kind": "world"}
    store.info = {"height": 3, "width": 4, "divisors": [1]}
    store.arrays = {"frames": frames, "controls": place.astype(np.float32)}
    store.starts, store.lengths = np.cumsum([0, *lengths[:-1]]), np.array(lengths)
    store._splits = {"train": list(range(len(lengths)))}
    return store


@pytest.mark.parametrize("text", ["4@64", "0@64x48"])
def test_a_scale_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_scale(text)


def test_sizes_that_the_store_does_not_have_are_refused(store: Store) -> None:
    with raises_code("size-mismatch") as caught:
        Moments(store, "train", [Scale(2, 128, 96)])
    assert "64x48, 32x24" in str(caught.value)
    with raises_code("size-mismatch") as caught:
        Moments(store, "train", [Scale(2, 64, 48), Scale(2, 2, 1)])
    assert "2x1.5" in str(caught.value)
