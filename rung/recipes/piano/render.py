"""Notes as a WAV to hear and a piano roll (PNG) to see.

The sound comes from FluidSynth if one is installed and works, else from rung's own sampler, both dry and with the same
font; `Rendered.engine` says which, and why. Each file is normalised to a peak of 0.9, so compare loudness within a
file, not between files.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from rung.data import soundfont
from rung.data.audio import fit_text, wav_bytes
from rung.errors import UserError
from rung.recipes.piano.midi import write_midi

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

    Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

TAIL_S = 1.0  # time for the last note to die away
WIDTH = 1200  # pixels of a piano roll
SOFT, LOUD = np.array([150, 196, 235]), np.array([12, 52, 118])  # blue, by velocity
PROMPT_SOFT, PROMPT_LOUD = np.array([248, 200, 130]), np.array([190, 84, 0])  # orange
INK, GREY, LINE, FAINT = (40, 40, 40), (110, 110, 110), (212, 212, 212), (238, 238, 238)

Layout = Literal["before", "among", "replaced"]  # where a prompt lies: before the notes, among them, in their place


class Rendered(NamedTuple):
    """The bytes of a WAV file and who made the sound."""

    data: bytes
    engine: str


def to_wav(notes: np.ndarray, *, sample_rate: int = 24000, font: soundfont.SoundFont | None = None) -> Rendered:
    """Mono, 16 bits, one second longer than the notes. Only rung's own sampler plays a `font` that is passed."""
    _, end, _, _ = soundfont.columns(notes)
    engine = "rung sampler"
    binary = shutil.which("fluidsynth") if font is None else None
    sound = None
    if not len(end):
        sound, engine = np.zeros(round(TAIL_S * sample_rate), np.float32), "silence"
    elif binary:
        try:
            played = _fluidsynth(binary, notes, sample_rate)
            num = round((float(end.max()) + TAIL_S) * sample_rate)
            sound = soundfont.normalise(np.pad(played[:num], (0, max(num - len(played), 0))))
            engine = "fluidsynth"
        except (OSError, subprocess.SubprocessError, wave.Error, EOFError, ValueError) as error:
            engine = f"rung sampler (fluidsynth failed: {error})"
    if sound is None:
        sound = soundfont.render(font or soundfont.default(), notes, sample_rate=sample_rate, tail_s=TAIL_S)
    return Rendered(wav_bytes(sound, sample_rate), engine)


def _fluidsynth(binary: str, notes: np.ndarray, sample_rate: int) -> np.ndarray:
    """What the FluidSynth binary makes of the notes, without reverb and chorus, as our sampler has none."""
    with tempfile.TemporaryDirectory() as folder:
        font, song, out = (Path(folder) / name for name in ("font.sf2", "notes.mid", "sound.wav"))
        font.write_bytes(soundfont.default_bytes())
        song.write_bytes(write_midi(notes, TAIL_S))
        for gain in ("0.6", "0.1"):  # the second where the first one clips
            command = [binary, "-ni", "-q", "-R", "0", "-C", "0", "-g", gain, "-r", str(sample_rate)]
            command += ["-F", str(out), str(font), str(song)]
            done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=300)
            if done.returncode != 0 or not out.is_file():
                lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
                raise ValueError(lines[-1] if lines else f"no sound, exit code {done.returncode}")
            with wave.open(str(out), "rb") as file:
                if file.getsampwidth() != 2 or file.getframerate() != sample_rate:
                    raise ValueError(f"it wrote {8 * file.getsampwidth()} bits at {file.getframerate()} Hz")
                frames = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
            peak = int(np.abs(frames.astype(np.int32)).max(initial=0))
            if peak < 32767:
                break
        if peak == 0:
            raise ValueError("it wrote silence")
        return frames.astype(np.float32).mean(axis=1) / np.float32(32768)


