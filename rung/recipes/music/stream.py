"""Rows of a store of codes: stretches of pieces, laid out by a delay pattern, with their texts.

A piece is tiled by stretches of `num_frames`; the last one is filled up and knows that the piece ends there. In
training a row may begin anywhere in its piece instead, so that each epoch has other rows, which reach its beginning and
its end as tiles do; an eval always has the tiles.

Shapes: B rows, T frames, C channels, S steps, L bytes of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rung.data.store import Store
from rung.errors import DataError
from rung.random import Draw, scramble
from rung.recipe import Arrays, Stream
from rung.recipes.music.delay import DelayPattern


@dataclass(frozen=True)
class TextRules:
    """What becomes of a text; all but the limit concern training alone."""

    length: int  # bytes; what is longer is cut
    unconditional: float = 0.0  # share of rows without any
    shuffle: bool = False  # of its comma-separated parts
    dropout: float = 0.0
    limit: int = 0


class Clips(Stream):
    """Rows {"codes": (B, S + 1, C) uint16, "text": (B, L) uint8, "text_length": (B,) int32}."""

    def __init__(
        self, store: Store, split: str, pattern: DelayPattern, channels: Sequence[int], text: TextRules,
        *, random_crop: bool = False,
    ) -> None:  # fmt: skip
        records = store.split(split) if split in store.splits else np.zeros(0, np.int64)
        if not len(records):
            raise DataError(f"split {split!r} of {store.path} is empty; name other data", code="data-empty")
        self.stores = [store]
        self._store, self._records, self._pattern = store, records, pattern
        self._channels, self._text, self._random_crop = np.asarray(channels), text, random_crop
        self._codes = store.arrays["codes"]
        tiles = -(-store.lengths[records] // pattern.num_frames)
        self._first_row = np.concatenate(([0], np.cumsum(tiles)))
        self.num_rows = int(tiles.sum())
        # Frames that the rows of each piece hold in an epoch; of random ones on average, see _places.
        lengths, size = store.lengths[records].astype(np.float64), pattern.num_frames
        if random_crop:
            early = size // 2
            held = (early + 1) * size + size * (size - 1) / 2 + size * (lengths - size)
            lengths = np.where(lengths > size, tiles * held / (lengths + early), lengths)
        self.targets_per_row = float(lengths.sum()) * len(channels) / self.num_rows
        self.fingerprint = (
            f"{store.fingerprint}/{split}/clips-{pattern.num_frames}-{pattern.num_steps}"
            f"/channels-{'.'.join(map(str, channels))}/delays-{'.'.join(map(str, pattern.delays_C))}/{text}"
            f"{'/anywhere-and-ends' if random_crop else ''}"
        )
        self.about = {"source": store.info.get("source"), "split": split, "codec": store.info["codec"]["hash"]}

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        num_frames = self._pattern.num_frames
        record, offset = self._places(ids, draw)
        length = np.minimum(self._store.lengths[record] - offset, num_frames)
        codes = np.zeros((len(ids), num_frames, len(self._channels)), np.uint16)
        for i, start in enumerate((self._store.starts[record] + offset).tolist()):
            codes[i, : length[i]] = self._codes[start : start + length[i]][:, self._channels]
        ends = offset + length == self._store.lengths[record]
        text = np.zeros((len(ids), self._text.length), np.uint8)
        text_length = np.zeros(len(ids), np.int32)
        is_without = draw.uniform("unconditional")[:, 0] < self._text.unconditional
        for i, own in enumerate(self._texts(record, draw)):
            if not is_without[i]:
                whole = encode_text(own, self._text.length)
                text[i, : len(whole)], text_length[i] = whole, len(whole)
        return {"codes": self._pattern.lay_out(codes, length, ends), "text": text, "text_length": text_length}

    def _places(self, ids: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """The record of each row, and the frame in it where the row begins.

        A random row of a longer piece begins at any frame with the same chance, and at the first with that of half a
        row: then each frame is seen equally often, from half to one and a half times as often within the first row, and
        a piece ends in about one row of an epoch, as with tiles. The tiles share the places out: one draw in each.
        """
        which = self._first_row.searchsorted(ids, side="right") - 1
        record, tile, size = self._records[which], ids - self._first_row[which], self._pattern.num_frames
        if not self._random_crop or draw.is_eval:
            return record, tile * size
        lengths, early = self._store.lengths[record], size // 2
        num_tiles = self._first_row[which + 1] - self._first_row[which]
        place = (tile + draw.uniform("crop")[:, 0]) / num_tiles * (lengths + early)
        offset = np.clip(place.astype(np.int64) - early, 0, lengths - 1)
        return record, np.where(lengths > size, offset, 0)

    def _texts(self, record: np.ndarray, draw: Draw) -> list[str]:
        rules = self._text
        texts = [str(self._store.index[number].get("text") or "") for number in record.tolist()]
        if not (rules.shuffle or rules.dropout or rules.limit):
            return texts
        keys = scramble(draw.rows.astype(np.uint64) + np.uint64(draw.key("tags"))).tolist()
        for i, (own, key) in enumerate(zip(texts, keys)):
            tags, chance = [tag.strip() for tag in own.split(",")], np.random.default_rng(key)
            if not draw.is_eval:
                if rules.shuffle:
                    tags = [tags[k] for k in chance.permutation(len(tags))]
                tags = [tag for tag, kept in zip(tags, chance.random(len(tags)) >= rules.dropout) if kept]
            texts[i] = ", ".join(tags[: rules.limit or None])
        return texts

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        which = self._first_row.searchsorted(ids, side="right") - 1
        pieces = [str(self._store.index[number]["piece"]) for number in self._records.tolist()]
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        return np.array([numbers[piece] for piece in pieces])[which]

    def places(self, ids: np.ndarray) -> list[dict[str, Any]]:
        rate = self._store.info["codec"]["sample_rate"] / self._store.info["codec"]["hop"]
        record, offset = self._places(ids, Draw(0, -1, ids))
        return [
            {"row": int(row), "source": self._store.index[number].get("source"), "second": round(float(at) / rate, 2)}
            for row, number, at in zip(ids, record.tolist(), offset.tolist())
        ]


def encode_text(text: str, length: int) -> np.ndarray:
    """Its UTF-8 bytes, cut between two characters."""
    whole = text.encode("utf-8", "replace")[:length]
    return np.frombuffer(whole.decode("utf-8", "ignore").encode(), np.uint8)
