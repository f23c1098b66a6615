"""If this fails, notes under the sustain pedal sound too long or too short, or a pedal holds what is not its own."""

import io
from pathlib import Path

import mido
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.data.store import Store
from rung.errors import DataError
from rung.recipes.piano.data import prepare
from rung.recipes.piano.midi import extend, read_midi
from rung.recipes.piano.notes import NOTE, join, make
from tests.conftest import shared_data

TIME = st.integers(0, 40).map(lambda n: n / 4)  # coarse, so that moments coincide
ROWS = st.lists(st.tuples(TIME, TIME, st.integers(60, 63), st.integers(1, 127)), min_size=1, max_size=20)
NOTES = ROWS.map(lambda rows: make(*np.array([(s, s + d, p, v) for s, d, p, v in rows]).T))
PEDAL = st.lists(st.tuples(TIME, st.booleans()), max_size=12).map(
    lambda rows: (np.array([t for t, _ in sorted(rows)]), np.array([d for _, d in sorted(rows)], dtype=bool))
)


def sounding_ends(notes: np.ndarray, times: np.ndarray, is_down: np.ndarray) -> list[float]:
    """The same, note by note and change by change."""
    ends = []
    for start, end, pitch, _ in notes.tolist():
        state = dict(zip(times.tolist(), is_down.tolist()))  # of changes at one moment the last stays
        before = [t for t in sorted(state) if t <= end]
        if not before or not state[before[-1]]:
            ends.append(end)
            continue
        up = min((t for t in state if t > end and not state[t]), default=max(notes["end"].tolist()))
        again = min((s for s, _, p, _ in notes.tolist() if p == pitch and s > start), default=up)
        ends.append(max(end, min(up, again)))
    return ends


def as_set(notes: np.ndarray) -> list[tuple[float, ...]]:
    return sorted(notes.tolist())


@given(NOTES, PEDAL)
def test_it_is_what_a_slow_reader_finds(notes: np.ndarray, pedal: tuple[np.ndarray, np.ndarray]) -> None:
    expected = notes.copy()
    expected["end"] = sounding_ends(notes, *pedal)
    assert as_set(extend(notes, *pedal)) == as_set(expected)


@given(NOTES, PEDAL)
def test_it_never_shortens_never_runs_into_a_strike_and_can_be_done_twice(
    notes: np.ndarray, pedal: tuple[np.ndarray, np.ndarray]
) -> None:
    before = notes.copy()
    once = extend(notes, *pedal)
    assert np.array_equal(notes, before), "the notes that were passed are left alone"
    assert once.dtype == NOTE
    assert np.array_equal(extend(once, *pedal), once)
    assert (np.diff(once["start"]) >= 0).all()
    for pitch in np.unique(notes["pitch"]):
        was, now = (np.sort(n[n["pitch"] == pitch], order=["start", "velocity", "end"]) for n in (notes, once))
        assert np.array_equal(was[["start", "velocity"]], now[["start", "velocity"]])
        for old, new in zip(was, now):
            assert new["end"] >= old["end"]
            later = was["start"][was["start"] > old["start"]]
            assert new["end"] == old["end"] or not len(later) or new["end"] <= later.min()


def test_by_hand() -> None:
    notes = make([0, 0, 3, 8], [1, 2, 4, 9], [60, 64, 60, 67], 50)
    down, up = np.array([0.5, 5.0, 8.5]), np.array([True, False, True])
    assert extend(notes, down, up).tolist() == [(0, 3, 60, 50), (0, 5, 64, 50), (3, 5, 60, 50), (8, 9, 67, 50)]
    assert extend(notes, np.array([]), np.array([], dtype=bool)).tolist() == notes.tolist()
    assert len(extend(join([]), down, up)) == 0


# In files


def read_with_mido(file: mido.MidiFile) -> np.ndarray:
    """An independent reader: mido merges the tracks and keeps the clock; each channel is played as it goes."""
    now, playing = 0.0, dict[int, Player]()
    moment: list[mido.Message] = []
    for message in [*file, None]:
        if message is None or message.time > 0:
            for player in playing.values():
                player.moment(now, [m for m in moment if m.channel == player.channel])
            moment = []
        if message is not None:
            now += message.time
            if message.type in ("note_on", "note_off", "control_change") and message.channel != 9:
                playing.setdefault(message.channel, Player(message.channel))
                moment.append(message)
    rows = [row for player in playing.values() for row in player.finish()]
    return make(*np.array(rows).T) if rows else join([])


class Player:
    """One channel: keys that are down, notes that the pedal alone holds, and what has ended."""

    def __init__(self, channel: int) -> None:
        self.channel, self.is_down, self.last_release = channel, False, 0.0
        self.keys: dict[int, list[list[float]]] = {}
        self.held: list[list[float]] = []
        self.rows: list[list[float]] = []

    def moment(self, now: float, messages: list[mido.Message]) -> None:
        for message in messages:
            if message.type == "control_change" and message.control == 64:
                self.is_down = message.value >= 64
        if not self.is_down:
            self.end(now)
        for message in messages:
            if message.type == "control_change":
                continue
            keys = self.keys.setdefault(message.note, [])
            if message.type == "note_on" and message.velocity > 0:
                self.end(now, message.note)
                keys.append([now, 0.0, message.note, message.velocity])
            elif keys:
                note = keys.pop(0)
                self.last_release = now
                is_struck_again = any(other[0] > note[0] for other in keys)
                (self.held if self.is_down and not is_struck_again else self.rows).append(note)
                note[1] = now

    def end(self, now: float, pitch: int | None = None) -> None:
        for note in list(self.held):
            if pitch is None or (note[2] == pitch and note[0] < now):
                self.held.remove(note)
                note[1] = now
                self.rows.append(note)

    def finish(self) -> list[list[float]]:
        self.end(self.last_release)
        return self.rows


