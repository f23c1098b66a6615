"""Reads notes from MusicXML scores, plain or compressed; an inconsistent score raises DataError.

Repeats are played once, grace and cue notes are skipped, and dynamics are ignored: all notes are equally loud. A bar
lasts as long as its longest part, so that a part with a missing rest does not drift away from the others.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np

from rung.data.notes import join, make, seconds_at
from rung.errors import DataError
from rung.text import error_text

QUARTER_S = 0.5  # where no tempo is given
VELOCITY = 66  # the midpoint of a velocity bin of the piano tokenizer, so that nothing is lost on the way
STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}
MOST_BYTES = 100_000_000  # of a score that is unpacked; symphonies have about 30 MB
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


@dataclass(frozen=True)
class Score:
    parts: list[np.ndarray]  # notes in seconds
    key: tuple[int, str] | None  # sharps (flats below 0) and "major" or "minor", where the score begins and says both


def read_musicxml(data: bytes) -> np.ndarray:
    """Notes in seconds of a .musicxml, .xml or .mxl file, all parts together."""
    return join(read_score(data).parts)


def read_score(data: bytes) -> Score:
    try:
        root = ElementTree.fromstring(_unpacked(data))
        if root.tag != "score-partwise":
            raise _damaged(f"the score is <{root.tag}>, only <score-partwise> is read")
        return Score(_played([_bars(part) for part in root.iter("part")]), _key(root))
    except DAMAGE as error:
        raise _damaged(f"not a readable MusicXML score ({error_text(error)})") from error


def _damaged(reason: str) -> DataError:
    return DataError(reason, code="file-damaged")


def _unpacked(data: bytes) -> bytes:
    """The score itself; a compressed file is a zip whose container.xml names it."""
    if not data.startswith(b"PK"):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()

        def read(name: str) -> bytes:
            with archive.open(name) as file:  # a few bytes may stand for gigabytes, whatever the archive says they are
                if len(text := file.read(MOST_BYTES + 1)) > MOST_BYTES:
                    raise _damaged(f"the compressed file holds more than {MOST_BYTES} bytes")
            return text

        if "META-INF/container.xml" in names:
            for file in ElementTree.fromstring(read("META-INF/container.xml")).iter("rootfile"):
                if file.get("full-path") in names:
                    return read(file.attrib["full-path"])
        for name in names:
            if name.endswith((".xml", ".musicxml")) and not name.startswith("META-INF"):
                return read(name)
    raise _damaged("the compressed file holds no score")


def _key(root: Element) -> tuple[int, str] | None:
    """The first key of a part that is written as it sounds; a strange one is none."""
    for attributes in root.iter("attributes"):
        fifths, mode = (attributes.findtext(f"key/{tag}", "").strip() for tag in ("fifths", "mode"))
        if attributes.find("transpose") is None and mode in ("major", "minor") and re.fullmatch("-?[0-7]", fifths):
            return int(fifths), mode
    return None


def _bars(part: Element) -> list[Bar]:
    bars, divisions, transpose = [], 1.0, 0  # both hold in a part until they are changed
    for measure in part.iter("measure"):
        bar, clock, last_start = Bar(), 0.0, 0.0
        for child in measure:
            if child.tag == "attributes":
                if (text := child.findtext("divisions")) is not None:
                    divisions = float(text)
                    if not divisions > 0:
                        raise _damaged(f"{text} divisions in a quarter")
                for element in child.findall("transpose"):
                    octaves = int(element.findtext("octave-change") or 0)
                    transpose = round(float(element.findtext("chromatic") or 0)) + 12 * octaves
            elif child.tag == "backup":
                clock = max(0.0, clock - _duration(child, divisions))
            elif child.tag == "forward":
                clock += _duration(child, divisions)
            elif child.tag == "note" and child.find("grace") is None:
                length = _duration(child, divisions)
                start = last_start if child.find("chord") is not None else clock
                pitch = child.find("pitch")
                if pitch is not None and child.find("cue") is None and length > 0:  # else only time passes
                    alter = round(float(pitch.findtext("alter") or 0))
                    key = 12 * (int(_text(pitch, "octave")) + 1) + STEPS[_text(pitch, "step")] + alter + transpose
                    if not 0 <= key <= 127:
                        raise _damaged(f"pitch {key} is outside 0..127")
                    ties = {tie.get("type") for tie in child.findall("tie")}
                    bar.notes.append((start, length, key, "stop" in ties, "start" in ties))
                last_start, clock = start, max(clock, start + length)
            elif child.tag in ("sound", "direction"):
                for sound in child.iter("sound"):
                    if 1 <= (tempo := float(sound.get("tempo", 0))) <= 1000:  # anything else is a slip of the editor
                        bar.tempos.append((clock, tempo))
            bar.length = max(bar.length, clock)
        bars.append(bar)
    return bars


def _duration(element: Element, divisions: float) -> float:
    duration = float(_text(element, "duration")) / divisions
    if not 0 <= duration < 1e6:
        raise _damaged(f"a duration of {duration} quarters")
    return duration


def _text(element: Element, tag: str) -> str:
    text = element.findtext(tag)
    if text is None or not text.strip():
        raise _damaged(f"a <{element.tag}> without <{tag}>")
    return text.strip()


def _played(parts: list[list[Bar]]) -> list[np.ndarray]:
    """The notes of each part: bars put one after the other, ties joined, quarters turned into seconds."""
    num_bars = max(map(len, parts), default=0)
    lengths = [max(part[i].length for part in parts if i < len(part)) for i in range(num_bars)]
    bar_start = np.concatenate([[0.0], np.cumsum(lengths)]).tolist()
    rows: list[list[list[float]]] = []  # of each part start, end and pitch, tied notes as one
    tempos = {0.0: 60.0 / QUARTER_S}
    for part in parts:
        rows.append([])
        tied: dict[int, list[float]] = {}  # by pitch, the row that a tie leads out of
        for i, bar in enumerate(part):
            tempos |= {bar_start[i] + at: tempo for at, tempo in bar.tempos}
            for start, length, pitch, tie_in, tie_out in sorted(bar.notes):
                start += bar_start[i]
                row = tied.get(pitch)
                if row is not None and tie_in and abs(row[1] - start) < SAME:
                    row[1] = start + length
                    del tied[pitch]
                else:
                    row = [start, start + length, pitch]
                    rows[-1].append(row)
                if tie_out:
                    tied[pitch] = row
    change_at = np.array(sorted(tempos))
    quarter_s = np.array([60.0 / tempos[at] for at in sorted(tempos)])
    played = []
    for part_rows in rows:
        starts, ends, pitches = np.array(part_rows).reshape(-1, 3).T
        start_s, end_s = (seconds_at(at, change_at, quarter_s) for at in (starts, ends))
        played.append(make(start_s, end_s, pitches, VELOCITY))
    return played
