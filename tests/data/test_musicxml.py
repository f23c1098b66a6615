"""If this fails, the scores of the embedded default are read with wrong pitches or wrong times."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.musicxml import VELOCITY, read_musicxml, read_score
from rung.errors import DataError
from tests.errors import raises_code


def note(pitch: str, duration: int, extra: str = "", before: str = "") -> str:
    """note("C4", 2) or note("F#5", 2); a rest is written R"""
    if pitch == "R":
        inside = "<rest/>"
    else:
        alter = "<alter>1</alter>" if "#" in pitch else "<alter>-1</alter>" if "b" in pitch else ""
        inside = f"<pitch><step>{pitch[0]}</step>{alter}<octave>{pitch[-1]}</octave></pitch>"
    return f"<note>{before}{inside}<duration>{duration}</duration>{extra}</note>"


def score(*parts: list[str]) -> bytes:
    text = "".join("<part>" + "".join(f"<measure>{bar}</measure>" for bar in bars) + "</part>" for bars in parts)
    return f"<?xml version='1.0'?><score-partwise>{text}</score-partwise>".encode()


def rows(data: bytes) -> list[tuple[float, float, int]]:
    """start and end in quarters, pitch"""
    return [(float(n["start"]) * 2, float(n["end"]) * 2, int(n["pitch"])) for n in read_musicxml(data)]


HALVES = "<attributes><divisions>2</divisions></attributes>"
TIE_OUT, TIE_IN = '<tie type="start"/>', '<tie type="stop"/>'
TEMPO = '<direction><sound tempo="60"/></direction>'


def test_notes_follow_each_other_and_rests_take_time() -> None:
    data = score([HALVES + note("C4", 2) + note("R", 1) + note("F#4", 1), note("Bb3", 4)])
    assert rows(data) == [(0, 1, 60), (1.5, 2, 66), (2, 4, 58)]
    assert set(read_musicxml(data)["velocity"]) == {VELOCITY}


def test_chord_backup_and_forward() -> None:
    chord = note("C4", 2) + note("E4", 2, before="<chord/>") + note("G4", 1, before="<chord/>")
    data = score([HALVES + chord + "<backup><duration>2</duration></backup><forward><duration>1</duration></forward>"
                  + note("A2", 1) + note("B2", 1)])  # fmt: skip
    assert rows(data) == [(0, 1, 60), (0, 1, 64), (0, 0.5, 67), (0.5, 1, 45), (1, 1.5, 47)]


def test_ties_join_also_over_three_bars_and_in_a_chord() -> None:
    bars = [HALVES + note("C4", 2, TIE_OUT), note("C4", 2, TIE_IN + TIE_OUT), note("C4", 2, TIE_IN) + note("C4", 2)]
    assert rows(score(bars)) == [(0, 3, 60), (3, 4, 60)]
    chord = note("C4", 2, TIE_OUT) + note("E4", 2, before="<chord/>")
    assert rows(score([HALVES + chord, note("C4", 2, TIE_IN) + note("E4", 2, before="<chord/>")])) == [
        (0, 2, 60), (0, 1, 64), (1, 2, 64),
    ]  # fmt: skip


def test_a_tie_that_leads_nowhere_loses_no_note() -> None:
    bars = [HALVES + note("C4", 2, TIE_OUT) + note("R", 2) + note("C4", 2, TIE_IN) + note("D4", 2, TIE_IN)]
    assert rows(score(bars)) == [(0, 1, 60), (2, 3, 60), (3, 4, 62)]


def test_grace_and_cue_notes_are_not_played() -> None:
    grace = "<note><grace/><pitch><step>D</step><octave>5</octave></pitch></note>"
    data = score([HALVES + grace + note("C4", 2) + note("E4", 2, before="<cue/>") + note("G4", 2)])
    assert rows(data) == [(0, 1, 60), (2, 3, 67)]


def test_divisions_may_change_and_differ_between_parts() -> None:
    thirds = "<attributes><divisions>3</divisions></attributes>"
    data = score([HALVES + note("C4", 2), thirds + note("D4", 3)], [thirds + note("C3", 3), note("D3", 3)])
    assert rows(data) == [(0, 1, 48), (0, 1, 60), (1, 2, 50), (1, 2, 62)]


def test_bars_are_lined_up_across_parts() -> None:
    data = score([HALVES + note("C4", 2), note("D4", 2)], [HALVES + note("C3", 8), note("D3", 2)])
    assert rows(data) == [(0, 4, 48), (0, 1, 60), (4, 5, 50), (4, 5, 62)]


def test_transposing_instruments_sound_where_they_sound() -> None:
    horn = "<attributes><divisions>2</divisions><transpose><chromatic>-7</chromatic></transpose></attributes>"
    bass = "<attributes><transpose><chromatic>0</chromatic><octave-change>-1</octave-change></transpose></attributes>"
    assert rows(score([horn + note("C4", 2), bass + note("C4", 2)])) == [(0, 1, 53), (1, 2, 48)]


def test_tempo_marks() -> None:
    data = score([HALVES + note("C4", 2) + TEMPO + note("D4", 2) + '<sound tempo="240"/>' + note("E4", 2)])
    notes = read_musicxml(data)
    assert notes["start"].tolist() == [0, 0.5, 1.5]
    assert notes["end"].tolist() == [0.5, 1.5, 1.75]


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_compressed_scores() -> None:
    plain = score([HALVES + note("C4", 2)])
    container = b'<container><rootfiles><rootfile full-path="in/my.xml"/></rootfiles></container>'
    assert rows(packed({"other.xml": b"<x/>", "META-INF/container.xml": container, "in/my.xml": plain})) == rows(plain)
    assert rows(packed({"my.musicxml": plain})) == rows(plain)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<score-partwise><part>",
        b"<score-timewise/>",
        b"PK\x03\x04torn",
        packed({"a.txt": b""}),
        packed({"META-INF/container.xml": b"<", "a.xml": b""}),
        score([HALVES + note("H4", 2)]),
        score([HALVES + "<note><pitch><step>C</step></pitch><duration>1</duration></note>"]),
        score([HALVES + "<note><rest/></note>"]),
        score([HALVES + "<backup/>"]),
        score([HALVES + note("C4", -2)]),
        score([HALVES + "<note><rest/><duration>nan</duration></note>"]),
        score([HALVES + note("C4", 2).replace("<octave>4", "<octave>40")]),
        score(["<attributes><divisions>0</divisions></attributes>"]),
        score(["<attributes><divisions>many</divisions></attributes>"]),
    ],
)
def test_malformed_scores_are_refused(data: bytes) -> None:
    with raises_code("file-damaged", DataError) as caught:
        read_musicxml(data)
    assert "\n" not in str(caught.value)


def test_a_score_without_notes_is_empty() -> None:
    assert len(read_musicxml(b"<score-partwise/>")) == 0
    assert len(read_musicxml(score([HALVES + note("R", 2)], []))) == 0


WHOLE = score([HALVES + note("C4", 2, TIE_OUT) + TEMPO, note("C4", 2, TIE_IN) + note("E4", 2, before="<chord/>")])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4), st.booleans())
def test_damage_gives_notes_or_one_kind_of_error(at: int, put: bytes, is_packed: bool) -> None:
    data = packed({"a.xml": WHOLE}) if is_packed else WHOLE
    try:
        notes = read_musicxml(data[:at] + put + data[at + len(put) :])
    except DataError:
        return
    assert np.isfinite(notes["start"]).all()
    assert (notes["end"] > notes["start"]).all()


def test_parts_are_kept_apart_and_make_the_whole_together() -> None:
    high = [HALVES + note("C5", 4), note("D5", 4)]
    low = [TEMPO + HALVES + note("C3", 4, TIE_OUT), note("C3", 4, TIE_IN)]
    data = score(high, low, [HALVES + note("R", 4)])
    parts = read_score(data).parts
    assert [part["pitch"].tolist() for part in parts] == [[72, 74], [48], []]
    assert sorted(row for part in parts for row in part.tolist()) == sorted(read_musicxml(data).tolist())


@pytest.mark.parametrize(
    ("attributes", "key"),
    [
        ("<key><fifths>-3</fifths><mode>minor</mode></key>", (-3, "minor")),
        ("<key><fifths>2</fifths><mode> major </mode></key>", (2, "major")),
        ("<key><fifths>2</fifths></key>", None),
        ("<key><fifths>two</fifths><mode>major</mode></key>", None),
        ("<key><fifths>9</fifths><mode>major</mode></key>", None),
        ("<key><fifths>2</fifths><mode>dorian</mode></key>", None),
        ("<key><fifths>2</fifths><mode>major</mode></key><transpose><chromatic>-2</chromatic></transpose>", None),
        ("", None),
    ],
)
def test_the_key_that_a_score_names(attributes: str, key: tuple[int, str] | None) -> None:
    data = score([f"<attributes><divisions>2</divisions>{attributes}</attributes>" + note("C4", 2)])
    assert read_score(data).key == key


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.data.musicxml.MOST_BYTES", 10_000)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("score.xml", score([note("C4", 2)]) + b" " * 10_001)
    with raises_code("file-damaged", DataError):
        read_musicxml(packed.getvalue())
