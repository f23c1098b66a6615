"""If this fails, a killed preparation of text starts from nothing again, or gives other bytes than an unbroken one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rung.data.store import Store
from tests.recipes.text.test_data import jsonl, words

DRIVER = """
import json, os, signal, sys
from pathlib import Path
from rung.recipes.text import data
from rung.recipes.text.data import Settings, prepare
from rung.data.tokenizer import Bytes, Subwords
from rung.data import tokenizer

source, out, kind, kill_at, vocab_size = sys.argv[1:]
data.SHARD_DOCUMENTS = 8
done = {"documents": 0, "learned": 0}

def counting(cls):
    plain = cls.encode_batch
    def encode_batch(self, texts):
        done["documents"] += len(texts)
        return plain(self, texts)
    cls.encode_batch = encode_batch

counting(Bytes), counting(Subwords)
plain_learn = tokenizer.learn
def learn(*given):
    done["learned"] += 1
    return plain_learn(*given)
tokenizer.learn = learn

def report(what, at, total):
    if kill_at and what == "tokenising" and at >= int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)

prepare(Path(source), Path(out), Settings(tokenizer=kind, vocab_size=int(vocab_size)), name="out", report=report)
print(json.dumps(done))
"""


def start(source: Path, out: Path, kind: str, kill_at: int | str = "", vocab_size: int = 300) -> dict[str, int] | None:
    """What a process tokenised; None if it was killed."""
    words_ = [sys.executable, "-c", DRIVER, *map(str, (source, out, kind, kill_at, vocab_size))]
    done = subprocess.run(words_, capture_output=True, text=True)
    if kill_at != "":
        assert done.returncode == -signal.SIGKILL, done.stderr
        return None
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_killed_preparation_goes_on(kind: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in/rows.jsonl", [{"text": words(n), "label": "ab"[n % 2]} for n in range(60)])
    unbroken = start(source, tmp_path / "whole" / "out", kind)
    broken = tmp_path / "broken" / "out"
    start(source, broken, kind, kill_at=40)
    assert not broken.exists()
    assert [path.name for path in broken.parent.iterdir()] == [".out.parts"], "nothing else is left behind"
    again = start(source, broken, kind)
    assert unbroken == {"documents": 60, "learned": 1}
    assert again == {"documents": 20, "learned": 0}, "finished shards and the tokenizer are used again"
    assert content(broken) == content(tmp_path / "whole" / "out")
    assert [path.name for path in broken.parent.iterdir()] == ["out"], "the parts are gone"
    assert Store.open(broken).verify() == []


def test_parts_of_other_texts_or_settings_are_not_used(tmp_path: Path) -> None:
    rows = [{"text": words(n)} for n in range(60)]
    source, out = jsonl(tmp_path / "in/rows.jsonl", rows), tmp_path / "made" / "out"
    start(source, out, "bpe", kill_at=40)
    start(source, out, "bpe", kill_at=40, vocab_size=290)
    jsonl(source, [*rows[:-1], {"text": words(1000)}])
    assert start(source, out, "bpe") == {"documents": 60, "learned": 1}
    assert [path.name for path in out.parent.iterdir()] == ["out"], "the parts of earlier attempts are gone too"


def test_damaged_parts_are_made_again(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in/rows.jsonl", [{"text": words(n)} for n in range(60)])
    start(source, tmp_path / "whole" / "out", "bpe")
    broken = tmp_path / "broken" / "out"
    start(source, broken, "bpe", kill_at=40)
    (key,) = (broken.parent / ".out.parts").iterdir()
    (key / "1.npz").write_bytes((key / "1.npz").read_bytes()[:-20])
    (key / "2.npz").write_bytes(b"")
    (key / "3.npz").unlink()
    (key / "tokenizer" / "tokenizer.json").write_bytes(b"{")
    assert start(source, broken, "bpe") == {"documents": 20 + 3 * 8, "learned": 1}
    assert content(broken) == content(tmp_path / "whole" / "out")
