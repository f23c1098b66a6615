"""If this fails, a damaged sound file is trained on as if it were whole, or a good one is thrown away."""

from __future__ import annotations

import io
import struct
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from rung.data import soundfont
from rung.data.audio import MOST_DC, levels, read_audio, read_tags, spectrogram_png, wav_bytes
from rung.errors import DataError
from tests.conftest import shared_data
from tests.errors import raises_code

sf = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

RATE = 24000
# name of the file -> format and subtype of libsndfile
FORMATS = {
    "pcm16.wav": ("WAV", "PCM_16"),
    "pcm24.wav": ("WAVEX", "PCM_24"),
    "float.wav": ("WAV", "FLOAT"),
    "large.wav": ("RF64", "PCM_16"),
    "x.flac": ("FLAC", "PCM_16"),
    "vorbis.ogg": ("OGG", "VORBIS"),
    "x.opus": ("OGG", "OPUS"),
    "x.mp3": ("MP3", "MPEG_LAYER_III"),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def write(path: Path, sound: np.ndarray, rate: int = RATE, kind: str = "", **tags: str) -> Path:
    form, subtype = FORMATS[kind or path.name]
    sound = sound if sound.ndim == 2 else sound[:, None]
    with sf.SoundFile(path, "w", rate, sound.shape[1], format=form, subtype=subtype) as file:
        for name, value in tags.items():
            setattr(file, name, value)
        for at in range(0, len(sound), 4096):  # libsndfile crashes on many seconds of Vorbis at once
            file.write(sound[at : at + 4096])
    return path


def tune(seconds: float = 4.0, rate: int = RATE, channels: int = 2, gain: float = 0.4) -> np.ndarray:
    """Notes that begin and die away, over a little noise."""
    time = np.arange(round(seconds * rate)) / rate
    note = (time * 4).astype(int)
    hz = 220 * 2 ** (np.array([0, 4, 7, 12, 7, 4])[note % 6] / 12)
    voice = np.sin(2 * np.pi * np.cumsum(hz) / rate) * np.exp(-4 * (time * 4 % 1))
    noise = np.random.default_rng(0).standard_normal((len(time), channels))
    return (gain * voice[:, None] * np.linspace(1, 0.5, channels) + 0.005 * noise).astype(np.float32)


# Good files


@every_format
@pytest.mark.parametrize("channels", [1, 2])
def test_good_files_of_every_format_are_read(name: str, channels: int, tmp_path: Path) -> None:
    sound = tune(channels=channels)
    got = read_audio(write(tmp_path / name, sound), RATE)
    assert got.shape == sound.shape
    assert got.dtype == np.float32
    assert np.abs(got).max() <= 1
    correlation = np.corrcoef(got[:, 0], sound[:, 0])[0, 1]
    assert correlation > 0.98


def test_the_name_of_a_file_says_nothing_of_its_format(tmp_path: Path) -> None:
    assert read_audio(write(tmp_path / "tune.mp3", tune(), kind="x.flac"), RATE).shape == (4 * RATE, 2)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000])
