"""If this fails, rung in a subfolder starts a second lab, or writes into a folder that is not its own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rung.cli.ls import command as ls
from rung.data.store import place
from rung.lab import data_folder, lab, runs_folder
from rung.runs.query import ref, root_of
from tests.compare.arms import make


@pytest.fixture
def sub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: two folders below one that holds a run."""
    for name in ("RUNG_RUNS", "RUNG_DATA"):
        monkeypatch.delenv(name, raising=False)
    make(tmp_path / "runs", experiment="bach")
    folder = tmp_path / "src" / "deep"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_runs_and_data_are_found_from_a_subfolder(sub: Path) -> None:
    up = Path(os.pardir, os.pardir)
    assert (lab(), runs_folder(), data_folder()) == (up, up / "runs", up / "data")
    assert (root_of(), place("maestro")) == (up / "runs", up / "data/maestro")
    assert "bach/1" in CliRunner().invoke(ls, []).output.split()
    assert ref(sub.parents[1] / "runs/bach/1", "bach/1") == "bach/1"  # how a verb names it from here


def test_prepared_data_makes_a_lab_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    for folder in ("data/epr-labs/maestro", "sub"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/epr-labs/maestro/manifest.json").touch()
    monkeypatch.chdir(tmp_path / "sub")
    assert runs_folder() == Path("../runs")


@pytest.mark.parametrize("stray", ["runs/Nov18_host/events.out.tfevents", "data/raw.csv", "runs/bach/1/config.yaml"])
def test_folders_of_other_programs_make_no_lab(sub: Path, stray: str) -> None:
    """TensorBoard writes into runs/ too."""
    Path(stray).parent.mkdir(parents=True)
    Path(stray).touch()
    assert lab() == Path(os.pardir, os.pardir)


def test_a_fresh_folder_is_a_lab_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNG_RUNS", "RUNG_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert (lab(), runs_folder(), data_folder()) == (Path(), Path("runs"), Path("data"))


def test_a_clone_inside_of_a_lab_is_not_left(sub: Path) -> None:
    (sub.parent / ".git").mkdir()
    assert lab() == Path()


def test_what_belongs_to_another_user_is_not_taken(sub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {sub.parents[1]: 4242}
    real = Path.stat

    def stat(path: Path, **how: bool) -> object:
        found = real(path, **how)
        return SimpleNamespace(st_uid=owners.get(path, found.st_uid), st_mode=found.st_mode)

    monkeypatch.setattr(Path, "stat", stat)
    assert lab() == Path()


def test_the_environment_has_the_last_word(sub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_RUNS", "elsewhere")
    monkeypatch.setenv("RUNG_DATA", "store")
    assert (runs_folder(), data_folder()) == (Path("elsewhere"), Path("store"))
