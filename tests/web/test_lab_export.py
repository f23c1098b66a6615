"""If this fails, a static copy of the lab book is not whole, overwrites a folder, or says where it was made."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rung.cli import cli
from rung.errors import UserError
from rung.web import lab
from tests.web.labs import ServedLab, write_book


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copied") / "runs"
    write_book(root, num_steps=40)
    return root


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page that is built."""
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "assets" / "lab-1.js").write_text("1")
    (folder / "lab.html").write_text("<!doctype html>\n<html><head>\n<title>rung</title></head><body></body></html>")
    monkeypatch.setattr(lab, "STATIC", folder)
    return folder


def copy(root: Path, out: Path) -> Result:
    return CliRunner().invoke(cli, ["serve", "--export", str(out), "--runs", str(root)])


def test_the_copy_holds_every_answer_and_nothing_of_this_machine(root: Path, static: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = copy(root, out)
    assert ended.exit_code == 0, ended.output
    assert "6 runs" in ended.output

    page = (out / "index.html").read_text()
    assert page.index("Content-Security-Policy") < page.index('src="./export.js"') < page.index("<title>")
    assert "unsafe" not in page
    assert (out / "export.js").read_text().startswith("window.RUNG_EXPORT = {")
    assert (out / "assets" / "lab-1.js").exists()

    def answer(name: str) -> Any:
        return json.loads((out / "api" / f"{name}.json").read_bytes())

    served = ServedLab(root, is_read_only=True)
    assert answer("lab") == served.get("/api/lab")
    rows = {row["run"]: row for row in answer("runs")["runs"]}
    assert list(rows) == [row["run"] for row in served.get("/api/runs")["runs"]]
    assert rows["piano/2"]["values"]["optimizer.grad_clip"] == 0.5
    for run in rows:
        shown = answer(f"run/{run}")
        assert shown["metrics"] == list(shown["curves"])
        curve = json.loads((out / shown["curves"]["loss"]).read_bytes())
        (live,) = served.get(f"/api/curve?runs={run}&metric=loss")["series"]
        assert curve["x"]["step"] == live["x"]
        assert curve["mean"] == live["mean"]
        assert answer(f"clock/{run}") == served.get(f"/api/clock/{run}")
        assert answer(f"tables/{run}") == served.get(f"/api/tables/{run}")
        samples = answer(f"samples/{run}")
        assert samples == served.get(f"/api/samples?runs={run}")
        for sample in samples["samples"]:
            assert (out / sample["url"]).stat().st_size == sample["num_bytes"]
        assert answer(f"doctor/{run}")["verdict"] == served.get(f"/api/doctor/{run}")["verdict"]
    assert set(json.loads((out / answer("run/piano/1")["curves"]["loss"]).read_bytes())["x"]) == {
        "step", "targets", "epochs", "time",
    }  # fmt: skip
    assert answer("layers/piano/1")["maps"]["tensors/weight"]["layers"]
    assert answer("diff/piano/1/piano/2")["words"] == served.get("/api/diff?a=piano/1&b=piano/2")["words"]
    assert answer("ab/piano/1/piano/2")["word"] == served.get("/api/ab?a=piano/1&b=piano/2")["word"]
    served.stop()

    for path in out.rglob("*.json"):
        text = path.read_text()
        assert str(tmp_path.parent) not in text, path
        assert f'"{socket.gethostname()}"' not in text, path
        assert '"pid"' not in text, path
        assert not text.startswith('{"error":'), path


def test_a_copy_replaces_an_earlier_one_and_nothing_else(root: Path, static: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert copy(root, out).exit_code == 0
    (out / "api" / "old.json").touch()
    assert copy(root, out).exit_code == 0
    assert not (out / "api" / "old.json").exists()

    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").touch()
    ended = copy(root, thesis)
    assert isinstance(ended.exception, UserError)
    assert ended.exception.code == "not-empty"
    assert [path.name for path in thesis.iterdir()] == ["chapter.tex"]
    ended = copy(root, root / "piano" / "copy")
    assert isinstance(ended.exception, UserError)
    assert ended.exception.code == "bad-folder"


def test_a_page_that_is_not_built_is_said(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "STATIC", tmp_path)
    for words in (["serve", "--port", "0"], ["serve", "--export", str(tmp_path / "out")]):
        ended = CliRunner().invoke(cli, [*words, "--runs", str(root)])
        assert isinstance(ended.exception, UserError)
        assert ended.exception.code == "not-built"
