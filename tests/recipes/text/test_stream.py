"""If this fails, training or evaluating on text reads other tokens than the config says: across documents, beyond a
component, with the wrong shares, or not the same for everybody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.store import Store
from rung.random import Draw
from rung.recipes.text.components import Pool, limit, pool_of
from rung.recipes.text.stream import (
    AT_ONCE,
    FixedWindows,
    RandomWindows,
    Tiles,
    TokenRows,
    eval_rows,
    training_rows,
)
from tests.errors import raises_code
from tests.recipes.text.stores import Document, write_store

CONTEXT = 10
# Documents of each category of the train split. One has exactly a row, one is a token too short, one has two starts.
LENGTHS = {"a": (40, 11, 10, 25), "b": (12, 90), "c": (30,)}
CHI_SQUARE = {2: 13.8, 5: 20.5, 29: 58.3}  # 99.9 % of chance lies below, by degrees of freedom


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Every token of the store is its own number, so that a row shows where it was cut; categories alternate."""
    documents, first = [], 0
    longest = max(map(len, LENGTHS.values()))
    for split in ("train", "validation"):
        for turn in range(longest):
            for category, lengths in LENGTHS.items():
                if turn < len(lengths):
                    documents.append(Document(split, category, np.arange(first, first + lengths[turn])))
                    first += lengths[turn]
    return Store.open(write_store(tmp_path_factory.mktemp("data") / "numbers", documents, vocab_size=first), "text")


def rows_of(stream: TokenRows, ids: np.ndarray) -> dict[str, np.ndarray]:
    return stream.gather(ids, Draw(0, 0, np.arange(len(ids))))


def drawn(stream: RandomWindows, num_rows: int = 20_000, seed: int = 0) -> np.ndarray:
    return stream.ids(0, num_rows, seed)


def train(store: Store, sampling: str = "component_uniform", is_packed: bool = False, names: str = "abc") -> TokenRows:
    return training_rows(pool_of(store, "train", list(names)), CONTEXT, sampling, is_packed)


def document_of(store: Store, token: int) -> int:
    return int(store.starts.searchsorted(token, side="right") - 1)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("sampling", ["component_uniform", "paper_uniform", "token_uniform"])
def test_a_row_lies_in_one_document_of_a_chosen_component(store: Store, sampling: str) -> None:
    stream = train(store, sampling, names="ac")
    rows = rows_of(stream, drawn(stream, 4000))
    tokens = rows["tokens"].astype(int)
    assert tokens.shape == (4000, CONTEXT + 1)
    assert (np.diff(tokens, axis=1) == 1).all()
    for row, component in zip(tokens[:500], rows["component"][:500], strict=True):
        record = document_of(store, row[0])
        assert document_of(store, row[-1]) == record
        assert store.index[record]["category"] == "ac"[component]
        assert store.index[record]["split"] == "train"
    assert stream.about["short_documents"] == 1


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        ("component_uniform", [1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6, 1 / 3]),  # a third each, then equal documents
        ("paper_uniform", [1 / 6] * 6),
        ("token_uniform", np.array([30, 1, 15, 2, 80, 20]) / 148),  # by the number of windows
    ],
)
def test_documents_have_the_shares_of_the_declared_mode(store: Store, sampling: str, shares: list[float]) -> None:
    stream = train(store, sampling)
    ids = drawn(stream, 30_000)
    records = stream.pool.records[stream.pool.document_at(stream.begin(ids))]
    observed = np.array([(records == record).sum() for record in stream.pool.records])
    assert chi_square(observed, np.array(shares) * len(ids)) < CHI_SQUARE[5]


def test_starts_are_uniform_and_the_last_one_is_among_them(store: Store) -> None:
    stream = train(store)
    first = rows_of(stream, drawn(stream, 60_000))["tokens"][:, 0].astype(int)
    document = next(r for r in range(len(store.index)) if store.lengths[r] == 40)
    start = int(store.starts[document])
    counts = np.array([(first == start + offset).sum() for offset in range(31)])
    assert counts[30] == 0, "a start beyond the last"
    assert counts[:30].min() > 0
    assert chi_square(counts[:30], np.full(30, counts.sum() / 30)) < CHI_SQUARE[29]
    only = next(r for r in range(len(store.index)) if store.lengths[r] == CONTEXT + 1)
    assert (first == store.starts[only]).sum() > 1000, "a document of exactly L + 1 tokens is usable"


@given(st.integers(0, 10_000), st.integers(1, 50), st.integers(0, 2**31), st.booleans(), st.sampled_from([0, 1, 2]))
@settings(max_examples=60)
def test_the_order_is_a_function_of_seed_and_position(
    store: Store, position: int, num_rows: int, seed: int, is_packed: bool, mode: int
) -> None:
    stream = train(store, ("component_uniform", "paper_uniform", "token_uniform")[mode], is_packed)
    ids = stream.ids(position, num_rows, seed)
    cut = num_rows // 2
    again = np.concatenate([stream.ids(position, cut, seed), stream.ids(position + cut, num_rows - cut, seed)])
    assert np.array_equal(ids, again)
    tokens = rows_of(stream, ids)["tokens"]
    assert tokens.shape == (num_rows, CONTEXT + 1)
    assert tokens.max() < store.info["vocab_size"]


