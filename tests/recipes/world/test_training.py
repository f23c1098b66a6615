"""If this fails, a world is not trained for what its config says, or a switch that should change nothing does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rung.data.store import Store
from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.state import set_training
from rung.nn.init import reset_by_name
from rung.random import Draw
from rung.recipe import Batch, Loss
from rung.recipes.world.config import ClosedLoop, Scale
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.losses import contrast_error, gradient_energy, l1, last_of
from rung.recipes.world.memory import push, to_frame, to_signal
from rung.recipes.world.model import (
    LARGEST_FLOW,
    SLOPE,
    Anchor,
    Discriminator,
    Generator,
    Standard,
    World,
    move,
    new_anchor,
)
from rung.recipes.world.recipe import Curriculum
from rung.recipes.world.recipe import World as Recipe
from tests.contract.cases import world as world_case
from tests.recipes.world.stores import write_store

PLAIN = ("stage=open_loop", "adversarial.weight=0", "context.noise=0", "optimizer.grad_clip=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "world"
    return write_store(path, (300, 300, 60), splits=("train", "train", "validation"))


@pytest.fixture(scope="module")
def make(data: Path) -> Callable[..., Setup]:
    return lambda *overrides: world_case(data).setup(*overrides)


def networks(setup: Setup) -> World:
    assert isinstance(setup.state.model, World)
    return setup.state.model


def steps(setup: Setup, num_steps: int) -> list[dict[str, float]]:
    set_training(setup.state.model)
    prefetcher = setup.prefetcher()
    rows = []
    for step in range(num_steps):
        signals = setup.stepper.step(step, prefetcher.take(step), setup.cfg.lr.learning_rate, Clock())
        rows.append({name: value.item() for name, value in signals.items()})
    prefetcher.close()
    return rows


def same_weights(a: Setup, b: Setup, part: str) -> bool:
    x, y = (getattr(networks(s), part).state_dict() for s in (a, b))
    return all(torch.equal(x[name], y[name]) for name in x)


def test_a_discriminator_that_nobody_trains_is_in_no_save(make: Callable[..., Setup]) -> None:
    """objectives() freezes it: what is frozen is known only after it was asked."""
    of_discriminator = {f"discriminator.{name}" for name, _ in networks(make()).discriminator.named_parameters()}
    assert set(make("stage=open_loop", "adversarial.weight=0").state.frozen) == of_discriminator
    assert make("stage=open_loop", "adversarial.weight=0.3").state.frozen == {}


def test_weight_zero_is_plain_l1_to_the_bit_and_leaves_the_discriminator_alone(make: Callable[..., Setup]) -> None:
    plain = (*PLAIN, "model.warp=last")
    ours, bare = make(*plain), make(*plain, "model.discriminator_width=8")
    steps(ours, 5)
    world, cfg = networks(bare), bare.cfg.optimizer
    matrices = [p for p in world.generator.parameters() if p.ndim >= 2]
    vectors = [p for p in world.generator.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=bare.cfg.lr.learning_rate,
        betas=(cfg.beta1, cfg.beta2),
        fused=True,
    )
    untouched = {name: p.clone() for name, p in world.discriminator.named_parameters()}
    set_training(world)
    prefetcher = bare.prefetcher()
    for step in range(5):
        (micro,) = prefetcher.take(step)
        memory = [to_signal(level).flatten(1, 2) for level in memory_of(micro.batch)]
        noise = micro.draw.noise("noise/0", (world.generator.noise_size,))
        control = world.standard(micro.batch["controls"][:, 0])
        made, _ = world.generator(memory, control, torch.zeros(len(control)), noise)
        real = to_signal(micro.batch["frames"][:, 0])
        loss = (made - real).abs().mean(dim=(1, 2, 3)).sum() / len(real)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prefetcher.close()
    assert same_weights(ours, bare, "generator")
    assert all(torch.equal(p, untouched[name]) for name, p in world.discriminator.named_parameters())
    fresh = make(*plain)
    assert same_weights(ours, fresh, "discriminator")
    assert not same_weights(ours, fresh, "generator")


@pytest.mark.parametrize("word", ["closed_loop.steps=0", "closed_loop.share=0"])
def test_a_closed_loop_without_rollouts_is_the_open_loop_to_the_bit(make: Callable[..., Setup], word: str) -> None:
    a, b = make(*PLAIN), make(*PLAIN, "stage=closed_loop", word)
    assert [row["loss/sum"] for row in steps(a, 4)] == [row["loss/sum"] for row in steps(b, 4)]
    assert same_weights(a, b, "generator")


def test_no_gradient_goes_through_what_was_dreamed(make: Callable[..., Setup]) -> None:
    """The gradient of a rollout is the sum of those of its frames, each made from a fixed memory."""
    setup = make("adversarial.weight=0", "context.noise=0", "model.warp=last")
    world, objective = networks(setup), setup.state.objectives[0]
    micro = next(m for step in range(20) for m in setup.prefetcher().take(step) if m.batch["frames"].shape[1] == 3)
    objective.loss(micro.batch, micro.draw).sum.backward()
    rolled = [p.grad.clone() for p in objective.parameters if p.grad is not None]
    world.zero_grad()
    memory = memory_of(micro.batch)
    for t in range(3):
        one: Batch = {f"memory_{i}": level for i, level in enumerate(memory)}
        one |= {name: micro.batch[name][:, t : t + 1] for name in ("frames", "controls", "valid")}
        draw = Renamed(micro.draw, t)
        objective.loss(one, draw).sum.backward()  # type: ignore[arg-type]
        with torch.no_grad():
            noise = micro.draw.noise(f"noise/{t}", (world.generator.noise_size,))
            seen = [to_signal(level).flatten(1, 2) for level in memory]
            control = world.standard(micro.batch["controls"][:, t])
            made, _ = world.generator(seen, control, torch.zeros(len(control)), noise)
            memory = push(memory, to_frame(made))
    apart = [p.grad for p in objective.parameters if p.grad is not None]
    for a, b in zip(rolled, apart, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Renamed:
    """A draw whose first frame takes the noise of frame t of a rollout."""

    def __init__(self, draw: Draw, t: int) -> None:
        self._draw, self._t, self.step, self.is_eval = draw, t, draw.step, draw.is_eval

    def noise(self, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        assert name == "noise/0"
        return self._draw.noise(f"noise/{self._t}", shape, device)


def test_context_noise_is_told_and_stays_out_of_evals(make: Callable[..., Setup]) -> None:
    overrides = ("stage=open_loop", "adversarial.weight=0")
    noisy, clean = make(*overrides, "context.noise=0.5"), make(*overrides, "context.noise=0")
    levels: list[torch.Tensor] = []
    networks(noisy).generator.register_forward_pre_hook(lambda _, args: levels.append(args[2].clone()))
    a, b = (setup.evaluator.run(setup.state.model)["validation"] for setup in (noisy, clean))
    assert a == b
    assert all((level == 0).all() for level in levels)
    levels.clear()
    assert steps(noisy, 1)[0]["loss/sum"] != steps(clean, 1)[0]["loss/sum"]
    assert len(torch.unique(torch.cat(levels))) > 4
    assert all(((level >= 0) & (level < 1)).all() for level in levels)


@given(
    st.integers(0, 20), st.integers(0, 500), st.floats(0, 20), st.floats(0.1, 1), st.integers(0, 2**31)
)  # fmt: skip
def test_the_curriculum_grows_smoothly(num: int, rise: int, start: float, share: float, seed: int) -> None:
    curriculum = Curriculum(ClosedLoop(num, rise, start, share), seed)
    means = [curriculum.mean(step) for step in range(rise + 5)]
    assert means[-1] == num
    assert all(0 <= b - a <= num / max(rise, 1) + 1e-9 for a, b in itertools.pairwise(means))
    lengths = [curriculum.length(step) for step in range(rise + 5)]
    assert all(length == 1 or int(mean) <= length - 1 <= int(mean) + 1 for length, mean in zip(lengths, means))
    assert curriculum.length(-1) == 1  # evals begin from real frames


def test_the_mean_of_the_lengths_is_what_was_asked_for() -> None:
    curriculum = Curriculum(ClosedLoop(steps=5, rise=0, start=0.0, share=0.6), seed=3)
    lengths = np.array([curriculum.length(step) for step in range(4000)])
    assert set(lengths) == {1, 6}
    assert abs((lengths > 1).mean() - 0.6) < 0.03
    halfway = Curriculum(ClosedLoop(steps=3, rise=2, start=0.0, share=1.0), seed=3)
    assert halfway.mean(1) == 1.5


def test_two_optimizers_with_settings_of_their_own(make: Callable[..., Setup]) -> None:
    setup = make("adversarial.lr_scale=0.25", "adversarial.beta1=0.3", "optimizer.beta1=0.8")
    steps(setup, 1)
    (g,), (d,) = (objective.optimizers for objective in setup.state.objectives)
    assert d.param_groups[0]["lr"] == pytest.approx(0.25 * g.param_groups[0]["lr"])
    assert (g.param_groups[0]["betas"][0], d.param_groups[0]["betas"][0]) == (0.8, 0.3)


def test_the_health_of_the_two_is_recorded(make: Callable[..., Setup]) -> None:
    rows = steps(make("stage=open_loop", "adversarial.every=1"), 3)
    assert 0 <= rows[0]["discriminator/accuracy/sum"] / rows[0]["discriminator/accuracy/count"] <= 1
    assert rows[0]["discriminator/r1/count"] > 0
    assert rows[1]["discriminator/r1/count"] == 0  # adversarial.r1_every=2
    assert rows[0]["grad_ratio/sum"] > 0
    assert rows[1]["grad_ratio/count"] == 0


@pytest.mark.parametrize(("every", "r1_every"), [(1, 1), (1, 4), (2, 4), (4, 4), (3, 2)])
def test_r1_has_the_strength_that_was_asked_for_at_any_cadence(
    make: Callable[..., Setup], every: int, r1_every: int
) -> None:
    """Over the updates of the discriminator, a penalty every n-th time and n times as strong."""
    overrides = ("stage=open_loop", "context.noise=0", "adversarial.r1=2")
    setup = make(*overrides, f"adversarial.every={every}", f"adversarial.r1_every={r1_every}")
    objective, prefetcher = setup.state.objectives[1], setup.prefetcher()
    due = [step for step in range(24) if step % objective.every == 0]
    extra = []
    for step in due:
        micro = prefetcher.take(step)[0]
        loss = objective.loss(micro.batch, micro.draw)
        r1, count = loss.parts["r1"]
        extra.append((loss.sum - loss.parts["hinge"][0]).item())
        assert extra[-1] == pytest.approx(r1_every * r1.item() if count else 0, abs=1e-5)
    prefetcher.close()
    num_due = len(due) // r1_every if len(due) % r1_every == 0 else len(due) // r1_every + 1
    assert sum(value > 0 for value in extra) == num_due


def test_an_unknown_control_is_at_the_mean_and_told_to_be_unknown() -> None:
    standard = Standard([5.0, 0.05, 1.0], [2.0, 0.001, 1.0])
    known, unknown = torch.tensor([7.0, 0.051, 1.0]), torch.tensor([0.0, 0.0, 0.0])
    assert torch.allclose(standard(known), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)
    assert standard(unknown).tolist() == [0, 0, -1]


def test_the_best_save_of_a_closed_loop_is_chosen_by_rollouts(make: Callable[..., Setup]) -> None:
    assert next(iter(make("stage=closed_loop").evaluator.streams)) == "rollout"
    assert next(iter(make("stage=open_loop").evaluator.streams)) == "validation"


def test_a_budget_in_targets_counts_the_frames_of_rollouts(make: Callable[..., Setup]) -> None:
    overrides = ("stage=closed_loop", "closed_loop.share=1", "closed_loop.rise=0", "closed_loop.steps=3")
    assert make(*overrides, "data.batch_size=4", "optimizer.max_iters=64tokens", "lr.warmup_iters=0").num_steps == 4


def test_data_without_a_held_out_split_can_be_trained_on(tmp_path: Path) -> None:
    path = write_store(tmp_path / "world", (40, 40), splits=("train", "train"))
    setup = world_case(path).setup("stage=open_loop", "adversarial.weight=0")
    assert setup.evaluator.run(setup.state.model) == {}
    steps(setup, 2)


def test_the_recorded_ratio_is_that_of_the_two_gradients(make: Callable[..., Setup]) -> None:
    """Against autograd at the made frame: the weighted pull of the discriminator over that of L1, by row."""
    setup = make("stage=open_loop", "context.noise=0", "adversarial.weight=0.3", "model.warp=last")
    world, micro = networks(setup), setup.prefetcher().take(0)[0]
    loss: Loss = setup.state.objectives[0].loss(micro.batch, micro.draw)
    memory, controls = memory_of(micro.batch), world.standard(micro.batch["controls"][:, 0])
    noise = micro.draw.noise("noise/0", (world.generator.noise_size,))
    seen = [to_signal(level).flatten(1, 2) for level in memory]
    made = world.generator(seen, controls, torch.zeros(len(controls)), noise)[0].detach().requires_grad_()
    fooling = -world.discriminator(made, last_of(memory), controls).mean(dim=(1, 2, 3)).sum()
    error = (made - to_signal(micro.batch["frames"][:, 0])).abs().mean(dim=(1, 2, 3)).sum()
    pulls = [torch.autograd.grad(part, made)[0].flatten(1).norm(dim=1) for part in (fooling, error)]
    want = (0.3 * pulls[0] / pulls[1]).sum().item()
    assert loss.parts["grad_ratio"][0].item() == pytest.approx(want, rel=1e-4)


def test_a_flow_moves_pixels_where_it_says() -> None:
    picture = torch.rand(1, 3, 6, 8)
    flow = torch.zeros(1, 2, 6, 8)
    assert torch.allclose(move(picture, flow), picture, atol=1e-6)
    flow[:, 0] = 2 * 2 / 8  # two pixels to the right, in half pictures
    assert torch.allclose(move(picture, flow)[..., :-2], picture[..., 2:], atol=1e-6)


def test_identity_refuses_other_controls_and_other_memories(make: Callable[..., Setup], data: Path) -> None:
    a, b = make(*PLAIN), make(*PLAIN, "model.memory=[2@16x12,5@8x6]")
    assert a.identity != b.identity
    assert a.identity["controls"][4] == "turn_right"
    assert isinstance(a.recipe, Recipe)


def blurred(pictures: torch.Tensor, side: int = 5) -> torch.Tensor:
    return F.avg_pool2d(F.pad(pictures, (side // 2,) * 4, mode="replicate"), side, stride=1)


def test_a_new_discriminator_sees_blur(data: Path) -> None:
    """With torch's own first weights a frame and its blurred copy scored 0.0007 apart, under a margin of 1."""
    frames = to_signal(torch.from_numpy(np.array(Store.open(data).arrays["frames"][::20])))
    controls = torch.zeros(len(frames), 10)
    for seed in range(3):
        discriminator = Discriminator(10, 16, 48)
        reset_by_name(discriminator, seed)
        with torch.no_grad():
            x = torch.cat([frames, frames], dim=1)
            for layer in discriminator.layers:
                x = F.leaky_relu(layer(x), SLOPE)
                assert 0.2 < x.std() < 4
            scores = [discriminator(each, frames, controls).mean(dim=(1, 2, 3)) for each in (frames, blurred(frames))]
        assert (scores[0] - scores[1]).abs().mean() > 0.01


