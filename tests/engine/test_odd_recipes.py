"""If this fails, a recipe unlike ours loses a run, or breaks its contract without a word."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rung.config import Layer, key, parse_overrides
from rung.engine.build import Setup, build, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.loop import Outcome, fit
from rung.errors import RecipeError
from rung.random import Draw
from rung.recipe import Arrays, Batch, Identity, Loss, Objective, ParameterGroup, Recipe, Sample, Stream
from rung.resolve import schema_of
from rung.runs.query import Run, open_run
from tests.contract.test_contract import Mute, record_of
from tests.errors import raises_code


@dataclass
class Keys:
    width: int = key(4, "Channels.", low=1)


class Numbers(Stream):
    fingerprint = "numbers"

    def __init__(self, num_rows: int = 32) -> None:
        self.num_rows = num_rows
        self.data = np.random.default_rng(0).normal(size=(max(num_rows, 1), 4)).astype(np.float32)

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"x": self.data[ids], "id": ids, "step": np.full(len(ids), draw.step)}


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(4, width)


def squares(layer: nn.Module, bad_from: int = 10**9) -> Callable[[Batch, Draw], Loss]:
    def loss(batch: Batch, draw: Draw) -> Loss:
        total = (layer(batch["x"]) ** 2).sum()
        return Loss(total * (math.nan if draw.step >= bad_from else 1.0), torch.tensor(len(batch["x"])))

    return loss


def all_of(module: nn.Module, name: str = "all") -> list[ParameterGroup]:
    return [ParameterGroup(name, module.parameters())]


class Odd(Recipe):
    """Two objectives; each test overrides what is odd."""

    Config = Keys
    cfg: Keys
    bad_from = (10**9, 10**9)
    every = (1, 1)
    names = ("first", "second")

    def streams(self) -> dict[str, Stream]:
        return {"train": Numbers(), "val": Numbers(5)}

    def model(self) -> nn.Module:
        return Pair(self.cfg.width)

    def objectives(self, model: Any) -> Sequence[Objective]:
        return [
            Objective(name, all_of(layer), squares(layer, bad), every)
            for name, layer, bad, every in zip(self.names, (model.first, model.second), self.bad_from, self.every)
        ]


def setup_of(recipe: type[Recipe], *words: str, root: Path = Path("runs")) -> Setup:
    small = ["system.device=cpu", "data.batch_size=4", "optimizer.max_iters=8", "lr.warmup_iters=0", *words]
    given = {word.partition("=")[0]: word for word in small}
    return build(
        schema_of("odd", recipe).resolve([Layer("command line", parse_overrides(given.values()))]), recipe, root
    )


def train(setup: Setup, root: Path, name: str = "odd") -> tuple[Outcome, Run]:
    record = record_of(setup, root, name)
    outcome = fit(setup, record, Mute())
    record.finish(outcome.status)
    return outcome, open_run(record.id, root)


@pytest.mark.parametrize("bad_from", [(3, 10**9), (10**9, 3)])
def test_whichever_objective_diverges_neither_moves(tmp_path: Path, bad_from: tuple[int, int]) -> None:
    class Sick(Odd):
        pass

    Sick.bad_from = bad_from
    healthy, sick = setup_of(Odd, "optimizer.max_iters=3", "lr.decay_lr=false"), setup_of(Sick, "lr.decay_lr=false")
    train(healthy, tmp_path, "healthy")
    outcome, run = train(sick, tmp_path, "sick")
    assert outcome.status == "diverged"
    assert "at step 3" in outcome.reason
    assert sick.state.progress.step == 3
    assert sick.state.progress.position == 12
    for p, q in zip(healthy.state.model.parameters(), sick.state.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert len([v for v in run.metrics(["norm"])["norm"] if v is not None]) == 4


def test_gradients_that_overflow_at_every_scale_end_the_run(tmp_path: Path) -> None:
    class Endless(Odd):
        def objectives(self, model: Any) -> Sequence[Objective]:
            def loss(batch: Batch, draw: Draw) -> Loss:
                x = model.first(batch["x"]).sum() * 0.0
                return Loss(x.sqrt().sum(), torch.tensor(4.0))  # the loss is 0, its gradient 0 x inf

            return [Objective("first", all_of(model), loss)]

    setup = setup_of(Endless, "system.dtype=float16", "optimizer.max_iters=60")
    before = [p.clone() for p in setup.state.model.parameters()]
    outcome, run = train(setup, tmp_path)
    assert outcome.status == "diverged"
    assert setup.state.progress.skipped == setup.state.progress.step == 17  # from 65536 down to below 1
    assert all(torch.equal(p, q) for p, q in zip(before, setup.state.model.parameters(), strict=True))
    assert run.metrics(["scale"])["scale"][0] == 65536.0


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"every": (2, 1)}, "bad-objective", "every=1"),
        ({"names": ("same", "same")}, "bad-objective", "same"),
        ({"streams": lambda self: {"val": Numbers()}}, "bad-stream", "val"),
        ({"objectives": lambda self, model: [Objective(n, all_of(model), squares(model.first)) for n in "ab"]},
         "bad-objective", "all of a, group all of b"),
        ({"objectives": lambda self, model: [Objective("a", all_of(model) + all_of(model, "b"), squares(model.first))]},
         "bad-objective", "all of a, group b of a"),
        ({"objectives": lambda self, model: [Objective("a", list(model.parameters()), squares(model.first))]},
         "bad-objective", 'ParameterGroup("all", model.parameters())'),
        ({"objectives": lambda self, model: []}, "bad-objective", "every=1"),
    ],
)  # fmt: skip
def test_a_broken_contract_is_refused_before_the_start(change: dict[str, Any], code: str, named: str) -> None:
    with raises_code(code, RecipeError) as error:
        setup_of(type("Broken", (Odd,), change))
    assert named in str(error.value)


def test_a_stream_without_rows_is_refused_before_the_start() -> None:
    empty = type("Empty", (Odd,), {"streams": lambda self: {"train": Numbers(), "val": Numbers(0)}})
    with raises_code("data-empty") as error:
        setup_of(empty)
    assert " val " in str(error.value)


@pytest.mark.parametrize("name", ["loss", "norm", "lr", "wait_s"])
def test_a_part_cannot_hide_a_signal(tmp_path: Path, name: str) -> None:
    class Hiding(Odd):
        def objectives(self, model: Any) -> Sequence[Objective]:
            plain = squares(model.first)
            one = (torch.tensor(1.0), torch.tensor(1.0))
            return [Objective("a", all_of(model), lambda b, d: plain(b, d)._replace(parts={name: one}))]

    with raises_code("bad-loss") as error:
        train(setup_of(Hiding), tmp_path)
    assert repr(name) in str(error.value)


def test_counts_may_be_plain_numbers_fractions_or_nothing(tmp_path: Path) -> None:
    class Counting(Odd):
        def objectives(self, model: Any) -> Sequence[Objective]:
            def loss(batch: Batch, draw: Draw) -> Loss:
                total = (model.first(batch["x"]) ** 2).sum()
                nothing = (total.detach() * 0, 0)
                return Loss(total * (draw.step != 2), 0 if draw.step == 2 else 0.5, {"never": nothing})  # type: ignore[arg-type,dict-item]

            return [Objective("first", all_of(model), loss)]

    setup = setup_of(Counting, "optimizer.grad_clip=0", "optimizer.max_iters=3")
    twin = setup_of(Counting)
    outcome, run = train(setup, tmp_path)
    assert outcome.status == "finished"
    losses, norms = run.metrics(["loss"])["loss"], run.metrics(["norm"])["norm"]
    (twin.state.model.first(twin.prefetcher().take(0)[0].batch["x"]) ** 2).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in twin.state.model.first.parameters()])
    assert norms[0] == pytest.approx(2 * expected.item(), rel=1e-5)
    assert math.isnan(losses[2])
    assert "never" not in run.metrics()


class Buffers(Odd):
    def model(self) -> nn.Module:
        conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        return nn.Sequential(conv, nn.BatchNorm2d(4))

    def objectives(self, model: Any) -> Sequence[Objective]:
        return [Objective("a", all_of(model), lambda b, d: Loss((model(b["x"].view(-1, 1, 2, 2)) ** 2).sum(), 4))]  # type: ignore[arg-type]

    def identity(self) -> Identity:
        return Identity({"mean": (0.1, 0.2)})


def test_running_statistics_and_memory_formats_survive_saving(tmp_path: Path) -> None:
    setup = setup_of(Buffers, "checkpoint.every=4", "checkpoint.keep=0", root=tmp_path)
    assert setup.state.model[1].num_batches_tracked == 0  # type: ignore[index]
    _, run = train(setup, tmp_path)
    again = setup_of(Buffers, "checkpoint.every=4", root=tmp_path)
    restore(again, Checkpoints(run.path / "checkpoints").at(4))
    assert again.state.model[1].num_batches_tracked == 4  # type: ignore[index]
    train(again, tmp_path, "again")
    for (name, p), q in zip(
        setup.state.model.state_dict().items(), again.state.model.state_dict().values(), strict=True
    ):
        assert torch.equal(p, q), name


def test_a_resume_evaluates_again_where_it_had_evaluated(tmp_path: Path) -> None:
    """Also when evals come at other steps now: else the best so far would be forgotten."""
    setup = setup_of(Odd, "eval_interval=5", "checkpoint.every=5", root=tmp_path)
    _, run = train(setup, tmp_path)
    again = setup_of(Odd, "eval_interval=3", root=tmp_path)
    restore(again, Checkpoints(run.path / "checkpoints").at(5), evaluated={5})
    train(again, tmp_path, "again")
    assert again.state.progress.eval_steps == [5, 6, 8]


def test_a_sample_depends_on_the_weights_and_the_step_alone(tmp_path: Path) -> None:
    class Sampling(Odd):
        def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
            return [Sample("a.bin", torch.rand(3).numpy().tobytes())]

    setup = setup_of(Sampling, "sample_interval=4", "checkpoint.every=4", "checkpoint.keep=0", root=tmp_path)
    _, run = train(setup, tmp_path)
    again = setup_of(Sampling, "sample_interval=4", root=tmp_path)
    restore(again, Checkpoints(run.path / "checkpoints").at(4))
    _, other = train(again, tmp_path, "again")
    for step in ("00000004", "00000008"):
        assert (run.path / "samples" / step / "a.bin").read_bytes() == (
            other.path / "samples" / step / "a.bin"
        ).read_bytes()


def test_a_loss_that_writes_into_its_batch_leaves_the_data_alone(tmp_path: Path) -> None:
    class Whole(Numbers):
        def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
            return np.arange(num_rows)

        def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
            return {"x": self.data[: len(ids)]}

    class Writing(Odd):
        def streams(self) -> dict[str, Stream]:
            self.stream = Whole()
            return {"train": self.stream}

        def objectives(self, model: Any) -> Sequence[Objective]:
            plain = squares(model.first)
            return [Objective("a", all_of(model), lambda b, d: plain({"x": b["x"].mul_(2.0)}, d))]

    setup = setup_of(Writing)
    before = setup.streams["train"].data.copy()  # type: ignore[attr-defined]
    train(setup, tmp_path)
    assert (setup.streams["train"].data == before).all()  # type: ignore[attr-defined]