@pytest.mark.parametrize("sampling", ["component_uniform", "paper_uniform", "token_uniform"])
def test_rows_that_are_drawn_together_are_those_drawn_alone(
    store: Store, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = train(store, sampling).ids(0, 2 * AT_ONCE + 9, 5)
    assert np.array_equal(train(store, sampling).ids(AT_ONCE - 3, AT_ONCE + 9, 5), together[AT_ONCE - 3 : -3])
    monkeypatch.setattr("rung.recipes.text.stream.AT_ONCE", 1)
    assert np.array_equal(train(store, sampling).ids(AT_ONCE - 20, 40, 5), together[AT_ONCE - 20 : AT_ONCE + 20])


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_rows_of_an_epoch_hold_every_token(store: Store, is_packed: bool) -> None:
    """Or a look at all of train, for what is also held out, misses some of it."""
    stream = train(store, is_packed=is_packed)
    rows = rows_of(stream, np.arange(stream.num_rows))
    used = [
        np.arange(start, start + length) for start, length in zip(stream.pool.starts, stream.pool.lengths, strict=True)
    ]
    assert np.array_equal(np.unique(rows["tokens"]), np.sort(np.concatenate(used)))
    assert len(np.unique(rows["tokens"], axis=0)) == stream.num_rows


def test_seeds_differ(store: Store) -> None:
    stream = train(store)
    assert not np.array_equal(drawn(stream, 100, 0), drawn(stream, 100, 1))


def test_packed_rows_run_on_into_the_next_document_of_the_component(store: Store) -> None:
    stream = train(store, is_packed=True)
    ids = drawn(stream, 20_000)
    rows = rows_of(stream, ids)
    for number, name in enumerate(stream.groups):
        records = [r for r in store.split("train").tolist() if store.index[r]["category"] == name]
        whole = np.concatenate(
            [np.arange(store.starts[r], store.starts[r] + store.lengths[r]) for r in records]
        )  # what this component is, laid end to end
        mine = rows["tokens"][rows["component"] == number].astype(int)
        possible = {tuple(whole[i : i + CONTEXT + 1]) for i in range(len(whole) - CONTEXT)}
        found = set(map(tuple, mine))
        assert found == possible, "every place of the component, and none beyond its end"


def test_fixed_windows_do_not_depend_on_k_or_training(store: Store) -> None:
    few = eval_rows(pool_of(store, "validation", ["b"]), CONTEXT, 64)
    many = eval_rows(pool_of(store, "validation", ["a", "b", "c"]), CONTEXT, 64)
    assert (few.num_rows, many.num_rows) == (64, 192)
    rows = np.arange(192)
    of_b = rows[many.group_of(rows) == 1]
    assert np.array_equal(rows_of(few, np.arange(64))["tokens"], rows_of(many, of_b)["tokens"])
    assert few.places(np.arange(64)) == many.places(of_b)
    assert few.fingerprint != many.fingerprint
    fewer = eval_rows(pool_of(store, "validation", ["b"]), CONTEXT, 16)
    assert np.array_equal(rows_of(fewer, np.arange(16))["tokens"], rows_of(few, np.arange(16))["tokens"])


def test_fixed_windows_are_spread_over_documents(store: Store) -> None:
    stream = eval_rows(pool_of(store, "validation", ["a"]), CONTEXT, 3000)
    records = stream.pool.records[stream.pool.document_at(stream.begin(np.arange(3000)))]
    observed = np.array([(records == record).sum() for record in stream.pool.records])
    assert len(observed) == 3
    assert chi_square(observed, np.full(3, 1000.0)) < CHI_SQUARE[2]
    assert stream.about["short_documents"] == 1


def test_tiles_predict_each_token_but_the_first_once(store: Store) -> None:
    stream = eval_rows(pool_of(store, "validation", ["a", "b", "c"]), CONTEXT, 0)
    pad = store.info["vocab_size"]
    tokens = rows_of(stream, np.arange(stream.num_rows))["tokens"].astype(int)
    targets = tokens[:, 1:][tokens[:, 1:] != pad]
    wanted = np.concatenate(
        [np.arange(store.starts[r] + 1, store.starts[r] + store.lengths[r]) for r in store.split("validation")]
    )
    assert sorted(targets.tolist()) == wanted.tolist()
    assert stream.targets_per_row * stream.num_rows == pytest.approx(len(wanted))
    real = tokens[:, :-1] != pad
    assert (real[:, :-1] >= real[:, 1:]).all(), "padding comes last"
    step = np.diff(tokens, axis=1)[tokens[:, 1:] != pad]
    assert (step == 1).all()


def test_a_vocabulary_that_fills_its_type_can_be_padded(tmp_path: Path) -> None:
    documents = [Document(split, "x", np.array([65535, 1, 65534])) for split in ("train", "validation")]
    made = Store.open(write_store(tmp_path / "full", documents, vocab_size=65536), "text")
    tokens = rows_of(Tiles(pool_of(made, "validation", ["x"]), 5), np.arange(1))["tokens"]
    assert tokens.tolist() == [[65535, 1, 65534, 65536, 65536, 65536]]


def test_places_name_the_document_and_the_offset(store: Store) -> None:
    stream = eval_rows(pool_of(store, "validation", ["a", "b", "c"]), CONTEXT, 32)
    rows = np.arange(stream.num_rows)
    tokens, places = rows_of(stream, rows)["tokens"].astype(int), stream.places(rows)
    for row, place in zip(tokens, places, strict=True):
        record = document_of(store, row[0])
        assert place == {
            "document": store.index[record]["id"],
            "component": store.index[record]["category"],
            "offset": row[0] - store.starts[record],
        }


def test_the_unigram_baseline_is_that_of_the_targets(store: Store) -> None:
    stream = eval_rows(pool_of(store, "validation", ["a", "c"]), CONTEXT, 0)
    num_targets = sum(int(n) - 1 for n in stream.pool.lengths)  # each token occurs once
    assert stream.baselines["unigram"] == pytest.approx(np.log(num_targets))


def test_shuffled_labels_keep_counts_and_move_documents(store: Store) -> None:
    true, shuffled = pool_of(store, "train", list("abc")), pool_of(store, "train", list("abc"), shuffle_seed=5)
    assert np.array_equal(np.bincount(true.component), np.bincount(shuffled.component))
    assert sorted(true.records) == sorted(shuffled.records)
    assert true.digest != shuffled.digest
    assert pool_of(store, "train", list("abc"), shuffle_seed=5).digest == shuffled.digest


@given(
    lengths=st.lists(st.lists(st.integers(CONTEXT + 1, 200), min_size=1, max_size=8), min_size=1, max_size=5),
    data=st.data(),
    seed=st.integers(0, 100),
)
@settings(max_examples=150)
def test_a_limit_on_unique_tokens_is_kept(
    store: Store, lengths: list[list[int]], data: st.DataObject, seed: int
) -> None:
    flat = np.array([n for some in lengths for n in some], dtype=np.int64)
    component = np.repeat(np.arange(len(lengths)), [len(some) for some in lengths])
    records = np.arange(len(flat)) % len(store.index)
    pool = Pool(store, "train", tuple(map(str, range(len(lengths)))), records, component, np.zeros_like(flat), flat)
    most = int(pool.tokens_of.min()) * len(lengths)
    wanted = data.draw(st.integers((CONTEXT + 1) * len(lengths), most))
    found = limit(pool, wanted, CONTEXT + 1, seed)
    assert (found.lengths > CONTEXT).all()
    shares = np.bincount(found.component, found.lengths, minlength=len(lengths))
    assert shares.max() <= -(-wanted // len(lengths))
    assert shares.min() > wanted // len(lengths) - (CONTEXT + 1)
    if flat.min() >= 2 * (CONTEXT + 1):
        assert found.lengths.sum() == wanted
    assert limit(pool, wanted, 1, seed).lengths.sum() == wanted


def test_too_little_text_is_an_error_that_says_what_to_do(store: Store) -> None:
    pool = pool_of(store, "train", list("abc"))
    with raises_code("too-few") as caught:
        training_rows(pool, 35, "component_uniform", False)
    assert "data.windows=packed" in str(caught.value)
    with raises_code("too-few") as caught:
        training_rows(pool, CONTEXT, "component_uniform", False, 200)
    assert "90 or less" in str(caught.value)
    with raises_code("too-few") as caught:
        training_rows(pool, CONTEXT, "component_uniform", False, 20)
    assert "33" in str(caught.value)
    with raises_code("too-few") as caught:
        eval_rows(pool, 1000, 4)
    assert "data.context_size" in str(caught.value)
    with raises_code("too-few") as caught:
        training_rows(pool, 35, "token_uniform", True)
    assert "'c'" in str(caught.value)


def test_a_component_without_held_out_text_is_named(store: Store) -> None:
    found = eval_rows(pool_of(store, "validation", list("abc")), 35, 8)
    assert found.about["components_without_text"] == ["c"]
    assert found.num_rows == 16
    assert isinstance(found, FixedWindows)


@pytest.mark.parametrize("per_component", [0, 8])
def test_words_of_the_fingerprint(store: Store, per_component: int) -> None:
    """Whatever changes rows changes it."""
    made = {
        eval_rows(pool_of(store, split, names), context, per_component).fingerprint
        for split in ("train", "validation")
        for names in (["a"], ["a", "b"])
        for context in (8, 9)
    }
    assert len(made) == 8