def slide(generator: Generator, pixels: float) -> None:
    """All pixels come from so many to the right, without doubt."""
    width = 64
    with torch.no_grad():
        generator.head.weight.zero_()
        generator.head.bias.zero_()
        generator.head.bias[12:16] = math.atanh(2 * pixels / width / LARGEST_FLOW)
        generator.head.bias[20:24] = 20.0


def test_a_keyframe_is_resampled_once() -> None:
    """A slide of half a pixel, sixteen times: copying from the last frame blurs it away, copying from the keyframe
    gives the keyframe itself, eight pixels further."""
    torch.manual_seed(0)
    frame = torch.randint(0, 256, (1, 1, 48, 64, 3), dtype=torch.uint8)
    scales = [Scale(1, 64, 48)]
    found = {}
    for warp in ("last", "keyframe"):
        generator = Generator(scales, 10, 4, 1, 0.0, warp)
        slide(generator, 0.5)
        world = World(generator, Discriminator(10, 4, 48), Standard([0.0] * 10, [1.0] * 10), torch.zeros(3, 48, 64))
        with torch.no_grad():
            rolled = Dreamer(world).roll([frame], torch.ones(1, 16, 10), Draw(0, -1, np.array([0])))
            found[warp] = to_signal(to_frame([made for _, made in rolled][-1]))
    truth = to_signal(frame[:, 0])[..., 8:]
    inside = slice(0, 64 - 8 - 10)  # at its border what is known fades out
    assert (found["keyframe"][..., :-8] - truth)[..., inside].abs().mean() < 0.01
    assert (found["last"][..., :-8] - truth)[..., inside].abs().mean() > 0.3
    sharp, flat = (gradient_energy(found[warp])[..., inside].mean() for warp in ("keyframe", "last"))
    assert flat < 0.2 * sharp


