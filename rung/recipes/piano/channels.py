"""The notes and the pedal of each channel of a MIDI file, in ticks.

The parser that reads notes fast tells neither channels nor a pedal in a track of its own, and a pedal holds its whole
channel, whatever track that is in. So files are read here, event by event, where pedals matter. The bytes must be those
of a whole file: damage is found by the other one first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rung.recipes.piano.pedal import CONTROLLER, DOWN

RESET_CONTROLLERS = 121
_NOTE_OFF, _NOTE_ON, _CONTROL, _PROGRAM, _PRESSURE = 0x80, 0x90, 0xB0, 0xC0, 0xD0
_META, _SYSEX, _SYSEX_MORE, _END_OF_TRACK = 0xFF, 0xF0, 0xF7, 0x2F
_SYSTEM = {0xF1: 1, 0xF2: 2, 0xF3: 1}  # data bytes of a message to the whole machine, of no use in a file; others: none


@dataclass
class Channel:
    notes: list[tuple[int, int, int, int]] = field(default_factory=list)  # start, end, pitch, velocity
    pedal: list[tuple[int, bool]] = field(default_factory=list)  # tick, is it down

    def note_columns(self) -> np.ndarray:
        return np.array(self.notes, dtype=np.int64).reshape(-1, 4).T

    def pedal_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Ticks and states in order of time; at one moment in the order of the file."""
        times = np.array([tick for tick, _ in self.pedal], dtype=np.int64)
        order = np.argsort(times, kind="stable")
        return times[order], np.array([is_down for _, is_down in self.pedal], dtype=bool)[order]


def read_channels(data: bytes) -> dict[int, Channel]:
    """Of one key in one track the oldest note ends first; a note that never ends is none."""
    channels: dict[int, Channel] = {}
    for track in _tracks(data):
        sounding: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for tick, status, first, second in _events(track):
            kind, number = status & 0xF0, status & 0x0F
            channel = channels.setdefault(number, Channel())
            if kind == _NOTE_ON and second > 0:
                sounding.setdefault((number, first), []).append((tick, second))
            elif kind in (_NOTE_ON, _NOTE_OFF):
                if begun := sounding.get((number, first)):
                    start, velocity = begun.pop(0)
                    channel.notes.append((start, tick, first, velocity))
            elif first == CONTROLLER:
                channel.pedal.append((tick, second >= DOWN))
            elif first == RESET_CONTROLLERS:
                channel.pedal.append((tick, False))
    return channels


def _tracks(data: bytes) -> Iterator[bytes]:
    at = 8 + int.from_bytes(data[4:8], "big")
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], "big")
        if data[at : at + 4] == b"MTrk":
            yield data[at + 8 : at + 8 + length]
        at += 8 + length


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
