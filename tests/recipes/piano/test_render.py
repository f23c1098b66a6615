"""If this fails, a sample of the piano cannot be heard, or its picture shows a note in the wrong place."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data import soundfont
from rung.data.soundfont import Envelope, SoundFont, Zone
from rung.errors import DataError
from rung.recipes.piano import render
from tests.errors import raises_code

NOTE = np.dtype([("start", "<f8"), ("end", "<f8"), ("pitch", "u1"), ("velocity", "u1")])


def notes(*rows: tuple[float, float, int, int]) -> np.ndarray:
    return np.array(list(rows), dtype=NOTE)


class Sine(SoundFont):
    """A font that needs no file: one looped sine, 441 Hz at key 69."""

    def __init__(self) -> None:
        cycle = np.sin(2 * np.pi * np.arange(50) / 50).astype(np.float32)
        flat = Envelope(0.001, 0.001, 0.001, 0.001, 0.0, 0.25)
        self.zone = Zone((0, 127), (0, 127), cycle, (0, 50), 22050, 69, 0.0, 100.0, 1.0, flat, flat, 13500.0, 0.0, 0.0)

    def zones(self, program: int = 0, bank: int = 0) -> list[Zone]:
        return [self.zone]


def opened(data: bytes) -> tuple[np.ndarray, int]:
    with wave.open(io.BytesIO(data), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate()


# Sound --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_rate", [24000, 44100])
def test_wav_is_valid(sample_rate: int) -> None:
    song = notes((0, 1, 69, 80), (0.5, 1.25, 76, 100), (0.5, 1.5, 81, 127))
    made = render.to_wav(song, sample_rate=sample_rate, font=Sine())
    sound, rate = opened(made.data)
    assert made.engine == "rung sampler"
    assert rate == sample_rate
    assert len(sound) == round(2.5 * sample_rate)
    assert np.abs(sound.astype(int)).max() == pytest.approx(0.9 * 32767, abs=1)
    assert made.data == render.to_wav(song, sample_rate=sample_rate, font=Sine()).data
    spectrum = np.abs(np.fft.rfft(sound[: sample_rate // 2]))
    assert spectrum.argmax() * 2 == pytest.approx(441, abs=2)


def test_no_notes_give_a_second_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soundfont, "default_bytes", lambda: pytest.fail("silence needs no font"))
    data, engine = render.to_wav(notes())
    sound, rate = opened(data)
    assert (len(sound), rate, engine) == (24000, 24000, "silence")
    assert not sound.any()


def test_notes_that_cannot_be_played() -> None:
    for make in (render.to_wav, render.to_roll):
        with pytest.raises(DataError):
            make(notes((2, 1, 60, 64)))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program called fluidsynth on the path, and a font that needs no download behind both engines."""
    program = folder / "fluidsynth"
    program.write_text(f"#!{sys.executable}\nimport sys, wave\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(soundfont, "default_bytes", lambda: b"font")
    monkeypatch.setattr(soundfont, "default", Sine)


WRITES = """
args = sys.argv[1:]
with wave.open(args[args.index("-F") + 1], "wb") as file:
    file.setnchannels(2); file.setsampwidth(2); file.setframerate(int(args[args.index("-r") + 1]))
    file.writeframes((VALUE).to_bytes(2, "little") * 2 * 12000)
"""


@pytest.mark.parametrize(
    ("script", "engine"),
    [
        (WRITES.replace("VALUE", "1000"), "fluidsynth"),
        (WRITES.replace("VALUE", "0"), "rung sampler (fluidsynth failed: it wrote silence)"),
        ("sys.exit('no such font')", "rung sampler (fluidsynth failed: no such font)"),
        ("pass", "rung sampler (fluidsynth failed: no sound, exit code 0)"),
    ],
    ids=["works", "silent", "fails", "writes-nothing"],
)
def test_fluidsynth_is_used_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, engine: str
) -> None:
    install(tmp_path, monkeypatch, script)
    made = render.to_wav(notes((0, 1, 69, 80)))
    sound, _ = opened(made.data)
    assert made.engine == engine
    assert len(sound) == 48000  # cut or filled up to what the notes ask for
    assert np.abs(sound.astype(int)).max() == pytest.approx(0.9 * 32767, abs=1)


def test_both_engines_sound_alike() -> None:
    """With the real font: the loudness of every 50 ms, as our sampler and as FluidSynth play it."""
    if shutil.which("fluidsynth") is None:
        pytest.skip("needs an installed fluidsynth")
    try:
        font = soundfont.default()
    except DataError as error:
        pytest.skip(f"needs the sound font of the pretty_midi wheel: {error}")
    song = notes(*((0.25 * k, 0.25 * k + 0.4, 48 + 7 * k % 36, 50 + 11 * k % 70) for k in range(24)))
    theirs, ours = render.to_wav(song), render.to_wav(song, font=font)
    assert (theirs.engine, ours.engine) == ("fluidsynth", "rung sampler")
    blocks = [opened(made.data)[0][:156000].reshape(-1, 1200).astype(float) for made in (theirs, ours)]
    assert np.corrcoef(*(np.log10(block.std(axis=1) + 30) for block in blocks))[0, 1] > 0.97


