"""If this fails, `rung diff` calls two different programs the same, or hides the line that was changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rung.compare.code import ChangedFile, Snapshot, compared, diff
from rung.runs.provenance import pack
from rung.runs.query import Run, open_run
from rung.runs.record import Record, amend
from tests.compare.made import git, make_repo, make_run

Make = Callable[..., Run]


def test_an_uncommitted_edit_is_shown_to_the_line(make: Make, repo: Path) -> None:
    a = make(code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\nDEPTH = 2\n")
    b = make(code_root=repo)
    found = diff(a, b)
    assert found.files == [ChangedFile("M", "model.py", 1, 1)]
    assert "-WIDTH = 32\n+WIDTH = 64\n DEPTH = 2\n" in found.patch
    assert found.problem == ""
    assert diff(a, a).files == []


def test_an_untracked_file_is_shown_to_the_line(make: Make, repo: Path) -> None:
    (repo / "new loss ü.py").write_text("weight = 1.0\n")
    a = make(code_root=repo)
    (repo / "new loss ü.py").write_text("weight = 0.1\n")
    found = diff(a, make(code_root=repo))
    assert [file.path for file in found.files] == ["new loss ü.py"]
    assert "-weight = 1.0\n+weight = 0.1\n" in found.patch


def test_one_tree_is_the_same_code_whatever_the_commit(make: Make, repo: Path) -> None:
    (repo / "model.py").write_text("WIDTH = 64\n")
    a = make(code_root=repo)
    git(repo, "commit", "-aqm", "the edit, committed")
    b = make(code_root=repo)
    assert a.document["code"]["commit"] != b.document["code"]["commit"]
    shutil.rmtree(repo)
    assert diff(a, b).files == []
    assert diff(a, b).problem == ""


def test_settings_and_attributes_of_the_user_hide_nothing(make: Make, repo: Path) -> None:
    for key, value in {
        "diff.external": "/bin/false", "color.ui": "always", "diff.noprefix": "true", "core.pager": "/bin/false",
        "diff.py.textconv": "/bin/false", "diff.py.binary": "true", "diff.renames": "copies", "diff.context": "0",
    }.items():  # fmt: skip
        git(repo, "config", key, value)
    (repo / ".gitattributes").write_text("*.py diff=py\n*.cfg -diff\n")
    (repo / "a.cfg").write_text("rate = 1\n")
    git(repo, "add", "-A")
    a = make(code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\nDEPTH = 2\n")
    (repo / "a.cfg").rename(repo / "b.cfg")
    found = diff(a, make(code_root=repo))
    assert {(file.status, file.path) for file in found.files} == {("M", "model.py"), ("D", "a.cfg"), ("A", "b.cfg")}
    assert "--- a/model.py\n+++ b/model.py\n" in found.patch
    assert "-WIDTH = 32\n+WIDTH = 64\n DEPTH = 2\n" in found.patch
    assert "-rate = 1\n" in found.patch
    assert "\x1b" not in found.patch


def test_odd_names_and_bytes_come_out_as_text(make: Make, repo: Path) -> None:
    a = make(code_root=repo)
    Path(os.fsdecode(os.fsencode(repo) + b"/caf\xe9\n.py")).write_bytes(b"x = '\xe9'\n")
    (repo / "blob.dat").write_bytes(b"\0\1\2")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "odd")
    found = diff(a, make(code_root=repo))
    assert ChangedFile("A", "caf\\xe9\n.py", 1, 0) in found.files
    assert ChangedFile("A", "blob.dat", None, None) in found.files
    assert "+x = '\\xe9'" in found.patch
    found.patch.encode("utf-8")


@pytest.mark.parametrize("where", ["gone", "moved"])
def test_a_repository_that_is_not_at_hand(
    make: Make, repo: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make(code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\n")
    b = make(code_root=repo)
    monkeypatch.chdir(tmp_path)
    if where == "gone":
        shutil.rmtree(repo)
        found = diff(a, b)
        assert "no known repository" in found.problem
        assert a.document["code"]["ref"] in found.problem
        assert found.files == []
    else:
        repo.rename(tmp_path / "elsewhere")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert [file.path for file in diff(a, b).files] == ["model.py"]


def test_two_repositories_that_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_repo(tmp_path / "one"), make_repo(tmp_path / "other", {"model.py": "WIDTH = 1\nDEPTH = 2\n"})
    monkeypatch.chdir(other)
    found = diff(make_run(one / "runs", code_root=one), make_run(tmp_path / "runs", code_root=other))
    assert found.files == [ChangedFile("M", "model.py", 1, 1)]
    assert "-WIDTH = 32\n+WIDTH = 1\n" in found.patch


def test_two_clones_are_compared_from_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"sub/train.py": "import lib\n", "lib.py": "x = 1\n"}
    one, other = make_repo(tmp_path / "one", files), make_repo(tmp_path / "other", {**files, "lib.py": "x = 2\n"})
    monkeypatch.chdir(other / "sub")
    found = diff(make_run(one / "runs", code_root=one / "sub"), make_run(tmp_path / "runs", code_root=other / "sub"))
    assert [file.path for file in found.files] == ["lib.py"]


def test_a_snapshot_whose_ref_was_deleted(make: Make, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = make(code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\n")
    b = make(code_root=repo)
    git(repo, "update-ref", "-d", b.document["code"]["ref"])
    assert [file.path for file in diff(a, b).files] == ["model.py"]
    git(repo, "prune", "--expire=now")
    found = diff(a, b)
    assert found.files == []
    assert f"the code of {b.id} is the commit" in found.problem


def test_archives_are_compared_by_file(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\nx = 2\n")
    (folder / "gone.py").write_text("1\n")
    a = make(code_root=folder)
    (folder / "train.py").write_text("lr = 3\nx = 2")
    (folder / "gone.py").unlink()
    (folder / "new.py").write_text("")
    b = make(code_root=folder)
    assert a.document["code"]["kind"] == "tar"
    found = diff(a, b)
    assert found.files == [
        ChangedFile("D", "gone.py", 0, 1),
        ChangedFile("A", "new.py", 0, 0),
        ChangedFile("M", "train.py", 2, 2),
    ]
    assert "-lr = 1\n" in found.patch
    assert "+lr = 3\n" in found.patch
    assert "\\ No newline at end of file" in found.patch
    assert diff(a, a).files == []


def test_a_commit_against_an_archive(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = make_repo(tmp_path / "repo", {"sub/train.py": "lr = 1\n", "sub/same.py": "x\n", "sub/data.csv": "1\n"})
    monkeypatch.chdir(repo)
    a = make(code_root=repo / "sub")
    folder = tmp_path / "copy"
    shutil.copytree(repo / "sub", folder)
    (folder / "train.py").write_text("lr = 2\n")
    found = diff(a, make(code_root=folder))
    assert found.files == [ChangedFile("M", "train.py", 1, 1)]
    assert any("1 files that an archive leaves out" in note for note in found.notes)


def test_damage_is_a_problem_in_words(make: Make, tmp_path: Path, repo: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    a = make(code_root=folder)
    (folder / "train.py").write_text("lr = 2\n")
    b = make(code_root=folder)
    (a.path / "code.tar.gz").write_bytes(b"torn")
    assert "is not the archive" in diff(a, b).problem
    (a.path / "code.tar.gz").unlink()
    assert "is missing" in diff(a, b).problem
    assert "kept no code" in diff(make(), b).problem
    c = make(code_root=repo)
    amend(c.path, code={"kind": "git", "commit": "--output=/tmp/x", "tree": "--", "root": str(repo)})
    assert "is not a commit" in diff(open_run(c.path, c.path), make(code_root=repo)).problem
    amend(c.path, code={"kind": ["damaged"]})
    assert "kept no code" in diff(open_run(c.path, c.path), b).problem


def test_code_that_changed_on_a_resume_is_told(start: Callable[..., Record], make: Make, repo: Path) -> None:
    record = start(code_root=repo)
    record.log(0, {"loss": 1.0})
    record.finish("stopped")
    (repo / "model.py").write_text("WIDTH = 64\n")
    again = Record.reopen(record.path, command=["rung", "resume"], code_root=repo)
    again.log(5, {"loss": 1.0})
    again.rewind()
    again.log(3, {"loss": 1.0})
    again.finish("finished")
    git(repo, "checkout", "-q", "--", "model.py")
    found = diff(open_run(record.path, record.path), make(code_root=repo))
    assert found.files == []
    assert len(found.resumed) == 1
    assert found.resumed[0].step == 5
    assert found.resumed[0].files[0].path == "model.py"
    assert any("continued at step 5 with other code: model.py" in note for note in found.notes)


def test_files_that_were_left_out_are_told(make: Make, repo: Path) -> None:
    (repo / "key.pem").write_text("secret")
    found = diff(make(code_root=repo), make(code_root=repo))
    assert any("key.pem (looks like a secret)" in note for note in found.notes)


lines = st.lists(
    st.sampled_from(["a", "b", "+c", "-d", "", "  e\t", "\\ no", "--- x", "ü", "@@ -1 +1 @@"]), max_size=12
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=lines, new=lines, ends=st.tuples(st.booleans(), st.booleans()))
def test_a_patch_of_archives_makes_the_one_out_of_the_other(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str], ends: tuple[bool, bool]
) -> None:
    """git apply, which shares no code with us, accepts what we print."""
    folder = tmp_path_factory.mktemp("archives")
    snapshots, texts = [], []
    for name, text, is_ended in (("a", old, ends[0]), ("b", new, ends[1])):
        (folder / name / "code").mkdir(parents=True)
        texts.append("\n".join(text) + ("\n" if text and is_ended else ""))
        (folder / name / "code" / "x.py").write_text(texts[-1])
        code = pack(folder / name / "code", folder / name / "code.tar.gz")
        snapshots.append(Snapshot(name, folder / name, code))
    found = compared(*snapshots)
    assert bool(found.files) == (texts[0] != texts[1])
    if found.files:
        code = folder / "a" / "code"
        subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=code, input=found.patch, text=True, check=True)
        assert (code / "x.py").read_text() == texts[1]
        num_lines = [len(text.splitlines()) for text in texts]
        assert found.files[0].added - found.files[0].removed == num_lines[1] - num_lines[0]  # type: ignore[operator]
