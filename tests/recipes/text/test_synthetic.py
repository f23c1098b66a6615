"""If this fails, a loss of the text recipe is not what it claims: too high for what was there to learn, too low to be
true, or moved by something other than the text.

The text comes from Markov chains whose matrices are known, so that the best possible loss of every token is known too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rung.engine.build import Setup
from rung.engine.evaluate import eval_mode
from rung.engine.loop import fit
from rung.random import Draw
from rung.recipe import Recipe
from rung.recipes.text.recipe import Text
from rung.runs.record import Record
from tests.contract.cases import Case
from tests.recipes.text.chains import bayes_losses, chains, independent, write_chains

CONTEXT = 24
WORDS = (
    "model.architecture=gpt2 model.n_layer=2 model.n_head=2 model.n_embd=32 data.batch_size=64 data.eval_windows=256 "
    f"data.context_size={CONTEXT} optimizer.name=muon optimizer.weight_decay=0 lr.learning_rate=1e-2 lr.min_lr=1e-4 "
    "lr.warmup_iters=30 eval_interval=0 checkpoint.every=0 checkpoint.best=false signals.layers_every=0 "
    "signals.activation_stats_every=0 signals.probes=false sampling.num_tokens=8"
)


class Measured(NamedTuple):
    losses: np.ndarray  # (rows, positions)
    symbols: np.ndarray  # (rows, positions + 1)
    component: np.ndarray
    document: np.ndarray

    def mean_and_error(self, is_in: Any = slice(None)) -> tuple[float, float]:
        """Nats a target, and its standard error over documents: two windows of one document are of one chain."""
        rows = self.losses[is_in].mean(axis=1)
        _, which = np.unique(self.document[is_in], return_inverse=True)
        sums = np.bincount(which, rows - rows.mean())
        return float(rows.mean()), float((sums @ sums * len(sums) / (len(sums) - 1)) ** 0.5 / len(rows))

    def unlikeness(self) -> float:
        """How far the losses of components lie apart, in squared errors: their number less one, if by chance alone."""
        found = np.array([self.mean_and_error(self.component == n) for n in np.unique(self.component)])
        weights = found[:, 1] ** -2
        return float((weights * (found[:, 0] - np.average(found[:, 0], weights=weights)) ** 2).sum())


class Mute:
    def step(self, step: int, row: Any) -> None: ...
    def eval(self, step: int, results: Any, is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


def case_of(data: Path) -> Case:
    return Case("text", Text, (f"dataset.base_dataset_name={data}", *WORDS.split()))


def trained(data: Path, root: Path, steps: int, *words: str) -> Setup:
    setup = case_of(data).setup(f"optimizer.max_iters={steps}", *words, root=root)
    record = Record.create(
        root, "chains", recipe="text", preset=None, command=["test"], seed=setup.cfg.seed, config=setup.config.tree(),
        sources=setup.config.sources, derived=setup.derived, data=setup.data,
    )  # fmt: skip
    assert fit(setup, record, Mute()).status == "finished"
    record.finish("finished")
    return setup


def measure(setup: Setup, recipe: Recipe | None = None) -> Measured:
    """The loss of every target of a recipe's test set, through its own doors."""
    recipe = recipe or setup.recipe
    stream = recipe.streams("test")["test"]
    rows = np.arange(stream.num_rows)
    draw = Draw(0, -1, rows)
    arrays = stream.gather(rows, draw)
    with eval_mode(setup.state.model):
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        loss = recipe.objectives(setup.state.model)[0].loss(batch, draw)
    assert loss.targets is not None
    losses, weights = loss.targets[:2]
    assert weights.min() == weights.max() == 1
    documents = np.array([place["document"] for place in stream.places(rows)])
    components = stream.group_of(rows)
    return Measured(losses.double().numpy(), arrays["tokens"].astype(np.int64), components, documents)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chains(tmp_path_factory.mktemp("data") / "four", chains(4))


@pytest.fixture(scope="module")
def mixture(four: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return trained(four, tmp_path_factory.mktemp("runs"), 600)


@pytest.mark.slow
def test_the_curve_in_context_is_that_of_bayes(mixture: Setup) -> None:
    """On a mixture the best model finds out, token by token, which chain it reads; ours comes close and never below."""
    found = measure(mixture)
    best = bayes_losses(chains(4), found.symbols)
    assert best[:, 0].mean() - best[:, -8:].mean() > 0.3, "a mixture that need not be found out proves nothing"
    gap = found.losses - best
    errors = gap.std(axis=0, ddof=1) / len(gap) ** 0.5
    assert 0 < gap.mean() < 0.03
    assert gap[:, -8:].mean() < 0.02
    assert (gap.mean(axis=0) > -3 * errors).all(), "below what is possible: the loss sees what it should not"


@pytest.mark.slow
def test_without_anything_in_context_the_curve_is_flat(tmp_path: Path) -> None:
    found = measure(trained(write_chains(tmp_path / "data", independent()), tmp_path, 200))
    time = np.arange(CONTEXT) - (CONTEXT - 1) / 2
    slopes = found.losses @ time / (time @ time)
    assert abs(slopes.mean()) < 2 * slopes.std(ddof=1) / len(slopes) ** 0.5
    shares = independent()[0, 0]
    loss, error = found.mean_and_error()
    assert abs(loss + (shares * np.log(shares)).sum()) < 0.01 + 2 * error


@pytest.mark.slow
def test_components_with_labels_at_random_differ_by_chance_alone(four: Path, mixture: Setup) -> None:
    """Over many shuffles, since of any single one something is always beyond two errors of something else."""
    assert measure(mixture).unlikeness() > 100
    found = []
    for seed in range(20):
        config = case_of(four).config("dataset.shuffle_labels=true", f"dataset.component_seed={seed}")
        found.append(measure(mixture, Text(config.view("recipe"), seed)).unlikeness())
    expected, spread = 3.0, (2 * 3.0 / len(found)) ** 0.5  # of the mean of chi-squares with 3 degrees of freedom
    assert abs(np.mean(found) - expected) < 3 * spread


@pytest.mark.slow
def test_the_number_of_components_with_labels_at_random_does_not_matter(four: Path, tmp_path: Path) -> None:
    """The control of a study of components: K = 1 and K = 4 of equally much text, when names mean nothing."""
    control = ("dataset.shuffle_labels=true", "dataset.max_unique_tokens=60000", "dataset.component_seed=0")
    many = measure(trained(four, tmp_path, 150, *control))
    alone = [measure(trained(four, tmp_path, 150, *control, f"dataset.components=[chain{n}]")) for n in range(4)]
    for number, one in enumerate(alone):  # or chance would differ, and not only the number of components
        assert np.array_equal(one.symbols, many.symbols[many.component == number]), "other windows for another K"
    few, few_error = np.array([one.mean_and_error() for one in alone]).T
    loss, error = many.mean_and_error()
    assert abs(few.mean() - loss) < 2 * (error**2 + (few_error**2).sum() / 16) ** 0.5
