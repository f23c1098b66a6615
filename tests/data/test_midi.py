"""If this fails, a MIDI file is played with wrong notes, times, instruments, loudness, places or bends."""

from __future__ import annotations

import io
import struct
from collections import defaultdict

import mido
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.midi import Channel, Curve, read_performance
from rung.data.wheel import VIZDOOM
from rung.errors import DataError
from tests.errors import raises_code

START = {"volume": 100.0, "expression": 127.0, "pan": 64.0, "bend": 0.0}


class Slow:
    """One channel as an independent reader finds it, message by message. Curves are (time, value) where they change."""

    def __init__(self) -> None:
        self.program, self.bank, self.next_bank = 0, 0, 0
        self.wheel, self.range, self.parameter = 0, 2.0, (127, 127)
        self.values = dict(START)
        self.curves = {name: {0.0: value} for name, value in START.items()}
        self.rows: list[list[float]] = []  # start, end, pitch, velocity, program, bank
        self.sounding: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
        self.pedal: dict[float, bool] = {}

    def control(self, now: float, number: int, value: int) -> None:
        names = {7: "volume", 10: "pan", 11: "expression"}
        if number in names:
            self.put(now, names[number], value)
        elif number == 0:
            self.next_bank = value
        elif number == 64:
            self.pedal[now] = value >= 64
        elif number == 121:
            self.pedal[now] = False
            self.wheel, self.parameter = 0, (127, 127)
            self.put(now, "expression", 127)
        elif number in (98, 99):
            self.parameter = (127, 127)
        elif number == 101:
            self.parameter = (value, self.parameter[1])
        elif number == 100:
            self.parameter = (self.parameter[0], value)
        elif number == 6 and self.parameter == (0, 0):
            self.range = value
        elif number == 38 and self.parameter == (0, 0):
            self.range = int(self.range) + value / 100
        self.put(now, "bend", self.wheel / 8192 * self.range)

    def put(self, now: float, name: str, value: float) -> None:
        self.curves[name][now] = value

    def held(self) -> np.ndarray:
        """The notes with the pedal in their ends, in an order of their own."""
        rows = []
        for start, end, pitch, *rest in self.rows:
            changes = [t for t in sorted(self.pedal) if t <= end]
            if changes and self.pedal[changes[-1]]:
                latest = max(row[1] for row in self.rows)
                up = min((t for t, down in self.pedal.items() if t > end and not down), default=latest)
                again = min((row[0] for row in self.rows if row[2] == pitch and row[0] > start), default=up)
                end = max(end, min(up, again))
            rows.append((start, end, pitch, *rest))
        return np.array(sorted(rows)).reshape(-1, 6)


def read_slowly(data: bytes) -> dict[int, Slow]:
    """mido merges the tracks and keeps the clock. A note is ended from its own track."""
    file = mido.MidiFile(file=io.BytesIO(data))
    events = []
    for track_number, track in enumerate(file.tracks):
        tick = 0
        for message in track:
            tick += message.time
            events.append((tick, track_number, message))
    events.sort(key=lambda event: event[0])
    channels: dict[int, Slow] = defaultdict(Slow)
    now, before, tempo = 0.0, 0, 500_000
    for tick, track_number, message in events:
        now, before = now + mido.tick2second(tick - before, file.ticks_per_beat, tempo), tick
        if message.type == "set_tempo":
            tempo = message.tempo
        if message.is_meta or not hasattr(message, "channel"):
            continue
        channel = channels[message.channel]
        if message.type == "note_on" and message.velocity > 0:
            bank = 128 if message.channel == 9 else channel.bank
            row = [now, -1.0, message.note, message.velocity, channel.program, bank]
            channel.sounding[track_number, message.note].append(row)
        elif message.type in ("note_on", "note_off"):
            if begun := channel.sounding[track_number, message.note]:
                row = begun.pop(0)
                row[1] = now
                channel.rows.append(row)
        elif message.type == "program_change":
            channel.program, channel.bank = message.program, channel.next_bank
        elif message.type == "pitchwheel":
            channel.wheel = message.pitch
            channel.put(now, "bend", channel.wheel / 8192 * channel.range)
        elif message.type == "control_change":
            channel.control(now, message.control, message.value)
    return {number: channel for number, channel in channels.items() if channel.rows}


