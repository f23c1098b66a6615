"""Rows of text: L + 1 tokens, of which L are predicted, and the component they come from.

Three ways to cut them out of a pool of documents. `RandomWindows` trains: a component, a document, a start, each drawn
for a position of the stream. `FixedWindows` measures: the same windows of a component for every K, every seed and every
way of training. `Tiles` measures on everything: each token but the first of a document is predicted once.

The one surprising thing is the padding of a tile that is longer than what is left of its document: it is the number
after the last id, which no vocabulary has, so that the loss can tell it from text whatever the tokenizer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rung.errors import DataError
from rung.recipe import Arrays, Draw, Stream, key_of, scramble
from rung.recipes.text.components import Pool, limit
from rung.text import one_line


class Unique(NamedTuple):
    """How many tokens of text to train on, and what chooses them; 0 = all."""

    num_tokens: int = 0
    seed: int = 0


AT_ONCE = (
    4096  # rows that a pass over a whole set gathers together, or that are drawn together; no result depends on it
)


class Rows(Stream):
    """Rows {"tokens": (rows, L + 1) as stored}, and the "component" of each where there is more than one.

    A row begins at a place of the pool.
    """

    def __init__(self, pool: Pool, context: int, is_packed: bool = False) -> None:
        self.pool, self.context, self.is_packed = pool, context, is_packed
        self.groups = pool.names
        self.targets_per_row = float(context)
        tokens = pool.store.arrays["tokens"]
        self._pad = int(pool.store.info["vocab_size"])
        if len(tokens) < context + 1:  # too small a file to slide over
            tokens = np.concatenate((tokens, np.zeros(context + 1 - len(tokens), tokens.dtype)))
        self._tokens = tokens
        self._view = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)
        self._shift = pool.starts - pool.firsts[:-1]  # from a place in the pool to one in the store
        self._ends = pool.firsts[1:]  # of what a row that begins in a document may hold
        if is_packed:
            self._ends = pool.firsts[pool.bounds[pool.component + 1]]

    def begin(self, ids: np.ndarray) -> np.ndarray:
        """The place in the pool where each row begins."""
        raise NotImplementedError

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        places = self.begin(ids)
        document = self.pool.document_at(places)
        rows = self._view[np.minimum(places + self._shift[document], len(self._view) - 1)]
        crosses = np.flatnonzero(places + self.context >= self.pool.firsts[document + 1])
        if len(crosses):
            rows = self._across(rows, crosses, places[crosses], self._ends[document[crosses]])
        if len(self.groups) == 1:
            return {"tokens": rows}
        return {"tokens": rows, "component": self.pool.component[document]}

    def _across(self, rows: np.ndarray, which: np.ndarray, places: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Fills rows that reach past their document: with the documents after it as far as they may, then with pad."""
        wanted = places[:, None] + np.arange(self.context + 1)
        document = self.pool.document_at(np.minimum(wanted, ends[:, None] - 1))
        index = wanted + self._shift[document]
        is_text = wanted < ends[:, None]
        found = self._tokens[np.minimum(index, len(self._tokens) - 1)]
        if is_text.all():
            rows[which] = found
            return rows
        if self._pad > np.iinfo(rows.dtype).max:
            rows, found = rows.astype(np.uint32), found.astype(np.uint32)
        rows[which] = np.where(is_text, found, self._pad)
        return rows

    def group_of(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.component[self.pool.document_at(self.begin(ids))]

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.records[self.pool.document_at(self.begin(ids))]

    def places(self, ids: np.ndarray) -> list[dict[str, Any]]:
        begin = self.begin(ids)
        documents = self.pool.document_at(begin)
        offsets = begin - self.pool.firsts[documents]
        return [
            {
                "document": str(self.pool.store.index[self.pool.records[document]]["id"]),
                "component": self.pool.names[self.pool.component[document]],
                "offset": offset,
            }
            for document, offset in zip(documents.tolist(), offsets.tolist())
        ]

    def unigram_nats(self) -> float:
        """Nats per token of the best model that ignores all context, fitted to the targets of this very set."""
        counts = np.zeros(self._pad + 1, dtype=np.int64)
        for first in range(0, self.num_rows, AT_ONCE):
            rows = np.arange(first, min(first + AT_ONCE, self.num_rows))
            targets = self.gather(rows, Draw(0, -1, rows))["tokens"][:, 1:]
            counts += np.bincount(targets.ravel(), minlength=len(counts))
        shares = counts[: self._pad][counts[: self._pad] > 0] / counts[: self._pad].sum()
        return float(-(shares * np.log(shares)).sum())


class RandomWindows(Rows):
    """Windows at random places, drawn anew for each position; an epoch is as many rows as hold all the text once.

    Rows below `num_rows` are those, side by side, for whoever wants to see all that is trained on; rows from there on
    begin at any place of the pool, and are what training draws.
    """

    def __init__(self, pool: Pool, context: int, sampling: str, is_packed: bool) -> None:
        super().__init__(pool, context, is_packed)
        self.sampling = sampling
        num_starts = np.minimum(self._ends - context - pool.firsts[:-1], pool.lengths)
        self._documents = np.flatnonzero(num_starts > 0)
        self._num_starts = num_starts[self._documents]
        self._bounds = np.searchsorted(pool.component[self._documents], np.arange(len(pool.names) + 1))
        self._windows = np.concatenate(([0], np.cumsum(self._num_starts)))
        empty = np.flatnonzero(np.diff(self._bounds) == 0)
        if len(empty) or not pool.names:
            name = one_line(pool.names[empty[0]]) if len(empty) else ""
            what = "of all its documents together" if is_packed else "in one document"
            other = "" if is_packed else ", set data.windows=packed"
            raise DataError(
                f"component {name!r} has no {context + 1} tokens {what} to train on in {pool.store.path}; "
                f"lower data.context_size={context}{other}, or choose other components"
            )
        self._side_by_side = pool.firsts[pool.bounds] if is_packed else pool.firsts
        self._first_row = np.concatenate(([0], np.cumsum(-(-(np.diff(self._side_by_side) - 1) // context))))
        self.num_rows = int(self._first_row[-1])
        self._block = lru_cache(maxsize=8)(self._draw)
        how = f"{'packed' if is_packed else 'within'}-{sampling}-{context}"
        self.fingerprint = f"{pool.store.fingerprint}/{pool.split}/{how}/{pool.digest}"

    def begin(self, ids: np.ndarray) -> np.ndarray:
        if len(ids) and ids.min() >= self.num_rows:  # as all that training draws
            return ids - self.num_rows
        part = self._first_row[:-1].searchsorted(ids, side="right") - 1
        place = self._side_by_side[part] + (ids - self._first_row[part]) * self.context
        last = self._side_by_side[part + 1] - self.context - 1  # the last row of a part ends where the part does
        return np.where(ids < self.num_rows, np.minimum(place, last), ids - self.num_rows)

    def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
        first, last = position // AT_ONCE, (position + max(num_rows, 1) - 1) // AT_ONCE
        drawn = [self._block(number, seed) for number in range(first, last + 1)]
        rows = drawn[0] if first == last else np.concatenate(drawn)
        return rows[position - first * AT_ONCE :][:num_rows]

    def _draw(self, block: int, seed: int) -> np.ndarray:
        """The rows at AT_ONCE positions: for 32 alone it took twice as long as gathering them, mostly overhead."""
        chance = uniform(np.arange(block * AT_ONCE, (block + 1) * AT_ONCE), 3, key_of(seed, "windows")).T
        if self.sampling == "token_uniform":
            window = (chance[0] * self._windows[-1]).astype(np.int64)
            number = self._windows.searchsorted(window, side="right") - 1
            offset = window - self._windows[number]
        else:
            first, stop = np.int64(0), np.int64(len(self._documents))
            if self.sampling == "component_uniform":
                component = (chance[0] * len(self.groups)).astype(np.int64)
                first, stop = self._bounds[component], self._bounds[component + 1]
            number = first + (chance[1] * (stop - first)).astype(np.int64)
            offset = (chance[2] * self._num_starts[number]).astype(np.int64)
        rows = self.num_rows + self.pool.firsts[self._documents[number]] + offset
        rows.flags.writeable = False
        return rows


class FixedWindows(Rows):
    """As many windows of each component, chosen by what the data is and by nothing that a run can set but L.

    A document uniformly, then a start: what training with component_uniform sees on average.
    """

    def __init__(self, pool: Pool, context: int, per_component: int) -> None:
        super().__init__(pool, context)
        self._begin = np.concatenate(
            [self._of_component(number, per_component) for number in range(len(pool.names))] or [np.zeros(0, np.int64)]
        )
        self.num_rows = len(self._begin)
        self.fingerprint = f"{pool.store.fingerprint}/{pool.split}/fixed-{per_component}-{context}/{pool.digest}"

    def _of_component(self, number: int, num_windows: int) -> np.ndarray:
        pool = self.pool
        first, count = pool.bounds[number], pool.bounds[number + 1] - pool.bounds[number]
        if not count:
            return np.zeros(0, np.int64)
        drawn = (key_of(pool.store.fingerprint, pool.split, pool.names[number], n) for n in range(num_windows))
        chance = uniform(np.fromiter(drawn, np.int64, num_windows), 2, 0)
        document = first + (chance[:, 0] * count).astype(np.int64)
        return pool.firsts[document] + (chance[:, 1] * (pool.lengths[document] - self.context)).astype(np.int64)

    def begin(self, ids: np.ndarray) -> np.ndarray:
        return self._begin[ids]


class Tiles(Rows):
    """Windows side by side over every document, short ones too: each token but a document's first is a target once."""

    def __init__(self, pool: Pool, context: int) -> None:
        super().__init__(pool, context)
        predictions = np.maximum(pool.lengths - 1, 0)
        tiles = -(-predictions // context)
        self._first_row = np.concatenate(([0], np.cumsum(tiles)))
        self.num_rows = int(tiles.sum())
        if self.num_rows:
            self.targets_per_row = float(predictions.sum()) / self.num_rows
        self.fingerprint = f"{pool.store.fingerprint}/{pool.split}/tiles-{context}/{pool.digest}"

    def begin(self, ids: np.ndarray) -> np.ndarray:
        document = self._first_row.searchsorted(ids, side="right") - 1
        return self.pool.firsts[document] + (ids - self._first_row[document]) * self.context


def training_rows(pool: Pool, context: int, sampling: str, is_packed: bool, unique: Unique) -> RandomWindows:
    """The train stream of a pool, which says in `about` what it left out."""
    is_long = (pool.lengths > context) | is_packed
    kept = pool.keep(is_long)
    if unique.num_tokens:
        kept = limit(kept, unique.num_tokens, least=1 if is_packed else context + 1, seed=unique.seed)
    rows = RandomWindows(kept, context, sampling, is_packed)
    rows.about = {
        **_about(kept),
        "short_documents": int((~is_long).sum()),
        "sampling": sampling,
        "windows": "packed" if is_packed else "within_documents",
    }
    return rows


def eval_rows(pool: Pool, context: int, per_component: int) -> Rows:
    """The eval set of a pool: `per_component` fixed windows of each component, or 0 for all tokens."""
    rows: Rows
    if per_component:
        is_long = pool.lengths > context
        rows = FixedWindows(pool.keep(is_long), context, per_component)
        left_out: Mapping[str, Any] = {"short_documents": int((~is_long).sum())}
    else:
        rows, left_out = Tiles(pool, context), {}
    if not rows.num_rows:
        least = context + 1 if per_component else 2
        lower = f"lower data.context_size={context}, set data.eval_windows=0, or " if per_component else ""
        raise DataError(
            f"split {pool.split!r} of {pool.store.path} has no document of {least} tokens or more in "
            f"{_listed(pool.names)}; {lower}choose other components"
        )
    without = [one_line(name) for name, count in zip(pool.names, np.diff(rows.pool.bounds)) if not count]
    rows.baselines = {"unigram": rows.unigram_nats()}
    rows.about = {**_about(rows.pool), **left_out, **({"components_without_text": without} if without else {})}
    return rows


def _about(pool: Pool) -> dict[str, Any]:
    return {
        "source": pool.store.info.get("source"),
        "split": pool.split,
        "tokenizer": pool.store.info["tokenizer"]["hash"],
        "components": list(pool.names),
        "documents": len(pool.records),
        "tokens": int(pool.lengths.sum()),
    }


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:5])
    return f"{shown}, .." if len(names) > 5 else shown


def uniform(places: np.ndarray, num_values: int, key: int) -> np.ndarray:
    """(places, num_values) float64 in [0, 1), as a function of each place and the key."""
    base = np.uint64(key)
    counter = places.astype(np.uint64)[:, None] * np.uint64(num_values) + np.arange(num_values, dtype=np.uint64)
    return (scramble(scramble(counter + base) ^ base) >> np.uint64(11)).astype(np.float64) * 2.0**-53