def test_resampling_keeps_pitch_and_level(rate: int, tmp_path: Path) -> None:
    sine = 0.5 * np.sin(2 * np.pi * 441.0 * np.arange(3 * rate) / rate)
    got = read_audio(write(tmp_path / "pcm16.wav", sine, rate), RATE)[:, 0]
    assert len(got) == 3 * RATE
    middle = got[RATE // 2 : -RATE // 2] * np.hanning(2 * RATE)
    strength = np.abs(np.fft.rfft(middle))
    assert np.argmax(strength) * RATE / len(middle) == pytest.approx(441, abs=0.51)
    assert np.sqrt(np.square(got[RATE // 2 : -RATE // 2]).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


def test_of_many_channels_the_front_two_are_taken(tmp_path: Path) -> None:
    sound = tune(channels=6)
    sound[:, 2:] = 0.9 * np.sign(sound[:, 2:])
    got = read_audio(write(tmp_path / "pcm16.wav", sound), RATE)
    np.testing.assert_allclose(got, sound[:, :2], atol=1e-4)


@pytest.mark.parametrize("peak", [1.8, 30000.0])
def test_floats_of_another_scale_are_scaled_and_not_called_clipped(peak: float, tmp_path: Path) -> None:
    sound = tune() / np.abs(tune()).max()
    got = read_audio(write(tmp_path / "float.wav", sound * np.float32(peak)), RATE)
    np.testing.assert_allclose(got, sound, atol=1e-5)


def test_a_wav_from_a_pipe_does_not_know_its_length_and_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "pcm16.wav", tune())
    data = bytearray(path.read_bytes())
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    path.write_bytes(data)
    assert len(read_audio(path, RATE)) == 4 * RATE


@pytest.mark.parametrize("gain", [0.01, 1.0])
def test_quiet_and_full_scale_sounds_are_good(gain: float, tmp_path: Path) -> None:
    sine = gain * np.sin(2 * np.pi * 60.0 * np.arange(4 * RATE) / RATE)
    assert len(read_audio(write(tmp_path / "pcm16.wav", sine), RATE)) == 4 * RATE


def test_rendered_music_is_good(tmp_path: Path) -> None:
    notes = np.array(
        [(0, 1, 60, 80), (0.5, 2, 67, 100)], [("start", "f8"), ("end", "f8"), ("pitch", "u1"), ("velocity", "u1")]
    )
    cycle = np.sin(2 * np.pi * np.arange(50) / 50).astype(np.float32)
    flat = soundfont.Envelope(0.001, 0.001, 0.001, 0.001, 0.0, 0.25)
    zone = soundfont.Zone((0, 127), (0, 127), cycle, (0, 50), 22050, 69, 0.0, 100.0, 1.0, flat, flat, 13500.0, 0.0, 0.0)

    class Sine(soundfont.SoundFont):
        def __init__(self) -> None:
            pass

        def zones(self, program: int = 0, bank: int = 0) -> list[soundfont.Zone]:
            return [zone]

    sound = soundfont.render(Sine(), notes, sample_rate=RATE)
    (tmp_path / "song.wav").write_bytes(wav_bytes(sound, RATE))
    assert len(read_audio(tmp_path / "song.wav", RATE)) == len(sound)


def test_real_tracks_are_good() -> None:
    files = [path for path in sorted(shared_data("music_audio").rglob("*.*")) if path.suffix in (".wav", ".ogg")]
    assert len(files) == 12
    for path in files:
        sound = read_audio(path, RATE)
        found = levels(sound, RATE)
        assert found.clipped_share == 0
        assert found.silent_share < 0.4
        assert found.dc_offset < MOST_DC / 10


def test_tags_are_read(tmp_path: Path) -> None:
    for name in FORMATS:
        path = write(tmp_path / name, tune(1), title="Night", genre="Rock")
        tags = read_tags(path)
        assert (tags["title"], tags["genre"]) == ("Night", "Rock"), name


# Damage


@every_format
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_file_that_was_cut_is_refused(name: str, part: float, tmp_path: Path) -> None:
    path = write(tmp_path / name, tune())
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with raises_code("audio-truncated", DataError):
        read_audio(path, RATE)


def test_an_mp3_without_a_count_of_its_frames_is_refused_where_the_last_one_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "x.mp3", tune())
    data = path.read_bytes().replace(b"Xing", b"\0\0\0\0").replace(b"Info", b"\0\0\0\0")
    path.write_bytes(data)
    assert len(read_audio(path, RATE)) >= 4 * RATE
    path.write_bytes(data[: len(data) // 2])
    with raises_code("audio-truncated", DataError):
        read_audio(path, RATE)


def test_tags_around_an_mp3_are_not_taken_for_sound(tmp_path: Path) -> None:
    path = write(tmp_path / "x.mp3", tune())
    tag = b"ID3\x04\x00\x00" + bytes([0, 0, 2, 0]) + b"\0" * 256
    path.write_bytes(tag + path.read_bytes() + b"TAG" + b"\0" * 125)
    assert len(read_audio(path, RATE)) == 4 * RATE


def test_an_ogg_with_a_page_missing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "vorbis.ogg", tune(8))
    data = path.read_bytes()
    pages = [at for at in range(len(data)) if data.startswith(b"OggS", at)]
    assert len(pages) > 4
    path.write_bytes(data[: pages[3]] + data[pages[4] :])
    with raises_code("audio-truncated", DataError):
        read_audio(path, RATE)


def test_a_flac_that_ends_between_two_frames_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.flac", tune())
    data = path.read_bytes()
    frames = [at for at in range(len(data)) if data.startswith(b"\xff\xf8", at)]
    path.write_bytes(data[: frames[len(frames) // 2]])
    with raises_code("audio-truncated", DataError):
        read_audio(path, RATE)


def test_a_flac_that_does_not_say_how_long_it_is_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.flac", tune())
    data = bytearray(path.read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    path.write_bytes(data)
    with raises_code("audio-damaged", DataError):
        read_audio(path, RATE)


def test_what_is_no_audio_is_refused(tmp_path: Path) -> None:
    cases = {"a.mp3": b"some words about a song\n" * 40, "b.wav": b"\0" * 1000, "c.ogg": b"\x1aE\xdf\xa3" * 100}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with raises_code("not-audio", DataError):
            read_audio(tmp_path / name, RATE)
        with raises_code("not-audio", DataError):
            read_tags(tmp_path / name)
    with raises_code("no-file", DataError):
        read_audio(tmp_path / "missing.wav", RATE)


@every_format
def test_a_damaged_header_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, tune())
    path.write_bytes(path.read_bytes()[:4] + b"\x55" * 4000)
    with pytest.raises(DataError) as caught:
        read_audio(path, RATE)
    assert caught.value.code in ("audio-damaged", "audio-truncated", "not-audio")


def test_bytes_changed_inside_a_flac_are_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.flac", tune())
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = b"\x77" * 200
    path.write_bytes(data)
    with raises_code("audio-truncated", DataError):
        read_audio(path, RATE)


def test_no_bytes_and_no_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.ogg").write_bytes(b"")
    for path in (
        tmp_path / "zero.ogg",
        write(tmp_path / "pcm16.wav", np.zeros(0)),
        write(tmp_path / "x.flac", np.zeros(0)),
    ):
        with raises_code("audio-empty", DataError):
            read_audio(path, RATE)


# Sounds that cannot be learned from


@every_format
def test_silence_is_refused(name: str, tmp_path: Path) -> None:
    nothing = np.zeros((4 * RATE, 2), np.float32)
    hum = nothing + 0.0002 * tune()
    mostly = nothing.copy()
    mostly[: RATE // 10] = tune(0.1)
    for sound in (nothing, hum, mostly):
        with raises_code("audio-silent", DataError):
            read_audio(write(tmp_path / name, sound), RATE)


def test_silence_with_a_dc_offset_is_silence(tmp_path: Path) -> None:
    with raises_code("audio-silent", DataError):
        read_audio(write(tmp_path / "pcm16.wav", np.full((RATE, 2), 0.3)), RATE)


@every_format
def test_clipping_is_refused(name: str, tmp_path: Path) -> None:
    with raises_code("audio-clipped", DataError):
        read_audio(write(tmp_path / name, np.clip(tune(gain=8.0), -1, 1)), RATE)


def test_a_few_clipped_peaks_are_let_through(tmp_path: Path) -> None:
    sound = tune()
    sound[1000:1020] = 1.0
    sound[5000:5010] = -1.0
    found = levels(sound, RATE)
    assert found.clipped_share == pytest.approx(30 * 2 / sound.size)
    assert len(read_audio(write(tmp_path / "pcm16.wav", sound), RATE)) == len(sound)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    sound = tune()
    sound[1234, 1] = value
    with raises_code("audio-not-finite", DataError):
        read_audio(write(tmp_path / "float.wav", sound), RATE)


@pytest.mark.parametrize("shape", [(2, 1000), (1, 9), (3, 40), (4, 6)])
def test_an_array_on_its_side_is_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    with raises_code("audio-axis", DataError):
        read_audio(write(tmp_path / "pcm16.wav", np.full(shape, 0.1)), RATE)


def test_more_channels_than_libsndfile_opens_are_named_too(tmp_path: Path) -> None:
    num = 24000
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + 4 * num, b"WAVE", b"fmt ", 16, 1, num, RATE, 0, 0, 16)
    (tmp_path / "side.wav").write_bytes(head + struct.pack("<4sI", b"data", 4 * num) + b"\1" * 4 * num)
    with raises_code("audio-axis", DataError):
        read_audio(tmp_path / "side.wav", RATE)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("pcm16.wav", 100), ("pcm16.wav", 384_001), ("float.wav", 3999), ("large.wav", 2_000_000), ("x.flac", 3999)],
)
def test_rates_that_cannot_be_are_refused(name: str, rate: int, tmp_path: Path) -> None:
    with raises_code("audio-rate", DataError):
        read_audio(write(tmp_path / name, tune(0.5), rate), RATE)


def test_a_dc_offset_is_measured_and_let_through(tmp_path: Path) -> None:
    sound = tune()
    sound[:, 1] += 0.2
    got = read_audio(write(tmp_path / "pcm16.wav", sound), RATE)
    assert levels(got, RATE).dc_offset == pytest.approx(0.2, abs=0.002)
    assert levels(tune(), RATE).dc_offset < MOST_DC


def test_without_the_libraries_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "pcm16.wav", tune(0.5))
    monkeypatch.setitem(sys.modules, "soxr", None)
    with raises_code("not-installed"):
        read_audio(path, RATE)


# Levels, WAV, pictures


def test_levels_of_known_sounds() -> None:
    square = np.where(np.arange(RATE) // 50 % 2, 0.5, -0.5).astype(np.float32)
    found = levels(square, RATE)
    assert found.peak_db == pytest.approx(-6.02, abs=0.01)
    assert found.rms_db == pytest.approx(-6.02, abs=0.01)
    assert (found.clipped_share, found.silent_share) == (0, 0)
    assert levels(2 * square, RATE).clipped_share == 1
    half = np.concatenate([square, np.zeros(RATE, np.float32)])
    assert levels(half, RATE).silent_share == pytest.approx(0.5, abs=0.03)
    assert levels(np.zeros(0, np.float32), RATE).peak_db == -120


@pytest.mark.parametrize("shape", [(RATE,), (RATE, 1), (RATE, 2)])
def test_wav_bytes_can_be_read_again(shape: tuple[int, ...], tmp_path: Path) -> None:
    sound = np.random.default_rng(1).uniform(-0.9, 0.9, shape).astype(np.float32)
    (tmp_path / "a.wav").write_bytes(wav_bytes(sound, RATE))
    got = read_audio(tmp_path / "a.wav", RATE)
    np.testing.assert_allclose(got.reshape(shape), sound, atol=1.5 / 32768)


def test_wav_bytes_limits_and_never_wraps_around() -> None:
    with wave.open(io.BytesIO(wav_bytes(np.array([0.0, 1.5, -7.0, 1.0, -1.0]), RATE)), "rb") as file:
        got = np.frombuffer(file.readframes(5), "<i2")
    assert got.tolist() == [0, 32767, -32767, 32767, -32767]
    with raises_code("audio-not-finite", DataError):
        wav_bytes(np.array([0.0, np.nan]), RATE)
    with pytest.raises(ValueError):
        wav_bytes(np.zeros((10, 3)), RATE)


def test_a_spectrogram_shows_a_tone_where_it_is() -> None:
    image = pytest.importorskip("PIL.Image")
    time = np.arange(2 * RATE) / RATE
    tone = np.where(time < 1, np.sin(2 * np.pi * 1000 * time), 0.0).astype(np.float32)
    picture = np.asarray(image.open(io.BytesIO(spectrogram_png(tone, RATE, "a tone"))).convert("L"), float)
    assert picture.shape[1] == 1200
    paper = picture[60:420]
    left, right = paper[:, 200:400].mean(1), paper[:, 900:1100].mean(1)
    assert right.min() > 240  # silence is light
    row = 60 + int(np.argmin(left))
    bottom = 46 + 3 * 128
    height = (bottom - row) / (3 * 128)  # mel scale
    assert height == pytest.approx(np.log10(1 + 1000 / 700) / np.log10(1 + RATE / 2 / 700), abs=0.02)


@pytest.mark.parametrize("num", [0, 1, 100, 5000, 40 * RATE])
def test_a_spectrogram_of_any_length_can_be_drawn(num: int) -> None:
    image = pytest.importorskip("PIL.Image")
    sound = np.zeros((num, 2), np.float32)
    assert image.open(io.BytesIO(spectrogram_png(sound, RATE, "long " * 100))).width == 1200
