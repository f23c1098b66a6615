"""If this fails, a MIDI file sounds otherwise in another program than it does here."""

import io
import sys
from pathlib import Path

import mido
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.errors import DataError
from rung.recipes.piano.midi import read_midi, write_midi
from rung.recipes.piano.notes import join, make, quantise
from tests.errors import raises_code

ASAP = Path(__file__).parents[3] / ".." / "shared" / "data" / "piano_asap"


def read_with_mido(file: mido.MidiFile) -> np.ndarray:
    """An independent reader: mido merges the tracks and keeps the clock; of one pitch the oldest note ends first."""
    now, sounding, rows = 0.0, dict[tuple[int, int], list[tuple[float, int]]](), []
    for message in file:
        now += message.time
        if message.type not in ("note_on", "note_off") or message.channel == 9:
            continue
        key = (message.channel, message.note)
        if message.type == "note_on" and message.velocity > 0:
            sounding.setdefault(key, []).append((now, message.velocity))
        elif sounding.get(key):
            start, velocity = sounding[key].pop(0)
            rows.append((start, now, message.note, velocity))
    return make(*np.array(rows).T) if rows else join([])


def same(a: np.ndarray, b: np.ndarray, within_s: float) -> None:
    """As sets: two notes closer than the tolerance may come in either order."""
    assert len(a) == len(b)
    a, b = (n[np.lexsort((n["start"], n["velocity"], n["pitch"]))] for n in (a, b))
    assert np.array_equal(a[["pitch", "velocity"]], b[["pitch", "velocity"]])
    for time in ("start", "end"):
        assert np.abs(a[time] - b[time]).max(initial=0.0) <= within_s


NOTES = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.01, 4), st.integers(21, 108), st.integers(1, 127)), max_size=30
).map(lambda rows: quantise(make(*(np.array([(s, s + d, p, v) for s, d, p, v in rows]).T))) if rows else join([]))


@settings(max_examples=50, deadline=None)
@given(NOTES)
def test_what_we_write_is_what_mido_reads(notes: np.ndarray) -> None:
    data = write_midi(notes)
    same(read_with_mido(mido.MidiFile(file=io.BytesIO(data))), notes, 1e-3)
    same(read_midi(data), notes, 1e-9 + 2.5e-4)


@pytest.mark.parametrize("number", [0, 40, 80, 120, 157])
def test_real_performances_read_as_mido_reads_them(number: int) -> None:
    files = sorted((ASAP / "midi").rglob("*.mid"))
    if not files:
        pytest.skip("needs ../shared/data/piano_asap")
    same(read_midi(files[number]), read_with_mido(mido.MidiFile(files[number])), 1e-6)


@pytest.mark.parametrize("notes", [make([0, 1], [1, 2.5], [60, 62], 64), join([])])
def test_a_file_can_last_longer_than_its_notes(notes: np.ndarray) -> None:
    data = write_midi(notes, tail_s=1.0)
    same(read_midi(data), notes, 0)
    length_s = mido.MidiFile(file=io.BytesIO(data)).length
    assert length_s == pytest.approx(notes["end"].max(initial=0.0) + 1, abs=2e-3)


def a_file(tmp_path: Path) -> Path:
    """Two tracks, a tempo change in the middle of a note, drums."""
    file = mido.MidiFile(ticks_per_beat=100)
    tempo, left, drums = mido.MidiTrack(), mido.MidiTrack(), mido.MidiTrack()
    tempo += [mido.MetaMessage("set_tempo", tempo=us, time=at) for us, at in ((1_000_000, 0), (500_000, 100))]
    left += [mido.Message("note_on", note=60, velocity=40, time=50), mido.Message("note_off", note=60, time=100)]
    drums += [mido.Message(kind, channel=9, note=40, time=9) for kind in ("note_on", "note_off")]
    file.tracks += [tempo, left, drums]
    file.save(tmp_path / "a.mid")
    return tmp_path / "a.mid"


def test_tempo_changes_and_drums(tmp_path: Path) -> None:
    assert read_midi(a_file(tmp_path)).tolist() == [(0.5, 1.25, 60, 40)]


def test_long_pieces_keep_their_precision() -> None:
    notes = make(7200.0 + np.arange(100) * 0.013, 7200.01 + np.arange(100) * 0.013, np.arange(100) % 80 + 21, 64)
    same(read_midi(write_midi(notes)), notes, 2.5e-4 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 60))
def test_rubbish_is_refused_in_one_sentence(rubbish: bytes, keep: int) -> None:
    whole = write_midi(make([0, 1], [1, 2], [60, 62], 64))
    for data in (rubbish, whole[:keep] + rubbish):
        message = ""
        try:
            read_midi(data)
        except DataError as error:
            message = str(error)
        assert "\n" not in message


def test_a_torn_and_a_missing_file(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with raises_code("file-damaged", DataError) as refused:
        read_midi(path)
    assert "a.mid" in str(refused.value)
    with raises_code("no-file", DataError):
        read_midi(tmp_path / "none.mid")


def test_a_quarter_without_ticks_has_no_times() -> None:
    data = write_midi(make([0, 1], [1, 2], [60, 62], 64))
    with raises_code("file-damaged", DataError):
        read_midi(data[:12] + b"\x00\x00" + data[14:])


def test_without_symusic_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "symusic", None)
    with raises_code("not-installed") as refused:
        write_midi(join([]))
    assert "rung[midi]" in str(refused.value)
