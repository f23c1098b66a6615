"""If this fails, prepared text leaks between its splits, loses documents silently or differs from run to run."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.store import Store
from rung.data.tokenizer import Tokenizer
from rung.errors import DataError
from rung.recipes.text import data as text_data
from rung.recipes.text.data import Settings, prepare
from rung.recipes.text.splits import DocumentInfo, assign_splits, limited, without_leaks
from tests.conftest import shared_data
from tests.errors import raises_code

BYTES = Settings(tokenizer="bytes")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def words(number: int, num_words: int = 30) -> str:
    """A text that no other number has."""
    draw = random.Random(number)
    return f"{number} " + " ".join(draw.choices(WORDS, k=num_words))


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def published(folder: Path, **splits: list[str]) -> Path:
    for split, texts in splits.items():
        jsonl(folder / f"{split}.jsonl", [{"text": t, "label": "ab"[n % 2]} for n, t in enumerate(texts)])
    return folder


def made(source: Path | None, out: Path, how: Settings = BYTES, **given: Any) -> Store:
    prepare(source, out, how, **given)
    left = [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]
    assert not left, "parts and half-written stores are gone"
    store = Store.open(out, kind="text")
    assert store.verify() == []
    return store


def text_of(store: Store, number: int) -> str:
    record = store.index[number]
    tokenizer = Tokenizer.of_store(store)
    ids = store.arrays["tokens"][record["start"] : record["start"] + record["length"]]
    if tokenizer.end is not None:
        assert ids[-1] == tokenizer.end
        assert tokenizer.end not in ids[:-1]
    return tokenizer.decode(ids)


# What comes out


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_every_document_comes_back(kind: str, tmp_path: Path) -> None:
    rows = [{"text": words(n), "label": "ab"[n % 2]} for n in range(40)]
    store = made(jsonl(tmp_path / "in/rows.jsonl", rows), tmp_path / "out", Settings(tokenizer=kind, vocab_size=300))
    assert [text_of(store, number) for number in range(len(store.index))] == [row["text"] for row in rows]
    assert [record["category"] for record in store.index] == [row["label"] for row in rows]
    assert [record["source"] for record in store.index] == [f"rows.jsonl:{n + 1}" for n in range(40)]
    assert store.info["categories"] == ["a", "b"]
    assert store.info["vocab_size"] == store.info["tokenizer"]["vocab_size"] == Tokenizer.of_store(store).vocab_size
    assert store.arrays["tokens"].dtype == np.uint16


def test_the_manifest_counts_what_the_index_holds(tmp_path: Path) -> None:
    rows = [{"text": words(n, 5 + n % 7), "label": "abc"[n % 3]} for n in range(60)]
    store = made(jsonl(tmp_path / "in/rows.jsonl", rows), tmp_path / "out")
    for split in store.splits:
        counted: dict[str, dict[str, int]] = {}
        ids = []
        for number in store.split(split):
            record = store.index[number]
            count = counted.setdefault(record["category"], {"documents": 0, "tokens": 0, "characters": 0})
            count["documents"] += 1
            count["tokens"] += record["length"]
            count["characters"] += record["length"] - 1
            ids += store.arrays["tokens"][record["start"] : record["start"] + record["length"]].tolist()
        assert store.info["counts"][split] == counted
        shares = np.array(list(Counter(ids).values())) / len(ids)
        assert store.info["unigram_nats"][split] == pytest.approx(-(shares * np.log(shares)).sum())
    starts, lengths = store.starts, store.lengths
    assert starts.tolist() == [0, *np.cumsum(lengths)[:-1].tolist()], "records lie one after the other"
    assert len(store.arrays["tokens"]) == lengths.sum()


def test_published_splits_and_their_numbers_are_kept(tmp_path: Path) -> None:
    texts = [words(n) for n in range(12)]
    folder = published(tmp_path / "in", train=["", *texts[:8]], validation=texts[8:10], test=texts[10:])
    store = made(folder, tmp_path / "out")
    assert [record["id"] for record in store.index] == [
        *(f"train_{n}" for n in range(1, 9)), "validation_0", "validation_1", "test_0", "test_1",
    ]  # fmt: skip
    assert store.info["dropped"]["empty"] == 1
    assert "1 were empty" in store.info["summary"]


def test_a_single_text_file_is_cut_by_position(tmp_path: Path) -> None:
    text = "".join(words(n) + "\n" for n in range(50)) + "é"
    (tmp_path / "input.txt").write_text(text)
    store = made(tmp_path / "input.txt", tmp_path / "out")
    cut = int(len(text) * 0.9)
    assert [(r["split"], r["id"], text_of(store, n)) for n, r in enumerate(store.index)] == [
        ("train", "train_0", text[:cut]), ("validation", "validation_0", text[cut:]),
    ]  # fmt: skip
    assert "cut by position: the first 90 % is train" in store.info["summary"]


def test_shakespeare_is_cut_as_nanogpt_cuts_it(tmp_path: Path) -> None:
    file = shared_data("text_tinyshakespeare") / "input.txt"
    store = made(file, tmp_path / "out", Settings(tokenizer="characters"))
    assert store.lengths.tolist() == [1_003_854, 111_540]
    assert store.info["vocab_size"] == 65
    text = file.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    assert store.arrays["tokens"].tolist() == [numbers[character] for character in text]


def test_the_arxiv_abstracts(tmp_path: Path) -> None:
    store = made(shared_data("text_arxiv"), tmp_path / "out", Settings(tokenizer="bytes"))
    assert len(store.info["categories"]) == 11
    assert {split: len(store.split(split)) for split in store.splits} == {"train": 6597, "validation": 660, "test": 660}
    assert store.info["dropped"]["copies_in_train"] == 3, "three abstracts of train are also held out, to the letter"
    assert store.info["dropped"]["read"] == 6600 + 660 + 660
    digests = {split: {store.index[n]["digest"] for n in store.split(split)} for split in store.splits}
    assert not digests["train"] & (digests["validation"] | digests["test"])


def test_twice_the_same(tmp_path: Path) -> None:
    rows = [{"text": words(n), "label": "ab"[n % 2]} for n in range(50)]
    source = jsonl(tmp_path / "in/rows.jsonl", rows)
    how = Settings(tokenizer="bpe", vocab_size=280, max_examples_per_split=20)
    first, again = made(source, tmp_path / "a", how), made(source, tmp_path / "b", how)
    assert first.fingerprint == again.fingerprint
    other = made(source, tmp_path / "c", Settings(tokenizer="bpe", vocab_size=280, max_examples_per_split=20, seed=1))
    assert other.fingerprint != first.fingerprint


def test_a_wide_vocabulary_is_stored_wide(tmp_path: Path) -> None:
    from tests.data.test_tokenizer import foreign_folder

    folder = foreign_folder(tmp_path / "words", num_words=70000)
    rows = [{"text": f"w0 w{n} w69999"} for n in range(20)]
    store = made(jsonl(tmp_path / "in/rows.jsonl", rows), tmp_path / "out", Settings(tokenizer=str(folder)))
    assert store.arrays["tokens"].dtype == np.uint32
    assert store.arrays["tokens"].max() == 70002
    assert store.arrays["tokens"][:4].tolist() == [3, 3, 70002, 1]
    assert store.info["tokenizer"]["files"] == ["tokenizer.json"]


# Leaks


def test_copies_of_held_out_documents_leave_train(tmp_path: Path) -> None:
    texts = [words(n) for n in range(10)]
    shouted = texts[7].upper().replace(" ", "\n  ")
    folder = published(
        tmp_path / "in", train=[*texts[:6], texts[6], shouted, texts[0]], validation=[texts[6], texts[8]],
        test=[texts[7], texts[8], texts[9]],
    )  # fmt: skip
    store = made(folder, tmp_path / "out")
    assert [text_of(store, n) for n in store.split("train")] == [*texts[:6], texts[0]]
    assert [text_of(store, n) for n in store.split("validation")] == [texts[6]]
    assert len(store.split("test")) == 3
    dropped = store.info["dropped"]
    assert (dropped["copies_in_train"], dropped["copies_in_validation"], dropped["repeats_kept"]) == (2, 1, 1)
    assert "2 of train are also held out" in store.info["summary"]


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    folder = published(tmp_path / "in", train=["the same text"], test=["The same  text"], validation=["another"])
    with raises_code("data-empty") as caught:
        prepare(folder, tmp_path / "out", BYTES)
    assert "1 of 3" in str(caught.value)
    assert not (tmp_path / "out").exists()


entries = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(1, 500), st.integers(0, 40)), min_size=1
).map(
    lambda rows: [
        DocumentInfo(place, category, f"g{group}", f"f:{place}", place, size, f"{text}", f"{text}")
        for place, (category, group, size, text) in enumerate(rows)
    ]
)


@given(entries, st.integers(0, 3))
@settings(max_examples=200)
def test_groups_stay_together_and_every_category_is_held_out(rows: list[DocumentInfo], seed: int) -> None:
    found, _ = assign_splits(rows, 0.05, seed)
    assert [entry.place for entry in found if entry.split == "train" or entry.span is None] == list(range(len(rows)))
    for category in {entry.category for entry in rows}:
        here = [entry for entry in found if entry.category == category]
        groups = {entry.group for entry in here}
        splits = {entry.split for entry in here}
        if len(groups) <= 2:
            assert splits == {"train", "validation"}, "cut by position"
            assert all(entry.span is not None for entry in here)
        else:
            assert splits == {"train", "validation", "test"}
            assert all(len({e.split for e in here if e.group == group}) == 1 for group in groups)
    assert len({(entry.split, entry.number) for entry in found}) == len(found), "ids are unique"
    shuffled = assign_splits(random.Random(seed).sample(rows, len(rows)), 0.05, seed)[0]
    split_of = {(entry.place, entry.span): entry.split for entry in found}
    assert {(entry.place, entry.span): entry.split for entry in shuffled} == split_of, "whatever the order"


def test_the_share_that_is_held_out() -> None:
    rows = [DocumentInfo(n, "a", f"g{n}", f"f:{n}", n, 100 + n % 50, str(n), str(n)) for n in range(1000)]
    sizes: Counter[str] = Counter()
    for entry in assign_splits(rows, 0.05, 0)[0]:
        sizes[entry.split] += entry.num_characters
    assert sizes["validation"] / sizes.total() == pytest.approx(0.05, abs=0.002)
    assert sizes["test"] / sizes.total() == pytest.approx(0.05, abs=0.002)


@given(entries, st.integers(0, 3))
def test_no_text_is_in_train_and_held_out(rows: list[DocumentInfo], seed: int) -> None:
    dropped: dict[str, int] = {}
    found = assign_splits(rows, 0.1, seed)[0]
    try:
        kept = without_leaks(found, dropped)
    except DataError:
        return
    digests = {s: {e.digest for e in kept if e.split == s} for s in ("train", "validation", "test")}
    assert not digests["train"] & (digests["validation"] | digests["test"])
    assert not digests["validation"] & digests["test"]
    assert len(kept) + dropped["copies_in_train"] + dropped["copies_in_validation"] == len(found)


@pytest.mark.parametrize("names", [("train",), ("train", "test")])
def test_what_is_not_published_is_held_out(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = published(
        tmp_path / "in", **{name: [words(100 * at + n) for n in range(60)] for at, name in enumerate(names)}
    )
    store = made(folder, tmp_path / "out")
    assert set(store.splits) == {"train", "validation", "test"}
    assert len(store.split("test")) == (60 if "test" in names else 4)
    assert "no validation split is published: 5 % of train became validation" in store.info["summary"]


# Limits


@given(entries, st.integers(1, 30), st.integers(0, 3))
def test_a_limit_is_spread_over_categories(rows: list[DocumentInfo], most: int, seed: int) -> None:
    found = assign_splits(rows, 0.1, seed)[0]
    kept = limited(found, most, seed)
    assert set(kept) <= set(found)
    for split in ("train", "validation", "test"):
        there = Counter(entry.category for entry in found if entry.split == split)
        here = Counter(entry.category for entry in kept if entry.split == split)
        assert here.total() == min(most, there.total())
        for category in there:
            fewer = here[category] < max(here.values()) - 1
            assert not fewer or here[category] == there[category], "only a category that is used up has fewer"
    assert limited(found, 0, seed) == found
    if most > 1:
        assert set(limited(found, most - 1, seed)) <= set(kept), "fewer are among more"


def test_the_limit_of_a_preparation(tmp_path: Path) -> None:
    rows = [{"text": words(n), "label": "abc"[n % 3]} for n in range(120)]
    source = jsonl(tmp_path / "in/rows.jsonl", rows)
    store = made(source, tmp_path / "out", Settings(tokenizer="bytes", max_examples_per_split=6))
    assert [count["documents"] for count in store.info["counts"]["train"].values()] == [2, 2, 2]
    assert store.info["dropped"]["over_limit"] == 120 - len(store.index)


# Bad input


def test_short_documents_are_counted(tmp_path: Path) -> None:
    rows = [{"text": words(n)} for n in range(20)] + [{"text": "x"}, {"text": "yz"}]
    source = jsonl(tmp_path / "in/rows.jsonl", rows)
    store = made(source, tmp_path / "out", Settings(tokenizer="bytes", min_tokens=4))
    assert store.info["dropped"]["short"] == 2
    assert [text_of(store, n) for n in range(len(store.index))] == [row["text"] for row in rows[:20]]
    with raises_code("data-empty") as caught:
        prepare(source, tmp_path / "other", Settings(tokenizer="bytes", min_tokens=9999))
    assert "dataset.min_tokens" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_what_cannot_be_read_is_named_in_the_manifest(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "a" / f"{number}.txt").write_text(words(number))
    (tmp_path / "in" / "a" / "bad\x1b.txt").write_bytes(b"\xff\xfe\x00")
    store = made(tmp_path / "in", tmp_path / "out")
    assert store.info["quarantined"] == [{"file": "a/bad\x1b.txt", "reason": "is not UTF-8 text: byte 0xff at 0"}]
    assert "quarantined 1 (a/bad\u241b.txt is not UTF-8" in store.info["summary"]


def test_half_a_character_is_quarantined(tmp_path: Path) -> None:
    rows = [{"text": words(n)} for n in range(5)]
    file = jsonl(tmp_path / "in/rows.jsonl", rows)
    bad = '{"text": "lone \\ud800 surrogate"}\n{"text": "in a label", "label": "\\ud800"}\n'
    file.write_text(file.read_text() + bad)
    store = made(file, tmp_path / "out")
    assert [found["file"] for found in store.info["quarantined"]] == ["rows.jsonl:6", "rows.jsonl:7"]


def test_nothing_but_bad_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"\xff")
    with raises_code("data-empty") as caught:
        prepare(tmp_path / "in", tmp_path / "out", BYTES)
    assert "a.txt" in str(caught.value)


def test_an_unknown_character_names_its_document(tmp_path: Path) -> None:
    folder = published(tmp_path / "in", train=[words(n) for n in range(5)], validation=["alpha ☃"])
    with raises_code("unknown-character") as caught:
        prepare(folder, tmp_path / "out", Settings(tokenizer="characters"))
    assert "validation.jsonl:1" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"], "nothing is left behind"


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.data.tokenizer import Bytes

    monkeypatch.setattr(Bytes, "vocab_size", 100)
    folder = published(tmp_path / "in", train=[words(n) for n in range(5)], validation=["alpha"])
    with raises_code("tokenizer-damaged"):
        prepare(folder, tmp_path / "out", BYTES)


def test_a_source_that_changes_while_it_is_read(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in/rows.jsonl", [{"text": words(n)} for n in range(5)])

    def change(what: str, done: int, total: int) -> None:
        if what == "reading" and done:
            jsonl(file, [{"text": words(n + 100)} for n in range(5)])

    with raises_code("data-mismatch") as caught:
        prepare(file, tmp_path / "out", BYTES, report=change)
    assert "rows.jsonl:1" in str(caught.value)


def test_a_place_that_is_taken_is_found_before_anything_is_read(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in/rows.jsonl", [{"text": words(n)} for n in range(20)])
    before = made(source, tmp_path / "out").fingerprint
    with raises_code("data-exists"):
        prepare(tmp_path / "nowhere", tmp_path / "out", BYTES)
    with raises_code("options-conflict"):
        prepare(source.parent, source.parent / "out", BYTES)
    with raises_code("no-data"):
        prepare(tmp_path / "nowhere", tmp_path / "out", BYTES, replace=True)
    assert Store.open(tmp_path / "out").fingerprint == before, "what is there stays until the new one is whole"
    assert made(source, tmp_path / "out", replace=True).fingerprint == before


@pytest.mark.parametrize(
    "wrong", [{"held_out": 0.5}, {"held_out": 0.0}, {"min_tokens": 0}, {"max_examples_per_split": -1}]
)
def test_settings_out_of_range(wrong: dict[str, Any], tmp_path: Path) -> None:
    with raises_code("bad-value") as caught:
        prepare(None, tmp_path / "out", Settings(**wrong))
    assert f"dataset.{next(iter(wrong))}=" in str(caught.value)


def test_names_are_stripped_only_where_asked(tmp_path: Path) -> None:
    rows = [{"text": f"{words(n)} [cs.CV]", "label": "cs.CV"} for n in range(8)]
    source = jsonl(tmp_path / "in/rows.jsonl", rows)
    stripped = made(source, tmp_path / "a", Settings(tokenizer="bytes", strip_names=True))
    assert text_of(stripped, 0) == f"{words(0)} []"
    assert stripped.info["dropped"]["tags_removed"] == 8
    kept = made(source, tmp_path / "b")
    assert text_of(kept, 0) == rows[0]["text"]
    assert kept.info["dropped"]["tags_removed"] == 0
    assert "names arXiv's categories 8 times" in kept.info["summary"]


def test_any_number_of_cores_gives_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "in/rows.jsonl", [{"text": words(n), "label": "a"} for n in range(400)])
    monkeypatch.setattr("rung.recipes.text.data.SHARD_DOCUMENTS", 64)
    files = {}
    for is_parallel in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", is_parallel)
        store = made(source, tmp_path / is_parallel / "out", Settings(tokenizer="bpe", vocab_size=300))
        files[is_parallel] = {path.name: path.read_bytes() for path in store.path.iterdir() if path.is_file()}
    assert files["true"] == files["false"]


# Shards


@given(st.lists(st.integers(0, 900)), st.integers(1, 5), st.integers(1, 1000))
def test_shards_hold_every_document_once(sizes: list[int], most: int, characters: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_data, "SHARD_DOCUMENTS", most)
        patch.setattr(text_data, "SHARD_CHARACTERS", characters)
        shards = text_data.cut(sizes)
    assert [number for shard in shards for number in shard] == list(range(len(sizes)))
    for shard in shards:
        assert 1 <= len(shard) <= most
        assert len(shard) == 1 or sum(sizes[number] for number in shard) <= characters
