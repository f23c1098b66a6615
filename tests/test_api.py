"""If this fails, Python trains, evaluates or samples otherwise than the command line, or a mistake ends the session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.api import Loaded
from rung.cli import main
from rung.errors import RunError, UserError
from rung.recipe import Sample
from tests.cli.test_train import TINY
from tests.contract.toy import Toy
from tests.errors import raises_code
from tests.forensics.faulty import Faulty

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("optimizer.max_iters=8", "checkpoint.every=4", "checkpoint.keep=0")
TOY = {"data.batch_size": 4, "optimizer": {"max_iters": 4}, "lr.warmup_iters": 2, "system.device": "cpu"}


@pytest.fixture
def words(tmp_path: Path, piano_data: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What makes a piano small; we stand in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    return [f"dataset.base_dataset_name={piano_data}", *TINY, *SHORT]


@pytest.fixture
def trained(words: list[str]) -> rung.Run:
    return rung.train("piano", words, check=False, display=False)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*given: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rung", *given])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    return call


def learned(run: rung.Run) -> dict[str, list[Any]]:
    """Every recorded number that the machine's speed has no part in."""
    names = [n for n in run.names() if not n.endswith(("_s", "_mb", "mfu"))]
    assert {"loss", "norm", "lr", "eval/full_val/loss"} <= set(names)
    return run.metrics(names)


def test_a_run_from_python_is_the_run_of_the_command_line(words: list[str], cli: Callable[..., str]) -> None:
    cli("train", "piano", *words, "--why", "to see", "--tag", "a")
    ours = rung.train("piano", words, why="to see", tags=["a"], display=False)
    theirs = rung.runs.open("piano/1")
    assert (ours.id, ours.status, ours.step) == ("piano/2", "finished", theirs.step)
    assert learned(ours) == learned(theirs)
    assert ours.best == theirs.best
    assert ours.config() == theirs.config()
    assert {name: ours.document[name] for name in ("recipe", "preset", "seed", "why", "tags", "derived")} == {
        name: theirs.document[name] for name in ("recipe", "preset", "seed", "why", "tags", "derived")
    }
    renamed = {key: source.replace("command line", "python") for key, source in theirs.sources().items()}
    assert ours.sources() == renamed
    assert ours.sources()["model.n_layer"] == "python"


def test_config_as_a_dict_is_config_as_words(words: list[str]) -> None:
    tree: dict[str, Any] = {"model": {"n_layer": 1}}
    for word in words:
        name, _, value = word.partition("=")
        tree[name] = Path(value) if "/" in value else json.loads(value) if value[0].isdigit() else value
    given = json.dumps(tree, default=str)
    by_words = rung.train("piano", words, check=False, display=False)
    by_dict = rung.train("piano", "model.n_embd=16", config=tree, check=False, display=False, experiment="dict")
    assert json.dumps(tree, default=str) == given
    assert by_dict.id == "dict/1"
    assert by_dict.config() == by_words.config()
    assert learned(by_dict) == learned(by_words)


def test_a_recipe_may_be_a_class_and_a_run_the_start_of_another(tmp_path: Path) -> None:
    first = rung.train(Toy, config=TOY, runs=tmp_path, display=False)
    assert (first.id, first.document["recipe"]) == ("toy/1", "tests.contract.toy:Toy")
    executed = json.loads((first.path / "executed.json").read_text())
    assert executed["is_complete"]
    assert [one["file"] for one in executed["files"] if "tests.contract.toy" in one["modules"]]
    changed = rung.train(parent=first, overrides="model.width=4", runs=tmp_path, display=False, why="narrower")
    assert (changed.id, changed.document["parent"]) == ("toy/2", "toy/1")
    assert changed.document["parent_uid"] == first.document["uid"]
    assert changed.config()["model"]["width"] == 4
    assert changed.config()["data"]["batch_size"] == 4
    loaded = rung.load(first, runs=tmp_path)
    assert isinstance(loaded.recipe, Toy)
    assert loaded.config["data"]["batch_size"] == 4


