"""If this fails, `rung report` writes a page elsewhere than it says, half of one, or one that differs from the last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rung.cli import cli
from rung.errors import UserError
from tests.compare.made import CONFIG, DERIVED, changed, make_run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    root = tmp_path / "runs"
    make_run(root, why="a <first> look")
    make_run(root, parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=0.5))
    return root


def report(*words: str) -> Result:
    result = CliRunner().invoke(cli, ["report", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def files(folder: Path) -> set[str]:
    """Without what readers keep for themselves, which can be deleted at any time."""
    return {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


def test_a_run_has_its_page_in_its_folder(root: Path) -> None:
    before = files(root / "piano" / "2")
    assert report("piano/2").output == "runs/piano/2/report.md\n"
    assert files(root / "piano" / "2") - before == {"report.md", "loss.svg", "speed.svg"}
    first = (root / "piano" / "2" / "report.md").read_bytes()
    assert report("runs/piano/2").exit_code == 0
    assert (root / "piano" / "2" / "report.md").read_bytes() == first
    assert first.startswith(b"# piano/2\n")


def test_a_name_alone_is_the_experiment(root: Path) -> None:
    assert report("piano").output == "runs/piano/report.md\n"
    text = (root / "piano" / "report.md").read_text()
    assert text.startswith("# piano\n")
    assert "## RUN 2" in text
    assert (root / "piano" / "loss.svg").exists()
    assert report("piano/last").output == "runs/piano/2/report.md\n"
    assert report("piano/best").output == "runs/piano/1/report.md\n"


def test_html(root: Path) -> None:
    assert report("piano/2", "--html").output == "runs/piano/2/report.html\n"
    assert not (root / "piano" / "2" / "report.md").exists()
    assert "<svg" in (root / "piano" / "2" / "report.html").read_text()
    assert report("piano/1", "--html", "out/first.html").output == "out/first.html\n"
    assert "a &lt;first&gt; look" in Path("out/first.html").read_text()
    assert report("--html", "piano/1").output == "runs/piano/1/report.html\n"
    assert report("piano", "--html").output == "runs/piano/report.html\n"


def test_another_folder(root: Path) -> None:
    assert report("piano/2", "--out", "pages/two").output == "pages/two/report.md\n"
    assert files(Path("pages/two")) == {"report.md", "loss.svg", "speed.svg"}
    assert report("piano/2", "--out", "pages", "--html", "two.html").output == "pages/two.html\n"
    assert not (root / "piano" / "2" / "report.md").exists()


def test_standard_output_writes_nothing(root: Path) -> None:
    folders = [root, root / "piano", root / "piano" / "1", root / "piano" / "2"]
    before = [files(folder) for folder in folders]
    assert report("piano/2", "--stdout").output.startswith("# piano/2\n")
    assert report("piano/2", "--html", "--stdout").output.startswith("<!doctype html>")
    assert report("piano", "--stdout").output.startswith("# piano\n")
    assert [files(folder) for folder in folders] == before


def test_json_names_what_was_written(root: Path) -> None:
    written = [f"runs/piano/2/{name}" for name in ("report.md", "speed.svg", "loss.svg")]
    assert json.loads(report("piano/2", "--json").output) == written


def test_epochs_lie_beside_the_page(root: Path) -> None:
    make_run(root, derived={**DERIVED, "epoch_rows": 160})
    names = json.loads(report("piano/3", "--json").output)
    assert names == [f"runs/piano/3/{name}" for name in ("report.md", "epochs.json", "speed.svg", "loss.svg")]
    assert [one["epoch"] for one in json.loads(Path(names[1]).read_text())] == [1, 2, 3, 4]
    assert report("piano/3", "--out", "one", "--html").exit_code == 0
    assert files(Path("one")) == {"report.html"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a run such as piano/7"),
        (["nosuch"], "there is no run nosuch"),
        (["piano/9"], "piano/9"),
        (["piano/1", "--out", "file"], "file"),
        (["piano/1", "--html", "runs/piano"], "[bad-path]"),
    ],
)
def test_mistakes_get_a_sentence(root: Path, words: list[str], said: str) -> None:
    Path("file").write_text("")
    result = CliRunner().invoke(cli, ["report", *words])
    shown = f"{result.output}{result.exception} [{getattr(result.exception, 'code', '')}]"
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError | SystemExit), result.exception
    assert said in shown


def test_a_run_of_a_newer_rung_is_refused(root: Path) -> None:
    path = root / "piano" / "2" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(UserError, match="99"):
        report("piano/2")
    assert "schema 99" in report("piano", "--stdout").output  # and the rest of the experiment has its page


def test_the_verbs_import_neither_torch_nor_numpy(root: Path) -> None:
    """Of the page of a run that is sick the doctor needs numpy, and nothing needs torch."""
    code = """
import sys
sys.modules["torch"] = None
from click.testing import CliRunner
from rung.cli import cli
for words in (["note", "piano/1", "x"], ["note", "piano/1"], ["verdict", "piano/1", "refuted"], ["report", "piano"],
              ["report", "--help"]):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
assert "numpy" not in sys.modules
assert CliRunner().invoke(cli, ["report", "piano/2"]).exit_code == 0
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr
