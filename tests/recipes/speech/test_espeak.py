"""If this fails, the speech that needs no account leaks voices or texts between splits, or is no speech."""

from __future__ import annotations

import platform
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rung.errors import DataError
from rung.recipes.speech.sources import Source, Utterance, espeak
from rung.recipes.speech.sources.espeak import ACCENTS, ESPEAK, HELD_SPLITS, TIMBRES, Synthesiser, embedded, find_engine
from rung.recipes.speech.sources.sentences import CODE, DIGITS, in_text, sentences
from tests.errors import raises_code

RATE = 16000


def no_report(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def engine() -> Path:
    try:
        ESPEAK.fetch()
        return find_engine(no_report)
    except DataError as error:
        pytest.skip(f"espeak-ng cannot be had here: {error}")


@pytest.fixture(scope="module")
def digits(engine: Path) -> Source:
    return embedded("digits", 80, 0, no_report)


@pytest.fixture(scope="module")
def many(engine: Path) -> Source:
    return embedded("sentences", 2000, 0, no_report)


def facts(source: Source) -> list[tuple[str, str, str, str | None]]:
    return [(one.name, one.text, one.speaker, one.split) for one in source.utterances]


def by_split(source: Source) -> dict[str, list[Utterance]]:
    found: dict[str, list[Utterance]] = {}
    for one in source.utterances:
        found.setdefault(str(one.split), []).append(one)
    return found


# Texts


def test_plain_sentences_are_found() -> None:
    found = sentences(0)
    assert len(found) > 3000  # the standard library alone has about that many
    assert len({sentence.casefold() for sentence in found}) == len(found)
    for sentence in found:
        assert re.fullmatch(r"[A-Z][A-Za-z', ]+\.", sentence), sentence
        words = sentence.removesuffix(".").replace(",", "").split(" ")
        assert 4 <= len(words) <= 14, sentence
        assert not [word for word in words if re.search("[A-Z]", word[1:]) or CODE.fullmatch(word.lower())], sentence


def test_the_seed_orders_sentences_and_nothing_else() -> None:
    assert sentences(0) == sentences(0)
    assert sentences(0) != sentences(1)
    assert set(sentences(0)) == set(sentences(1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the sum of two numbers.", ["Return the sum of two numbers."]),
        ("It's all here, and I know it. If not,\nit is a very long way.",
         ["It's all here, and I know it.", "If not, it is a very long way."]),
        ("Return a new ndarray of zeros.", []),
        ("Call read_all to get it.", []),
        ("Use os.path for the rest of it.", []),
        ("The OrderedDict keeps its order.", []),
        ("The URL is then opened.", []),
        ("Add x to the whole list.", []),
        ("There are 3 of these here.", []),
        ("Too short here.", []),
        ("no capital at the start.", []),
        ("Does it return the sum of these?", []),
        ("A long one " + "and more " * 6 + "of it.", []),
        ("axis : int\n    The way to go from here.\nother : int", ["The way to go from here."]),
        (">>> print(1)\nReturn the sum of two numbers.", []),
    ],
)  # fmt: skip
def test_what_is_a_sentence(text: str, expected: list[str]) -> None:
    assert list(in_text(text)) == expected


# Splits


def test_sizes_of_the_splits(digits: Source, many: Source) -> None:
    assert Counter(one.split for one in digits.utterances) == {"train": 48, **dict.fromkeys(HELD_SPLITS, 8)}
    assert Counter(one.split for one in many.utterances) == {"train": 1600, **dict.fromkeys(HELD_SPLITS, 100)}
    assert Counter(one.split for one in embedded("digits", 20, 0, no_report).utterances) == {
        "train": 12, **dict.fromkeys(HELD_SPLITS, 2),
    }  # fmt: skip
    with raises_code("too-small"):
        embedded("digits", 7, 0, no_report)


@pytest.mark.parametrize("kind", ["digits", "sentences"])
def test_neither_voices_nor_texts_leak(kind: str, digits: Source, many: Source) -> None:
    found = by_split(many if kind == "sentences" else embedded("digits", 2000, 0, no_report))
    texts = {split: {one.text for one in some} for split, some in found.items()}
    voices = {split: {one.speaker for one in some} for split, some in found.items()}
    timbres = {split: {voice.partition("+")[2] for voice in some} for split, some in voices.items()}
    apart = ("train", "validation", "test")
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not texts[one] & texts[other]
        assert not timbres[one] & timbres[other]
    assert texts["voices"] <= texts["train"]
    assert voices["voices"] <= voices["validation"]
    assert voices["sentences"] <= voices["train"]
    assert not any(texts["sentences"] & texts[split] for split in apart)
    if kind == "digits":
        assert all(len(text.split()) >= 2 for split in ("validation", "test", "sentences") for text in texts[split])
        assert set(DIGITS) <= texts["train"]
        assert {len(text.split()) for text in texts["train"]} == {1, 2, 3, 4, 5}
        assert {word for some in texts.values() for text in some for word in text.split()} == set(DIGITS)


def test_there_are_many_voices(many: Source) -> None:
    voices = by_split(many)
    assert len({one.speaker for one in voices["train"]}) == len(ACCENTS) * (len(TIMBRES) - 12)
    assert len({one.speaker for one in voices["validation"]}) == len(ACCENTS) * 6
    assert len({one.name for one in many.utterances}) == len(many.utterances) == 2000


def test_the_seed_decides_who_says_what(digits: Source) -> None:
    assert facts(embedded("digits", 80, 0, no_report)) == facts(digits)
    assert facts(embedded("digits", 80, 1, no_report)) != facts(digits)


# Sound


def test_every_voice_speaks(engine: Path) -> None:
    """A voice that espeak-ng does not know would speak as another, and all of them say something."""
    synthesiser = Synthesiser(engine)
    request = {"rate": 175, "pitch": 50, "range": 50, "text": "Seven people."}
    for voice in [f"{accent}+m1" for accent in ACCENTS] + [f"en-us+{timbre}" for timbre in TIMBRES]:
        sound, rate = synthesiser.speak({**request, "voice": voice})
        assert rate == 22050
        assert 0.3 < len(sound) / rate < 3, voice
        assert np.abs(sound.astype(int)).max() > 1000, voice
    high, low = (synthesiser.speak({**request, "voice": voice})[0] for voice in ("en-us+f2", "en-us+m8"))
    assert pitch_hz(high, 22050) > 1.5 * pitch_hz(low, 22050)


def pitch_hz(sound: np.ndarray, rate: int) -> float:
    """The commonest distance between its periods."""
    found = []
    for start in range(0, len(sound) - 1500, 500):
        part = sound[start : start + 1500].astype(np.float64)
        same = np.correlate(part, part, "full")[len(part) - 1 :]
        period = rate // 400 + int(np.argmax(same[rate // 400 : rate // 50]))
        if same[period] > 0.5 * same[0] > 0:
            found.append(rate / period)
    return float(np.median(found))


def test_utterances_are_speech(digits: Source) -> None:
    for one in digits.utterances[::5]:
        sound = one.read()
        assert (sound.ndim, sound.dtype) == (1, np.dtype(np.float32))
        assert 0.1 < np.abs(sound).max() <= 1
        seconds, num_words = len(sound) / RATE, len(one.text.split())
        assert 0.12 * num_words < seconds < 0.8 * num_words + 0.6, one
        # Louder and softer by turns, most of it below 4 kHz: neither noise nor a tone.
        power = np.abs(np.fft.rfft(sound)) ** 2
        assert power[: len(power) // 2].sum() > 0.7 * power.sum()
        loudness = np.sqrt(np.square(sound[: len(sound) // 400 * 400]).reshape(-1, 400).mean(axis=1))
        assert loudness.min() < 0.3 * loudness.max()
    long = max(digits.utterances, key=lambda one: len(one.text))
    short = min(digits.utterances, key=lambda one: len(one.text))
    assert len(long.read()) > 2 * len(short.read())


def test_threads_take_turns(digits: Source) -> None:
    some = digits.utterances[:12]
    lengths = [len(one.read()) for one in some]
    with ThreadPoolExecutor(4) as pool:
        again = [len(sound) for sound in pool.map(lambda one: one.read(), some)]
    assert again == pytest.approx(lengths, rel=0.1)  # espeak-ng is never quite the same


def test_listing_makes_no_sound(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espeak.subprocess, "Popen", lambda *args, **options: pytest.fail("a process was started"))
    assert embedded("digits", 40, 0, no_report).utterances


# Trouble


def test_an_unknown_voice_is_refused_and_the_next_one_heard(engine: Path) -> None:
    synthesiser = Synthesiser(engine)
    request = {"voice": "en-us+m1", "rate": 175, "pitch": 50, "range": 50, "text": "Seven."}
    before = synthesiser.speak(request)[0]
    with raises_code("no-voice", DataError):
        synthesiser.speak({**request, "voice": "en-gb"})
    assert len(synthesiser.speak(request)[0]) == pytest.approx(len(before), rel=0.1)


def test_an_unknown_timbre_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espeak, "TIMBRES", ("m1", "f99"))
    with raises_code("no-voice", DataError) as caught:
        embedded("digits", 20, 0, no_report)
    assert "f99" in str(caught.value)


def test_a_library_that_does_not_load_is_one_sentence(tmp_path: Path) -> None:
    synthesiser = Synthesiser(tmp_path)
    for _ in range(2):  # another request is another try
        with raises_code("synthesis-failed", DataError) as caught:
            synthesiser.speak({"voice": "en", "rate": 175, "pitch": 50, "range": 50, "text": "Seven."})
        assert "libespeak-ng.so" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_other_systems_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with raises_code("not-installed", DataError) as caught:
        embedded("digits", 20, 0, no_report)
    assert "--from" in str(caught.value)