def test_pixels_that_come_into_view_are_not_taken_from_the_keyframe() -> None:
    """Where the frame before was not trusted, its own pixels are moved on, and not those of the keyframe."""
    last, keyframe = torch.full((1, 3, 48, 64), 0.5), torch.full((1, 3, 48, 64), -0.5)
    known = torch.ones(1, 1, 48, 64)
    known[..., 32:] = 0
    generator = Generator([Scale(1, 64, 48)], 10, 4, 1, 0.0, "keyframe")
    slide(generator, 0.0)
    anchor = Anchor(keyframe, torch.zeros(1, 2, 48, 64), known)
    noise = torch.full((1, generator.noise_size), 0.5)
    with torch.no_grad():
        made, after = generator([last], torch.zeros(1, 10), torch.zeros(1), noise, anchor)
    assert torch.allclose(made[..., :31], torch.tensor(-0.5), atol=1e-4)
    assert torch.allclose(made[..., 33:], torch.tensor(0.5), atol=1e-4)
    assert torch.allclose(after.known_B1HW, known)


def test_beyond_the_border_of_a_keyframe_nothing_is_known() -> None:
    """A slide of ten pixels in all: the last ten columns do not come from the keyframe, whatever the trust."""
    generator = Generator([Scale(1, 64, 48)], 10, 4, 1, 0.0, "keyframe")
    slide(generator, 2.0)
    frame, noise = torch.rand(1, 3, 48, 64) - 0.5, torch.full((1, generator.noise_size), 0.5)
    anchor: Anchor | None = new_anchor(frame)
    with torch.no_grad():
        for _ in range(5):
            _, anchor = generator([frame], torch.zeros(1, 10), torch.zeros(1), noise, anchor)
    assert anchor is not None
    assert anchor.known_B1HW[0, 0].eq(1).all(dim=0).tolist() == [True] * 54 + [False] * 10
    assert anchor.known_B1HW[..., 54:].eq(0).all()


