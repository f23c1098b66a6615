"""If this fails, steps of a run that was stopped, resumed or led back come out otherwise when they are taken again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from rung.api import rebuild
from rung.engine.checkpoint import Checkpoints
from rung.forensics.walk import Detours, Walk
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Pretrained
from rung.runs.query import Run
from tests.errors import raises_code
from tests.forensics.failing import go_on, train, verdict_of
from tests.forensics.vectors import BAD_STEP, BATCH, Net, Vectors, bad_id

ALL = (f"data.batch_size={BATCH}", "checkpoint.every=2", "checkpoint.keep=0", "bad=nan")


def assert_repeats(run: Run, root: Path) -> None:
    """Every step that counts, from the beginning, and from each save as often as one likes."""
    recorded = {s: row for s, *row in zip(*run.metrics(["loss", "norm"]).values(), strict=True) if row[1] is not None}
    walk = Walk(rebuild(run, "float32", runs=root), run)
    saves, walk.saves = walk.saves, type(walk.saves)(run.path / "none")
    starts = [0]
    while starts:
        walk.go_to(starts.pop(0))
        while walk.step <= max(recorded):
            step, row = walk.step, walk.take()
            taken = torch.tensor([row["loss"], row["norm"]], dtype=torch.float64)
            wanted = torch.tensor(recorded[step], dtype=torch.float64)
            assert torch.equal(taken.nan_to_num(), wanted.nan_to_num()), (step, taken, wanted)
        if walk.saves is not saves:
            starts, walk.saves = saves.steps()[:-1] * 2, saves


class Killed(Vectors):
    """Whose process ends when a step is taken for the n-th time."""

    ends_at: ClassVar[tuple[int, int] | None] = None

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        [whole] = super().objectives(model)
        num_taken = 0

        def loss(batch: Batch, draw: Draw) -> Loss:
            nonlocal num_taken
            if self.ends_at is not None and draw.step == self.ends_at[0] and model.training:
                num_taken += 1
                if num_taken == self.ends_at[1]:
                    raise KeyboardInterrupt
            return whole.loss(batch, draw)

        return [whole._replace(loss=loss)]


@pytest.mark.parametrize("ends_at", [(2, 2), (5, 1)], ids=["before the save", "after a save"])
def test_a_run_that_was_killed_after_it_had_gone_back(
    ends_at: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Killed, "ends_at", ends_at)
    run = train(Killed, tmp_path, *ALL, "guard.policy=rollback")
    assert run.status == "stopped"
    monkeypatch.setattr(Killed, "ends_at", None)
    run = go_on(run, Killed, tmp_path, *ALL, "guard.policy=rollback")
    assert run.status == "finished"
    assert [(e["step"], e["to"]) for e in run.events("rollback")] == [(BAD_STEP, 2)] * (2 if ends_at[0] == 2 else 1)
    assert_repeats(run, tmp_path)
    verdict = verdict_of(run, tmp_path)  # of the way that the run has left
    assert (verdict.origin, verdict.samples) == ("DATA", [bad_id()]), verdict.lines()


def test_a_run_that_was_resumed_with_another_policy(tmp_path: Path) -> None:
    run = train(Vectors, tmp_path, *ALL)
    assert run.status == "diverged"
    run = go_on(run, Vectors, tmp_path, *ALL, "guard.policy=skip")
    assert run.status == "finished"
    assert run.config()["guard"]["policy"] == "stop"  # what the run began with
    assert_repeats(run, tmp_path)


class Huge(nn.Module):
    """A weight that goes up by the rate each step, until it does not fit; from then on it is pulled down."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, pull: float) -> Tensor:
        return (self.weight * pull).sum() + self.norm(x).sum() * 0


class OfHuge(Vectors):
    def model(self) -> nn.Module:
        return Huge()

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Huge)

        def loss(batch: Batch, draw: Draw) -> Loss:
            pull = -1.0 if draw.step <= 3 else 1.0
            return Loss(model(batch["x"], pull), torch.tensor(float(len(batch["x"]))))

        return [Objective("weight", [ParameterGroup("all", [model.weight])], loss)]


def test_an_update_that_was_undone_is_left_out_again(tmp_path: Path) -> None:
    words = (ALL[0], "checkpoint.every=2", "checkpoint.keep=0", "guard.policy=skip", "lr.learning_rate=1e38",
             "lr.warmup_iters=0", "lr.decay_lr=false", "optimizer.beta1=0", "optimizer.weight_decay=0",
             "eval_interval=0")  # fmt: skip
    run = train(OfHuge, tmp_path, *words)
    assert run.status == "finished"
    assert [e["step"] for e in run.events("skip")] == [3]
    assert [e["tensors"] for e in run.events("weights_broken")] == [["weight"]]
    assert_repeats(run, tmp_path)


