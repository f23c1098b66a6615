"""If this fails, documents are read from the wrong place, under the wrong category or in the wrong split."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.recipes.text.sources import Document, docstrings, find_source, split_named
from rung.recipes.text.sources.arxiv import TAGS, without_tags
from tests.conftest import shared_data
from tests.errors import raises_code


def put(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def jsonl(path: Path, *rows: Any) -> None:
    put(path, "".join(json.dumps(row) + "\n" for row in rows))


def parquet(path: Path, columns: dict[str, list[Any]], metadata: dict[str, str] | None = None) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata) if metadata else table, path)


def read(source: Path | str | None, config: str = "no_ref") -> tuple[list[Document], dict[str, str]]:
    bad: dict[str, str] = {}
    found = find_source(source, config)
    documents = list(found.read(bad.__setitem__))
    assert list(found.read(bad.__setitem__)) == documents, "a source can be read again"
    return documents, bad


def places(documents: list[Document]) -> list[tuple[str | None, str, str]]:
    return [(document.split, document.category, document.text) for document in documents]


# Text files


def test_the_first_folder_is_the_category(tmp_path: Path) -> None:
    put(tmp_path / "papers/cs/a.txt", "A")
    put(tmp_path / "papers/cs/deep/b.md", "B")
    put(tmp_path / "papers/math/c.TXT", "C")
    put(tmp_path / "papers/top.txt", "T")
    put(tmp_path / "papers/cs/.hidden.txt", "no")
    put(tmp_path / "papers/.git/x.txt", "no")
    put(tmp_path / "papers/cs/picture.png", b"\x89PNG")
    documents, bad = read(tmp_path / "papers")
    assert places(documents) == [(None, "cs", "A"), (None, "cs", "B"), (None, "math", "C"), (None, "papers", "T")]
    assert [document.source for document in documents] == ["cs/a.txt", "cs/deep/b.md", "math/c.TXT", "top.txt"]
    assert not bad


def test_folders_named_after_splits_are_splits(tmp_path: Path) -> None:
    for split, category in [("train", "cs"), ("train", "math"), ("val", "cs"), ("test", "math")]:
        put(tmp_path / "set" / split / category / "a.txt", f"{split} {category}")
    put(tmp_path / "set/README.md", "about the set")
    put(tmp_path / "set/train/loose.txt", "loose")
    documents, _ = read(tmp_path / "set")
    assert places(documents) == [
        ("train", "cs", "train cs"), ("train", "set", "loose"), ("train", "math", "train math"),
        ("validation", "cs", "val cs"), ("test", "math", "test math"),
    ]  # fmt: skip
    assert [document.number for document in documents] == [0, 1, 2, 0, 0]
    assert "README.md" in find_source(tmp_path / "set", "").notes[0]


def test_a_category_may_be_called_test(tmp_path: Path) -> None:
    put(tmp_path / "set/test/a.txt", "A")
    put(tmp_path / "set/essay/b.txt", "B")
    assert {(split, category) for split, category, _ in places(read(tmp_path / "set")[0])} == {
        (None, "test"), (None, "essay"),
    }  # fmt: skip


def test_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    put(tmp_path / "set/latin.txt", "Füße".encode("latin-1"))
    put(tmp_path / "set/bom.txt", b"\xef\xbb\xbfA\r\n")
    documents, bad = read(tmp_path / "set")
    assert [document.text for document in documents] == ["A\r\n"], "line ends are left alone"
    assert bad == {"latin.txt": "is not UTF-8 text: byte 0xfc at 1"}


# Rows


def test_jsonl_has_text_or_title_and_abstract(tmp_path: Path) -> None:
    jsonl(
        tmp_path / "rows.jsonl",
        {"text": "A", "label": "x"},
        {"title": "T", "abstract": "B", "primary": "cs.CV", "categories": ["cs.CV", "cs.LG"]},
        {"text": "C", "category": "y"},
        {"text": "D", "label": 3},
        {"text": "E\u2028F"},
    )
    documents, bad = read(tmp_path / "rows.jsonl")
    assert places(documents) == [
        (None, "x", "A"), (None, "cs.CV", "T\n\nB"), (None, "y", "C"), (None, "3", "D"), (None, "rows", "E\u2028F"),
    ]  # fmt: skip
    assert documents[1].source == "rows.jsonl:2"
    assert not bad


def test_lines_that_cannot_be_used_are_named_with_their_number(tmp_path: Path) -> None:
    good = json.dumps({"text": "A", "label": "x"}).encode()
    bad_lines = [b'{"text": "torn', b"[1, 2]", b'{"label": "x"}', b"\xff\xfe", b'{"text": "B", "label": [1]}', b"NaN"]
    put(tmp_path / "train.jsonl", b"\n".join([good, b"", *bad_lines, good]))
    documents, bad = read(tmp_path / "train.jsonl")
    assert [document.number for document in documents] == [0, 8]
    assert list(bad) == [f"train.jsonl:{number}" for number in range(3, 9)]
    assert "not whole JSON" in bad["train.jsonl:3"]
    assert "no text" in bad["train.jsonl:5"]


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_named(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    put(folder / "a.jsonl", content)
    documents, bad = read(folder / "a.jsonl")
    assert len(documents) + len(bad) == sum(bool(line.strip()) for line in content.split(b"\n"))


def test_parquet_with_numbers_for_labels(tmp_path: Path) -> None:
    for split, labels in [("train", [0, 1, 1]), ("validation", [1]), ("test", [0])]:
        parquet(tmp_path / f"set/{split}.parquet", {"text": [f"{split} {n}" for n in labels], "label": labels})
    put(tmp_path / "set/labels.json", json.dumps(["cs.CV", "math.AC"]))
    jsonl(tmp_path / "set/test.jsonl", {"text": "the same rows once more"})
    documents, _ = read(tmp_path / "set")
    assert places(documents) == [
        ("train", "cs.CV", "train 0"), ("train", "math.AC", "train 1"), ("train", "math.AC", "train 1"),
        ("validation", "math.AC", "validation 1"), ("test", "cs.CV", "test 0"),
    ]  # fmt: skip
    assert "test.jsonl" in find_source(tmp_path / "set", "").notes[0]


def test_names_of_labels_inside_the_parquet_win(tmp_path: Path) -> None:
    features = {"label": {"names": ["zero", "one"], "_type": "ClassLabel"}, "text": {"_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    put(tmp_path / "labels.json", json.dumps({"0": "other", "1": "names"}))
    parquet(tmp_path / "data/train-00000-of-00002.parquet", {"text": ["A"], "label": [0]}, metadata)
    parquet(tmp_path / "data/train-00001-of-00002.parquet", {"text": ["B"], "label": [1]})
    documents, _ = read(tmp_path)
    assert places(documents) == [("train", "zero", "A"), ("train", "names", "B")]
    assert [document.number for document in documents] == [0, 1]


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_out_of_range(tmp_path: Path, label: int) -> None:
    parquet(tmp_path / "train.parquet", {"text": ["A", "B"], "label": [0, label]})
    put(tmp_path / "labels.json", json.dumps(["x", "y"]))
    with raises_code("bad-label") as caught:
        read(tmp_path)
    assert f"train.parquet:1 has label {label}" in str(caught.value)


def test_parquet_that_cannot_be_used(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"body": ["A"], "label": [0]})
    with raises_code("no-column") as caught:
        read(tmp_path / "a.parquet")
    assert "body, label" in str(caught.value)
    put(tmp_path / "b.parquet", b"PAR1 torn")
    with raises_code("data-damaged") as caught:
        read(tmp_path / "b.parquet")
    assert "b.parquet" in str(caught.value)
    parquet(tmp_path / "c.parquet", {"text": ["A", None], "label": ["x", "y"]})
    documents, bad = read(tmp_path / "c.parquet")
    assert (len(documents), list(bad)) == (1, ["c.parquet:1"])


@pytest.mark.parametrize("content", ["{", "[]", "[1]", '{"a": "x"}'])
def test_odd_names_of_labels(tmp_path: Path, content: str) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "A", "label": 0})
    put(tmp_path / "labels.json", content)
    with raises_code("bad-label") as caught:
        read(tmp_path)
    assert "labels.json" in str(caught.value)


def test_without_pyarrow_there_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["A"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises_code("not-installed") as caught:
        read(tmp_path / "a.parquet")
    assert "rung[query]" in str(caught.value)


def test_a_train_split_is_needed(tmp_path: Path) -> None:
    jsonl(tmp_path / "set/test.jsonl", {"text": "A"})
    with raises_code("no-split"):
        read(tmp_path / "set")
    jsonl(tmp_path / "set/train.jsonl", {"text": "B"})
    jsonl(tmp_path / "set/extra.jsonl", {"text": "C"})
    with raises_code("bad-split") as caught:
        read(tmp_path / "set")
    assert "extra.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("word", "split"),
    [("train", "train"), ("dev", "validation"), ("val", "validation"), ("test-00000-of-00001", "test"),
     ("Validation_matched", "validation"), ("trainer", None), ("protest", None), ("", None)],
)  # fmt: skip
def test_names_of_splits(word: str, split: str | None) -> None:
    assert split_named(word) == split


def test_the_arxiv_abstracts() -> None:
    documents, bad = read(shared_data("text_arxiv"))
    by_split = Counter(document.split for document in documents)
    assert by_split == {"train": 6600, "validation": 660, "test": 660}
    assert Counter(document.category for document in documents if document.split == "test") == dict.fromkeys(
        ["math.AC", "cs.CV", "cs.AI", "cs.SY", "math.GR", "cs.CE", "cs.PL", "cs.IT", "cs.DS", "cs.NE", "math.ST"], 60
    )
    rows = [json.loads(line) for line in (shared_data("text_arxiv") / "test.jsonl").read_text().splitlines()]
    theirs = [(row["primary"], f"{row['title']}\n\n{row['abstract']}") for row in rows]
    assert [(d.category, d.text) for d in documents if d.split == "test"] == theirs, "Parquet and JSONL hold one set"
    assert not bad


# Nothing, and names


def test_nothing_to_read(tmp_path: Path) -> None:
    with raises_code("no-data"):
        find_source(tmp_path, "")
    with raises_code("no-data"):
        find_source(tmp_path / "nowhere", "")
    with raises_code("no-data"):
        find_source("nowhere", "")


# The hub, out of a cache


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of `datasets` that holds owner/owned, as a download would leave it; there is no network."""
    datasets = pytest.importorskip("datasets")
    from datasets.packaged_modules.parquet.parquet import Parquet

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["cs.CV", "math.AC"])}
    )
    files = {}
    for split, num_rows in (("train", 6), ("validation", 2), ("test", 2)):
        columns = {"text": [f"{split} text {n}" for n in range(num_rows)], "label": [n % 2 for n in range(num_rows)]}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
        files[split] = [str(tmp_path / f"{split}.parquet")]
    builder = Parquet(
        cache_dir=str(tmp_path / "made"), dataset_name="owned", config_name="no_ref", hash="0" * 16, data_files=files
    )
    builder.download_and_prepare()
    folder = Path(builder.cache_dir)  # made/owned/no_ref-<hash of the local files>/0.0.0/<hash>
    cache = tmp_path / "cache"
    shutil.copytree(folder.parent, cache / "owner___owned" / "no_ref" / "0.0.0")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return cache


