"""If this fails, `rung data text` does not do from the command line what the guide says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.text.test_data import jsonl, words

Rung = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    rows = [{"text": words(n), "label": "ab"[n % 2]} for n in range(80)]
    return jsonl(tmp_path / "papers" / "rows.jsonl", rows).parent


def test_prepare_show_verify(rung: Rung, papers: Path, tmp_path: Path) -> None:
    said = rung("data", "text", "--from", "papers", "--name", "mine", "dataset.vocab_size=300")
    assert "80 documents in 2 categories" in said.stdout
    assert said.stdout.rstrip().endswith("in data/mine")
    assert "tokenising ..." in said.stderr
    assert "80 documents in 2 categories" in rung("data", "show", "mine").stdout
    assert "is whole: 4 files" in rung("data", "verify", "mine").stdout
    shown = json.loads(rung("data", "show", "mine", "--json").stdout)
    assert shown["info"]["tokenizer"]["files"] == ["tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["mine"]


def test_the_limit_is_an_option_too(rung: Rung, papers: Path) -> None:
    base = ["data", "text", "--from", "papers", "dataset.tokenizer=bytes", "--json"]
    few = json.loads(rung(*base, "--name", "few", "--max-examples-per-split", 3).stdout)
    assert "9 documents" in few["summary"]
    same = json.loads(rung(*base, "--name", "same", "dataset.max_examples_per_split=3").stdout)
    assert same["summary"] == few["summary"]
    assert "80 documents" in json.loads(rung(*base, "--name", "full", "--full").stdout)["summary"]


@pytest.mark.parametrize(
    ("words_", "message"),
    [
        (["--full", "--max-examples-per-split", "3"], "contradicts --full"),
        (["--max-examples-per-split", "0"], "0 is not in the range x>=1"),
        (["--full", "dataset.max_examples_per_split=3"], "given twice"),
        (["--from", "nowhere"], "[no-data]"),
        (["--from", "nobody/none"], "[no-data]"),
        (["--from", "empty"], "[no-data]"),
        (["dataset.tokenizer=gpt9"], "[bad-value]"),
    ],
)
def test_mistakes_get_one_sentence(rung: Rung, tmp_path: Path, words_: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    done = rung("data", "text", *words_, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"], "nothing is left behind"


def test_another_recipe_says_that_it_has_no_such_key(rung: Rung) -> None:
    done = rung("data", "piano", "--max-examples-per-split", 3, check=False)
    assert done.returncode == 2
    assert "dataset.max_examples_per_split is not a key" in done.stderr
