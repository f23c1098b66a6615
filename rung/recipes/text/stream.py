"""Rows of text: L + 1 tokens, of which L are predicted, and the component they come from.

Three ways to cut them from a pool of documents. `RandomWindows` is for training: a component, a document and a start,
drawn for each position of the stream. `FixedWindows` is for evals: the same windows of a component for every K, seed
and way of training. `Tiles` evaluates everything: each token but the first of a document is predicted once. A tile that
is longer than the rest of its document is padded with vocab_size, an id no tokenizer has, which the loss ignores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from rung.errors import DataError
from rung.random import Draw, key_of, scramble
from rung.recipe import Arrays, Stream
from rung.recipes.text.components import Pool, limit
from rung.text import one_line

AT_ONCE = 4096  # rows that are drawn, or gathered for a pass over a whole set, together; no result depends on it


class TokenRows(Stream):
    """Rows {"tokens": (rows, L + 1) as stored}, and the "component" of each where there is more than one.

    A row begins at a place of the pool.
    """

    about: dict[str, Any]

    def __init__(self, pool: Pool, context: int, is_packed: bool = False) -> None:
        self.pool, self.context, self.is_packed = pool, context, is_packed
        self.stores, self.groups = [pool.store], pool.names
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
            # Rows that reach past their document: the documents after it as far as they may, then padding.
            wanted = places[crosses, None] + np.arange(self.context + 1)
            ends = self._ends[document[crosses], None]
            index = wanted + self._shift[self.pool.document_at(np.minimum(wanted, ends - 1))]
            found = self._tokens[np.minimum(index, len(self._tokens) - 1)]
            is_text = wanted < ends
            if not is_text.all():
                if self._pad > np.iinfo(rows.dtype).max:
                    rows, found = rows.astype(np.uint32), found.astype(np.uint32)
                found = np.where(is_text, found, self._pad)
            rows[crosses] = found
        if len(self.groups) == 1:
            return {"tokens": rows}
        return {"tokens": rows, "component": self.pool.component[document]}

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
        return entropy_nats(counts[: self._pad])


class RandomWindows(TokenRows):
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
            where = "all its documents together" if is_packed else "one document"
            other = "" if is_packed else ", set data.windows=packed"
            problem = f"component {name!r} of {pool.store.path} has no {context + 1} tokens in {where} to train on"
            remedy = f"lower data.context_size={context}{other}, or choose other components"
            raise DataError(f"{problem}; {remedy}", code="too-few")
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


class FixedWindows(TokenRows):
    """As many windows of each component, chosen by what the data is and by nothing that a run can set but L.

    A document uniformly, then a start: what training with component_uniform sees on average.
    """

    def __init__(self, pool: Pool, context: int, per_component: int) -> None:
        super().__init__(pool, context)
        begin = [np.zeros(0, np.int64)]
        for name, first, stop in zip(pool.names, pool.bounds, pool.bounds[1:]):
            if first == stop:
                continue
            drawn = (key_of(pool.store.fingerprint, pool.split, name, n) for n in range(per_component))
            chance = uniform(np.fromiter(drawn, np.int64, per_component), 2, 0)
            document = first + (chance[:, 0] * (stop - first)).astype(np.int64)
            offset = (chance[:, 1] * (pool.lengths[document] - context)).astype(np.int64)
            begin.append(pool.firsts[document] + offset)
        self._begin = np.concatenate(begin)
        self.num_rows = len(self._begin)
        self.fingerprint = f"{pool.store.fingerprint}/{pool.split}/fixed-{per_component}-{context}/{pool.digest}"

    def begin(self, ids: np.ndarray) -> np.ndarray:
        return self._begin[ids]


class Tiles(TokenRows):
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


def training_rows(
    pool: Pool, context: int, sampling: str, is_packed: bool, max_unique_tokens: int = 0, seed: int = 0
) -> RandomWindows:
    """The train stream of a pool, or of `max_unique_tokens` of it (0 = all) that the seed chooses.

    `about` lists what it left out.
    """
    is_long = (pool.lengths > context) | is_packed
    kept = pool.keep(is_long)
    if max_unique_tokens:
        kept = limit(kept, max_unique_tokens, least=1 if is_packed else context + 1, seed=seed)
    rows = RandomWindows(kept, context, sampling, is_packed)
    rows.about = {
        **_about(kept),
        "short_documents": int((~is_long).sum()),
        "sampling": sampling,
        "windows": "packed" if is_packed else "within_documents",
    }
    return rows


def eval_rows(pool: Pool, context: int, per_component: int) -> TokenRows:
    """The eval set of a pool: `per_component` fixed windows of each component, or 0 for all tokens."""
    is_long = pool.lengths > context
    rows = FixedWindows(pool.keep(is_long), context, per_component) if per_component else Tiles(pool, context)
    if not rows.num_rows:
        least = context + 1 if per_component else 2
        lower = f"lower data.context_size={context}, set data.eval_windows=0, or " if per_component else ""
        names = ", ".join([*map(one_line, pool.names[:5]), *([".."] if len(pool.names) > 5 else [])])
        problem = f"split {pool.split!r} of {pool.store.path} has no document of {least} tokens or more in {names}"
        raise DataError(f"{problem}; {lower}choose other components", code="too-few")
    rows.baselines = {"unigram": rows.unigram_nats()}
    rows.about = _about(rows.pool)
    if per_component:
        rows.about["short_documents"] = int((~is_long).sum())
    without = [one_line(name) for name, count in zip(pool.names, np.diff(rows.pool.bounds)) if not count]
    if without:
        rows.about["components_without_text"] = without
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


def entropy_nats(histogram: np.ndarray) -> float:
    """What the best model that ignores all context would lose on ids that occur so often."""
    shares = histogram[histogram > 0] / max(int(histogram.sum()), 1)
    return float(-(shares * np.log(shares)).sum())


def uniform(places: np.ndarray, num_values: int, key: int) -> np.ndarray:
    """(places, num_values) float64 in [0, 1), as a function of each place and the key."""
    base = np.uint64(key)
    counter = places.astype(np.uint64)[:, None] * np.uint64(num_values) + np.arange(num_values, dtype=np.uint64)
    return (scramble(scramble(counter + base) ^ base) >> np.uint64(11)).astype(np.float64) * 2.0**-53
