"""Which utterances are trained on, where nobody has decided it yet."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

from rung.random import key_of
from rung.recipes.speech.sources import Utterance

FEWEST = 3  # groups, to have one in each split


def assign_splits(utterances: Sequence[Utterance], held_out: float, seed: int) -> tuple[dict[str, str], str]:
    """Name -> split, and a note on how it was done, in a sentence.

    A publisher's split is kept. The rest is dealt by speaker, or where these are not known or fewer than three by
    clip, in an order that only the seed and the name of a group decide; about `held_out` of the utterances are for
    validation, and again for test.
    """
    split_of = {one.name: one.split for one in utterances if one.split is not None}
    free = [one for one in utterances if one.split is None]
    if not free:
        return split_of, "every utterance came with its split"
    speakers = {one.speaker for one in free}
    by_speaker = len(speakers) >= FEWEST and "" not in speakers
    group_of = {one.name: one.speaker if by_speaker else _clip_of(one.name) for one in free}
    sizes = Counter(group_of.values())
    if len(sizes) < FEWEST:
        split_of |= dict.fromkeys(group_of, "train")
        number = f"{len(sizes)} sounds are" if len(sizes) > 1 else "one sound is"
        return split_of, f"all of it is for training: {number} too few to hold any out"

    target = max(1, round(held_out * len(free)))
    order = sorted(sizes, key=lambda group: (key_of(seed, "split", group), group))
    split_of_group = dict.fromkeys(order, "train")
    room = {"validation": target, "test": target}
    for split in room:  # one group each first, the smallest where none fits
        left = [group for group in order if split_of_group[group] == "train"]
        fitting = (group for group in left if sizes[group] <= target)
        first = next(fitting, min(left, key=lambda group: sizes[group]))
        split_of_group[first] = split
        room[split] -= sizes[first]
    for group in order:
        for split in room:
            if split_of_group[group] == "train" and sizes[group] <= room[split]:
                split_of_group[group] = split
                room[split] -= sizes[group]
    split_of |= {name: split_of_group[group] for name, group in group_of.items()}

    if by_speaker:
        dealt = Counter(split_of_group.values())
        note = f"split by speaker, {dealt['validation']} of {len(sizes)} for validation and {dealt['test']} for test"
    elif "" in speakers:
        note = "split by utterance, as the speakers are not all known, so that voices may be on both sides"
    else:
        note = f"split by utterance, as {len(speakers)} speakers are too few, so that voices are on both sides"
    trained = {_said(one) for one in free if split_of[one.name] == "train"}
    held = [one for one in free if split_of[one.name] != "train"]
    if num_same := sum(_said(one) in trained for one in held):
        note += f"; {num_same} of the {len(held)} held-out utterances have the text of one for training"
    return split_of, note


def _clip_of(name: str) -> str:
    """One for all tasks of a sound (a.wav, a.wav#2) and for all formats of it (a.wav, a.flac)."""
    return os.path.splitext(re.sub(r"#\d+$", "", name))[0]


def _said(utterance: Utterance) -> str:
    return " ".join(re.findall(r"[\w']+", utterance.text.casefold()))
