"""If this fails, a bad step leaves its mark on a run, or measuring a run changes what it learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rung.doctor.history import read
from rung.engine import capture
from rung.engine.build import Setup, restore
from rung.engine.clock import Clock
from rung.engine.loop import fit
from rung.engine.state import set_training
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Recipe, Stream
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.cases.running import Mute, setup_of
from tests.cases.tiny import Rows, Tiny


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("table", torch.arange(1000.0))  # which nothing ever writes into

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


class Vectors(Recipe):
    """Regression with running statistics; a row of step BAD can be made bad."""

    Config = Tiny.Config
    bad_step, bad = 17, math.nan

    def streams(self) -> dict[str, Stream]:
        x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        bad_step, bad = self.bad_step, self.bad

        class Sick(Rows):
            def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
                batch = super().gather(ids, draw)
                batch["x"] = batch["x"].copy()
                if draw.step == bad_step and 2 in draw.rows:
                    batch["x"][list(draw.rows).index(2), 1] = bad
                return batch

        return {"train": Sick("x", 1.0, x=x), "val": Rows("v", 1.0, x=x[:8])}

    def model(self) -> nn.Module:
        return Norms()

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            x = batch["x"]
            return Loss(((model(x)[:, 0] - x.sum(1)) ** 2).sum(), torch.tensor(float(len(x))))

        return [Objective("fit", [ParameterGroup("all", model.parameters(), muon=True)], loss)]


class Healthy(Vectors):
    bad_step = -5


WORDS = ("optimizer.max_iters=40", "data.batch_size=8", "eval_interval=0", "lr.decay_lr=false", "guard.armed_steps=0")


def train(recipe: type[Recipe], root: Path, *words: str) -> tuple[Setup, Run, str]:
    setup = setup_of(recipe, *WORDS, *words, root=root)
    record = Record.create(
        root, "g", recipe=f"{recipe.__module__}:{recipe.__qualname__}", preset=None, command=["t"], seed=1,
        config=setup.config.tree(), sources=setup.config.sources, derived=setup.derived, data=setup.data,
    )  # fmt: skip
    outcome = fit(setup, record, Mute())
    record.finish(outcome.status, reason=outcome.reason)
    return setup, open_run(record.id, root), outcome.status


def everything(setup: Setup) -> list[torch.Tensor]:
    states = [v for o in setup.state.objectives for x in o.optimizers for s in x.state.values() for v in s.values()]
    return [*setup.state.model.state_dict().values(), *(v for v in states if isinstance(v, torch.Tensor))]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("lag", range(6))
def test_however_late_one_looks_the_state_is_that_before_the_bad_step(lag: int, name: str) -> None:
    setups = [setup_of(kind, *WORDS, f"optimizer.name={name}") for kind in (Healthy, Vectors)]
    for setup, num_steps in zip(setups, (17, 18 + lag)):
        set_training(setup.state.model)
        prefetcher = setup.prefetcher()
        for step in range(num_steps):
            setup.stepper.step(step, prefetcher.take(step), 1e-2, Clock())
    setups[1].stepper.guard.restore_buffers()
    assert same(everything(setups[0]), everything(setups[1]))


def test_a_bad_step_is_captured_with_the_state_before_it_and_its_batch(tmp_path: Path) -> None:
    _, run, status = train(Vectors, tmp_path, "optimizer.gradient_accumulation_steps=2", "data.batch_size=4")
    assert status == "diverged"
    assert run.document["last_step"] == 17
    path = run.path / "captures/00000017"
    captured = capture.read(path)
    bad = [m for m in captured.micros[0] if not torch.isfinite(m.batch["x"]).all()]
    assert len(bad) == 1
    assert captured.facts[0]["micro"] == 0
    assert captured.facts[0]["num_ranks"] == 1
    words = ("optimizer.gradient_accumulation_steps=2", "data.batch_size=4", "optimizer.max_iters=17")
    healthy, _, _ = train(Healthy, tmp_path, *words)
    again = setup_of(Vectors, *WORDS, *words[:2])
    restore(again, path)
    assert again.state.progress.step == 17
    assert again.state.progress.position == 17 * 8
    assert same(everything(again), everything(healthy))
    event = next(run.events("diverged"))
    assert event["step"] == 17
    assert str(int(bad[0].ids[2])) in event["diagnosis"]


def test_skipping_is_as_if_the_bad_batch_had_been_empty(tmp_path: Path) -> None:
    class Empty(Vectors):
        """The same, with a loss that counts nothing at the bad step."""

        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            [whole] = super().objectives(model)

            def loss(batch: Batch, draw: Draw) -> Loss:
                if draw.step == self.bad_step:
                    zero = torch.stack([p.sum() for p in model.parameters()]).sum() * 0.0
                    return Loss(zero, torch.tensor(0.0))
                return whole.loss(batch, draw)

            return [whole._replace(loss=loss)]

    skipped, run, status = train(Vectors, tmp_path, "guard.policy=skip")
    assert status == "finished"
    assert skipped.state.progress.skipped == 1
    assert (run.path / "captures/00000017/capture.0.json").is_file()
    reference, _, _ = train(Empty, tmp_path)
    assert same(everything(skipped)[:4], everything(reference)[:4])
    steps = read(run)["loss"].steps.tolist()
    assert steps == list(range(40)), "each step is in the record once"


def test_going_back_passes_the_data_up_to_the_bad_batch(tmp_path: Path) -> None:
    class BadRow(Vectors):
        """The row itself is bad, whenever it comes; the epoch is longer than the run."""

        def streams(self) -> dict[str, Stream]:
            x = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
            stream = Rows("x", 1.0, x=x)
            x[stream.ids(17 * 8 + 2, 1, self.seed)] = math.nan
            return {"train": stream}

    setup, run, status = train(BadRow, tmp_path, "guard.policy=rollback", "checkpoint.every=10")
    assert status == "finished"
    history = read(run)
    assert history["loss"].steps.tolist() == list(range(40))
    assert np.isfinite(history["loss"].values).all()
    assert setup.state.progress.position == (40 + 8) * 8, "eight batches, of steps 10 to 17, were passed"
    assert [e["to"] for e in run.events("rollback")] == [10]


def test_without_a_save_to_go_back_to_the_run_stops(tmp_path: Path) -> None:
    _, _, status = train(Vectors, tmp_path, "guard.policy=rollback", "checkpoint.every=0")
    assert status == "diverged"


def test_a_run_that_is_always_bad_stops_after_some_skips(tmp_path: Path) -> None:
    class Hopeless(Vectors):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            [whole] = super().objectives(model)

            def loss(batch: Batch, draw: Draw) -> Loss:
                found = whole.loss(batch, draw)
                return found._replace(sum=found.sum * (math.nan if draw.step > 5 else 1.0))

            return [whole._replace(loss=loss)]

    _, run, status = train(Hopeless, tmp_path, "guard.policy=skip", "guard.most=3")
    assert status == "diverged"
    assert len(list(run.events("skip"))) == 3


class Breaking(torch.optim.SGD):
    """Finite gradients, and at the third update a weight that is not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0, 0] = math.inf


