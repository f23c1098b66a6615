"""If this fails, code that came with a stranger's run is executed, or one's own recipe is locked out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.runs.query import open_run
from rung.runs.record import amend

ROOT = Path(__file__).parents[2]
TINY = (
    "optimizer.max_iters=4", "eval_interval=2", "checkpoint.every=2", "lr.warmup_iters=1", "model.width=8",
    "model.layers=1", "system.device=cpu",
)  # fmt: skip
RECIPE = "from tests.cases.tiny import Tiny as Base\n\nclass Tiny(Base):\n    pass\n"
EVIL = "import pathlib; pathlib.Path({mark!r}).write_text(__name__)\n" + RECIPE
VERBS = {
    "sample": ["sample", "{run}"], "eval": ["eval", "{run}"], "resume": ["resume", "{run}", "--at", "2"],
    "check": ["check", "{run}", "--quick"], "export": ["export", "{run}", "--hf"], "replay": ["replay", "{run}@2"],
    "from": ["train", "--parent", "{run}", "seed=3"], "ab": ["ab", "{run}", "optimizer.grad_clip=0.5"],
    "option": ["sample", "{run}", "--temperature", "1"],
}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab with one run of the user's own recipe."""
    lab = tmp_path_factory.mktemp("lab")
    (lab / "mine.py").write_text(RECIPE)
    done = rung(lab, "train", "mine:Tiny", *TINY, "--experiment", "theirs", "--no-check")
    assert done.returncode == 0, done.stderr
    return lab


