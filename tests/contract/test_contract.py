"""If this fails, a recipe and the engine no longer keep their promises to each other."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rung import api
from rung.engine.build import Setup, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.clock import Clock
from rung.engine.fingerprints import checksums
from rung.engine.loop import Recorder, fit
from rung.engine.prefetch import BatchLayout, Prefetcher
from rung.engine.state import set_training
from rung.random import Draw
from rung.recipes import CATALOG
from rung.resolve import Resolved
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.contract.cases import CASES, Case


class Mute:
    def step(self, step: int, row: Any) -> None: ...
    def eval(self, step: int, results: Any, is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    make, data = CASES[request.param]
    return make(request.getfixturevalue(data))


def record_of(setup: Setup, root: Path, name: str = "exp") -> Record:
    return Record.create(
        root, name, recipe="r", preset=None, command=["test"], seed=setup.cfg.seed, config=setup.config.tree(),
        sources=setup.config.sources, derived=setup.derived, data=setup.data,
    )  # fmt: skip


def train(setup: Setup, root: Path, name: str = "exp") -> Run:
    record = record_of(setup, root, name)
    outcome = fit(setup, record, Mute())
    record.finish(outcome.status)
    assert outcome.status == "finished"
    return open_run(record.id, root)


def weights(setup: Setup) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in setup.state.model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(run: Run) -> list[float]:
    return [row for row in run.metrics(["loss"])["loss"] if row is not None]


def one_step(setup: Setup) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The signals of step 0 and the gradients as the optimizers saw them."""
    set_training(setup.state.model)
    gradients: list[torch.Tensor] = []
    for objective in setup.stepper.objectives:
        for optimizer in objective.optimizers:
            optimizer.register_step_pre_hook(
                lambda o, *_: gradients.extend(p.grad.clone() for g in o.param_groups for p in g["params"])
            )
    prefetcher = setup.prefetcher()
    signals = setup.stepper.step(0, prefetcher.take(0), 1e-3, Clock())
    prefetcher.close()
    return {name: value.item() for name, value in signals.items()}, gradients


def test_catalog_is_covered() -> None:
    assert set(CATALOG) <= set(CASES)


def test_first_loss_is_that_of_a_guess(case: Case) -> None:
    setup = case.setup()
    vocab = setup.recipe.identity().weights.get("vocab_size")
    if vocab is None:
        pytest.skip(f"{case.name} has no vocabulary")
    for values in setup.evaluator.run(setup.state.model).values():
        if case.knows_rules:
            assert values["loss"] < 0.8 * math.log(vocab)
        else:
            assert values["loss"] == pytest.approx(math.log(vocab), rel=0.01)


def test_overfits_eight_rows(case: Case) -> None:
    setup = case.setup(*case.overfit, "optimizer.weight_decay=0", "system.data_workers=0")
    set_training(setup.state.model)
    micros = Prefetcher(setup.streams["train"], BatchLayout(8, 8), 0, torch.device("cpu"), 0).take(0)
    loss = math.inf
    for step in range(400):
        signals = setup.stepper.step(step, micros, setup.cfg.lr.learning_rate, Clock())
        loss = (signals["loss/sum"] / signals["loss/count"]).item()
        if loss < case.overfit_below:
            break
    assert loss < case.overfit_below


def test_weights_begin_by_name(case: Case) -> None:
    """Or the two arms of a comparison begin elsewhere, and what is compared is luck."""
    if case.deeper is None:
        pytest.skip("its models have the same parts whatever is set")
    shallow, deep = (checksums(case.setup(*words).state.model) for words in case.deeper)
    assert len(deep) > len(shallow)
    shared = [name for name in shallow if name in deep and deep[name][0] == shallow[name][0]]
    assert len(shared) > 0.9 * len(shallow)
    assert {name for name in shared if deep[name] != shallow[name]} == set()
    other = checksums(case.setup(*case.deeper[0], "seed=2").state.model)
    assert any(other[name] != shallow[name] for name in shallow), "a checksum that cannot differ proves nothing"


def test_says_what_its_evals_count(case: Case) -> None:
    setup = case.setup()
    definitions = setup.definitions()
    parts = ["", *(f"/{part}" for part in setup.recipe.identity().parts)]
    assert list(definitions) == [f"eval/{name}{part}" for name in setup.evaluator.streams for part in parts]
    fewer = case.setup("eval_iters=1", "data.batch_size=2").definitions()
    assert all(fewer[name]["rows_hash"] != definitions[name]["rows_hash"] for name in definitions)
    if case.name in CATALOG:
        assert all({"loss", "mask", "eval set", "reduction"} <= set(one) for one in definitions.values())


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 2), (1, 8), (3, 8)])
def test_loss_and_gradient_do_not_depend_on_the_cut(case: Case, batch: int, accumulation: int) -> None:
    whole = case.setup(f"data.batch_size={batch * accumulation}", *case.calm)
    cut = case.setup(f"data.batch_size={batch}", f"optimizer.gradient_accumulation_steps={accumulation}", *case.calm)
    micros = cut.prefetcher().take(0)
    assert len(micros) == accumulation
    counts = {setup.state.objectives[0].loss(m.batch, m.draw).count.item() for setup in (cut,) for m in micros}
    assert len(counts) > 1 or case.even_rows, "the masks of this case should be unequal"
    (a, a_gradients), (b, b_gradients) = (one_step(setup) for setup in (whole, cut))
    assert a["loss/count"] == b["loss/count"]
    for name in a:
        assert b[name] == pytest.approx(a[name], rel=2e-6, abs=1e-6), name
    for p, q in zip(a_gradients, b_gradients, strict=True):
        assert (p - q).abs().max() <= 1e-6 * max(1.0, p.abs().max().item())


