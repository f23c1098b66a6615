"""Sound files in, sound files and pictures of sound out.

Reading trusts no header: libsndfile reads a WAV, an OGG or an MP3 that was cut in half without a word, so what a file
says of itself is compared with its bytes first. What cannot be learned from (silence, clipping, NaN, an array saved on
its side) is refused with a code of its own. Out of reach: a rate that is wrong but plausible, as music played at
another speed has an ordinary spectrum; a CBR MP3 without a Xing header that was cut between two frames; clipping in
files of 8 bits, or by less than about 6 dB.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rung import parse, units
from rung.errors import DataError, UserError

if TYPE_CHECKING:
    from PIL import ImageFont

    Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3")
LOWEST_RATE, HIGHEST_RATE = 4_000, 384_000  # Hz; nothing that records or plays has others
MOST_CHANNELS = 8  # 7.1; more are the samples of an array that was saved transposed
MOST_SAMPLES = 1 << 30  # of a file, over all channels: 4 GiB as float32, three hours of stereo at 48 kHz
SILENCE_DB = -60.0  # below it a window of 50 ms is silent: 33 steps of 16 bits
MOST_SILENT = 0.95  # share of silent windows; a solo trumpet with its pauses has 0.3
# Share of samples at full scale in runs of 3 or more. Three real tracks have none, a full-scale 16-bit sine 0.6 %, the
# tracks pushed 12 dB beyond full scale 4 to 16 % as WAV and 1.3 to 4 % as Vorbis or MP3, pushed by 6 dB 0.3 to 2 %.
MOST_CLIPPED = 0.01
FULL_SCALE = 32766.5 / 32768
MOST_DC = 0.02  # of full scale; real tracks have 0.0002, renders of a sound font 0.007. Worth a remark, never refused

# What programs that write into a pipe put where the size of the sound belongs.
_UNKNOWN_SIZES = (0x7FFFF000, 0x7FFFFFFF, 0x80000000, *range(0xFFFFFF00, 0x100000000))


class Levels(NamedTuple):
    """How loud a sound is; decibels are of full scale, -120 at the least."""

    peak_db: float
    rms_db: float
    clipped_share: float  # of the samples: at or beyond full scale, in runs of 3 or more
    silent_share: float  # of the windows of 50 ms: below SILENCE_DB, whatever the DC offset
    dc_offset: float  # of the worse channel


class Recording(NamedTuple):
    """A sound that was read, and what the file itself was like before it was resampled."""

    sound: np.ndarray  # float32 (samples, 1 or 2 channels), peaks within 1
    num_channels: int  # of the file
    levels: Levels  # of its first two channels


# Reading


def read_audio(source: Path, sample_rate: int) -> np.ndarray:
    """The sound of read_recording()."""
    return read_recording(source, sample_rate).sound


def read_recording(source: Path, sample_rate: int) -> Recording:
    """The sound as float32 (samples, 1 or 2 channels) at `sample_rate`, peaks within 1.

    Of more than two channels the first two are taken, the front left and right of every format; they are not mixed. A
    sound that peaks above 1, as lossy formats and floats may, is scaled down as a whole.
    """
    soundfile, _ = _libraries()
    name = _shown(source)
    try:
        with parse.open_file(source) as file:
            kind = _kind(file.read(16))
            check = {"wav": _check_wav, "ogg": _check_ogg, "mp3": _check_mp3}.get(kind or "")  # FLAC checks itself
            if check is not None:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    check(data, name)
        with _opened(source, soundfile) as file:
            num_frames, rate, subtype = file.frames, file.samplerate, file.subtype
            sound = file.read(num_frames, dtype="float32", always_2d=True)
    except OSError as error:
        raise _unreadable(name, error) from error
    except soundfile.LibsndfileError as error:
        if kind == "flac":  # its frames have checksums, and one that is cut is the commonest damage
            raise _cut_off(name, f"it cannot be decoded to its end ({_reason(error)})") from error
        raise DataError(
            f"{name} cannot be decoded ({_reason(error)}); replace or remove it", code="audio-damaged"
        ) from error
    if kind != "mp3" and len(sound) < num_frames:  # the length of an MP3 is an estimate
        raise _cut_off(name, f"its header says {num_frames} samples, {len(sound)} are there")
    num_channels = sound.shape[1]
    sound = sound[:, :2]
    if not len(sound):
        raise _empty(name)
    scale, found = _check_sound(sound, rate, name, is_float=subtype in ("FLOAT", "DOUBLE"))
    return Recording(resample(sound / np.float32(scale), rate, sample_rate), num_channels, found)


def check_sound(sound: np.ndarray, sample_rate: int, name: str, *, is_float: bool) -> float:
    """Refuses what cannot be learned from: NaN, silence, clipping. Returns what brings the sound to full scale, as a
    divisor: in floats a peak above 1 is another scale; in all else it is a decoder that overshoots a loud master."""
    return _check_sound(sound, sample_rate, name, is_float=is_float)[0]


def _check_sound(sound: np.ndarray, sample_rate: int, name: str, *, is_float: bool) -> tuple[float, Levels]:
    num_bad = int((~np.isfinite(sound)).sum())
    if num_bad:
        raise DataError(
            f"{name} has {num_bad} samples that are NaN or infinite, of {sound.size}; export it again",
            code="audio-not-finite",
        )
    scale = max(float(np.abs(sound).max(initial=0.0)), 1.0) if is_float else 1.0
    found = levels(sound / np.float32(scale), sample_rate)
    if found.silent_share > MOST_SILENT:
        raise DataError(
            f"{name} is silent: {found.silent_share:.0%} of it lies below {SILENCE_DB:.0f} dB of full scale, the limit "
            f"is {MOST_SILENT:.0%}; remove it, or cut the silence",
            code="audio-silent",
        )
    if found.clipped_share > MOST_CLIPPED:
        raise DataError(
            f"{name} is clipped: {100 * found.clipped_share:.1f} % of its samples are at full scale in runs of 3 or "
            f"more, the limit is {100 * MOST_CLIPPED:g} %; record or export it with a lower gain",
            code="audio-clipped",
        )
    return scale, found


def resample(sound: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    """(samples,) or (samples, channels) at another rate, float32, scaled down as a whole where it peaks above 1."""
    _, soxr = _libraries()
    if rate != sample_rate:
        sound = soxr.resample(sound, rate, sample_rate)
    sound = sound.astype(np.float32, copy=False)
    return np.ascontiguousarray(sound / max(float(np.abs(sound).max(initial=0.0)), 1.0), np.float32)


def read_tags(source: Path) -> dict[str, str]:
    """What the file says of itself: title, artist, genre, comment and so on. Reads its header only, and refuses one
    that is empty, no audio, or of a rate or a number of channels that cannot be."""
    soundfile, _ = _libraries()
    try:
        with _opened(source, soundfile) as file:
            tags: dict[str, str] = file.copy_metadata()
            return tags
    except OSError as error:
        raise _unreadable(_shown(source), error) from error


def levels(sound: np.ndarray, sample_rate: int) -> Levels:
    """Of (samples,) or (samples, channels). Clipping is best measured before a sound is resampled."""
    if not len(sound):
        return Levels(-120.0, -120.0, 0.0, 1.0, 0.0)
    sound = sound.reshape(len(sound), -1)
    num_clipped = 0
    for channel in sound.T:
        is_full = np.concatenate([[False], np.abs(channel) >= FULL_SCALE, [False]])
        edges = np.flatnonzero(is_full[1:] != is_full[:-1])
        runs = edges[1::2] - edges[::2]
        num_clipped += int(runs[runs >= 3].sum())
    mean = sound.mean(0, dtype=np.float64)
    loudest = np.abs(sound - mean.astype(np.float32)).max(1)
    starts = np.arange(0, len(sound), max(1, sample_rate // 20))
    return Levels(
        _decibels(float(np.abs(sound).max())),
        _decibels(float(np.sqrt(np.square(sound, dtype=np.float64).mean()))),
        num_clipped / sound.size,
        float((np.maximum.reduceat(loudest, starts) < 10 ** (SILENCE_DB / 20)).mean()),
        float(np.abs(mean).max()),
    )


def _decibels(amplitude: float) -> float:
    return round(float(20 * np.log10(max(amplitude, 1e-6))), 2) + 0.0  # never -0.0


def _libraries() -> tuple[Any, Any]:
    try:
        import soundfile
        import soxr
    except (ImportError, OSError):  # OSError: soundfile without its libsndfile
        raise UserError(
            "reading sound files needs soundfile and soxr, which are not installed; pip install 'rung[audio]'",
            code="not-installed",
        ) from None
    return soundfile, soxr


def _kind(head: bytes) -> str | None:
    """wav, flac, ogg, mp3, or None; by its first bytes, as names lie."""
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] in (b"fLaC", b"OggS"):
        return "flac" if head[:1] == b"f" else "ogg"
    return "mp3" if head[:3] == b"ID3" or _mp3_frame(head) else None


def _opened(source: Path, soundfile: Any) -> Any:
    """An open soundfile.SoundFile whose header makes sense. Raises OSError and DataError."""
    name = _shown(source)
    with parse.open_file(source) as file:
        head = file.read(1 << 16)
    if not head:
        raise _empty(name)
    kind = _kind(head)
    if kind is None:
        raise DataError(
            f"{name} is not a WAV, FLAC, OGG (Vorbis, Opus) or MP3 file: it begins with {head[:8]!r}; convert or "
            "remove it",
            code="not-audio",
        )
    if kind == "wav" and (at := head.find(b"fmt ")) >= 0 and len(head) >= at + 16:
        # Here rather than below: libsndfile does not open more than 1024 channels and would say nothing of use.
        num_channels, rate = struct.unpack_from("<HI", head, at + 10)
        _check_shape(name, num_channels, rate, None)
    try:
        file = soundfile.SoundFile(os.fspath(source) if os.name == "nt" else os.fsencode(source))
    except soundfile.LibsndfileError as error:
        if kind == "flac" and len(head) < 42:  # shorter than the header of a FLAC
            raise _empty(name) from error
        raise DataError(
            f"{name} is a damaged {kind.upper()} file ({_reason(error)}); replace or remove it", code="audio-damaged"
        ) from error
    try:
        _check_shape(name, file.channels, file.samplerate, file.frames)
    except DataError:
        file.close()
        raise
    return file


def _check_shape(name: str, num_channels: int, rate: int, num_frames: int | None) -> None:
    if num_frames == 0:
        raise _empty(name)
    if num_channels > MOST_CHANNELS or (num_frames is not None and num_frames < num_channels):
        length = "" if num_frames is None else f" of {num_frames} samples"
        raise DataError(
            f"{name} has {num_channels} channels{length}, the limit is {MOST_CHANNELS}: an array saved on its side? "
            "Write it as (samples, channels)",
            code="audio-axis",
        )
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise DataError(
            f"{name} says it has {rate} samples a second; {LOWEST_RATE} to {HIGHEST_RATE} can be: write the right rate "
            "into its header",
            code="audio-rate",
        )
    if num_frames is not None and num_frames >= 1 << 62:
        raise DataError(
            f"{name} does not say how long it is, so nobody can tell whether all of it is there; convert it once more "
            "(flac -d, then flac)",
            code="audio-damaged",
        )
    if num_frames is not None and num_frames * num_channels > MOST_SAMPLES:
        raise DataError(
            f"{name} says it has {num_frames} samples in {num_channels} channels, more than {units.count(MOST_SAMPLES)}"
            " in all; cut it into parts",
            code="too-large",
        )


def _check_wav(data: mmap.mmap, name: str) -> None:
    """Whether the data chunk is as long as it says."""
    at, size_64 = 12, None
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"ds64" and at + 24 <= len(data):
            size_64 = struct.unpack_from("<Q", data, at + 16)[0]
        if kind == b"data":
            size = size_64 if size_64 is not None and size == 0xFFFFFFFF else size
            if at + 8 + size > len(data) and size not in _UNKNOWN_SIZES:
                raise _cut_off(name, f"its header says {size} bytes of sound, {len(data) - at - 8} are there")
            return
        at += 8 + size + size % 2
    raise _cut_off(name, "it ends before its sound begins")


def _check_ogg(data: mmap.mmap, name: str) -> None:
    """Whether every page is there, up to one that says it is the last of its stream."""
    at, next_of, is_last = 0, dict[int, int](), False
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        flags = data[at + 5]
        serial, number = struct.unpack_from("<II", data, at + 14)
        num_segments = data[at + 26]
        end = at + 27 + num_segments + sum(data[at + 27 : at + 27 + num_segments])
        if end > len(data):
            raise _cut_off(name, f"its last page has {len(data) - at} of {end - at} bytes")
        if number != next_of.get(serial, number):
            raise _cut_off(name, f"page {next_of[serial]} is missing, {number} comes instead")
        next_of[serial], is_last, at = number + 1, bool(flags & 4), end
    if not is_last:
        raise _cut_off(name, f"it ends after {sum(next_of.values())} pages, none of which says it is the last")


_BITRATES = {  # kbit/s, by version (1: MPEG-1) and layer
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def _mp3_frame(head: bytes) -> int:
    """How many bytes the frame has that begins here; 0 where none does. Frames of a free bit rate do not count."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    version, layer = (head[1] >> 3) & 3, 4 - ((head[1] >> 1) & 3)  # version 3: MPEG-1, 2: MPEG-2, 0: MPEG-2.5
    bitrate, rate, padding = head[2] >> 4, (head[2] >> 2) & 3, (head[2] >> 1) & 1
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return 0
    hz = (44100, 48000, 32000)[rate] // {3: 1, 2: 2, 0: 4}[version]
    bits = 1000 * _BITRATES[1 if version == 3 else 2, layer][bitrate - 1]
    if layer == 1:
        return (12 * bits // hz + padding) * 4
    return (72 if layer == 3 and version != 3 else 144) * bits // hz + padding


def _check_mp3(data: mmap.mmap, name: str) -> None:
    """Whether the frames that its Xing, Info or VBRI header counts are there, and the last one is whole."""
    at, end = 0, len(data)
    while data[at : at + 3] == b"ID3" and at + 10 <= end:
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    if at >= end:
        raise _cut_off(name, "it ends inside its tags")
    if data[end - 128 : end - 125] == b"TAG":
        end -= 128
    if data[end - 32 : end - 24] == b"APETAGEX":
        size, _, flags = struct.unpack_from("<III", data, end - 20)
        end -= size + (32 if flags >> 31 else 0)

    first, num_frames, overrun = -1, 0, 0
    while at + 4 <= end:
        size = _mp3_frame(data[at : at + 4])
        is_like_first = first < 0 or (data[at + 1] & 0xFE) == (data[first + 1] & 0xFE)
        if not size or not is_like_first:
            at = data.find(b"\xff", at + 1, end)
            if at < 0:
                break
            continue
        if first < 0:
            follower = data[at + size : at + size + 4]
            if at + size + 4 <= end and not _mp3_frame(follower):
                at += 1  # two bytes of something else that look like a frame
                continue
            first = at
        if at + size > end:
            overrun = at + size - end
            break
        num_frames, at = num_frames + 1, at + size
    if first < 0:
        raise DataError(f"{name} has no MP3 frames; replace or remove it", code="audio-damaged")

    head, declared = data[first : first + 200], None
    if (mark := max(head.find(b"Xing", 0, 44), head.find(b"Info", 0, 44))) > 0:
        if head[mark + 7] & 1:
            declared = struct.unpack_from(">I", head, mark + 8)[0]
    elif head[36:40] == b"VBRI":
        declared = struct.unpack_from(">I", head, 50)[0]
    if declared is not None:
        # The frame that holds the header is not counted by most programs; one frame is 26 ms.
        if num_frames < declared:
            raise _cut_off(name, f"its header says {declared} frames, {num_frames} are there")
    elif overrun:
        raise _cut_off(name, f"its last frame lacks {overrun} bytes")


def _cut_off(name: str, what: str) -> DataError:
    return DataError(f"{name} is cut off: {what}; copy or download it again", code="audio-truncated")


def _empty(name: str) -> DataError:
    return DataError(f"{name} is empty: it holds no sound; remove it", code="audio-empty")


def _unreadable(name: str, error: OSError) -> DataError:
    reason = error.strerror or error
    return DataError(f"cannot read {name}: {reason}; check the file and its permissions", code="no-file")


def _shown(source: Path) -> str:
    """The name of a file, also where it is not valid text."""
    return os.fsencode(source.name).decode("utf-8", "replace")


def _reason(error: Exception) -> str:
    """What libsndfile said, in one line, without the path that it repeats."""
    text = getattr(error, "error_string", None) or str(error)
    return " ".join(text.split()).removeprefix("Error : ").rstrip(".")


# Writing


def wav_bytes(sound: np.ndarray, sample_rate: int) -> bytes:
    """A WAV of 16 bits from (samples,) or (samples, 1 or 2 channels). What lies beyond full scale is limited to it."""
    if sound.ndim > 2 or (sound.ndim == 2 and sound.shape[1] not in (1, 2)):
        raise ValueError(f"a sound has shape (samples,) or (samples, 1 or 2), not {sound.shape}")
    if not np.isfinite(sound).all():
        raise DataError(
            f"{int((~np.isfinite(sound)).sum())} of {sound.size} samples to write are NaN or infinite; what made them "
            "is broken",
            code="audio-not-finite",
        )
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if sound.ndim == 1 else sound.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.rint(np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


# Pictures

WIDTH = 1200  # pixels
_LEFT, _RIGHT, _TOP = 60, WIDTH - 16, 46
_BANDS, _BAND_PIXELS = 128, 3
_RANGE_DB = 80.0  # what lies further below the loudest spot is drawn as silence
_INK, _GREY = (40, 40, 40), (110, 110, 110)
# Silence to loud, as lightness and the two colour axes of OKLab: lightness only falls, so that loud is always darker.
_COLOURS = ((0.985, 0.0, 0.004), (0.90, -0.035, 0.055), (0.74, -0.095, 0.020), (0.55, -0.055, -0.075),
            (0.37, 0.020, -0.135), (0.20, 0.055, -0.085))  # fmt: skip


def spectrogram_png(sound: np.ndarray, sample_rate: int, title: str = "") -> bytes:
    """PNG of the log-mel spectrum: time to the right, frequency upwards, darker is louder. Channels are averaged."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError(
            "a spectrogram needs Pillow, which is not installed; pip install 'rung[audio]'", code="not-installed"
        ) from None
    big, small = ImageFont.load_default(16), ImageFont.load_default(12)
    mono = np.nan_to_num(sound.reshape(len(sound), -1).mean(1, dtype=np.float32)) if len(sound) else np.zeros(0)
    bottom = _TOP + _BANDS * _BAND_PIXELS
    image = Image.new("RGB", (WIDTH, bottom + 40 if len(mono) else 160), "white")
    draw = ImageDraw.Draw(image)
    if not len(mono):
        draw.text((WIDTH / 2, 80), "no sound", fill=_GREY, font=big, anchor="mm")
    else:
        power = _mel_power(mono, sample_rate, _RIGHT - _LEFT)
        shown = np.clip(1 + 10 * np.log10(power / max(float(power.max()), 1e-10) + 1e-12) / _RANGE_DB, 0, 1)
        pixels = _colour_table()[np.rint(255 * shown).astype(int)]
        pixels = pixels[::-1].repeat(_BAND_PIXELS, axis=0)
        image.paste(Image.fromarray(pixels).resize((_RIGHT - _LEFT, bottom - _TOP)), (_LEFT, _TOP))

        highest = _mel(sample_rate / 2)
        for hz in (100, 200, 500, 1000, 2000, 5000, 10000, 20000):
            y = round(bottom - _mel(hz) / highest * (bottom - _TOP))
            if _TOP + 6 < y < bottom - 6:
                draw.line([(_LEFT - 5, y), (_LEFT - 1, y)], fill=_GREY)
                label = f"{hz} Hz" if hz < 1000 else f"{hz // 1000} kHz"
                draw.text((_LEFT - 8, y), label, fill=_GREY, font=small, anchor="rm")
        seconds = len(mono) / sample_rate
        per_s = (_RIGHT - _LEFT) / seconds
        steps = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600)
        step = next((s for s in steps if s * per_s >= 64), int(128 / per_s))
        for second in np.arange(0, seconds + 1e-9, step):
            x = round(_LEFT + float(second) * per_s)
            draw.line([(x, bottom), (x, bottom + 5)], fill=_GREY)
            label = f"{second:.2f}".rstrip("0").rstrip(".") + " s"
            if seconds >= 120:
                label = f"{int(second) // 60}:{int(second) % 60:02d}"
            draw.text((x, bottom + 9), label, fill=_GREY, font=small, anchor="ma" if x < _RIGHT - 12 else "ra")
        draw.line([(_LEFT, bottom), (_RIGHT, bottom)], fill=_GREY)

        # How loud a colour is, from the right.
        x = _RIGHT - round(draw.textlength("0 dB", small))
        draw.text((x, 24), "0 dB", fill=_GREY, font=small, anchor="lm")
        for k in range(96):
            red, green, blue = _colour_table()[round(255 * k / 95)].tolist()
            draw.line([(x - 104 + k, 19), (x - 104 + k, 28)], fill=(red, green, blue))
        draw.text((x - 112, 24), f"-{_RANGE_DB:.0f}", fill=_GREY, font=small, anchor="rm")
        title = fit_text(title, big, x - 112 - 40 - _LEFT)
    draw.text((_LEFT, 14), title, fill=_INK, font=big)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def fit_text(text: str, font: Font, room: float) -> str:
    """The text, shortened with dots to fit."""
    text = text[: max(int(room / 2), 0)]  # no letter is narrower; the loop below need not start far away
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "..."


def _mel(hz: float) -> float:
    return float(2595 * np.log10(1 + hz / 700))


def _mel_power(mono: np.ndarray, sample_rate: int, num_columns: int) -> np.ndarray:
    """Mean power by mel band and column, (bands, columns); a column shows all of the sound that falls into it."""
    size = 1 << max(6, round(np.log2(0.085 * sample_rate)))  # 2048 at 24 kHz: bands below 200 Hz are still apart
    hop = min(max(len(mono) // num_columns, 1), size // 4)
    padded = np.pad(mono, (size // 2, size // 2 + size))
    # A triangle for each band, from the middle of the one before to that of the next, of equal weight in all.
    mels = np.linspace(0, _mel(sample_rate / 2), _BANDS + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    hz = np.fft.rfftfreq(size, 1 / sample_rate)
    rising = (hz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hz) / (edges[2:] - edges[1:-1])[:, None]
    weights = np.maximum(0, np.minimum(rising, falling))
    for band in np.flatnonzero(weights.sum(1) < 1):  # narrower than the spectrum's step: between its two neighbours
        at = edges[band + 1] / hz[1]
        low, part = int(at), at - int(at)
        weights[band] = 0
        weights[band, low : low + 2] = 1 - part, part
    weights /= weights.sum(1, keepdims=True)

    starts = np.arange(0, len(mono), hop)
    window = np.hanning(size).astype(np.float32)
    total, count = np.zeros((_BANDS, num_columns)), np.zeros(num_columns)
    column_of = np.minimum(starts * num_columns // len(mono), num_columns - 1)
    for at in range(0, len(starts), 256):
        frames = np.stack([padded[start : start + size] for start in starts[at : at + 256]]) * window
        bands = weights @ np.square(np.abs(np.fft.rfft(frames, axis=1))).T
        np.add.at(total.T, column_of[at : at + 256], bands.T)
        np.add.at(count, column_of[at : at + 256], 1)
    filled = np.maximum.accumulate(np.where(count > 0, np.arange(num_columns), 0))  # a short sound has gaps
    result: np.ndarray = (total / np.maximum(count, 1))[:, filled]
    return result


def _colour_table() -> np.ndarray:
    """256 colours, straight lines between _COLOURS in OKLab."""
    places = np.linspace(0, len(_COLOURS) - 1, 256)
    lab = np.stack([np.interp(places, range(len(_COLOURS)), axis) for axis in zip(*_COLOURS)], 1)
    to_lms = np.array(
        [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.291485548]]
    )
    to_rgb = np.array(
        [[4.0767416621, -3.3077115913, 0.2309699292], [-1.2684380046, 2.6097574011, -0.3413193965],
         [-0.0041960863, -0.7034186147, 1.707614701]]
    )  # fmt: skip
    linear = np.clip((lab @ to_lms.T) ** 3 @ to_rgb.T, 0, 1)
    rgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    table: np.ndarray = np.rint(255 * rgb).astype(np.uint8)
    return table