@pytest.fixture
def lab(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "lab"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Where foreign code that was executed says so."""
    return tmp_path / "executed"


def rung(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "RUNG_RUNS"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "rung", *words], cwd=folder, env=env, capture_output=True, text=True)


def refused(lab: Path, *words: str) -> None:
    done = rung(lab, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "--trust" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_recipe_in_the_run_is_not_imported(lab: Path, mark: Path, verb: str) -> None:
    run = lab / "runs/theirs/1"
    (run / "files").mkdir()
    for place in (run / "files/evil.py", run / "files/__init__.py", run / "__init__.py", run.parent / "__init__.py"):
        place.write_text(EVIL.format(mark=str(mark)))
    amend(run, recipe="runs.theirs.1.files.evil:Tiny")
    refused(lab, *(word.format(run="theirs/1") for word in VERBS[verb]))
    assert not mark.exists()


def a_package_of_the_stranger(lab: Path, evil: str) -> str:
    """Only the package above the module is the stranger's."""
    (lab / "runs/theirs/1/files").mkdir()
    (lab / "runs/theirs/1/files/__init__.py").write_text(evil)
    (lab / "runs/theirs/1/files/evil.py").symlink_to(lab / "mine.py")
    return "runs.theirs.1.files.evil:Tiny"


def beside_the_runs(lab: Path, evil: str) -> str:
    (lab / "runs/evil.py").write_text(evil)
    return "runs.evil:Tiny"


def through_a_link(lab: Path, evil: str) -> str:
    (lab / "runs/theirs/1/evil.py").write_text(evil)
    (lab / "innocent.py").symlink_to(lab / "runs/theirs/1/evil.py")
    return "innocent:Tiny"


def in_prepared_data(lab: Path, evil: str) -> str:
    (lab / "data/tunes").mkdir(parents=True)
    (lab / "data/tunes/manifest.json").write_text(json.dumps({"kind": "tokens", "files": {}}))
    (lab / "data/tunes/evil.py").write_text(evil)
    return "data.tunes.evil:Tiny"


def in_another_pulled_run(lab: Path, evil: str) -> str:
    shutil.copytree(lab / "runs/theirs/1", lab / "downloads/x")
    (lab / "downloads/x/evil.py").write_text(evil)
    return "downloads.x.evil:Tiny"


def compiled_alone(lab: Path, evil: str) -> str:
    import py_compile

    (lab / "evil.py").write_text(evil)
    py_compile.compile(str(lab / "evil.py"), cfile=str(lab / "runs/theirs/1/evil.pyc"), doraise=True)
    (lab / "evil.py").unlink()
    return "runs.theirs.1.evil:Tiny"


def of_python_itself(lab: Path, evil: str) -> str:
    return "antigravity:Tiny"


PLACES: list[Callable[[Path, str], str]] = [
    a_package_of_the_stranger, beside_the_runs, through_a_link, in_prepared_data, in_another_pulled_run,
    compiled_alone, of_python_itself,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_nor_from_another_place_that_a_stranger_fills(lab: Path, mark: Path, place: Callable[[Path, str], str]) -> None:
    recipe = place(lab, EVIL.format(mark=str(mark)))
    amend(lab / "runs/theirs/1", recipe=recipe)
    done = rung(lab, "sample", "theirs/1")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert not mark.exists()


def test_nor_where_the_user_went_into_the_run(lab: Path, mark: Path) -> None:
    run = lab / "runs/theirs/1"
    (run / "evil.py").write_text(EVIL.format(mark=str(mark)))
    amend(run, recipe="evil:Tiny")
    for folder, name in ((run, "."), (run.parent, "1"), (lab / "runs", "theirs/1")):
        for more in ([], ["--runs", str(lab / "runs")]):
            amend(run, recipe={run: "evil", run.parent: "1.evil", lab / "runs": "theirs.1.evil"}[folder] + ":Tiny")
            done = rung(folder, "sample", name, *more)
            assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert not mark.exists()


def test_what_lies_around_is_not_imported_for_an_installed_recipe(lab: Path, mark: Path) -> None:
    """The current folder comes before the installed packages once it is on Python's path."""
    run = lab / "runs/theirs/1"
    for name in ("safetensors", "numpy", "yaml"):
        (run / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    amend(run, recipe="tests.cases.tiny:Tiny")
    words = ["-c", "import sys; sys.path.remove(''); from rung.cli import main; main()", "sample", "."]
    subprocess.run([sys.executable, *words], cwd=run, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert not mark.exists()


def test_trust_executes_it(lab: Path, mark: Path) -> None:
    run = lab / "runs/theirs/1"
    (run / "files").mkdir()
    (run / "files/evil.py").write_text(EVIL.format(mark=str(mark)))
    amend(run, recipe="runs.theirs.1.files.evil:Tiny")
    done = rung(lab, "eval", "theirs/1", "--trust")
    assert done.returncode == 0, done.stderr
    assert mark.read_text() == "runs.theirs.1.files.evil"


def test_a_recipe_on_the_command_line_is_the_users_choice(lab: Path, mark: Path) -> None:
    (lab / "runs/evil.py").write_text(EVIL.format(mark=str(mark)))
    done = rung(lab, "train", "runs.evil:Tiny", *TINY, "--no-check")
    assert done.returncode == 0, done.stderr
    assert mark.exists()


def test_ones_own_recipe_may_be_edited_and_moved_to(lab: Path) -> None:
    (lab / "mine.py").write_text("# edited\n" + RECIPE)
    assert rung(lab, "eval", "theirs/1").returncode == 0
    (lab / "package").mkdir()
    shutil.move(lab / "mine.py", lab / "package/mine.py")  # a package without __init__.py
    amend(lab / "runs/theirs/1", recipe="package.mine:Tiny")
    assert rung(lab, "eval", "theirs/1").returncode == 0


def test_a_project_may_lie_in_the_folder_that_holds_its_runs(lab: Path) -> None:
    project = lab / "runs/project"
    project.mkdir()
    shutil.move(lab / "mine.py", project / "mine.py")
    done = rung(project, "eval", "theirs/1", "--runs", str(lab / "runs"))
    assert done.returncode == 0, done.stderr


def test_a_function_that_a_capture_names_is_not_executed(lab: Path, mark: Path) -> None:
    run = lab / "runs/theirs/1"
    evil = run / "files/evil.py"
    evil.parent.mkdir()
    evil.write_text(EVIL.format(mark=str(mark)) + "def build(): pass\n")
    amend(run, recipe="own loop")
    capture = run / "captures/00000002"
    shutil.copytree(run / "checkpoints/00000002", capture)
    for build in (f"{evil}:build", "runs/theirs/1/files/evil.py:build", f"{lab.parent}/evil.py:build"):
        (capture / "capture.json").write_text(json.dumps({"build": build}))
        shutil.copy(evil, lab.parent / "evil.py")
        refused(lab, "replay", "theirs/1")
    assert not mark.exists()
    rung(lab, "replay", "theirs/1", "--build", f"{evil}:build")
    assert mark.exists(), "the command line is the user's choice"


def test_a_module_that_is_imported_already_is_used(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's, or one of a test."""
    import rung as package
    from tests.cases.tiny import Tiny

    monkeypatch.chdir(trained)
    run = package.train(Tiny, overrides=TINY, runs=trained / "others", display=False, check=False)
    assert package.load(run, runs=trained / "others").step
    assert open_run(run.id, trained / "others").document["recipe"] == "tests.cases.tiny:Tiny"