def test_a_set_of_the_hub_out_of_the_cache(cached: Path) -> None:
    documents, _ = read("owner/owned")
    assert Counter(document.split for document in documents) == {"train": 6, "validation": 2, "test": 2}
    assert places(documents)[:2] == [("train", "cs.CV", "train text 0"), ("train", "math.AC", "train text 1")]
    assert read(Path("owner/owned"))[0] == documents, "the command line gives a path"


def test_the_only_configuration_is_taken_and_told(cached: Path) -> None:
    found = find_source("owner/owned", "other")
    assert found.notes == ("configuration no_ref of owner/owned",)
    shutil.copytree(cached / "owner___owned" / "no_ref", cached / "owner___owned" / "default")
    with raises_code("no-config") as caught:
        find_source("owner/owned", "other")
    assert "dataset.hub_config" in str(caught.value)


def test_a_set_that_is_neither_cached_nor_reached(cached: Path) -> None:
    with raises_code("no-data") as caught:
        find_source("nobody/none", "no_ref")
    assert "HF_DATASETS_CACHE" in str(caught.value)


def test_a_set_made_by_a_program_is_read_from_its_conversion(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    real, asked = datasets.load_dataset, []

    def refuse(name: str, config: str, revision: str | None = None) -> Any:
        asked.append(revision)
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found owned.py")
        return real(name, config)

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert len(read("owner/owned")[0]) == 10
    assert asked == [None, "refs/convert/parquet"]


def test_without_datasets_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_code("not-installed") as caught:
        find_source("owner/owned", "no_ref")
    assert "rung[hf]" in str(caught.value)


# Names in the text


def test_names_of_categories_go_and_nothing_else() -> None:
    text = "arXiv:1206.5780v1 [cs.NE] 24 Apr 2012; see cs.CV, math.AC. and q-bio.GN/0310049 (cond-mat.mes-hall)"
    clean = "arXiv:1206.5780v1 [] 24 Apr 2012; see , . and /0310049 ()"
    assert without_tags(text) == (clean, 5)


@pytest.mark.parametrize(
    "text",
    ["Math.PI and math.pi", "cs.Example", "cs.CVPR", "the docs.AI page", "cs.AI.py", "cs CV", "CS.CV", "math.ACE",
     "physics.optical", "statistics, graphs, cs", "cs.XX"],
)  # fmt: skip
def test_what_only_looks_like_a_name_stays(text: str) -> None:
    assert without_tags(text) == (text, 0)


@given(st.lists(st.sampled_from([*TAGS, "see", "and", ",", "(", ")"])))
def test_names_leave_their_neighbours(words: list[str]) -> None:
    expected = " ".join("" if word in TAGS else word for word in words)
    assert without_tags(" ".join(words)) == (expected, sum(word in TAGS for word in words))


# The embedded text


@pytest.fixture(scope="module")
def embedded() -> list[Document]:
    before = set(sys.modules)
    documents = list(docstrings.source().read(lambda file, reason: pytest.fail(f"{file} {reason}")))
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("tkinter", "idlelib", "networkx")}
    return documents


def test_the_embedded_text_has_eleven_categories(embedded: list[Document]) -> None:
    counts = Counter(document.category for document in embedded)
    assert set(counts) == set(docstrings.CATEGORIES)
    assert len(counts) == 11
    assert min(counts.values()) >= 50
    assert 5000 < len(embedded) < 9000
    assert 5e6 < sum(len(document.text) for document in embedded) < 9e6


def test_the_embedded_text_is_what_python_shows(embedded: list[Document]) -> None:
    """Parity with inspect, for a function whose module is imported anyway."""
    import inspect

    from sympy.ntheory import factorint

    assert inspect.getdoc(factorint) in {d.text for d in embedded if d.category == "number_theory"}


def test_the_embedded_text_has_no_duplicates_no_tests_and_no_short_ones(embedded: list[Document]) -> None:
    assert len({" ".join(document.text.casefold().split()) for document in embedded}) == len(embedded)
    assert min(len(document.text) for document in embedded) > 200
    assert not [document.source for document in embedded if "/test" in document.source]
    assert len({document.group for document in embedded}) < len(embedded) / 3, "a module is a group"
