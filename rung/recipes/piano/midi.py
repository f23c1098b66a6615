"""Reads notes from MIDI files, with or without the sustain pedal, and writes them.

Times are computed here, in float64: the parser's own seconds are float32, which are 0.2 ms apart after an hour. A pedal
holds its whole channel, whatever track that is in, and symusic gives neither channels nor a pedal in a track of its
own: where pedals matter, the events are read from the bytes.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from rung import parse
from rung.data.midi import DRUMS, SUSTAIN, extend, read_events
from rung.errors import DataError, UserError
from rung.recipes.piano.notes import join, make, seconds_at

TICKS_PER_QUARTER = 1000
TICK_S = 0.0005  # at 120 quarters a minute: 20 ticks in a unit of the tokenizer


def read_midi(source: Path | bytes, sustain: bool = False) -> np.ndarray:
    """Notes in seconds of all tracks but the drums. With `sustain` they last as long as the pedal holds them."""
    symusic = _symusic()
    where = "MIDI data" if isinstance(source, bytes) else str(source)
    try:
        data = source if isinstance(source, bytes) else parse.read_bytes(source)
    except (OSError, parse.ParseError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {where}: {why}; check the file and its permissions", code="no-file") from error
    try:
        score = symusic.Score.from_midi(data)
    except Exception as error:  # the parser raises RuntimeError for most damage, but promises nothing
        reason = str(error).removeprefix("MiniMidi: ").removesuffix(": iostream error") or type(error).__name__
        raise DataError(
            f"{where} is not a readable MIDI file ({reason}); replace or remove it", code="file-damaged"
        ) from error
    if score.ticks_per_quarter < 1:
        raise DataError(
            f"{where} is not a readable MIDI file (no ticks per quarter); replace or remove it", code="file-damaged"
        )
    # The ticks at which the tempo changes, and the seconds of a tick from there on.
    tempos = score.tempos.numpy()
    change_at = np.concatenate([[0], tempos["time"]]).astype(np.int64)
    mspq = np.concatenate([[500_000], tempos["mspq"]]).astype(np.float64)  # 120 a minute until told otherwise
    order = np.argsort(change_at, kind="stable")
    tempo = change_at[order], mspq[order] * 1e-6 / score.ticks_per_quarter

    if not sustain:
        columns = [track.notes.numpy() for track in score.tracks if not track.is_drum and len(track.notes)]
        if not columns:
            return join([])
        start, duration, pitch, velocity = (
            np.concatenate([c[name] for c in columns]) for name in ("time", "duration", "pitch", "velocity")
        )
        start = start.astype(np.int64)
        return make(seconds_at(start, *tempo), seconds_at(start + duration, *tempo), pitch, velocity)

    parts = []
    for channel, events in read_events(data)[0].items():
        if channel == DRUMS:
            continue
        start, end, pitch, velocity = np.array(events.notes, dtype=np.int64).reshape(-1, 4).T
        ticks, is_down = np.array(events.pedal(), dtype=np.int64).reshape(-1, 2).T
        notes = make(seconds_at(start, *tempo), seconds_at(end, *tempo), pitch, velocity)
        parts.append(extend(notes, seconds_at(ticks, *tempo), is_down.astype(bool)))
    return join(parts)


def write_midi(notes: np.ndarray, tail_s: float = 0.0) -> bytes:
    """A one-track file, exact to a quarter of a millisecond, that lasts `tail_s` longer than its notes.

    MIDI cannot tell two sounding notes of one pitch apart: quantise first where that matters.
    """
    symusic = _symusic()
    start = np.rint(notes["start"] / TICK_S).astype(np.int32)
    end = np.maximum(np.rint(notes["end"] / TICK_S).astype(np.int32), start + 1)
    track = symusic.Track("piano", 0, False)
    velocity = notes["velocity"].clip(1, 127)  # 0 would mean the end
    track.notes = symusic.Note.from_numpy(start, end - start, notes["pitch"].astype(np.int8), velocity.astype(np.int8))
    if tail_s:
        last = int(end.max(initial=0)) + round(tail_s / TICK_S)
        track.controls.append(symusic.ControlChange(last, SUSTAIN, 0))
    score = symusic.Score(TICKS_PER_QUARTER)
    score.tempos.append(symusic.Tempo(0, 60.0 / (TICK_S * TICKS_PER_QUARTER)))
    score.tracks.append(track)
    return bytes(score.dumps_midi())


def _symusic() -> ModuleType:
    try:
        import symusic
    except ImportError as error:
        raise UserError(
            "MIDI files need the package symusic; install it with `pip install 'rung[midi]'`", code="not-installed"
        ) from error
    module: ModuleType = symusic
    return module