def same(ours: dict[int, Channel], theirs: dict[int, Slow]) -> None:
    assert set(ours) == set(theirs)
    for number, channel in ours.items():
        names = ("start", "end", "pitch", "velocity", "program", "bank")
        mine = np.stack([channel.notes[name].astype(np.float64) for name in names], 1)
        expected = theirs[number].held()
        assert mine.shape == expected.shape
        # Ties within a nanosecond may come in either order.
        mine, expected = (a[np.lexsort((*a.T[::-1].round(6),))] for a in (mine, expected))
        assert np.abs(mine - expected).max() < 1e-6
        for name, points in theirs[number].curves.items():
            times = np.array(sorted(points))
            times = times[np.append(np.diff(times) > 1e-6, True)]  # two sums may call one moment two
            curve: Curve = getattr(channel, name)
            assert (np.diff(curve.times) > 0).all()
            assert np.abs(curve.at(times + 1e-7) - [points[t] for t in times]).max() < 1e-9, (number, name)


def file_of(*tracks: list[mido.Message], ticks: int = 480) -> bytes:
    file = mido.MidiFile(ticks_per_beat=ticks)
    for track in tracks:
        file.tracks.append(mido.MidiTrack(track))
    buffer = io.BytesIO()
    file.save(file=buffer)
    return buffer.getvalue()


def message(kind: str, time: int = 0, **values: int) -> mido.Message:
    return mido.Message(kind, time=time, **values)


def control(number: int, value: int, time: int = 0, channel: int = 0) -> mido.Message:
    return message("control_change", time, control=number, value=value, channel=channel)


NOTE = [message("note_on", note=60, velocity=80), message("note_off", 960, note=60)]


CONTROLS = st.sampled_from([0, 1, 6, 7, 10, 11, 38, 64, 98, 99, 100, 101, 121])
EVENT = st.one_of(
    st.builds(message, st.just("note_on"), st.integers(0, 3), note=st.integers(60, 62), velocity=st.integers(0, 127),
              channel=st.sampled_from([0, 9])),
    st.builds(message, st.just("note_off"), st.integers(0, 3), note=st.integers(60, 62),
              channel=st.sampled_from([0, 9])),
    st.builds(control, CONTROLS, st.sampled_from([0, 0, 1, 2, 12, 64, 127]), st.integers(0, 3),
              channel=st.sampled_from([0, 9])),
    st.builds(message, st.just("program_change"), st.integers(0, 3), program=st.integers(0, 127)),
    st.builds(message, st.just("pitchwheel"), st.integers(0, 3), pitch=st.integers(-8192, 8191)),
    st.builds(message, st.just("polytouch"), st.integers(0, 3), note=st.just(60), value=st.just(3)),
    st.builds(message, st.just("aftertouch"), st.integers(0, 3), value=st.just(3)),
    st.builds(lambda us, wait: mido.MetaMessage("set_tempo", tempo=us, time=wait), st.integers(1, 2_000_000),
              st.integers(0, 3)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(EVENT, max_size=25), min_size=1, max_size=3), st.sampled_from([1, 96, 480]))
def test_any_file_is_read_as_by_another_reader(tracks: list[list[mido.Message]], ticks: int) -> None:
    data = file_of(*tracks, ticks=ticks)
    same(read_performance(data), read_slowly(data))


def lumps() -> dict[str, bytes]:
    """The MIDI files of both game files, by the table of contents at their end."""
    found = {}
    try:
        wheel = next((w for w in VIZDOOM.values() if w.path.is_file()), VIZDOOM["cp311"])
        members = list(wheel.read(lambda name: name.endswith(("freedoom1.wad", "freedoom2.wad"))))
    except DataError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    for member, data in members:
        count, place = struct.unpack_from("<ii", data, 4)
        for number in range(count):
            at, size, name = struct.unpack_from("<ii8s", data, place + 16 * number)
            if name.startswith(b"D_"):
                found[f"{member}:{name!r}"] = data[at : at + size]
    return found


