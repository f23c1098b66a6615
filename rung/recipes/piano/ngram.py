"""A model that remembers how often each token came after the two before it: what a network has to beat.

It is smoothed by Witten and Bell's rule: a context leaves the more to the order below, the more different ids followed
it. As in the loss of the recipe, the first id of a record is given and never predicted, and <PAD> is no target. The
contexts of a record's first targets are filled up with <PAD>.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rung.recipes.piano.tokenizer import CLS, PAD, VOCAB_SIZE

MOST_ORDER = 6  # numbers of six ids still fit 64 bits


class Counts(NamedTuple):
    """Of one order: n-grams and contexts packed into numbers, both ascending."""

    grams: np.ndarray
    shares: np.ndarray  # what each n-gram has of its context
    contexts: np.ndarray
    left: np.ndarray  # what each context leaves to the order below


class NGram:
    def __init__(self, records: Iterable[np.ndarray], order: int = 3) -> None:
        if not 1 <= order <= MOST_ORDER:
            raise ValueError(f"order {order} is not in 1..{MOST_ORDER}")
        self.order = order
        contexts, targets = self._targets(records)
        self.counts = []
        for context in contexts:
            grams, seen = np.unique(context * VOCAB_SIZE + targets, return_counts=True)
            known, first = np.unique(grams // VOCAB_SIZE, return_index=True)
            kinds = np.diff(first, append=len(grams))
            whole = np.add.reduceat(seen, first) + kinds if len(seen) else kinds  # reduceat wants one number at least
            self.counts.append(Counts(grams, seen / np.repeat(whole, kinds), known, kinds / whole))

    def nats(self, records: Iterable[np.ndarray]) -> tuple[float, int]:
        """The summed surprise at the targets of these records, and how many there are."""
        contexts, targets = self._targets(records)
        chance = np.full(len(targets), 1.0 / VOCAB_SIZE)
        for counts, context in zip(self.counts, contexts):
            chance *= _look_up(counts.contexts, counts.left, context, missing=1.0)
            chance += _look_up(counts.grams, counts.shares, context * VOCAB_SIZE + targets, missing=0.0)
        return float(-np.log(chance).sum()), len(targets)

    def next_probabilities(self, context: Sequence[int] | np.ndarray) -> np.ndarray:
        """Of all ids after these; only the last `order - 1` matter, and there may be fewer."""
        known = [int(i) for i in np.asarray(context).ravel()[max(0, len(context) - self.order + 1) :]]
        known = [PAD] * (self.order - 1 - len(known)) + known
        chance, packed = np.full(VOCAB_SIZE, 1.0 / VOCAB_SIZE), 0
        for length, counts in enumerate(self.counts):
            packed += known[-length] * VOCAB_SIZE ** (length - 1) if length else 0
            first, end = np.searchsorted(counts.grams, [packed * VOCAB_SIZE, (packed + 1) * VOCAB_SIZE])
            if first < end:
                chance *= counts.left[np.searchsorted(counts.contexts, packed)]
                chance[counts.grams[first:end] - packed * VOCAB_SIZE] += counts.shares[first:end]
        return chance

    def complete(self, prompt: np.ndarray, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """The `num_tokens` ids that follow the prompt."""
        ids = np.zeros(len(prompt) + num_tokens, dtype=np.uint16)
        ids[: len(prompt)] = prompt
        for length in range(len(prompt), len(ids)):
            chance = self.next_probabilities(ids[max(0, length - self.order + 1) : length])
            chance[[PAD, CLS]] = 0.0
            ids[length] = rng.choice(VOCAB_SIZE, p=chance / chance.sum())
        return ids[len(prompt) :]

    def _targets(self, records: Iterable[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """The targets of all records, and for each order what comes before them, packed into one number."""
        gap = np.full(self.order - 1, PAD, dtype=np.int64)  # between records, so that none is the context of another
        pieces, starts, length = [gap], [], len(gap)
        for record in filter(len, records):
            pieces += [np.asarray(record).astype(np.int64), gap]
            starts.append(length)
            length += len(record) + len(gap)
        ids = np.concatenate(pieces)
        if len(ids) and not 0 <= ids.min() <= ids.max() < VOCAB_SIZE:
            raise ValueError(f"ids run from {ids.min()} to {ids.max()}; the vocabulary has 0..{VOCAB_SIZE - 1}")
        is_target = ids != PAD
        is_target[np.array(starts, dtype=np.int64)] = False
        places = np.flatnonzero(is_target)
        contexts = [np.zeros(len(places), dtype=np.int64)]
        for back in range(1, self.order):
            contexts.append(contexts[-1] + ids[places - back] * VOCAB_SIZE ** (back - 1))
        return contexts, ids[places]


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float) -> np.ndarray:
    if len(keys) == 0:
        return np.full(len(wanted), missing)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], missing)
