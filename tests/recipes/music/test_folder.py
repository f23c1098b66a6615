"""If this fails, a song loses its text, or parts of one recording are on both sides of a split."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from rung.data.audio import wav_bytes
from rung.data.folder import MOST_CAPTION_BYTES
from rung.errors import DataError
from rung.recipes.music.sources import Source
from rung.recipes.music.sources.folder import MOST_TEXT_BYTES, from_folder, normalise
from tests.conftest import shared_data
from tests.errors import raises_code

sf = pytest.importorskip("soundfile")
RATE = 16000


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def song(path: Path, seed: int | None = None) -> Path:
    """A second of noise that no other path has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed if seed is not None else list(str(path).encode()))
    path.write_bytes(wav_bytes(rng.uniform(-0.3, 0.3, RATE).astype(np.float32), RATE))
    return path


def listed(folder: Path) -> Source:
    return from_folder(folder, quiet)


def texts(folder: Path) -> dict[str, str]:
    return {track.name: track.text for track in listed(folder).tracks}


def pieces(folder: Path) -> dict[str, str]:
    return {track.name: track.piece for track in listed(folder).tracks}


# Files


def test_files_are_found_in_the_order_people_count(tmp_path: Path) -> None:
    for name in ("b10.wav", "b2.wav", "B1.wav", "album 10/x.wav", "album 2/x.wav", ".hidden.wav", ".trash/y.wav"):
        song(tmp_path / name)
    assert list(texts(tmp_path)) == ["B1.wav", "b2.wav", "b10.wav", "album 2/x.wav", "album 10/x.wav"]


def test_a_track_is_read_at_the_rate_asked_for(tmp_path: Path) -> None:
    song(tmp_path / "a.wav")
    [track] = listed(tmp_path).tracks
    assert track.read(RATE).sound.shape == (RATE, 1)
    assert track.read(2 * RATE).sound.shape == (2 * RATE, 1)
    assert track.split is None


def test_one_file_is_a_source(tmp_path: Path) -> None:
    song(tmp_path / "b.wav")
    path = song(tmp_path / "a.wav")
    (tmp_path / "a.txt").write_text("slow")
    source = listed(path)
    assert [(track.name, track.text) for track in source.tracks] == [("a.wav", "slow")]


def test_links_that_lead_in_circles_end(tmp_path: Path) -> None:
    song(tmp_path / "music" / "a.wav")
    (tmp_path / "music" / "again").symlink_to(tmp_path / "music", target_is_directory=True)
    (tmp_path / "music" / "gone.wav").symlink_to(tmp_path / "nowhere.wav")
    source = listed(tmp_path / "music")
    assert [track.name for track in source.tracks] == ["a.wav"]
    assert [item["file"] for item in source.quarantined] == ["gone.wav"]


def test_other_files_are_counted_and_broken_ones_named(tmp_path: Path) -> None:
    song(tmp_path / "a.wav")
    (tmp_path / "a.txt").write_text("a caption is no stray file")
    for name in ("cover.jpg", "back.jpg", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "zero.wav").write_bytes(b"")
    (tmp_path / "words.mp3").write_text("not a song " * 100)
    (tmp_path / "phone.m4a").write_bytes(b"x" * 100)
    sf.write(tmp_path / "side.wav", np.full((2, 500), 0.1), RATE)
    source = listed(tmp_path)
    assert {item["file"] for item in source.quarantined} == {"zero.wav", "words.mp3", "phone.m4a", "side.wav"}
    [remark] = source.remarks
    assert remark["file"] == tmp_path.as_posix()
    assert "3 files" in remark["reason"]
    assert "2 .jpg" in remark["reason"]
    assert [track.name for track in source.tracks] == ["a.wav"]


