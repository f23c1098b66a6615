"""Reads notes out of MIDI files and writes them into one.

Reading merges all tracks but the drums. A file that cannot be read raises DataError; whether that ends anything is the
caller's decision.

The one surprising thing is that times are worked out here, from ticks and the tempo map in float64: the parser's own
seconds are float32, which after an hour of music are 0.2 ms apart.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from rung.errors import DataError, UserError
from rung.recipes.piano.notes import NOTE, join, make, seconds_at

TICKS_PER_QUARTER = 1000
TICK_S = 0.0005  # at 120 quarters a minute: 20 ticks in a unit of the tokenizer


def read_midi(source: Path | bytes) -> np.ndarray:
    """Notes in seconds, all pitches; from a file or from its bytes."""
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
    ticks = [track.notes.numpy() for track in score.tracks if not track.is_drum and len(track.notes)]
    return join([_in_seconds(columns, score) for columns in ticks])


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


def _in_seconds(columns: dict[str, np.ndarray], score: object) -> np.ndarray:
    start = columns["time"].astype(np.int64)
    end = start + columns["duration"]
    tempos = score.tempos.numpy()  # type: ignore[attr-defined]
    change_at = np.concatenate([[0], tempos["time"]]).astype(np.int64)
    mspq = np.concatenate([[500_000], tempos["mspq"]]).astype(np.float64)  # 120 a minute until told otherwise
    order = np.argsort(change_at, kind="stable")
    s_per_tick = mspq[order] * 1e-6 / score.ticks_per_quarter  # type: ignore[attr-defined]
    if len(start) == 0:
        return np.empty(0, dtype=NOTE)
    return make(
        seconds_at(start, change_at[order], s_per_tick),
        seconds_at(end, change_at[order], s_per_tick),
        columns["pitch"].astype(np.uint8),
        columns["velocity"].astype(np.uint8),
    )


def _symusic() -> ModuleType:
    try:
        import symusic
    except ImportError as error:
        raise UserError("MIDI files need the package symusic; install it with `pip install 'rung[midi]'`") from error
    module: ModuleType = symusic
    return module