def test_resume_goes_on_as_if_nothing_had_been(trained: rung.Run) -> None:
    before = learned(trained)
    again = rung.resume(trained, ["data.batch_size=2", "optimizer.gradient_accumulation_steps=2"], at=4, display=False)
    assert (again.id, again.status, again.step) == (trained.id, "finished", trained.step)
    assert len(again.document["segments"]) == 2
    assert learned(again)["step"] == before["step"]
    exact = rung.resume(trained, at=4, display=False)
    assert learned(exact) == before


def test_evaluate_gives_what_training_and_the_verb_give(trained: rung.Run, cli: Callable[..., str]) -> None:
    found = rung.evaluate(trained)
    assert trained.best is not None
    assert found.step == trained.best["step"]
    assert found["full_val"]["loss"] == trained.best["loss"]
    assert found.sets == json.loads(cli("eval", "piano/1", "--json"))
    first = rung.evaluate("piano/1", at=4)
    evals = [row["loss"] for row in trained.evals() if row["step"] == 4 and row["set"] == "full_val"]
    assert [first["full_val"]["loss"]] == evals
    assert f"{found['full_val']['loss']:.4f}" in repr(found)
    test = rung.evaluate(trained, split="test", out="looked")
    assert test.file == Path("looked") / f"test-{test.step}.json"
    kept = json.loads(test.file.read_text())
    assert kept["sets"]["test"]["loss"] == test["test"]["loss"]
    assert kept["run"] == "piano/1"


def test_loaded_weights_sample_as_the_verb_does(trained: rung.Run, cli: Callable[..., str]) -> None:
    model = rung.load(trained)
    state = {name: value.clone() for name, value in model.model.state_dict().items()}
    assert not model.model.training
    plain = written(cli("sample", "piano/1", "--json"))
    assert named(model.sample()) == plain
    cold = named(model.sample(seed=3, temperature=0.5, num_samples=1))
    assert cold == written(cli("sample", "piano/1", "--temperature", "0.5", "--num", "1", "--seed", "3", "--json"))
    assert cold == named(rung.sample(trained, seed=3, temperature=0.5, num_samples=1)) != plain
    assert named(model.sample()) == plain
    assert all(torch.equal(value, state[name]) for name, value in model.model.state_dict().items())


def named(samples: list[Sample]) -> dict[str, tuple[bytes, str]]:
    return {one.name: (one.data, one.caption) for one in samples}


def written(text: str) -> dict[str, tuple[bytes, str]]:
    return {Path(row["path"]).name: (Path(row["path"]).read_bytes(), row["caption"]) for row in json.loads(text)}


def test_other_weights_are_loaded_by_step(trained: rung.Run) -> None:
    early, late = rung.load("piano", at=4), rung.load("piano/1", at=8, device="cpu")
    assert (early.step, late.step) == (4, 8)
    assert any(not torch.equal(a, b) for a, b in zip(early.model.parameters(), late.model.parameters(), strict=True))
    with raises_code("no-checkpoint") as error:
        rung.load(trained, at=5)
    assert "4, 8" in str(error.value)


