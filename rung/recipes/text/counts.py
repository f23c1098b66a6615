"""How much there is of what in a text store, and how that is told."""

from __future__ import annotations

from typing import Any

import numpy as np

from rung import units
from rung.recipes.text.sources import SPLITS
from rung.recipes.text.splits import Entry
from rung.text import one_line

MOST_CATEGORIES = 16  # that a summary names
LEFT_OUT = {
    "empty": "were empty",
    "short": "were shorter than dataset.min_tokens",
    "copies_in_train": "of train are also held out, so taken out of train",
    "copies_in_validation": "of validation are also in test, so taken out of validation",
    "over_limit": "were over dataset.max_examples_per_split",
}


class Counts:
    """Documents, tokens and characters by split and category, and how often each id occurs."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._histogram: dict[str, np.ndarray] = {}
        self._by_split: dict[str, dict[str, dict[str, int]]] = {split: {} for split in SPLITS}

    def add(self, entry: Entry, ids: np.ndarray) -> None:
        count = self._by_split[entry.split].setdefault(entry.category, {"documents": 0, "tokens": 0, "characters": 0})
        count["documents"] += 1
        count["tokens"] += len(ids)
        count["characters"] += entry.num_characters
        if entry.split not in self._histogram:
            self._histogram[entry.split] = np.zeros(self._vocab_size, dtype=np.int64)
        np.add.at(self._histogram[entry.split], ids, 1)

    def documents(self, split: str) -> int:
        return sum(count["documents"] for count in self._by_split[split].values())

    @property
    def categories(self) -> list[str]:
        return sorted({category for found in self._by_split.values() for category in found})

    @property
    def by_split(self) -> dict[str, dict[str, dict[str, int]]]:
        return {split: dict(sorted(found.items())) for split, found in self._by_split.items() if found}

    @property
    def unigram_nats(self) -> dict[str, float]:
        """Entropy of the ids of each split: what the best model that ignores all context would lose."""
        return {split: entropy_nats(self._histogram[split]) for split in self.by_split}


def entropy_nats(histogram: np.ndarray) -> float:
    shares = histogram[histogram > 0] / max(int(histogram.sum()), 1)
    return float(-(shares * np.log(shares)).sum())


def summary(info: dict[str, Any]) -> str:
    counts, tokenizer = info["counts"], info["tokenizer"]
    total = _total(count for found in counts.values() for count in found.values())
    num_categories = len(info["categories"])
    lines = [
        f"{_documents(total)} in {num_categories} {'category' if num_categories == 1 else 'categories'}, "
        f"{_tokens(total)}; {tokenizer['vocab_size']} kinds of tokens ({tokenizer['kind']})"
    ]
    for split in SPLITS:
        if split in counts:
            part, nats = _total(counts[split].values()), info["unigram_nats"][split]
            lines.append(f"  {split:<10}  {_documents(part)}, {_tokens(part)}, unigram entropy {nats:.3f} nats")
        else:
            lines.append(f"  {split:<10}  empty")
    lines += _categories(info)
    asked = info["settings"]["vocab_size"]
    if tokenizer["kind"] == "bpe" and tokenizer["vocab_size"] < asked:
        lines.append(
            f"the text gives {tokenizer['vocab_size']} kinds of tokens, not {asked}: there is nothing to merge"
        )
    lines += [one_line(note) for note in info["notes"]]
    return "\n".join([*lines, *_left_out(info)])


def _categories(info: dict[str, Any]) -> list[str]:
    """Documents of each category in the splits that there are."""
    counts, names = info["counts"], info["categories"]
    told = [
        f"{one_line(name)} {'/'.join(str(found.get(name, {}).get('documents', 0)) for found in counts.values())}"
        for name in names[:MOST_CATEGORIES]
    ]
    more = f", and {len(names) - MOST_CATEGORIES} more" if len(names) > MOST_CATEGORIES else ""
    lines = [f"  documents of {'/'.join(counts)}: {', '.join(told)}{more}"] if len(names) > 1 else []
    if absent := [name for name in names if name not in counts["train"]]:
        lines.append(f"not in train, only held out: {', '.join(map(one_line, absent[:MOST_CATEGORIES]))}")
    return lines


def _left_out(info: dict[str, Any]) -> list[str]:
    dropped, bad = info["dropped"], info["quarantined"]
    lines = []
    if bad:
        named = "; ".join(f"{one_line(item['file'])} {one_line(item['reason'])}" for item in bad[:3])
        lines.append(f"quarantined {len(bad)} ({named}{'; ..' if len(bad) > 3 else ''})")
    told = ", ".join(f"{dropped[key]} {what}" for key, what in LEFT_OUT.items() if dropped[key])
    lines.append(f"of {dropped['read']} documents read, {told}" if told else "every document read is kept")
    if dropped["repeats_kept"]:
        lines.append(f"{dropped['repeats_kept']} documents repeat another one of their split; they are kept")
    if dropped["tags_removed"]:
        lines.append(f"{dropped['tags_removed']} names of arXiv categories were taken out of the text")
    return lines


def _total(counts: Any) -> dict[str, int]:
    total = {"documents": 0, "tokens": 0, "characters": 0}
    for count in counts:
        for key in total:
            total[key] += count[key]
    return total


def _documents(count: dict[str, int]) -> str:
    return f"{count['documents']} document{'' if count['documents'] == 1 else 's'}"


def _tokens(count: dict[str, int]) -> str:
    ratio = count["characters"] / max(count["tokens"], 1)
    return f"{units.count(count['tokens'])} tokens, {ratio:.2f} characters each"
