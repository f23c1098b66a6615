"""Reads notes out of MusicXML scores, plain or compressed.

What is played is honoured: divisions, backup, forward, chords, ties, transposing instruments, tempo marks. What is
written for the eye or as ornament is not: repeats are played once, grace and cue notes are skipped, dynamics are
ignored. A score has no touch, so all notes are equally loud. A score that makes no sense raises DataError.

The one surprising thing is that bars are lined up across parts: a bar lasts as long as its longest part, so that a
part with a missing rest does not drift away from the others.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np

from rung.errors import DataError
from rung.recipes.piano.notes import NOTE, make, seconds_at

QUARTER_S = 0.5  # where no tempo is given
VELOCITY = 66  # the midpoint of a velocity bin of the tokenizer, so that nothing is lost on the way
STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}
DAMAGE = (  # all that a broken zip file, broken XML or a broken number can raise
    ElementTree.ParseError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError,
    LookupError, ValueError, ArithmeticError, RuntimeError,
)  # fmt: skip
SAME = 1e-6  # quarters; positions are sums of floats


@dataclass
class Bar:
    """One bar of one part; positions in quarters from its beginning."""

    length: float = 0.0
    notes: list[tuple[float, float, int, bool, bool]] = field(default_factory=list)  # start, length, pitch, tie in, out
    tempos: list[tuple[float, float]] = field(default_factory=list)  # position, quarters a minute


@dataclass
class Part:
    """What holds in a part until it is changed."""

    divisions: float = 1.0
    transpose: int = 0


def read_musicxml(data: bytes) -> np.ndarray:
    """Notes in seconds of a .musicxml, .xml or .mxl file."""
    try:
        root = ElementTree.fromstring(_unpacked(data))
        if root.tag != "score-partwise":
            raise DataError(f"the score is <{root.tag}>, only <score-partwise> is read")
        parts = [_bars(part) for part in root.iter("part")]
        return _played(parts)
    except DAMAGE as error:
        raise DataError(f"not a readable MusicXML score ({type(error).__name__}: {error})") from error


def _unpacked(data: bytes) -> bytes:
    """The score itself; a compressed file is a zip whose container.xml names it."""
    if not data.startswith(b"PK"):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        if "META-INF/container.xml" in names:
            for file in ElementTree.fromstring(archive.read("META-INF/container.xml")).iter("rootfile"):
                if file.get("full-path") in names:
                    return archive.read(file.attrib["full-path"])
        for name in names:
            if name.endswith((".xml", ".musicxml")) and not name.startswith("META-INF"):
                return archive.read(name)
    raise DataError("the compressed file holds no score")


def _bars(part: Element) -> list[Bar]:
    state = Part()
    return [_bar(measure, state) for measure in part.iter("measure")]


def _bar(measure: Element, state: Part) -> Bar:
    bar, clock, last_start = Bar(), 0.0, 0.0
    for child in measure:
        if child.tag == "attributes":
            _attributes(child, state)
        elif child.tag == "backup":
            clock = max(0.0, clock - _duration(child, state))
        elif child.tag == "forward":
            clock += _duration(child, state)
        elif child.tag == "note" and child.find("grace") is None:
            length = _duration(child, state)
            start = last_start if child.find("chord") is not None else clock
            _add_note(bar, child, start, length, state)
            last_start, clock = start, max(clock, start + length)
        elif child.tag in ("sound", "direction"):
            for sound in child.iter("sound"):
                if 1 <= (tempo := float(sound.get("tempo", 0))) <= 1000:  # anything else is a slip of the editor
                    bar.tempos.append((clock, tempo))
        bar.length = max(bar.length, clock)
    return bar


def _add_note(bar: Bar, note: Element, start: float, length: float, state: Part) -> None:
    pitch = note.find("pitch")
    if pitch is None or note.find("cue") is not None or length <= 0:
        return  # a rest, a drum or a cue: only time passes
    alter = round(float(pitch.findtext("alter") or 0))
    key = 12 * (int(_text(pitch, "octave")) + 1) + STEPS[_text(pitch, "step")] + alter + state.transpose
    if not 0 <= key <= 127:
        raise DataError(f"pitch {key} is outside 0..127")
    ties = {tie.get("type") for tie in note.findall("tie")}
    bar.notes.append((start, length, key, "stop" in ties, "start" in ties))


def _attributes(attributes: Element, state: Part) -> None:
    if (divisions := attributes.findtext("divisions")) is not None:
        state.divisions = float(divisions)
        if not state.divisions > 0:
            raise DataError(f"{divisions} divisions in a quarter")
    for transpose in attributes.findall("transpose"):
        octaves = int(transpose.findtext("octave-change") or 0)
        state.transpose = round(float(transpose.findtext("chromatic") or 0)) + 12 * octaves


def _duration(element: Element, state: Part) -> float:
    duration = float(_text(element, "duration")) / state.divisions
    if not 0 <= duration < 1e6:
        raise DataError(f"a duration of {duration} quarters")
    return duration


def _text(element: Element, tag: str) -> str:
    text = element.findtext(tag)
    if text is None or not text.strip():
        raise DataError(f"a <{element.tag}> without <{tag}>")
    return text.strip()


def _played(parts: list[list[Bar]]) -> np.ndarray:
    """Bars put one after the other, ties joined, quarters turned into seconds."""
    num_bars = max(map(len, parts), default=0)
    lengths = [max(part[i].length for part in parts if i < len(part)) for i in range(num_bars)]
    bar_start = np.concatenate([[0.0], np.cumsum(lengths)]).tolist()
    rows: list[list[float]] = []
    for part in parts:
        rows += _joined(part, bar_start)
    if not rows:
        return np.empty(0, dtype=NOTE)
    tempos = {0.0: 60.0 / QUARTER_S}
    tempos |= {bar_start[i] + at: tempo for part in parts for i, bar in enumerate(part) for at, tempo in bar.tempos}
    change_at = np.array(sorted(tempos))
    quarter_s = np.array([60.0 / tempos[at] for at in sorted(tempos)])
    start, end, pitch = np.array(rows).T
    return make(seconds_at(start, change_at, quarter_s), seconds_at(end, change_at, quarter_s), pitch, VELOCITY)


def _joined(part: list[Bar], bar_start: list[float]) -> list[list[float]]:
    """[start, end, pitch] of one part in quarters, tied notes as one."""
    rows: list[list[float]] = []
    tied: dict[int, list[float]] = {}  # by pitch, the row that a tie leads out of
    for i, bar in enumerate(part):
        for start, length, pitch, tie_in, tie_out in sorted(bar.notes):
            start += bar_start[i]
            row = tied.get(pitch)
            if row is not None and tie_in and abs(row[1] - start) < SAME:
                row[1] = start + length
                del tied[pitch]
            else:
                row = [start, start + length, pitch]
                rows.append(row)
            if tie_out:
                tied[pitch] = row
    return rows
