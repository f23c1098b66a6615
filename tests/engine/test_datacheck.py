"""If this fails, a run trains on data that was changed since it was prepared, and calls itself exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rung.data import store as stores
from rung.data.store import Store, StoreWriter
from rung.engine.loop import fit
from rung.errors import DataError
from rung.runs.query import open_run
from tests.contract.cases import CASES, Case
from tests.contract.test_contract import Mute, record_of
from tests.errors import raises_code


def write(out: Path, num_rows: int = 600) -> Store:
    rng = np.random.default_rng(0)
    with StoreWriter(out, kind="text", replace=True) as writer:
        writer.array("tokens", np.uint16)
        writer.file("words.txt", b"some words")
        for split in ("train", "validation"):
            ids = rng.integers(0, 50, num_rows).astype(np.uint16)
            writer.record(split=split, start=writer.append("tokens", ids), length=len(ids))
    return Store.open(out)


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 100 bytes are too large to be hashed whole when they are opened."""
    monkeypatch.setattr(stores, "WHOLE_BYTES", 100)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 64)


def change(file: Path, first: int, last: int) -> None:
    data = bytearray(file.read_bytes())
    data[first:last] = bytes(255 - byte for byte in data[first:last])
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens.bin", "index.jsonl", "splits.json", "words.txt"])
def test_a_byte_of_a_small_file_that_changed_is_seen_when_it_is_opened(tmp_path: Path, name: str) -> None:
    write(tmp_path / "data")
    change(tmp_path / "data" / name, 4, 5)
    with raises_code("data-damaged", DataError):
        Store.open(tmp_path / "data")


def test_every_value_of_the_manifest_is_vouched_for(tmp_path: Path) -> None:
    write(tmp_path / "data")
    file = tmp_path / "data" / "manifest.json"
    whole = json.loads(file.read_text())
    for name in whole:
        for value in ({"a": 1}, 3, "other"):
            file.write_text(json.dumps({**whole, name: value}))
            with pytest.raises(DataError):
                Store.open(tmp_path / "data")
        file.write_text(json.dumps({other: value for other, value in whole.items() if other != name}))
        with pytest.raises(DataError):
            Store.open(tmp_path / "data")
    file.write_text(json.dumps(whole))
    assert Store.open(tmp_path / "data").verify() == []


def test_data_of_the_format_before_is_read(tmp_path: Path) -> None:
    fingerprint = write(tmp_path / "data").fingerprint
    file = tmp_path / "data" / "manifest.json"
    old = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"} | {"schema": 1}
    file.write_text(json.dumps(old))
    assert Store.open(tmp_path / "data").fingerprint == fingerprint
    file.write_text(json.dumps({**old, "schema": 3}))
    with raises_code("data-mismatch", DataError):
        Store.open(tmp_path / "data")


@pytest.mark.usefixtures("as_if_large")
def test_half_of_a_large_file_that_was_exchanged_is_seen_when_it_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "data")
    change(tmp_path / "data" / "tokens.bin", 0, 1200)
    with raises_code("data-damaged", DataError):
        Store.open(tmp_path / "data")


@pytest.fixture
def text_case(tmp_path: Path, text_data: Path) -> Case:
    """On a copy of the data, which a test may damage."""
    shutil.copytree(text_data, tmp_path / "letters")
    return CASES["text"][0](tmp_path / "letters")


def test_a_byte_of_a_large_file_ends_the_run_that_trains_on_it(
    text_case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "WHOLE_BYTES", 100)
    setup = text_case.setup("optimizer.max_iters=100000", "eval_interval=0", root=tmp_path)
    change(tmp_path / "letters" / "tokens.bin", 300, 301)
    record = record_of(setup, tmp_path, "damaged")
    with raises_code("data-damaged", DataError):
        fit(setup, record, Mute())
    record.finish("stopped")
    [event] = open_run(record.id, tmp_path).events("data_checked")
    assert "tokens.bin" in event["problem"]


def test_what_was_looked_at_is_recorded(text_case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "WHOLE_BYTES", 100)
    setup = text_case.setup(root=tmp_path)
    record = record_of(setup, tmp_path, "whole")
    fit(setup, record, Mute())
    record.finish("finished")
    [event] = open_run(record.id, tmp_path).events("data_checked")
    assert not event["problem"]
    assert 0 <= event["checked_bytes"] <= event["num_bytes"]
    assert event["num_bytes"] >= (tmp_path / "letters" / "tokens.bin").stat().st_size
