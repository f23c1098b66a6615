"""Reads notes out of MIDI files and writes them into one.

Reading merges all tracks but the drums. A file that cannot be read raises DataError; whether that ends anything is the
caller's decision.

The one surprising thing is that times are worked out here, from ticks and the tempo map in float64: the parser's own
seconds are float32, which after an hour of music are 0.2 ms apart.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rung.errors import DataError, UserError
from rung.recipes.piano.channels import read_channels
from rung.recipes.piano.notes import join, make, seconds_at
from rung.recipes.piano.pedal import extend

TICKS_PER_QUARTER = 1000
TICK_S = 0.0005  # at 120 quarters a minute: 20 ticks in a unit of the tokenizer
DRUMS = 9  # the channel of drums, counted from 0


def read_midi(source: Path | bytes, sustain: bool = False) -> np.ndarray:
    """Notes in seconds, all pitches; from a file or from its bytes. With `sustain` as long as the pedal holds them."""
    symusic = _symusic()
    where = "MIDI data" if isinstance(source, bytes) else str(source)
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {where}: {error.strerror or error}; check the file and its rights") from error
    try:
        score = symusic.Score.from_midi(data)
    except Exception as error:  # the parser raises RuntimeError for most damage, but promises nothing
        reason = str(error).removeprefix("MiniMidi: ").removesuffix(": iostream error") or type(error).__name__
        raise DataError(f"{where} is not a readable MIDI file ({reason}); replace or remove it") from error
    if score.ticks_per_quarter < 1:
        raise DataError(f"{where} is not a readable MIDI file (a quarter has no ticks); replace or remove it")
    tempo = _tempo(score)
    if sustain:
        return _sustained(data, tempo)
    columns = [track.notes.numpy() for track in score.tracks if not track.is_drum and len(track.notes)]
    if not columns:
        return join([])
    start, duration, pitch, velocity = (
        np.concatenate([c[name] for c in columns]) for name in ("time", "duration", "pitch", "velocity")
    )
    start = start.astype(np.int64)
    return make(seconds_at(start, *tempo), seconds_at(start + duration, *tempo), pitch, velocity)


def write_midi(notes: np.ndarray) -> bytes:
    """A one-track file, exact to a quarter of a millisecond.

    MIDI cannot tell two sounding notes of one pitch apart: quantise first where that matters.
    """
    symusic = _symusic()
    start = np.rint(notes["start"] / TICK_S).astype(np.int32)
    end = np.maximum(np.rint(notes["end"] / TICK_S).astype(np.int32), start + 1)
    track = symusic.Track("piano", 0, False)
    columns = zip(start.tolist(), (end - start).tolist(), notes["pitch"].tolist(), notes["velocity"].tolist())
    for time, duration, pitch, velocity in columns:
        track.notes.append(symusic.Note(time, duration, pitch, min(max(velocity, 1), 127)))  # 0 would mean the end
    score = symusic.Score(TICKS_PER_QUARTER)
    score.tempos.append(symusic.Tempo(0, 60.0 / (TICK_S * TICKS_PER_QUARTER)))
    score.tracks.append(track)
    return bytes(score.dumps_midi())


def _tempo(score: Any) -> tuple[np.ndarray, np.ndarray]:
    """The ticks at which the tempo changes, and the seconds of a tick from there on."""
    tempos = score.tempos.numpy()
    change_at = np.concatenate([[0], tempos["time"]]).astype(np.int64)
    mspq = np.concatenate([[500_000], tempos["mspq"]]).astype(np.float64)  # 120 a minute until told otherwise
    order = np.argsort(change_at, kind="stable")
    return change_at[order], mspq[order] * 1e-6 / score.ticks_per_quarter


def _sustained(data: bytes, tempo: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    parts = []
    for number, channel in read_channels(data).items():
        if number != DRUMS:
            start, end, pitch, velocity = channel.note_columns()
            times, is_down = channel.pedal_columns()
            notes = make(seconds_at(start, *tempo), seconds_at(end, *tempo), pitch, velocity)
            parts.append(extend(notes, seconds_at(times, *tempo), is_down))
    return join(parts)


def _symusic() -> ModuleType:
    try:
        import symusic
    except ImportError as error:
        raise UserError("MIDI files need the package symusic; install it with `pip install 'rung[midi]'`") from error
    module: ModuleType = symusic
    return module
