"""If this fails, something else is compiled than the recipe said, or evals wait for the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

from rung.engine.build import Setup, build
from rung.engine.clock import Clock
from rung.recipe import WHOLE_DYNAMIC, WHOLE_STATIC, Compile, Objective
from tests.contract.cases import Case
from tests.contract.toy import Nets, Toy


class Compiler:
    """Stands in for torch.compile: what it was given, how, and how often each was called."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, bool | None]] = []
        self.num_calls = 0

    def __call__(self, function: Callable[..., Any], *, dynamic: bool | None) -> Callable[..., Any]:
        self.given.append((function, dynamic))

        def compiled(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            return function(*args, **kwargs)

        compiled._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
        return compiled


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(torch, "compile", stand_in)
    return stand_in


def setup_of(choose: Callable[[Nets], tuple[Compile, Compile]], is_training: bool = True) -> Setup:
    class Chosen(Toy):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            assert isinstance(model, Nets)
            both = zip(super().objectives(model), choose(model), strict=True)
            return [objective._replace(compile=how) for objective, how in both]

    config = Case("toy", Chosen, ()).config("system.compile=true")
    return build(config, Chosen, Path("runs"), is_training)


def step(setup: Setup) -> None:
    prefetcher = setup.prefetcher()
    setup.stepper.step(0, prefetcher.take(0), 1e-3, Clock())
    prefetcher.close()


def test_the_whole_loss_with_the_shapes_of_its_objective(compiler: Compiler) -> None:
    setup = setup_of(lambda model: (WHOLE_STATIC, WHOLE_DYNAMIC))
    losses = [objective.plain_loss for objective in setup.state.objectives]
    assert compiler.given == [(losses[0], False), (losses[1], True)]
    step(setup)
    assert compiler.num_calls == 2


def test_modules_are_compiled_in_place_and_once(compiler: Compiler) -> None:
    setup = setup_of(lambda model: (Compile([model.generator], dynamic=None), Compile([model.generator])))
    assert [dynamic for _, dynamic in compiler.given] == [None]
    step(setup)
    assert compiler.num_calls == 2  # each objective makes a frame


def test_sizes_that_vary_do_without_an_analysis_that_asserts_on_them(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor.triton, "coalesce_tiling_analysis", True)
    setup_of(lambda model: (WHOLE_STATIC, WHOLE_STATIC))
    assert inductor.triton.coalesce_tiling_analysis
    setup_of(lambda model: (WHOLE_STATIC, WHOLE_DYNAMIC))
    assert not inductor.triton.coalesce_tiling_analysis


def test_an_empty_list_compiles_nothing(compiler: Compiler) -> None:
    setup_of(lambda model: (Compile([]), Compile([])))
    assert compiler.given == []


@pytest.mark.parametrize("how", [WHOLE_STATIC, None])
def test_evals_and_samples_run_as_written(compiler: Compiler, how: Compile | None) -> None:
    setup = setup_of(lambda model: (how or Compile([model.generator]),) * 2)
    assert compiler.given
    setup.evaluator.run(setup.state.model)
    setup.samples(setup.prefetcher().take(0)[0].draw)
    assert compiler.num_calls == 0
    step(setup)
    assert compiler.num_calls > 0  # and training is compiled again afterwards


def test_nothing_is_compiled_where_nothing_is_trained(compiler: Compiler) -> None:
    setup_of(lambda model: (WHOLE_STATIC, Compile([model.generator])), is_training=False)
    assert compiler.given == []
