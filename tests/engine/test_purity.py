"""If this fails, looking at a run changes what it learns: a sample or an eval leaves its traces in the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rung.engine.purity import pure
from rung.random import Draw
from rung.recipe import Batch, Part, Sample
from rung.runs.query import Run
from tests.cases.preflight_cases import KeepsStatistics
from tests.cases.running import run_case, setup_of
from tests.cases.tiny import Gpt, Tiny

KEYS = ("optimizer.max_iters=12", "num_rows=200", "eval_interval=4", "sample_interval=4", "lr.warmup_iters=2")


class Statistics(KeepsStatistics):
    """With buffers that a step moves, and a frozen table in half precision."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Gpt)
        model.register_buffer("count", torch.zeros(3))
        model.places.requires_grad_(False)
        return model


def in_place(model: Gpt) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def by_data(model: Gpt) -> None:
    model.head.weight.data.add_(1e-3)


def cast(model: Gpt) -> None:
    model.half()


def rounded(model: Gpt) -> None:
    model.bfloat16().float()


def swapped(model: Gpt) -> None:
    """The same numbers in another order: no sum would tell."""
    model.tokens.weight.data = model.tokens.weight.data.roll(1, 0)


def replaced(model: Gpt) -> None:
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))


def frozen(model: Gpt) -> None:
    model.places.weight.data[0] = 0


def made_still(model: Gpt) -> None:
    model.requires_grad_(False)


def buffer(model: Gpt) -> None:
    model.get_buffer("count").add_(1)


def modules(model: Gpt) -> None:
    model.norm = nn.Identity()  # type: ignore[assignment]


def gradient(model: Gpt) -> None:
    with torch.enable_grad():
        model.head(torch.ones(1, model.head.in_features)).sum().backward()


def default(model: Gpt) -> None:
    torch.set_default_dtype(torch.float64)


SPOILERS = [
    in_place, by_data, cast, rounded, swapped, replaced, frozen, made_still, buffer, modules, gradient, default,
]  # fmt: skip


def spoilt(spoil: Callable[[Gpt], None] | None, where: str) -> type[Statistics]:
    class Impure(Statistics):
        def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
            random.random()
            np.random.random()
            if spoil is not None and where == "a sample":
                assert isinstance(model, Gpt)
                spoil(model)
            return []

        def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
            if spoil is not None and where == "an eval" and batch["ids"].shape[0]:
                assert isinstance(model, Gpt)
                spoil(model)
            return {}

    Impure.__qualname__ = f"Impure{where}"
    return Impure


def losses(run: Run) -> tuple[list[float], list[float]]:
    """Of all steps and of all evals: the same to the last bit, or something was learned otherwise."""
    return run.metrics(["loss"])["loss"], [event["results"]["val"]["loss"] for event in run.events("eval")]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = run_case(spoilt(None, ""), tmp_path_factory.mktemp("runs"), *KEYS)
    assert not list(run.events("impure"))
    return losses(run)


@pytest.mark.parametrize("where", ["a sample", "an eval"])
@pytest.mark.parametrize("spoil", SPOILERS)
def test_what_is_changed_is_told_and_undone(
    spoil: Callable[[Gpt], None], where: str, tmp_path: Path, untouched: Any
) -> None:
    run = run_case(spoilt(spoil, where), tmp_path, *KEYS)
    events = list(run.events("impure"))
    assert {event["during"] for event in events} == {where}
    assert [event["step"] for event in events] == [event["step"] for event in run.events("eval")]
    assert all(event["undone"] and event["changes"] for event in events)
    now = losses(run)
    assert now[0] == untouched[0]
    if where == "a sample":  # an eval that spoils its own weights is put right only when it has ended
        assert now[1] == untouched[1]


def test_what_did_not_fit_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.engine.purity.ROOM", 0.0)
    setup = setup_of(Statistics)
    model = setup.state.model
    assert isinstance(model, Gpt)
    with pure(setup.state) as changes:
        frozen(model)
    assert list(changes) == ["places.weight"]
    assert not changes.undone
    with pure(setup.state) as changes:
        by_data(model)
    assert (list(changes), changes.undone) == (["head.weight"], False)


def test_an_exception_is_no_excuse() -> None:
    setup = setup_of(Statistics)
    model = setup.state.model
    assert isinstance(model, Gpt)
    before = model.head.weight.detach().clone()

    def fail() -> None:
        with pure(setup.state):
            cast(model)
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        fail()
    assert torch.equal(model.head.weight, before)
    assert model.head.weight.dtype == torch.float32


def test_optimizers_are_watched_too() -> None:
    setup = setup_of(Statistics)
    [trained] = setup.state.objectives
    [optimizer] = trained.optimizers
    for parameter in trained.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in trained.parameters:
        parameter.grad = None
    moments = next(iter(optimizer.state.values()))
    before = moments["exp_avg"].clone()
    with pure(setup.state) as changes:
        moments["exp_avg"].zero_()
        optimizer.param_groups[0]["lr"] = 7.0
    assert len(changes) == 2
    assert torch.equal(next(iter(optimizer.state.values()))["exp_avg"], before)
    assert optimizer.param_groups[0]["lr"] != 7.0


def test_a_cache_is_put_back_without_a_word() -> None:
    setup = setup_of(Tiny)
    setup.state.model.register_buffer("cache", torch.zeros(3), persistent=False)
    with pure(setup.state) as changes:
        setup.state.model.get_buffer("cache").add_(1)
    assert changes
    assert not changes.told
    assert not setup.state.model.get_buffer("cache").any()