class Stopping:
    """A display that asks for a stop at a step, as a cluster does (a shell in the background ignores SIGINT)."""

    def __init__(self, *what: object) -> None:
        self.said: list[str] = []

    def step(self, step: int, row: Mapping[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None: ...


def test_a_stop_is_a_status_and_the_run_goes_on(words: list[str], trained: rung.Run) -> None:
    stopped = rung.train("piano", words, check=False, display=Stopping)
    assert (stopped.status, stopped.stop_signal) == ("stopped", signal.SIGTERM)
    assert stopped.document["reason"].startswith("SIGTERM at step ")
    done = rung.resume(stopped, display=False)
    assert (done.status, done.stop_signal) == ("finished", 0)
    assert learned(done)["loss"] == learned(trained)["loss"]


class Listening(Stopping):
    def step(self, step: int, row: Mapping[str, float]) -> None: ...


def test_one_key_scales_the_rates_and_a_rate_left_behind_is_named(tmp_path: Path) -> None:
    def train(**given: Any) -> tuple[rung.Run, str]:
        heard = Listening()
        run = rung.train(**given, runs=tmp_path, check=False, display=lambda *what: heard)
        return run, "\n".join(heard.said)

    def rates(run: rung.Run) -> list[Any]:
        return [rate for rate in run.metrics(["lr"])["lr"] if rate is not None]  # a row of an eval has none

    family = {"lr.init_lr": 1e-3, "lr.warmup_steps": 2, "lr.min_lr": 1e-4, "lr.warmup_start_lr": 1e-5}
    keys = {name: value for name, value in TOY.items() if name != "lr.warmup_iters"}
    first, said = train(recipe=Toy, config=keys | family)
    assert (first.config()["lr"]["learning_rate"], first.config()["lr"]["warmup_iters"]) == (1e-3, "2")
    assert "lr.init_lr is read as lr.learning_rate" in said
    doubled, said = train(recipe=None, parent=first, overrides="lr.scale=2")
    assert rates(doubled) == pytest.approx([2 * rate for rate in rates(first)], rel=1e-9)
    assert "note: lr." not in said
    _, said = train(recipe=None, parent=doubled, overrides="lr.learning_rate=2e-3")
    assert "lr.warmup_start_lr and lr.min_lr did not follow" in said
    advised = said.partition("set ")[2].partition(" instead")[0]
    assert advised == "lr.scale=4"
    even, said = train(recipe=None, parent=doubled, overrides=advised)
    assert rates(even) == pytest.approx([4 * rate for rate in rates(first)], rel=1e-9)
    assert "did not follow" not in said


class StoppingOutsideTheLoop(Stopping):
    """Asks before the first step, or when the last one is done."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def say(self, text: str) -> None:
        if self.when == "before" and not self.said:
            signal.raise_signal(signal.SIGTERM)
        super().say(text)

    def close(self) -> None:
        if self.when == "after":
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("when", "status", "steps"), [("before", "stopped", [0]), ("after", "finished", [4, 8])])
def test_no_signal_leaves_a_run_that_nobody_ended(words: list[str], when: str, status: str, steps: list[int]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    run = rung.train("piano", words, check=False, display=lambda *what: StoppingOutsideTheLoop(when))
    assert (run.status, [int(name) for name in run.checkpoints()]) == (status, steps)
    assert signal.getsignal(signal.SIGTERM) is handler
    if when == "before":
        again = rung.resume(run, display=lambda *what: StoppingOutsideTheLoop(when))
        assert (again.status, again.document["last_step"]) == ("stopped", 0)
        assert rung.resume(run, display=False).status == "finished"


def test_a_divergence_is_a_status(tmp_path: Path) -> None:
    keys = {**TOY, "fault": "nan feature", "bad_position": 13, "optimizer.max_iters": 8}
    run = rung.train(Faulty, config=keys, runs=tmp_path, check=False, display=False)
    assert (run.status, run.step) == ("diverged", 3)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: rung.train(), "missing-option"),
        (lambda: rung.train("piano", "lr.learning_rat=1"), "no-key"),
        (lambda: rung.train("piano", config={"lr": {"learning_rate": "fast"}}), "bad-value"),
        (lambda: rung.train("piano", "preset=tiny", preset="small"), "options-conflict"),
        (lambda: rung.train("piano", files=["gone.yaml"]), "no-file"),
        (lambda: rung.train("piano", "eval_only=true"), "options-conflict"),
        (lambda: rung.evaluate("piano", weights="gone"), "no-folder"),
    ],
)
def test_a_mistake_has_a_code(
    call: Callable[[], object], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_code(code):
        call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: rung.train("pinao"), UserError),
        (lambda: rung.train("piano", parent="piano/7"), RunError),
        (lambda: rung.train("piano", tags=["two words"]), UserError),
        (lambda: rung.train("piano", mirrors=["mlflow"]), UserError),
        (lambda: rung.resume("piano/7"), RunError),
        (lambda: rung.evaluate("piano/7"), RunError),
        (lambda: rung.load("piano/7"), RunError),
    ],
)
def test_a_mistake_is_an_error_that_can_be_caught(
    call: Callable[[], object], kind: type[UserError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind):
        call()
    assert list(tmp_path.iterdir()) == []


def test_mistakes_with_a_run_leave_it_alone(trained: rung.Run) -> None:
    with raises_code("wrong-state"):
        rung.resume(trained)  # finished
    with raises_code("not-resumable"):
        rung.resume(trained, "model.n_layer=2", at=4)
    with raises_code("bad-value"):
        rung.load(trained).sample(prompt="a${b}")
    with raises_code("no-key"):
        rung.load(trained).sample(temprature=1.0)
    assert rung.runs.open(trained.path).document == trained.document


def test_what_is_shown_goes_to_stderr_or_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rung.train(Toy, config=TOY, runs=tmp_path)
    said = capsys.readouterr()
    assert said.out == ""
    assert "toy/1 finished" in said.err
    assert "step 3/4" in said.err
    rung.train(Toy, config=TOY, runs=tmp_path, display=False)
    assert capsys.readouterr() == ("", "")


def test_notebooks_show_runs_and_samples_as_text(tmp_path: Path) -> None:
    run = rung.train(Toy, config=TOY, runs=tmp_path, display=False, why="<b>is</b> it?", check=False)
    assert repr(run).startswith("<Run toy/1: finished, step 4")
    view = run._repr_html_()
    assert "&lt;b&gt;is&lt;/b&gt; it?" in view
    assert "toy/1" in view
    listed = rung.runs.list(root=tmp_path)
    assert [one.id for one in listed] == ["toy/1"]
    assert "&lt;b&gt;" in listed._repr_html_()
    assert "&lt;b&gt;" in rung.runs.table(root=tmp_path)._repr_html_()
    assert "finished" in repr(listed)
    loaded = rung.load(run, runs=tmp_path)
    assert isinstance(loaded, Loaded)
    assert "toy/1 at step 4" in repr(loaded)
    assert "&lt;Loaded toy/1" in loaded._repr_html_()
    text, picture = Sample("a.txt", b"<script>1</script>", "a < b"), Sample("b.png", b"\x89PNG", "seen")
    assert repr(text) == "<Sample a.txt, 18 bytes: a < b>"
    assert "&lt;script&gt;1" in text._repr_html_()
    assert "<script>" not in text._repr_html_()
    assert 'src="data:image/png;base64,' in picture._repr_html_()
    assert "loss" in rung.evaluate(run, runs=tmp_path)._repr_html_()


def test_every_public_name_is_there() -> None:
    assert dir(rung) == sorted(rung.__all__)
    for name in rung.__all__:
        assert getattr(rung, name) is not None
    assert {
        "train", "resume", "evaluate", "load", "sample", "runs", "init", "log", "watch", "finish", "define_metric",
        "guard", "replay", "Diverged", "Run", "Sample", "Recipe", "Stream", "Loss", "Objective", "Input", "Draw",
    } <= set(dir(rung))  # fmt: skip
    assert not hasattr(rung, "trian")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import rung; dir(rung)", ["torch", "numpy", "click"]),
        ("import rung; rung.runs.list(root='nowhere'); rung.init; rung.log", ["torch", "numpy"]),
        ("import rung; rung.train; rung.load; rung.Recipe", ["torch", "rung.cli"]),
        ("import rung.wandb as wandb; wandb.run", ["torch", "numpy"]),
    ],
)
def test_importing_rung_is_light(code: str, absent: list[str], tmp_path: Path) -> None:
    shown = f"import sys; {code}; print([name for name in {absent!r} if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_class_of_a_notebook_can_be_trained(tmp_path: Path) -> None:
    """Its module is __main__, which has no file."""
    code = (
        "import sys, rung; from tests.contract.toy import Toy\n"
        "class Mine(Toy): pass\n"
        f"run = rung.train(Mine, config={TOY!r}, runs={str(tmp_path)!r}, check=False, display=False)\n"
        f"print(run.document['recipe'], rung.load(run, runs={str(tmp_path)!r}).step)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "__main__:Mine 4", done.stderr
