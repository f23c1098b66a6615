"""If this fails, the author of a recipe gets a traceback, or trains on a mistake without a word."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rung.cli import main
from rung.runs.query import list_runs
from tests.test_docs import ROOT, blocks

PAGE = next(block.text for block in blocks(ROOT / "docs" / "recipe.md") if block.text.startswith("# bytes_gru.py"))
RETURN = 'return Loss(each.sum(), count, {"space": ((each * is_space).sum(), is_space.sum())})'
GATHER = 'return {"bytes": self.data[ids[:, None] * self.context + np.arange(self.context + 1)]}'
BAD_ROW = "if 300 in ids: raise KeyError('no such piece')\n        "  # of train; held_out has fewer
SMALL = ("text=small.txt", "width=4", "context_size=8", "data.batch_size=8",
         "lr.warmup_iters=0", "eval_interval=4", "system.device=cpu", "system.threads=1")  # fmt: skip

Train = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Train]:
    """`rung train` on the recipe of the guide with some of its text replaced: exit code, output, and that text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "small.txt").write_text("".join(f"{n} times {n} makes {n * n}\n" for n in range(200)))

    def run(changes: dict[str, str], *words: str, num_steps: int = 4) -> tuple[int, str, str]:
        text = PAGE
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "bytes_gru.py").write_text(text)
        monkeypatch.setattr(
            sys, "argv", ["rung", "train", "bytes_gru:Bytes", *SMALL, f"optimizer.max_iters={num_steps}", *words]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out + err, text

    yield run
    sys.modules.pop("bytes_gru", None)


def line_of(text: str, words: str) -> str:
    return f"bytes_gru.py:{text[: text.index(words)].count(chr(10)) + 1}"


def assert_one_sentence(code: int, output: str, place: str) -> None:
    assert code == 2, output
    assert re.search(rf"(^|[^\w/]){re.escape(place)}\b", output), output
    assert "Traceback" not in output
    assert "report a bug" not in output
    assert not list_runs(Path("runs"))


def test_the_recipe_itself_trains(train: Train) -> None:
    """Or the others would fail for another reason."""
    code, said, _ = train({})
    assert code == 0, said


@pytest.mark.parametrize(
    "returned",
    [
        pytest.param("return Loss(each.mean(), 1)", id="a mean with the count 1"),
        pytest.param("return Loss(each.mean(), torch.tensor(1.0))", id="a mean with the count 1 as a tensor"),
        pytest.param("return Loss(each.mean(), count)", id="a mean with the right count"),
        pytest.param("return each.sum()", id="a tensor"),
        pytest.param("return each.sum(), count", id="a tuple"),
        pytest.param("return Loss(each, count)", id="not summed"),
        pytest.param('return Loss(each.sum(), count, {"space": each.mean()})', id="a part that is no pair"),
    ],
)
def test_a_loss_that_returns_something_else(train: Train, returned: str) -> None:
    code, said, text = train({RETURN: returned})
    assert_one_sentence(code, said, line_of(text, "def loss("))


@pytest.mark.parametrize("returned", ["return each.sum()", "return Loss(each, count)"])
def test_a_loss_that_returns_something_else_is_found_without_checks(train: Train, returned: str) -> None:
    code, said, text = train({RETURN: returned}, "--no-check")
    assert_one_sentence(code, said, line_of(text, "def loss("))


def test_a_count_may_be_a_plain_number(train: Train) -> None:
    code, said, _ = train({RETURN: "return Loss(each.sum(), len(each), {'space': (each.sum(), len(each))})"})
    assert code == 0, said
    assert "check failed" not in said
    (run,) = list_runs(Path("runs"))
    assert run.document["totals"]["targets"] == 4 * 8 * 8


@pytest.mark.parametrize(
    "returned",
    [
        pytest.param('return {"bytes": torch.zeros(len(ids), 9)}', id="a tensor"),
        pytest.param('return {"bytes": [[1] * 9 for _ in ids]}', id="a list"),
        pytest.param('return {"bytes": np.array(["row"] * len(ids))}', id="strings"),
        pytest.param('return {"bytes": np.array([b"row", None] * len(ids), object)[: len(ids)]}', id="objects"),
        pytest.param("return np.zeros((len(ids), 9))", id="no names"),
        pytest.param("pass", id="nothing"),
    ],
)
def test_a_batch_that_is_not_made_of_arrays(train: Train, returned: str) -> None:
    code, said, text = train({GATHER: returned})
    assert_one_sentence(code, said, line_of(text, "def gather("))


@pytest.mark.parametrize("words", [(), ("--no-check",)])
def test_a_gather_that_fails_on_some_rows(train: Train, words: tuple[str, ...]) -> None:
    """The row, the error and the line that raised it; without checks at the step that wanted the row."""
    bad = BAD_ROW + GATHER
    code, said, text = train({GATHER: bad}, *words, num_steps=80)
    assert code == 2, said
    assert line_of(text, "def gather(") in said
    assert line_of(text, "if 300 in ids") in said
    assert re.search(r"row 300\b", said)
    assert "KeyError: 'no such piece'" in said
    assert "Traceback" not in said
    assert "report a bug" not in said


def test_a_gather_that_fails_in_a_process_of_its_own(train: Train) -> None:
    bad = BAD_ROW + GATHER
    there = '    gathers_in = "process"\n\n    def __init__(self, data, context):'
    changes = {GATHER: bad, "    def __init__(self, data, context):": there}
    code, said, text = train(changes, "--no-check", "system.data_workers=1", num_steps=80)
    assert code == 2, said
    assert line_of(text, "if 300 in ids") in said
    assert re.search(r"row 300\b", said)


@pytest.mark.parametrize("line", ["pass", "self.fingerprint = None", "self.fingerprint = 7", "self.fingerprint = ''"])
def test_a_stream_without_a_fingerprint(train: Train, line: str) -> None:
    given = 'self.fingerprint = f"{hashlib.sha256(data.tobytes()).hexdigest()[:16]}/rows-{context}"'
    code, said, text = train({given: line})
    assert_one_sentence(code, said, line_of(text, "class Rows("))
    assert "fingerprint" in said


def test_a_loss_that_returns_something_else_later(train: Train) -> None:
    code, said, text = train({RETURN: f"if draw.step == 3: return each.sum()\n            {RETURN}"})
    assert code == 2, said
    assert line_of(text, "def loss(") in said
    assert "Traceback" not in said


@pytest.mark.parametrize("returned", ['{"accuracy": 0.5}', '{"accuracy": batch["bytes"].float().mean()}', "None"])
def test_a_measure_that_is_no_sum_and_count(train: Train, returned: str) -> None:
    measure = f"def measure(self, model, batch, draw):\n        return {returned}\n\n    def sample(self, model, draw):"
    code, said, text = train({"def sample(self, model, draw):": measure})
    assert code == 2, said
    assert line_of(text, "def measure(") in said
    assert "Traceback" not in said
