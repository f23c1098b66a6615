"""If this fails, files that cannot be used, or that are silent in parts, decide what is validated on or end it all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rung.data.audio import Recording, levels, wav_bytes
from rung.data.store import Store
from rung.recipes.music.data import CodeStatistics, assign_splits, codec_of, open_store, original_of
from rung.recipes.music.recipe import Music
from rung.recipes.music.sources import Track
from rung.recipes.music.survey import survey
from tests.contract.cases import music
from tests.errors import raises_code
from tests.recipes.music.songs import RATE, song, write_songs, write_store

pytest.importorskip("soundfile")


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def write(folder: Path, sounds: dict[str, np.ndarray], rate: int = RATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, sound in sounds.items():
        (folder / f"{name}.wav").write_bytes(wav_bytes(sound, rate))
    return folder


def of_length(**seconds: float) -> list[Track]:
    def read(sample_rate: int) -> Recording:
        return Recording(np.zeros((0, 1), np.float32), 1, levels(np.zeros(0), sample_rate))

    return [Track(f"{piece}.wav", piece, "", read, seconds=length) for piece, length in seconds.items()]


def lengths_of(tracks: list[Track], split_of: dict[str, str]) -> Counter[str]:
    found = Counter[str]()
    for track in tracks:
        found[split_of[track.piece]] += track.seconds  # type: ignore[assignment]
    return found


# What can be used


@pytest.mark.parametrize("seed", range(3))
def test_bad_files_take_no_place_in_a_split(seed: int, tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs", 4)
    whole = (folder / "song-1.wav").read_bytes()
    for number in range(12):
        (folder / f"{'abcdefghijkl'[number]}-cut.wav").write_bytes(whole[: len(whole) // 2])
    (folder / "cover.jpg").write_bytes(b"x")
    store = Store.open(write_store(tmp_path / "data", folder, seed=seed))
    assert Counter(record["split"] for record in store.index) == {"train": 2, "validation": 1, "test": 1}
    summary = store.info["summary"]
    assert "quarantined 12 sound files (a-cut.wav and 11 more: is cut off" in summary
    assert "1 piece, 1 track," in summary
    assert [item["file"] for item in store.info["remarks"]] == [folder.as_posix()]


def test_nothing_to_learn_from_says_why(tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs", 3)
    for path in folder.glob("*.wav"):
        path.write_bytes(path.read_bytes()[:2000])
    with raises_code("data-empty") as caught:
        write_store(tmp_path / "data", folder)
    assert "3 tracks could not be used (song-0.wav" in str(caught.value)
    assert "is cut off" in str(caught.value)


def test_what_cancels_out_is_used_in_stereo_alone(tmp_path: Path) -> None:
    tunes = {f"tune-{n}": song(n, 4) for n in range(6)}
    folder = write(tmp_path / "in", {**tunes, "anti": song(9, 4)[:, :1] * np.array([1, -1], np.float32)})
    store = Store.open(write_store(tmp_path / "mono", folder))
    [bad] = store.info["quarantined"]
    assert bad["file"] == "anti.wav"
    assert "dataset.stereo=true" in bad["reason"]
    stereo = Store.open(write_store(tmp_path / "stereo", folder, "dataset.stereo=true"))
    assert not stereo.info["quarantined"]


# Splits


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_of_few_pieces_is_trained_on(seed: int) -> None:
    for lengths in ((5, 61, 133), (5, 133, 133), (1, 1, 100, 100), (60, 60, 60), (1, 1, 1, 1, 1, 500)):
        tracks = of_length(**{f"p{n}": float(length) for n, length in enumerate(lengths)})
        found = lengths_of(tracks, assign_splits(tracks, seed))
        assert set(found) == {"train", "validation", "test"}
        assert found["train"] >= max(lengths)
    two = of_length(a=10.0, b=50.0)
    assert assign_splits(two, seed) == {"a": "validation", "b": "train"}
    assert assign_splits(of_length(a=10.0), seed) == {"a": "train"}


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_held_out_by_time(seed: int) -> None:
    chance = np.random.default_rng(seed)
    tracks = of_length(**{f"p{n}": float(length) for n, length in enumerate(chance.lognormal(5, 1.2, 200))})
    found = lengths_of(tracks, split_of := assign_splits(tracks, seed))
    for split in ("validation", "test"):
        assert 0.03 < found[split] / found.total() < 0.09
    more = [*tracks, *of_length(new=150.0)]
    after = assign_splits(more, seed)
    assert sum(after[piece] != split for piece, split in split_of.items()) <= 4
    assert assign_splits(more[::-1], seed) == after
    assert assign_splits(more, seed + 100) != after


def test_a_validation_that_says_little_is_remarked(tmp_path: Path) -> None:
    def summary_of(*seconds: float) -> str:
        folder = write(tmp_path / f"{seconds}", {f"t{n}": song(n, one) for n, one in enumerate(seconds)})
        return str(Store.open(write_store(tmp_path / "data", folder)).info["summary"])

    assert "validation lasts 3.0 s: its loss says little" in summary_of(3, 20)
    assert "its loss says little" not in summary_of(12, 20)


# Silence


@pytest.mark.parametrize("stereo", [False, True])
def test_silence_within_held_out_tracks_ends_nothing(stereo: bool, tmp_path: Path) -> None:
    """At the beginning, in the middle, or on one side."""
    pytest.importorskip("PIL")
    silence, right = np.zeros((11 * RATE, 2), np.float32), np.array([0, 1], np.float32)
    sounds = {}
    for number in range(4):
        tune = song(number, 12) * right
        sounds[f"tune-{number}"] = np.concatenate([silence, tune[: 6 * RATE], silence, tune[6 * RATE :]])
    out = write_store(tmp_path / "data", write(tmp_path / "in", sounds), f"dataset.stereo={str(stereo).lower()}")
    store = Store.open(out)
    measured = store.info["codec"]["reconstruction"]
    assert [one["codebooks"] for one in measured] == [1, 2, 3]
    assert all(np.isfinite(one["si_sdr_db"]) for one in measured)
    survey(store, codec_of(store), tmp_path / "report", quiet, original_of(store))


# Further data


def recipe_of(base: Path, *words: str) -> Music:
    recipe = music(base).setup(*words).recipe
    assert isinstance(recipe, Music)
    return recipe


def test_what_the_base_holds_out_is_not_trained_on_in_other_data(tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs")
    base = write_store(tmp_path / "base", folder)
    held = [record for record in Store.open(base).index if record["split"] != "train"]
    # The same folder, split otherwise; and its files under other names in another folder.
    renamed = tmp_path / "other"
    renamed.mkdir()
    for number, path in enumerate(sorted(folder.glob("*.wav"))):
        (renamed / f"{chr(97 + number)}.wav").write_bytes(path.read_bytes())
    names = [
        str(write_store(tmp_path / f"{where.name}-{seed}", where, f"codec.path={base}", seed=seed))
        for where in (folder, renamed)
        for seed in (1, 2, 3)
    ]
    recipe = recipe_of(base, f"dataset.extra_datasets=[{','.join(names)}]")
    held_codes = {codes_of(recipe.store, record) for record in held}
    for store in recipe.extra:
        records = [store.index[number] for number in store.split("train").tolist()]
        assert not {codes_of(store, record) for record in records} & held_codes
        assert store.num_left_out <= len(held)
        assert (store.fingerprint != Store.open(store.path).fingerprint) == bool(store.num_left_out)
    num_left_out = [store.num_left_out for store in recipe.extra]
    assert any(num_left_out[:3])
    assert any(num_left_out[3:])
    lines = recipe.describe("").lines
    assert sum("left out, as" in line for line in lines) == sum(map(bool, num_left_out))
    # Another set of which nothing is held out is trained on whole.
    others = write(tmp_path / "third", {f"tune-{n}": song(50 + n, 4) for n in range(3)})
    third = write_store(tmp_path / "data3", others, f"codec.path={base}")
    recipe = recipe_of(base, f"dataset.extra_datasets=[{third}]")
    assert recipe.extra[0].fingerprint == Store.open(third).fingerprint
    assert not any("left out" in line for line in recipe.describe("").lines)


def test_another_version_of_a_held_out_piece_is_left_out(tmp_path: Path) -> None:
    """As the embedded music of another seed has: the same piece, played by others."""
    folder = write_songs(tmp_path / "songs", 6)
    base = write_store(tmp_path / "base", folder)
    held = {record["piece"] for record in Store.open(base).index if record["split"] != "train"}
    for path in folder.glob("*.wav"):
        path.write_bytes(wav_bytes(song(77, 5), RATE) + path.stem.encode())  # no copies of each other
    again = write_store(tmp_path / "again", folder, f"codec.path={base}", seed=3)
    [store] = recipe_of(base, f"dataset.extra_datasets=[{again}]").extra
    assert not {store.index[number]["piece"] for number in store.split("train").tolist()} & held


def codes_of(store: Store, record: dict[str, Any]) -> bytes:
    return bytes(np.asarray(store.arrays["codes"][record["start"] : record["start"] + record["length"]]).tobytes())


# What is written down


def test_channels_and_clipping_are_those_of_the_file(tmp_path: Path) -> None:
    sounds = {f"tune-{n}": song(n, 6).repeat(2, axis=0) for n in range(3)}
    for sound in sounds.values():  # 0.5 % of the left, which the mean with the right hides
        sound[:: len(sound) // 100][:100, 0] = 1
        for place in range(0, len(sound) - 10, len(sound) // 100):
            sound[place : place + len(sound) // 20000 + 4, 0] = 1
    store = Store.open(write_store(tmp_path / "data", write(tmp_path / "in", sounds, 2 * RATE)))
    assert {record["channels"] for record in store.index} == {2}
    assert all(record["clipped_share"] > 0.001 for record in store.index)


def test_pairs_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, joined = np.random.default_rng(0), []
    tracks = [chance.integers(0, 8, (50, 2)) for _ in range(30)]
    statistics, whole = CodeStatistics(2, 8), np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda *args, **options: joined.append(1) or whole(*args, **options))
    for track in tracks:
        statistics.add(track)
    assert not joined
    losses = statistics.losses_of(statistics)
    monkeypatch.undo()
    assert statistics.pairs.shape == (2, 30 * 49)
    expected = whole([8 * track[:-1, 1] + track[1:, 1] for track in tracks])
    np.testing.assert_array_equal(statistics.pairs[1], expected)
    assert losses["bigram"][0] < losses["unigram"][0] < np.log(8) + 0.01


def test_a_codec_that_is_not_as_asked_is_remarked(tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs", 4)
    out = write_store(tmp_path / "data", folder)
    assert "was not kept" not in Store.open(out).info["summary"]
    other = write_store(tmp_path / "other", folder, f"codec.path={out}", "codec.hop=100")
    assert "no effect on the codec of" in Store.open(other).info["summary"]
    assert "codec.hop=100, it has 200" in Store.open(other).info["summary"]
    write_store(out, folder, "codec.hop=100")
    assert "was not kept: codec.hop=100, it has 200" in Store.open(out).info["summary"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("music", "`rung data music`"),
        ("music_small", "`rung data music preset=small`"),
        ("mine", "`rung data music --from FOLDER --name mine`"),
    ],
)
def test_missing_data_says_how_to_prepare_it(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNG_DATA", str(tmp_path))
    with raises_code("no-data") as caught:
        open_store(name)
    assert command in str(caught.value)
