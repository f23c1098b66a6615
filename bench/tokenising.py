"""Ten hours of piano from the bytes of MIDI files to ids: rung against miditok, in turns.

    python -m bench.tokenising [--quick]

rung: what `rung data piano` does to a file, from parsing to the ids of its records; and the same with the sustain pedal
applied, for which it reads the files event by event. miditok: `Score.from_midi` and a call of the tokenizer, with 88
pitches and 32 velocities as rung has, and its own defaults beyond that; MIDILike is the nearest relative, REMI the
usual choice. The ratio is rung / the faster of the two, in CPU time: the bytes are in memory, and each works in one
thread. The ids of the three are not the same language: their number is told with the figures.

The files are performances in ../shared/data/piano_asap. Without them the music is made up: chords and runs at the same
pace, in files of ten minutes, which the first line says. Without miditok only rung's own time is told.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.recipes.piano.midi import read_midi, write_midi
from rung.recipes.piano.notes import HIGHEST, LOWEST, from_zero, in_range, make, quantise, split_at_pauses
from rung.recipes.piano.tokenizer import NUM_VELOCITIES, Tokenizer

PERFORMANCES = Path(__file__).parents[1] / ".." / "shared" / "data" / "piano_asap" / "midi"
TOKENIZER = Tokenizer()
PAUSE_S = 4.0
BAR = 0.2
BAR_S = 3.0  # for ten hours; a slow core took 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes of music: does it run at all?")
    args = parser.parse_args()
    num_hours, num_rounds = (0.1, 1) if args.quick else (10.0, 3)
    files, origin, hours = music(num_hours)
    print(
        facts("numpy", "symusic", "miditok", music=f"{hours:.2f} h in {len(files)} {origin}", rounds=num_rounds),
        flush=True,
    )
    bench(files, hours, num_rounds)


def bench(files: list[bytes], hours: float, num_rounds: int) -> None:
    ways = {"rung": ours, "rung, sustain": partial(ours, sustain=True)} | theirs()
    counts = {name: sum(map(way, files)) for name, way in ways.items()}
    figures = in_turns(num_rounds, {name: partial(seconds, way, files) for name, way in ways.items()})
    for name, values in figures.items():
        print(f"{name:<18} {spread(values, '.2f')} s, {counts[name]:,} ids")
    if len(ways) == 2:
        print("miditok            left out: it is not installed (pip install 'rung[bench]')")
    print(verdict("tokenising-ten-hours-s", [s / hours * 10 for s in figures["rung"]], BAR_S, is_least=False))
    if len(ways) > 2:
        best = list(map(min, figures["miditok MIDILike"], figures["miditok REMI"]))
        print(verdict("tokenising", pairwise(figures["rung"], best), BAR, is_least=False))


def ours(data: bytes, sustain: bool = False) -> int:
    notes, _ = in_range(read_midi(data, sustain=sustain))
    parts = split_at_pauses(notes, PAUSE_S)
    return sum(1 + len(TOKENIZER.encode_all([quantise(from_zero(part))])[0]) for part in parts)


def theirs() -> dict[str, Callable[[bytes], int]]:
    try:
        from miditok import REMI, MIDILike, TokenizerConfig
    except ImportError:
        return {}
    from symusic import Score

    def num_ids(tokenizer: Callable[[Score], list], data: bytes) -> int:
        return sum(len(track.ids) for track in tokenizer(Score.from_midi(data)))

    config = {"pitch_range": (LOWEST, HIGHEST + 1), "num_velocities": NUM_VELOCITIES}
    kinds = {"miditok MIDILike": MIDILike, "miditok REMI": REMI}
    return {name: partial(num_ids, kind(TokenizerConfig(**config))) for name, kind in kinds.items()}


def seconds(way: Callable[[bytes], int], files: list[bytes]) -> float:
    begun = time.process_time()
    for data in files:
        way(data)
    return time.process_time() - begun


def music(num_hours: float) -> tuple[list[bytes], str, float]:
    """Files until there are so many hours, what they are, and how many hours it came to."""
    paths = sorted(PERFORMANCES.rglob("*.mid"))
    some = map(Path.read_bytes, paths) if paths else map(made_up, range(int(num_hours * 6) + 1))
    files, hours = [], 0.0
    for data in some:
        files.append(data)
        hours += float(read_midi(data)["end"].max()) / 3600
        if hours >= num_hours:
            break
    return files, "performances of ASAP" if paths else "made-up files, as ../shared/data/piano_asap is absent", hours


def made_up(number: int) -> bytes:
    """Ten minutes of chords and runs, ten notes a second."""
    draw = np.random.default_rng(number)
    start = np.cumsum(draw.choice([0.0, 0.1, 0.2], 6000))
    length = draw.exponential(0.3, len(start)) + 0.02
    return write_midi(quantise(make(start, start + length, draw.integers(30, 100, 6000), draw.integers(20, 110, 6000))))


if __name__ == "__main__":
    main()
