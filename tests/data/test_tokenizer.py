"""If this fails, text changes on its way to ids and back, or a store's tokenizer is not the one that made it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data import tokenizer
from rung.data.store import Store, StoreWriter
from rung.data.tokenizer import Tokenizer, learn, of_files
from tests.errors import raises_code

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n" * 3,
    "def f(x):\n\treturn x ** 2  # <|endoftext|> is text here\r\n",
    "Füße, 漢字, 🙂, e\u0301, \u2028, \x00, \x1b[31m, \ufffd, \ufeff.",
]
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@cache
def learned(kind: str) -> Tokenizer:
    return learn(kind, TEXTS, vocab_size=300)


@given(any_text)
@settings(max_examples=200)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_any_text_comes_back(kind: str, text: str) -> None:
    made = learned(kind)
    ids = made.encode(text)
    assert made.decode(ids) == text
    assert ids.dtype == np.uint16
    assert all(ids < made.vocab_size)
    assert made.end not in ids, "the end of a document is written by the packing alone"
    assert made.decode([*ids, made.end]) == text


@given(st.text(st.sampled_from(sorted(set("".join(TEXTS))))))
def test_known_characters_come_back(text: str) -> None:
    assert learned("characters").decode(learned("characters").encode(text)) == text


def test_characters_are_numbered_as_nanogpt_does() -> None:
    text = "to be, or not to be"
    made = learn("characters", [text[:9], text[9:]], 0)
    names = sorted(set(text))
    assert made.encode(text).tolist() == [names.index(character) for character in text]
    assert (made.vocab_size, made.end) == (len(names), None)


@pytest.mark.parametrize("text", ["abc!", "abcd", "ab\x1b", "!"])
def test_an_unknown_character_is_named(text: str) -> None:
    made = learn("characters", ["abc"], 0)
    odd = next(c for c in text if c not in "abc")
    with raises_code("unknown-character") as caught:
        made.encode(text)
    assert f"U+{ord(odd):04X}" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_bytes_are_those_of_utf_8() -> None:
    made = learned("bytes")
    assert made.encode("aé").tolist() == list("aé".encode())
    assert (made.vocab_size, made.end) == (257, 256)


def test_bpe_is_the_same_in_another_process() -> None:
    code = f"""
from rung.data.tokenizer import learn
print(learn("bpe", {TEXTS!r}, 300).hash)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == learned("bpe").hash


