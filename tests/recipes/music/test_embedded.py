"""If this fails, the music that needs no account is not the same twice, too long, silent, or leaks between splits."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rung.data.wheel import MUSIC21, PRETTY_MIDI, VIZDOOM
from rung.errors import DataError
from rung.recipes.music.data import assign_splits
from rung.recipes.music.sources import Source, Track
from rung.recipes.music.sources.embedded import embedded
from tests.errors import raises_code

RATE = 16000


def no_report(what: str, done: int, total: int) -> None:
    pass


def listed(minutes: float, seed: int = 0) -> Source:
    return embedded(minutes, seed, no_report)


@pytest.fixture(scope="module")
def everything() -> Source:
    try:
        MUSIC21.fetch()
        PRETTY_MIDI.fetch()
        if not any(wheel.path.is_file() for wheel in VIZDOOM.values()):
            VIZDOOM["cp311"].fetch()
        source = listed(0)
    except DataError as error:
        pytest.skip(f"the wheels cannot be had here: {error}")
    if source.remarks:
        pytest.skip(f"no Freedoom here: {source.remarks[0]['reason']}")
    return source


def facts(source: Source) -> list[tuple[str, str, str]]:
    return [(track.name, track.piece, track.text) for track in source.tracks]


def split_by_origin(tracks: list[Track]) -> tuple[list[Track], list[Track]]:
    bach = [track for track in tracks if track.name.startswith("bach/")]
    return bach, [track for track in tracks if track.name.startswith("freedoom")]


def test_all_of_it_is_listed_once(everything: Source) -> None:
    bach, freedoom = split_by_origin(everything.tracks)
    assert len(bach) + len(freedoom) == len(everything.tracks) == len({track.name for track in everything.tracks})
    assert len(freedoom) == 75
    assert sum(track.name.endswith("/1") for track in bach) == 410
    assert 50 < sum(track.name.endswith("/2") for track in bach) < 200
    names = {track.name for track in freedoom}
    assert {"freedoom1/D_E1M1", "freedoom2/D_RUNNIN"} <= names
    assert len(names & {"freedoom1/D_INTRO", "freedoom1/D_INTROA"}) == 1
    # One music, one piece: a score and its version, two scores of one chorale, a title and the beginning of it.
    piece = {track.name: track.piece for track in everything.tracks}
    assert piece["bach/bwv18.5-lz/1"] == piece["bach/bwv18.5-w/1"]
    assert piece["bach/bwv398/1"] == piece["bach/bwv197.7-a/1"] == "Bach/bwv197.7"
    assert piece["freedoom1/D_INTRO"] == piece["freedoom2/D_AMPIE"]


def test_captions_say_what_is_known_of_a_piece(everything: Source) -> None:
    tags = {track.name: track.text.split(", ") for track in everything.tracks}
    for name, key in (("bwv66.6", "F# minor"), ("bwv846", "C major"), ("bwv269", "G major"), ("bwv1.6", "F major")):
        assert key in tags[f"bach/{name}/1"], name
    bach, freedoom = split_by_origin(everything.tracks)
    assert all(tags[track.name][-1] == "game music" for track in freedoom)
    assert sum("drums" in tags[track.name] for track in freedoom) > 60
    assert {tags[track.name][-1] for track in bach} == {"chorale", "baroque"}
    assert len({tags[track.name][0] for track in bach}) > 20
    # Played again, a piece has other instruments and the same key.
    for track in bach:
        if track.name.endswith("/2"):
            first, again = tags[f"{track.name[:-1]}1"], tags[track.name]
            assert first != again
            assert [tag for tag in first if tag[0].isupper()] == [tag for tag in again if tag[0].isupper()]


def test_the_seed_decides_and_nothing_else(everything: Source) -> None:
    other = listed(0, seed=1)
    assert {track.piece for track in other.tracks} == {track.piece for track in everything.tracks}
    assert facts(other) != facts(everything)
    some = facts(listed(8))
    assert some == facts(listed(8))
    assert set(some) <= set(facts(everything))
    assert some != facts(listed(8, seed=1))


@pytest.mark.parametrize("minutes", [2.0, 6.0])
def test_minutes_bound_what_is_listed(everything: Source, minutes: float) -> None:
    tracks = listed(minutes).tracks
    seconds = [sum(len(track.read(8000).sound) for track in some) / 8000 for some in split_by_origin(tracks)]
    assert 60 * minutes - 15 <= sum(seconds) <= 60 * minutes + 0.01
    assert all(part >= 0.2 * 60 * minutes for part in seconds[:1])
    assert seconds[1] <= 30 * minutes + 0.01
    assert sum(track.seconds or 0 for track in tracks) == pytest.approx(sum(seconds), rel=1e-3)


@pytest.mark.parametrize("minutes", [2.0, 12.0])
def test_both_kinds_are_held_out(everything: Source, minutes: float) -> None:
    for seed in range(4):
        tracks = listed(minutes, seed).tracks
        split_of = assign_splits(tracks, seed, many=2)
        held_out = [track for track in tracks if split_of[track.piece] == "validation"]
        assert all(split_by_origin(held_out)), seed


def test_nothing_is_that_short(everything: Source) -> None:
    with raises_code("too-small"):
        listed(0.01)


@pytest.mark.parametrize("name", ["freedoom1/D_E1M2", "bach/bwv66.6/1"])
def test_a_track_is_stereo_and_the_same_wherever_it_is_read(everything: Source, name: str) -> None:
    track = next(track for track in everything.tracks if track.name == name)
    sound = track.read(RATE).sound
    assert sound.dtype == np.float32
    assert sound.shape[1] == 2
    assert np.abs(sound).max() == pytest.approx(0.9, abs=1e-5)
    assert not np.allclose(sound[:, 0], sound[:, 1])
    rms = np.sqrt((sound.astype(np.float64) ** 2).mean(axis=0))
    assert (rms > 0.02).all()
    again: Track = pickle.loads(pickle.dumps(track))
    with ThreadPoolExecutor(2) as pool:
        for other in pool.map(again.read, [RATE, RATE]):
            assert other.sound.tobytes() == sound.tobytes()
    assert len(track.read(2 * RATE).sound) == pytest.approx(2 * len(sound), abs=2)
