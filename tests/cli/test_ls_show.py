"""If this fails, `rung ls` or `rung show` misreports a run, or needs torch to answer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rung.cli import ls, show
from rung.errors import RunError
from rung.runs.record import Record, amend


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for number, status in enumerate(["crashed", "finished"], start=1):
        record = Record.create(
            root, "piano", recipe="piano", preset="tiny", command=["rung", "train", "piano", "why=a b"], seed=7,
            config={"lr": {"learning_rate": 1e-4, "schedule": "cosine"}},
            sources={"lr.learning_rate": "command line", "lr.schedule": "default"},
            derived={"targets_per_step": 4096}, data={}, parent="piano/1" if number == 2 else None,
            why="a smaller\nrate" if number == 2 else None,
        )  # fmt: skip
        for step in range(3):
            record.log(step, {"loss": 1.0})
        record.event("eval", step=2, results={"val": {"loss": 0.1 + 0.2, "count": 17}})
        record.event("eval", step=3, results={"val": {"loss": math.nan, "count": 17}})
        record.event("save", step=3, path="checkpoints/3")
        record.add_sample(3, "one.txt", b"x", "a caption\nsecond line")
        record.update(best={"step": 2, "set": "val", "loss": 0.1 + 0.2, "checkpoint": "2"})
        record.finish(status)
    (root / "piano/1/checkpoints/3").mkdir(parents=True)
    (root / "piano/1/checkpoints/3/manifest.json").write_text("{}")
    return root


def ask(verb: object, root: Path, *args: str) -> Result:
    result = CliRunner().invoke(verb.command, [*args, "--runs", str(root)])  # type: ignore[attr-defined]
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_ls_lines_up(root: Path) -> None:
    lines = ask(ls, root).output.splitlines()
    assert lines[0].split() == ["run", "status", "step", "loss", "age", "why"]
    assert lines[1].split()[:4] == ["piano/1", "crashed", "2", "0.3000"]
    assert lines[2].endswith("from piano/1: a smaller rate")
    assert lines[1].index("crashed") == lines[2].index("finished") == lines[0].index("status")


def test_ls_filters(root: Path) -> None:
    assert [line.split()[0] for line in ask(ls, root, "--status", "finished").output.splitlines()] == ["run", "piano/2"]
    assert [r["id"] for r in json.loads(ask(ls, root, "-n", "1", "--json").output)] == ["piano/2"]
    assert ask(ls, root, "--status", "running").output == f"no such runs under {root}\n"
    assert ask(ls, root / "none").output == f"no runs under {root / 'none'}\n"
    assert json.loads(ask(ls, root / "none", "--json").output) == []
    with pytest.raises(RunError, match="did you mean piano"):
        ask(ls, root, "pino")


def test_ls_json_has_all_digits(root: Path) -> None:
    first = json.loads(ask(ls, root, "piano", "--json").output)[0]
    assert first["best"]["loss"] == 0.1 + 0.2
    assert (first["id"], first["status"], first["step"], first["seed"]) == ("piano/1", "crashed", 2, 7)


def test_ls_goes_on_past_a_run_it_cannot_read(root: Path) -> None:
    amend(root / "piano/1", schema=99)
    result = ask(ls, root)
    assert "piano/2" in result.stdout
    assert "newer rung" in result.stderr


def test_show_tells_the_story(root: Path) -> None:
    text = ask(show, root, "piano/1").output
    for part in [
        "piano/1  piano tiny  crashed",
        "rung train piano 'why=a b'",
        "loss 0.30000000000000004 on val at 2, checkpoint 2",
        "lr.learning_rate  0.0001  command line",
        "samples/00000003/one.txt  a caption",
        "checkpoints (1): 3",
        "targets_per_step 4096",
        "not kept",
        f"rung resume {root}/piano/1 (goes on from 3)",
    ]:
        assert part in text
    assert "lr.schedule" not in text
    rows = [line.split() for line in text.splitlines() if " val " in line and "on val" not in line]
    assert rows == [["2", "val", "0.30000000000000004", "17"], ["3", "val", "NaN", "17"]]
    assert "resume" not in ask(show, root, "piano").output


def test_show_json(root: Path) -> None:
    shown = json.loads(ask(show, root, "piano/best", "--json").output)
    assert shown["evals"][1]["loss"] == "NaN"
    assert shown["config"]["lr"]["learning_rate"] == 1e-4
    assert shown["events"][-1]["kind"] == "end"
    assert shown["disk_bytes"] > 1000


@pytest.mark.parametrize("verb", [ls, show])
def test_help_has_examples(verb: object) -> None:
    result = CliRunner().invoke(verb.command, ["--help"])  # type: ignore[attr-defined]
    assert result.exit_code == 0
    assert "Examples:\n    rung " in result.output


def test_both_work_where_torch_and_numpy_cannot_be_imported(root: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from rung.cli import ls, show\n"
        f"ls.command(['--runs', {str(root)!r}], standalone_mode=False)\n"
        f"show.command(['piano/1', '--runs', {str(root)!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "piano/2" in done.stdout
    assert "0.30000000000000004" in done.stdout