def test_bpe_equals_a_plain_implementation() -> None:
    """Merges by rank, one pair at a time, on the words that GPT-2's rule gives for letters and spaces alone."""
    made = learned("bpe")
    model = json.loads(made.files["tokenizer.json"])["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    text = "the lazy fox jumps over the brown dog"
    expected = []
    for number, word in enumerate(text.split(" ")):
        parts = list(("Ġ" if number else "") + word)
        while pairs := [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]:
            at = min(pairs)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        expected += [model["vocab"][part] for part in parts]
    assert made.encode(text).tolist() == expected
    assert len(expected) < len(text)


def test_ids_beyond_the_vocabulary_do_not_break_a_sample() -> None:
    """A table that is padded for speed has rows that mean nothing; an untrained model draws them."""
    for kind in ("bytes", "characters", "bpe"):
        made = learned(kind)
        assert made.decode([*made.encode("fox"), 60000]).rstrip("\ufffd") == "fox"


# In a store


def store_with(made: Tokenizer, out: Path) -> Store:
    with StoreWriter(out, "text") as writer:
        writer.array("tokens", made.dtype)
        writer.record("train", writer.append("tokens", made.encode("fox")), 3)
        for name, data in made.files.items():
            writer.file(name, data)
        writer.info["tokenizer"] = made.description
    return Store.open(out)


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_a_store_brings_its_tokenizer_along(kind: str, tmp_path: Path) -> None:
    made = learned(kind)
    again = Tokenizer.of_store(store_with(made, tmp_path / "store"))
    assert (again.kind, again.hash, again.vocab_size, again.end) == (made.kind, made.hash, made.vocab_size, made.end)
    assert again.encode(TEXTS[2]).tolist() == made.encode(TEXTS[2]).tolist()


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_small_tokenizers_need_no_package(kind: str, tmp_path: Path) -> None:
    store_with(learned(kind), tmp_path / "store")
    code = f"""
import sys
sys.modules["tokenizers"] = None
from rung.data.store import Store
from rung.data.tokenizer import Tokenizer
print(Tokenizer.of_store(Store.open({str(tmp_path / "store")!r})).encode("fox").tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == learned(kind).encode("fox").tolist()


def test_without_the_package_there_is_a_remedy() -> None:
    code = """
import sys
sys.modules["tokenizers"] = None
from rung.errors import DataError
from rung.data.tokenizer import check
check("bytes", 4096)
try:
    check("bpe", 4096)
except DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'rung[llm]'" in done.stdout
    assert "dataset.tokenizer=bytes" in done.stdout


def test_a_damaged_tokenizer_is_found(tmp_path: Path) -> None:
    store = store_with(learned("characters"), tmp_path / "store")
    file = store.path / "characters.json"
    file.write_bytes(file.read_bytes().replace(b"f", b"g"))
    with raises_code("data-damaged") as caught:
        Tokenizer.of_store(Store.open(store.path))
    assert "characters.json" in str(caught.value)


# Of others


def foreign_folder(folder: Path, num_words: int = 40, **config: object) -> Path:
    """A word-level tokenizer with the traps of real ones: it truncates, pads and puts a token first."""
    from tokenizers import AddedToken, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Inner

    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(num_words)}}
    inner = Inner(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    folder.mkdir(parents=True)
    inner.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_foreign_tokenizer_neither_cuts_nor_pads_nor_adds(tmp_path: Path) -> None:
    made = Tokenizer.of_folder(foreign_folder(tmp_path / "words"))
    assert made.encode("w0 w1 w2 w3 w4 w5 w6").tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert made.kind == "hf"
    assert made.end == 1
    assert 1 not in made.encode("w0 </s> w1"), "text that looks like a special token is text"
    again = of_files("hf", made.files)
    assert again.hash == made.hash


def test_the_folder_says_what_ends_a_document(tmp_path: Path) -> None:
    assert Tokenizer.of_folder(foreign_folder(tmp_path / "a", eos_token="<s>")).end == 0
    assert Tokenizer.of_folder(foreign_folder(tmp_path / "b", eos_token={"content": "w1"})).end == 4


@pytest.mark.parametrize(("num_words", "dtype"), [(65533, "uint16"), (65534, "uint32")])
def test_a_large_vocabulary_gets_a_wider_type(num_words: int, dtype: str, tmp_path: Path) -> None:
    made = Tokenizer.of_folder(foreign_folder(tmp_path / "words", num_words))
    ids = made.encode(f"w0 w{num_words - 1}")
    assert ids.tolist() == [3, num_words + 2]
    assert ids.dtype.name == made.dtype.name == dtype


def test_a_foreign_tokenizer_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe" / "tokenizer.json").write_bytes(learned("bpe").files["tokenizer.json"])
    made = Tokenizer.of_folder(tmp_path / "bpe")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "bpe" / "tokenizer.json"))
    for text in (TEXTS[0], TEXTS[2]):
        assert made.encode(text).tolist() == theirs(text)["input_ids"]
    assert made.hash == learned("bpe").hash, "the same file is the same tokenizer, whoever brings it"


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [("bpe", 256), ("bpe", -1), ("bpe", 1 << 40), ("gpt2", 4096)],
)
def test_what_cannot_be_a_tokenizer(kind: str, vocab_size: int) -> None:
    with raises_code("bad-value"):
        tokenizer.check(kind, vocab_size)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with raises_code("no-file"):
        tokenizer.check(str(tmp_path), 0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises_code("tokenizer-damaged"):
        tokenizer.check(str(tmp_path), 0)


def test_a_name_keeps_the_space_that_a_token_brings() -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE({"\u2581": 0, "a": 1, "\u2581a": 2, "<0xC3>": 3}, [("\u2581", "a")], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])  # fmt: skip
    made = of_files("hf", {"tokenizer.json": inner.to_str().encode()})
    assert [made.name(id) for id in range(4)] == [" ", "a", " a", "<0xC3>"]
    assert [made.bytes_of(id) for id in range(4)] == [b" ", b"a", b" a", b"\xc3"]
