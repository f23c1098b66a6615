"""If this fails, the figures of a world say something else than what they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.evaluate import eval_mode
from rung.engine.state import set_training
from rung.random import Draw
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.losses import last_of
from rung.recipes.world.memory import to_signal
from rung.recipes.world.metrics import motion, rollout
from rung.recipes.world.model import World
from tests.contract.cases import world as world_case
from tests.recipes.world.stores import write_store
from tests.recipes.world.synthetic import PIXELS_PER_RADIAN, ZOOM_PER_UNIT, film

OVERRIDES = (
    "stage=open_loop", "context.noise=0", "model.memory=[2@32x24,4@8x6]", "model.width=12", "data.batch_size=16",
    "evaluation.horizon=8", "evaluation.num_rollouts=16", "optimizer.max_iters=220", "lr.learning_rate=3e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metrics") / "world"
    return write_store(path, (600, 600, 100), splits=("train", "train", "validation"))


def trained(data: Path, *overrides: str) -> Setup:
    setup = world_case(data).setup(*OVERRIDES, *overrides)
    set_training(setup.state.model)
    prefetcher = setup.prefetcher()
    for step in range(setup.num_steps or 0):
        setup.stepper.step(step, prefetcher.take(step), setup.schedule.lr(step, []), Clock())
    prefetcher.close()
    return setup


def test_motion_is_what_the_camera_did() -> None:
    made = film(200, seed=4)
    signal = to_signal(torch.from_numpy(made.frames))
    right, down, grown = motion(signal[:-1], signal[1:])
    forward, turn, look = torch.from_numpy(made.moves[1:]).float().T
    per_pixel = PIXELS_PER_RADIAN / 2  # estimated on half the size
    for estimate, truth in ((right, -turn * per_pixel), (down, look * per_pixel), (grown, forward * ZOOM_PER_UNIT)):
        both = torch.stack([estimate, truth])
        assert torch.corrcoef(both)[0, 1] > 0.9
        small = truth.abs() < truth.abs().median()  # to first order
        slope = (estimate * truth)[small].sum() / truth[small].square().sum()
        assert 0.7 < slope < 1.3


@pytest.mark.slow
def test_a_small_model_learns_a_known_world(data: Path) -> None:
    setup = trained(data, "adversarial.weight=0")
    found = setup.evaluator.run(setup.state.model)
    next_frames, rollouts = found["validation"], found["rollout"]
    assert next_frames["loss"] < 0.5 * next_frames["persistence"]
    assert next_frames["persistence"] < next_frames["mean_frame"]
    for horizon in (1, 2, 4, 8):
        assert rollouts[f"l1@{horizon}"] < 0.7 * rollouts[f"persistence@{horizon}"]
    assert rollouts["controls_other"] > 1.5 * rollouts["controls_own"]
    for intent in ("turn", "look", "forward"):
        assert rollouts[f"{intent}_right"] >= 0.9, intent
    assert rollouts["drift_mean"] < 0.1


def test_a_model_that_knows_nothing_is_no_better_than_copying(data: Path) -> None:
    setup = world_case(data).setup(*OVERRIDES, "adversarial.weight=0")
    found = setup.evaluator.run(setup.state.model)["rollout"]
    assert found["l1@1"] > 0.9 * found["persistence@1"]
    assert found["controls_other"] == pytest.approx(found["controls_own"], rel=0.02)


def test_baselines_are_plain_means_over_the_same_rows(data: Path) -> None:
    setup = world_case(data).setup(*OVERRIDES, "adversarial.weight=0")
    found = setup.evaluator.run(setup.state.model)
    frames = np.asarray(setup.recipe.store.arrays["frames_2"][1200:]).astype(np.float64) / 127.5 - 1  # type: ignore[attr-defined]
    past = 4
    want = np.abs(frames[past:] - frames[past - 1 : -1]).mean()
    assert found["validation"]["persistence"] == pytest.approx(want, rel=1e-5)
    baselines = setup.streams["validation"].baselines
    assert baselines["persistence"] == pytest.approx(want, rel=1e-5)
    assert baselines["mean_frame"] == pytest.approx(found["validation"]["mean_frame"], rel=1e-5)
    starts = range(past, 100, 96 // 16)
    for horizon in (1, 4, 8):
        inside = [s for s in starts if s + horizon <= 100]
        want = np.mean([np.abs(frames[s + horizon - 1] - frames[s - 1]).mean() for s in inside])
        assert found["rollout"][f"persistence@{horizon}"] == pytest.approx(want, rel=1e-5)


class Oracle(Dreamer):
    """Dreams the real frames, or what `change` makes of them."""

    def __init__(self, setup: Setup, real: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(setup.recipe._dreamer(setup.state.model).world)  # type: ignore[attr-defined]
        object.__setattr__(self, "frames", change(real))

    def step(self, memory: Any, anchor: Any, controls: Any, draw: Any, number: int) -> Any:
        frames: torch.Tensor = self.frames  # type: ignore[attr-defined]
        return frames[:, min(number, frames.shape[1] - 1)], None


def softened(frames: torch.Tensor) -> torch.Tensor:
    flat = frames.flatten(0, 1)
    return F.avg_pool2d(F.pad(flat, (2,) * 4, mode="replicate"), 5, stride=1).unflatten(0, frames.shape[:2])


def test_sharpness_is_gradient_energy_over_that_of_real_frames(data: Path) -> None:
    setup = world_case(data).setup(*OVERRIDES, "adversarial.weight=0")
    stream = setup.streams["rollout"]
    rows = np.arange(10)
    batch = {k: torch.from_numpy(v) for k, v in stream.gather(rows, Draw(0, -1, rows)).items()}
    real, draw, intents = to_signal(batch["frames"]), Draw(0, -1, rows), setup.recipe.intents  # type: ignore[attr-defined]
    found = {
        name: rollout(Oracle(setup, real, change), batch, draw, [1, 2, 4, 8], intents)
        for name, change in (("same", lambda x: x), ("soft", softened))
    }
    for at in (1, 8):
        energy, of_real = found["same"][f"sharpness@{at}"]
        assert (energy / of_real).item() == pytest.approx(1)
        right, below = (np.diff(real[:, at - 1].numpy().astype(np.float64), axis=axis) for axis in (-1, -2))
        want = (right[:, :, :-1] ** 2 + below[:, :, :, :-1] ** 2).mean(axis=(1, 2, 3))
        valid = batch["valid"][:, at - 1].numpy()
        assert of_real.item() == pytest.approx((want * valid).sum(), rel=1e-5)
        soft, _ = found["soft"][f"sharpness@{at}"]
        assert soft / of_real < 0.8
    assert "sharpness@2" not in found["same"]
    # The meter of moves reads real frames alike, whether they are called dreamed or real.
    for intent in ("turn", "forward", "look"):
        late, of_real = (found["same"][f"{intent}_followed_{kind}"] for kind in ("late", "real"))
        assert late[0] == of_real[0]
        assert late[1] == of_real[1] > 0
        assert of_real[0] / of_real[1] > 0.8
        assert found["same"][f"{intent}_right_late"][1] == batch["valid"][:, -1].sum()


@pytest.mark.slow
def test_the_discriminator_sees_its_condition(data: Path) -> None:
    """After some training it scores a real frame higher with the control that led to it than with another's."""
    setup = trained(data, "adversarial.weight=0.01", "adversarial.lr_scale=1", "model.discriminator_width=8")
    world = setup.state.model
    assert isinstance(world, World)
    stream = setup.streams["rollout"]
    rows = np.arange(stream.num_rows)
    batch = {k: torch.from_numpy(v) for k, v in stream.gather(rows, Draw(0, -1, rows)).items()}
    real, last = to_signal(batch["frames"][:, 0]), last_of(memory_of(batch))
    with eval_mode(world):
        right, wrong = (
            world.discriminator(real, last, world.standard(c)).mean().item()
            for c in (batch["controls"][:, 0], batch["other_controls"])
        )
    assert right > wrong
