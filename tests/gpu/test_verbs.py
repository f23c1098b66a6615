"""If this fails, somebody with a GPU cannot train, evaluate, sample, resume or replay a recipe, compiled or not.

Each verb runs as a user runs it, in a process of its own. RUNG_GPU_TEST_DEVICE=cpu runs the same on a CPU, where
compiling takes a C++ compiler and minutes, and only the small presets are tried.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rung.recipes import CATALOG, find_recipe, presets
from rung.runs.query import Run, open_run
from tests.contract.cases import CASES, Case
from tests.recipes.text.stores import WORDS, Document
from tests.recipes.text.stores import write_store as write_text
from tests.recipes.world.stores import write_store as write_world

DEVICE = os.environ.get("RUNG_GPU_TEST_DEVICE", "cuda")
Rung = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]
# Kernels of a GPU add in any order, and ten steps of Adam make more of it; another batch moves a loss by several %.
TOLERANCE = {"float32": 5e-3, "bfloat16": 3e-2}
SMALL = (
    "data.batch_size=8", "optimizer.max_iters=20", "lr.warmup_iters=2", "lr.learning_rate=3e-3", "eval_interval=10",
    "checkpoint.every=5", "checkpoint.keep=0", f"system.device={DEVICE}",
)  # fmt: skip


@pytest.fixture(params=[name for name in CASES if name.partition("_")[0] in CATALOG])
def case(request: pytest.FixtureRequest) -> Case:
    make, data = CASES[request.param]
    return make(request.getfixturevalue(data))


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch keeps what it compiles in this test, so that one can see whether it did."""
    folder = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def words(case: Case, *more: str) -> list[str]:
    """Each key once; the later word counts."""
    return list({word.partition("=")[0]: word for word in (*SMALL, *case.words, *more)}.values())


def losses(run: Run) -> list[float]:
    """By step; what was done again after a resume stands for what had been."""
    rows = run.metrics(["loss"])
    by_step = {step: loss for step, loss in zip(rows["step"], rows["loss"]) if loss is not None}
    return [by_step[step] for step in sorted(by_step)]


def is_learning(values: list[float]) -> bool:
    return all(map(math.isfinite, values)) and np.mean(values[-5:]) < np.mean(values[:3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["eager", "compile"])
def test_a_run_from_train_to_replay(
    rung: Rung, case: Case, how: str, dtype: str, tmp_path: Path, compiled: Path
) -> None:
    name, near = f"{case.name}/1", TOLERANCE[dtype]
    rung("train", case.name, *words(case, f"system.dtype={dtype}", f"system.compile={how == 'compile'}"))
    run = open_run(name, tmp_path / "runs")
    assert (run.status, run.document["derived"]["dtype"]) == ("finished", dtype)
    assert (run.document["derived"]["device"] == "cpu") == (DEVICE == "cpu")
    first = losses(run)
    assert len(first) == 20
    assert is_learning(first), first
    assert any(compiled.rglob("*.py")) == (how == "compile")

    rung("resume", name, "--at", 10)
    run = open_run(name, tmp_path / "runs")
    assert (run.status, len(run.document["segments"])) == ("finished", 2)
    assert losses(run) == pytest.approx(first, rel=near)

    evaluated = json.loads(rung("eval", name, "--at", 20, "--json").stdout)
    recorded = {row["set"]: row["loss"] for row in run.evals() if row["step"] == 20}
    assert {name: row["loss"] for name, row in evaluated.items()} == pytest.approx(recorded, rel=near)

    sampled = json.loads(rung("sample", name, "--json").stdout)
    assert sampled
    assert all((tmp_path / one["path"]).stat().st_size for one in sampled)

    replayed = json.loads(rung("replay", f"{name}@17", "--json").stdout)
    assert replayed["step"] == 17
    assert replayed["loss"] == pytest.approx(replayed["recorded_loss"], rel=near)
    assert replayed["norm"] == pytest.approx(replayed["recorded_norm"], rel=10 * near)


@pytest.mark.parametrize("how", ["eager", "compile"])
def test_a_step_that_is_not_finite_is_captured_and_explained(rung: Rung, case: Case, how: str, tmp_path: Path) -> None:
    """A learning rate that no weight survives: the step after it cannot be finite."""
    absurd = "lr.learning_rate=1e30", "lr.warmup_iters=0", f"system.compile={how == 'compile'}"
    done = rung("train", "--no-check", case.name, *words(case, *absurd), check=False)
    assert done.returncode == 1, done.stderr + done.stdout
    run = open_run(f"{case.name}/1", tmp_path / "runs")
    assert run.status == "diverged"
    verdict = json.loads(rung("replay", run.id, "--json").stdout)
    assert verdict["origin"] == "LEARNING RATE", verdict
    assert verdict["confidence"] in ("sure", "likely"), verdict


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 4000 characters: longer than the longest row of a preset."""
    rng, alphabet = np.random.default_rng(0), sorted(set("".join(map("".join, WORDS.values())) + " "))
    documents = [
        Document(split, category, np.array([alphabet.index(c) for c in " ".join(rng.choice(words, 1200))[:4000]]))
        for category, words in WORDS.items()
        for split in ("train", "train", "train", "validation")
    ]
    return write_text(tmp_path_factory.mktemp("data") / "long", documents, "".join(alphabet))


def small_data(recipe: str, preset: str, request: pytest.FixtureRequest, folder: Path) -> Path:
    """Data on which a preset can take its steps, in the size it asks for."""
    if recipe == "text":
        return request.getfixturevalue("long_text")
    if recipe == "world":
        height, width = {"tiny": (48, 64), "small": (96, 128), "ollin": (192, 256)}[preset]
        return write_world(folder / "films", (50, 45), height=height, width=width)
    return request.getfixturevalue(f"{recipe}_data")


SHORT: dict[str, tuple[str, ...]] = {  # what a preset does at its end, cut short
    "music": ("sampling.seconds=0.1", "data.batch_size=2"),
    "piano": ("sampling.num_tokens=20",),
    # (data of a test is mel's, and a machine that reaches nothing has no weights of others)
    "speech": (
        "sampling.num_tokens=20",
        "encoder.name=mel",
        "model.audio.n_layer=2",
        "model.audio.stack=4",
        "model.lm.name=bytes",
    ),
    "text": ("sampling.num_tokens=20",),
    "world": ("sampling.num_frames=3", "evaluation.horizon=4", "evaluation.num_rollouts=2"),
}
PRESETS = [(recipe, preset) for recipe in CATALOG for preset in presets(find_recipe(recipe))]


@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_every_preset_starts_compiled(
    rung: Rung, recipe: str, preset: str, request: pytest.FixtureRequest, tmp_path: Path, compiled: Path
) -> None:
    if DEVICE == "cpu" and preset not in ("tiny", "characters"):
        pytest.skip("too large for a CPU")
    data = small_data(recipe, preset, request, tmp_path)
    words = "optimizer.max_iters=2", "lr.warmup_iters=0", "eval_iters=1", "system.compile=true"
    rung("train", recipe, f"preset={preset}", f"dataset.base_dataset_name={data}", f"system.device={DEVICE}",
         *words, *SHORT[recipe])  # fmt: skip
    run = open_run(f"{recipe}/1", tmp_path / "runs")
    values = losses(run)
    assert (run.status, len(values)) == ("finished", 2)
    assert all(map(math.isfinite, values)), values
    assert any(compiled.rglob("*.py"))