@pytest.mark.parametrize("number", [0, 36, 60, 147])
def test_real_performances_sound_as_an_independent_reader_has_them(number: int) -> None:
    path = sorted((shared_data("piano_asap") / "midi").rglob("*.mid"))[number]
    ours, theirs = read_midi(path, sustain=True), read_with_mido(mido.MidiFile(path))
    keys_alone = read_midi(path)
    assert len(ours) == len(theirs) == len(keys_alone)
    a, b = (n[np.lexsort((n["end"], n["start"].round(5), n["velocity"], n["pitch"]))] for n in (ours, theirs))
    assert np.array_equal(a[["pitch", "velocity"]], b[["pitch", "velocity"]])
    for time in ("start", "end"):
        assert np.abs(a[time] - b[time]).max() < 1e-6
    assert (ours["end"] - ours["start"]).sum() > 1.1 * (keys_alone["end"] - keys_alone["start"]).sum()


def midi(*tracks: list[mido.Message]) -> bytes:
    file, data = mido.MidiFile(ticks_per_beat=500), io.BytesIO()  # a tick is a millisecond
    file.tracks += [mido.MidiTrack(track) for track in tracks]
    file.save(file=data)
    return data.getvalue()


def note(pitch: int, wait: int, length: int, channel: int = 0) -> list[mido.Message]:
    return [
        mido.Message("note_on", note=pitch, velocity=40, channel=channel, time=wait),
        mido.Message("note_off", note=pitch, channel=channel, time=length),
    ]


def pedal(value: int, wait: int, channel: int = 0, control: int = 64) -> mido.Message:
    return mido.Message("control_change", control=control, value=value, channel=channel, time=wait)


def test_a_pedal_holds_its_channel_in_every_track_and_no_other() -> None:
    other = note(60, 0, 1000) + note(62, 0, 1000, channel=1) + note(36, 0, 1000, channel=9)
    data = midi([pedal(127, 500), pedal(0, 4500)], other)
    assert read_midi(data, sustain=True).tolist() == [(0, 5, 60, 40), (1, 2, 62, 40)]
    assert read_midi(data).tolist() == [(0, 1, 60, 40), (1, 2, 62, 40)]


@pytest.mark.parametrize(("value", "end"), [(63, 1), (64, 3)])
def test_from_which_value_on_it_is_down(value: int, end: float) -> None:
    data = midi([pedal(value, 0), *note(60, 0, 1000), *note(62, 1000, 1000)])
    assert read_midi(data, sustain=True)[0].tolist() == (0, end, 60, 40)


def test_controllers_that_are_reset_let_the_pedal_go() -> None:
    data = midi([pedal(127, 0), *note(60, 0, 1000), pedal(0, 1000, control=121), *note(62, 1000, 1000)])
    assert read_midi(data, sustain=True)[0].tolist() == (0, 2, 60, 40)


def test_events_of_other_kinds_and_running_status_are_passed_over() -> None:
    others = "00 FF03024142  00 C005  00 F00201F7  00 D009  00 E00040"  # a name, a program, and so on
    played = "00 B0407F  00 903C28  8768 3C00  00 4028  8768 B04000  00 FF2F00"  # ended by a velocity of 0, after 1000
    track = bytes.fromhex(others + played)
    head = b"MThd" + bytes([0, 0, 0, 6, 0, 0, 0, 1, 0x01, 0xF4])
    data = head + b"MTrk" + len(track).to_bytes(4, "big") + track
    assert read_midi(data, sustain=True).tolist() == [(0, 2, 60, 40)]
    assert read_midi(data, sustain=True).tolist() == read_with_mido(mido.MidiFile(file=io.BytesIO(data))).tolist()


@pytest.mark.parametrize("odd", ["F8", "F107", "F20102", "F307", "F6", "FE"])
def test_messages_to_the_whole_machine_have_lengths_of_their_own_and_a_track_ends_where_it_says(odd: str) -> None:
    track = bytes.fromhex(f"00 {odd} 00 903C28 8768 803C00 00 FF2F00 00 903E28 8768 803E00")
    head = b"MThd" + bytes([0, 0, 0, 6, 0, 0, 0, 1, 0x01, 0xF4])
    data = head + b"MTrk" + len(track).to_bytes(4, "big") + track
    assert read_midi(data, sustain=True).tolist() == read_midi(data).tolist() == [(0, 1, 60, 40)]


@given(st.binary(max_size=60), st.integers(14, 60))
def test_what_can_be_read_without_pedals_can_be_read_with_them(rubbish: bytes, keep: int) -> None:
    data = midi([pedal(127, 0), *note(60, 0, 1000), *note(62, 1000, 1000), pedal(0, 1000)])[:keep] + rubbish
    try:
        read_midi(data)
    except DataError:
        return
    read_midi(data, sustain=True)


def test_a_store_says_whether_pedals_were_applied(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.mid").write_bytes(midi([pedal(127, 0), *note(60 + number, 0, 500), *note(72, 500, 900)]))
    stores = {}
    for sustain in (False, True):
        prepare(source, tmp_path / f"s{sustain}", sustain=sustain)
        stores[sustain] = Store.open(tmp_path / f"s{sustain}")
        assert stores[sustain].info["settings"]["sustain"] is sustain
    assert stores[True].fingerprint != stores[False].fingerprint
    assert stores[True].info["dropped"] == stores[False].info["dropped"]