def test_all_game_music_is_read_as_by_another_reader() -> None:
    files = lumps()
    assert len(files) == 76
    num_notes, num_bent = 0, 0
    for data in files.values():
        performance = read_performance(data)
        same(performance, read_slowly(data))
        num_notes += sum(len(channel.notes) for channel in performance.values())
        num_bent += sum(len(channel.bend.times) > 1 for channel in performance.values())
    assert num_notes == 299_459
    assert num_bent > 50


def test_program_and_bank_hold_from_their_place_in_the_file() -> None:
    """A bank counts with the next program, and a program for what stands after it, also in a later track."""
    first = [control(0, 8), *NOTE, message("program_change", program=5), *NOTE]
    second = [message("note_on", note=70, velocity=9), message("note_off", 10, note=70)]
    notes = read_performance(file_of(first, second))[0].notes
    assert notes[["start", "pitch", "program", "bank"]].tolist() == [(0, 60, 0, 0), (0, 70, 0, 0), (1, 60, 5, 8)]
    early = read_performance(file_of([message("program_change", program=5)], second))[0].notes
    late = read_performance(file_of(second, [message("program_change", program=5)]))[0].notes
    assert (early["program"].tolist(), late["program"].tolist()) == ([5], [0])


def test_a_channel_starts_as_general_midi_says() -> None:
    channel = read_performance(file_of(NOTE))[0]
    assert {name: getattr(channel, name).values.tolist() for name in START} == {n: [v] for n, v in START.items()}


@pytest.mark.parametrize(
    ("setup", "semitones"),
    [
        ([], 2),
        ([control(101, 0), control(100, 0), control(6, 12)], 12),
        ([control(101, 0), control(100, 0), control(6, 1), control(38, 50)], 1.5),
        ([control(101, 0), control(100, 1), control(6, 12)], 2),  # fine tuning, another parameter
        ([control(101, 0), control(100, 0), control(99, 0), control(6, 12)], 2),  # no longer registered
    ],
)
def test_the_range_of_the_bend(setup: list[mido.Message], semitones: float) -> None:
    bends = [message("pitchwheel", pitch=-8192), message("note_on", note=60, velocity=1)]
    bends += [message("pitchwheel", 480, pitch=4096), message("note_off", 480, note=60)]
    bend = read_performance(file_of([*setup, *bends]))[0].bend
    assert bend.at(np.array([0.0, 0.49, 0.5, 9])).tolist() == [-semitones, -semitones, semitones / 2, semitones / 2]


def test_frames_per_second_instead_of_a_tempo() -> None:
    data = bytearray(file_of([mido.MetaMessage("set_tempo", tempo=1), *NOTE]))
    data[12:14] = bytes([256 - 25, 40])  # 25 frames of 40 ticks: milliseconds
    assert read_performance(bytes(data))[0].notes["end"].tolist() == [0.96]


def test_files_that_are_none() -> None:
    whole = file_of(NOTE)
    for data in (b"", b"RIFF" + bytes(100), whole[:-3], whole[:12] + b"\0\0" + whole[14:]):
        with raises_code("file-damaged"):
            read_performance(data)
    with raises_code("not-supported"):
        read_performance(whole[:8] + b"\0\2" + whole[10:])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_ends_in_a_sentence_or_in_notes(data: st.DataObject) -> None:
    raw = bytearray(file_of([control(7, 90), message("pitchwheel", pitch=5), *NOTE], NOTE))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        performance = read_performance(bytes(raw))
    except DataError:
        return
    for channel in performance.values():
        assert np.isfinite(channel.notes["end"]).all()
        assert (channel.notes["end"] >= channel.notes["start"]).all()
