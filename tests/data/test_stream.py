"""If this fails, a token is never predicted, or twice in an epoch, or from the context of another piece."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rung.data.store import Store, StoreWriter
from rung.data.stream import Joined, Windows
from rung.random import Draw
from tests.errors import raises_code

PAD = 60_000
NO_DRAW = Draw(0, 0, np.arange(0))


@pytest.fixture(autouse=True, scope="module")
def _quick_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def write(out: Path, records: list[tuple[str, int]], first_id: int = 0) -> Store:
    """Records of these splits and lengths; every id of the store is another number, so that each can be told apart."""
    with StoreWriter(out, "toy") as writer:
        writer.array("tokens", np.uint16)
        next_id = first_id
        for split, length in records:
            writer.record(split, writer.append("tokens", np.arange(next_id, next_id + length, dtype=np.uint16)), length)
            next_id += length
    return Store.open(out)


def naive_rows(store: Store, split: str, context: int) -> list[list[int]]:
    """The promise of the module, word for word, in plain Python."""
    rows = []
    for number, record in enumerate(store.index):
        if number not in store.split(split):
            continue
        ids = store.arrays["tokens"][record["start"] : record["start"] + record["length"]].tolist()
        at = 0
        while at < len(ids) - 1:
            row = ids[at : at + context + 1]
            rows.append(row + [PAD] * (context + 1 - len(row)))
            at += context
    return rows


records = st.lists(st.tuples(st.sampled_from(["train", "val"]), st.integers(0, 25)), min_size=1, max_size=8)


@given(records, st.integers(1, 12), st.data())
@example([("train", 5)], 4, None)  # exactly one full row, at the very end of the file
@example([("train", 2)], 12, None)  # a file smaller than a window
@example([("val", 30), ("train", 9), ("val", 0), ("train", 3)], 4, None)  # short rows that reach past the end
@settings(max_examples=120, deadline=None)
def test_rows_are_those_of_the_plain_reading(
    records: list[tuple[str, int]], context: int, data: st.DataObject | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = write(Path(folder) / "s", [*records, ("train", 2)] if data else records)
        windows = Windows(store, "train", context, PAD)
        expected = naive_rows(store, "train", context)
        assert windows.num_rows == len(expected)
        rows = windows.gather(np.arange(windows.num_rows), NO_DRAW)["tokens"]
        assert rows.dtype == np.uint16
        assert rows.tolist() == expected
        if data:  # any rows in any order, also twice, and none
            ids = np.array(data.draw(st.lists(st.integers(0, windows.num_rows - 1), max_size=10)), dtype=np.int64)
            assert windows.gather(ids, NO_DRAW)["tokens"].tolist() == [expected[i] for i in ids]

        targets = Counter(int(i) for row in rows for i in row[1:] if i != PAD)
        first_of_record = {r["start"] for r in store.index}
        wanted = [i for r in store.index if r["split"] == "train" for i in range(r["start"], r["start"] + r["length"])]
        assert targets == Counter(i for i in wanted if i not in first_of_record)
        assert windows.targets_per_row * windows.num_rows == pytest.approx(sum(targets.values()))


def test_an_epoch_of_ids_predicts_everything_once(tmp_path: Path) -> None:
    windows = Windows(write(tmp_path / "s", [("train", 40), ("train", 7)]), "train", 6, PAD)
    ids = windows.ids(3 * windows.num_rows, windows.num_rows, seed=5)
    rows = windows.gather(ids, NO_DRAW)["tokens"]
    assert sorted(i for row in rows[:, 1:].tolist() for i in row if i != PAD) == [*range(1, 40), *range(41, 47)]


def test_a_row_can_be_changed_without_changing_the_data(tmp_path: Path) -> None:
    windows = Windows(write(tmp_path / "s", [("train", 40)]), "train", 6, PAD)
    first = windows.gather(np.array([0]), NO_DRAW)["tokens"]
    first[:] = 9
    assert windows.gather(np.array([0]), NO_DRAW)["tokens"].tolist() == [list(range(7))]


def test_nothing_to_predict_is_said(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [("train", 1), ("train", 0), ("val", 5)])
    with raises_code("data-empty"):
        Windows(store, "train", 4)


def test_the_fingerprint_changes_with_data_split_and_context(tmp_path: Path) -> None:
    lengths = [("train", 9), ("val", 9)]
    one, twin, other = (write(tmp_path / n, lengths, first) for n, first in (("a", 0), ("b", 0), ("c", 1)))
    base = Windows(one, "train", 4).fingerprint
    assert Windows(twin, "train", 4).fingerprint == base
    changed = {
        Windows(other, "train", 4).fingerprint,
        Windows(one, "val", 4).fingerprint,
        Windows(one, "train", 5).fingerprint,
    }
    assert len(changed - {base}) == 3


def test_some_records_of_a_split_are_other_data_than_all(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [("train", 9), ("train", 5), ("train", 7)])
    whole, some = Windows(store, "train", 20), Windows(store, "train", 20, records=np.array([0, 2]))
    assert some.gather(np.arange(2), NO_DRAW)["tokens"][:, 0].tolist() == [0, 14]
    assert some.fingerprint != whole.fingerprint
    assert Windows(store, "train", 20, records=np.array([0, 1, 2])).fingerprint == whole.fingerprint


def test_joined_streams_have_all_rows_of_each(tmp_path: Path) -> None:
    stores = [
        write(tmp_path / name, [("train", length)], first) for name, length, first in [("a", 40, 0), ("b", 9, 90)]
    ]
    parts = [Windows(store, "train", 6, PAD) for store in stores]
    both = Joined(parts)
    assert both.num_rows == sum(part.num_rows for part in parts)
    assert both.targets_per_row * both.num_rows == pytest.approx(39 + 8)
    ids = both.ids(0, both.num_rows, seed=3)  # mixed
    rows = both.gather(ids, Draw(0, 0, np.arange(both.num_rows)))["tokens"]
    wanted = [row for store in stores for row in naive_rows(store, "train", 6)]
    assert rows.tolist() == [wanted[i] for i in ids]


class Drawn(Windows):
    """Rows that are what was drawn for them."""

    def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
        return {"drawn": draw.uniform("x")}


def test_a_row_draws_the_same_joined_and_alone(tmp_path: Path) -> None:
    parts = [Drawn(write(tmp_path / name, [("train", 40)]), "train", 6, PAD) for name in "ab"]
    places = np.arange(5, 9)
    ids = np.array([0, 8, 1, 9])
    drawn = Joined(parts).gather(ids, Draw(0, 4, places))["drawn"]
    assert np.array_equal(drawn, Draw(0, 4, places).uniform("x"))
