"""If this fails, walking in a world is not what the model was trained for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rung.engine.build import Setup
from rung.engine.evaluate import eval_mode
from rung.random import Draw
from rung.recipe import Player
from rung.recipes.world.memory import to_frame
from tests.contract.cases import world as world_case
from tests.errors import raises_code
from tests.recipes.world.stores import write_store
from tests.recipes.world.synthetic import Film


@pytest.fixture
def setup(world_data: Path) -> Setup:
    """With weights that are not the first ones, or the controls would do nothing yet."""
    made = world_case(world_data).setup("adversarial.weight=0", "context.noise=0.3")
    with torch.no_grad():
        for parameter in made.state.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    made.state.model.eval()
    return made


@pytest.fixture
def player(setup: Setup) -> Player:
    return setup.recipe.player(setup.state.model)


def test_following_a_recording_is_the_rollout_of_an_eval(setup: Setup, player: Player) -> None:
    """The same frames to the bit: one memory, one noise, one quantisation for both."""
    stream = setup.streams["rollout"]
    first = np.array([0])
    batch = {k: torch.from_numpy(v) for k, v in stream.gather(first, Draw(setup.cfg.seed, -1, first)).items()}
    dreamer = setup.recipe._dreamer(setup.state.model)  # type: ignore[attr-defined]
    memory = [batch[f"memory_{i}"] for i in range(2)]
    with eval_mode(setup.state.model):
        draw = Draw(setup.cfg.seed, -1, first)
        rolled = [to_frame(m)[0].numpy() for _, m in dreamer.roll(memory, batch["controls"], draw)]
    place = [label["label"].endswith("(validation)") for label in player.about()["places"]].index(True)
    walk = player.walk(place)
    for t, want in enumerate(rolled):
        view = walk.follow()
        assert view is not None
        assert np.array_equal(view.real, batch["frames"][0, t].numpy())
        assert view.given == view.wanted
        assert np.array_equal(np.float32(view.given), batch["controls"][0, t].numpy())
        assert np.array_equal(view.frame, want)
    assert t == 3


def test_a_walk_ends_where_the_recording_does(player: Player) -> None:
    length = player.about()["places"][0]["length"]
    walk = player.walk(0)
    views = [walk.follow() for _ in range(length + 1)]
    assert [view is None for view in views] == [False] * length + [True]
    assert player.walk(0, length).follow() is None
    off = player.walk(0)
    off.step({})
    assert off.follow() is None  # who left the path cannot follow it


def test_intents_move_their_own_channel_and_no_other(player: Player) -> None:
    names = [control["name"] for control in player.about()["controls"]]
    rest = dict(zip(names, player.walk(0).step({}).wanted, strict=True))
    for intent, channel in (("forward", "forward"), ("turn", "turn_right"), ("right", "right")):
        there = dict(zip(names, player.walk(0).step({intent: 1.0}).wanted, strict=True))
        assert {name for name in names if there[name] != rest[name]} == {channel}
        assert there[channel] > 0
    assert rest["forward"] == rest["turn_right"] == 0
    assert rest["valid"] == 1
    assert rest["dt"] == pytest.approx(0.05, rel=0.1)
    looked = dict(zip(names, player.walk(0).step({"look": 1.0}).wanted, strict=True))
    assert looked["pitch"] - rest["pitch"] == pytest.approx(looked["look_up"])  # an angle follows its move


def test_what_is_out_of_range_is_clamped_and_told(player: Player) -> None:
    about = player.about()
    view = player.walk(0).step({"turn": 50.0})
    channel = [control["name"] for control in about["controls"]].index("turn_right")
    assert view.given[channel] == pytest.approx(about["controls"][channel]["high"])
    assert view.wanted[channel] > view.given[channel]
    assert view.frame.shape == (about["height"], about["width"], 3)


def test_looking_up_for_long_ends_at_the_highest_pitch_of_the_data(player: Player) -> None:
    about = player.about()
    names = [control["name"] for control in about["controls"]]
    pitch = names.index("pitch")
    walk = player.walk(0)
    seen = [walk.step({"look": 1.0}).given[pitch] for _ in range(60)]
    assert seen[-1] == pytest.approx(about["controls"][pitch]["high"])
    assert seen == sorted(seen)
    assert walk.step({"look": -1.0}).given[pitch] < seen[-1]  # and comes down at once: nothing was wound up


def test_a_look_that_is_clamped_moves_the_pitch_by_what_was_left_of_it(player: Player) -> None:
    about = player.about()
    names = [control["name"] for control in about["controls"]]
    look, pitch = names.index("look_up"), names.index("pitch")
    walk, before = player.walk(0), player.walk(0).step({}).given[pitch]
    for _ in range(40):
        view = walk.step({"look": 3.0})
        assert view.given[look] == pytest.approx(view.given[pitch] - before, abs=1e-7)
        assert view.given[look] <= about["controls"][look]["high"] + 1e-9
        before = view.given[pitch]
    assert view.given[look] == pytest.approx(0, abs=1e-7)  # at the end of the range looking up is no move
    assert view.wanted[look] > 0


def test_recorded_controls_called_pitch_and_roll_are_sticks_and_no_angles(setup: Setup) -> None:
    """Whoever flies a drone has such channels; they are asked for, not kept."""
    store = setup.recipe.store  # type: ignore[attr-defined]
    store.info["control_kind"] = "recorded"
    store.info["intents"] = {"look": ["pitch", 1]}
    player = setup.recipe.player(setup.state.model)
    names = [control["name"] for control in player.about()["controls"]]
    up, down = (player.walk(0).step({"look": way}).wanted[names.index("pitch")] for way in (1.0, -1.0))
    assert up == -down > 0


def test_a_frame_that_is_not_finite_is_not_shown(setup: Setup, player: Player) -> None:
    with torch.no_grad():
        next(setup.state.model.parameters()).fill_(float("nan"))
    with raises_code("not-finite"):
        player.walk(0).step({})


def test_two_walks_share_nothing(player: Player) -> None:
    alone, beside, other = player.walk(0), player.walk(0), player.walk(1)
    for number in range(5):
        a = alone.step({"forward": 1.0, "turn": 0.5})
        other.step({"turn": -1.0})
        b = beside.step({"forward": 1.0, "turn": 0.5})
        assert np.array_equal(a.frame, b.frame), number


def test_controls_change_the_picture(player: Player) -> None:
    left, right = (player.walk(0).step({"turn": way}).frame.astype(int) for way in (-1.0, 1.0))
    assert np.abs(left - right).max() > 0


def test_a_walk_begins_where_there_is_something_to_see(tmp_path: Path) -> None:
    """Not in the dark, not before a blank wall, and not on a map that the model does not know."""

    def change(episode: int, reel: Film) -> Film:
        frames = np.full_like(reel.frames, (20, 220, 20, 90)[episode])  # dark; bright and blank; dark; unseen
        rng = np.random.default_rng(episode)
        if episode == 2:
            frames[30:33] = rng.integers(120, 256, frames[30:33].shape)
        if episode == 3:
            frames[:] = rng.integers(100, 256, frames.shape)
        return reel._replace(frames=frames)

    path = write_store(
        tmp_path / "world", (60, 60, 60, 60), splits=("train", "train", "validation", "unseen"), change=change
    )
    setup = world_case(path).setup("adversarial.weight=0")
    player = setup.recipe.player(setup.state.model.eval())
    about = player.about()
    assert [place["label"] for place in about["places"]] == [
        "film 2 (validation)", "film 0 (train)", "film 1 (train)", "film 3 (unseen)",
    ]  # fmt: skip
    assert about["start"]["place"] == 0
    assert 31 <= about["start"]["offset"] + 4 <= 33  # the newest of 4 remembered frames is one of the bright ones
    player.walk(**about["start"]).step({})


def test_what_is_told_is_plain_and_places_are_checked(player: Player) -> None:
    about = json.loads(json.dumps(player.about()))
    assert about["intents"] == ["forward", "right", "turn", "look"]
    for place in (-1, len(about["places"])):
        with raises_code("no-place"):
            player.walk(place)
    with raises_code("bad-range"):
        player.walk(0, about["places"][0]["length"] + 1)
