"""Reads MIDI files as they are performed: by channel, in seconds, with the controllers that shape a note's sound.

Only notes, tempo, programs, banks, pedal, volume, expression, pan and pitch bend are read. Times are float64 from the
file's own tempo map. What holds for a channel holds for it in whatever track it is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from rung.data.notes import NOTE, in_order, seconds_at
from rung.errors import DataError

DRUMS = 9  # the channel of drums, counted from 0
DRUM_BANK = 128  # where a sound font keeps its drum kits
BANK, DATA, VOLUME, PAN, EXPRESSION, DATA_FINE, SUSTAIN = 0, 6, 7, 10, 11, 38, 64  # controllers
NRPN_FINE, NRPN, RPN_FINE, RPN, RESET_CONTROLLERS = 98, 99, 100, 101, 121
DOWN = 64  # from this value on the pedal is down; half-pedalling is not told apart
_NOTE_OFF, _NOTE_ON, _CONTROL, _PROGRAM, _PRESSURE, _BEND = 0x80, 0x90, 0xB0, 0xC0, 0xD0, 0xE0
_META, _SYSEX, _SYSEX_MORE, _END_OF_TRACK, _TEMPO = 0xFF, 0xF0, 0xF7, 0x2F, 0x51
_SYSTEM = {0xF1: 1, 0xF2: 2, 0xF3: 1}  # data bytes of a message to the whole machine, of no use in a file; others: none
_NO_BEND = 8192
_NO_PARAMETER = (127, 127)  # General MIDI: the registered parameter that is none

PLAYED = np.dtype([*((name, NOTE[name]) for name in NOTE.names or ()), ("program", "u1"), ("bank", "u1")])


@dataclass(frozen=True)
class Curve:
    """A value that holds from each time on until the next. The first one also holds before."""

    times: np.ndarray  # s, ascending, no two alike
    values: np.ndarray

    @classmethod
    def of(cls, *points: tuple[float, float]) -> Curve:
        """Out of (time, value) in ascending order; of several at one moment the last counts."""
        times, values = np.array(points, np.float64).reshape(-1, 2).T
        is_last = np.append(times[1:] != times[:-1], True)[: len(times)]
        return cls(times[is_last], values[is_last])

    def at(self, times: np.ndarray) -> np.ndarray:
        values: np.ndarray = self.values[np.maximum(np.searchsorted(self.times, times, side="right") - 1, 0)]
        return values


@dataclass(frozen=True)
class Channel:
    """What one channel plays. Without controllers it has the values that General MIDI starts from."""

    notes: np.ndarray  # PLAYED, in order; the pedal is already in the ends
    volume: Curve = field(default_factory=lambda: Curve.of((0, 100)))  # 0 to 127, as the next two
    expression: Curve = field(default_factory=lambda: Curve.of((0, 127)))
    pan: Curve = field(default_factory=lambda: Curve.of((0, 64)))
    bend: Curve = field(default_factory=lambda: Curve.of((0, 0)))  # semitones


Performance = dict[int, Channel]  # by number of the channel, from 0


@dataclass
class Events:
    """The events of one channel in ticks, those of each track together and in its order."""

    notes: list[tuple[int, int, int, int]] = field(default_factory=list)  # start, end, pitch, velocity
    order: list[int] = field(default_factory=list)  # of each note, how many changes of its channel lie before it
    changes: list[tuple[int, int, int, int]] = field(default_factory=list)  # tick, kind of status, two data bytes

    def pedal(self) -> list[tuple[int, bool]]:
        """Tick and whether the pedal is down from there, in order of time."""
        found = [
            (tick, number == SUSTAIN and value >= DOWN)
            for tick, kind, number, value in self.changes
            if kind == _CONTROL and number in (SUSTAIN, RESET_CONTROLLERS)
        ]
        return sorted(found, key=itemgetter(0))  # by time alone: changes at one moment stay in the order of the file


def read_performance(data: bytes) -> Performance:
    """The channels of a MIDI file that have notes; DataError where it is none, or torn."""
    if len(data) < 14 or data[:4] != b"MThd":
        problem = f"not a MIDI file: {len(data)} bytes starting with {data[:4]!r}, not MThd"
        raise DataError(f"{problem}; pass a .mid", code="file-damaged")
    division, smpte = int.from_bytes(data[12:14], "big"), data[12] >= 0x80
    if data[8:10] == b"\0\2":
        problem = "a MIDI file of format 2 holds independent patterns, not one piece"
        raise DataError(f"{problem}; save it as format 0 or 1", code="not-supported")
    if division == 0 or (smpte and not (256 - data[12]) * data[13]):
        raise DataError("the MIDI file has 0 ticks a quarter; replace or remove it", code="file-damaged")
    channels, tempos = read_events(data, strict=True)
    if smpte:  # ticks of a clock: the tempo says nothing about them
        change_at, tick_s = np.zeros(1, np.int64), np.array([1 / ((256 - data[12]) * data[13])])
    else:
        tempos = sorted([(0, 500_000), *tempos], key=itemgetter(0))  # 120 a minute until told otherwise
        change_at = np.array([tick for tick, _ in tempos])
        tick_s = np.array([us for _, us in tempos]) * 1e-6 / division
    return {
        number: _performed(number, events, change_at, tick_s)
        for number, events in sorted(channels.items())
        if events.notes
    }


def _performed(number: int, events: Events, change_at: np.ndarray, tick_s: np.ndarray) -> Channel:
    """One channel in seconds: its changes are gone through in order of time, as a synthesizer meets them."""
    values: dict[int, list[tuple[int, float]]] = {VOLUME: [(0, 100)], EXPRESSION: [(0, 127)], PAN: [(0, 64)]}
    bends: list[tuple[int, float]] = [(0, 0.0)]
    programs: list[tuple[int, int]] = [(0, 0)]  # program and bank, after each change
    bank, wheel, semitones, cents, parameter = 0, _NO_BEND, 2, 0, list(_NO_PARAMETER)
    by_time = sorted(range(len(events.changes)), key=lambda at: events.changes[at][0])
    for at in by_time:
        tick, kind, first, second = events.changes[at]
        program_now, bank_now = programs[-1]
        if kind == _PROGRAM:  # only now does a bank that was chosen before count
            program_now, bank_now = first, bank
        elif kind == _BEND:
            wheel = second << 7 | first
        elif first in values:
            values[first].append((tick, second))
        elif first == BANK:
            bank = second
        elif first in (RPN, RPN_FINE):
            parameter[first == RPN_FINE] = second
        elif first in (NRPN, NRPN_FINE):
            parameter = list(_NO_PARAMETER)
        elif first == DATA and parameter == [0, 0]:
            semitones, cents = second, 0
        elif first == DATA_FINE and parameter == [0, 0]:
            cents = second
        elif first == RESET_CONTROLLERS:  # volume, pan and program stay, says RP-015
            values[EXPRESSION].append((tick, 127))
            wheel, parameter = _NO_BEND, list(_NO_PARAMETER)
        programs.append((program_now, bank_now))
        bend = (wheel - _NO_BEND) / _NO_BEND * (semitones + cents / 100)
        if bend != bends[-1][1]:
            bends.append((tick, bend))

    def curve(points: list[tuple[int, float]]) -> Curve:
        ticks, levels = np.array(points, np.float64).reshape(-1, 2).T
        return Curve.of(*zip(seconds_at(ticks, change_at, tick_s).tolist(), levels.tolist()))

    start, end, pitch, velocity = np.array(events.notes, np.int64).reshape(-1, 4).T
    # How many changes come before a note: all of earlier ticks, and those of its own that stand before it in the file.
    place = np.array(by_time, np.int64)
    ticks = np.array([events.changes[at][0] for at in by_time], np.int64)
    num_before = np.searchsorted(ticks, start, side="left")
    num_until = np.searchsorted(ticks, start, side="right")
    for which in np.flatnonzero(num_until > num_before):
        low, high = num_before[which], num_until[which]
        num_before[which] += int((place[low:high] < events.order[which]).sum())
    notes = np.empty(len(start), PLAYED)
    notes["start"], notes["end"] = seconds_at(start, change_at, tick_s), seconds_at(end, change_at, tick_s)
    notes["pitch"], notes["velocity"] = pitch, velocity
    notes["program"], banks = np.array(programs)[num_before].T
    notes["bank"] = DRUM_BANK if number == DRUMS else banks
    pedal = events.pedal()
    pedal_s = seconds_at(np.array([tick for tick, _ in pedal], np.int64), change_at, tick_s)
    notes = extend(notes, pedal_s, np.array([is_down for _, is_down in pedal], bool))
    return Channel(notes, curve(values[VOLUME]), curve(values[EXPRESSION]), curve(values[PAN]), curve(bends))


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


def read_events(data: bytes, strict: bool = False) -> tuple[dict[int, Events], list[tuple[int, int]]]:
    """The events of each channel, and the tempos (tick, microseconds a quarter).

    Of one key in one track the oldest note ends first; a note that never ends is none. `strict` raises DataError where
    the file ends too early; without it the bytes must be those of a whole file.
    """
    channels: dict[int, Events] = defaultdict(Events)
    tempos: list[tuple[int, int]] = []
    at = 8 + int.from_bytes(data[4:8], "big")
    while at + 8 <= len(data):
        begin, length = at + 8, int.from_bytes(data[at + 4 : at + 8], "big")
        is_track, at = data[at : at + 4] == b"MTrk", begin + length
        if strict and at > len(data):
            problem = f"the MIDI file is torn: a track needs {length} bytes, {len(data) - begin} are left"
            raise DataError(f"{problem}; replace or remove it", code="file-damaged")
        if not is_track:
            continue
        sounding: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for tick, status, first, second in _events(data[begin : begin + length]):
            if status == _META:
                tempos.append((tick, first))
                continue
            kind, number = status & 0xF0, status & 0x0F
            channel = channels[number]
            if kind == _NOTE_ON and second > 0:
                sounding[number, first].append((tick, second, len(channel.changes)))
            elif kind in (_NOTE_ON, _NOTE_OFF):
                if begun := sounding[number, first]:
                    start, velocity, num_changes = begun.pop(0)
                    channel.notes.append((start, tick, first, velocity))
                    channel.order.append(num_changes)
            else:
                channel.changes.append((tick, kind, first, second))
    return channels, tempos


def _events(track: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Tick, status and two data bytes of each note, controller, program and bend; of a tempo its microseconds."""
    at, tick, status = 0, 0, 0
    while at < len(track):
        wait, at = _number(track, at)
        tick += wait
        if at >= len(track):
            return
        if track[at] >= 0x80:
            code = track[at]
            at += 1
            if code in (_META, _SYSEX, _SYSEX_MORE):
                kind = track[at] if code == _META and at < len(track) else None
                if kind == _END_OF_TRACK:
                    return
                length, at = _number(track, at + (code == _META))
                if kind == _TEMPO and length == 3:
                    yield tick, _META, int.from_bytes(track[at : at + 3], "big"), 0
                at += length
                continue
            if code > _SYSEX:
                at += _SYSTEM.get(code, 0)
                continue
            status = code
        kind = status & 0xF0
        if kind in (_PROGRAM, _PRESSURE):
            if kind == _PROGRAM and at < len(track):
                yield tick, status, track[at], 0
            at += 1
            continue
        if kind in (_NOTE_OFF, _NOTE_ON, _CONTROL, _BEND) and at + 1 < len(track):
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
