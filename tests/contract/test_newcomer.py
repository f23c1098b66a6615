"""If this fails, docs/recipe.md no longer says all that a recipe's author has to know."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rung import api
from rung.engine.checkpoint import Checkpoints
from rung.runs.query import Run
from tests.contract import newcomer
from tests.contract.cases import CASES, SMALL


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With the checks before step 0, in a folder where no code is waiting to be committed."""
    folder = tmp_path_factory.mktemp("newcomer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return api.train(newcomer.Newcomer, SMALL, runs=folder / "runs", display=False)


def test_it_is_short() -> None:
    assert len(Path(newcomer.__file__).read_text("utf-8").splitlines()) < 120


def test_no_check_has_anything_against_it(run: Run) -> None:
    (event,) = run.events("check")
    against = {result["name"] for result in event["results"] if result["level"] in ("warn", "fail")}
    assert against <= {"recipe in the kept folder"}  # of the test, not of the recipe
    assert run.status == "finished"


def test_a_save_holds_what_is_trained(run: Run) -> None:
    saves = Checkpoints(run.path / "checkpoints")
    names = set(load_file(saves.at(saves.steps()[-1]) / "model.safetensors"))
    assert "scale.weight" not in names
    assert {"embed.0.weight", "body.head.weight"} <= names


def test_each_group_is_updated_in_its_own_way(tmp_path: Path) -> None:
    setup = CASES["newcomer"][0](tmp_path).setup("optimizer.weight_decay=0.1")
    (optimizer,) = setup.state.objectives[0].optimizers
    seen = {(g["lr_scale"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups}
    embed, body = (0.5, (setup.cfg.optimizer.beta1, setup.cfg.optimizer.beta2), 0.0), (1.0, (0.9, 0.99))
    assert seen == {embed, (*body, 0.1), (*body, 0.0)}


def test_each_codebook_has_its_loss_and_its_curve(run: Run) -> None:
    assert {"coarse", "fine", "accuracy"} <= set(api.evaluate(run, runs=run.path.parents[1])["held_out"])
    figures = api.evaluate(run, split="test", runs=run.path.parents[1])["test"]
    assert list(figures["target_parts"]) == ["coarse", "fine"]
    assert list(figures["groups"]) == ["slow", "fast"]
    both = sum(part["loss"] * part["targets"] for part in figures["target_parts"].values())
    assert both / figures["targets"] == pytest.approx(figures["loss"], rel=1e-5)
