"""Reads notes from MIDI files, with or without the sustain pedal, and writes them.

Times are computed here, in float64: the parser's own seconds are float32, which are 0.2 ms apart after an hour. A pedal
holds its whole channel, whatever track that is in, and symusic gives neither channels nor a pedal in a track of its
own: where pedals matter, the events are read here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import numpy as np

from rung.errors import DataError, UserError
from rung.recipes.piano.notes import in_order, join, make, seconds_at

TICKS_PER_QUARTER = 1000
TICK_S = 0.0005  # at 120 quarters a minute: 20 ticks in a unit of the tokenizer
DRUMS = 9  # the channel of drums, counted from 0
SUSTAIN, RESET_CONTROLLERS = 64, 121  # controllers
DOWN = 64  # from this value on the pedal is down; half-pedalling is not told apart
_NOTE_OFF, _NOTE_ON, _CONTROL, _PROGRAM, _PRESSURE = 0x80, 0x90, 0xB0, 0xC0, 0xD0
_META, _SYSEX, _SYSEX_MORE, _END_OF_TRACK = 0xFF, 0xF0, 0xF7, 0x2F
_SYSTEM = {0xF1: 1, 0xF2: 2, 0xF3: 1}  # data bytes of a message to the whole machine, of no use in a file; others: none


def read_midi(source: Path | bytes, sustain: bool = False) -> np.ndarray:
    """Notes in seconds of all tracks but the drums. With `sustain` they last as long as the pedal holds them."""
    symusic = _symusic()
    where = "MIDI data" if isinstance(source, bytes) else str(source)
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {where}: {error.strerror or error}; check the file and its permissions", code="no-file"
        ) from error
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
    for channel, (played, pedal) in _channels(data).items():
        if channel == DRUMS:
            continue
        start, end, pitch, velocity = np.array(played, dtype=np.int64).reshape(-1, 4).T
        pedal.sort(key=itemgetter(0))  # by time alone: changes at one moment stay in the order of the file
        ticks, is_down = np.array(pedal, dtype=np.int64).reshape(-1, 2).T
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


def extend(notes: np.ndarray, times: np.ndarray, is_down: np.ndarray) -> np.ndarray:
    """The notes of one channel as they sound, under a pedal that changes at `times`, ascending.

    A note whose key is released while the pedal is down sounds until the pedal goes up or its key is struck again. A
    pedal that never goes up does so where the last key is released. Of changes at one moment only the last counts, so
    a pedal that goes up and down at once damps nothing.
    """
    notes = in_order(notes)
    if len(notes) == 0 or len(times) == 0:
        return notes
    # When the pedal goes down, and when up again, one for one.
    is_last = np.append(times[1:] != times[:-1], True)
    times, is_down = times[is_last], is_down[is_last]
    is_change = is_down != np.concatenate([[False], is_down[:-1]])
    times, is_down = times[is_change], is_down[is_change]
    downs, ups = times[is_down], times[~is_down]
    if len(ups) < len(downs):
        ups = np.append(ups, notes["end"].max())
    which = np.searchsorted(downs, notes["end"], side="right") - 1
    lifted = np.concatenate([[-np.inf], ups])[which + 1]  # of a note before any pedal: never

    # When the key of each note is struck next; never is infinitely late.
    order = np.lexsort((notes["start"], notes["pitch"]))
    start, pitch = notes["start"][order], notes["pitch"][order]
    is_first = np.append(True, (start[1:] != start[:-1]) | (pitch[1:] != pitch[:-1]))
    first = np.flatnonzero(is_first)
    after = np.append(first[1:], 0)[np.cumsum(is_first) - 1]  # the first note of the next moment, or of the next key
    struck_again = np.empty(len(notes))
    struck_again[order] = np.where((after > 0) & (pitch[after] == pitch), start[after], np.inf)

    notes["end"] = np.maximum(notes["end"], np.minimum(lifted, struck_again))
    return in_order(notes)


Channels = dict[int, tuple[list[tuple[int, int, int, int]], list[tuple[int, bool]]]]


def _channels(data: bytes) -> Channels:
    """By channel, in ticks: notes (start, end, pitch, velocity) and changes of the pedal (tick, is it down).

    Of one key in one track the oldest note ends first; a note that never ends is none. The bytes must be those of a
    whole file.
    """
    channels: Channels = defaultdict(lambda: ([], []))
    at = 8 + int.from_bytes(data[4:8], "big")
    while at + 8 <= len(data):
        begin, length = at + 8, int.from_bytes(data[at + 4 : at + 8], "big")
        is_track, at = data[at : at + 4] == b"MTrk", begin + length
        if not is_track:
            continue
        sounding: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for tick, status, first, second in _events(data[begin : begin + length]):
            kind, number = status & 0xF0, status & 0x0F
            notes, pedal = channels[number]
            if kind == _NOTE_ON and second > 0:
                sounding[number, first].append((tick, second))
            elif kind in (_NOTE_ON, _NOTE_OFF):
                if begun := sounding[number, first]:
                    start, velocity = begun.pop(0)
                    notes.append((start, tick, first, velocity))
            elif first in (SUSTAIN, RESET_CONTROLLERS):
                pedal.append((tick, first == SUSTAIN and second >= DOWN))
    return channels


def _events(track: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Tick, status and two data bytes of each note and controller."""
    at, tick, status = 0, 0, 0
    while at < len(track):
        wait, at = _number(track, at)
        tick += wait
        if at >= len(track):
            return
        if track[at] >= 0x80:
            code = track[at]
            at += 1
            if code == _META and track[at : at + 1] == bytes([_END_OF_TRACK]):
                return
            if code in (_META, _SYSEX, _SYSEX_MORE):
                length, at = _number(track, at + (code == _META))
                at += length
                continue
            if code > _SYSEX:
                at += _SYSTEM.get(code, 0)
                continue
            status = code
        kind = status & 0xF0
        if kind in (_PROGRAM, _PRESSURE):
            at += 1
            continue
        if kind in (_NOTE_OFF, _NOTE_ON, _CONTROL) and at + 1 < len(track):
            yield tick, status, track[at], track[at + 1]
        at += 2


def _number(track: bytes, at: int) -> tuple[int, int]:
    """A number of one to four bytes, and where it ends."""
    value = 0
    for byte in track[at : at + 4]:
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value, at


def _symusic() -> ModuleType:
    try:
        import symusic
    except ImportError as error:
        raise UserError(
            "MIDI files need the package symusic; install it with `pip install 'rung[midi]'`", code="not-installed"
        ) from error
    module: ModuleType = symusic
    return module
