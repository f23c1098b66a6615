"""If this fails, a model is told that music sounds otherwise than it does."""

from __future__ import annotations

import numpy as np
import pytest

from rung.data.midi import PLAYED, Channel, Performance
from rung.recipes.music.captions import caption, find_key, instruments

C_MAJOR = (60, 64, 67, 65, 69, 72, 67, 71, 74, 60, 64, 67, 72)
A_MINOR = (57, 60, 64, 62, 65, 69, 64, 68, 71, 57, 60, 64, 69)


def notes(*pitches: int, every_s: float = 0.5, program: int = 0, bank: int = 0, times: int = 1) -> np.ndarray:
    played = np.zeros(len(pitches) * times, PLAYED)
    played["start"] = np.repeat(np.arange(len(pitches)), times) * every_s
    played["end"] = played["start"] + every_s
    played["pitch"], played["velocity"] = np.repeat(pitches, times), 80
    played["program"], played["bank"] = program, bank
    return played


def band(*parts: np.ndarray) -> Performance:
    return {number: Channel(part) for number, part in enumerate(parts)}


@pytest.mark.parametrize("tonic", range(12))
def test_keys_are_found_wherever_they_begin(tonic: int) -> None:
    assert find_key(notes(*(p + tonic for p in C_MAJOR))) == (tonic, "major")
    assert find_key(notes(*(p + tonic - 9 for p in A_MINOR))) == (tonic, "minor")


def test_no_key_without_a_tonal_centre() -> None:
    assert find_key(notes(*range(60, 72))) is None
    assert find_key(notes()) is None
    whole_tones = notes(*range(60, 72, 2))
    assert find_key(whole_tones) is None
    assert caption(band(whole_tones), "test") == "piano, slow, sparse, test"


def test_the_score_is_believed_where_the_music_ends_on_its_tonic() -> None:
    assert find_key(notes(*C_MAJOR), (0, "minor")) == (0, "minor")
    assert find_key(notes(*C_MAJOR), (7, "major")) == (0, "major")
    assert find_key(notes(*range(60, 72)), (5, "minor")) == (5, "minor")
    assert find_key(notes(), (5, "minor")) == (5, "minor")
    assert caption(band(notes(*C_MAJOR)), "test", (6, "minor")).split(", ")[1] == "F# minor"


def test_instruments_by_their_share() -> None:
    quartet = [notes(*[60] * num, program=program) for num, program in ((9, 42), (12, 40), (10, 41), (30, 73))]
    assert instruments(np.concatenate(quartet)) == ["flute", "violin", "viola", "cello"]
    assert instruments(np.concatenate([*quartet, notes(60, program=19)])) == ["flute", "violin", "viola", "cello"]
    # Two programs of one name are one instrument; one hit of a drum is heard.
    guitars = [notes(*[60] * 20, program=29), notes(*[60] * 20, program=30), notes(*[60] * 30, program=0)]
    assert instruments(np.concatenate(guitars)) == ["distorted guitar", "piano"]
    with_drums = np.concatenate([*quartet, notes(38, bank=128)])
    assert instruments(with_drums) == ["flute", "violin", "viola", "drums"]
    assert instruments(notes(35, 38, program=25, bank=128)) == ["drums"]


def test_every_program_has_a_name() -> None:
    names = [instruments(notes(60, program=program))[0] for program in range(128)]
    assert {0: "piano", 6: "harpsichord", 19: "church organ", 40: "violin", 127: "sound effects"}.items() <= dict(
        enumerate(names)
    ).items()


@pytest.mark.parametrize(
    ("every_s", "times", "words"),
    [
        (0.5, 1, ["slow", "sparse"]), (0.25, 1, ["moderate", "sparse"]), (0.25, 3, ["moderate"]),
        (0.1, 1, ["fast"]), (0.1, 3, ["fast", "dense"]), (0.5, 12, ["slow", "dense"]),
    ],
)  # fmt: skip
def test_tempo_and_density(every_s: float, times: int, words: list[str]) -> None:
    text = caption(band(notes(*C_MAJOR, every_s=every_s, times=times)), "test")
    assert text.split(", ") == ["piano", "C major", *words, "test"]
