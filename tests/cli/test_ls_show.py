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
from rung.runs.record import Record, amend, append_event


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
    assert json.loads(ask(ls, root, "--status", "running", "--json").output) == []
    assert str(root / "none") in ask(ls, root / "none").output
    assert json.loads(ask(ls, root / "none", "--json").output) == []
    with pytest.raises(RunError, match="piano"):
        ask(ls, root, "pino")


def test_ls_json_has_all_digits(root: Path) -> None:
    first = json.loads(ask(ls, root, "piano", "--json").output)[0]
    assert first["best"]["loss"] == 0.1 + 0.2
    assert (first["id"], first["status"], first["step"], first["seed"]) == ("piano/1", "crashed", 2, 7)


def test_ls_goes_on_past_a_run_it_cannot_read(root: Path) -> None:
    amend(root / "piano/1", schema=99)
    result = ask(ls, root)
    assert "piano/2" in result.stdout
    assert "piano/1" in result.stderr


def test_show_tells_the_story(root: Path) -> None:
    text = ask(show, root, "piano/1").output
    for part in [
        "piano/1  piano tiny  crashed",
        "rung train piano 'why=a b'",
        "val loss 0.3000 at step 2",
        "lr.learning_rate  0.0001  command line",
        "samples/00000003/one.txt  a caption",
        "targets_per_step 4096",
        f"rung resume {root}/piano/1",
    ]:
        assert part in text
    assert "lr.schedule" not in text
    rows = [line.split() for line in text.splitlines() if " val " in line and "best" not in line]
    assert rows == [["2", "val", "0.3000", "17"], ["3", "val", "NaN", "17"]]
    assert "resume" not in ask(show, root, "piano").output


def test_show_json(root: Path) -> None:
    shown = json.loads(ask(show, root, "piano/best", "--json").output)
    assert shown["evals"][1]["loss"] == "NaN"
    assert shown["config"]["lr"]["learning_rate"] == 1e-4
    assert shown["events"][-1]["kind"] == "end"
    assert shown["disk_bytes"] > 1000


