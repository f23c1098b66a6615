"""If this fails, `rung diff` calls two programs the same of which one ran other code, or takes a log file for code.

Real scripts, each in a process of its own, in a repository of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rung
from rung.cli import cli
from rung.compare.code import cells_of
from rung.compare.factors import Comparison, compare, strictness
from rung.compare.gate import check_arms
from rung.runs.executed import read_contents
from rung.runs.query import Run, open_run
from tests.compare.made import git, make_repo

PACKAGE = str(Path(rung.__file__).resolve().parents[1])
LOOP = """
def train(targets=8, config={"lr": 0.1}):
    import rung
    run = rung.init("own", config=config, seed=1)
    for step in range(20):
        run.log({"loss": 1 / (step + 1), "targets": targets})
        if step % 5 == 4:
            run.log({"val/loss": 0.5 / (step + 1)})
    run.finish()
"""
IGNORED = "settings.py\nconf/\n__pycache__/\nruns/\n"


class Project:
    """A repository with a script, and what its runs recorded."""

    def __init__(self, folder: Path) -> None:
        files = {"loop.py": LOOP, "train.py": "from loop import train\ntrain()\n", ".gitignore": IGNORED}
        self.folder = make_repo(folder, files)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, *words: str, stdin: str | None = None, **variables: str) -> Run:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RUNG_", "GIT_"))}
        env |= {"PYTHONPATH": PACKAGE, **variables}
        command = [sys.executable, *(words or ("train.py",))]
        how: dict[str, Any] = {"capture_output": True, "text": True, "input": stdin, "check": False}
        done = subprocess.run(command, cwd=self.folder, env=env, **how)
        assert done.returncode == 0, done.stderr
        return self.last()

    def last(self) -> Run:
        return open_run("own", self.folder / "runs")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def weights(comparison: Comparison, part: str = "code") -> dict[str, str]:
    return {d.name: d.weight for d in comparison.differences if d.part == part}


def executed(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / "executed.json").read_text())
    return found


# name of the edited file, the script, the words of its command
TRAIN = "from loop import train\ntrain()\n"
EDITS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ignored by git": ("settings.py", "import settings\nfrom loop import train\ntrain()\n", ("train.py",)),
    "in another folder": (
        "../lib/helper.py",
        "import sys\nsys.path.insert(0, '../lib')\nimport helper\nfrom loop import train\ntrain()\n",
        ("train.py",),
    ),
    "imported late": ("conf/late.py", f"import conf.late\n{TRAIN}", ("train.py",)),
    "imported by the loop": ("settings.py", "import loop\nloop.train(__import__('settings').A)\n", ("train.py",)),
    "executed as text": ("conf/c.py", f"exec(open('conf/c.py').read())\n{TRAIN}", ("train.py",)),
    "loaded by its path": (
        "conf/c.py",
        "import importlib.util as u\nfrom pathlib import Path\n"
        "s = u.spec_from_file_location('c', Path('conf') / 'c.py')\n"
        "s.loader.exec_module(u.module_from_spec(s))\nfrom loop import train\ntrain()\n",
        ("train.py",),
    ),
    "configuration that git ignores": (
        "conf/base.json",
        "import json\njson.load(open('conf/base.json'))\nfrom loop import train\ntrain()\n",
        ("train.py",),
    ),
    "configuration of the command": ("conf/base.yaml", TRAIN, ("train.py", "--c=conf/base.yaml")),
    "of a module that is run": ("settings.py", "import settings\nfrom loop import train\ntrain()\n", ("-m", "train")),
    "under a profiler": (
        "settings.py",
        "import settings\nfrom loop import train\ntrain()\n",
        ("-m", "cProfile", "-o", "../prof", "train.py"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_that_no_snapshot_holds_is_shown_to_the_line(project: Project, case: str) -> None:
    name, script, words = EDITS[case]
    project.write("train.py", script)
    old, new = ('{"a": 1}\n', '{"a": 2}\n') if name.endswith("json") else ("A = 8\n", "A = 64\n")
    project.write(name, old)
    runs = [project.start(*words), project.start(*words)]
    assert strictness(compare(*runs)).confounders == []
    project.write(name, new)
    comparison = compare(runs[1], project.start(*words))
    assert list(weights(comparison).values()) == ["hidden"]
    assert f"-{old}+{new}" in comparison.code.patch
    assert not strictness(comparison).is_strict


def test_a_program_that_lies_in_no_file(project: Project) -> None:
    for words, stdin in ((("-c",), None), (("-",), "from loop import train\ntrain()\n")):
        code = [] if stdin else ["from loop import train\ntrain()\n"]
        a, b = project.start(*words, *code, stdin=stdin), project.start(*words, *code, stdin=stdin)
        assert strictness(compare(a, b)).words == "not an A/B: nothing that was recorded differs"
        other = "from loop import train\ntrain(8)\n"
        c = project.start(*words, *([] if stdin else [other]), stdin=other if stdin else None)
        assert list(weights(compare(b, c)).values()) == ["hidden"]


def test_two_scripts_of_one_tree_are_two_programs(project: Project) -> None:
    project.write("other.py", "from loop import train\n# another\ntrain()\n")
    comparison = compare(project.start(), project.start("other.py"))
    assert weights(comparison) == {"train.py -> other.py": "hidden"}
    project.write("twin.py", "from loop import train\ntrain()\n")
    assert strictness(compare(project.start(), project.start("twin.py"))).confounders == []


def notebook(source: str, count: int | None, text: str = "") -> str:
    output = [{"output_type": "stream", "name": "stdout", "text": [text]}]
    cell = {"cell_type": "code", "execution_count": count, "source": source, "outputs": output, "metadata": {}}
    words = {"cell_type": "markdown", "source": text, "metadata": {}}
    return json.dumps({"cells": [words, cell], "metadata": {"n": count}, "nbformat": 4, "nbformat_minor": 5})


def test_what_is_no_code_of_the_run_confounds_nothing(project: Project) -> None:
    project.write("look.ipynb", notebook("x = 1", 1))
    git(project.folder, "add", "-A")
    git(project.folder, "commit", "-qm", "a notebook")
    a = project.start()
    project.write("look.ipynb", notebook("x = 1", 7, "seen"))
    project.write("out.log", "a line\n")
    project.write("unused.py", "import nothing\n")
    project.write("notes.txt", "new\n")
    for name in ("last.ckpt", "model.bin", "plot.png", "odd"):
        (project.folder / name).write_bytes(b"\0\1")
    comparison = compare(a, project.start())
    found = weights(comparison)
    names = {"look.ipynb", "out.log", "unused.py", "notes.txt", "last.ckpt", "model.bin", "plot.png", "odd"}
    assert set(found) == names
    assert set(found.values()) == {"note"}
    assert comparison.code.patch == ""
    assert strictness(comparison).confounders == []
    project.write("look.ipynb", notebook("x = 2", 7))
    assert weights(compare(a, project.start()))["look.ipynb"] == "note"  # which nobody ran


def test_a_log_that_grows_and_results_that_each_run_writes(project: Project) -> None:
    """Into a file that is open while the run starts, and into one that looks like configuration."""
    script = f"import json, time\n{TRAIN}json.dump({{'at': time.time()}}, open('result.json', 'w'))\n"
    project.write("train.py", script)
    runs = []
    for _ in range(3):
        with (project.folder / "log.txt").open("a") as log:
            env = {**os.environ, "PYTHONPATH": PACKAGE}
            command = [sys.executable, "train.py"]
            subprocess.run(command, cwd=project.folder, env=env, stdout=log, stderr=log, check=True)
        runs.append(project.last())
    assert executed(runs[0])["outputs"] == ["log.txt"]
    for a, b in ((runs[0], runs[1]), (runs[1], runs[2]), (runs[0], runs[2])):
        comparison = compare(a, b)
        assert set(weights(comparison).values()) == {"note"}
        assert strictness(comparison).confounders == []


def test_configuration_that_a_person_edits_while_a_run_trains_counts(project: Project) -> None:
    project.write("conf.yaml", "lr: 1\n")
    edits = "from pathlib import Path\nfrom loop import train\ntrain()\nPath('conf.yaml').write_text('lr: 2\\n')\n"
    project.write("train.py", edits)
    a = project.start()
    project.write("train.py", edits.rpartition("Path")[0])
    project.write("conf.yaml", "lr: 2\n")
    os.utime(project.folder / "conf.yaml", (1e9, 1e9))
    assert weights(compare(a, project.start()))["conf.yaml"] == "hidden"


def test_tracked_text_counts_whoever_reads_it(project: Project) -> None:
    project.write("base.yaml", "lr: 1\n")
    project.write("vocab.txt", "a\n")
    git(project.folder, "add", "-A")
    git(project.folder, "commit", "-qm", "configuration")
    a = project.start()
    project.write("base.yaml", "lr: 2\n")
    project.write("vocab.txt", "b\n")
    assert weights(compare(a, project.start())) == {"base.yaml": "hidden", "vocab.txt": "hidden"}


def test_a_file_that_is_edited_after_it_was_loaded(project: Project) -> None:
    """What ran is gone then, and the record must not claim to have it."""
    project.write("settings.py", "A = 1\n")
    # A file that a script writes before it imports it is what it is.
    script = "open('conf_made.py', 'w').write('B = 1\\n')\nimport conf_made, settings\n{}" + TRAIN
    project.write("train.py", script.format(""))
    os.utime(project.folder / "settings.py", (1e9, 1e9))
    a, b = project.start(), project.start()
    assert strictness(compare(a, b)).confounders == []
    edit = "import pathlib, rung.runs.record\npathlib.Path('settings.py').write_text('A = 2\\n')\n"
    project.write("train.py", script.format(edit))
    c = project.start()
    assert next(one for one in executed(c)["files"] if one["file"] == "settings.py")["is_edited"]
    assert weights(compare(b, c))["settings.py"] == "hidden"


def test_accumulation_in_an_ignored_file_is_found_twice(project: Project) -> None:
    """By the file, and by the targets that were counted: either alone must stop a verdict."""
    project.write("train.py", "import settings\nfrom loop import train\ntrain(8 * settings.ACCUMULATION)\n")
    project.write("settings.py", "ACCUMULATION = 1\n")
    a = project.start()
    project.write("settings.py", "ACCUMULATION = 8\n")
    b = project.start()
    comparison = compare(a, b)
    assert weights(comparison) == {"settings.py": "hidden"}
    assert weights(comparison, "budget") == {"targets a step": "hidden"}
    gate = check_arms([a], [b], "val/loss", ["sick"], None)
    assert (gate.word, sorted(gate.blame)) == ("CONFOUNDED", ["budget", "code"])
    for run in (a, b):
        (run.path / "executed.json").unlink()
    assert weights(compare(a, b)) == {}
    assert weights(compare(a, b), "budget") == {"targets a step": "hidden"}


@pytest.mark.parametrize(
    ("name", "values", "weight"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "hidden"),
        ("PYTHONHASHSEED", ("0", "1"), "hidden"),
        ("NVIDIA_TF32_OVERRIDE", ("0", "1"), "hidden"),
        ("TORCHDYNAMO_DISABLE", ("0", "1"), "hidden"),
        ("OMP_NUM_THREADS", ("1", "2"), "note"),
        ("CUDA_LAUNCH_BLOCKING", ("0", "1"), "note"),
        ("ACCUMULATION", ("1", "8"), "hidden"),  # which the script reads
        ("UNREAD", ("1", "8"), None),
    ],
)  # fmt: skip
def test_variables_of_the_environment(project: Project, name: str, values: tuple[str, str], weight: str | None) -> None:
    project.write("train.py", "import os\nfrom loop import train\nos.environ.get('ACCUMULATION', 1)\ntrain()\n")
    runs = [project.start(**{name: value}) for value in values]
    found = weights(compare(*runs), "environment")
    assert found.get(name) == weight
    assert (strictness(compare(*runs)).confounders == []) == (weight != "hidden")


def test_secrets_are_not_kept(project: Project) -> None:
    project.write("settings.py", "OPENAI_API_KEY = 'sk-abcdefghij0123456789'\npad_token = '<|endoftext|>'\nA = 1\n")
    project.write(
        "train.py",
        "import os, settings\nos.environ.get('HF_TOKEN'), os.getenv('MY_PASSWORD'), os.getenv('WHAT')\n"
        "from loop import train\ntrain()\n",
    )
    run = project.start(HF_TOKEN="hf_1234567890", MY_PASSWORD="open sesame", WHAT="ab12" * 12)
    kept = b"".join(path.read_bytes() for path in run.path.glob("executed.json"))
    contents = read_contents(run.path / "executed.tar.gz")
    for secret in (b"hf_1234567890", b"open sesame", b"ab12ab12", b"sk-abcdefghij"):
        assert secret not in kept
        assert all(secret not in content for content in contents.values())
    assert b"A = 1" in contents["settings.py"]
    assert b"<|endoftext|>" in contents["settings.py"]
    project.write("settings.py", "OPENAI_API_KEY = 'sk-abcdefghij0123456788'\npad_token = '<|endoftext|>'\nA = 1\n")
    assert weights(compare(run, project.start()))["settings.py"] == "hidden"


def test_packages_are_known_by_what_was_loaded(project: Project, tmp_path: Path) -> None:
    """Of two that are installed, metadata names one and the path may load the other."""
    for place, version in (("one", "1.0"), ("two", "2.0")):
        folder = tmp_path / place
        (folder / "shady").mkdir(parents=True)
        (folder / "shady" / "__init__.py").write_text(f"V = {version}\n")
        info = folder / f"shady-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shady\nVersion: {version}\n")
    project.write("train.py", f"import sys\nsys.path[1:1] = sys.argv[1:]\nimport shady\n{TRAIN}")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    paths = os.pathsep.join([PACKAGE, one, two])
    a, b = project.start(PYTHONPATH=paths), project.start("train.py", two, PYTHONPATH=paths)
    assert [executed(run)["packages"]["shady"] for run in (a, b)] == ["1.0", "2.0"]
    assert a.environment()["packages"]["shady"] == "1.0"  # the first on the path, as an import would
    assert weights(compare(a, b), "environment")["packages"] == "hidden"
    # From a plain folder, without a description, a package is code of the run.
    (tmp_path / "plain" / "shady").mkdir(parents=True)
    (tmp_path / "plain" / "shady" / "__init__.py").write_text("V = 1.0\n")
    c = project.start("train.py", str(tmp_path / "plain"), PYTHONPATH=paths)
    assert "shady" not in executed(c)["packages"]
    assert "hidden" in weights(compare(a, c)).values()


def test_words_of_the_command_that_no_key_tells_of(project: Project) -> None:
    project.write("train.py", "import sys\nfrom loop import train\ntrain(config={'lr': float(sys.argv[1])})\n")
    found = compare(project.start("train.py", "0.1"), project.start("train.py", "0.2"))
    assert strictness(found).is_strict
    a, b = project.start("train.py", "0.1", "--accumulate", "1"), project.start("train.py", "0.1", "--accumulate=8")
    assert {d.name: (d.before, d.after, d.weight) for d in compare(a, b).differences if d.part == "config"} == {
        "command line": ("--accumulate=1", "--accumulate=8", "hidden")
    }
    c = project.start("train.py", "0.1", "--accumulate", "1", "--output_dir", "elsewhere")
    assert weights(compare(a, c), "config") == {"command line": "note"}


def test_torch_flags_as_they_were_when_training_began(project: Project) -> None:
    script = "import sys, torch, rung\nrun = rung.init('own', config={'lr': 1}, seed=1)\n"
    script += "torch.set_float32_matmul_precision(sys.argv[1])\n"
    script += "torch.use_deterministic_algorithms(sys.argv[2] == 'True')\n"
    project.write("train.py", script + "for _ in range(3): run.log({'loss': 1.0})\n")
    a, b = project.start("train.py", "highest", "False"), project.start("train.py", "high", "True")
    assert [one["float32_matmul_precision"] for one in executed(a)["flags"]] == ["highest"]
    found = weights(compare(a, b), "environment")
    assert found["torch float32_matmul_precision"] == found["torch deterministic_algorithms"] == "hidden"


def test_a_killed_run_has_what_it_executed_so_far(project: Project) -> None:
    script = "import os, signal, rung\nrun = rung.init('own', seed=1)\nimport settings\nrun.log({'loss': 1.0})\n"
    project.write("settings.py", "A = 1\n")
    project.write("train.py", script + "os.kill(os.getpid(), signal.SIGKILL)\n")
    env = {**os.environ, "PYTHONPATH": PACKAGE}
    done = subprocess.run([sys.executable, "train.py"], cwd=project.folder, env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    found = executed(project.last())
    assert [one["file"] for one in found["files"]] == ["settings.py", "train.py"]
    assert not found["is_complete"]


def test_other_processes_of_a_script_do_not_write_its_record(project: Project) -> None:
    project.write(
        "train.py",
        "import multiprocessing, os, sys, rung\n"
        "def work():\n    import wave\n    rung.log({'loss': 2.0})\n    rung.finish()\n"
        "if __name__ == '__main__':\n"
        "    run = rung.init('own', seed=1)\n"
        "    child = multiprocessing.get_context('fork').Process(target=work)\n    child.start()\n    child.join()\n"
        "    spawned = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    spawned.start()\n    spawned.join()\n"
        "    run.log({'loss': 1.0})\n",
    )
    found = executed(project.start())
    assert [(one["file"], one["modules"]) for one in found["files"]] == [("train.py", ["__main__"])]
    assert found["is_complete"]


def test_a_folder_outside_of_git_is_compared_alike(tmp_path: Path, project: Project) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    project.folder = folder
    project.write("loop.py", LOOP)
    project.write("train.py", "from loop import train\ntrain()\n")
    a = project.start()
    project.write("unused.py", "1\n")
    project.write("result.html", "1\n")
    assert strictness(compare(a, project.start())).confounders == []
    project.write("loop.py", f"{LOOP}\n# edited\n")
    assert weights(compare(a, project.start()))["loop.py"] == "hidden"


def test_a_module_that_one_run_alone_imported(project: Project) -> None:
    """Which model is imported follows from the key that names it; without such a key nobody knows why."""
    for name in ("gpt", "rnn"):
        project.write(f"conf/{name}.py", f"NAME = '{name}'\n")
    choose = "import importlib, os\nfrom loop import train\nname = os.environ['MODEL_']\n"
    choose += "importlib.import_module(f'conf.{name}')\n"
    project.write("train.py", f"{choose}train(config={{'model_': name}})\n")
    found = compare(project.start(MODEL_="gpt"), project.start(MODEL_="rnn"))
    assert weights(found) == {"conf/gpt.py": "follows", "conf/rnn.py": "follows"}
    assert weights(found, "environment") == {"MODEL_": "follows"}
    assert strictness(found).is_strict
    project.write("train.py", f"import pathlib\nif pathlib.Path('conf/on').exists():\n    import conf.gpt\n{TRAIN}")
    a = project.start()
    project.write("conf/on", "")
    assert weights(compare(a, project.start())) == {"conf/gpt.py": "hidden"}


def test_runs_from_before_are_compared_by_their_folders(project: Project) -> None:
    a = project.start()
    project.write("unused.py", "1\n")
    b = project.start()
    assert weights(compare(a, b)) == {"unused.py": "note"}
    (b.path / "executed.json").unlink()
    found = compare(a, b)
    assert weights(found) == {"unused.py": "hidden"}
    assert any(b.id in text for text in found.unknown)


def test_diff_ends_with_what_was_not_looked_at(project: Project) -> None:
    runs = [str(project.start().path) for _ in range(2)]
    for words in (runs, [*runs, "--json"]):
        out = CliRunner().invoke(cli, ["diff", *words]).output
        if "--json" in words:
            assert json.loads(out)["not_looked_at"]
        else:
            assert "\nnot looked at: " in out


def test_the_cells_of_a_notebook() -> None:
    assert cells_of(notebook("x = 1", 1).encode()) == cells_of(notebook("x = 1", 2, "seen").encode()) == ["x = 1"]
    assert cells_of(b"{}") is None
    assert cells_of(b"no json") is None


def test_an_eval_after_the_training_is_no_other_budget(tmp_path: Path) -> None:
    """As Lightning's `test` after `fit`: it says the hyperparameters again, and has a later number."""
    runs = []
    for has_test in (False, True):
        run = rung.init("own", config={"lr": 0.1}, seed=1, runs=tmp_path, code=False)
        for step in range(6, 40, 7):
            run.log({"loss": 1.0}, step=step)
        run.log({"val/loss": 1.0}, step=39)
        if has_test:
            run.config.update({"lr": 0.1})
            run.log({"test/loss": 1.0}, step=40)
        run.finish(quiet=True)
        runs.append(open_run(str(run.path), tmp_path))
    found = compare(*runs)
    assert {d.part for d in found.differences if d.weight != "note"} <= {"code"}
