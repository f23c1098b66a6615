"""If this fails, an eval waits for its data, or its figures depend on who gathered it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rung.engine import examine as looking
from rung.random import Draw
from rung.recipe import Arrays, Loss, Stream
from tests.contract.cases import CASES
from tests.contract.toy import Film
from tests.errors import raises_code


@pytest.mark.parametrize("name", ["piano", "text", "world", "toy"])
def test_figures_do_not_depend_on_the_workers(name: str, request: pytest.FixtureRequest) -> None:
    make, data = CASES[name]
    case = make(request.getfixturevalue(data))
    words = ("data.batch_size=3", "eval_iters=5")
    setups = [case.setup(*words, f"system.data_workers={workers}") for workers in (0, 1, 3)]
    plain, *ahead = [setup.evaluator.run(setup.state.model) for setup in setups]
    assert plain
    assert ahead == [plain, plain]
    set_name, stream = next(iter(setups[0].evaluator.streams.items()))
    looks = [looking.examine(setup, setup.state.model, set_name, stream) for setup in setups]
    assert looks[0] == looks[1] == looks[2]
    assert (looks[0] is not None) == (name in ("piano", "text"))


class Watched(Film):
    """Tells when the rows of a batch are gathered; one batch can be broken."""

    def __init__(self, broken: int | None = None) -> None:
        super().__init__(100, 6)
        self.gathered = [threading.Event() for _ in range(3)]
        self.broken = broken

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        number = int(ids[0]) // 2
        if number == self.broken:
            raise RuntimeError(f"batch {number} cannot be read")
        arrays = super().gather(ids, draw)
        self.gathered[number].set()
        return arrays


def evaluate(stream: Stream, workers: int, loss: Any) -> dict[str, dict[str, float]]:
    make, _ = CASES["toy"]
    setup = make(Path()).setup("data.batch_size=2", f"system.data_workers={workers}")
    setup.state.objectives[0].eager = loss
    return setup.evaluator.run(setup.state.model, {"held_out": stream})


def test_the_next_batch_is_gathered_while_one_is_computed() -> None:
    stream, was_ahead = Watched(), []

    def loss(batch: dict[str, torch.Tensor], draw: Draw) -> Loss:
        number = int(draw.rows[0]) // 2
        was_ahead.append(number == 2 or stream.gathered[number + 1].wait(timeout=30))
        return Loss(torch.tensor(1.0), torch.tensor(1.0))

    evaluate(stream, 1, loss)
    assert was_ahead == [True, True, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_read_raises_and_leaves_no_thread(workers: int) -> None:
    seen, before = [], set(threading.enumerate())

    def loss(batch: dict[str, torch.Tensor], draw: Draw) -> Loss:
        seen.append(int(draw.rows[0]))
        return Loss(torch.tensor(1.0), torch.tensor(1.0))

    with raises_code("gather-failed"):
        evaluate(Watched(broken=1), workers, loss)
    assert seen == [0]
    assert set(threading.enumerate()) <= before


def test_a_loss_that_raises_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def loss(batch: dict[str, torch.Tensor], draw: Draw) -> Loss:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        evaluate(Watched(), 2, loss)
    assert set(threading.enumerate()) <= before
