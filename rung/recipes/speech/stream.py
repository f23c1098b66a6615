"""Rows of a store of speech: the sound of an utterance or its features, the prompt around it, and the answer.

Rows of like length are put together for training, in an order that only the seed and the position decide; a batch is
padded to its own longest row. Nothing that a row is padded with counts or is seen by what counts.

Shapes: B rows, T frames, F width of the features, N samples, L tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rung.data.order import shuffled
from rung.data.store import Store
from rung.data.tokenizer import Tokenizer
from rung.errors import ConfigError, DataError
from rung.random import Draw, key_of
from rung.recipe import Arrays, Stream
from rung.recipes.speech.config import SPEECH

BLOCK = 8  # rows of like length that stay together
FRAMES_AT_ONCE, TOKENS_AT_ONCE = 16, 8  # lengths are rounded up to these, so that batches come in fewer shapes

Heard = Literal["own", "shuffled", "silent"]
Row = tuple[Store, dict[str, Any]]  # where an utterance lies, and its record


@dataclass
class Prompts:
    """Texts around the speech, by task, as ids: what comes before it, and what comes after."""

    texts: Mapping[str, Sequence[str]]
    template: str
    tokenizer: Tokenizer
    _ids: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def ids(self, task: str, number: int, question: str = "") -> tuple[np.ndarray, np.ndarray]:
        whole = self.template.replace("{}", self.texts[task][number])
        if "{}" in whole:
            return self._encode(whole.replace("{}", question.replace(SPEECH, "")))  # the sound stays where it is
        if whole not in self._ids:
            self._ids[whole] = self._encode(whole)
        return self._ids[whole]

    def _encode(self, whole: str) -> tuple[np.ndarray, np.ndarray]:
        before, _, after = whole.partition(SPEECH)
        first, last = self.tokenizer.encode_batch([before, after])
        if not len(last):
            problem = f"the prompt {whole!r} ends with {SPEECH}"
            raise ConfigError(f"{problem}; put some text after it, in template or prompts", code="bad-value")
        return np.concatenate([np.asarray(self.tokenizer.start, last.dtype), first]), last


class Utterances(Stream):
    """Rows {features (B, T, F) float16 and frames (B,), or sound (B, N) int16 and samples (B,); before and after (B, L)
    with their lengths; tokens (B, L): the last of the prompt, the answer, its end; answer_length, task, is_own}."""

    def __init__(
        self, stores: Sequence[Store], split: str, prompts: Prompts, tasks: Sequence[str], *, text_length: int,
        is_cached: bool, bucket: int = 1, heard: Heard = "own",
    ) -> None:  # fmt: skip
        tokenizer = prompts.tokenizer
        assert tokenizer.end is not None, "checked where the tokenizer is opened"
        self._prompts, self._heard, self._bucket = prompts, heard, bucket
        self.taken_away = ("features", "sound") if heard == "silent" else ()
        self._is_cached, self._tasks, self.stores = is_cached, list(tasks), list(stores)
        self._rows = [
            (store, store.index[number]) for store in stores if split in store.splits for number in store.split(split)
        ]
        if not self._rows:
            raise DataError(f"split {split!r} of {stores[0].path} is empty; name other data", code="data-empty")
        ends = np.array([tokenizer.end])
        self._answers = [
            np.concatenate([ids[:text_length], ends])[:text_length].astype(np.int32)
            for ids in tokenizer.encode_batch([str(record["text"]) for _, record in self._rows])
        ]
        self._task = np.array([self._tasks.index(record["task"]) for _, record in self._rows])
        self.lengths = np.array([record["num_frames"] for _, record in self._rows])
        self.num_rows = len(self._rows)
        self.targets_per_row = float(np.mean([len(answer) for answer in self._answers]))
        said = json.dumps([dict(prompts.texts), prompts.template, text_length], sort_keys=True)
        rules = hashlib.sha256(f"{said}/{tokenizer.hash}/{self._tasks}".encode()).hexdigest()[:8]
        data = " + ".join(store.fingerprint for store in stores)
        self.fingerprint = f"{data}/{split}/utterances-{rules}/{'features' if is_cached else 'sound'}"
        self.fingerprint += f"/{heard}" if heard != "own" else ""
        self.fingerprint += f"/bucket-{bucket}" if bucket > 1 else ""
        encoders = [encoder["hash"] for encoder in stores[0].info["encoders"]]
        self.about = {"source": stores[0].info.get("source"), "split": split, "encoders": encoders}
        if len(tasks) > 1:
            self.groups = self._tasks

    def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
        """Each row once per epoch. Within `bucket` rows of the shuffled epoch, blocks of rows of like length."""
        if self._bucket == 1:
            return super().ids(position, num_rows, seed)
        found: list[np.ndarray] = []
        at, end = position, position + num_rows
        while at < end:
            epoch, offset = divmod(at, self.num_rows)
            first = offset - offset % self._bucket
            rows = self._pool(epoch, first, seed)[offset - first :][: end - at]
            found.append(rows)
            at += len(rows)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _pool(self, epoch: int, first: int, seed: int) -> np.ndarray:
        size = min(self._bucket, self.num_rows - first)
        rows = shuffled(epoch * self.num_rows + first, size, self.num_rows, seed)
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        blocks = [rows[start : start + BLOCK] for start in range(0, size, BLOCK)]
        order = np.random.default_rng(key_of(seed, "bucket", epoch, first)).permutation(len(blocks))
        return np.concatenate([blocks[number] for number in order])

    def padding(self, batch_size: int, seed: int, num_batches: int = 50) -> float:
        """Share of the frames of a training batch that is padding, over the first batches."""
        shares = []
        for number in range(min(num_batches, -(-self.num_rows // batch_size))):
            lengths = self.lengths[self.ids(number * batch_size, batch_size, seed)]
            shares.append(1 - lengths.mean() / (-(-lengths.max() // FRAMES_AT_ONCE) * FRAMES_AT_ONCE))
        return float(np.mean(shares))

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        numbers = ids.tolist()
        heard = [self._rows[number] for number in numbers]
        if self._heard == "shuffled":  # half a set further on: nobody hears himself, and an eval is always the same
            heard = [self._rows[(number + max(1, self.num_rows // 2)) % self.num_rows] for number in numbers]
        batch = _features(heard) if self._is_cached else _sounds(heard)
        if self._heard == "silent":
            batch["features" if self._is_cached else "sound"][:] = 0
        options = np.array([len(self._prompts.texts[self._tasks[task]]) for task in self._task[ids].tolist()])
        choice = np.zeros(len(ids), np.int64) if draw.is_eval else draw.integers("prompt", options)
        pairs = [
            self._prompts.ids(record["task"], option, record.get("question", ""))
            for (_, record), option in zip((self._rows[number] for number in numbers), choice.tolist())
        ]
        batch["before"], batch["before_length"] = pad_ids([before for before, _ in pairs], 1)
        batch["after"], batch["after_length"] = pad_ids([after[:-1] for _, after in pairs], 1)
        answers = [self._answers[number] for number in numbers]
        tokens = [np.concatenate([after[-1:], own]) for (_, after), own in zip(pairs, answers)]
        batch["tokens"], _ = pad_ids(tokens, TOKENS_AT_ONCE, more=1)
        batch["answer_length"] = np.array([len(own) for own in answers], np.int32)
        batch["task"] = self._task[ids].astype(np.uint8)
        batch["is_own"] = np.full(len(ids), self._heard == "own", np.uint8)
        return batch

    def group_of(self, ids: np.ndarray) -> np.ndarray:
        return self._task[ids] if self.groups else super().group_of(ids)

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        speakers = [record.get("speaker") or number for number, (_, record) in enumerate(self._rows)]
        numbers = {speaker: number for number, speaker in enumerate(dict.fromkeys(speakers))}
        return np.array([numbers[speaker] for speaker in speakers])[ids]

    def places(self, ids: np.ndarray) -> list[dict[str, Any]]:
        records = [self._rows[number][1] for number in ids.tolist()]
        return [
            {"row": int(row), "source": record["source"], "speaker": record.get("speaker", "")}
            for row, record in zip(ids, records)
        ]


def _features(rows: Sequence[Row]) -> Arrays:
    lengths = np.array([record["num_frames"] for _, record in rows], np.int32)
    found = [store.arrays["features"][record["frame"] :][: record["num_frames"]] for store, record in rows]
    return {"features": pad_rows(found), "frames": lengths}


def _sounds(rows: Sequence[Row]) -> Arrays:
    lengths = np.array([record["length"] for _, record in rows], np.int32)
    sounds = np.zeros((len(rows), int(lengths.max(initial=1))), np.int16)
    for number, (store, record) in enumerate(rows):
        sounds[number, : record["length"]] = store.arrays["sound"][record["start"] : record["start"] + record["length"]]
    return {"sound": sounds, "samples": lengths}


def pad_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Features of several utterances as one array, filled up with 0."""
    longest = -(-max(len(row) for row in rows) // FRAMES_AT_ONCE) * FRAMES_AT_ONCE
    whole = np.zeros((len(rows), longest, rows[0].shape[1]), np.float16)
    for number, row in enumerate(rows):
        whole[number, : len(row)] = row
    return whole


def pad_ids(rows: Sequence[np.ndarray], multiple: int, more: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one array, filled up with 0 to a multiple (and `more`), and their lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = -(-max(0, int(lengths.max(initial=0)) - more) // multiple) * multiple + more
    whole = np.zeros((len(rows), longest), np.int32)
    for number, row in enumerate(rows):
        whole[number, : len(row)] = row
    return whole, lengths
