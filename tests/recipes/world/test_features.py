"""If this fails, the distance of dreamed frames from real ones is not what it is called, or not the same twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rung.data.store import Store
from rung.recipes.world import data, features
from rung.recipes.world.config import Dataset
from rung.recipes.world.features import Features, frechet, told_apart
from rung.recipes.world.memory import to_signal
from tests.contract.cases import world as world_case
from tests.recipes.world.stores import write_store
from tests.recipes.world.synthetic import film


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as it was prepared before it had features."""
    return write_store(tmp_path_factory.mktemp("features") / "world", (300, 160), splits=("train", "validation"))


@pytest.fixture(scope="module")
def kept(path: Path) -> dict[str, object]:
    frames = Store.open(path).arrays["frames"]
    return features.train(frames, np.arange(300), 1, 3, ignore)


def test_the_distance_of_two_normal_distributions() -> None:
    """With independent features: the means' and the deviations' squared differences."""
    torch.manual_seed(0)
    points = torch.randn(20_000, 3)
    points = (points - points.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(points.T, correction=0))).T
    scale, centre = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 0.0, -2.0])
    want = ((scale - 1).square() + centre.square()).sum().item()
    assert frechet(points, points * scale + centre).item() == pytest.approx(want, rel=1e-3)
    assert frechet(points, points.flip(0)).item() == pytest.approx(0, abs=1e-6)
    assert frechet(torch.zeros(5, 3), torch.zeros(5, 3)).item() == 0


def test_a_classifier_is_right_where_there_is_something_to_be_right_about() -> None:
    torch.manual_seed(0)
    real, alike, apart = torch.randn(40, 20, 6), torch.randn(40, 20, 6), torch.randn(40, 20, 6) + 1
    assert told_apart(real, alike).shape == (20,)
    assert 0.3 < told_apart(real, alike).mean() < 0.7
    assert told_apart(real, apart).mean() == 1
    assert told_apart(real, torch.randn(40, 20, 6) * 2).mean() > 0.9  # one centre, another spread


def test_the_same_seed_gives_the_same_network_whatever_came_before(path: Path, kept: dict[str, object]) -> None:
    frames = Store.open(path).arrays["frames"]
    torch.manual_seed(99)
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    assert features.train(frames, np.arange(300), 1, 3, ignore) == kept
    assert features.train(frames, np.arange(300), 1, 4, ignore)["fingerprint"] != kept["fingerprint"]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads


def test_more_blur_is_further_away(kept: dict[str, object]) -> None:
    net = features.load(kept)
    real = to_signal(torch.from_numpy(film(64, seed=9).frames))
    distances = [0.0]
    for side in (3, 5, 9):
        soft = F.avg_pool2d(F.pad(real, (side // 2,) * 4, mode="replicate"), side, stride=1)
        distances.append(frechet(net(real).flatten(0, 1), net(soft).flatten(0, 1)).item())
    assert distances == sorted(distances)
    assert distances[1] > 0.001


def test_features_have_mean_0_and_deviation_1(path: Path, kept: dict[str, object]) -> None:
    seen = features.load(kept)(to_signal(torch.from_numpy(np.array(Store.open(path).arrays["frames"][:300]))))
    assert seen.shape == (300, 48, 32)
    assert seen.mean((0, 1)).abs().max() < 0.1
    assert ((seen.std((0, 1)) - 1).abs() < 0.1).all()


@pytest.mark.parametrize(
    ("height", "divisors", "want"), [(96, [1, 2, 4], 2), (48, [1, 2, 4], 1), (192, [1, 2, 4], 4), (24, [1, 2], 1)]
)
def test_the_size_it_looks_at(height: int, divisors: list[int], want: int) -> None:
    assert features.divisor_for(height, divisors) == want


def test_a_prepared_store_has_the_network_and_its_hash_does_not_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of two machines is the same to the byte; weights that were trained are not."""
    from rung.recipes.world.sources import find
    from rung.recipes.world.sources.episode import Episode

    reel = film(120, seed=1)
    (tmp_path / "source").mkdir()
    monkeypatch.setattr(
        find,
        "find_episodes",
        lambda source, cfg: [Episode(f"drive {n}", reel.times, reel.frames, poses=reel.poses) for n in range(4)],
    )
    cfg = Dataset(width=64, height=48)
    data.prepare(tmp_path / "source", tmp_path / "a", cfg, 0, False, ignore)
    train = features.train
    monkeypatch.setattr(features, "train", lambda *args: {**train(*args), "fingerprint": "another"})
    data.prepare(tmp_path / "source", tmp_path / "b", cfg, 0, False, ignore)
    one, other = (Store.open(tmp_path / name) for name in "ab")
    assert isinstance(features.load(one.info["features"]), Features)
    assert one.info["features"]["fingerprint"] != other.info["features"]["fingerprint"]
    assert one.fingerprint == other.fingerprint


def test_dreams_are_measured_together_and_a_store_without_features_lacks_that(
    path: Path, kept: dict[str, object], tmp_path: Path
) -> None:
    words = ("adversarial.weight=0", "context.noise=0", "model.memory=[2@32x24,4@8x6]", "evaluation.horizon=8")
    without = world_case(path).setup(*words)
    assert "dreams" not in without.evaluator.streams
    films = [film(300, 0), film(160, 1)]
    from tests.recipes.world.stores import controls_of, write_films

    with_them = write_films(
        tmp_path / "w", films, [controls_of(each) for each in films], ("train", "validation"),
        features={**kept, "divisor": 2},
    )  # fmt: skip
    setup = world_case(with_them).setup(*words, "evaluation.num_rollouts=20")
    found = setup.evaluator.run(setup.state.model)["dreams"]
    assert {f"{name}@{h}" for name in ("feature_distance", "told_apart") for h in (1, 2, 4, 8)} <= set(found)
    assert all(found[f"feature_distance@{h}"] >= 0 and 0 <= found[f"told_apart@{h}"] <= 1 for h in (1, 2, 4, 8))
    assert found["targets"] == 20
    # a model coarser than what the network looks at has no figure, not a wrong one
    coarse = world_case(with_them).setup(*words[:2], "model.memory=[2@16x12]", "evaluation.horizon=8")
    assert "dreams" not in coarse.evaluator.streams
