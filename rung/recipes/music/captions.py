"""Says in words what a performance sounds like, from its notes alone: "organ, G minor, slow, sparse, chorale"."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rung.data.midi import DRUM_BANK, Performance

Key = tuple[int, str]  # pitch class of the tonic, "major" or "minor"
MOST_INSTRUMENTS = 4
SMALLEST_SHARE = 0.03  # of all notes; an instrument that plays less is not named
SAME_MOMENT_S = 0.04  # notes closer than that start together
# Tempo, as the moments at which something starts, a second: a written tempo counts beats of any length. A beat at 120 a
# minute cut in two has 4. Three quarters of Freedoom's pieces lie above the second bound, nearly all chorales below it.
SLOW, FAST = 2.5, 5.0
# Notes that start, a second, all instruments together; between the bounds the word is left out.
SPARSE, DENSE = 8.0, 20.0
# A piece that no key fits better than this has none in its caption.
SMALLEST_CORRELATION = 0.6
# How often each degree of a scale is heard in common-practice music (D. Temperley, Music and Probability, 2007, from
# the Kostka-Payne corpus). On Bach's 410 scores its tonic is the last bass note of 341; that of Krumhansl's profiles is
# in 303, and that of the key signatures in 323, as old minor keys are written with a flat less.
PROFILES = {
    "major": (0.748, 0.060, 0.488, 0.082, 0.670, 0.460, 0.096, 0.715, 0.104, 0.366, 0.057, 0.400),
    "minor": (0.712, 0.084, 0.474, 0.618, 0.049, 0.460, 0.105, 0.747, 0.404, 0.067, 0.133, 0.330),
}
TONICS = {
    "major": ("C", "Db", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B"),
    "minor": ("C", "C#", "D", "Eb", "E", "F", "F#", "G", "G#", "A", "Bb", "B"),
}
_NAMES = {  # the first program of General MIDI that is called so, from 0; it holds up to the next
    0: "piano", 4: "electric piano", 6: "harpsichord", 7: "clavinet", 8: "celesta", 9: "glockenspiel", 10: "music box",
    11: "vibraphone", 12: "marimba", 13: "xylophone", 14: "bells", 15: "dulcimer", 16: "organ", 19: "church organ",
    20: "reed organ", 21: "accordion", 22: "harmonica", 23: "accordion", 24: "acoustic guitar", 26: "electric guitar",
    29: "distorted guitar", 31: "guitar harmonics", 32: "double bass", 33: "bass guitar", 38: "synth bass",
    40: "violin", 41: "viola", 42: "cello", 43: "double bass", 44: "strings", 45: "plucked strings", 46: "harp",
    47: "timpani", 48: "strings", 52: "choir", 54: "synth voice", 55: "orchestra hit", 56: "trumpet", 57: "trombone",
    58: "tuba", 59: "trumpet", 60: "french horn", 61: "brass", 64: "saxophone", 68: "oboe", 69: "english horn",
    70: "bassoon", 71: "clarinet", 72: "piccolo", 73: "flute", 74: "recorder", 75: "pan flute", 76: "blown bottle",
    77: "shakuhachi", 78: "whistle", 79: "ocarina", 80: "synth lead", 88: "synth pad", 96: "synth effects",
    104: "sitar", 105: "banjo", 106: "shamisen", 107: "koto", 108: "kalimba", 109: "bagpipe", 110: "fiddle",
    111: "shanai", 112: "bells", 113: "percussion", 120: "sound effects",
}  # fmt: skip
_PROFILES = np.array([np.roll(profile, tonic) for profile in PROFILES.values() for tonic in range(12)])
_PROFILES -= _PROFILES.mean(axis=1, keepdims=True)
_PROFILES /= np.linalg.norm(_PROFILES, axis=1, keepdims=True)
_FIRST = np.array(sorted(_NAMES))


def caption(performance: Performance, style: str, key: Key | None = None) -> str:
    """Instruments by their share of the notes, key, tempo, density and style, with commas between.

    Without a `key` it is found from the notes.
    """
    notes = np.concatenate([channel.notes for channel in performance.values()])
    tags = instruments(notes)
    if (found := key or find_key(notes[notes["bank"] != DRUM_BANK])) is not None:
        tonic, mode = found
        tags.append(f"{TONICS[mode][tonic]} {mode}")
    length_s = float(notes["end"].max() - notes["start"].min())
    starts = np.sort(notes["start"])
    moments_a_s = (1 + int((np.diff(starts) > SAME_MOMENT_S).sum())) / length_s
    tags.append("slow" if moments_a_s < SLOW else "moderate" if moments_a_s < FAST else "fast")
    notes_a_s = len(notes) / length_s
    if not SPARSE <= notes_a_s < DENSE:
        tags.append("sparse" if notes_a_s < SPARSE else "dense")
    return ", ".join([*tags, style])


def instruments(notes: np.ndarray) -> list[str]:
    """At most four names, most notes first. Drums are always named, as they are heard however few they are."""
    is_drum = notes["bank"] == DRUM_BANK
    which = _FIRST[np.searchsorted(_FIRST, notes["program"], side="right") - 1]
    counts = Counter(_NAMES[first] for first in which[~is_drum].tolist())
    counts["drums"] = int(is_drum.sum())
    ranked = [name for name, num in counts.most_common() if num >= SMALLEST_SHARE * len(notes)]
    if counts["drums"] and "drums" not in ranked[:MOST_INSTRUMENTS]:
        ranked = [*ranked[: MOST_INSTRUMENTS - 1], "drums"]
    return [name for name in ranked[:MOST_INSTRUMENTS] if counts[name]]


def find_key(notes: np.ndarray, signature: Key | None = None) -> Key | None:
    """The key whose profile is most like the time that each pitch class sounds; None where none is.

    The signature of a score is believed where the music ends on its tonic, or where nothing else is found.
    """
    if signature is not None and len(notes):
        is_last = notes["end"] > notes["end"].max() - SAME_MOMENT_S
        if signature[0] == notes["pitch"][is_last].min() % 12:
            return signature
    # A held pedal point should not outweigh everything else.
    seconds = np.minimum(notes["end"] - notes["start"], 2.0)
    heard = np.bincount(notes["pitch"] % 12, weights=seconds, minlength=12)
    if not heard.std():
        return signature
    heard = heard - heard.mean()
    likeness = _PROFILES @ heard / np.linalg.norm(heard)  # correlation
    best = int(likeness.argmax())
    return (best % 12, list(PROFILES)[best // 12]) if likeness[best] >= SMALLEST_CORRELATION else signature
