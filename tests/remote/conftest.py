"""A real S3 server over HTTP for all tests of this folder, a bucket of its own for each, and a folder as the other kind
of place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.servers import Proxy, make_bucket, moto, proxy

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    with moto() as address:
        yield address


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket; the environment says how to reach it."""
    name = f"bucket-{next(_numbers)}"
    make_bucket(server, name)
    for key in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP", "RUNG_REMOTE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # no test asks a machine for its credentials
    return f"s3://{name}/lab"


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of either kind."""
    return str(request.getfixturevalue("s3")) if request.param == "s3" else f"file://{tmp_path}/a%20place"


@pytest.fixture
def between(server: str, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server; a bucket that is opened from now on goes through it."""
    with proxy(server) as state:
        monkeypatch.setenv("AWS_ENDPOINT_URL", state.address)
        yield state