def listed(root: Path, *args: str) -> list[str]:
    return [run["id"] for run in json.loads(ask(ls, root, *args, "--json").output)]


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Two seeds of one setting, one of another whose loss is NaN, and a run of another experiment."""
    root = tmp_path / "many"
    for number, (rate, seed, loss) in enumerate([(1e-3, 1, 2.0), (1e-3, 2, 3.0), (1e-4, 1, math.nan)], start=1):
        record = Record.create(
            root, "piano", recipe="piano", preset="tiny", command=[], seed=seed,
            config={"seed": seed, "lr": {"learning_rate": rate}, "optimizer": {"max_iters": "40", "nesterov": True}},
            sources={}, derived={"parameters": 1000 * number}, data={"train": {"fingerprint": "7c"}},
            why=f"Accumulate {number}", tags=["baseline"] if number < 3 else ["new", "baseline-2"],
        )  # fmt: skip
        record.log(0, {"loss": 5.0 + number, "norm": float(number)})
        record.log(1, {"loss": loss, "eval/val/loss": loss})
        record.update(best={"step": 1, "set": "val", "loss": loss})
        record.finish("finished")
    Record.create(
        root, "text", recipe="text", preset=None, command=[], seed=1, config={"other": {"key": 1}}, sources={},
        derived={}, data={}, why="\x1b[31mred\u202e",
    ).finish("crashed")  # fmt: skip
    return root


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        (["lr.learning_rate>1e-4"], "12"),
        (["lr.learning_rate=0.0001"], "3"),
        (["lr.learning_rate>=1e-4", "lr.learning_rate<=1e-4"], "3"),
        (["optimizer.max_iters<100"], "123"),  # kept as a text
        (["optimizer.nesterov=true"], "123"),
        (["tag=baseline"], "12"),
        (["tag!=baseline"], "3t"),
        (["tag~^base"], "123"),
        (["why~ACCUM"], "123"),
        (["status=finished", "seed=1"], "13"),
        (["best<2.5"], "1"),
        (["best=nan"], "3"),
        (["max:norm>=2"], "23"),
        (["last:loss<2.5"], "1"),
        (["lr.learning_rate!=0.001"], "3t"),
        (["derived.parameters>1500"], "23"),
        (["created>2020-01-01"], "123t"),
        (["parent="], "123t"),
        (["recipe = text"], "t"),
        (["experiment=piano", "number>2"], "3"),
    ],
)
def test_where(many: Path, conditions: list[str], numbers: str) -> None:
    words = [word for text in conditions for word in ("--where", text)]
    assert listed(many, *words) == ["text/1" if number == "t" else f"piano/{number}" for number in numbers]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--where", "lr.learning_rat>1"], "lr.learning_rate"),
        (["--where", "stats=x"], "status"),
        (["--where", "norm>1"], "min:norm"),
        (["--where", "min:nrm>1"], "norm"),
        (["--where", "why"], "why"),
        (["--where", "why~("], "why"),
        (["--sort", "min:nrm"], "norm"),
        (["--columns", "status,sead"], "seed"),
        (["--tree", "--group"], "--group"),
    ],
)
def test_what_ls_cannot_do_is_said(many: Path, words: list[str], said: str) -> None:
    with pytest.raises(RunError, match=said):
        ask(ls, many, *words)


def test_sort_puts_what_is_unknown_last_either_way(many: Path) -> None:
    assert listed(many, "--sort", "best") == ["piano/1", "piano/2", "piano/3", "text/1"]
    assert listed(many, "--sort", "best", "--reverse") == ["piano/2", "piano/1", "piano/3", "text/1"]
    assert listed(many, "--sort", "min:loss", "--reverse", "piano") == ["piano/3", "piano/2", "piano/1"]
    assert listed(many, "--sort", "last") == ["piano/1", "piano/2", "piano/3", "text/1"]
    assert listed(many, "--sort", "lr.learning_rate")[0] == "piano/3"
    assert listed(many, "--sort", "created", "-n", "2") == ["piano/3", "text/1"]
    assert listed(many, "text", "piano") == ["text/1", "piano/1", "piano/2", "piano/3"]


def test_columns_and_changed_keys(many: Path) -> None:
    lines = ask(ls, many, "piano", "--columns", "max:norm,lr.learning_rate,tags").output.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["run", "max:norm", "lr.learning_rate", "tags"],
        ["piano/1", "1", "0.001", "baseline"],
    ]
    head = ask(ls, many, "piano", "--changed").output.splitlines()[0].split()
    assert head == ["run", "status", "step", "loss", "seed", "lr.learning_rate", "age", "why"]
    found = json.loads(ask(ls, many, "piano", "--changed", "--json").output)
    assert found[2]["columns"] == {"seed": 1, "lr.learning_rate": 1e-4}


def test_groups_over_seeds(many: Path) -> None:
    groups = json.loads(ask(ls, many, "piano", "--group", "--columns", "best,max:norm", "--json").output)
    assert [group["runs"] for group in groups] == [["piano/1", "piano/2"], ["piano/3"]]
    assert groups[0]["best"] == {"mean": 2.5, "sd": math.sqrt(0.5), "n": 2}
    assert groups[0]["max:norm"]["mean"] == 1.5
    assert groups[1]["best"] == {"mean": None, "sd": None, "n": 0}
    lines = ask(ls, many, "piano", "--group").output.splitlines()
    assert lines[1].split()[:7] == ["piano/1,2", "2", "finished", "2.5", "±", "0.71", "1"]
    amend(many / "piano/2", code={"kind": "git", "tree": "other"})
    assert len(json.loads(ask(ls, many, "piano", "--group", "--json").output)) == 3


def test_text_of_users_moves_no_cursor(many: Path) -> None:
    append_event(many / "text/1", "note", text="\x1b[2Jgone\n# not a heading")
    amend(many / "text/1", verdict={"word": "refuted", "text": "\x1b[0m", "unix_s": 0.0})
    for out in (ask(ls, many).output, ask(show, many, "text").output):
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "␛[31mred" in out


def test_show_metrics_notes_verdict_and_pins(many: Path) -> None:
    append_event(many / "piano/3", "note", text="line one\nline two")
    amend(
        many / "piano/3", verdict={"word": "refuted", "text": "no gain", "unix_s": 1.0}, parent="piano/1",
        ab={"id": "ab-1", "arm": "variant", "base": "piano/1", "overrides": ["lr.learning_rate=1e-4"]},
    )  # fmt: skip
    for name in ("00000010", "00000020"):
        (many / "piano/3/checkpoints" / name).mkdir(parents=True)
        (many / "piano/3/checkpoints" / name / "manifest.json").write_text("{}")
    (many / "piano/3/checkpoints/pinned").write_text("10\n")
    text = ask(show, many, "piano/3").output
    for part in [
        "refuted: no gain",
        "since piano/1",
        "lr.learning_rate=1e-4",
        "00000010 (pinned) 00000020",
        "line one\n                    line two",
    ]:
        assert part in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(("loss ", "norm "))}
    assert rows["loss"] == ["NaN", "8", "0", "8", "0", "2", "1"]
    assert rows["norm"] == ["3", "3", "0", "3", "0", "1", "0"]
    shown = json.loads(ask(show, many, "piano/3", "--json").output)
    assert shown["metrics"]["loss"]["last"] == "NaN"
    assert shown["metrics"]["loss"]["num_non_finite"] == 1
    assert shown["pinned"] == [10]
    assert shown["notes"][0]["text"] == "line one\nline two"
    assert "learning_rate" in shown["changed"]


def test_a_parent_that_is_gone_and_a_damaged_file_do_not_stop_show(many: Path) -> None:
    amend(many / "piano/3", parent="gone/7", verdict="a plain string")
    (many / "piano/3/checkpoints").mkdir()
    (many / "piano/3/checkpoints/pinned").write_text("x")
    text = ask(show, many, "piano/3").output
    assert "gone/7" in text
    assert "a plain string" in text
    (many / "piano/1/config.yaml").write_text("a: [\n")
    assert [line.split()[0] for line in ask(ls, many, "--where", "lr.learning_rate>0").output.splitlines()] == [
        "run",
        "piano/2",
        "piano/3",
    ]


def test_the_tree_has_every_run(many: Path) -> None:
    amend(many / "piano/3", parent="piano/1")
    out = ask(ls, many, "piano", "--tree").output
    assert next(line for line in out.splitlines() if "piano/3" in line).index("piano/3") > 0


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
        f"ls.command(['--sort', 'min:loss', '--group', '--runs', {str(root)!r}], standalone_mode=False)\n"
        f"show.command(['piano/1', '--runs', {str(root)!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "piano/2" in done.stdout
    assert "0.3000" in done.stdout


def test_show_puts_first_what_one_looks_for(root: Path) -> None:
    record = Record.create(
        root, "order", recipe="piano", preset=None, command=[], seed=1, config={}, sources={}, derived={}, data={}
    )
    names = ["probe/k", "logits/top1", "batch_hash", "lr", "norm", "loss"]
    record.log(0, dict.fromkeys(names, 2446881234567891))
    record.event("eval", step=0, results={"\x1b[31m": {"\x1b[32m": 1.0}})
    record.finish("finished")
    shown = CliRunner().invoke(show.command, ["order/1", "--all", "--runs", str(root)]).output
    assert "\x1b" not in shown
    table = [line.split() for line in shown.split("metrics (")[1].splitlines()[2:8]]
    assert [row[0] for row in table] == ["loss", "norm", "lr", "batch_hash", "logits/top1", "probe/k"]
    assert table[3][1] == "2446881234567891"  # all digits of a whole number