def test_resuming_twice_is_one_run(case: Case, tmp_path: Path) -> None:
    whole = case.setup(root=tmp_path)
    run = train(whole, tmp_path, "whole")
    saves = Checkpoints(run.path / "checkpoints")

    broken = case.setup(root=tmp_path)
    record = record_of(broken, tmp_path, "broken")
    for until, start in ((6, None), (10, 4), (12, 8)):
        setup = case.setup(root=tmp_path)
        if start is not None:
            restore(setup, Checkpoints(record.path / "checkpoints").at(start))
            record = Record.reopen(record.path, command=["test"])
        setup.num_steps = until  # the declared horizon of the schedule stays 12
        outcome = fit(setup, record, Mute())
        record.finish("stopped" if until < 12 else outcome.status)
    assert equal(weights(whole), weights(setup))
    assert losses(open_run(record.id, tmp_path)) == losses(run)
    a, b = (
        torch.load(s.at(12) / "optimizer.pt", weights_only=True)
        for s in (saves, Checkpoints(record.path / "checkpoints"))
    )
    assert flat(a) == flat(b)


def flat(tree: Any) -> Any:
    """Nested containers with tensors as bytes, to compare to the bit."""
    if isinstance(tree, torch.Tensor):
        return tree.numpy().tobytes()
    if isinstance(tree, dict):
        return {k: flat(v) for k, v in tree.items()}
    return [flat(v) for v in tree] if isinstance(tree, list | tuple) else tree


def test_eval_is_exact_and_repeatable(case: Case) -> None:
    setup = case.setup()
    first, second = (setup.evaluator.run(setup.state.model) for _ in range(2))
    assert first == second
    other = case.setup("data.batch_size=3")
    for name, values in other.evaluator.run(other.state.model).items():
        for part, value in values.items():
            if part == "loss_se":  # estimated from how much batches differ, so it moves a little with their size
                continue
            assert value == pytest.approx(first[name][part], rel=1e-6, abs=1e-7), (name, part)


def test_train_and_eval_measure_the_same(case: Case) -> None:
    """One loss object: on the same rows, without dropout, both give the same number."""
    setup = case.setup(*case.calm)
    name, stream = next(iter(setup.evaluator.streams.items()))
    evaluated = setup.evaluator.run(setup.state.model)[name]
    rows = np.arange(stream.num_rows)
    draw = Draw(setup.cfg.seed, -1, rows)
    batch = {k: torch.from_numpy(v) for k, v in stream.gather(rows, draw).items()}
    set_training(setup.state.model)
    loss = setup.state.objectives[0].loss(batch, draw)
    assert (loss.sum / loss.count).item() == pytest.approx(evaluated["loss"], rel=1e-6)


def test_samples_and_evals_leave_training_alone(case: Case, tmp_path: Path) -> None:
    quiet = case.setup("eval_interval=0", "sample_interval=0", "checkpoint.every=0", root=tmp_path)
    busy = case.setup("eval_interval=1", "sample_interval=3", "checkpoint.every=2", root=tmp_path)
    runs = [train(setup, tmp_path, name) for name, setup in (("quiet", quiet), ("busy", busy))]
    assert losses(runs[0]) == losses(runs[1])
    assert equal(weights(quiet), weights(busy))
    assert len(list((runs[1].path / "samples").iterdir())) == 4  # steps 3, 6, 9 and 12, which is also the end
    assert not list(runs[1].events("sample_failed"))


def test_a_sample_changes_nothing(case: Case, tmp_path: Path) -> None:
    setup = case.setup()
    set_training(setup.state.model)
    modes = [m.training for m in setup.state.model.modules()]
    dtypes = [p.dtype for p in setup.state.model.parameters()]
    before, optimizer = weights(setup), copy.deepcopy(setup.state.tensors())
    rng = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    record = record_of(setup, tmp_path)
    Recorder(setup, record, Mute(), Clock()).sample()
    record.finish("finished")
    assert not list(open_run(record.id, tmp_path).events("sample_failed"))
    assert equal(before, weights(setup))
    assert flat(optimizer) == flat(setup.state.tensors())
    assert modes == [m.training for m in setup.state.model.modules()]
    assert dtypes == [p.dtype for p in setup.state.model.parameters()]
    assert rng == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert all(p.grad is None for p in setup.state.model.parameters())


def test_frozen_parts_stand_still(case: Case) -> None:
    setup = case.setup()
    frozen = {n: p.clone() for n, p in setup.state.model.named_parameters() if not p.requires_grad}
    one_step(setup)
    after = dict(setup.state.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    for module in setup.state.model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            assert not module.training


def test_every_key_is_read(case: Case, tmp_path: Path) -> None:
    config = case.config()
    api.train(Resolved("recipe", case.recipe_class, config), runs=tmp_path, check=False, display=False)
    not_needed = {"logging.wandb_project": "of a mirror that is not asked for"}
    if config.values["optimizer.name"] == "adamw":
        not_needed["optimizer.momentum"] = "adamw has none"
    unread = set(config.values) - config.reads
    assert "optimizer.momentum" in unread or config.values["optimizer.name"] == "muon"
    assert unread <= {*not_needed, *case.recipe_class(config.view("recipe"), 0).describe("scratch").unused}


def test_the_first_rows_of_a_run_do_not_depend_on_workers(case: Case) -> None:
    batches = []
    for workers in (0, 1, 3):
        prefetcher = case.setup(f"system.data_workers={workers}").prefetcher()
        batches.append([prefetcher.take(step)[0].batch for step in range(5)])
        prefetcher.close()
    for other in batches[1:]:
        for a, b in zip(batches[0], other, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
