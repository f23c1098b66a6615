"""Scores of Bach out of a pinned pip wheel, which is neither installed nor executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from rung.data.wheel import MUSIC21, Report

# Scores that share more than half of their runs of 24 intervals: one piece, so that none tests the other.
SAME_MUSIC = {
    "bwv398": "bwv197.7", "bwv279": "bwv158.4", "bwv244.17": "bwv244.15",
    "bwv280": "bwv176.6", "bwv227.11": "bwv227.1", "bwv274": "bwv62.6",
}  # fmt: skip


def scores(report: Report | None = None) -> Iterator[tuple[str, str, bytes]]:
    """File name, piece and content of each, sorted by name; MusicXML, most of them compressed."""
    MUSIC21.fetch(report)
    for name, data in MUSIC21.read(lambda n: n.startswith("music21/corpus/bach/") and n.endswith((".mxl", ".xml"))):
        path = PurePosixPath(name)
        piece = path.stem.split("-")[0]  # bwv18.5-lz and bwv18.5-w are two versions of one chorale
        yield path.name, SAME_MUSIC.get(piece, piece), data
