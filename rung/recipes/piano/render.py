"""Notes as something to hear (WAV) and something to see (a piano roll in PNG).

The sound comes from an installed FluidSynth when it works, else from rung's own sampler, both dry and with the same
font; `Rendered.engine` says which, and why not the other. What the notes are worth is for metrics.py to say.

The one surprising thing is that the loudest peak is always at 0.9 of full scale: two files cannot be compared by
loudness, only the notes inside one can.
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
from rung.errors import UserError

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

TAIL_S = 1.0  # time for the last note to die away
TICKS_PER_S = 960  # of the MIDI file that FluidSynth gets: 480 a quarter at 120 quarters a minute
SOFT, LOUD = np.array([150, 196, 235]), np.array([12, 52, 118])  # blue, by velocity
PROMPT_SOFT, PROMPT_LOUD = np.array([248, 200, 130]), np.array([190, 84, 0])  # orange
INK, GREY, LINE, FAINT = (40, 40, 40), (110, 110, 110), (212, 212, 212), (238, 238, 238)

Half = Literal["upper", "lower"] | None
Layout = Literal["before", "among", "replaced"]  # where a prompt lies: before the notes, among them, in their place


class Rendered(NamedTuple):
    """The bytes of a WAV file and who made the sound."""

    data: bytes
    engine: str


def to_wav(notes: np.ndarray, *, sample_rate: int = 24000, font: soundfont.SoundFont | None = None) -> Rendered:
    """Mono, 16 bits, one second longer than the notes. A `font` of one's own is played by the own sampler."""
    _, end, _, _ = soundfont.columns(notes)
    if not len(end):
        return Rendered(_wav(np.zeros(round(TAIL_S * sample_rate), np.float32), sample_rate), "silence")
    engine = "rung sampler"
    binary = shutil.which("fluidsynth") if font is None else None
    if binary:
        try:
            sound = _fluidsynth(binary, notes, sample_rate)
            num = round((float(end.max()) + TAIL_S) * sample_rate)
            sound = np.pad(sound[:num], (0, max(num - len(sound), 0)))
            return Rendered(_wav(soundfont.normalise(sound), sample_rate), "fluidsynth")
        except (OSError, subprocess.SubprocessError, wave.Error, EOFError, ValueError) as error:
            engine = f"rung sampler (fluidsynth failed: {error})"
    sound = soundfont.render(font or soundfont.default(), notes, sample_rate=sample_rate, tail_s=TAIL_S)
    return Rendered(_wav(sound, sample_rate), engine)