def broken_setup(armed: int, root: Path) -> Setup:
    setup = setup_of(Healthy, *WORDS, f"guard.armed_steps={armed}", "checkpoint.every=10", root=root)
    [objective] = setup.state.objectives
    objective.optimizers[:] = [Breaking(objective.parameters, lr=1e-3)]
    return setup


def test_an_armed_update_that_breaks_weights_is_undone(tmp_path: Path) -> None:
    setup, twin = broken_setup(20, tmp_path), broken_setup(0, tmp_path)
    record = Record.create(tmp_path, "g", recipe="r", preset=None, command=[], seed=1, config=setup.config.tree(),
                           sources={}, derived=setup.derived, data=setup.data)  # fmt: skip
    outcome = fit(setup, record, Mute())
    assert outcome.status == "diverged"
    assert "first.weight" in outcome.reason
    set_training(twin.state.model)
    prefetcher = twin.prefetcher()
    for step in range(2):
        twin.stepper.step(step, prefetcher.take(step), twin.schedule.lr(step), Clock())
    assert same(list(twin.state.model.parameters()), list(setup.state.model.parameters()))
    assert setup.state.progress.step == 2


def test_broken_weights_are_never_saved(tmp_path: Path) -> None:
    setup = broken_setup(0, tmp_path)
    loss = setup.stepper.objectives[0].loss

    def hiding(batch: Batch, draw: Draw) -> Loss:  # a model whose loss does not show it
        found = loss(batch, draw)
        return found._replace(sum=torch.nan_to_num(found.sum, nan=0.0))

    setup.stepper.objectives[0].loss = hiding
    setup.stepper.guard.apply = lambda optimizers, skip: [o.step() for o in optimizers]  # type: ignore[method-assign,assignment]
    record = Record.create(tmp_path, "g", recipe="r", preset=None, command=[], seed=1, config=setup.config.tree(),
                           sources={}, derived=setup.derived, data=setup.data)  # fmt: skip
    outcome = fit(setup, record, Mute())
    assert outcome.status == "diverged"
    assert not list((tmp_path / "g/1/checkpoints").glob("*/manifest.json"))