class Adopting(Vectors, Pretrained):
    """Begins with the first layer of others; the second keeps the draw of the seed."""

    def load_pretrained(self, model: nn.Module, source: Path) -> str:
        model.load_state_dict(torch.load(source, weights_only=True), strict=False)
        return f"weights of {source}"


def others(file: Path, value: float) -> Path:
    torch.save({"a.weight": torch.full((6, 4), value), "a.bias": torch.zeros(6)}, file)
    return file


def test_a_run_that_began_with_weights_of_others_begins_with_them_again(tmp_path: Path) -> None:
    file = others(tmp_path / "theirs.pt", 0.5)
    run = train(Adopting, tmp_path, ALL[0], "checkpoint.every=2", "checkpoint.keep=0", f"init_from={file}")
    assert_repeats(run, tmp_path)
    walk = Walk(rebuild(run, "float32", runs=tmp_path), run)
    walk.go_to(4)
    before = {name: tensor.clone() for name, tensor in walk.setup.state.model.state_dict().items()}
    begun = walk.initial()
    assert begun is not None
    assert torch.equal(begun["a.weight"], torch.full((6, 4), 0.5))
    now = walk.setup.state.model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("is_there", [True, False], ids=["others", "gone"])
def test_other_weights_in_their_place_are_not_taken_for_them(is_there: bool, tmp_path: Path) -> None:
    file = others(tmp_path / "theirs.pt", 0.5)
    run = train(Adopting, tmp_path, *ALL[:3], f"init_from={file}")
    file.unlink()
    if is_there:
        others(file, 0.25)
    walk = Walk(rebuild(run, "float32", runs=tmp_path), run)
    assert walk.initial() is None
    with raises_code("no-checkpoint"):
        walk.go_to(1)
    assert walk.go_to(3) == "the save of step 2"


def test_a_run_that_began_with_a_save_of_another_finds_that_very_save(tmp_path: Path) -> None:
    first = train(Vectors, tmp_path, *ALL[:3], "eval_interval=2")
    saves = Checkpoints(first.path / "checkpoints")
    saves.mark_best(2)
    run = train(Vectors, tmp_path, *ALL[:3], f"init_from={first.id}")
    saves.mark_best(6)  # it has gone on, and has become better
    assert_repeats(run, tmp_path)
    shutil.rmtree(saves.at(2))
    assert Walk(rebuild(run, "float32", runs=tmp_path), run).initial() is None


class TiedNet(Net):
    """A save holds the shared weight once, under the first of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 6)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x) + self.c(x)))
        return out


class Tied(Vectors):
    def model(self) -> nn.Module:
        return TiedNet()


def test_a_run_that_began_with_a_save_of_tied_weights_begins_with_them_again(tmp_path: Path) -> None:
    first = train(Tied, tmp_path, *ALL[:3])
    assert_repeats(train(Tied, tmp_path, *ALL[:3], f"init_from={first.id}"), tmp_path)


def event(kind: str, step: int, **fields: Any) -> Mapping[str, Any]:
    return {"kind": kind, "step": step, **fields}


BACK = event("rollback", 17, to=10, position=144)
DETOURS = {
    "the last way back to a save counts": (
        [BACK, event("rollback", 15, to=10, position=184)], {10: 184}, set()),
    "a resume from before it undoes it": ([BACK, event("resume", 10)], {}, set()),
    "a resume from after it does not": ([BACK, event("resume", 20)], {10: 144}, set()),
    "what was left out stays so": ([event("skip", 4), event("resume", 5)], {}, {4}),
    "what is taken again is not": ([event("skip", 5), event("resume", 5)], {}, set()),
    "nor after a way back": ([event("skip", 12), BACK], {10: 144}, set()),
    "a way back to an earlier save undoes later ones": (
        [BACK, event("rollback", 19, to=5, position=200)], {5: 200}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", DETOURS)
def test_what_of_the_events_still_counts(name: str) -> None:
    events, positions, left_out = DETOURS[name]
    assert Detours.of(events) == Detours(positions, left_out)


def test_a_capture_was_reached_without_what_came_after_it() -> None:
    events = [event("skip", 4), event("diverged", 17), BACK]
    assert Detours.of(events, capture=17) == Detours({}, {4})
    assert Detours.of([*events, event("diverged", 17), BACK], capture=17) == Detours({10: 144}, {4})