def test_contrast_sees_blur_that_l1_prefers() -> None:
    """Of two guesses of a pattern, one shifted by two pixels and one grey, L1 takes the grey one."""
    torch.manual_seed(0)
    real = (torch.rand(4, 3, 48, 64) > 0.5).float()
    shifted, grey = real.roll(2, -1), torch.full_like(real, 0.5)
    assert l1(shifted, real).mean() > 0.99 * l1(grey, real).mean()
    assert contrast_error(shifted, real, 8).mean() < 0.2 * contrast_error(grey, real, 8).mean()
    assert contrast_error(real, real, 8).eq(0).all()


def test_contrast_is_a_part_of_the_loss_in_training_alone(make: Callable[..., Setup]) -> None:
    with_it, without = make(*PLAIN, "contrast.weight=0.5"), make(*PLAIN)
    a, b = steps(with_it, 1)[0], steps(without, 1)[0]
    assert a["l1/sum"] == b["loss/sum"]
    assert a["loss/sum"] == pytest.approx(a["l1/sum"] + 0.5 * a["contrast/sum"], rel=1e-5)
    fresh = make(*PLAIN, "contrast.weight=0.5"), make(*PLAIN)
    found = [setup.evaluator.run(setup.state.model)["validation"] for setup in fresh]
    assert found[0] == found[1]


def test_a_warp_that_is_not_finite_does_not_end_the_process() -> None:
    flow = torch.full((1, 2, 12, 16), float("nan"), requires_grad=True)
    move(torch.rand(1, 3, 12, 16, requires_grad=True), flow).sum().backward()
    assert flow.grad is not None
