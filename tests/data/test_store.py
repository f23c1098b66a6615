"""If this fails, prepared data can be half-written, silently damaged, or lost when it is prepared again."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rung.data import store
from rung.data.store import SCHEMA, Store, StoreWriter, check_apart, place
from rung.errors import DataError
from tests.errors import raises_code

DTYPES = ["u1", "u2", "u4", "i2", "i8", "f4", "f8", ">u2", ">i4", "?"]


def write(out: Path, rows: list[int], replace: bool = False, **info: Any) -> Store:
    with StoreWriter(out, "piano", replace) as writer:
        writer.array("tokens", np.uint16)
        half = len(rows) // 2
        for split, part in (("train", rows[:half]), ("validation", rows[half:])):
            writer.record(split, writer.append("tokens", np.array(part, dtype=np.uint16)), len(part), title=split)
        writer.info.update(info)
    return Store.open(out)


@pytest.fixture(autouse=True, scope="module")
def _quick_disk() -> Iterator[None]:
    """Hundreds of stores are written here, and waiting for the disk each time tells nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "tunes"


@given(st.data())
@settings(max_examples=60, deadline=None)  # a disk takes as long as it takes
def test_what_goes_in_comes_out(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    row_shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    num_rows = data.draw(st.lists(st.integers(0, 5), max_size=5))
    chunks = [data.draw(hnp.arrays(dtype, (n, *row_shape))) for n in num_rows]
    fields = st.dictionaries(st.sampled_from(["title", "path"]), st.text(st.characters(exclude_categories=())))
    records = [(data.draw(st.sampled_from(["train", "a/b", "é"])), data.draw(fields)) for _ in chunks]
    info = data.draw(st.dictionaries(st.text(st.characters(exclude_categories=())), st.integers()))
    with tempfile.TemporaryDirectory() as folder:
        with StoreWriter(Path(folder) / "s", "toy") as writer:
            writer.array("x", dtype, row_shape)
            writer.array("extra", np.float32, (2,))
            for chunk, (split, more) in zip(chunks, records):
                writer.record(split, writer.append("x", chunk), len(chunk), **more)
            writer.info.update(info)
        store = Store.open(Path(folder) / "s", kind="toy")
        whole = np.concatenate(chunks) if chunks else np.zeros((0, *row_shape), dtype)
        assert store.arrays["x"].dtype == dtype.newbyteorder("<")
        np.testing.assert_array_equal(store.arrays["x"], whole)
        assert store.arrays["extra"].shape == (0, 2)
        assert store.lengths.tolist() == num_rows
        assert store.starts.tolist() == [sum(num_rows[:i]) for i in range(len(num_rows))]
        assert [{k: v for k, v in row.items() if k in ("title", "path")} for row in store.index] == [
            m for _, m in records
        ]
        splits = list(dict.fromkeys(split for split, _ in records))
        assert store.splits == splits
        for split in splits:
            assert store.split(split).tolist() == [i for i, (s, _) in enumerate(records) if s == split]
        assert store.info == info
        assert store.verify() == []


def test_arrays_cannot_be_written(out: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        write(out, [1, 2, 3]).arrays["tokens"][0] = 9


def test_a_split_that_is_not_there_names_those_that_are(out: Path) -> None:
    with raises_code("no-split") as caught:
        write(out, [1, 2, 3]).split("test")
    assert "train, validation" in str(caught.value)


def test_another_kind_of_data_is_refused(out: Path) -> None:
    write(out, [1, 2, 3])
    with raises_code("data-mismatch"):
        Store.open(out, kind="text")


# Whole or absent


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, DataError])
@pytest.mark.parametrize("is_there_before", [False, True])
def test_an_exception_leaves_what_was_there(out: Path, error: type[BaseException], is_there_before: bool) -> None:
    before = write(out, [1, 2, 3]).fingerprint if is_there_before else None

    def half_a_store() -> None:
        with StoreWriter(out, "piano", replace=True) as writer:
            writer.array("tokens", np.uint16)
            writer.append("tokens", np.arange(5, dtype=np.uint16))
            raise error("half-way")

    with pytest.raises(error):
        half_a_store()
    assert os.listdir(out.parent) == (["tunes"] if before else [])
    if before:
        assert Store.open(out).fingerprint == before
        assert Store.open(out).verify() == []


