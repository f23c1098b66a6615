"""If this fails, a speaker is trained on and tested with, or adding a file moves the others between splits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rung.recipes.speech.sources import Utterance
from rung.recipes.speech.sources.splits import assign_splits


def silence() -> np.ndarray:
    return np.zeros(800, np.float32)


def said(name: str, speaker: str = "", text: str | None = None, split: str | None = None) -> Utterance:
    return Utterance(name, text if text is not None else f"text of {name}", silence, speaker=speaker, split=split)


def by_speakers(*sizes: int) -> list[Utterance]:
    return [said(f"s{speaker}/{n}.wav", f"s{speaker}") for speaker, size in enumerate(sizes) for n in range(size)]


def counts(split_of: dict[str, str]) -> Counter[str]:
    return Counter(split_of.values())


@pytest.mark.parametrize("sizes", [(5, 5, 5), (100, 1, 1), (3,) * 40, tuple(range(1, 30)), (1, 1, 1)])
@pytest.mark.parametrize("held_out", [0.005, 0.1, 0.3])
def test_no_speaker_is_in_two_splits(sizes: tuple[int, ...], held_out: float) -> None:
    for seed in range(5):
        utterances = by_speakers(*sizes)
        split_of, note = assign_splits(utterances, held_out, seed)
        assert set(split_of) == {one.name for one in utterances}
        assert set(split_of.values()) == {"train", "validation", "test"}
        for speaker in {one.speaker for one in utterances}:
            assert len({split_of[one.name] for one in utterances if one.speaker == speaker}) == 1
        assert "by speaker" in note
        # No more is held out than asked for, unless even the smallest speakers have more.
        found, most = counts(split_of), max(round(held_out * len(utterances)), sorted(sizes)[1])
        assert 1 <= found["validation"] <= most
        assert 1 <= found["test"] <= most


def test_shares_are_of_utterances() -> None:
    split_of, _ = assign_splits(by_speakers(*[2] * 500), 0.1, seed=0)
    assert counts(split_of) == {"train": 800, "validation": 100, "test": 100}
    split_of, _ = assign_splits([said(f"{n}.wav") for n in range(1000)], 0.005, seed=0)
    assert counts(split_of) == {"train": 990, "validation": 5, "test": 5}


@pytest.mark.parametrize("speakers", [("ann", "bob"), ("ann", "bob", "cid", "")])
def test_too_few_speakers_split_by_utterance(speakers: tuple[str, ...]) -> None:
    utterances = [said(f"{n}.wav", speakers[n % len(speakers)]) for n in range(40)]
    split_of, note = assign_splits(utterances, 0.1, seed=0)
    assert counts(split_of) == {"train": 32, "validation": 4, "test": 4}
    assert "by utterance" in note


@pytest.mark.parametrize("number", [1, 2])
def test_too_few_utterances_are_all_for_training(number: int) -> None:
    split_of, note = assign_splits([said(f"{n}.wav") for n in range(number)], 0.1, seed=0)
    assert counts(split_of) == {"train": number}
    assert "training" in note
    assert assign_splits([], 0.1, seed=0)[0] == {}


def test_all_tasks_and_formats_of_a_sound_stay_together() -> None:
    utterances = [said(f"in/{n}.wav{task}") for n in range(30) for task in ("", "#2", "#3")]
    utterances += [said(f"in/{n}.flac") for n in range(30)]
    split_of, _ = assign_splits(utterances, 0.1, seed=3)
    for n in range(30):
        assert len({split_of[name] for name in (f"in/{n}.wav", f"in/{n}.wav#2", f"in/{n}.wav#3", f"in/{n}.flac")}) == 1
    assert set(split_of.values()) == {"train", "validation", "test"}


def test_the_seed_decides_and_a_new_file_moves_few() -> None:
    utterances = [said(f"{n}.wav") for n in range(400)]
    split_of, _ = assign_splits(utterances, 0.1, seed=0)
    assert assign_splits(utterances[::-1], 0.1, seed=0)[0] == split_of
    assert assign_splits(utterances, 0.1, seed=1)[0] != split_of
    more, _ = assign_splits([*utterances, said("new.wav")], 0.1, seed=0)
    assert sum(more[name] != split for name, split in split_of.items()) <= 2


def test_a_publishers_split_is_kept() -> None:
    utterances = [said(f"{n}.wav", split="test") for n in range(5)] + [said(f"more/{n}.wav") for n in range(30)]
    split_of, _ = assign_splits(utterances, 0.1, seed=0)
    assert {split_of[f"{n}.wav"] for n in range(5)} == {"test"}
    assert counts(split_of) == {"train": 24, "validation": 3, "test": 3 + 5}
    kept, _ = assign_splits([said("a", split="voices"), said("b", split="train")], 0.1, seed=0)
    assert kept == {"a": "voices", "b": "train"}


def test_texts_on_both_sides_are_counted() -> None:
    utterances = [said(f"{who}/{n}.wav", who, f"Number {n}.") for who in ("ann", "bob", "cid") for n in range(10)]
    assert "20 of the 20" in assign_splits(utterances, 0.1, seed=0)[1]
    apart = [said(f"{who}/{n}.wav", who) for who in ("ann", "bob", "cid") for n in range(10)]
    assert "held-out" not in assign_splits(apart, 0.1, seed=0)[1]
