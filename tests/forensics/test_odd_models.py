"""If this fails, a model of a kind that nobody thought of ends a replay, or has an innocent row blamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rung.engine import capture
from rung.engine.guarded import ObjectiveState
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.errors import RunError
from rung.forensics import replay
from rung.forensics.examine import examine
from rung.forensics.rerun import Rerun
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Stream
from tests.forensics.failing import train, verdict_of
from tests.forensics.test_replay import assert_sentence, call
from tests.forensics.vectors import BAD_STEP, BATCH, Net, Rows, Vectors, bad_id

NAN, INF = float("nan"), float("inf")
EIGHT = f"data.batch_size={BATCH}"


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class Lazy(Net):
    """A table that the first forward makes."""

    cache: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None, persistent=False)

    def middle(self, x: Tensor) -> Tensor:
        if self.cache is None or len(self.cache) != len(x):
            self.cache = torch.ones(len(x), 1)
        return x * self.cache


class Growing(Net):
    """A table that is replaced by a larger one when rows come for which it is too short."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(1, 1), persistent=False)

    def middle(self, x: Tensor) -> Tensor:
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x), 1)
        return x * self.cache[: len(x)]


class Registering(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.register_buffer("cache", torch.ones(len(x), 1), persistent=False)
        return x


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.jit.script(nn.Linear(4, 6))


class Masked(Net):
    """A mask that is kept as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, 0.0, -INF, -INF]))

    def middle(self, x: Tensor) -> Tensor:
        return torch.softmax(x + self.mask, -1)


class OfNormed(Vectors):
    def model(self) -> nn.Module:
        return Normed()


class OfLazy(Vectors):
    def model(self) -> nn.Module:
        return Lazy()


class OfGrowing(Vectors):
    def model(self) -> nn.Module:
        return Growing()


class OfRegistering(Vectors):
    def model(self) -> nn.Module:
        return Registering()


class OfScripted(Vectors):
    def model(self) -> nn.Module:
        return Scripted()


class OfMasked(Vectors):
    def model(self) -> nn.Module:
        return Masked()


ODD: list[tuple[type[Vectors], str]] = [
    (OfNormed, "nan"), (OfLazy, "nan"), (OfGrowing, "nan"), (OfRegistering, "nan"),
    (OfScripted, "nan"), (OfMasked, "nan"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("recipe", "bad"), ODD)
def test_the_bad_row_is_named_and_no_other(recipe: type[Vectors], bad: str, tmp_path: Path) -> None:
    run = train(recipe, tmp_path, EIGHT, f"bad={bad}", "optimizer.weight_decay=0")
    assert capture.steps(run.path / "captures") == [BAD_STEP]
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.samples) == ("DATA", [bad_id()]), verdict.lines()
    assert verdict.line
    assert verdict.not_tested == []


# Steps of somebody's own loop: what fails is chosen by the test.

Value = Callable[[nn.Module, Tensor], Tensor]


def rerun_of(net: nn.Module, x: Tensor, value: Value, others: Iterable[Tensor] = (), **options: Any) -> Rerun:
    """Ids count from 100."""
    torch.manual_seed(0)

    def loss(batch: Batch, draw: Draw) -> Loss:
        return Loss(value(net, batch["x"]), torch.tensor(float(len(batch["x"]))))

    def micro(x: Tensor, first: int) -> Micro:
        places = np.arange(len(x))
        return Micro(places + first, Draw(0, 5, places), {"x": x})

    parameters = [p for p in net.parameters() if p.requires_grad]
    trained = ObjectiveState("own", loss, parameters, [torch.optim.AdamW(parameters, lr=1e-3)])
    batches = [[micro(other, 1000 + 100 * n)] for n, other in enumerate(others)]
    return Rerun(
        net, [trained], [micro(x, 100)], Precision("float32", torch.device("cpu")), step=5,
        other_batches=(lambda: batches) if batches else None, **options,
    )  # fmt: skip


def squares(net: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = net(x).square().sum()
    return total


def rows(num_rows: int, bad: Mapping[int, float]) -> Tensor:
    x = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(0))
    for row, value in bad.items():
        x[row, 1] = value
    return x


@pytest.mark.parametrize(
    ("num_rows", "bad"), [(2, [0]), (2, [1]), (3, [2]), (5, [0]), (8, [0]), (8, [5]), (8, [1, 6]), (8, [2, 3])]
)
def test_batch_statistics_blame_no_neighbour(num_rows: int, bad: list[int]) -> None:
    verdict = examine(rerun_of(Normed(), rows(num_rows, dict.fromkeys(bad, NAN)), squares))
    assert sorted(verdict.samples) == [100 + row for row in bad], verdict.lines()
    assert "in company" in " ".join(verdict.evidence)


def test_what_stands_beside_itself_and_passes_is_found_in_other_company() -> None:
    """Two equal rows have no variance, whatever they are: only beside others does this one overflow."""

    def spread(net: nn.Module, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("one row has no variance")
        return squares(net, x) + (x - x.mean(0)).square().sum()

    verdict = examine(rerun_of(Net(), rows(8, {6: 1e25}), spread, [rows(8, {})]))
    assert verdict.samples == [106], verdict.lines()


def test_where_fewer_cannot_be_tried_the_group_is_named() -> None:
    def in_fours(net: nn.Module, x: Tensor) -> Tensor:
        if len(x) % 4:
            raise ValueError("rows come in fours")
        return squares(net, x) + x[:, 1].reshape(-1, 4).prod(1).exp().sum() * 0

    verdict = examine(rerun_of(Net(), rows(8, dict.fromkeys(range(4), 1e3)), in_fours, [rows(8, {})]))
    assert verdict.samples == [100, 101, 102, 103], verdict.lines()
    assert "these fail together" in " ".join(verdict.evidence)


def test_a_model_that_takes_whole_micros_only_has_nobody_blamed() -> None:
    def whole(net: nn.Module, x: Tensor) -> Tensor:
        if len(x.nan_to_num(7.0).unique(dim=0)) != 8:
            raise ValueError("eight rows, please, and no two alike")
        return squares(net, x)

    verdict = examine(rerun_of(Net(), rows(8, {2: NAN}), whole, [rows(8, {}), rows(8, {})]))
    assert (verdict.origin, verdict.samples) == ("DATA", []), verdict.lines()
    assert "the sample: the model does not take fewer rows" in verdict.not_tested


def test_an_error_of_the_same_type_is_not_yet_the_same_error() -> None:
    def strict(net: nn.Module, x: Tensor) -> Tensor:
        if bool((x[:, 1] > 9).any()):
            raise ValueError(f"a reading of {float(x[:, 1].max())} in a batch of {len(x)}")
        return squares(net, x)

    verdict = examine(rerun_of(Normed(), rows(8, {5: 10.0}), strict, [rows(8, {}), rows(8, {})]))
    assert (verdict.origin, verdict.samples) == ("DATA", [105]), verdict.lines()


def test_other_batches_that_fail_in_another_way_are_not_counted() -> None:
    def short(net: nn.Module, x: Tensor) -> Tensor:
        if bool((x[:, 2] > 9).any()):
            raise KeyError("speaker")
        return squares(net, x)

    odd = rows(8, {})
    odd[0, 2] = 10.0
    verdict = examine(rerun_of(Net(), rows(8, {5: NAN}), short, [odd, rows(8, {}), odd]))
    assert "these weights fail with 0 of 1 other batches" in verdict.evidence, verdict.lines()
    assert "2 of the other batches: KeyError: 'speaker'" in verdict.not_tested


@pytest.mark.parametrize("kind", [Lazy, Growing, Registering])
def test_buffers_are_left_as_they_were_found(kind: type[Net]) -> None:
    net = kind()
    before = dict(net._buffers)
    examine(rerun_of(net, rows(8, {5: NAN}), squares, [rows(8, {})]))
    assert set(net._buffers) == set(before)
    assert all(net._buffers[name] is buffer for name, buffer in before.items())


def test_a_frozen_weight_that_is_bad_and_unused_is_no_update() -> None:
    net = Net()
    net.frozen = nn.Parameter(torch.tensor([INF]), requires_grad=False)
    verdict = examine(rerun_of(net, rows(8, {}), squares))
    assert verdict.origin == "WEIGHTS", verdict.lines()


def test_an_operation_of_ours_has_no_line_of_the_users() -> None:
    """The loss is finite, and what we divide it by is not the user's affair."""
    rerun = rerun_of(Net(), rows(8, {}), lambda net, x: squares(net, x) * 1e30, nominal=1e-20)
    found = rerun.first(rerun.micros[0], rerun.objectives[0])
    assert found is not None
    assert (found.op, found.line, found.text) == ("aten.div", "", "")


def test_a_loss_that_is_multiplied_by_nan_has_its_line() -> None:
    verdict = examine(rerun_of(Net(), rows(8, {}), lambda net, x: squares(net, x) * NAN))
    assert verdict.op == "aten.mul"
    assert verdict.text.endswith("squares(net, x) * NAN))")


# Captures that lack something.


def test_weights_that_were_refused_at_a_save_are_traced(tmp_path: Path) -> None:
    words = ("lr.learning_rate=1e39", "lr.warmup_iters=0", "guard.armed_steps=0", "checkpoint.every=1")
    run = train(Vectors, tmp_path, EIGHT, *words)
    captured = replay.read(run, None)
    assert captured.micros == [[]]  # there was no batch yet
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.step) == ("LEARNING RATE", 0), verdict.lines()
    assert "lr is 1e+39" in verdict.what
    done = call("case/1", "--debug", root=tmp_path)
    assert isinstance(done.exception, RunError)
    assert_sentence(done.exception, "kept without a batch")