# Picture ------------------------------------------------------------------------------------------------------------


def pixels(data: bytes) -> np.ndarray:
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(data))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB")).astype(int)


def blobs(picture: np.ndarray, *, warm: bool = False) -> list[tuple[int, int, int, int]]:
    """(left, right, top, bottom) of each run of columns with blue, or orange, pixels below the legend."""
    red, blue = picture[46:, :, 0], picture[46:, :, 2]
    is_coloured = (red - blue > 60) if warm else (blue - red > 60)
    columns = np.flatnonzero(is_coloured.any(axis=0))
    found = []
    for run in np.split(columns, np.flatnonzero(np.diff(columns) > 4) + 1):
        rows = np.flatnonzero(is_coloured[:, run].any(axis=1)) + 46
        found.append((int(run[0]), int(run[-1]), int(rows[0]), int(rows[-1])))
    return found


def test_notes_lie_where_their_time_and_pitch_say() -> None:
    picture = pixels(render.to_roll(notes((0, 1, 60, 80), (3, 4, 72, 80), (5, 5.5, 66, 80))))
    first, second, third = blobs(picture)
    second_px = (second[0] - first[0]) / 3
    assert first[1] - first[0] == pytest.approx(second_px, abs=3)
    assert third[0] - first[0] == pytest.approx(5 * second_px, abs=2)
    assert third[1] - third[0] == pytest.approx(second_px / 2, abs=3)
    row = (first[2] - second[2]) / 12  # an octave is twelve rows, upwards
    assert 5 <= row <= 10
    assert third[2] == first[2] - 6 * row
    assert first[3] - first[2] == row - 2


def test_louder_is_darker() -> None:
    picture = pixels(render.to_roll(notes((0, 1, 60, 30), (2, 3, 60, 70), (4, 5, 60, 110))))
    middles = [picture[(top + bottom) // 2, (left + right) // 2].sum() for left, right, top, bottom in blobs(picture)]
    assert middles == sorted(middles, reverse=True)
    assert len(set(middles)) == 3


@pytest.mark.parametrize("is_repeated", [True, False])
def test_prompt_has_its_own_colour(is_repeated: bool) -> None:
    """Whether or not the notes of the prompt are also among the others."""
    prompt, answer = notes((0, 1, 60, 80)), notes((3, 4, 67, 80))
    every = np.concatenate([prompt, answer]) if is_repeated else answer
    picture = pixels(render.to_roll(every, prompt_notes=prompt))
    orange, blue = blobs(picture, warm=True), blobs(picture)
    assert len(blue) == 1
    assert orange[0][1] < blue[0][0]
    alone = pixels(render.to_roll(np.concatenate([prompt, answer])))
    assert blobs(alone)[0][:2] == (orange[0][0], orange[0][1] - 2)  # two pixels more: the line where the prompt ends
    assert blobs(alone)[1] == blue[0]


def test_background_is_white_and_few_pixels_are_ink() -> None:
    picture = pixels(render.to_roll(notes((0, 1, 60, 80), (3, 4, 72, 80)), title="piano/7"))
    assert (picture == 255).all(axis=2).mean() > 0.9


def test_no_notes_and_long_titles() -> None:
    """The text stands in the middle; a title of any length leaves the picture's size alone."""
    empty = pixels(render.to_roll(notes()))
    ink = np.argwhere((empty != 255).any(axis=2))
    assert np.abs(ink.mean(axis=0) - np.array(empty.shape[:2]) / 2).max() < 8
    one = notes((0, 1, 60, 80))
    assert pixels(render.to_roll(one, title="long " * 200)).shape == pixels(render.to_roll(one)).shape


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3000), st.floats(0, 60), st.integers(0, 127), st.integers(0, 127)), max_size=5))
def test_any_notes_make_a_picture(rows: list[tuple[float, float, int, int]]) -> None:
    song = notes(*((start, start + length, pitch, velocity) for start, length, pitch, velocity in rows))
    height, width, _ = pixels(render.to_roll(song)).shape
    assert width == render.WIDTH
    assert 100 < height < 800


def test_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises_code("not-installed") as refused:
        render.to_roll(notes((0, 1, 60, 80)))
    assert "pip install 'rung[midi]'" in str(refused.value)


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import rung.recipes.piano.render"
    subprocess.run([sys.executable, "-c", code], check=True)