def _wav(sound: np.ndarray, sample_rate: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.rint(sound * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def _fluidsynth(binary: str, notes: np.ndarray, sample_rate: int) -> np.ndarray:
    """What the FluidSynth binary makes of the notes, without reverb and chorus, as our sampler has none."""
    with tempfile.TemporaryDirectory() as folder:
        font, song, out = (Path(folder) / name for name in ("font.sf2", "notes.mid", "sound.wav"))
        font.write_bytes(soundfont.default_bytes())
        song.write_bytes(_midi(notes))
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


def _midi(notes: np.ndarray) -> bytes:
    """The least MIDI file that plays the notes on program 0 and lasts as long as our own sound does."""
    start, end, pitch, velocity = soundfont.columns(notes)
    on = np.rint(start * TICKS_PER_S).astype(np.int64)
    off = np.maximum(np.rint(end * TICKS_PER_S).astype(np.int64), on + 1)
    events = [(tick, 1, key, max(loud, 1)) for tick, key, loud in zip(on.tolist(), pitch.tolist(), velocity.tolist())]
    events += [(tick, 0, key, 0) for tick, key in zip(off.tolist(), pitch.tolist())]
    body, now = bytearray(b"\x00\xc0\x00"), 0
    for tick, is_on, key, loud in sorted(events):  # at one tick, ends before starts
        body += _varied(tick - now) + bytes([0x80 | is_on << 4, key, loud])
        now = tick
    body += _varied(round(TAIL_S * TICKS_PER_S)) + b"\xff\x2f\x00"
    head = b"MThd" + (6).to_bytes(4, "big") + bytes([0, 0, 0, 1]) + (TICKS_PER_S // 2).to_bytes(2, "big")
    return head + b"MTrk" + len(body).to_bytes(4, "big") + bytes(body)


def _varied(number: int) -> bytes:
    """A number in groups of seven bits, the highest first, as MIDI writes time."""
    groups = [number & 127]
    while number := number >> 7:
        groups.append(number & 127 | 128)
    return bytes(reversed(groups))


class Roll:
    """Where a note lies in the picture: time to the right, pitch upwards."""

    def __init__(self, notes: np.ndarray, width: int) -> None:
        self.left, self.right, self.top, self.bottom_margin = 52, width - 16, 46, 40
        start, end = float(notes["start"].min()), float(notes["end"].max())
        self.begin_s = float(np.floor(start))
        self.end_s = max(end, self.begin_s + 1.0)
        low, high = int(notes["pitch"].min()) - 2, int(notes["pitch"].max()) + 2
        while high - low < 24:  # two octaves at least: a single note should not fill the picture
            low, high = low - 1, high + 1
        self.low, self.high = low, high
        self.row = max(5, min(10, 400 // (high - low + 1)))  # pixels a semitone
        self.bottom = self.top + self.row * (high - low + 1)
        self.height = self.bottom + self.bottom_margin

    def x(self, time_s: float) -> int:
        return round(self.left + (time_s - self.begin_s) / (self.end_s - self.begin_s) * (self.right - self.left))

    def y(self, pitch: int) -> int:
        """The upper edge of a pitch's row."""
        return self.top + (self.high - pitch) * self.row


def to_roll(
    notes: np.ndarray,
    *,
    prompt_notes: np.ndarray | None = None,
    layout: Layout = "before",
    width: int = 1200,
    title: str = "",
) -> bytes:
    """PNG of the notes in blue, darker is louder; those of the prompt, when given, in orange.

    A prompt that lies before the notes ends at a dashed line. One that the notes replace has the lower half of each
    row and the notes the upper, as both would lie on top of each other.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError("a piano roll needs Pillow, which is not installed; pip install 'rung[midi]'") from None
    if width < 300:
        raise UserError(f"a piano roll of {width} pixels cannot be read; give width=300 or more")
    prompt = notes[:0] if prompt_notes is None else prompt_notes
    fields = ["start", "end", "pitch", "velocity"]
    every = np.concatenate([notes[fields], prompt[fields]])
    soundfont.columns(every)
    big, small = ImageFont.load_default(16), ImageFont.load_default(12)
    if not len(every):
        image = Image.new("RGB", (width, 160), "white")
        draw = ImageDraw.Draw(image)
        draw.text((width / 2, 80), "no notes", fill=GREY, font=big, anchor="mm")
        draw.text((16, 14), _cut(title, big, width - 32), fill=INK, font=big)
        return _png(image)
    roll = Roll(every, width)
    image = Image.new("RGB", (width, roll.height), "white")
    draw = ImageDraw.Draw(image)
    _axes(draw, roll, small)
    halves: tuple[Half, Half] = ("upper", "lower") if layout == "replaced" else (None, None)
    _bars(draw, roll, notes, (SOFT, LOUD), halves[0])
    _bars(draw, roll, prompt, (PROMPT_SOFT, PROMPT_LOUD), halves[1])
    if len(prompt) and layout == "before":
        _dashes(draw, roll.x(float(prompt["end"].max())), roll.top, roll.bottom)
    legend = _legend(draw, roll, small, bool(len(prompt)))
    draw.text((roll.left, 14), _cut(title, big, legend - roll.left - 24), fill=INK, font=big)
    return _png(image)


def _axes(draw: ImageDraw.ImageDraw, roll: Roll, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> None:
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
        draw.text((x, roll.bottom + 9), _clock(float(second), roll.end_s), fill=GREY, font=font, anchor="ma")
    draw.line([(roll.left, roll.bottom), (roll.right, roll.bottom)], fill=GREY)


def _bars(
    draw: ImageDraw.ImageDraw, roll: Roll, notes: np.ndarray, colours: tuple[np.ndarray, np.ndarray], half: Half
) -> None:
    """One bar a note. Soft ones first, so that a loud note is never hidden; a white edge parts repeated notes."""
    for note in notes[np.argsort(notes["velocity"], kind="stable")]:
        left, right = roll.x(float(note["start"])), roll.x(float(note["end"]))
        top = roll.y(int(note["pitch"]))
        first = top + (roll.row // 2 if half == "lower" else 0)
        last = top + (roll.row // 2 - 1 if half == "upper" else roll.row - 2)
        box = [(left, first), (max(right - 2, left + 1), last)]
        draw.rectangle(box, fill=_colour(float(note["velocity"]), *colours))


def _colour(velocity: float, soft: np.ndarray, loud: np.ndarray) -> tuple[int, int, int]:
    # Most playing lies between 20 and 110: the ends of the scale are given to that.
    part = min(max((velocity - 20) / 90, 0.0), 1.0)
    red, green, blue = np.rint(soft + (loud - soft) * part).astype(int).tolist()
    return red, green, blue


def _legend(
    draw: ImageDraw.ImageDraw, roll: Roll, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, has_prompt: bool
) -> int:
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


def _dashes(draw: ImageDraw.ImageDraw, x: int, top: int, bottom: int) -> None:
    for y in range(top, bottom, 8):
        draw.line([(x, y), (x, min(y + 3, bottom))], fill=tuple(PROMPT_LOUD.tolist()))


def _clock(second: float, end_s: float) -> str:
    return f"{second:.0f} s" if end_s < 120 else f"{int(second) // 60}:{int(second) % 60:02d}"


def _cut(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, room: float) -> str:
    """The text, shortened with dots to fit."""
    text = text[: max(int(room / 2), 0)]  # no letter is narrower; the loop below need not start far away
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "..."


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