@pytest.mark.parametrize("recipe", [Tiny, Healthy])
def test_measuring_changes_nothing_that_is_learned(tmp_path: Path, recipe: type[Recipe]) -> None:
    off = ("signals.layers_every=0", "signals.activation_stats_every=0", "signals.probes=false", "signals.doctor=false")
    on = ("signals.layers_every=1", "signals.activation_stats_every=1", "signals.probes=true", "guard.armed_steps=40")
    both = [train(recipe, tmp_path, "eval_interval=8", *words)[0] for words in (off, on)]
    assert same(everything(both[0]), everything(both[1]))


def test_large_buffers_that_nothing_writes_into_are_not_copied_for_good() -> None:
    class Large(Healthy):
        def model(self) -> nn.Module:
            model = Norms()
            model.register_buffer("mask", torch.zeros(600, 600))
            return model

    setup = setup_of(Large, *WORDS)
    set_training(setup.state.model)
    prefetcher, guard = setup.prefetcher(), setup.stepper.guard
    for step in range(4):
        setup.stepper.step(step, prefetcher.take(step), 1e-2, Clock())
    guard.forget_still_buffers()
    setup.stepper.step(4, prefetcher.take(4), 1e-2, Clock())
    kept = {name for layout, _ in guard._kept.values() for name, _ in layout}
    assert kept == {"table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class Moving(nn.Module):
    """A buffer that is replaced at every forward, and one that begins to move late."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("late", torch.zeros(4))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.num_calls += 1
            if self.num_calls > 10:
                self.late += x.detach().mean(0)
        out: torch.Tensor = self.layer(x - 0.1 * self.mean)
        return out


class Drifting(Vectors):
    def model(self) -> nn.Module:
        return Moving()


def test_buffers_that_are_replaced_or_move_late_are_kept_too(tmp_path: Path) -> None:
    _, run, status = train(Drifting, tmp_path)
    assert status == "diverged"
    again = setup_of(Drifting, *WORDS)
    restore(again, run.path / "captures/00000017")
    assert all(torch.isfinite(buffer).all() for buffer in again.state.model.buffers())
    skipped, _, status = train(Drifting, tmp_path, "guard.policy=skip")
    assert status == "finished"
    assert skipped.state.progress.skipped == 1


def test_a_step_that_is_skipped_costs_no_save(tmp_path: Path) -> None:
    class Late(Vectors):
        bad_step = 39

    _, run, status = train(Late, tmp_path, "guard.policy=skip", "checkpoint.every=10", "checkpoint.keep=0")
    assert status == "finished"
    assert run.checkpoints() == ["00000010", "00000020", "00000030", "00000040"]


def test_a_probe_that_runs_out_of_memory_leaves_no_gradient_behind(tmp_path: Path) -> None:
    class Greedy(Healthy):
        is_greedy = True

        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            [whole] = super().objectives(model)
            calls: list[int] = []

            def loss(batch: Batch, draw: Draw) -> Loss:
                calls.append(draw.step)
                is_second = torch.is_grad_enabled() and calls.count(draw.step) == 2
                if self.is_greedy and draw.step == 20 and is_second and 4 in draw.rows:
                    raise torch.OutOfMemoryError("made up")
                return whole.loss(batch, draw)

            return [whole._replace(loss=loss)]

    class Modest(Greedy):
        is_greedy = False

    words = (
        "optimizer.gradient_accumulation_steps=2",
        "data.batch_size=4",
        "eval_interval=20",
        "signals.activation_stats_every=0",
    )
    greedy, run, status = train(Greedy, tmp_path, *words)
    modest, _, _ = train(Modest, tmp_path, *words)
    assert status == "finished"
    assert len(list(run.events("no_probes"))) == 1, "the probe was to fail"
    assert same(everything(greedy), everything(modest))


def test_a_second_failure_after_going_back_is_captured_with_its_own_rows(tmp_path: Path) -> None:
    class TwoRows(Vectors):
        def streams(self) -> dict[str, Stream]:
            x = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
            stream = Rows("x", 1.0, x=x)
            self.bad = [int(stream.ids(position, 1, self.seed)[0]) for position in (17 * 8 + 2, 19 * 8 + 5)]
            x[self.bad] = math.nan
            return {"train": stream}

    setup, run, _ = train(TwoRows, tmp_path, "guard.policy=rollback", "checkpoint.every=16", "checkpoint.keep=0")
    first, second = run.events("diverged")
    assert [first["step"], second["step"]] == [17, 17]
    assert str(setup.recipe.bad[0]) in first["diagnosis"]  # type: ignore[attr-defined]
    assert str(setup.recipe.bad[1]) in second["diagnosis"]  # type: ignore[attr-defined]


def test_one_row_a_thousand_times_in_a_step_is_no_trouble(tmp_path: Path) -> None:
    class One(Healthy):
        def streams(self) -> dict[str, Stream]:
            return {"train": Rows("one", 1.0, x=np.ones((1, 4), np.float32))}

    _, run, status = train(One, tmp_path, "data.batch_size=1200", "optimizer.max_iters=3")
    assert status == "finished"
    assert read(run)["fresh"].values.tolist() == [1.0, 1.0, 1.0]


def test_a_mask_that_is_kept_as_a_parameter_is_not_broken(tmp_path: Path) -> None:
    class Masked(Healthy):
        def model(self) -> nn.Module:
            model = Norms()
            model.mask = nn.Parameter(torch.full((3,), -math.inf))
            return model

    _, _, status = train(Masked, tmp_path, "guard.armed_steps=20", "optimizer.weight_decay=0")
    assert status == "finished"


def test_a_loss_that_writes_into_its_batch_is_told_of(tmp_path: Path) -> None:
    class Writing(Vectors):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            [whole] = super().objectives(model)

            def loss(batch: Batch, draw: Draw) -> Loss:
                batch["x"].div_(10)
                return whole.loss({"x": batch.pop("x")}, draw)

            return [whole._replace(loss=loss)]

    _, run, _ = train(Writing, tmp_path)
    captured = capture.read(run.path / "captures/00000017")
    assert captured.facts[0]["written"] == ["x"]
    assert "x" in captured.micros[0][0].batch


def test_two_names_for_one_array_are_captured(tmp_path: Path) -> None:
    class Auto(Vectors):
        def streams(self) -> dict[str, Stream]:
            streams = super().streams()
            gather = streams["train"].gather

            def twice(ids: np.ndarray, draw: Draw) -> Arrays:
                batch = gather(ids, draw)
                return {**batch, "target": batch["x"]}

            streams["train"].gather = twice  # type: ignore[method-assign]
            return streams

    _, run, status = train(Auto, tmp_path)
    assert status == "diverged"
    assert set(capture.read(run.path / "captures/00000017").micros[0][0].batch) == {"x", "target"}


def test_what_a_step_raises_is_captured_too(tmp_path: Path) -> None:
    class OutOfRange(Tiny):
        def streams(self) -> dict[str, Stream]:
            streams = dict(super().streams())
            ids = streams["train"].arrays["ids"]  # type: ignore[attr-defined]
            ids[:, 5] = np.where(np.arange(len(ids)) == 77, 32, ids[:, 5])
            return streams

    with pytest.raises(IndexError) as error:
        train(OutOfRange, tmp_path, "data.batch_size=200", "optimizer.max_iters=10")
    assert "captures/" in error.value.__notes__[0]
    [step] = capture.steps(tmp_path / "g/1/captures")
    captured = capture.read(tmp_path / f"g/1/captures/{step:08d}")
    assert 77 in captured.micros[0][0].ids
    assert "out of range" in captured.facts[0]["error"]
