"""If this fails, somebody else can read the lab book, write into it, or see files that are none of its."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.errors import UserError
from rung.web import serve
from tests.errors import raises_code
from tests.web.fake import FakePlayer
from tests.web.labs import Answer, ServedLab, picture, start, write_book

TOKEN = "a-token-of-some-length"
SECRET = b"nothing of the lab"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("safe") / "runs"
    write_book(root, num_steps=20)
    return root


@pytest.fixture(scope="module")
def lab(root: Path) -> Iterator[ServedLab]:
    served = ServedLab(root)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def locked(root: Path) -> Iterator[ServedLab]:
    served = ServedLab(root, token=TOKEN)
    yield served
    served.stop()


# Loopback alone, and a token for every other address.


@pytest.mark.parametrize("verb", [["serve"], ["play", "piano/1"]])
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--host", "0.0.0.0"], "token-missing"),
        (["--host", "::"], "token-missing"),
        (["--token", "short"], "token-weak"),
        (["--host", "0.0.0.0", "--token", "x" * 15], "token-weak"),
        (["--token", "x" * 20 + " "], "token-weak"),  # browsers and programs send it without the space
    ],
)
def test_other_addresses_than_loopback_need_a_token_that_cannot_be_guessed(
    verb: list[str], options: list[str], code: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rung.web import lab, play

    for name in ("world.html", "lab.html"):
        (tmp_path / name).touch()
    monkeypatch.setattr(lab, "STATIC", tmp_path)
    monkeypatch.setattr(play, "STATIC", tmp_path)
    monkeypatch.delenv("RUNG_TOKEN", raising=False)
    ended = CliRunner().invoke(cli, [*verb, *options, "--port", "0", "--no-open", "--runs", str(root)])
    assert isinstance(ended.exception, UserError)
    assert ended.exception.code == code


def test_a_token_lets_other_addresses_in_and_loopback_needs_none() -> None:
    with serve.listen("127.0.0.1", 0) as listening:
        serve.check_token(listening, None)
    with serve.listen("0.0.0.0", 0) as listening:
        serve.check_token(listening, TOKEN)
        with raises_code("token-missing"):
            serve.check_token(listening, None)


# The token: asked for everywhere, compared in constant time, kept in a cookie that no script and no other page gets.


@pytest.mark.parametrize("path", ["/", "/api/lab", "/api/runs", "/files/piano/1/report.md", "/assets/x.js", "/nothing"])
def test_without_the_token_nothing_is_told(locked: ServedLab, path: str) -> None:
    answer = locked.ask(path)
    assert answer.status in (303, 401)
    assert b"piano" not in answer.body
    if answer.status == 303:
        assert answer.headers["location"] == "/login"
    assert locked.ask("/api/run/piano/1/note", "POST", {"text": "x"}).status == 401


@pytest.mark.parametrize("given", [b"token=wrong", b"token=", b"", b"\xff\xfe", b"token=" + TOKEN[:-1].encode()])
def test_a_wrong_token_gives_no_cookie(locked: ServedLab, given: bytes) -> None:
    answer = locked.ask("/login", "POST", given, **{"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status == 403
    assert "set-cookie" not in answer.headers
    assert locked.ask("/login", "POST", json.dumps({"token": ["x"]}).encode()).status == 403


def enter(served: ServedLab) -> Answer:
    return served.ask("/login", "POST", {"token": TOKEN}, **{"Content-Type": "application/json"})


def test_the_cookie_is_for_no_script_and_for_no_other_page_and_is_not_the_token(locked: ServedLab) -> None:
    cookie = enter(locked).headers["set-cookie"]
    value, *flags = [part.strip() for part in cookie.split(";")]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(flags)
    assert TOKEN not in cookie
    assert locked.ask("/api/lab", Cookie=value).status == 200
    name, _, session = value.partition("=")
    for other in (f"{name}=x", f"{name}={session}x", f"x={session}", f"{name}={TOKEN}", f"{name}="):
        assert locked.ask("/api/lab", Cookie=other).status == 401


def test_the_token_and_the_cookie_are_compared_in_constant_time(
    locked: ServedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(serve.hmac, "compare_digest", watched)
    value = enter(locked).headers["set-cookie"].partition(";")[0]
    assert compared == [(TOKEN.encode(), TOKEN.encode())]
    locked.ask("/api/lab", Cookie=value)
    assert compared[1][0] == compared[1][1] == value.partition("=")[2].encode()


def test_a_login_that_never_ends_is_cut_off(locked: ServedLab) -> None:
    assert locked.ask("/login", "POST", b"token=" + b"x" * 5000).status == 413


def test_the_play_page_is_behind_the_token_too() -> None:
    websockets = pytest.importorskip("websockets.sync.client")
    from websockets.exceptions import InvalidStatus

    from tests.web.fake import Served

    served = Served(FakePlayer(), token=TOKEN)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().status == 303
    with pytest.raises(InvalidStatus):
        websockets.connect(f"ws://127.0.0.1:{served.port}/walk")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", "/login", f"token={TOKEN}")
    cookie = str(connection.getresponse().getheader("set-cookie")).partition(";")[0]
    with websockets.connect(f"ws://127.0.0.1:{served.port}/walk", additional_headers={"Cookie": cookie}) as socket:
        assert json.loads(socket.recv())["title"] == "fake/1 at step 7"
    served.stop()


# Writing needs a header that no foreign page can send.


@pytest.mark.parametrize("what", ["note", "hypothesis", "verdict", "tags", "rename", "trash"])
def test_nothing_is_written_without_the_header(lab: ServedLab, root: Path, what: str) -> None:
    before = {path: path.read_bytes() for path in sorted((root / "piano").rglob("*.*json"))}
    body = {"text": "x", "verdict": "refuted", "tags": ["x"], "name": "other", "force": True}
    for headers in ({}, {"X_RUNG_CSRF": ""}, {"X_RUNG_CSRF": "wrong"}, {"X_RUNG_CSRF": lab.csrf[:-1]}):
        answer = lab.ask(f"/api/run/piano/2/{what}", "POST", body, Content_Type="application/json", **headers)
        assert (answer.status, answer.code) == (403, "csrf")
    answer = lab.ask(f"/api/run/piano/2/{what}", "POST", body, Content_Type="text/plain", X_RUNG_CSRF=lab.csrf)
    assert (answer.status, answer.code) == (400, "bad-request")  # what a form of another page could send
    assert lab.ask(f"/api/run/piano/2/{what}", "GET").status == 405
    assert {path: path.read_bytes() for path in sorted((root / "piano").rglob("*.*json"))} == before


def test_read_only_means_it(root: Path) -> None:
    served = ServedLab(root, is_read_only=True)
    about = served.get("/api/lab")
    assert (about["can_write"], about["csrf"]) == (False, None)
    for path in ("/api/run/piano/2/note", "/api/run/piano/2/trash", "/api/restore"):
        answer = served.post(path, {"text": "x", "run": "piano/2"})
        assert (answer.status, answer.code) == (403, "read-only")
    marks = root / ".verdicts.ndjson"
    before = marks.read_bytes() if marks.exists() else None
    served.get("/api/ab?a=piano/3,piano/4&b=piano/1,piano/2")
    assert (marks.read_bytes() if marks.exists() else None) == before
    served.stop()


# Other hosts and other pages.


@pytest.mark.parametrize("path", ["/", "/api/lab", "/api/live?runs=", "/files/piano/1/samples/00000000/sample.txt"])
def test_foreign_names_and_pages_are_refused(lab: ServedLab, path: str) -> None:
    here = f"127.0.0.1:{lab.port}"
    refused: list[dict[str, str]] = [
        {"Host": "evil.example"},
        {"Host": f"evil.example:{lab.port}"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{lab.port}"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
    ]
    for headers in refused:
        answer = lab.ask(path, **headers)
        assert answer.status in (400, 403), headers
        assert b"piano" not in answer.body
    if "live" not in path:
        own = {"Host": here, "Origin": f"http://{here}", "Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}
        assert lab.ask(path, **own).status in (200, 503)


# No path and no link leaves the lab.

NASTY = [
    "/files/piano/1/run.json",
    "/files/piano/1/config.yaml",
    "/files/piano/1/checkpoints/best",
    "/files/piano/1/../2/samples/00000019/tune.mid",
    "/files/piano/1/samples/../../run.json",
    "/files/piano/1/samples/..%2f..%2f..%2f..%2fsecret.txt",
    "/files/piano/1/samples/%2e%2e/%2e%2e/run.json",
    "/files/piano/1/samples/00000000/..%2f..%2f..%2frun.json",
    "/files/piano/1/samples/00000000/link.txt",
    "/files/piano/1/samples/00000001/sample.txt",
    "/files/piano/1//etc/passwd",
    "/files/piano/1/%2fetc%2fpasswd",
    "/files/piano/1/samples/00000000/a%00b",
    "/files/piano/1/samples/00000000",
    "/files/..%2fpiano/1/samples/00000000/sample.txt",
    "/files/%2e%2e/safe/1/secret.txt",
    "/files/out/1/samples/00000000/secret.txt",
    "/files/piano/99/samples/00000000/secret.txt",
    "/assets/../lab.py",
    "/assets/..%2f..%2fserve.py",
    "/api/run/out/1",
    "/api/run/piano/99",
    "/api/run/..%2f..%2fx/1",
    "/api/run/piano/01",
    "/api/run/piano/last",
    "/api/run/.trash/1",
    "/api/curve?metric=loss&runs=out/1",
    "/api/curve?metric=loss&runs=../x/1",
    "/api/curve?metric=loss&runs=/etc/1",
    "/api/samples?runs=out/1",
    "/api/diff?a=piano/1&b=out/1",
    "/api/diff?a=piano/1&b=/etc/passwd",
    "/api/live?runs=out/1",
]


@pytest.fixture(scope="module")
def with_links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLab]:
    """A lab with an experiment, a run, a folder of samples and a sample that are links to another place."""
    folder = tmp_path_factory.mktemp("links")
    other = folder / "elsewhere"
    record = start(other, "out", why=SECRET.decode())
    record.log(0, {"loss": 1.0})
    record.add_sample(0, "secret.txt", SECRET)
    record.finish("finished")
    (folder / "secret.txt").write_bytes(SECRET)
    root = folder / "runs"
    record = start(root)
    record.add_sample(0, "sample.txt", b"fine")
    record.finish("finished")
    (root / "out").symlink_to(other / "out")
    (root / "piano" / "99").symlink_to(other / "out" / "1")
    os.symlink(folder / "secret.txt", record.path / "samples" / "00000000" / "link.txt")
    os.symlink(other / "out" / "1" / "samples" / "00000000", record.path / "samples" / "00000001")
    served = ServedLab(root)
    yield served
    served.stop()


@pytest.mark.parametrize("path", NASTY)
def test_no_path_and_no_link_leads_out(with_links: ServedLab, path: str) -> None:
    answer = with_links.ask(path)
    assert answer.status in (400, 403, 404)
    assert SECRET not in answer.body
    assert b"root:" not in answer.body
    assert b"schema" not in answer.body


def test_links_are_neither_listed_nor_copied_and_are_reported(with_links: ServedLab, tmp_path: Path) -> None:
    found = with_links.get("/api/runs")
    assert [row["run"] for row in found["runs"]] == ["piano/1"]
    assert len(found["errors"]) == 2
    assert [one["name"] for one in with_links.get("/api/samples?runs=piano/1")["samples"]] == ["sample.txt"]

    from rung.web.export import export

    static, out = tmp_path / "static", tmp_path / "out"
    (static / "assets").mkdir(parents=True)
    (static / "lab.html").write_text("<head></head>")
    export(with_links.app.state.lab.book.root, out, static, lambda *told: None)
    assert not [path for path in out.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


# What a browser may do with an answer.


def directives(answer: Answer) -> dict[str, list[str]]:
    parts = [part.split() for part in answer.headers["content-security-policy"].split(";")]
    return {name: values for name, *values in parts}


@pytest.mark.parametrize("path", ["/", "/api/lab", "/assets/none.js", "/nothing", "/files/piano/1/none", "/login"])
def test_every_answer_forbids_what_the_page_does_not_need(lab: ServedLab, locked: ServedLab, path: str) -> None:
    answer = (locked if path == "/login" else lab).ask(path)
    policy = directives(answer)
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == policy["connect-src"] == policy["form-action"] == ["'self'"]
    assert policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
    assert not re.search(r"unsafe|https?:|\*|data:", answer.headers["content-security-policy"])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", "text/plain"), ("a.svg", "image/svg+xml"), ("a.html", None), ("a.js", None), ("a.png", "image/png")],
)
def test_a_sample_cannot_become_a_page_of_ours(tmp_path: Path, name: str, kind: str | None) -> None:
    record = start(tmp_path / "runs")
    script = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    record.add_sample(0, name, picture() if name.endswith("png") else script)
    record.finish("finished")
    served = ServedLab(tmp_path / "runs")
    answer = served.ask(f"/files/piano/1/samples/00000000/{name}")
    policy = directives(answer)
    assert policy["default-src"] == ["'none'"]
    assert "sandbox" in policy
    assert "script-src" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    if kind is None:
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
    else:
        assert answer.headers["content-type"].startswith(kind)
    served.stop()


def test_a_mistake_of_ours_tells_no_traceback(lab: ServedLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **named: Any) -> Any:
        raise RuntimeError("odd")

    monkeypatch.setattr(lab.app.state.lab.book, "rows", fail)
    answer = lab.ask("/api/runs")
    assert (answer.status, answer.code) == (500, "internal")
    assert b"Traceback" not in answer.body