def test_what_only_reading_shows_is_refused_when_read(tmp_path: Path) -> None:
    path = song(tmp_path / "a.wav")
    path.write_bytes(path.read_bytes()[: RATE // 2])
    [track] = listed(tmp_path).tracks
    with raises_code("audio-truncated", DataError):
        track.read(RATE)


def test_a_folder_without_sound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("nothing here")
    with raises_code("data-empty", DataError) as caught:
        listed(tmp_path)
    assert "*.flac" in str(caught.value)
    with raises_code("no-folder", DataError):
        listed(tmp_path / "missing")


# Texts


def test_the_nearest_text_counts(tmp_path: Path) -> None:
    """Each source of a text is taken away in turn; the next one speaks."""
    path = tmp_path / "in" / "a.flac"
    path.parent.mkdir()
    with sf.SoundFile(path, "w", RATE, 1, format="FLAC") as file:
        file.title, file.artist, file.genre = "Night", "Someone", "Jazz"
        file.write(0.3 * np.random.default_rng(0).uniform(-1, 1, RATE))
    routes = {
        "in/a_prompt.txt": "prompt",
        "in/a.txt": "caption",
        "in/metadata.json": json.dumps([{"file_name": "a.flac", "caption": "near json"}]),
        "in/metadata.jsonl": json.dumps({"file": "a.flac", "text": "near jsonl"}) + "\n\n",
        "in/metadata.csv": "path,description\r\na.flac,near csv\r\n",
        "metadata.json": json.dumps({"in/a.flac": "far json"}),
    }
    for name, text in routes.items():
        (tmp_path / name).write_text(text)
    expected = ["prompt", "caption", "near json", "near jsonl", "near csv", "far json"]
    for name, text in zip(routes, expected):
        assert texts(tmp_path) == {"in/a.flac": text}
        (tmp_path / name).unlink()
    assert texts(tmp_path) == {"in/a.flac": "Night, Someone, Jazz"}


@pytest.mark.parametrize(
    "entry",
    [
        [{"file": "in/a.wav", "text": "slow"}],
        [{"path": "./in/a.wav", "prompt": "slow"}],
        [{"path": "in\\a.wav", "prompt": "slow"}],
        [{"name": "a", "tags": ["slow"]}],
        [{"file": "a.wav", "text": "", "description": "slow"}, 7, {"text": "of nothing"}],
        {"in/a.wav": "slow"},
        {"a": {"caption": "slow", "bpm": 60}},
        {"music/in/a.wav": ["slow"]},
    ],
)
def test_metadata_may_be_written_in_many_ways(entry: object, tmp_path: Path) -> None:
    song(tmp_path / "music" / "in" / "a.wav")
    (tmp_path / "music" / "metadata.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(entry).encode())
    source = listed(tmp_path / "music")
    assert [track.text for track in source.tracks] == ["slow"]
    assert source.quarantined == source.remarks == []


def test_an_empty_caption_leaves_the_word_to_the_next(tmp_path: Path) -> None:
    song(tmp_path / "a.wav")
    (tmp_path / "a_prompt.txt").write_text(" \n")
    (tmp_path / "a.txt").write_text("slow")
    assert texts(tmp_path) == {"a.wav": "slow"}


def test_metadata_above_the_folder_is_not_ours(tmp_path: Path) -> None:
    song(tmp_path / "in" / "a.wav")
    (tmp_path / "metadata.json").write_text(json.dumps({"in/a.wav": "somebody else's"}))
    assert texts(tmp_path / "in") == {"a.wav": ""}


def test_texts_that_cannot_be_used_are_reported_and_the_song_is_kept(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        song(tmp_path / f"{name}.wav")
    (tmp_path / "a.txt").write_bytes("fröhlich".encode("latin-1"))
    (tmp_path / "b.txt").write_text("x" * (MOST_CAPTION_BYTES + 1))
    (tmp_path / "metadata.json").write_text('[{"file": "c.wav", ')
    (tmp_path / "metadata.jsonl").write_text('{"id": 3}\n')
    (tmp_path / "metadata.csv").write_text("file,text\nd.wav,fine\n")
    source = listed(tmp_path)
    assert {track.name: track.text for track in source.tracks} == {
        "a.wav": "",
        "b.wav": "",
        "c.wav": "",
        "d.wav": "fine",
    }
    assert [item["file"] for item in source.remarks] == ["a.txt", "metadata.json", "metadata.jsonl", "b.txt"]
    assert not source.quarantined


def test_text_is_one_clean_line() -> None:
    assert normalise("\ufeffslow\r\n  piano\t\x00\x1b[31m in\u202e the\u2028rain ") == "slow piano [31m in the rain"
    long = normalise("é" * 3000)
    assert len(long.encode()) == MOST_TEXT_BYTES
    assert normalise("a" + "é" * 3000) == "a" + "é" * ((MOST_TEXT_BYTES - 1) // 2)
    assert normalise("日本の歌") == "日本の歌"


# Pieces


@pytest.mark.parametrize(
    "names",
    [
        ("fishin_0", "fishin_1", "fishin_12"),
        ("live-part1", "live-part2", "live"),
        ("live clip 1", "live_clip2"),
        ("song of joy (1)", "song of joy (2)", "song of joy"),
        ("concert/part1", "concert/part2", "concert/part 3"),
        ("waltz-1", "waltz-2"),
    ],
)
def test_parts_of_one_recording_are_one_piece(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        song(tmp_path / f"{name}.wav")
    assert len(set(pieces(tmp_path).values())) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("fishin_0", "vibeace_0"),
        ("0001", "0002"),
        ("track_01", "track_02"),
        ("song-1", "song-2"),
        ("jamendo_1009", "jamendo_88123"),  # a catalogue, not a count
        ("one/intro_1", "two/intro_1"),
        ("opus 9", "opus 9b"),
        ("concept1", "concept2"),
    ],
)
def test_different_recordings_are_different_pieces(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        song(tmp_path / f"{name}.wav")
    assert len(set(pieces(tmp_path).values())) == len(names)


def test_one_recording_in_two_formats_is_one_piece(tmp_path: Path) -> None:
    song(tmp_path / "a.wav")
    sf.write(tmp_path / "a.flac", 0.3 * np.random.default_rng(0).uniform(-1, 1, RATE), RATE)
    assert set(pieces(tmp_path).values()) == {"a"}


def test_copies_are_one_piece_with_all_their_parts(tmp_path: Path) -> None:
    song(tmp_path / "a_0.wav", seed=1)
    song(tmp_path / "a_1.wav", seed=2)
    song(tmp_path / "b_0.wav", seed=2)  # a copy of a_1
    song(tmp_path / "b_1.wav", seed=3)
    song(tmp_path / "c.wav", seed=3)  # a copy of b_1
    song(tmp_path / "d.wav", seed=4)
    found = pieces(tmp_path)
    assert len({found[name] for name in ("a_0.wav", "a_1.wav", "b_0.wav", "b_1.wav", "c.wav")}) == 1
    assert found["d.wav"] != found["a_0.wav"]


def test_a_name_that_is_not_valid_text_can_be_read(tmp_path: Path) -> None:
    path = song(tmp_path / "a.wav")
    os.rename(path, os.fsencode(tmp_path) + b"/caf\xe9.wav")
    [track] = listed(tmp_path).tracks
    assert track.name.isprintable()
    assert len(track.read(RATE).sound) == RATE


def test_real_tracks() -> None:
    source = listed(shared_data("music_audio"))
    found = {track.name: track.piece for track in source.tracks}
    assert len(found) == 12
    assert {piece for name, piece in found.items() if name.startswith("wav/")} == {
        "wav/fishin", "wav/trumpet", "wav/vibeace",
    }  # fmt: skip
    assert len({piece for name, piece in found.items() if name.startswith("ogg/")}) == 3
    assert [item["reason"][:6] for item in source.remarks] == ["1 file"]
    by_name = {track.name: track for track in source.tracks}
    assert "Vibe Ace" in by_name["ogg/Kevin_MacLeod_-_Vibe_Ace.hq.ogg"].text
    assert by_name["ogg/sorohanro_-_solo-trumpet-06.hq.ogg"].read(24000).num_channels == 2
