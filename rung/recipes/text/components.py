"""Which documents a run trains and evaluates on: components, labels, limits.

A component is a category of the store. `choose` picks K of them so that, for one seed, a smaller choice is part of a
larger one. A `Pool` holds the documents of a split that belong to the chosen ones, end to end; stream.py cuts rows from
it. A limit on unique tokens is shared equally by the components and kept exactly, by shortening the last documents, so
that runs with few and with many components read equally much.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rung.data.order import permute
from rung.data.store import Store
from rung.errors import ConfigError, DataError
from rung.random import key_of
from rung.text import one_line


def choose(names: Sequence[str], num_components: int, seed: int) -> list[str]:
    """K of the names: sorted, shuffled by the seed, the first K, sorted."""
    if num_components > len(names):
        problem = f"dataset.num_components={num_components}, but there are {len(names)} categories to train on"
        raise ConfigError(f"{problem}; set it to {len(names)} or less, or 0 for all", code="too-few")
    shuffled = sorted(names)
    random.Random(seed).shuffle(shuffled)
    return sorted(shuffled[: num_components or len(shuffled)])


def check_names(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"; did you mean {one_line(near[0])}?" if near else ""
            known = ", ".join(one_line(name) for name in sorted(names)[:20])
            problem = f"dataset.components names {one_line(name)}, but the data has no such category{hint}"
            raise ConfigError(f"{problem} (it has {known})", code="no-category")
    return sorted(wanted)


def labels_of(store: Store, split: str, shuffle_seed: int | None = None) -> list[str]:
    """The category of each record of a split; with a seed, those of other records of the split."""
    records = store.split(split)
    labels = [str(store.index[record]["category"]) for record in records.tolist()]
    if shuffle_seed is None:
        return labels
    places = permute(np.arange(len(labels)), len(labels), key_of(shuffle_seed, "labels", split))
    return [labels[place] for place in places.tolist()]


@dataclass(frozen=True)
class Pool:
    """Documents by component, each component's in the order of the store.

    A place is a number of tokens since the beginning of the first document. `firsts` has one number more than there are
    documents, `bounds` one more than there are components.
    """

    store: Store
    split: str
    names: tuple[str, ...]
    records: np.ndarray
    component: np.ndarray  # of each document, a number in names
    starts: np.ndarray  # in the array of the store
    lengths: np.ndarray

    @cached_property
    def firsts(self) -> np.ndarray:
        """The place of each document."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def bounds(self) -> np.ndarray:
        """The number of the first document of each component."""
        return np.searchsorted(self.component, np.arange(len(self.names) + 1))

    @cached_property
    def tokens_of(self) -> np.ndarray:
        return np.diff(self.firsts[self.bounds])

    @cached_property
    def digest(self) -> str:
        """Changes with the documents, how much of them is used, and what they are called."""
        made = hashlib.blake2b("\0".join(self.names).encode("utf-8", "surrogatepass"), digest_size=8)
        for part in (self.records, self.component, self.lengths):
            made.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return made.hexdigest()

    def document_at(self, places: np.ndarray) -> np.ndarray:
        return self.firsts.searchsorted(places, side="right") - 1

    def keep(self, is_kept: np.ndarray, lengths: np.ndarray | None = None) -> Pool:
        """The same with fewer documents, or shorter ones."""
        lengths = self.lengths if lengths is None else lengths
        kept = (part[is_kept] for part in (self.records, self.component, self.starts, lengths))
        return Pool(self.store, self.split, self.names, *kept)


def pool_of(store: Store, split: str, names: Sequence[str], shuffle_seed: int | None = None) -> Pool:
    """All documents of a split in these components."""
    number_of = {name: number for number, name in enumerate(names)}
    records = store.split(split)
    component = np.array([number_of.get(label, -1) for label in labels_of(store, split, shuffle_seed)], dtype=np.int64)
    order = np.argsort(component, kind="stable")
    order = order[component[order] >= 0]
    chosen = records[order]
    return Pool(store, split, tuple(names), chosen, component[order], store.starts[chosen], store.lengths[chosen])


def limit(pool: Pool, num_tokens: int, least: int, seed: int) -> Pool:
    """Documents of `num_tokens` tokens in all, equally many of each component, each of `least` tokens or more.

    Which ones, the seed and their ids decide, so that a smaller limit takes a part of what a larger one takes. Where
    documents have nothing to spare, a component may stay less than `least` tokens below its share.
    """
    num_components = len(pool.names)
    shares = [num_tokens // num_components + (n < num_tokens % num_components) for n in range(num_components)]
    asked = f"dataset.max_unique_tokens={num_tokens} asks for {max(shares)} tokens of each component"
    for name, has, share in zip(pool.names, pool.tokens_of, shares):
        if has < share:
            most = int(pool.tokens_of.min()) * num_components
            limitation = f"{one_line(name)} has only {has}; set it to {most} or less"
            raise DataError(f"{asked}, but {limitation}", code="too-few")
    if min(shares) < least:
        limitation = f"a single row takes {least}; set it to {least * num_components} or more"
        raise DataError(f"{asked}, but {limitation}", code="too-few")
    lengths = np.zeros_like(pool.lengths)
    for n, share in enumerate(shares):
        documents = np.arange(pool.bounds[n], pool.bounds[n + 1])
        keys = [key_of(seed, "unique", pool.store.index[record]["id"]) for record in pool.records[documents].tolist()]
        documents = documents[np.argsort(np.array(keys, dtype=np.int64), kind="stable")]
        # The first documents that have `share` tokens together, the last of them shortened, none below `least`.
        num_taken = int(np.cumsum(pool.lengths[documents]).searchsorted(share)) + 1
        documents = documents[:num_taken]
        taken = pool.lengths[documents]
        surplus = int(taken.sum()) - share
        spare = np.maximum(taken - least, 0)[::-1]
        if spare.sum() < surplus:
            taken[-1] = 0
        else:
            taken -= np.clip(surplus - (np.cumsum(spare) - spare), 0, spare)[::-1]
        lengths[documents] = taken
    return pool.keep(lengths > 0, lengths)
