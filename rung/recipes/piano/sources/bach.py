"""The embedded music: scores of Bach out of a pip wheel, which is neither installed nor executed."""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath

from rung.data.wheel import MUSIC21
from rung.recipe import Report
from rung.recipes.piano.musicxml import read_musicxml
from rung.recipes.piano.sources import Source, Take

# Scores in the wheel that share more than half of their runs of 24 intervals: one piece, so that none tests the other.
SAME_MUSIC = {
    "bwv398": "bwv197.7", "bwv279": "bwv158.4", "bwv244.17": "bwv244.15",
    "bwv280": "bwv176.6", "bwv227.11": "bwv227.1", "bwv274": "bwv62.6",
}  # fmt: skip


def source(report: Report | None) -> Source:
    MUSIC21.fetch(report)
    takes = []
    for name, data in MUSIC21.read(lambda n: n.startswith("music21/corpus/bach/") and n.endswith((".mxl", ".xml"))):
        stem = PurePosixPath(name).stem
        piece = stem.split("-")[0]  # bwv18.5-lz and bwv18.5-w are two versions of one chorale
        piece = SAME_MUSIC.get(piece, piece)
        takes.append(Take(f"bach/{PurePosixPath(name).name}", f"Bach/{piece}", "Bach", partial(read_musicxml, data)))
    return Source(f"{MUSIC21.filename} (Bach)", takes)
