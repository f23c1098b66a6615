"""If this fails, a wrong URL, bucket, credential or endpoint is not one sentence, or two can both create one
object."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from rung.remote import bucket as module
from rung.remote.bucket import Bucket, RemoteError, WriteConflict, is_place
from tests.errors import raises_code
from tests.remote.servers import Proxy, free_port


def test_an_object_is_created_once_and_replaced_by_version(place: str) -> None:
    bucket = Bucket(place, is_new=True)
    assert bucket.read("a/m.json") is None
    bucket.write("a/m.json", b"one", None)
    with pytest.raises(WriteConflict):
        bucket.write("a/m.json", b"two", None)
    found = bucket.read("a/m.json")
    assert found is not None
    assert found[0] == b"one"
    bucket.write("a/m.json", b"three", found[1])
    with pytest.raises(WriteConflict):
        bucket.write("a/m.json", b"four", found[1])
    now = bucket.read("a/m.json")
    assert now is not None
    assert now[0] == b"three"


def test_an_object_that_went_is_not_replaced(place: str) -> None:
    bucket = Bucket(place, is_new=True)
    bucket.write("m.json", b"one", None)
    found = bucket.read("m.json")
    assert found is not None
    bucket.delete(["m.json", "never-there"])
    with pytest.raises(WriteConflict):
        bucket.write("m.json", b"two", found[1])
    assert bucket.read("m.json") is None


@pytest.mark.parametrize("num_bytes", [0, 1, 5_000_000, 8 << 20, (8 << 20) + 1, 20_000_003])
def test_bytes_come_back_as_they_went_in_parts_or_not(place: str, num_bytes: int) -> None:
    bucket, data = Bucket(place, is_new=True), os.urandom(num_bytes)

    def chunks():  # type: ignore[no-untyped-def]
        return (data[i : i + 1_000_000] for i in range(0, len(data), 1_000_000))

    bucket.send("some/thing", chunks, len(data))
    assert bucket.sizes("some") == {"some/thing": num_bytes}
    assert b"".join(bucket.receive("some/thing")) == data


def test_a_large_file_goes_in_parts(between: Proxy, s3: str) -> None:
    bucket, data = Bucket(s3), os.urandom(20_000_000)
    bucket.send("large", lambda: iter([data]), len(data))
    parts = [path for path in between.puts() if "partNumber" in path]
    assert len(parts) == 3
    assert b"".join(bucket.receive("large")) == data


def test_listing_has_names_one_level_down(place: str) -> None:
    bucket = Bucket(place, is_new=True)
    for key in ("runs/piano/1/manifest.json", "runs/piano/10/manifest.json", "runs/text/1/files/x.0"):
        bucket.send(key, lambda: iter([b"x"]), 1)
    assert bucket.folders("runs") == ["piano", "text"]
    assert bucket.folders("runs/piano") == ["1", "10"]
    assert bucket.folders("data") == []


@pytest.mark.parametrize("word", ["s3://b/x", "./here", "../up", "/abs", "~/home", ".", "..", "file:///x"])
def test_these_words_are_places(word: str) -> None:
    assert is_place(word)


@pytest.mark.parametrize("word", ["piano/7", "piano", "piano/3..7", "backup", ".hidden", "...", "piano/.."])
def test_these_are_not(word: str) -> None:
    assert not is_place(word)


@pytest.mark.parametrize(
    ("url", "code", "value"),
    [
        ("ftp://host/x", "bad-url", "s3://, gs://, az://, file://"),
        ("s3://", "bad-url", "s3://bucket/prefix"),
        ("file://relative/path", "bad-url", "file://relative/path"),
        ("backup", "bad-url", "./backup"),
        ("/nowhere/at/all", "no-folder", "/nowhere/at/all"),
    ],
)
def test_a_wrong_url_is_one_sentence(url: str, code: str, value: str) -> None:
    with raises_code(code) as caught:
        Bucket(url)
    assert value in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://a-key:a-secret@bucket/lab", "az://box/lab?sig=a-secret", "gs://b/x#a-secret"])
def test_a_url_with_a_key_in_it_is_refused_and_not_repeated(url: str) -> None:
    with raises_code("bad-url") as caught:
        Bucket(url)
    assert "a-secret" not in str(caught.value)


def test_the_query_of_a_request_is_not_told(between: Proxy, s3: str) -> None:
    """With some credentials it holds a signature."""
    between.fault = lambda asked: "500"
    with raises_code("network") as caught:
        Bucket(s3).sizes("x")
    assert f"GET {between.address}" in str(caught.value)
    assert "?" not in str(caught.value)


def test_a_body_that_never_gets_further_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    class Empty:
        meta: ClassVar = {"size": 5}

        def stream(self, min_chunk_size: int) -> list[bytes]:
            return []

    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(obstore, "get", lambda store, path, options=None: Empty())
    with pytest.raises(RemoteError):
        list(Bucket(str(tmp_path)).receive("x"))
    assert len(slept) == module.ATTEMPTS - 1


def test_the_main_thread_never_waits_for_a_server(tmp_path: Path) -> None:
    """It could not be interrupted: obstore does not come back to Python before there is an answer."""
    assert Bucket(str(tmp_path))._call(lambda store: threading.current_thread()) is not threading.main_thread()


def test_a_bucket_that_is_not_there(s3: str) -> None:
    bucket = Bucket("s3://no-such-bucket/lab")
    for ask in (lambda: bucket.read("x"), lambda: bucket.sizes("x"), lambda: bucket.write("x", b"", None)):
        with raises_code("no-bucket") as caught:
            ask()
        assert "no-such-bucket" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_credentials_that_are_refused(between: Proxy, s3: str) -> None:
    between.fault = lambda asked: "403"
    with raises_code("no-permission") as caught:
        Bucket(s3).read("x")
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "a-secret" not in str(caught.value)


def test_credentials_that_are_not_there(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with raises_code("no-credentials") as caught:
        Bucket(s3).read("x")
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nobody_at_the_endpoint(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    with raises_code("network") as caught:
        Bucket(s3).read("x")
    assert "AWS_ENDPOINT_URL" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not slept  # the first question is asked once: a wrong endpoint fails at once


def test_without_obstore_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with raises_code("not-installed") as caught:
        Bucket(str(tmp_path))
    assert "pip install 'rung[s3]'" in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with raises_code("bad-folder"):
        Bucket(str(tmp_path / "file" / "below"), is_new=True)
