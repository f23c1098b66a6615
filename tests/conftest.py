"""What many tests share: small data, and rung called as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and what no terminal reads is as wide as it needs to be
hypothesis.settings.register_profile("rung", deadline=None)  # no timing in tests
hypothesis.settings.load_profile("rung")
torch.set_num_threads(1)  # two test processes share two cores

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Real test data beside the checkout; the test is skipped where it is not there."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}")
    return path


@pytest.fixture(scope="session")
def piano_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small piano store of made-up tunes, prepared from MIDI files as a user's would be."""
    from rung.recipes.piano import data, midi, notes

    folder, out = tmp_path_factory.mktemp("tunes"), tmp_path_factory.mktemp("data") / "tunes"
    rng = np.random.default_rng(0)
    for number in range(12):
        num_notes = 12 + 3 * number  # unequal, so that some rows are short
        starts = np.cumsum(rng.choice([0.1, 0.2, 0.4], size=num_notes))
        lengths = rng.choice([0.1, 0.3], size=num_notes)
        pitches = 60 + np.cumsum(rng.choice([-2, -1, 1, 2], size=num_notes)) % 24
        tune = notes.make(starts, starts + lengths, pitches, rng.integers(40, 90, size=num_notes))
        (folder / f"tune{number:02d}.mid").write_bytes(midi.write_midi(tune))
    data.prepare(folder, out, pause_detection_threshold=4.0, seed=0)
    return out


@pytest.fixture(scope="session")
def music_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store of made-up songs of unequal length, left and right, with texts."""
    from tests.recipes.music.songs import write_songs, write_store

    folder = write_songs(tmp_path_factory.mktemp("songs"))
    return write_store(tmp_path_factory.mktemp("data") / "songs", folder, "dataset.stereo=true")


@pytest.fixture(scope="session")
def speech_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store of tones that spell words, by six speakers, with two tasks; a language model lies beside it."""
    from tests.recipes.speech.stores import make_store, write_lm

    pytest.importorskip("transformers", reason="the speech model is made of transformers' parts")
    folder = tmp_path_factory.mktemp("speech")
    write_lm(folder / "lm")
    return make_store(folder)


@pytest.fixture(scope="session")
def world_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world store of synthetic films; the short ones end inside a rollout."""
    from tests.recipes.world.stores import write_store

    out = tmp_path_factory.mktemp("data") / "world"
    return write_store(out, (12, 9, 8, 11, 13, 14, 9), splits=("train",) * 6 + ("validation",))


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store of made-up text as bytes, in three categories; some documents are shorter than a row of 48."""
    from tests.recipes.text.stores import write_letters

    return write_letters(tmp_path_factory.mktemp("data") / "letters")


@pytest.fixture
def rung(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `rung ...` in an empty folder, in a process of its own."""

    def call(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "rung", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if check:
            assert done.returncode == 0, done.stderr + done.stdout
        return done

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes before seconds, so that no core waits for the last long test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
