"""A model that remembers how often each token came after the two before it: what a network has to beat.

Interpolated Witten-Bell smoothing: after a context that came `total` times with `kinds` different ids behind it, an id
has count / (total + kinds), and the rest, kinds / (total + kinds), is spread as the order below would have it, down to
the same share for every id. So every id has a probability after every context, and they sum to 1.

As in the loss of the recipe, the first id of a record is given and never predicted, and <PAD> is no target. Records may
be of any length; the contexts of their first targets are filled up with <PAD>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rung.recipes.piano.tokenizer import CLS, PAD, VOCAB_SIZE

MOST_ORDER = 6  # numbers of six ids still fit 64 bits
Allowed = Callable[[np.ndarray], np.ndarray]  # all ids so far -> which of the 1241 may come next


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
        self.counts = [_count(context, targets) for context in contexts]

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

    def complete(
        self,
        prompt: np.ndarray,
        num_tokens: int,
        rng: np.random.Generator,
        allowed: Allowed | None = None,
        stop: int | None = None,
    ) -> np.ndarray:
        """The ids that follow the prompt: `num_tokens`, or up to and with `stop`, or until nothing is allowed."""
        ids = np.zeros(len(prompt) + num_tokens, dtype=np.uint16)
        ids[: len(prompt)] = prompt
        for length in range(len(prompt), len(ids)):
            chance = self.next_probabilities(ids[max(0, length - self.order + 1) : length])
            chance[[PAD, CLS]] = 0.0
            if allowed is not None:
                chance = chance * allowed(ids[:length])
            if chance.sum() == 0:
                return ids[len(prompt) : length]
            ids[length] = rng.choice(VOCAB_SIZE, p=chance / chance.sum())
            if ids[length] == stop:
                return ids[len(prompt) : length + 1]
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


def _count(contexts: np.ndarray, targets: np.ndarray) -> Counts:
    grams, seen = np.unique(contexts * VOCAB_SIZE + targets, return_counts=True)
    known, first = np.unique(grams // VOCAB_SIZE, return_index=True)
    kinds = np.diff(first, append=len(grams))
    whole = np.add.reduceat(seen, first) + kinds if len(seen) else kinds  # reduceat wants one number at least
    return Counts(grams, seen / np.repeat(whole, kinds), known, kinds / whole)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float) -> np.ndarray:
    if len(keys) == 0:
        return np.full(len(wanted), missing)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], missing)
