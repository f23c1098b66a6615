"""If this fails, what a network is measured against is not a fair rival."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.data.store import Store
from rung.recipes.piano.data import prepare
from rung.recipes.piano.ngram import NGram
from rung.recipes.piano.notes import make
from rung.recipes.piano.tokenizer import CLS, NOTE_ON, PAD, TOKENIZER, VOCAB_SIZE
from tests.conftest import shared_data

FEW_IDS = st.one_of(st.sampled_from([2, 3, 4]), st.integers(2, VOCAB_SIZE - 1))
RECORD = st.lists(FEW_IDS, max_size=30).map(lambda ids: np.array([CLS, *ids], dtype=np.uint16))
RECORDS = st.lists(RECORD, max_size=4)
ORDERS = st.integers(1, 4)


def slow_chance(records: list[np.ndarray], context: list[int], target: int, order: int) -> float:
    """Witten-Bell as it is written on paper, one count at a time."""
    if order == 0:
        return 1 / VOCAB_SIZE
    after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for record in records:
        padded = [PAD] * (order - 1) + record.tolist()
        for place in range(order, len(padded)):
            after[tuple(padded[place - order + 1 : place])][padded[place]] += 1
    seen = after[tuple(([PAD] * order + context)[len(context) + 1 :])]
    below = slow_chance(records, context, target, order - 1)
    whole = seen.total() + len(seen)
    return (seen[target] + len(seen) * below) / whole if whole else below


@given(RECORDS, RECORD, ORDERS)
def test_probabilities_are_those_of_the_formula(records: list[np.ndarray], held: np.ndarray, order: int) -> None:
    model = NGram(records, order)
    chances = [slow_chance(records, held[:i].tolist(), int(held[i]), order) for i in range(1, len(held))]
    nats, count = model.nats([held])
    assert count == len(held) - 1
    assert nats == pytest.approx(-np.log(chances).sum())


@given(RECORDS, st.lists(FEW_IDS, max_size=4), ORDERS)
def test_probabilities_sum_to_one_and_none_is_nothing(
    records: list[np.ndarray], context: list[int], order: int
) -> None:
    chance = NGram(records, order).next_probabilities(context)
    assert chance.shape == (VOCAB_SIZE,)
    assert chance.sum() == pytest.approx(1)
    assert chance.min() > 0


@given(RECORDS, RECORDS, ORDERS)
def test_nats_are_those_of_the_next_probabilities(fitted: list[np.ndarray], held: list[np.ndarray], order: int) -> None:
    """All records at once as each alone, whatever lies beside it."""
    model = NGram(fitted, order)
    each = [np.log(model.next_probabilities(r[:i])[r[i]]) for r in held for i in range(1, len(r))]
    nats, count = model.nats(held)
    assert (nats, count) == (pytest.approx(-sum(each)), len(each))


def test_the_first_id_and_padding_are_never_predicted() -> None:
    row = np.array([CLS, 5, 6, PAD, PAD], dtype=np.uint16)
    for model in (NGram([row]), NGram([row[:3]])):
        assert model.nats([row]) == model.nats([row[:3]])
        assert model.nats([row])[1] == 2
        assert model.next_probabilities([PAD, CLS]).argmax() == 5
    assert NGram([row[:1], row[:0]]).nats([row[:1], row[:0]]) == (0, 0)


def test_what_is_learned_by_heart_costs_little_and_more_context_less() -> None:
    cycle = np.array([CLS, *[5, 6, 5, 7] * 500], dtype=np.uint16)  # after 5 comes 6 or 7: the id before it tells
    cost = [nats / count for nats, count in (NGram([cycle], order).nats([cycle]) for order in (1, 2, 3))]
    assert cost == pytest.approx([1.04, 0.35, 0], abs=0.05)


def test_ids_that_no_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match="1241"):
        NGram([np.array([CLS, VOCAB_SIZE])])
    with pytest.raises(ValueError, match="order"):
        NGram([], order=0)


# Completion


def test_ids_are_drawn_as_often_as_they_are_likely() -> None:
    model = NGram([np.array([CLS, 5, 5, 6, 5, 7, 5, 5, 6], dtype=np.uint16)])
    rng = np.random.default_rng(0)
    drawn = Counter(int(model.complete(np.array([CLS, 5]), 1, rng)[0]) for _ in range(3000))
    chance = model.next_probabilities([CLS, 5])
    for id in (5, 6, 7):
        assert drawn[id] / 3000 == pytest.approx(chance[id], abs=0.03)
    assert drawn[CLS] == drawn[PAD] == 0


def test_a_completion_has_its_length_and_one_seed_gives_one() -> None:
    record = np.array([CLS, *[5, 6, 5, 7] * 50], dtype=np.uint16)
    model = NGram([record], order=2)
    one, two, other = (model.complete(record[:3], 40, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one.dtype == np.uint16
    assert len(one) == 40
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    assert len(model.complete(record[:3], 0, np.random.default_rng(0))) == 0


def test_padding_and_the_beginning_are_never_drawn() -> None:
    made = NGram([]).complete(np.array([CLS]), 20_000, np.random.default_rng(0))  # all others are equally likely
    assert set(made.tolist()) == set(range(VOCAB_SIZE)) - {PAD, CLS}


def test_a_tune_is_continued_with_notes() -> None:
    tune = make(np.arange(200) * 0.25, np.arange(200) * 0.25 + 0.2, [60, 64, 67, 72] * 50, 66)
    record = np.concatenate([[CLS], TOKENIZER.encode(tune)])
    made = NGram([record]).complete(record[:50], 200, np.random.default_rng(0))
    assert {60, 64, 67, 72} == set(TOKENIZER.decode(made)["pitch"].tolist())
    assert NOTE_ON + 60 - 21 in made


# Real performances


def test_context_pays_on_human_performances(tmp_path: Path) -> None:
    """On the validation split 3.885, 3.041 and 2.981 nats a token were seen with 0, 1 and 2 tokens of context."""
    prepare(shared_data("piano_asap"), tmp_path / "asap", pause_detection_threshold=4.0, seed=0)
    store = Store.open(tmp_path / "asap")
    ids = store.arrays["tokens"]
    splits = {
        name: [ids[store.starts[n] : store.starts[n] + store.lengths[n]] for n in store.split(name)]
        for name in ("train", "validation")
    }
    cost = [nats / count for nats, count in (NGram(splits["train"], n).nats(splits["validation"]) for n in (1, 2, 3))]
    assert store.info["unigram_nats"]["validation"] < cost[0]  # the best without context, fitted to the split itself
    assert cost == pytest.approx([3.885, 3.041, 2.981], abs=0.1)
    assert cost[0] > cost[1] + 0.5
    assert cost[1] > cost[2] + 0.02