def test_replace_puts_the_new_one_in_place_of_the_old(out: Path) -> None:
    old = write(out, [1, 2, 3])
    new = write(out, [4, 5, 6, 7], replace=True)
    assert new.arrays["tokens"].tolist() == [4, 5, 6, 7]
    assert new.fingerprint != old.fingerprint
    assert old.arrays["tokens"].tolist() == [1, 2, 3]  # a run that has the old one open keeps reading it
    assert os.listdir(out.parent) == ["tunes"]


def test_without_replace_an_earlier_store_is_refused_and_kept(out: Path) -> None:
    write(out, [1, 2, 3])
    with raises_code("data-exists") as caught:
        write(out, [4, 5])
    assert "--replace" in str(caught.value)
    assert Store.open(out).arrays["tokens"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_that_is_no_store_is_left_alone(out: Path, replace: bool) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with raises_code("not-a-store" if replace else "data-exists"):
        write(out, [1, 2], replace=replace)
    assert (out / "thesis.txt").read_text() == "mine"
    assert os.listdir(out.parent) == ["tunes"]


@pytest.mark.parametrize(
    "manifest",
    [
        '["cam/image_array"]\r\n["image_array"]\r\n{}\r\n',
        '{"name": "an app"}',
        '{"kind": "piano"}',
        '{"schema": 1}',
        "[1]",
    ],
)
def test_a_manifest_of_another_program_does_not_make_a_store(out: Path, manifest: str) -> None:
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    (out / "catalog_0.catalog").write_text("a drive")
    with raises_code("not-a-store"):
        write(out, [1, 2], replace=True)
    with raises_code("not-a-store"):
        Store.open(out)
    assert sorted(os.listdir(out)) == ["catalog_0.catalog", "manifest.json"]


def test_a_store_of_another_schema_may_be_replaced(out: Path) -> None:
    write(out, [1, 2, 3])
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "schema": SCHEMA + 1}))
    assert write(out, [4], replace=True).arrays["tokens"].tolist() == [4]