class Gone(Rows):
    """Of whose files one is lost when the run is over."""

    is_over = False

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        if self.is_over and draw.step in (BAD_STEP - 1, BAD_STEP + 2):
            raise OSError("a file is gone")
        return super().gather(ids, draw)


class OfGone(Vectors):
    def streams(self) -> Mapping[str, Stream]:
        return {"train": Gone(self.cfg.bad, self.seed)}


def test_batches_that_are_gone_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(OfGone, tmp_path, EIGHT, "bad=nan")
    monkeypatch.setattr(Gone, "is_over", True)
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.confidence, verdict.samples) == ("DATA", "sure", [bad_id()]), verdict.lines()
    assert verdict.not_tested == ["2 of the other batches, not gathered: OSError: a file is gone"]


class Writing(Vectors):
    """A loss that takes its batch apart."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            x = batch.pop("x").div_(10.0)
            total = (model(x)[:, 0].square() + x.abs().amax(1).exp()).sum()
            return Loss(total, torch.tensor(float(len(x))))

        return [Objective("fit", [ParameterGroup("all", model.parameters())], loss)]


def test_a_batch_that_the_loss_wrote_into_is_gathered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(1000 / 10) overflows; the batch as the loss left it, divided once more, does not."""
    run = train(Writing, tmp_path, EIGHT, "bad=1000")
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.op, verdict.samples) == ("DATA", "aten.exp", [bad_id()]), verdict.lines()
    assert any("the loss writes into x" in said for said in verdict.evidence)

    def gather(self: Rows, ids: np.ndarray, draw: Draw) -> Arrays:
        raise OSError("all is gone")

    monkeypatch.setattr(Rows, "gather", gather)
    verdict = verdict_of(run, tmp_path)
    assert any("cannot be gathered again (OSError: all is gone)" in said for said in verdict.not_tested)


def test_what_is_tried_in_the_debugger_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    train(Writing, tmp_path, EIGHT, "bad=1000")

    def look() -> None:
        there = sys._getframe(1).f_locals
        there["objective"].loss(there["batch"], there["draw"])

    monkeypatch.setattr(sys, "breakpointhook", look)
    done = call("case/1", "--debug", root=tmp_path)
    assert f"DATA  sure  step {BAD_STEP}  micro 0  sample {bad_id()}" in done.stdout, done.output
