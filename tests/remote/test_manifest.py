"""If this fails, a manifest from elsewhere can write outside of its folder, or a file gets a name that a store
refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import UserError
from rung.remote.bucket import Bucket
from rung.remote.manifest import FileEntry, check_item, read_manifest
from rung.remote.pull import pull_data
from rung.remote.push import push
from tests.errors import raises_code
from tests.remote.items import tree

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=80).filter(
    lambda name: name not in (".", "..")
)


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_a_key_is_plain_ascii_whatever_the_path(parts: list[str]) -> None:
    key = FileEntry("/".join(parts), 1, "0" * 64).pieces[0].key
    assert key.isascii()
    assert key.isprintable()
    assert all(part not in ("", ".", "..") and len(part) < 240 for part in key.split("/"))
    assert len(key) < 800


@given(st.lists(NAMES, min_size=2, max_size=2, unique=True))
def test_two_paths_have_two_keys(paths: list[str]) -> None:
    one, other = (FileEntry(path, 1, "0" * 64).pieces[0].key for path in paths)
    assert one != other


def changed(manifest: dict[str, Any], path: str) -> dict[str, Any]:
    entry = FileEntry(path, manifest["files"][0]["bytes"], manifest["files"][0]["sha256"])
    manifest["files"][0].update(path=path, key=entry.pieces[0].key)
    return manifest


@pytest.mark.parametrize("path", ["../../escaped", "/escaped", "a/../../escaped", "", "a//b", "./a", "a\0b"])
def test_no_path_leads_out_of_the_item(path: str, tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push(bucket, tree(tmp_path / "here", {"a.bin": b"abc"}))
    file = tmp_path / "there/data/tunes/manifest.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path)))
    with raises_code("item-damaged"):
        pull_data(bucket, "tunes", tmp_path / "deep/er/tunes")
    assert not list(tmp_path.rglob("escaped*"))
    assert not (tmp_path / "deep").exists()


def test_a_number_of_a_checkpoint_that_is_none() -> None:
    from rung.remote.snapshot import step_of

    assert step_of("checkpoints/00000012/model.safetensors") == 12
    for path in (f"checkpoints/{'9' * 5000}/x", "checkpoints/best", "checkpoints/12", "checkpoints/aside-1/12/x"):
        assert step_of(path) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [],
        lambda m: {**m, "schema": 99},
        lambda m: {**m, "schema": None},
        lambda m: {**m, "name": "another"},
        lambda m: {**m, "files": [{**m["files"][0], "bytes": -1}]},
        lambda m: {**m, "files": [{**m["files"][0], "sha256": "short"}]},
        lambda m: {**m, "files": [m["files"][0], m["files"][0]]},
        lambda m: {**m, "files": [{**m["files"][0], "key": "files/elsewhere"}]},
        lambda m: {**m, "files": 7},
        lambda m: {key: value for key, value in m.items() if key != "uid"},
    ],
)
def test_an_odd_manifest_is_one_sentence(change: Any, tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push(bucket, tree(tmp_path / "here", {"a.bin": b"abc"}))
    file = tmp_path / "there/data/tunes/manifest.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(UserError) as caught:
        read_manifest(bucket, "data", "tunes")
    assert "\n" not in str(caught.value)


def test_force_pushes_over_a_damaged_manifest(tmp_path: Path) -> None:
    from rung.remote.push import PushOptions

    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    snapshot = tree(tmp_path / "here", {"a.bin": b"abc"})
    push(bucket, snapshot)
    (tmp_path / "there/data/tunes/manifest.json").write_text("not json")
    with raises_code("item-damaged") as caught:
        push(bucket, snapshot)
    assert "--force" in str(caught.value)
    push(bucket, snapshot, PushOptions(is_forced=True))
    assert pull_data(bucket, "tunes", tmp_path / "again").what == "new"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("run", "piano"), ("run", "piano/0"), ("run", "piano/x"), ("run", "../x/1"), ("data", "a/b"), ("data", "..")],
)
def test_a_name_that_is_none(kind: str, name: str) -> None:
    with raises_code("bad-name"):
        check_item(kind, name)