def test_a_store_and_its_source_lie_apart(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for source, out in (("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "link"), ("a/../a/b", "a")):
        with raises_code("options-conflict"):
            check_apart(tmp_path / source, tmp_path / out)
    check_apart(tmp_path / "a", tmp_path / "ab")


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_in_the_way_is_left_alone(out: Path, replace: bool) -> None:
    out.write_text("mine")
    with pytest.raises(DataError):
        write(out, [1, 2], replace=replace)
    assert out.read_text() == "mine"


def test_an_empty_folder_may_be_replaced(out: Path) -> None:
    out.mkdir()
    assert write(out, [1, 2], replace=True).verify() == []


def test_a_killed_writer_is_not_in_the_way(out: Path) -> None:
    """A killed process cleans nothing up; the next one, which may have its process id, starts afresh."""
    StoreWriter(out, "piano").__enter__().array("tokens", np.uint16)
    assert not out.exists()
    assert write(out, [1, 2]).verify() == []


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """The kernel refuses further writes, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_rows", [100, 100_000])  # refused when the buffer is flushed at the end, and at once
def test_a_write_that_the_system_refuses(out: Path, num_rows: int) -> None:
    before = write(out, [1, 2, 3]).fingerprint
    with no_file_above(64), raises_code("cannot-write"):
        write(out, [7] * num_rows, replace=True)
    assert os.listdir(out.parent) == ["tunes"]
    assert Store.open(out).fingerprint == before


def fail(code: int, filename: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), filename) if filename else OSError(code, os.strerror(code))


def test_a_full_disk_at_the_last_moment(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(out, [1, 2, 3])

    def full(self: Path, *args: Any) -> None:
        raise fail(errno.ENOSPC)

    monkeypatch.setattr(Path, "write_text", full)
    with raises_code("cannot-write"):
        write(out, [4, 5], replace=True)
    monkeypatch.undo()
    assert os.listdir(out.parent) == ["tunes"]
    assert Store.open(out).arrays["tokens"].tolist() == [1, 2, 3]


def test_everything_is_on_the_disk_before_it_is_moved(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    rename = Path.rename

    def note(self: Path, target: Path) -> Path:
        done.append("moved")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", lambda fd: done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    monkeypatch.setattr(Path, "rename", note)
    write(out, [1, 2, 3])
    assert set(done[: done.index("moved")]) >= {"tokens.bin", "index.jsonl", "splits.json", "manifest.json"}
    assert done[-1] == out.parent.name


@pytest.mark.parametrize("error", [fail(errno.EIO), KeyboardInterrupt()])
def test_a_move_that_fails_brings_the_old_store_back(
    out: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write(out, [1, 2, 3])
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise error
        return rename(self, target)

    monkeypatch.setattr(store, "exchange", lambda a, b: False)  # as on a disk that cannot
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DataError if isinstance(error, OSError) else KeyboardInterrupt):
        write(out, [4, 5], replace=True)
    assert os.listdir(out.parent) == ["tunes"]
    assert Store.open(out).arrays["tokens"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("suffix", [".tmp", "index.jsonl", "tokens.bin"])
def test_no_permission(out: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Said by a patch rather than by chmod, as tests may be run by root, who may do everything."""
    for name in ("mkdir", "open"):
        original = getattr(Path, name)

        def refuse(self: Path, *args: Any, _original: Any = original, **given: Any) -> Any:
            if self.name.endswith(suffix):
                raise fail(errno.EACCES, str(self))
            return _original(self, *args, **given)

        monkeypatch.setattr(Path, name, refuse)
    with raises_code("cannot-write") as caught:
        write(out, [1, 2])
    assert "Permission denied" in str(caught.value)
    assert os.listdir(out.parent) == []


def test_an_error_of_a_source_file_is_not_taken_for_ours(out: Path) -> None:
    with pytest.raises(FileNotFoundError), StoreWriter(out, "piano"):
        (out.parent / "missing.mid").read_bytes()
    assert os.listdir(out.parent) == []


# What does not fit


@pytest.mark.parametrize("value", [65536, -1])
def test_an_id_that_would_wrap_around(out: Path, value: int) -> None:
    with StoreWriter(out, "piano") as writer:
        writer.array("tokens", np.uint16)
        with raises_code("too-large") as caught:
            writer.append("tokens", np.array([3, value, 4]))
        assert f"id {value} " in str(caught.value)
    assert len(Store.open(out).arrays["tokens"]) == 0


def test_the_largest_id_fits(out: Path) -> None:
    with StoreWriter(out, "piano") as writer:
        writer.array("tokens", np.uint16)
        writer.append("tokens", np.array([0, 65535]))
    assert Store.open(out).arrays["tokens"].tolist() == [0, 65535]


def test_rows_of_another_shape(out: Path) -> None:
    with StoreWriter(out, "toy") as writer:
        writer.array("x", np.float32, (3,))
        with raises_code("bad-shape"):
            writer.append("x", np.zeros((4, 2), np.float32))


# Other files


def write_with(out: Path, **files: bytes) -> Store:
    with StoreWriter(out, "text") as writer:
        writer.array("tokens", np.uint16)
        for name, data in files.items():
            writer.file(f"{name}.json", data)
    return Store.open(out)


def test_a_recipe_keeps_its_own_files_with_the_data(out: Path) -> None:
    store = write_with(out, words=b"[1]", merges=b"")
    assert store.file("words.json") == b"[1]"
    assert store.file("merges.json") == b""
    assert store.verify() == []
    other = write_with(out.with_name("other"), words=b"[2]", merges=b"")
    assert other.fingerprint != store.fingerprint, "they are a part of what the data is"
    with raises_code("data-damaged"):
        store.file("vocabulary.txt")


def test_a_changed_file_is_not_handed_out(out: Path) -> None:
    store = write_with(out, words=b"[1]")
    (out / "words.json").write_bytes(b"[2]")
    assert store.verify()[0].startswith("words.json has hash")
    with raises_code("data-damaged") as caught:
        store.file("words.json")
    assert "words.json" in str(caught.value)
    (out / "words.json").unlink()
    with raises_code("data-damaged") as caught:
        Store.open(out)
    assert "words.json" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["manifest.json", "index.jsonl", "splits.json", "tokens.bin", "../a", "a/b", ".a", "", "twice.json"]
)
def test_a_file_cannot_take_the_place_of_another(out: Path, name: str) -> None:
    with StoreWriter(out, "text") as writer:
        writer.array("tokens", np.uint16)
        writer.file("twice.json", b"")
        with pytest.raises(ValueError, match="cannot be a file of a store"):
            writer.file(name, b"")


# Damage


@pytest.mark.parametrize("name", ["tokens.bin", "index.jsonl", "splits.json"])
@pytest.mark.parametrize("how", ["truncated", "longer", "missing"])
def test_opening_finds_a_file_of_another_size(out: Path, name: str, how: str) -> None:
    write(out, [1, 2, 3, 4])
    file = out / name
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if how == "truncated" else content + b"\n")
    with raises_code("data-damaged") as caught:
        Store.open(out)
    assert name in str(caught.value)


@given(st.sampled_from(["tokens.bin", "index.jsonl", "splits.json"]), st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=60, deadline=None)  # a disk takes as long as it takes
def test_a_changed_byte_is_found(name: str, where: int, bits: int) -> None:
    """By verify at the latest; damage that keeps the store from being opened is a DataError, never a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tunes"
        write(out, [1, 2, 3, 4])
        content = bytearray((out / name).read_bytes())
        content[where % len(content)] ^= bits
        (out / name).write_bytes(content)
        try:
            problems = Store.open(out).verify()
        except DataError as error:
            problems = [str(error)]
        assert any(p.startswith(f"{name} has hash") or "is damaged" in p for p in problems)


def test_verify_finds_an_index_that_points_outside(out: Path) -> None:
    with StoreWriter(out, "piano") as writer:
        writer.array("tokens", np.uint16)
        writer.append("tokens", np.zeros(3, np.uint16))
        writer.record("train", 1, 3)
    assert Store.open(out).verify() == ["the index reaches row 4 of tokens, which has 3"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"schema": 1}', b'{"schema": 1, "kind": "piano", "files": 3}'],
)
def test_a_damaged_manifest(out: Path, content: bytes) -> None:
    write(out, [1, 2, 3])
    (out / "manifest.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        Store.open(out)
    assert str(out) in str(caught.value)


def test_a_store_of_another_schema(out: Path) -> None:
    write(out, [1, 2, 3])
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "schema": SCHEMA + 1}))
    with raises_code("data-mismatch"):
        Store.open(out)


def test_no_data_names_the_remedy(out: Path) -> None:
    with raises_code("no-data") as caught:
        Store.open(out)
    assert "rung data" in str(caught.value)
    for name in ("mine", "owner/set", str(out)):
        with raises_code("no-data") as caught:
            Store.open(place(name))
        assert f"--name {name}`" in str(caught.value)


# What it is


def test_the_fingerprint_changes_with_data_and_splits_and_with_nothing_else(out: Path) -> None:
    names = [out.with_name(name) for name in ("a", "b", "c", "d")]
    same, again, other = write(names[0], [1, 2, 3]), write(names[1], [1, 2, 3], note="new"), write(names[2], [1, 2, 4])
    with StoreWriter(names[3], "piano") as writer:  # the same rows, all in one split
        writer.array("tokens", np.uint16)
        writer.record("train", writer.append("tokens", np.array([1, 2, 3], np.uint16)), 3)
    prints = [store.fingerprint for store in (same, again, other, Store.open(names[3]))]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_plain_name_lies_in_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNG_DATA", raising=False)
    assert place("piano") == Path("data/piano")
    monkeypatch.setenv("RUNG_DATA", "/elsewhere")
    assert place("piano") == Path("/elsewhere/piano")
    assert place("./sets/piano") == Path("sets/piano")
    assert place("sets/piano") == Path("/elsewhere/sets/piano")
    assert place("/sets") == Path("/sets")