class Roll:
    """Where a note lies in the picture: time to the right, pitch upwards."""

    def __init__(self, notes: np.ndarray) -> None:
        self.left, self.right, self.top = 52, WIDTH - 16, 46
        self.begin_s = float(np.floor(notes["start"].min()))
        self.end_s = max(float(notes["end"].max()), self.begin_s + 1.0)
        low, high = int(notes["pitch"].min()) - 2, int(notes["pitch"].max()) + 2
        while high - low < 24:  # two octaves at least: a single note should not fill the picture
            low, high = low - 1, high + 1
        self.low, self.high = low, high
        self.row = max(5, min(10, 400 // (high - low + 1)))  # pixels a semitone
        self.bottom = self.top + self.row * (high - low + 1)
        self.height = self.bottom + 40

    def x(self, time_s: float) -> int:
        return round(self.left + (time_s - self.begin_s) / (self.end_s - self.begin_s) * (self.right - self.left))

    def y(self, pitch: int) -> int:
        """The upper edge of a pitch's row."""
        return self.top + (self.high - pitch) * self.row


def to_roll(
    notes: np.ndarray, *, prompt_notes: np.ndarray | None = None, layout: Layout = "before", title: str = ""
) -> bytes:
    """PNG of the notes in blue, darker is louder; those of the prompt, when given, in orange.

    A prompt that lies before the notes ends at a dashed line. One that the notes replace has the lower half of each
    row and the notes the upper, as both would lie on top of each other.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError(
            "a piano roll needs Pillow, which is not installed; pip install 'rung[midi]'", code="not-installed"
        ) from None
    prompt = notes[:0] if prompt_notes is None else prompt_notes
    fields = ["start", "end", "pitch", "velocity"]
    every = np.concatenate([notes[fields], prompt[fields]])
    soundfont.columns(every)
    big, small = ImageFont.load_default(16), ImageFont.load_default(12)
    roll = Roll(every) if len(every) else None
    image = Image.new("RGB", (WIDTH, roll.height if roll else 160), "white")
    draw = ImageDraw.Draw(image)
    if roll is None:
        draw.text((WIDTH / 2, 80), "no notes", fill=GREY, font=big, anchor="mm")
        left, right = 16, WIDTH - 16
    else:
        _axes(draw, roll, small)
        # One bar a note. Soft ones first, so that a loud note is never hidden; a white edge parts repeated notes.
        half = roll.row // 2 if layout == "replaced" else 0  # the prompt begins half a row lower, the notes end there
        for some, colours, upper, lower in (
            (notes, (SOFT, LOUD), 0, half - 1 if half else roll.row - 2),
            (prompt, (PROMPT_SOFT, PROMPT_LOUD), half, roll.row - 2),
        ):
            for note in some[np.argsort(some["velocity"], kind="stable")]:
                x, end, y = roll.x(float(note["start"])), roll.x(float(note["end"])), roll.y(int(note["pitch"]))
                box = [(x, y + upper), (max(end - 2, x + 1), y + lower)]
                draw.rectangle(box, fill=_colour(float(note["velocity"]), *colours))
        if len(prompt) and layout == "before":
            x = roll.x(float(prompt["end"].max()))
            for y in range(roll.top, roll.bottom, 8):
                draw.line([(x, y), (x, min(y + 3, roll.bottom))], fill=tuple(PROMPT_LOUD.tolist()))
        left, right = roll.left, _legend(draw, roll, small, bool(len(prompt))) - 24
    draw.text((left, 14), fit_text(title, big, right - left), fill=INK, font=big)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _axes(draw: ImageDraw.ImageDraw, roll: Roll, font: Font) -> None:
    """A line and a name at every C, a line and a label every few seconds, a tick at every second that has room."""
    for pitch in range(roll.low, roll.high + 1):
        if pitch % 12 == 0:
            y = roll.y(pitch) + roll.row  # below the C: the line parts two octaves
            draw.line([(roll.left, y), (roll.right, y)], fill=LINE)
            draw.text((roll.left - 8, y - roll.row / 2), f"C{pitch // 12 - 1}", fill=GREY, font=font, anchor="rm")
    per_s = (roll.right - roll.left) / (roll.end_s - roll.begin_s)
    step = next((s for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600) if s * per_s >= 64), int(128 / per_s))
    if per_s >= 10:
        for second in np.arange(roll.begin_s, roll.end_s + 1e-9):
            x = roll.x(float(second))
            draw.line([(x, roll.bottom), (x, roll.bottom + 2)], fill=GREY)
    for second in np.arange(np.ceil(roll.begin_s / step) * step, roll.end_s + 1e-9, step):
        x = roll.x(float(second))
        draw.line([(x, roll.top), (x, roll.bottom - 1)], fill=FAINT)
        draw.line([(x, roll.bottom), (x, roll.bottom + 5)], fill=GREY)
        label = f"{second:.0f} s" if roll.end_s < 120 else f"{int(second) // 60}:{int(second) % 60:02d}"
        draw.text((x, roll.bottom + 9), label, fill=GREY, font=font, anchor="ma")
    draw.line([(roll.left, roll.bottom), (roll.right, roll.bottom)], fill=GREY)


def _colour(velocity: float, soft: np.ndarray, loud: np.ndarray) -> tuple[int, int, int]:
    # Most playing lies between 20 and 110: the ends of the scale are given to that.
    part = min(max((velocity - 20) / 90, 0.0), 1.0)
    red, green, blue = np.rint(soft + (loud - soft) * part).astype(int).tolist()
    return red, green, blue


def _legend(draw: ImageDraw.ImageDraw, roll: Roll, font: Font, has_prompt: bool) -> int:
    """soft [colours] loud, once for each kind of note, from the right; returns where it begins."""
    kinds = [("model", SOFT, LOUD), ("prompt", PROMPT_SOFT, PROMPT_LOUD)] if has_prompt else [("", SOFT, LOUD)]
    x = roll.right
    for name, soft, loud in kinds:
        x -= round(draw.textlength("loud", font))
        draw.text((x, 24), "loud", fill=GREY, font=font, anchor="lm")
        for k in range(64):
            draw.line([(x - 72 + k, 19), (x - 72 + k, 28)], fill=_colour(20 + 90 * k / 63, soft, loud))
        x -= 80 + round(draw.textlength("soft", font))
        draw.text((x, 24), "soft", fill=GREY, font=font, anchor="lm")
        if name:
            x -= 10 + round(draw.textlength(name, font))
            draw.text((x, 24), name, fill=INK, font=font, anchor="lm")
        x -= 28
    return x + 28
