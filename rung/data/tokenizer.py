"""Text to ids and back, four ways: bytes, characters, a BPE trained on the data, or any tokenizer.json.

A tokenizer's files lie in the store it made; `of_store` reads them there without a network. decode(encode(text)) ==
text for bytes, characters and bpe; a tokenizer.json may lose something. Text never becomes a special token: a document
that quotes <|endoftext|> is encoded as its characters. `end` is written after a document, by data.py alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung import parse
from rung.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rung.data.store import Store

KINDS = ("bytes", "characters", "bpe")
END_TOKEN = "<|endoftext|>"
# What others call the end of a document, where their folder has no tokenizer_config.json that says so.
KNOWN_ENDS = (END_TOKEN, "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "[SEP]")
EXPORTED = "vocabulary.json"  # in a folder that `rung export --hf` wrote: which of KINDS its ids are of
SMALLEST_BPE = 257  # every byte, and the end
LOST = "\ufffd"


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes a byte as a letter: itself where that can be seen, else the next one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(unseen)}


BYTE_OF = _byte_letters()


class Tokenizer(ABC):
    """What data, recipe and samples know of a tokenizer."""

    kind: str
    vocab_size: int
    end: int | None  # the id after a document, if there is one
    start: Sequence[int] = ()  # ids that its own users put before a text
    files: Mapping[str, bytes]  # what a store keeps, to build it again

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    @abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of ids; `end` and other special ids have none. Ids that mean nothing become U+FFFD or nothing."""

    @abstractmethod
    def name(self, id: int) -> str:
        """What a person calls a token: its text, or its name where it is none, such as half a character."""

    @abstractmethod
    def bytes_of(self, id: int) -> bytes | None:
        """What a token adds to a text, in UTF-8: perhaps part of a character. None for special ids, or if not known."""

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def hash(self) -> str:
        """The same for the same mapping of text to ids; of a tokenizer.json, whoever made it, that of the file."""
        main = next(iter(self.files.values()), self.kind.encode())
        return hashlib.sha256(main).hexdigest()[:16]

    @property
    def description(self) -> dict[str, Any]:
        about = {"kind": self.kind, "hash": self.hash, "vocab_size": self.vocab_size, "end": self.end}
        return {**about, "files": list(self.files)}

    @staticmethod
    def of_store(store: Store) -> Tokenizer:
        about = store.info["tokenizer"]
        return of_files(about["kind"], {name: store.file(name) for name in about["files"]})

    @staticmethod
    def of_folder(folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder, or of a tokenizer.json; also of a run that rung has exported."""
        folder = folder.parent if folder.name == "tokenizer.json" else folder
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = parse.loose_json(parse.read_bytes(folder / EXPORTED))["tokenizer"]
            if about["kind"] in ("bytes", "characters"):
                return of_files(about["kind"], {name: parse.read_bytes(folder / name) for name in about["files"]})
        if not (folder / "tokenizer.json").is_file():
            remedy = f"save one with `tokenizer.save_pretrained`, or set dataset.tokenizer to {', '.join(KINDS)}"
            raise DataError(f"{folder} has no tokenizer.json; {remedy}", code="no-file")
        known = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        names = [name for name in known if (folder / name).is_file()]
        return of_files("hf", {name: parse.read_bytes(folder / name) for name in names})


def of_files(kind: str, files: Mapping[str, bytes]) -> Tokenizer:
    """Builds a tokenizer again from what a store keeps of it."""
    if kind == "bytes":
        return Bytes()
    if kind == "characters":
        return Characters(_json(files, "characters.json", str))
    return Subwords(kind, files)


def learn(kind: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of one of KINDS, fitted to the texts of the training split."""
    if kind == "bytes":
        return Bytes()
    if kind == "characters":
        return Characters("".join(sorted(set().union(*map(set, texts)))))
    assert kind == "bpe", kind
    # Byte-level BPE as GPT-2 has it. Ties are broken by ids, so that the same texts give the same file.
    package = _package()
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((text for text in texts if text), trainer)
    return Subwords("bpe", {"tokenizer.json": inner.to_str().encode()})


def version() -> str:
    """Of the package that learns and encodes subwords; another one may merge differently."""
    try:
        return str(_package().__version__)
    except DataError:
        return "none"


def check(kind: str, vocab_size: int) -> None:
    """Refuses what cannot become a tokenizer, before anything is read."""
    if kind == "bpe":
        if not SMALLEST_BPE <= vocab_size <= 1 << 31:
            limits = f"it needs {SMALLEST_BPE}, one for each byte and one for the end of a document, to 2**31"
            raise ConfigError(f"dataset.vocab_size={vocab_size} does not suit bpe: {limits}", code="bad-value")
        _package()
    elif kind not in KINDS:
        if not Path(kind).exists():
            known = f"neither {', '.join(KINDS)} nor a folder here with a tokenizer.json"
            raise ConfigError(f"dataset.tokenizer={kind} is {known}", code="bad-value")
        Tokenizer.of_folder(Path(kind))


class Bytes(Tokenizer):
    """UTF-8, and one id for the end of a document."""

    kind, vocab_size, end, files = "bytes", 257, 256, {}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def name(self, id: int) -> str:
        return chr(id) if id < 128 else f"<0x{id:02X}>" if id < 256 else END_TOKEN

    def bytes_of(self, id: int) -> bytes | None:
        return bytes([id]) if id < 256 else None


class Characters(Tokenizer):
    """The characters that occur in the training split, in the order of their code points; no end of a document."""

    kind, end = "characters", None

    def __init__(self, characters: str) -> None:
        if not characters:
            raise DataError("the train split has no characters to build a vocabulary from", code="data-empty")
        self.characters = characters
        self.vocab_size = len(characters)
        self.files = {"characters.json": json.dumps(characters).encode()}
        self._codes = _codes(characters)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        rows = []
        for text in texts:
            codes = _codes(text)
            ids = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
            unknown = np.flatnonzero(self._codes[ids] != codes)
            if len(unknown):
                where = int(unknown[0])
                character = f"{text[where]!a} (U+{ord(text[where]):04X}), at place {where} of a text"
                problem = f"{character}, is not among the {self.vocab_size} characters of the train split"
                raise DataError(f"{problem}; set dataset.tokenizer to bytes or bpe", code="unknown-character")
            rows.append(ids.astype(self.dtype))
        return rows

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return "".join(self.characters[int(i)] if i < self.vocab_size else LOST for i in ids)

    def name(self, id: int) -> str:
        return self.decode([id])

    def bytes_of(self, id: int) -> bytes | None:
        return self.characters[id].encode("utf-8", "replace") if id < self.vocab_size else None


class Subwords(Tokenizer):
    """A tokenizer.json: one that was learned here (bpe), or one of others (hf)."""

    def __init__(self, kind: str, files: Mapping[str, bytes]) -> None:
        self.kind, self.files = kind, dict(files)
        try:
            self._inner = _package().Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
        except DataError:
            raise
        except Exception as error:  # the package raises plain Exception
            problem = f"the tokenizer.json cannot be read ({error})"
            raise DataError(f"{problem}; save it again", code="tokenizer-damaged") from error
        self._inner.no_truncation()  # a file made for training a classifier may cut every text at 512
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self.vocab_size = max(self._inner.get_vocab().values(), default=-1) + 1
        self.end = None
        about = _json(files, "tokenizer_config.json", dict) if "tokenizer_config.json" in files else {}
        named = about.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        for token in (named, *KNOWN_ENDS):
            if self.end is None and token and isinstance(token, str):
                with contextlib.suppress(UnicodeEncodeError):  # half a character is no token
                    self.end = self._inner.token_to_id(token)
        self.start = [id_ for id_ in self._inner.encode("", add_special_tokens=True).ids if id_ != self.end]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # On all cores, in threads of the package's own; without places in the text, which took a third of the time.
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in found]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]
        return str(self._inner.decode(known, skip_special_tokens=True))

    def name(self, id: int) -> str:
        text = self._text_of(id)
        return str(self._inner.id_to_token(id) or f"<{id}>") if LOST in text or not text else text

    def bytes_of(self, id: int) -> bytes | None:
        text = self._text_of(id)
        if text and LOST not in text:
            return None if id in self.special_ids else text.encode("utf-8", "replace")
        raw = str(self._inner.id_to_token(id) or "")
        if re.fullmatch("<0x[0-9A-F]{2}>", raw):  # a byte that sentencepiece has no token for
            return bytes([int(raw[3:5], 16)])
        return bytes(BYTE_OF[letter] for letter in raw) if LOST in text and set(raw) <= set(BYTE_OF) else None

    def _text_of(self, id: int) -> str:
        """What a token adds to a text. Some decoders take the space from the first token, so it is not the first."""
        if id >= self.vocab_size:
            return LOST
        whole = str(self._inner.decode([*self._anchor, id], skip_special_tokens=False))
        before = str(self._inner.decode(self._anchor, skip_special_tokens=False))
        if before and whole.startswith(before):
            return whole[len(before) :]
        return str(self._inner.decode([id], skip_special_tokens=False))

    @functools.cached_property
    def _anchor(self) -> list[int]:
        return list(self._inner.encode("a", add_special_tokens=False).ids)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(id for id, token in self._inner.get_added_tokens_decoder().items() if token.special)

    def encode_markup(self, text: str) -> np.ndarray:
        """As `encode`, but what is written like a special token becomes one: for a template, never for a text."""
        self._inner.encode_special_tokens = False
        try:
            return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=self.dtype)
        finally:
            self._inner.encode_special_tokens = True


def _json(files: Mapping[str, bytes], name: str, kind: type) -> Any:
    try:
        value = parse.loose_json(files[name])
        if type(value) is not kind:
            raise ValueError(f"it holds {type(value).__name__}, not {kind.__name__}")
    except (ValueError, KeyError) as error:
        raise DataError(f"the {name} cannot be read ({error}); save it again", code="tokenizer-damaged") from error
    return value


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


@functools.cache
def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        remedy = "`pip install 'rung[llm]'`, or set dataset.tokenizer=bytes"
        raise DataError(f"subwords need tokenizers, which is not installed: {remedy}", code="not-installed") from error
    return tokenizers
